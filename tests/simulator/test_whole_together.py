"""Whole clusters whose DP ranks step together: seeds that pass, one rank that is struck, and passes of the delayer."""

from collections import Counter
from pathlib import Path

import pytest

from tandem.core.commands import GatherLoad
from tandem.core.values import SECOND
from tandem.server.api.gathering import Gathering
from tandem.simulator.hunt import run_each
from tandem.simulator.report import SeedResult
from tandem.simulator.whole.cuts import draw_cut, draw_cuts, draw_together
from tandem.simulator.whole.engine import PlainEngine
from tandem.simulator.whole.kernel import START_NS, Process
from tandem.simulator.whole.options import draw_options
from tandem.simulator.whole.world import World, run_seed
from whole_strikes import Strike, frozen, killed, one_server, struck

CORPUS = (5, 39, 84, 130, 268)
STRIKE_NS = START_NS + 2 * SECOND
TOGETHER = {"dp_size": 2, "tp_size": 2, "enable_dp_attention": True}


@pytest.fixture(scope="module")
def results() -> dict[int, SeedResult]:
    return {result.seed: result for result in run_each(CORPUS, run_seed, are_long=True)}


@pytest.mark.parametrize("seed", CORPUS)
def test_every_request_of_ranks_that_step_together_ends_as_promised(results: dict[int, SeedResult], seed: int) -> None:
    result = results[seed]
    assert draw_together(seed)[0]
    assert not result.invariant, f"{result.line}: {result.detail}"
    assert result.num_finished > 0


def test_the_seeds_are_of_every_kind() -> None:
    drawn = {seed: draw_together(seed) for seed in range(1000)}
    assert 50 < sum(bool(flags) for flags, _ in drawn.values()) < 150, "a minority"
    assert {flags["dp_size"] for flags, _ in drawn.values() if flags} == {2, 3}
    for seed in (seed for seed, (flags, _) in drawn.items() if flags):
        assert not draw_cut(seed)
        assert draw_cuts(seed)[0] == draw_cuts(seed)[1]
    kinds = {(draw_options(seed).layout, draw_together(seed)[0]["dp_size"]) for seed in CORPUS}
    assert {("unified", 2), ("pairs", 2), ("pairs", 3)} <= kinds
    assert any(draw_together(seed)[1] for seed in CORPUS)


def test_ranks_go_along_with_each_other_and_prompts_wait_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What no checker asks for: there are idle batches, and passes to which every rank gives its snapshot."""
    monkeypatch.chdir(tmp_path)
    seen: Counter[str] = Counter()
    accompany, say = PlainEngine.accompany, Gathering.say

    def count_step(engine: PlainEngine) -> None:
        seen["idle"] += 1
        accompany(engine)

    def count_word(gathering: Gathering, rank: int, command: GatherLoad) -> None:
        seen[f"rank {rank} {'wants' if command.number is None else 'answers'}"] += 1
        say(gathering, rank, command)

    monkeypatch.setattr(PlainEngine, "accompany", count_step)
    monkeypatch.setattr(Gathering, "say", count_word)
    result = World(one_server(**TOGETHER, enable_prefill_delayer=True, prefill_delayer_max_delay_passes=4)).run()
    assert not result.invariant, result.detail
    assert {"idle", "rank 0 wants", "rank 1 wants", "rank 0 answers", "rank 1 answers"} <= set(seen)


def without_memory(world: World, process: Process) -> None:
    (engine,) = [one for one in world.engines if one._shards.group.mlp.shard.rank == 1]
    engine.fails_next = True


@pytest.mark.parametrize(
    ("strike", "reason"),
    [
        (killed, "the worker process was killed by signal SIGKILL"),
        (frozen, "the worker process hangs: no answer for "),
        (without_memory, "the worker process failed in batch"),
    ],
)
def test_a_rank_that_is_struck_ends_them_all_and_is_named(
    strike: Strike, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    world = World(one_server(**TOGETHER))
    world.kernel.at(STRIKE_NS, lambda: struck(world, strike))
    result = world.run()
    assert not result.invariant, result.detail
    lost = [answer.error for answer in world.answers if answer.error is not None]
    assert {error["code"] for error in lost} == {"worker_lost"}
    assert all(reason in error["message"] for error in lost)
    assert len(world.groups.blames) == 1
    assert "DP rank 1: " + reason in world.groups.blames[0]
