"""The puller of pages alone: told by hand what becomes of its jobs."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from puller_world import MAX_JOBS, ONE, PEER, TIMEOUT_NS, TWO, Job, World
from tandem.core.events import PagesLanded, TransferDrained, TransferFailed
from tandem.core.values import SECOND, Cause, Incarnation, RequestId, ShardId
from tandem.transfer.jobs import Dial, PeerAddress, Receive, Trouble
from tandem.transfer.port import Held
from tandem.transfer.protocol import MAX_READ_PAGES, REFUSALS, Status
from tandem.transfer.puller import (
    BUSY_PATIENCE,
    BUSY_PAUSE_NS,
    LANDED_REPORT_INTERVAL_NS,
    MAX_BUSY_PAUSE_NS,
    STALLED_AFTER_NS,
)


def peers(count: int) -> list[Incarnation]:
    return [Incarnation(f"prefill-{number}", "1") for number in range(count)]


# --- one attempt -----------------------------------------------------------------------------------------------------


def test_a_pull_dials_reads_and_is_forgotten_and_its_link_is_used_again() -> None:
    world = World()
    world.pull()
    job = world.receive()
    assert (job.start, job.stop, job.link, job.was_idle) == (0, 3, 1, False)
    assert world.puller.held() == Held(live_rooms=1, pinned_pages=3, open_transfers=1)
    assert world.land(job, 3)
    assert world.puller.received(job, world.now) is None
    assert world.events == [PagesLanded(ONE, 0, ShardId(0), 3)]
    assert world.puller.held() == Held()
    world.pull(TWO)
    again = world.puller.next_job(world.now)
    assert isinstance(again, Receive)
    assert (again.link, again.was_idle) == (1, True)


def test_a_read_names_so_many_pages_at_most_and_the_next_one_follows_on_the_same_link() -> None:
    world = World()
    world.pull(count=MAX_READ_PAGES + 1)
    job = world.receive()
    assert (job.start, job.stop) == (0, MAX_READ_PAGES)
    world.land(job, MAX_READ_PAGES)
    following = world.puller.received(job, world.now)
    assert following is not None
    assert (following.start, following.stop, following.link) == (MAX_READ_PAGES, MAX_READ_PAGES + 1, job.link)


def test_a_later_command_goes_on_where_the_one_before_ends() -> None:
    world = World()
    world.pull(count=2)
    job = world.receive()
    world.pull(count=2, first_wanted=2)
    world.land(job, 2)
    following = world.puller.received(job, world.now)
    assert following is not None
    assert following.command.first_wanted == 2
    world.land(following, 2)
    assert world.puller.received(following, world.now) is None
    assert world.events[-1] == PagesLanded(ONE, 0, ShardId(0), 4)


def test_watermarks_are_told_at_most_once_per_interval_and_at_the_end() -> None:
    world = World()
    world.pull(count=5)
    job = world.receive()
    told = []
    for step in (0, LANDED_REPORT_INTERVAL_NS, LANDED_REPORT_INTERVAL_NS - 1, 1, 0):
        world.now += step
        world.land(job, 1)
        told.append(world.said(PagesLanded))
    assert told == [0, 1, 1, 2, 3]


def test_cancel_drains_at_once_what_no_byte_can_reach() -> None:
    world = World()
    world.cancel()
    world.pull(TWO)
    world.cancel(TWO)
    assert world.events == [TransferDrained(request, 0, ShardId(0)) for request in (ONE, TWO)]
    assert world.puller.next_job(world.now) is None
    world.pull(TWO, count=1)
    assert world.puller.held() == Held(), "an attempt that was cancelled begins no more"
    world.cancel(TWO)
    assert world.said(TransferDrained) == 2


def test_a_cancelled_attempt_is_drained_when_its_last_job_has_ended_and_not_before() -> None:
    world = World()
    world.pull()
    job = world.receive()
    world.cancel()
    assert world.is_cut == [job.link]
    assert world.puller.held().open_transfers == 1
    assert not world.land(job, 1), "what comes now is not wanted"
    assert not world.events
    world.fail(job, Trouble.BROKEN)
    assert world.events == [TransferDrained(ONE, 0, ShardId(0))]
    assert world.is_closed == [job.link]
    assert world.puller.held() == Held()


def test_who_is_cancelled_while_it_dials_is_never_armed() -> None:
    world = World()
    world.pull()
    job = world.dial()
    world.cancel()
    assert world.events == [TransferDrained(ONE, 0, ShardId(0))]
    assert world.welcome(job) is None
    assert world.is_closed == [1]
    assert world.puller.num_jobs == 0
    assert world.said(TransferDrained) == 1


def test_a_cancelled_attempt_whose_read_came_whole_is_drained_too() -> None:
    world = World()
    world.pull()
    job = world.receive()
    world.land(job, 3)
    world.cancel()
    assert world.puller.received(job, world.now) is None
    assert world.events[-1] == TransferDrained(ONE, 0, ShardId(0))
    assert world.is_closed == [job.link], "it was cut: nobody can use it"


def test_cancel_of_one_that_failed_is_answered_behind_its_failure_and_once() -> None:
    world = World()
    world.pull()
    world.fail(world.receive(), Trouble.CORRUPT)
    world.cancel()
    world.cancel()
    assert [type(event) for event in world.events] == [TransferFailed, TransferDrained]
    world.pull()
    assert world.puller.next_job(world.now) is None


@pytest.mark.parametrize("status", sorted(set(Status) - {Status.OK, Status.BUSY}))
def test_a_refusal_means_what_the_table_says(status: Status) -> None:
    for is_dial in (True, False):
        world = World()
        world.pull()
        world.fail(world.dial() if is_dial else world.receive(), Trouble.REFUSED, status)
        assert (world.failure().cause, world.failure().detail) == REFUSALS[status]


@pytest.mark.parametrize(
    ("trouble", "is_dial", "cause", "word"),
    [
        (Trouble.BROKEN, True, Cause.PEER_LOST, "so it is"),
        (Trouble.FROZEN, True, Cause.PEER_LOST, "so it is"),
        (Trouble.FROZEN, False, Cause.PEER_LOST, "so it is"),
        (Trouble.NONSENSE, True, Cause.TRANSFER_FAILED, "not a data plane"),
        (Trouble.NONSENSE, False, Cause.TRANSFER_FAILED, "nonsense"),
        (Trouble.NOT_PROVEN, True, Cause.TRANSFER_FAILED, "so it is"),
        (Trouble.CORRUPT, False, Cause.CORRUPT_PAGES, "digest"),
        (Trouble.OURS, False, Cause.TRANSFER_FAILED, "so it is"),
    ],
)
def test_a_trouble_ends_the_attempt_with_its_cause(trouble: Trouble, is_dial: bool, cause: Cause, word: str) -> None:
    world = World()
    world.pull()
    world.fail(world.dial() if is_dial else world.receive(), trouble)
    assert world.failure().cause is cause
    assert word in world.failure().detail
    assert world.jobs() == []


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"digests": ()}, "no digests"),
        ({"secrets": ()}, "no secret"),
        ({"digests": (bytes(23),)}, "another number"),
        ({"secrets": (bytes(15),)}, "15 bytes"),
        ({"generations": (0, -1, 0)}, "cannot be"),
        ({"sources": (0, 1, 1 << 64)}, "cannot be"),
        ({"peer": Incarnation("nobody", "1")}, "no address"),
    ],
)
def test_an_offer_that_cannot_be_fails_before_anything_is_asked(fields: dict[str, Any], word: str) -> None:
    world = World()
    world.pull(**fields)
    assert world.jobs() == []
    assert word in world.failure().detail


def test_attempts_of_a_peer_without_an_address_fail_however_many_there_are() -> None:
    world = World()
    for request in range(3000):
        world.pull(RequestId(request), peer=Incarnation("nobody", "1"))
    assert world.jobs() == []
    assert world.said(TransferFailed) == 3000


# --- links that break ------------------------------------------------------------------------------------------------


def test_a_broken_link_is_made_anew_and_the_read_goes_on_behind_the_last_page() -> None:
    world = World()
    world.pull(count=5)
    job = world.receive()
    world.land(job, 2)
    world.fail(job, Trouble.BROKEN)
    assert world.puller.held().open_transfers == 0
    again = world.receive()
    assert (again.start, again.stop, again.link) == (2, 5, 2)


def test_two_links_in_a_row_that_break_before_a_page_are_one_too_many() -> None:
    world = World()
    world.pull(count=5)
    for count in (1, 1, 0):
        job = world.receive()
        world.land(job, count) if count else None
        world.fail(job, Trouble.BROKEN)
        assert not world.said(TransferFailed)
    world.fail(world.receive(), Trouble.BROKEN)
    assert world.failure().cause is Cause.PEER_LOST


def test_links_that_died_while_they_were_idle_cost_no_try() -> None:
    world = World()
    for request in range(3):
        world.pull(RequestId(10 + request))
    for job in [world.receive() for _ in range(3)]:
        world.land(job, 3)
        world.puller.received(job, world.now)
    world.pull()
    for _ in range(3):
        job = world.receive()
        assert job.was_idle
        world.fail(job, Trouble.BROKEN)
    for _ in range(2):
        assert not world.said(TransferFailed)
        job = world.receive()
        assert not job.was_idle
        world.fail(job, Trouble.BROKEN)
    assert world.failure().cause is Cause.PEER_LOST


def test_a_busy_peer_is_asked_again_ever_more_rarely_until_patience_is_over() -> None:
    world = World()
    world.pull()
    begin, dialled = world.now, list[int]()
    while not world.said(TransferFailed):
        world.fail(world.dial(), Trouble.REFUSED, Status.BUSY)
        dialled.append(world.now - begin)
        assert world.jobs() == [], "not at once"
        if not world.said(TransferFailed):
            world.sleep()
    pauses = [later - sooner for sooner, later in pairwise(dialled)]
    assert pauses[:6] == [BUSY_PAUSE_NS * times for times in (1, 1, 2, 4, 8, 16)]
    assert set(pauses[6:-1]) == {MAX_BUSY_PAUSE_NS}
    assert 0 < pauses[-1] <= MAX_BUSY_PAUSE_NS
    assert dialled[-1] == BUSY_PATIENCE * TIMEOUT_NS
    assert (world.failure().cause, world.failure().detail) == REFUSALS[Status.BUSY]


def test_patience_with_a_busy_peer_begins_anew_when_it_has_had_a_link() -> None:
    world = World()
    world.pull()
    world.fail(world.dial(), Trouble.REFUSED, Status.BUSY)
    world.now += BUSY_PATIENCE * TIMEOUT_NS - 1
    world.fail(world.receive(), Trouble.BROKEN)
    world.now += 1
    world.fail(world.dial(), Trouble.HANDSHAKE_BROKEN)
    assert not world.said(TransferFailed)
    world.sleep()
    assert isinstance(world.puller.next_job(world.now), Dial)


def test_a_pull_that_waits_for_a_busy_peer_can_be_cancelled() -> None:
    world = World()
    world.pull()
    world.fail(world.dial(), Trouble.REFUSED, Status.BUSY)
    world.cancel()
    assert world.events == [TransferDrained(ONE, 0, ShardId(0))]
    world.now += SECOND
    assert world.jobs() == []


def test_a_peer_that_is_forgotten_has_its_idle_links_closed_and_is_not_asked_any_more() -> None:
    world = World()
    world.pull()
    idle = world.receive()
    world.pull(TWO)
    busy = world.receive()
    world.land(idle, 3)
    world.puller.received(idle, world.now)
    world.puller.forget(PEER)
    assert world.is_closed == [idle.link]
    world.land(busy, 3)
    world.puller.received(busy, world.now)
    assert world.is_closed == [idle.link, busy.link]
    world.pull(RequestId(3))
    assert world.jobs() == []
    assert world.failure().cause is Cause.PEER_LOST


def test_after_close_no_job_begins_nothing_is_told_and_links_are_cut() -> None:
    world = World()
    world.pull()
    job = world.receive()
    world.pull(TWO)
    world.puller.close()
    assert world.jobs() == []
    assert world.is_cut == [job.link]
    world.fail(job, Trouble.BROKEN)
    world.cancel(TWO)
    assert world.events == []


# --- fairness --------------------------------------------------------------------------------------------------------


def test_four_frozen_peers_do_not_hold_up_a_healthy_one() -> None:
    """They would have cost it their timeout, one after the other: four threads, first come, first served."""
    world = World()
    *frozen, healthy = peers(5)
    for peer in (*frozen, healthy):
        world.learn(peer)
    for number, peer in enumerate(4 * frozen):
        world.pull(RequestId(100 + number), peer=peer)
    begin = world.now
    world.pull(peer=healthy)
    while not any(job.origin.peer == healthy for job in world.jobs()):
        world.sleep()
    assert world.now - begin <= STALLED_AFTER_NS


def test_a_healthy_peer_has_the_share_of_the_frozen_ones() -> None:
    world = World()
    *frozen, healthy = peers(MAX_JOBS + 1)
    for number, peer in enumerate((*frozen, healthy)):
        world.learn(peer)
        world.pull(RequestId(100 + number), peer=peer)
    assert len(world.jobs()) == MAX_JOBS
    for request in range(MAX_JOBS):
        world.pull(RequestId(request), peer=healthy)
    world.now += STALLED_AFTER_NS
    assert [job.origin.peer for job in world.jobs()] == MAX_JOBS * [healthy]


@given(num_frozen=st.integers(1, 20), pulls_each=st.integers(1, 30))
def test_a_healthy_peer_waits_no_longer_than_the_turns_of_the_frozen_ones(num_frozen: int, pulls_each: int) -> None:
    world = World()
    *frozen, healthy = peers(num_frozen + 1)
    for peer in (*frozen, healthy):
        world.learn(peer)
    for number in range(pulls_each * num_frozen):
        world.pull(RequestId(100 + number), peer=frozen[number % num_frozen])
    begin = world.now
    world.pull(peer=healthy)
    while not any(job.origin.peer == healthy for job in world.jobs()):
        world.sleep()
    assert world.now - begin <= (num_frozen // MAX_JOBS) * STALLED_AFTER_NS


def test_a_peer_with_many_pulls_leaves_room_and_has_all_of_it_when_it_is_alone() -> None:
    world = World()
    one, other = peers(2)
    world.learn(one)
    world.learn(other)
    for request in range(10):
        world.pull(RequestId(request), peer=one)
    assert len(world.jobs()) == MAX_JOBS
    world = World()
    world.learn(one)
    world.learn(other)
    for request in range(10):
        world.pull(RequestId(request), peer=one)
    for request in range(10, 12):
        world.pull(RequestId(request), peer=other)
    assert [job.origin.peer for job in world.jobs()] == [one, other, one, other]


def test_a_peer_is_dialled_where_it_was_last_said_to_be() -> None:
    world = World()
    (peer,) = peers(1)
    world.learn(peer)
    elsewhere = [PeerAddress("elsewhere", 5, "") for _ in world.theirs.shards]
    world.puller.learn(peer, world.theirs, elsewhere)
    world.pull(peer=peer)
    assert world.dial().address == elsewhere[0]


def test_a_peer_of_which_a_job_is_stalled_gets_no_other_until_it_moves() -> None:
    world = World()
    for request in range(10):
        world.pull(RequestId(request), count=9)
    jobs = [world.receive() for _ in range(MAX_JOBS)]
    world.now += STALLED_AFTER_NS
    assert world.jobs() == [], "its jobs do not count any more, and it gets no more"
    for job in jobs:
        world.land(job, 1)
    assert world.jobs() == [], "they count again"
    world.land(jobs[0], 8)
    world.puller.received(jobs[0], world.now)
    assert len(world.jobs()) == 1


def test_what_has_waited_behind_a_frozen_peer_for_all_of_its_timeout_gives_up_with_it() -> None:
    world = World()
    for request in range(20):
        world.pull(RequestId(request))
    jobs = world.jobs()
    world.now += STALLED_AFTER_NS
    world.pull(RequestId(100))
    world.now = 1 + TIMEOUT_NS
    world.fail(jobs[0], Trouble.FROZEN)
    failed = [event.request for event in world.events if isinstance(event, TransferFailed)]
    assert sorted(failed) == [0, *range(len(jobs), 20)], "not those of the other jobs, nor who came later"
    for job in jobs[1:]:
        world.fail(job, Trouble.FROZEN)
    assert [job.pull.attempt.key[0] for job in world.jobs()] == [100]


def test_who_waits_for_a_peer_that_moves_on_another_link_does_not_give_up_with_a_frozen_one() -> None:
    world = World()
    for request in range(6):
        world.pull(RequestId(request), count=9)
    jobs = [world.receive() for _ in range(MAX_JOBS)]
    world.now += SECOND
    world.land(jobs[1], 1)
    world.now = 1 + TIMEOUT_NS
    world.fail(jobs[0], Trouble.FROZEN)
    assert world.said(TransferFailed) == 1


def test_between_reads_it_is_the_turn_of_who_waits() -> None:
    world = World()
    one, other = peers(2)
    world.learn(one)
    world.learn(other)
    for request in range(MAX_JOBS):
        world.pull(RequestId(request), count=MAX_READ_PAGES + 1, peer=one)
    jobs = [world.receive() for _ in range(MAX_JOBS)]
    world.pull(RequestId(50), peer=other)
    for job in jobs[:2]:
        world.land(job, MAX_READ_PAGES)
        assert world.puller.received(job, world.now) is None
        world.jobs()
    assert any(job.origin.peer == other for job in [*world.puller._jobs])
    assert world.puller.held().live_rooms == 1


# --- laws ------------------------------------------------------------------------------------------------------------


@given(st.data())
def test_however_it_goes_every_attempt_ends_as_it_should(data: st.DataObject) -> None:
    """Every cancelled attempt is drained once, as its last event, while no job of it can land a byte; none fails twice;
    what landed is told; and when all jobs have ended nothing is held."""
    world = World()
    names = peers(3)
    for peer in names:
        world.learn(peer)
    jobs: list[Job] = []
    cancelled: set[RequestId] = set()
    pulled: list[RequestId] = []

    def end(job: Job) -> None:
        trouble = data.draw(st.sampled_from(list(Trouble)))
        status = (
            data.draw(st.sampled_from(sorted(set(Status) - {Status.OK}))) if trouble is Trouble.REFUSED else Status.OK
        )
        world.fail(job, trouble, status)

    for _ in range(data.draw(st.integers(1, 40))):
        world.now += data.draw(st.sampled_from([0, 1, BUSY_PAUSE_NS, STALLED_AFTER_NS, TIMEOUT_NS]))
        jobs += world.jobs()
        match data.draw(st.sampled_from(["pull", "cancel", "land", "end", "dialled", "forget"])):
            case "pull":
                request = RequestId(len(pulled) + 1)
                pulled.append(request)
                world.pull(request, count=data.draw(st.integers(1, 3)), peer=data.draw(st.sampled_from(names)))
            case "cancel" if pulled:
                request = data.draw(st.sampled_from(pulled))
                cancelled.add(request)
                world.cancel(request)
            case "dialled" if dials := [job for job in jobs if isinstance(job, Dial)]:
                jobs.remove(dial := data.draw(st.sampled_from(dials)))
                following = world.welcome(dial)
                jobs += [following] if following is not None else []
            case "land" if reads := [job for job in jobs if isinstance(job, Receive)]:
                jobs.remove(job := data.draw(st.sampled_from(reads)))
                if not world.land(job, job.stop - job.start):
                    world.fail(job, Trouble.BROKEN)
                else:
                    following = world.puller.received(job, world.now)
                    jobs += [following] if following is not None else []
            case "end" if jobs:
                jobs.remove(job := data.draw(st.sampled_from(jobs)))
                end(job)
            case "forget":
                world.puller.forget(peer := data.draw(st.sampled_from(names)))
                world.learn(peer)
        armed = [job.pull.attempt.key[0] for job in jobs if isinstance(job, Receive)]
        assert len(set(armed)) == len(armed) == world.puller.held().open_transfers
        for request in cancelled:
            drained = TransferDrained(request, 0, ShardId(0))
            assert world.events.count(drained) == (request not in armed)
    for request in pulled:
        about = [event for event in world.events if getattr(event, "request", None) == request]
        assert sum(isinstance(event, TransferFailed) for event in about) <= 1
        assert not any(isinstance(event, TransferDrained) for event in about[:-1])
    for request in pulled:
        world.cancel(request)
    for job in jobs:
        world.fail(job, Trouble.BROKEN)
    assert world.puller.held() == Held()
    assert world.puller.num_jobs == 0
    assert not world.puller._lanes
    assert world.jobs() == []
