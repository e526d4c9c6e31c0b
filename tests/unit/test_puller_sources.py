"""The puller of a worker whose peer is cut otherwise: one attempt, and several workers that have parts of its pages."""

from puller_world import ONE, PEER, World
from tandem.core.commands import CancelPull, PullPages
from tandem.core.events import PagesLanded, TransferDrained, TransferFailed
from tandem.core.kv_parts import KvGrid, KvShard, parts
from tandem.core.values import Cause, Cut, Incarnation, PageId, RequestId, ShardId
from tandem.transfer.jobs import Dial, Receive, Trouble
from tandem.transfer.port import Held
from tandem.transfer.puller import LANDED_REPORT_INTERVAL_NS, NO_ADDRESS

OTHER = Incarnation("prefill", "2")
GRID = KvGrid(num_layers=2, num_kv_heads=4)
THEIRS, OURS = Cut(tp_size=2), Cut(pp_size=2)  # so that each of our stages reads from both of their shards
SHARD = ShardId(1)


def a_world() -> World:
    """Of our second stage."""
    return World(KvShard(GRID, OURS, SHARD, cell_bytes=8), THEIRS)


def dials(world: World) -> list[Dial[int]]:
    found = world.jobs()
    assert all(isinstance(job, Dial) for job in found)
    return [job for job in found if isinstance(job, Dial)]


def receives(world: World) -> list[Receive[int]]:
    return [job for job in map(world.welcome, dials(world)) if job is not None]


def test_each_worker_is_asked_for_its_part_where_it_listens_with_its_own_secret_and_digests() -> None:
    world = a_world()
    world.pull()
    first = dials(world)
    assert [job.address.port for job in first] == [10, 11]
    jobs = [world.welcome(job) for job in first]
    for shard, job in enumerate(jobs):
        assert job is not None
        assert (job.origin.shard, job.offer.secret) == (shard, bytes([shard]) * 16)
        index = next(
            at for at, part in enumerate(parts(GRID, THEIRS, OURS)) if (part.source, part.target) == (shard, SHARD)
        )
        assert job.offer.digests == (int.from_bytes(bytes([index]) * 8, "little"),) * 3
        assert job.tile.page_bytes == 2 * 2 * 8  # of a page there: two heads, two layers
    assert {job.tile.here.first for job in jobs if job is not None} == {0, 16}


def test_a_page_has_landed_when_every_worker_has_sent_its_part_of_it() -> None:
    world = a_world()
    world.pull()
    first, second = receives(world)
    world.now += 2 * LANDED_REPORT_INTERVAL_NS
    assert world.finish(first) is None
    assert world.events == [], "one half of every page is missing"
    assert world.puller.held() == Held(live_rooms=1, pinned_pages=3, open_transfers=1)
    world.land(second, 1)
    assert world.events == [PagesLanded(ONE, 0, SHARD, 1)]
    assert world.finish(second) is None
    assert world.events[-1] == PagesLanded(ONE, 0, SHARD, 3)
    assert world.puller.held() == Held()


def test_an_attempt_is_forgotten_when_the_last_job_has_ended_not_when_the_last_page_is_here() -> None:
    world = a_world()
    world.pull(count=2)
    first, second = receives(world)
    world.land(first, 2)
    world.land(second, 2)
    assert world.puller.received(second, world.now) is None
    world.pull(count=1, first_wanted=2)
    following = world.puller.received(first, world.now)
    assert following is None, "who was done waits for its turn"
    jobs = [world.puller.next_job(world.now) for _ in range(2)]
    for job in jobs:
        assert isinstance(job, Receive)
        world.finish(job)
    assert world.events[-1] == PagesLanded(ONE, 0, SHARD, 3)
    assert world.puller.held() == Held()


def test_a_worker_may_be_ahead_by_a_command() -> None:
    world = a_world()
    world.pull(count=2)
    first, second = receives(world)
    world.pull(count=1, first_wanted=2)
    following = world.finish(first)
    assert following is not None
    assert world.finish(following) is None
    following = world.finish(second)
    assert world.events == [PagesLanded(ONE, 0, SHARD, 2)]
    assert following is not None
    assert world.finish(following) is None
    assert world.events[-1] == PagesLanded(ONE, 0, SHARD, 3)
    assert world.puller.held() == Held()


def test_the_first_worker_that_fails_ends_the_attempt_and_the_others_are_cut() -> None:
    world = a_world()
    world.pull()
    first, second = receives(world)
    world.fail(first, Trouble.CORRUPT)
    assert world.events == [TransferFailed(ONE, 0, SHARD, Cause.CORRUPT_PAGES, "a page differs from its digest")]
    assert world.is_cut == [second.link]
    assert not world.land(second, 1)
    world.puller.cancel(CancelPull(ONE, 0))
    assert len(world.events) == 1, "bytes of the other worker may still land"
    world.fail(second, Trouble.BROKEN)
    assert world.events[1:] == [TransferDrained(ONE, 0, SHARD)]
    assert sorted(world.is_closed) == sorted([first.link, second.link])
    assert world.puller.held() == Held()


def test_a_cancelled_attempt_has_drained_when_the_last_worker_sends_no_more() -> None:
    world = a_world()
    world.pull()
    first, second = receives(world)
    world.puller.cancel(CancelPull(ONE, 0))
    assert sorted(world.is_cut) == sorted([first.link, second.link])
    world.fail(second, Trouble.BROKEN)
    assert world.events == []
    world.fail(first, Trouble.BROKEN)
    assert world.events == [TransferDrained(ONE, 0, SHARD)]


def test_who_waits_or_dials_for_an_attempt_that_has_failed_does_nothing_more() -> None:
    world = a_world()
    world.pull()
    first, second = dials(world)
    receiving = world.welcome(first)
    assert receiving is not None
    world.fail(receiving, Trouble.CORRUPT)
    assert world.welcome(second) is None
    world.puller.cancel(CancelPull(ONE, 0))
    assert [type(event) for event in world.events] == [TransferFailed, TransferDrained]
    assert world.puller.next_job(world.now) is None
    assert world.puller.num_jobs == 0


def test_a_peer_of_whom_nothing_is_known_fails_the_attempt_at_once() -> None:
    world = a_world()
    world.pull(peer=OTHER)
    assert world.events == [TransferFailed(ONE, 0, SHARD, Cause.PEER_LOST, NO_ADDRESS)]
    world.puller.cancel(CancelPull(ONE, 0))
    assert world.events[1:] == [TransferDrained(ONE, 0, SHARD)]


def test_an_offer_without_the_digests_of_a_part_fails_by_name() -> None:
    world = a_world()
    pages = (0,)
    command = PullPages(ONE, 0, 7, PEER, 0, pages, pages, (PageId(0),), (bytes(8),), (bytes(16), bytes(16)))
    world.puller.pull(command, world.now)
    assert world.puller.next_job(world.now) is None
    (failed,) = world.events
    assert isinstance(failed, TransferFailed)
    assert failed.detail == "the peer offered no digests or no secret for what this worker needs"


def test_a_worker_that_stands_still_does_not_hold_up_the_other_ones_of_its_server() -> None:
    world = a_world()
    for request in range(2, 10):
        world.pull(RequestId(request), count=1)
    jobs = dials(world)
    assert {job.origin.shard for job in jobs} == {0, 1}, "the workers of a peer take turns"
    assert len(jobs) == 4
