"""The production core under faults: clean seeds, the same log every time, restored nodes."""

from collections import Counter

import pytest

from tandem.simulator.faults.options import CLASSES, draw_options
from tandem.simulator.hunt import run_seed, run_seeds
from tandem.simulator.report import SeedResult
from tandem.simulator.world import World

SEEDS = range(1000, 1040)


@pytest.fixture(scope="module")
def results() -> list[SeedResult]:
    return list(run_seeds(SEEDS.start, len(SEEDS)))


def test_no_seed_breaks_an_invariant(results: list[SeedResult]) -> None:
    broken = [f"{result.line}  # {result.invariant}: {result.detail}" for result in results if result.invariant]
    assert not broken, "\n".join(broken)


def test_a_seed_is_worth_running(results: list[SeedResult]) -> None:
    """Thirty requests, two by two replicas and two thousand events in the median seed."""
    requests = sorted(result.num_requests for result in results)
    events = sorted(result.num_events for result in results)
    assert requests[len(requests) // 2] >= 30
    assert events[len(events) // 2] >= 2000
    options = map(draw_options, SEEDS)
    replicas = sorted(
        min(o.num_prefills * o.prefill_info.dp_size, o.num_decodes * o.decode_info.dp_size) for o in options
    )
    assert replicas[len(replicas) // 2] >= 2


def test_every_fault_class_happens(results: list[SeedResult]) -> None:
    happened = Counter[str]()
    for result in results:
        happened.update(result.faults)
    assert set(CLASSES) - set(happened) == set()


def test_most_requests_get_their_tokens_in_spite_of_everything(results: list[SeedResult]) -> None:
    finished = sum(result.num_finished for result in results)
    asked = sum(result.num_requests for result in results)
    assert finished > asked  # of two halves each


def test_two_seeds_give_two_logs(results: list[SeedResult]) -> None:
    assert len({result.log_hash for result in results}) == len(results)


@pytest.mark.parametrize("seed", [1, 2, 5, 11, 18, 26])
def test_nodes_that_are_replaced_by_their_snapshots_change_nothing(seed: int) -> None:
    logs = []
    for swap_every in (0, 7):
        world = World(draw_options(seed), swap_every=swap_every)
        world.schedule_all()
        world.run()
        logs.append(world.log.hexdigest())
    assert logs[0] == logs[1]


def test_many_processes_give_what_one_gives(results: list[SeedResult]) -> None:
    some = sorted(results, key=lambda result: result.num_events)[:4]
    assert [run_seed(result.seed) for result in some] == some
