"""Parts of the router's core, one at a time: its registry of workers, policies and rooms."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from tandem.core.router.pairing import Rooms, WorkerPair, num_prompts
from tandem.core.router.routing import Candidate, LeastLoad, RoundRobin
from tandem.core.router.worker_registry import (
    Health,
    HealthSettings,
    ProbeResult,
    RegisteredWorker,
    WorkerId,
    WorkerRegistry,
)
from tandem.core.settings import Role
from tandem.core.values import Nanos

SETTINGS = HealthSettings(interval_ns=Nanos(100), fast_interval_ns=Nanos(10), probe_timeout_ns=Nanos(50), misses=2)
W = WorkerId(0)


def worker(number: int, role: Role = Role.DECODE) -> RegisteredWorker:
    return RegisteredWorker(
        WorkerId(number), role, f"http://h{number}:1", f"h{number}", 8998 if role is Role.PREFILL else None
    )


def registry() -> WorkerRegistry:
    return WorkerRegistry([worker(0)], SETTINGS, Nanos(0))


def probe(workers: WorkerRegistry, result: ProbeResult, now: int) -> bool:
    assert workers.due(Nanos(now)) == [W]
    workers.probed(W, result, Nanos(now))
    return workers.health(W) is Health.DEAD


def test_a_worker_is_used_only_after_its_first_good_probe() -> None:
    workers = registry()
    assert workers.live(Role.DECODE) == []
    probe(workers, ProbeResult.OK, 0)
    assert workers.live(Role.DECODE) == [worker(0)]


def test_a_worker_that_starts_late_is_asked_often_until_it_is_there() -> None:
    workers = registry()
    for now in (0, 10, 20):
        probe(workers, ProbeResult.MISSED, now)
    assert workers.health(W) is Health.JOINING
    probe(workers, ProbeResult.OK, 30)
    assert workers.wake_at() == 130


@pytest.mark.parametrize(("told", "ports"), [(None, [8999, 8999, 9000]), (8998, [8998, 8998, 8998])])
def test_the_port_that_a_prefill_says_counts_where_the_router_was_told_none(told: int | None, ports: list[int]) -> None:
    prefill = structs.replace(worker(0, Role.PREFILL), bootstrap_port=told)
    workers = WorkerRegistry([prefill], SETTINGS, Nanos(0))
    for now, (said, port) in enumerate(zip((8999, None, 9000), ports, strict=True)):
        assert workers.due(Nanos(100 * now)) == [W]
        workers.probed(W, ProbeResult.OK, Nanos(100 * now), bootstrap_port=said)
        copy = WorkerRegistry([], SETTINGS, Nanos(0))
        copy.restore(workers.snapshot())
        for one in (workers, copy):
            assert [each.bootstrap_port for each in one.live(Role.PREFILL)] == [port]


def test_one_missed_probe_makes_suspect_and_two_make_dead() -> None:
    workers = registry()
    probe(workers, ProbeResult.OK, 0)
    assert not probe(workers, ProbeResult.MISSED, 100)
    assert workers.health(W) is Health.SUSPECT
    assert workers.live(Role.DECODE) == [worker(0)]
    assert probe(workers, ProbeResult.MISSED, 110)
    assert workers.live(Role.DECODE) == []
    probe(workers, ProbeResult.OK, 120)
    assert workers.health(W) is Health.LIVE


def test_a_good_probe_between_two_misses_starts_the_count_anew() -> None:
    workers = registry()
    for now, result in ((0, ProbeResult.OK), (100, ProbeResult.MISSED), (110, ProbeResult.OK)):
        probe(workers, result, now)
    assert not probe(workers, ProbeResult.MISSED, 210)


def test_a_worker_that_declines_gets_no_more_requests_but_is_not_silent() -> None:
    workers = registry()
    probe(workers, ProbeResult.OK, 0)
    assert probe(workers, ProbeResult.DECLINED, 100)
    assert workers.live(Role.DECODE) == []
    assert W not in workers.silent()


def test_a_refused_connection_is_death_at_once() -> None:
    workers = registry()
    probe(workers, ProbeResult.OK, 0)
    workers.refused(W, Nanos(50))
    assert workers.health(W) is Health.DEAD
    assert workers.silent() == {W: 50}
    assert workers.wake_at() == 60


def test_who_has_been_there_and_is_not_dead_is_told_of_an_abort() -> None:
    workers = registry()
    assert workers.answering() == [], "it may never have been there"
    probe(workers, ProbeResult.OK, 0)
    assert workers.answering() == [worker(0)]
    probe(workers, ProbeResult.DECLINED, 100)
    assert workers.answering() == [worker(0)], "it has requests, though it gets no more"
    workers.refused(W, Nanos(150))
    assert workers.answering() == []


def test_a_good_probe_from_before_the_refusal_does_not_revive() -> None:
    workers = registry()
    probe(workers, ProbeResult.OK, 0)
    assert workers.due(Nanos(100)) == [W]
    workers.refused(W, Nanos(105))
    workers.probed(W, ProbeResult.OK, Nanos(106))
    assert workers.health(W) is Health.DEAD


def test_a_probe_without_an_answer_is_overdue_and_its_late_answer_is_ignored() -> None:
    workers = registry()
    probe(workers, ProbeResult.OK, 0)
    assert workers.due(Nanos(100)) == [W]
    assert workers.due(Nanos(140)) == []
    assert workers.overdue(Nanos(149)) == []
    assert workers.overdue(Nanos(150)) == [W]
    workers.probed(W, ProbeResult.MISSED, Nanos(150))
    workers.probed(W, ProbeResult.OK, Nanos(151))
    assert workers.health(W) is Health.SUSPECT


def candidates(*active: int) -> list[Candidate]:
    return [Candidate(WorkerId(number), count) for number, count in enumerate(active)]


def test_round_robin_takes_turns_and_goes_on_when_one_is_missing() -> None:
    policy = RoundRobin()
    assert [policy.choose(candidates(0, 0, 0), ()) for _ in range(4)] == [0, 1, 2, 0]
    assert policy.choose([Candidate(WorkerId(0), 0), Candidate(WorkerId(2), 0)], ()) == 2


def test_least_load_takes_the_idle_one_and_takes_turns_among_equals() -> None:
    policy = LeastLoad()
    assert policy.choose(candidates(3, 0, 2), ()) == 1
    assert [policy.choose(candidates(1, 1, 1), ()) for _ in range(3)] == [0, 2, 1]


def test_least_load_forgets_workers_that_were_chosen_long_ago() -> None:
    policy, most = LeastLoad(), LeastLoad.MOST_REMEMBERED
    for worker in range(3 * most):  # each is added and goes
        policy.choose([Candidate(WorkerId(worker), 0)], ())
    assert len(policy.snapshot()) < 8 * most
    assert policy.choose([Candidate(WorkerId(number), 0) for number in (2 * most, 1, 3 * most - 1)], ()) == 1


def test_rooms_are_63_bits_never_zero_and_never_those_that_are_live() -> None:
    source = iter([0, 1 << 63, 7, 7 + (1 << 63), 7, 9, 7])
    rooms = Rooms(lambda: next(source))
    assert rooms.open(1) == (7,)
    assert rooms.open(1) == (9,)
    rooms.close((7,))
    assert rooms.open(1) == (7,)
    assert rooms.num_live() == 2


def test_a_source_that_repeats_itself_for_ever_is_noticed() -> None:
    rooms = Rooms(lambda: 5)
    rooms.open(1)
    with pytest.raises(AssertionError, match="repeats"):
        rooms.open(1)


@given(st.lists(st.integers(0, 7), max_size=60))
def test_live_rooms_are_distinct_whatever_the_source_gives(drawn: list[int]) -> None:
    source = itertools.chain(drawn, itertools.count(8))
    rooms = Rooms(lambda: next(source))
    opened = [room for _ in range(6) for room in rooms.open(3)]
    assert len(set(opened)) == len(opened) == rooms.num_live()


@pytest.mark.parametrize(
    ("path", "body", "count"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, None),
        ("/v1/completions", {"prompt": "x"}, None),
        ("/v1/completions", {"prompt": [1, 2, 3]}, None),
        ("/v1/completions", {"prompt": []}, None),
        ("/v1/completions", {"prompt": ["a"]}, 1),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2}, 2),
        ("/v1/completions", {"prompt": [[1, 2], [3]]}, 2),
        ("/generate", {"text": ["a", "b", "c"], "input_ids": None}, 3),
        ("/generate", {"input_ids": [[1], [2]]}, 2),
        ("/generate", {"input_ids": [1, 2]}, None),
        # fields that this endpoint does not have
        ("/v1/chat/completions", {"prompt": ["a", "b"]}, None),
        ("/v1/messages", {"text": ["a", "b"]}, None),
        ("/v1/responses", {"input": "x", "input_ids": [[1], [2]]}, None),
        ("/v1/completions", {"prompt": "x", "text": ["a", "b"]}, None),
        ("/generate", {"text": "x", "prompt": ["a", "b"]}, None),
    ],
)
def test_prompts_are_counted_as_lists_and_samples_do_not_multiply(
    path: str, body: dict[str, object], count: int | None
) -> None:
    assert num_prompts(path, body) == count


def test_the_fields_of_a_batch_are_lists_and_those_of_one_prompt_are_scalars() -> None:
    one = WorkerPair(worker(0, Role.PREFILL), worker(1), rooms=(5,), is_batch=False)
    two = WorkerPair(worker(0, Role.PREFILL), worker(1), rooms=(5, 6), is_batch=True)
    assert one.fields() == {"bootstrap_host": "h0", "bootstrap_port": 8998, "bootstrap_room": 5}
    assert two.fields() == {
        "bootstrap_host": ["h0", "h0"],
        "bootstrap_port": [8998, 8998],
        "bootstrap_room": [5, 6],
    }
