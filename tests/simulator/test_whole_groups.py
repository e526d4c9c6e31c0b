"""Whole clusters whose replicas have several workers: seeds that pass, the same bytes, one worker that is struck."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.core.values import SECOND
from tandem.engine.parallel import OneShard, OneStage
from tandem.ranks import Rank, all_ranks
from tandem.simulator.hunt import run_each
from tandem.simulator.model import MASK
from tandem.simulator.oracle import Violation
from tandem.simulator.report import SeedResult
from tandem.simulator.whole.cuts import CONTEXTS, CUTS, UNCUT, draw_context, draw_cut, draw_cuts
from tandem.simulator.whole.groups import Groups, Replica
from tandem.simulator.whole.kernel import START_NS, Process
from tandem.simulator.whole.options import draw_options
from tandem.simulator.whole.shards import BEFORE, HERE, Shards
from tandem.simulator.whole.world import World, run_seed
from whole_strikes import Strike, frozen, killed, one_server, struck

CORPUS = [
    int(line.split()[0]) for line in Path(__file__).with_name("whole_groups.txt").read_text().splitlines() if line
]
UNEQUAL = (
    9,
    99,
)  # prefill and decode are cut differently; the second has found an attempt that was forgotten too early
CONTEXT = (1, 124, 174, 277)  # prefills whose workers share out the tokens of prompts, in every way that is drawn
LONG = (124, 174)
HASH_SEED = 217  # two stages: pairs, bytes one by one, and corrupted ones
STRIKE_NS = START_NS + 2 * SECOND


@pytest.fixture(scope="module")
def results() -> dict[int, SeedResult]:
    return {result.seed: result for result in run_each([*CORPUS, *UNEQUAL], run_seed, are_long=True)}


@pytest.mark.parametrize("seed", CORPUS)
def test_every_request_of_replicas_with_several_workers_ends_as_promised(
    results: dict[int, SeedResult], seed: int
) -> None:
    result = results[seed]
    assert draw_cut(seed)
    assert not result.invariant, f"{result.line}: {result.detail}"
    assert result.num_finished > 0


@pytest.mark.parametrize("seed", UNEQUAL)
def test_every_request_between_sides_that_are_cut_differently_ends_as_promised(
    results: dict[int, SeedResult], seed: int
) -> None:
    result = results[seed]
    prefill, decode, _ = draw_cuts(seed)
    assert prefill != decode
    assert not result.invariant, f"{result.line}: {result.detail}"
    assert result.num_finished > 0


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.slow if seed in LONG else ()) for seed in CONTEXT]
)
def test_every_request_to_a_prefill_that_shares_out_tokens_ends_as_promised(seed: int) -> None:
    result = run_seed(seed)
    assert draw_context(seed) != UNCUT
    assert not result.invariant, f"{result.line}: {result.detail}"
    assert result.num_finished > 0


def test_prefills_share_out_tokens_in_every_way_where_nothing_else_is_cut() -> None:
    drawn = {seed: draw_context(seed) for seed in range(1000)}
    found = [seed for seed, cut in drawn.items() if cut != UNCUT]
    assert {drawn[seed] for seed in found} == set(CONTEXTS)
    assert not any(draw_cut(seed) or draw_cuts(seed)[0] != draw_cuts(seed)[1] for seed in found)
    assert {draw_context(seed).sizes for seed in CONTEXT} >= {(1, 2, 2), (1, 1, 3), (2, 1, 2)}


def test_the_seeds_are_of_every_kind() -> None:
    flags = [draw_options(seed).flags for seed in CORPUS]
    kinds = {(one.get("tp_size", 1) > 1, one.get("pp_size", 1) > 1, one.get("dp_size", 1) > 1) for one in flags}
    assert {(True, False, False), (False, True, False)} <= kinds
    assert any(dp for _, _, dp in kinds)
    drawn = [draw_cut(seed) for seed in range(1000)]
    assert {(cut["tp_size"], cut["pp_size"]) for cut in drawn if cut} == set(CUTS)
    assert 100 < sum(map(bool, drawn)) < 250, "a minority"


def test_the_same_seed_of_several_workers_gives_the_same_bytes_whatever_the_hashes_of_this_process() -> None:
    script = f"from tandem.simulator.whole.world import run_seed\nprint(run_seed({HASH_SEED}).log_hash)"
    found = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONHASHSEED": "77"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert found == run_seed(HASH_SEED).log_hash


# --- one of several workers ------------------------------------------------------------------------------------------


def without_memory(world: World, process: Process) -> None:
    (engine,) = [one for one in world.engines if one._shards.rank.tp_rank == 1]
    engine.fails_next = True


@pytest.mark.parametrize(
    ("strike", "reason"),
    [
        (killed, "the worker TP1 PP0 process was killed by signal SIGKILL"),
        (frozen, "the worker TP1 PP0 process hangs: no answer for 4 s"),
        (without_memory, "the worker TP1 PP0 process failed in batch"),
    ],
)
def test_a_worker_that_is_struck_ends_its_replica_and_is_named(
    strike: Strike, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    world = World(one_server(tp_size=2))
    world.kernel.at(STRIKE_NS, lambda: struck(world, strike))
    result = world.run()
    assert not result.invariant, result.detail
    lost = [answer.error for answer in world.answers if answer.error is not None]
    assert {error["code"] for error in lost} == {"worker_lost"}
    assert all(reason in error["message"] for error in lost)
    assert len(world.groups.blames) == 1
    assert reason in world.groups.blames[0]


def test_workers_that_run_other_rows_and_ends_without_a_reason_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    world = World(one_server(tp_size=2))
    found: list[Violation] = []
    groups = Groups(world.kernel, world.faults, found.append)

    def program() -> None:
        replica, ranks = Replica(), all_ranks(2, 1)
        for rank, rows in zip(ranks, (b"1", b"2"), strict=True):
            groups.compare(replica, rank, rows)
        child = world.kernel.start("worker", lambda: None, host="127.0.0.1", parent=world.kernel.current().process)
        groups.names[ranks[1].name] = [child]
        groups.ends(f"ends: the {ranks[1].name} process was killed")
        world.faults.finish()
        groups.ends("ends: the worker process hangs")
        world.kernel.sleep(30)
        groups.ends("ends: the worker process hangs")

    world.kernel.start("server", program, host="127.0.0.1")
    world.kernel.run(START_NS + 60 * SECOND)
    assert [one.invariant for one in found] == ["S21", "blame", "blame"]


@pytest.mark.parametrize("size", [2, 3])
def test_what_one_shard_has_read_wrongly_is_wrong_for_all(size: int) -> None:
    right = 0x9E3779B97F4A7C15

    def together(*read: int) -> int:
        parts = [Shards(Rank(tp, size), OneShard(), OneStage())._part(number) for tp, number in enumerate(read)]
        return sum(parts) & MASK

    assert together(*[right] * size) == right
    for wrong in range(size):
        assert together(*(right + (shard == wrong) for shard in range(size))) != right
    assert (BEFORE + HERE, BEFORE * HERE != 0) == (1, True)
