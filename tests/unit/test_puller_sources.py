"""The puller of a worker whose peer is cut otherwise: one attempt, and several workers that have parts of its pages."""

from dataclasses import dataclass, field

from tandem.core.commands import CancelPull, PullPages
from tandem.core.events import Event, PagesLanded, TransferDrained, TransferFailed
from tandem.core.kv_parts import KvGrid, KvShard, parts
from tandem.core.values import SECOND, Cause, Cut, Incarnation, PageId, RequestId, ShardId
from tandem.transfer.jobs import Dial, Failure, PeerAddress, Receive, Trouble
from tandem.transfer.port import Held
from tandem.transfer.puller import LANDED_REPORT_INTERVAL_NS, NO_ADDRESS, Puller

ONE = RequestId(1)
PEER, OTHER = Incarnation("prefill", "1"), Incarnation("prefill", "2")
GRID = KvGrid(num_layers=2, num_kv_heads=4)
THEIRS, OURS = Cut(tp_size=2), Cut(pp_size=2)  # so that each of our stages reads from both of their shards
SHARD = ShardId(1)
NUM_PARTS = len(parts(GRID, THEIRS, OURS))


@dataclass
class World:
    """A puller, what it has said and done to links, which are numbers, and the time."""

    now: int = 1
    events: list[Event] = field(default_factory=list)
    is_cut: list[int] = field(default_factory=list)
    is_closed: list[int] = field(default_factory=list)
    num_links: int = 0

    def __post_init__(self) -> None:
        self.puller: Puller[int] = Puller(
            KvShard(GRID, OURS, SHARD, cell_bytes=8),
            report=self.events.append,
            cut=self.is_cut.append,
            close=self.is_closed.append,
            timeout_ns=5 * SECOND,
            max_jobs=4,
        )
        self.puller.learn(PEER, THEIRS, [PeerAddress("prefill", port, "") for port in (10, 11)])

    def pull(self, count: int = 3, *, first_wanted: int = 0, peer: Incarnation = PEER) -> None:
        pages = tuple(range(count))
        digests = tuple(bytes([part]) * 8 * count for part in range(NUM_PARTS))
        secrets = tuple(bytes([shard]) * 16 for shard in THEIRS.shards)
        places = tuple(map(PageId, pages))
        self.puller.pull(PullPages(ONE, 0, 7, peer, first_wanted, pages, pages, places, digests, secrets), self.now)

    def dials(self) -> list[Dial[int]]:
        found: list[Dial[int]] = []
        while (job := self.puller.next_job(self.now)) is not None:
            assert isinstance(job, Dial)
            found.append(job)
        return found

    def welcome(self, job: Dial[int]) -> Receive[int] | None:
        self.num_links += 1
        return self.puller.dialled(job, self.num_links, self.now)

    def receives(self) -> list[Receive[int]]:
        found = [self.welcome(job) for job in self.dials()]
        return [job for job in found if job is not None]

    def land(self, job: Receive[int], count: int) -> bool:
        return self.puller.landed(job, count, self.now)

    def finish(self, job: Receive[int]) -> Receive[int] | None:
        self.land(job, job.stop - job.start)
        return self.puller.received(job, self.now)

    def fail(self, job: Dial[int] | Receive[int], trouble: Trouble = Trouble.CORRUPT) -> None:
        self.puller.failed(job, Failure(trouble, "so it is"), self.now)


def test_each_worker_is_asked_for_its_part_where_it_listens_with_its_own_secret_and_digests() -> None:
    world = World()
    world.pull()
    dials = world.dials()
    assert [job.address.port for job in dials] == [10, 11]
    jobs = [world.welcome(job) for job in dials]
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
    world = World()
    world.pull()
    first, second = world.receives()
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
    world = World()
    world.pull(2)
    first, second = world.receives()
    world.land(first, 2)
    world.land(second, 2)
    assert world.puller.received(second, world.now) is None
    world.pull(1, first_wanted=2)
    following = world.puller.received(first, world.now)
    assert following is None, "who was done waits for its turn"
    jobs = [world.puller.next_job(world.now) for _ in range(2)]
    for job in jobs:
        assert isinstance(job, Receive)
        world.finish(job)
    assert world.events[-1] == PagesLanded(ONE, 0, SHARD, 3)
    assert world.puller.held() == Held()


def test_a_worker_may_be_ahead_by_a_command() -> None:
    world = World()
    world.pull(2)
    first, second = world.receives()
    world.pull(1, first_wanted=2)
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
    world = World()
    world.pull()
    first, second = world.receives()
    world.fail(first)
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
    world = World()
    world.pull()
    first, second = world.receives()
    world.puller.cancel(CancelPull(ONE, 0))
    assert sorted(world.is_cut) == sorted([first.link, second.link])
    world.fail(second, Trouble.BROKEN)
    assert world.events == []
    world.fail(first, Trouble.BROKEN)
    assert world.events == [TransferDrained(ONE, 0, SHARD)]


def test_who_waits_or_dials_for_an_attempt_that_has_failed_does_nothing_more() -> None:
    world = World()
    world.pull()
    first, second = world.dials()
    receiving = world.welcome(first)
    assert receiving is not None
    world.fail(receiving)
    assert world.welcome(second) is None
    world.puller.cancel(CancelPull(ONE, 0))
    assert [type(event) for event in world.events] == [TransferFailed, TransferDrained]
    assert world.puller.next_job(world.now) is None
    assert world.puller.num_jobs == 0


def test_a_peer_of_whom_nothing_is_known_fails_the_attempt_at_once() -> None:
    world = World()
    world.pull(peer=OTHER)
    assert world.events == [TransferFailed(ONE, 0, SHARD, Cause.PEER_LOST, NO_ADDRESS)]
    world.puller.cancel(CancelPull(ONE, 0))
    assert world.events[1:] == [TransferDrained(ONE, 0, SHARD)]


def test_an_offer_without_the_digests_of_a_part_fails_by_name() -> None:
    world = World()
    pages = (0,)
    command = PullPages(ONE, 0, 7, PEER, 0, pages, pages, (PageId(0),), (bytes(8),), (bytes(16), bytes(16)))
    world.puller.pull(command, world.now)
    assert world.puller.next_job(world.now) is None
    (failed,) = world.events
    assert isinstance(failed, TransferFailed)
    assert failed.detail == "the peer offered no digests or no secret for what this worker needs"


def test_a_worker_that_stands_still_does_not_hold_up_the_other_ones_of_its_server() -> None:
    world = World()
    for request in range(2, 10):
        pages = (0,)
        digests = tuple(bytes([part]) * 8 for part in range(NUM_PARTS))
        command = PullPages(
            RequestId(request), 0, request, PEER, 0, pages, pages, (PageId(0),), digests, (bytes(16), bytes(16))
        )
        world.puller.pull(command, world.now)
    jobs = world.dials()
    assert {job.origin.shard for job in jobs} == {0, 1}, "the workers of a peer take turns"
    assert len(jobs) == 4
