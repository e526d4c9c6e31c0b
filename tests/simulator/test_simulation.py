"""The production core under faults: clean seeds, the same log every time, restored nodes, rare states."""

from collections import Counter

import pytest

from tandem.core.commands import FailRequest, FinishRequest
from tandem.simulator.faults.options import CLASSES, draw_options
from tandem.simulator.hunt import run_seed, run_seeds
from tandem.simulator.report import SeedResult
from tandem.simulator.world import World

SEEDS = range(1000, 1040)
RICH = (
    27,
    48,
    58,
    47,
    31,
    25,
    8,
    46,
)  # which reach all of COVERAGE; others follow when a change has moved what they do


COVERAGE = (  # what a simulation never reaches, it does not check
    "decode finished remote",
    "decode finished fallback",
    "prefill finished remote",
    "unified finished unified",
    "finished after a retraction or retry",
    "prefix cache hit",
    "retraction",
    "prefill retried: not_ready",
    "prefill retried: forced",
    "prefill retried: yield",
    "decode failed: aborted",
    "decode failed: deadline_exceeded",
    "decode failed: corrupt_pages",
    "decode failed: duplicate_room",
    "decode failed: layout_mismatch",
    "decode failed: queue_full",
    "decode failed: peer_lost",
    "decode failed: engine_failed",
    "decode failed: protocol",
    "prefill failed: aborted",
    "prefill failed: deadline_exceeded",
    "prefill failed: lease_expired",
    "prefill failed: peer_aborted",
    "prefill failed: peer_lost",
    "prefill failed: duplicate_room",
    "ended while waiting for peer",
    "ended while waiting for pages",
    "ended while waiting for slot",
    "ended while waiting for result_slot",
    "ended while waiting for window",
    "ended while waiting for landing",
    "ended while waiting for collection",
)


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


def test_rare_states_are_reached() -> None:
    reached = Counter[str]()

    def look(now, life, events, commands) -> None:  # type: ignore[no-untyped-def]
        for command in commands:
            match command:
                case FinishRequest():
                    reached[f"{life.replica.role} finished {command.path}"] += 1
                    reached["finished after a retraction or retry"] += command.retries > 0
                    reached["prefix cache hit"] += command.cached_tokens > 0
                case FailRequest():
                    reached[f"{life.replica.role} failed: {command.cause}"] += 1
                    reached[f"ended while waiting for {command.stage}"] += 1

    for seed in dict.fromkeys((*RICH, *range(60))):
        if all(reached[state] for state in COVERAGE):
            break
        world = World(draw_options(seed), trace=look)
        world.schedule_all()
        world.run()
        for replica in world.replicas.values():
            if replica.life is not None:
                counters = replica.life.node.state.counters
                reached["retraction"] += counters.retractions
                for reason, count in counters.prefill_retries.items():
                    reached[f"prefill retried: {reason}"] += count
    missing = [state for state in COVERAGE if not reached[state]]
    assert not missing, f"never reached: {missing}; reached: {dict(reached)}"
