"""Which pages one worker pulls next, from whom, on which connection, and when no byte can land any more.

A machine: it is told what happens, with the time in ns, and hands out *jobs*: dial a peer, or send one Read and receive
its frames. Whoever takes a job works on it alone and says how it ended; `cut` and `close` of links and `report` return
at once. It owns no socket, thread or clock, so the simulator drives the very object that serves.

An attempt has a *pull* for every worker of the peer that holds something of what this worker needs: one where both
sides are cut alike, else maybe several (`core/kv_parts.py`). One job at a time works on a pull. A page has landed when
all pulls have landed their part of it, and the first pull that fails ends the attempt.

Bytes can land for a pull only while it is *armed* with a link, which is while a `Receive` is out. An attempt that was
cancelled or has failed is never armed again; the end of its last such job, or the cancellation when there is none, is
reported as TransferDrained.

A connection that breaks is made anew, and the pull goes on behind the last page that was checked: this costs
microseconds when the peer is dead, and tells a read that was revoked from a peer that is gone. Two in a row that break
before a page has come are one too many. A peer that says BUSY is asked again for a while, ever more rarely, for each
time is a connection and a handshake more.

*Workers of peers take turns*, so that one with many requests leaves room for the others, and `max_jobs` bounds the jobs
that move. A job on which nothing has moved for `STALLED_AFTER_NS` does not count any more, and its server gets no
further one until it moves: peers that are frozen cost a healthy one that long, and not their timeout. When such a job
ends in its timeout, so do the attempts that have waited behind it for all of that time.
"""

from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Generic

from tandem.core.commands import CancelPull, PullPages
from tandem.core.disagg.transfer_state import DIGEST_BYTES
from tandem.core.events import Event, PagesLanded, TransferDrained, TransferFailed
from tandem.core.kv_parts import KvShard, Tile
from tandem.core.values import MILLISECOND, Cause, Cut, Incarnation, RequestId
from tandem.transfer.digests import unpack_digests
from tandem.transfer.jobs import (
    AnyJob,
    Attempt,
    DataPeer,
    Dial,
    Job,
    JobFailure,
    Key,
    Link,
    OfferedPages,
    Origin,
    PeerAddress,
    Pull,
    Receive,
    Source,
    Trouble,
)
from tandem.transfer.port import Held
from tandem.transfer.protocol import GRANT_SECRET_BYTES, MAX_READ_PAGES, REFUSALS, Status, may_be_read

MAX_PEERS = 1024  # the one learned first is forgotten
MAX_ENDED = 8192  # attempts that failed or were cancelled and are remembered, to say their end once
LANDED_REPORT_INTERVAL_NS = 2 * MILLISECOND
BUSY_PAUSE_NS = 10 * MILLISECOND  # the first; then as long as the peer has been busy already
MAX_BUSY_PAUSE_NS = 160 * MILLISECOND
BUSY_PATIENCE = 2  # timeouts: within one, the owner has cut off a reader that does not move
STALLED_AFTER_NS = 250 * MILLISECOND
NO_ADDRESS = "no address is known for this life of the peer"
STALLED_JOBS = 16  # times `max_jobs`: beyond these, stalled jobs take the place of others after all


class BadOffer(Exception):
    """The peer said something through the control plane that cannot be."""


@dataclass(slots=True)
class PullLane(Generic[Link]):
    """What is pulled from one worker of a peer."""

    waiting: dict[Pull[Link], None] = field(default_factory=dict)  # in order; no job is out for them
    jobs: list[Job[Link]] = field(default_factory=list)
    moved_at: int = 0  # the peer has answered something, on whatever link


class Puller(Generic[Link]):
    def __init__(
        self,
        kv: KvShard,
        *,
        report: Callable[[Event], None],
        cut: Callable[[Link], None],
        close: Callable[[Link], None],
        timeout_ns: int,
        max_jobs: int,
    ) -> None:
        """kv: what of every page this worker has

        cut: make every call on a link fail soon, in whichever thread; its job says `failed`
        close: a link on which no job is out
        timeout_ns: after which a job that does not move is said to have `failed`
        """
        self._kv, self._timeout_ns, self._max_jobs = kv, timeout_ns, max_jobs
        self._report, self._cut, self._close = report, cut, close
        self._peers: OrderedDict[Incarnation, DataPeer[Link]] = OrderedDict()
        self._attempts: dict[Key, Attempt[Link]] = {}
        self._leaving: dict[Key, Attempt[Link]] = {}  # over, and a Receive is out
        self._ended: OrderedDict[Key, bool] = OrderedDict()  # True: TransferDrained is said or on its way
        self._lanes: dict[Origin, PullLane[Link]] = {}  # with somebody waiting or a job
        self._turns: deque[Origin] = deque()  # lanes with somebody waiting
        self._paused: list[tuple[int, Pull[Link]]] = []  # until when; in order
        self._jobs: dict[Job[Link], None] = {}
        self._is_closed = False

    # -- peers

    def learn(self, incarnation: Incarnation, cut: Cut, addresses: Sequence[PeerAddress]) -> None:
        """How it is cut and where its workers listen. What was known of it before is forgotten. Beyond MAX_PEERS the
        one learned first is."""
        assert len(addresses) == cut.num_shards
        addresses = tuple(addresses)
        known = self._peers.get(incarnation)
        if known is not None and (known.cut, known.addresses) == (cut, addresses):
            return
        self.forget(incarnation)
        sources = tuple(Source[Link](tile, addresses[tile.source]) for tile in self._kv.pulls(cut))
        self._peers[incarnation] = DataPeer(cut, addresses, sources)
        if len(self._peers) > MAX_PEERS:
            self.forget(next(iter(self._peers)))

    def forget(self, incarnation: Incarnation) -> None:
        """Closes what is idle. A job that is out ends by itself."""
        known = self._peers.pop(incarnation, None)
        if known is not None:
            self._close_idle(known)

    # -- attempts

    def pull(self, command: PullPages, now: int) -> None:
        count = len(command.destinations)
        assert count == len(command.sources) == len(command.generations)
        key = (command.request, command.attempt)
        if key in self._ended or self._is_closed:
            return
        attempt = self._attempts.get(key)
        if attempt is None:
            peer = self._peers.get(command.peer)
            if peer is None:
                self._end(key, is_drained=False)
                self._report(TransferFailed(*key, self._kv.shard, Cause.PEER_LOST, NO_ADDRESS))
                return
            attempt = self._attempts[key] = _attempt(command, peer)
        assert (attempt.peer, attempt.wanted) == (command.peer, command.first_wanted)
        attempt.wanted += count
        for pull in attempt.pulls:
            is_new = not pull.commands
            pull.commands.append(command)
            if is_new:
                self._wait(pull, now)

    def cancel(self, command: CancelPull) -> None:
        key = (command.request, command.attempt)
        if self._ended.get(key) or self._is_closed:
            return
        self._end(key, is_drained=True)
        attempt = self._attempts.pop(key, None)
        if attempt is not None:
            self._stop(attempt)
        attempt = self._leaving.get(key)
        if attempt is not None:
            attempt.owes_drained = True  # the end of its last job says it
        else:
            self._report(TransferDrained(*key, self._kv.shard))

    def close(self) -> None:
        """No job is handed out and nothing is reported after this; when the jobs that are out have ended no byte lands.
        Those of attempts end soon; who still dials finds nothing to arm."""
        self._is_closed = True
        for attempt in self._attempts.values():
            attempt.is_over = True
            self._cut_armed(attempt)
        for peer in self._peers.values():
            self._close_idle(peer)

    def held(self) -> Held:
        """An attempt that is over counts until no byte of it can land any more."""
        attempts = [*self._attempts.values(), *self._leaving.values()]
        return Held(
            live_rooms=len({attempt.room for attempt in attempts}),
            pinned_pages=sum(attempt.wanted - attempt.num_landed for attempt in attempts),
            open_transfers=sum(pull.armed is not None for attempt in attempts for pull in attempt.pulls),
        )

    def can_land(self, request: RequestId) -> bool:
        """Whether bytes may still come for it."""
        attempts = (*self._attempts.values(), *self._leaving.values())
        return any(attempt.is_armed for attempt in attempts if attempt.key[0] == request)

    def _stop(self, attempt: Attempt[Link]) -> None:
        """Nothing of it is begun any more, and what is under way ends soon."""
        attempt.is_over = True
        for pull in attempt.pulls:
            if pull.commands:
                self._wait_no_more(pull)
        if attempt.is_armed:
            self._leaving[attempt.key] = attempt
            self._cut_armed(attempt)

    def _cut_armed(self, attempt: Attempt[Link]) -> None:
        for pull in attempt.pulls:
            if pull.armed is not None:
                self._cut(pull.armed)

    # -- jobs

    @property
    def num_jobs(self) -> int:
        """Those that are out."""
        return len(self._jobs)

    @property
    def has_waiting(self) -> bool:
        """Somebody waits for a job, or for a peer that is busy."""
        return bool(self._turns or self._paused)

    def wake_at(self, now: int) -> int | None:
        """When `next_job` may find something that it does not find now, though nothing happens."""
        moments = [job.moved_at + STALLED_AFTER_NS for job in self._jobs] if self._turns else []
        moments = [moment for moment in moments if moment > now]
        if self._paused:
            moments.append(self._paused[0][0])
        return min(moments, default=None)

    def next_job(self, now: int) -> Dial[Link] | Receive[Link] | None:
        """What to begin now. To be asked again after anything that happens, and at `wake_at`."""
        while self._paused and self._paused[0][0] <= now:
            _, pull = self._paused.pop(0)
            if not pull.attempt.is_over:
                self._wait(pull, now)
        while not (self._is_closed or self._is_full(now)):
            origin = next((turn for turn in self._turns if self._may_begin(turn, now)), None)
            if origin is None:
                return None
            job = self._job_of(self._next_of(origin), now)
            if job is not None:
                return self._begun(job)
            self._drop_if_empty(origin)
        return None

    def dialled(self, job: Dial[Link], link: Link, now: int) -> Receive[Link] | None:
        """The peer has welcomed us. What to do with the link now; None: it is not for the caller any more."""
        self._leave(job)
        pull = job.pull
        self._lane(job.origin).moved_at = now
        if pull.attempt.is_over or self._is_closed:
            self._close(link)
            self._drop_if_empty(job.origin)
            return None
        return self._begun(self._receive(pull, link, now, was_idle=False))

    def landed(self, job: Receive[Link], count: int, now: int) -> bool:
        """The next `count` pages are here and their digests are equal. Returns whether more of the Read is wanted."""
        pull, attempt = job.pull, job.pull.attempt
        job.start += count
        pull.landed += count
        job.moved_at = self._lanes[job.origin].moved_at = now
        if attempt.is_over:
            return False
        landed = attempt.num_landed
        is_last = job.start == len(job.offer.digests)
        if landed > attempt.reported and (is_last or now - job.reported_at >= LANDED_REPORT_INTERVAL_NS):
            job.reported_at = now
            attempt.reported = landed
            self._report(PagesLanded(*attempt.key, self._kv.shard, landed))
        return True

    def received(self, job: Receive[Link], now: int) -> Receive[Link] | None:
        """The Read was answered to its end, and its link is free. The next one of this attempt, if it is its turn."""
        self._disarm(job)
        self._leave(job)
        pull, origin = job.pull, job.origin
        if pull.attempt.is_over or self._is_closed:
            self._close(job.link)
            self._say_if_drained(pull.attempt)
        elif job.start < len(job.offer.digests) or self._has_next_command(pull):
            if not self._turns and self._check(pull):
                return self._begun(self._receive(pull, job.link, now, was_idle=False))
            self._keep_idle(pull, job.link)
            if not pull.attempt.is_over:
                self._wait(pull, now)
        else:
            self._keep_idle(pull, job.link)
            self._forget_if_done(pull.attempt)
        self._drop_if_empty(origin)
        return None

    def failed(self, job: Dial[Link] | Receive[Link], failure: JobFailure, now: int) -> None:
        """The job has ended, and its link, if it had one, is not used any more."""
        self._leave(job)
        if isinstance(job, Receive):
            self._disarm(job)
            self._close(job.link)
        pull, lane = job.pull, self._lane(job.origin)
        if failure.trouble is not Trouble.FROZEN and failure.trouble is not Trouble.BROKEN:
            lane.moved_at = now
        if pull.attempt.is_over or self._is_closed:
            self._say_if_drained(pull.attempt)
        elif isinstance(job, Receive):
            self._receive_failed(job, failure, now)
        else:
            self._dial_failed(job, failure, now)
        if failure.trouble is Trouble.FROZEN and lane.moved_at <= job.moved_at:
            self._give_up_behind(lane, job, failure)
        self._drop_if_empty(job.origin)

    # -- what became of jobs

    def _dial_failed(self, job: Dial[Link], failure: JobFailure, now: int) -> None:
        pull = job.pull
        is_busy = failure.status is Status.BUSY or failure.trouble is Trouble.HANDSHAKE_BROKEN
        if is_busy:
            if pull.busy_since is None:
                pull.busy_since = job.moved_at
            give_up_at = pull.busy_since + BUSY_PATIENCE * self._timeout_ns
            if now < give_up_at:
                pause_ns = min(max(now - pull.busy_since, BUSY_PAUSE_NS), MAX_BUSY_PAUSE_NS)
                insort(self._paused, (min(now + pause_ns, give_up_at), pull), key=itemgetter(0))
                return
        self._fail(pull, *_meaning(failure, is_dial=True))

    def _receive_failed(self, job: Receive[Link], failure: JobFailure, now: int) -> None:
        pull = job.pull
        if failure.trouble is not Trouble.BROKEN:
            self._fail(pull, *_meaning(failure, is_dial=False))
            return
        has_moved = pull.landed > job.began_at
        if not (pull.may_retry or job.was_idle or has_moved):
            self._fail(pull, Cause.PEER_LOST, failure.detail)
            return
        pull.may_retry = has_moved or (pull.may_retry and job.was_idle)
        if job.start == len(job.offer.digests) and not self._has_next_command(pull):
            self._forget_if_done(pull.attempt)  # it broke behind the last page
            return
        self._wait(pull, now)

    def _give_up_behind(self, lane: PullLane[Link], job: Job[Link], failure: JobFailure) -> None:
        """The peer has not moved since `job` asked: whoever has waited behind it since then need not wait again."""
        for pull in [pull for pull in lane.waiting if pull.queued_at <= job.moved_at]:
            if not pull.attempt.is_over:
                self._fail(pull, *_meaning(failure, is_dial=False))

    def _fail(self, pull: Pull[Link], cause: Cause, detail: str) -> None:
        """The attempt is over, with all that comes from other workers of the peer."""
        attempt = pull.attempt
        del self._attempts[attempt.key]
        self._end(attempt.key, is_drained=False)
        self._stop(attempt)
        self._report(TransferFailed(*attempt.key, self._kv.shard, cause, detail))

    def _forget_if_done(self, attempt: Attempt[Link]) -> None:
        """Pages may all be here while the job of another worker has not ended yet: then the end of that one forgets."""
        if not any(pull.commands for pull in attempt.pulls):
            assert all(pull.landed == attempt.wanted for pull in attempt.pulls)
            del self._attempts[attempt.key]

    def _end(self, key: Key, *, is_drained: bool) -> None:
        self._ended[key] = is_drained
        self._ended.move_to_end(key)
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def _disarm(self, job: Receive[Link]) -> None:
        """No byte lands from here on."""
        job.pull.armed = None  # before the link is closed: `cut` must never meet one that is

    def _say_if_drained(self, attempt: Attempt[Link]) -> None:
        """A job of an attempt that is over has ended."""
        if attempt.is_armed or self._leaving.pop(attempt.key, None) is None:
            return
        if attempt.owes_drained and not self._is_closed:
            self._report(TransferDrained(*attempt.key, self._kv.shard))

    # -- what to do next

    def _job_of(self, pull: Pull[Link], now: int) -> Dial[Link] | Receive[Link] | None:
        if not self._check(pull):
            return None
        source = self._source(pull)
        if source is None:
            self._fail(pull, Cause.PEER_LOST, NO_ADDRESS)
            return None
        if source.idle:
            return self._receive(pull, source.idle.pop(), now, was_idle=True)
        return Dial(pull, now, source.address)

    def _source(self, pull: Pull[Link]) -> Source[Link] | None:
        """None: no address is known for this life of the peer any more."""
        peer = self._peers.get(pull.origin.peer)
        found = () if peer is None else peer.sources
        return next((source for source in found if source.tile.source == pull.origin.shard), None)

    def _receive(self, pull: Pull[Link], link: Link, now: int, *, was_idle: bool) -> Receive[Link]:
        assert pull.offer is not None
        command = pull.commands[0]
        start = pull.landed - command.first_wanted
        stop = min(len(command.sources), start + MAX_READ_PAGES)
        pull.armed, pull.busy_since = link, None
        return Receive(
            pull,
            now,
            link=link,
            command=command,
            offer=pull.offer,
            start=start,
            stop=stop,
            was_idle=was_idle,
            began_at=pull.landed,
            reported_at=now,
        )

    def _has_next_command(self, pull: Pull[Link]) -> bool:
        """The first command is done. Whether there is another one."""
        pull.commands.popleft()
        pull.offer, pull.may_retry = None, True
        return bool(pull.commands)

    def _check(self, pull: Pull[Link]) -> bool:
        """Whether the offer of the first command is one; if not, the attempt has failed."""
        if pull.offer is None:
            try:
                pull.offer = checked_offer(pull.commands[0], pull.tile)
            except BadOffer as error:
                self._fail(pull, Cause.TRANSFER_FAILED, str(error))
                return False
        return True

    # -- turns

    def _lane(self, origin: Origin) -> PullLane[Link]:
        lane = self._lanes.get(origin)
        if lane is None:
            lane = self._lanes[origin] = PullLane()
        return lane

    def _wait(self, pull: Pull[Link], now: int) -> None:
        lane = self._lane(pull.origin)
        if not lane.waiting:
            self._turns.append(pull.origin)
        pull.queued_at = now
        lane.waiting[pull] = None

    def _wait_no_more(self, pull: Pull[Link]) -> None:
        lane = self._lanes.get(pull.origin)
        if lane is not None and pull in lane.waiting:
            del lane.waiting[pull]
            if not lane.waiting:
                self._turns.remove(pull.origin)
            self._drop_if_empty(pull.origin)

    def _next_of(self, origin: Origin) -> Pull[Link]:
        """Who has waited longest in this lane, which goes behind the others."""
        lane = self._lanes[origin]
        self._turns.remove(origin)
        pull = next(iter(lane.waiting))
        del lane.waiting[pull]
        if lane.waiting:
            self._turns.append(origin)
        return pull

    def _drop_if_empty(self, origin: Origin) -> None:
        lane = self._lanes.get(origin)
        if lane is not None and not lane.waiting and not lane.jobs:
            del self._lanes[origin]

    def _begun(self, job: AnyJob) -> AnyJob:
        self._lane(job.origin).jobs.append(job)
        self._jobs[job] = None
        return job

    def _leave(self, job: Job[Link]) -> None:
        del self._jobs[job]
        self._lane(job.origin).jobs.remove(job)

    def _is_full(self, now: int) -> bool:
        if len(self._jobs) < self._max_jobs:
            return False
        if len(self._jobs) >= STALLED_JOBS * self._max_jobs:
            return True
        return sum(not is_stalled(job, now) for job in self._jobs) >= self._max_jobs

    def _may_begin(self, origin: Origin, now: int) -> bool:
        """Whether this worker of a peer may have one more job: its share of them, and none while one of its server does
        not move, of which an attempt needs all workers anyway."""
        if any(_is_held_up(lane, now) for other, lane in self._lanes.items() if other.peer == origin.peer):
            return False
        lane = self._lanes[origin]
        if not lane.jobs:
            return True
        num_well = sum(not _is_held_up(each, now) for each in self._lanes.values())
        return len(lane.jobs) < max(1, self._max_jobs // num_well)

    # -- links

    def _keep_idle(self, pull: Pull[Link], link: Link) -> None:
        source = self._source(pull)
        if source is not None and len(source.idle) < self._max_jobs:
            source.idle.append(link)
        else:
            self._close(link)

    def _close_idle(self, peer: DataPeer[Link]) -> None:
        for source in peer.sources:
            while source.idle:
                self._close(source.idle.pop())


def _attempt(command: PullPages, peer: DataPeer[Link]) -> Attempt[Link]:
    """With one pull for each worker of the peer that has something of what is wanted here."""
    first = command.first_wanted
    key = (command.request, command.attempt)
    attempt: Attempt[Link] = Attempt(key, command.room, command.peer, wanted=first, reported=first)
    attempt.pulls = tuple(
        Pull(attempt, Origin(command.peer, source.tile.source), source.tile, landed=first) for source in peer.sources
    )
    return attempt


def checked_offer(command: PullPages, tile: Tile) -> OfferedPages:
    """What of the command came from the peer through the control plane, and may be wrong. Raises BadOffer."""
    if len(command.digests) <= tile.index or len(command.secrets) <= tile.source:
        raise BadOffer("the peer offered no digests or no secret for what this worker needs")
    packed, secret = command.digests[tile.index], command.secrets[tile.source]
    if len(packed) != DIGEST_BYTES * len(command.sources):
        raise BadOffer("the peer offered another number of digests than of pages")
    if len(secret) != GRANT_SECRET_BYTES:
        raise BadOffer(f"the peer offered a secret of {len(secret)} bytes")
    if not may_be_read(command.room, command.sources, command.generations):
        raise BadOffer("the peer offered pages that cannot be")
    return OfferedPages(unpack_digests(packed), secret)


def _meaning(failure: JobFailure, *, is_dial: bool) -> tuple[Cause, str]:
    """What a trouble is for the transfer, in words for the log and for the user."""
    match failure.trouble:
        case Trouble.REFUSED:
            return REFUSALS[failure.status]
        case Trouble.NONSENSE:
            return (
                Cause.TRANSFER_FAILED,
                f"{'not a data plane' if is_dial else 'the peer talks nonsense'}: {failure.detail}",
            )
        case Trouble.HANDSHAKE_BROKEN:
            return Cause.PEER_LOST, f"the peer ended the handshake: {failure.detail}"
        case Trouble.BROKEN | Trouble.FROZEN:
            return Cause.PEER_LOST, failure.detail
        case Trouble.CORRUPT:
            return Cause.CORRUPT_PAGES, "a page differs from its digest"
        case _:
            return Cause.TRANSFER_FAILED, failure.detail


def _is_held_up(lane: PullLane[Link], now: int) -> bool:
    return any(is_stalled(job, now) for job in lane.jobs)


def is_stalled(job: Job[Link], now: int) -> bool:
    return now - job.moved_at >= STALLED_AFTER_NS
