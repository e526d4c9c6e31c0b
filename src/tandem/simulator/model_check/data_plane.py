"""A small data plane: the product's `Lender` and `Puller`, and as a shell the moves of the search.

Time stands still. A dial is answered when its Read is sent, in one move; what is on its way when a link is cut may
still arrive, and is written. The search lets one page land after the other. In tests of nodes (`tests/core_driver.py`)
all of a Read lands at once, and no job begins before that moment (`Reader.reads`).
"""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from tandem.core.commands import CancelPull, PublishPages, PullPages
from tandem.core.events import Event
from tandem.core.kv_parts import KvShard
from tandem.core.values import Cut, Incarnation, PageId, RequestId, ShardId
from tandem.simulator.actors.executor import ShardMemory, digest
from tandem.transfer.jobs import Dial, JobFailure, PeerAddress, Receive, Trouble
from tandem.transfer.lender import Lender
from tandem.transfer.protocol import GRANT_SECRET_BYTES, Status
from tandem.transfer.puller import LANDED_REPORT_INTERVAL_NS, Puller

SHARD = ShardId(0)
NOW = 0
LANDED_AT = LANDED_REPORT_INTERVAL_NS  # so that the first page of a Read is told before the last one has come
WHOLE, ONE_WORKER = KvShard.whole(1), Cut()
TIMEOUT_NS = 1  # nothing is ever late
MAX_JOBS = 8  # more than there are requests

AnyJob = Dial[int] | Receive[int]


def new_lender(shard: ShardId, report: Callable[[Event], None]) -> Lender[int]:
    """Links are the reader's numbers."""

    def draw_secret(command: PublishPages) -> bytes:
        return (b"%d.%d of %d" % (command.request, command.attempt, shard)).ljust(GRANT_SECRET_BYTES)

    return Lender(shard, draw_secret=draw_secret, report=report, cut=lambda link: None, max_links=1)


class Reading(Struct, frozen=True):
    """A job that is out, as the other replica and the search see it."""

    request: RequestId
    peer: Incarnation
    room: int
    link: int | None  # None: it dials
    secret: bytes  # of the grant
    sources: tuple[int, ...]  # what is still to come of this Read
    generations: tuple[int, ...]
    is_asked: bool  # the owner has a lease for it
    is_cut: bool


class ReaderValue(Struct, frozen=True):
    """Equal for readers that cannot be told apart; it may differ for some that cannot, which only makes a search
    longer."""

    pickled: bytes
    readings: tuple[Reading, ...] = ()


@dataclass(slots=True)
class Reader:
    kv: KvShard = WHOLE
    jobs: list[AnyJob] = field(default_factory=list["AnyJob"])
    asked: list[AnyJob] = field(default_factory=list["AnyJob"])  # of those
    links: list[int] = field(default_factory=list[int])  # that are open
    cut: list[int] = field(default_factory=list[int])  # of those
    inbox: list[Event] = field(default_factory=list[Event])  # of the node
    puller: Puller[int] = field(init=False)

    def __post_init__(self) -> None:
        self.puller = Puller(
            self.kv,
            report=self._say,
            cut=self._cut,
            close=self._close,
            timeout_ns=TIMEOUT_NS,
            max_jobs=MAX_JOBS,
        )

    # -- what the node wants

    def pull(self, command: PullPages, owner: Cut = ONE_WORKER) -> None:
        """Jobs for it are there after `go_on`. owner: how the peer is cut"""
        self.puller.learn(command.peer, owner, [PeerAddress(command.peer.name, 0, "") for _ in owner.shards])
        self.puller.pull(command, NOW)

    def go_on(self) -> None:
        while (job := self.puller.next_job(NOW)) is not None:
            self.jobs.append(job)

    def cancel(self, command: CancelPull) -> None:
        self.puller.cancel(command)
        for job in [job for job in self.jobs if isinstance(job, Dial) and job.pull.attempt.is_over]:
            self._ends(job, Trouble.BROKEN)  # it matters to nobody when

    # -- what becomes of a job

    def connects(self, number: int) -> Receive[int]:
        """It has a link from here on. A dial for what is cancelled has ended."""
        job = self.jobs[number]
        if isinstance(job, Receive):
            return job  # on a link that was idle
        link = next(link for link in range(len(self.links) + 1) if link not in self.links)
        self.links.append(link)
        following = self.puller.dialled(job, link, NOW)
        assert following is not None
        self.jobs[number] = following
        return following

    def is_asked(self, number: int) -> None:
        self.asked.append(self.jobs[number])

    def fails(self, number: int, trouble: Trouble, status: Status = Status.OK) -> None:
        self._ends(self.jobs[number], trouble, status)

    def next_page(self, number: int) -> tuple[RequestId, PageId]:
        """Of which request, and where to."""
        job = self._receive(number)
        return job.pull.attempt.key[0], job.command.destinations[job.start]

    def reads(self, number: int, lender: Lender[int], source: ShardMemory, memory: ShardMemory) -> None:
        """From the dial to the last page of its Read, in one moment."""
        job = self.connects(number)
        asked = slice(job.start, job.stop)
        pages, generations, room = job.command.sources[asked], job.command.generations[asked], job.command.room
        grant = lender.lease(job.link, room, secret=job.offer.secret, pages=pages, generations=generations)
        if isinstance(grant, Status):
            self.fails(number, Trouble.REFUSED, grant)
            return
        contents = [source.copy_out(PageId(page), job.tile.there) for page in pages]
        lender.end_lease(grant, job.link, NOW, is_sent=True)
        self.lands(number, memory, contents, is_last_sent=True)

    def lands(self, number: int, memory: ShardMemory, contents: Sequence[Sequence[int]], *, is_last_sent: bool) -> None:
        """The next pages. Write first, then compare; behind the last one that was sent the link breaks."""
        job = self._receive(number)
        for index, page in enumerate(map(list, contents), job.start):
            memory.copy_in(job.command.destinations[index], page, job.tile.here)
            if int.from_bytes(digest(page), "little") != job.offer.digests[index]:
                self._ends(job, Trouble.CORRUPT)
                return
        if not self.puller.landed(job, len(contents), LANDED_AT):
            self._ends(job, Trouble.BROKEN)
        elif job.start == job.stop:
            self._forget(job)
            following = self.puller.received(job, NOW)
            if following is not None:
                self.jobs.append(following)
            self.go_on()
        elif is_last_sent:
            self._ends(job, Trouble.BROKEN)

    def _receive(self, number: int) -> Receive[int]:
        job = self.jobs[number]
        assert isinstance(job, Receive)
        return job

    def _ends(self, job: AnyJob, trouble: Trouble, status: Status = Status.OK) -> None:
        self._forget(job)
        self.puller.failed(job, JobFailure(trouble, status=status), NOW)
        self.go_on()

    def _forget(self, job: AnyJob) -> None:
        self.jobs.remove(job)
        if job in self.asked:
            self.asked.remove(job)

    # -- what the puller wants

    def heard(self) -> list[Event]:
        """What it has said since this was asked last."""
        said, self.inbox = self.inbox, []
        return said

    def _say(self, event: Event) -> None:
        self.inbox.append(event)

    def _cut(self, link: int) -> None:
        self.cut.append(link)

    def _close(self, link: int) -> None:
        self.links.remove(link)
        if link in self.cut:
            self.cut.remove(link)

    # -- as a value

    def frozen(self) -> ReaderValue:
        """It is not used after this."""
        self.inbox = []  # which belongs to the node
        return ReaderValue(pickle.dumps(self), tuple(map(self._reading, self.jobs)))

    def _reading(self, job: AnyJob) -> Reading:
        command = job.pull.commands[0]
        is_receive = isinstance(job, Receive)
        start, stop = (job.start, job.stop) if is_receive else (0, 0)
        return Reading(
            job.pull.attempt.key[0],
            job.origin.peer,
            command.room,
            job.link if is_receive else None,
            command.secrets[SHARD],
            command.sources[start:stop],
            command.generations[start:stop],
            job in self.asked,
            is_receive and job.link in self.cut,
        )


def thaw_reader(value: ReaderValue, inbox: list[Event]) -> Reader:
    """One that says to `inbox` what it has to say."""
    reader: Reader = pickle.loads(value.pickled)
    reader.inbox = inbox
    return reader
