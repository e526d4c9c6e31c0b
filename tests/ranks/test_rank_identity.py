"""However a model is spread over workers, it says the same tokens: tensor and pipeline parallel, alone and in pairs.

Real processes with the bundled model; the reference is transformers. A sample of the combinations is in `make test`,
all of them are in `make ranks`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, Server, cluster, eventually
from kept_servers import KeptServers, flush_cache, kept_servers
from rank_gauges import worker_gauges
from reference import CHUNK, ask_all, ask_each, assert_same_tokens, real_prompts

from tandem.core.batch import BatchKind
from tandem.core.commands import LaunchBatch
from tandem.core.scheduler.node import EngineNode
from tandem.server.node.record import records_at, steps_from

NUM_PROMPTS = 24
FLAGS = ("--chunked-prefill-size", str(CHUNK), "--max-total-tokens", "16384")
FAULTS = ("--enable-fault-injection",)
FAILING = 0.7  # of the transfers, one draw for each worker
NO_OVERLAP = ("--disable-overlap-schedule",)
APART = ("--no-enable-mixed-chunk",)  # prompts and decode rows in batches of their own
EXACT = ("--deterministic",)
DIVIDED = ("--pp-min-micro-batch-size", "1")  # two who decode are in two micro-batches
RETRY = ("--optimistic-prefill-policy", "retry")
LATE = ("--disaggregation-decode-allocation-policy", "prefill_complete")


@dataclass(frozen=True)
class Grid:
    """How a server is cut, and what else it is told."""

    tp: int
    pp: int
    flags: tuple[str, ...] = ()
    cp: int = 1

    @property
    def words(self) -> tuple[str, ...]:
        return ("--tp", str(self.tp), "--pp", str(self.pp), "--attn-cp-size", str(self.cp), *self.flags)

    def __str__(self) -> str:
        context = [f"cp{self.cp}"] * (self.cp > 1)
        return "-".join([f"tp{self.tp}", f"pp{self.pp}", *context, *(flag.strip("-") for flag in self.flags)])


def slow(*values: object) -> list[Any]:  # pytest does not name the type
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


UNIFIED = (Grid(2, 1), Grid(1, 2, (*APART, *DIVIDED)))
MORE_UNIFIED = slow(
    Grid(4, 1),
    Grid(1, 4),
    Grid(1, 4, DIVIDED),
    Grid(2, 2, DIVIDED),
    Grid(2, 2, NO_OVERLAP),
    Grid(1, 4, NO_OVERLAP),
    Grid(2, 2, APART),
    Grid(1, 1, APART, cp=2),
    Grid(2, 2, cp=2),
    Grid(2, 2, (*EXACT, *DIVIDED)),
)
PAIRS = (
    (Grid(1, 2, RETRY), Grid(1, 2, DIVIDED)),
    (Grid(2, 1), Grid(1, 2)),
    (Grid(1, 1, cp=2), Grid(1, 1)),
)
# Cut alike and differently: split and joined by heads, by layers, by both; and with heads that several workers have.
PREFILLS = (Grid(1, 1), Grid(2, 1), Grid(4, 1), Grid(1, 2, RETRY), Grid(1, 4), Grid(2, 2, RETRY))
DECODES = (
    Grid(1, 1),
    Grid(2, 1),
    Grid(4, 1),
    Grid(1, 2, NO_OVERLAP),
    Grid(1, 4, DIVIDED),
    Grid(2, 2, (*APART, *DIVIDED)),
)
OTHER_PREFILLS = {  # by who pulls from them
    Grid(1, 1): (Grid(2, 1, cp=2), Grid(1, 2, cp=2)),  # the tokens of prompts are shared out
    Grid(2, 1): (Grid(3, 1), Grid(1, 1, cp=3)),
    Grid(4, 1): (Grid(1, 1, NO_OVERLAP, cp=2),),
    Grid(1, 2, NO_OVERLAP): (Grid(2, 2, RETRY, cp=2), Grid(1, 2)),
    Grid(2, 2, (*APART, *DIVIDED)): (Grid(2, 2),),
}
MORE_PAIRS = slow(
    *((prefill, decode) for decode in DECODES for prefill in (*PREFILLS, *OTHER_PREFILLS.get(decode, ()))),
    (Grid(2, 2, RETRY), Grid(1, 4, NO_OVERLAP)),
    (Grid(2, 1, RETRY), Grid(1, 2, LATE)),
    (Grid(1, 1, cp=2), Grid(2, 1, (*LATE, *NO_OVERLAP))),
    # Depth 1: a batch has returned before the next one begins, on prefill too
    (Grid(2, 1, NO_OVERLAP), Grid(1, 1)),
    (Grid(1, 2, NO_OVERLAP), Grid(1, 1)),
    (Grid(2, 1, NO_OVERLAP), Grid(1, 2, NO_OVERLAP)),
)
EXACT_PAIRS = ((Grid(2, 1, EXACT), Grid(1, 1, EXACT)), *slow((Grid(1, 2, EXACT), Grid(2, 1, EXACT))))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return real_prompts(NUM_PROMPTS)


@pytest.fixture(scope="module")
def kept() -> Iterator[KeptServers]:
    with kept_servers(*FLAGS, *FAULTS) as it:
        yield it


@pytest.mark.parametrize("grid", [*UNIFIED, *MORE_UNIFIED], ids=str)
def test_one_engine_of_several_workers_says_what_transformers_says(prompts: list[list[int]], grid: Grid) -> None:
    with cluster(unified=True, flags=[*FLAGS, *grid.words]) as it:
        assert it.unified is not None
        assert_same_tokens(prompts, ask_each(it.unified, prompts), path="unified")
        assert_idle([it.unified])


def test_streams_are_in_as_many_micro_batches_as_there_are_stages_and_say_what_each_says_alone() -> None:
    prompts = [f"Tom has {n} apples and buys {n + 3} more. How many apples does he have?" for n in range(6)]
    sampling = {"ignore_eos": True}
    with cluster(unified=True, flags=[*FLAGS, "--pp", "2", *DIVIDED, *EXACT]) as it:
        server = it.unified
        assert server is not None
        assert server.state()["micro_batches"] == [0, 0]
        alone = [server.generate(one, max_new_tokens=300, sampling_params=sampling)["output_ids"] for one in prompts]
        streams = [server.stream(one, max_new_tokens=300, sampling_params=sampling) for one in prompts]
        eventually(lambda: server.state()["micro_batches"] == [3, 3], what=server.state)
        together = [stream.rest()[-1]["output_ids"] for stream in streams]
        assert together == alone
        assert_idle([server])


def test_prompts_and_those_who_decode_share_batches_of_stages(tmp_path: Path) -> None:
    """Where each stage has a micro-batch: the next one that may go on while a prompt of many chunks waits has both."""
    words = Grid(1, 2, DIVIDED).words
    with cluster(unified=True, flags=[*FLAGS, *words, "--flight-record", str(tmp_path)]) as it:
        assert it.unified is not None
        asked = {"max_new_tokens": 4000, "sampling_params": {"ignore_eos": True}}
        streams = [it.unified.stream([40, 41, 42 + number], **asked) for number in range(2)]
        assert all(stream.next() is not None for stream in streams)
        it.unified.generate([50 + number % 400 for number in range(20 * CHUNK)], max_new_tokens=1)
        for stream in streams:
            stream.close()
        assert_idle([it.unified])
    (record,) = records_at(tmp_path)
    steps = steps_from(record, 0, EngineNode)
    launched = [command.plan for step in steps for command in step.got.commands if isinstance(command, LaunchBatch)]
    assert {plan.kind for plan in launched} == set(BatchKind)


@pytest.mark.parametrize("pair", [*PAIRS, *MORE_PAIRS, *EXACT_PAIRS], ids=lambda pair: "--".join(map(str, pair)))
def test_a_pair_of_several_workers_each_says_what_transformers_says(
    prompts: list[list[int]], kept: KeptServers, pair: tuple[Grid, Grid]
) -> None:
    """And says it again while transfers fail."""
    prefill, decode = pair
    with kept.pair(prefill.words, decode.words) as it:
        assert_says_what_transformers_says(it, prompts, prefill, decode)


@pytest.mark.slow
@pytest.mark.parametrize("decode", [Grid(1, 1), Grid(1, 2)], ids=str)
def test_a_pair_of_several_workers_with_staged_kv_says_what_transformers_says(
    prompts: list[list[int]], decode: Grid, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each page the workers of one side have other parts than those of the other."""
    monkeypatch.setenv("TANDEM_TEST_STAGED_KV", "1")
    prefill = Grid(2, 1)
    words = {"prefill_flags": prefill.words, "decode_flags": decode.words}
    with cluster(prefills=1, decodes=1, flags=[*FLAGS, *FAULTS], **words) as it:
        assert_says_what_transformers_says(it, prompts, prefill, decode)
        assert "(staged)" in it.prefills[0].log
        assert "(staged)" in it.decodes[0].log


def test_every_prefill_is_tried_with_every_decode() -> None:
    """That shards and stages make of at most four workers, and are not one worker each."""
    sizes = [(tp, pp) for tp in (1, 2, 4) for pp in (1, 2, 4) if tp * pp <= 4]
    pairs = [*PAIRS, *(param.values[0] for param in MORE_PAIRS)]
    tried = {((left.tp, left.pp), (right.tp, right.pp)) for left, right in pairs if left.cp == 1}
    assert {(left, right) for left in sizes for right in sizes if (left, right) != ((1, 1), (1, 1))} <= tried


def assert_says_what_transformers_says(it: Cluster, prompts: list[list[int]], prefill: Grid, decode: Grid) -> None:
    """With nothing cached, and again while transfers fail; and nothing is held afterwards."""
    assert it.router is not None
    assert_same_tokens(prompts, ask_each(it.router, prompts), path="remote")
    assert_idle(it.servers)
    for server in it.servers:
        flush_cache(server)
    it.decodes[0].call("PUT", "/debug/faults", {"disagg_failure_prob": FAILING})
    some = prompts[::2]
    answers = ask_all(it.router, some)
    assert "fallback" in {answer["meta_info"]["path"] for answer in answers}
    for path in ("remote", "fallback"):
        took = [number for number, answer in enumerate(answers) if answer["meta_info"]["path"] == path]
        assert_same_tokens([some[number] for number in took], [answers[number] for number in took], path=path)
    it.decodes[0].call("PUT", "/debug/faults", {"disagg_failure_prob": 0.0})
    assert_idle(it.servers)
    assert_each_worker_counts_for_itself(it, prefill, decode)


def assert_idle(servers: Sequence[Server]) -> None:
    for server in servers:
        eventually(server.is_idle, what=server.state)


def assert_each_worker_counts_for_itself(it: Cluster, prefill: Grid, decode: Grid) -> None:
    for server, grid in ((it.prefills[0], prefill), (it.decodes[0], decode)):
        ranks = {(str(number), str(pp)) for number in range(grid.tp * grid.cp) for pp in range(grid.pp)}
        for name in ("live_rooms", "pinned_pages", "open_transfers"):
            assert worker_gauges(server, name) == dict.fromkeys(ranks, 0.0)
