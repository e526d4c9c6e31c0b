"""The reader's side of the simulated data plane: does over virtual time what the product's `Puller` says.

A frame is one page. Dialling, asking and every frame take their time on the way; a frame is sent when the one before
has arrived, so the buffers in between hold no more than one. What is on its way when a link is cut still arrives, late,
and is written: that is why destinations need draining.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from tandem.core.commands import PullPages
from tandem.core.events import Event
from tandem.core.kv_parts import KvShard
from tandem.core.values import SECOND, Cut, Incarnation, PageId, RequestId, ShardId
from tandem.simulator.actors.executor import ShardMemory, digest
from tandem.simulator.clock import Clock
from tandem.transfer.jobs import Dial, JobFailure, PeerAddress, Receive, Trouble
from tandem.transfer.lender import Grant
from tandem.transfer.protocol import Status
from tandem.transfer.puller import Puller

LOOK_EVERY_NS = SECOND // 5  # whether a peer that was out of reach is there again
TIMEOUT_NS = 5 * SECOND
MAX_JOBS = 4


class PageFaults(Protocol):
    """What the world does to the data plane."""

    def transit_ns(self, source: str, target: str) -> int | None:
        """How long a page takes between two replicas; None while there is no way."""
        ...

    def give_up_ns(self) -> int:
        """How long a reader waits for a peer that does not answer."""
        ...

    def corrupts(self) -> bool: ...

    def answered(self, status: Status) -> None:
        """The owner of a page has said this to who wants to read it."""
        ...

    def digest_ns(self, num_pages: int) -> int: ...

    def page_read_ns(self) -> int: ...

    def linger_ns(self) -> int:
        """How much later a page on its way arrives when nobody wants it any more."""
        ...


class Owner(Protocol):
    """The life of a server whose pages are read."""

    incarnation: Incarnation
    is_frozen: bool  # hears nothing now
    dead: set[ShardId]  # their workers have died

    def admit(self, link: "Link") -> Status: ...

    def hear(self, link: "Link") -> None:
        """A Read comes."""
        ...

    def send_page(self, link: "Link", job: "Job") -> None:
        """The next one of the Read; `frame_comes`, `refused` or `broken` of the reader follows."""
        ...

    def idle(self, link: "Link") -> None: ...

    def leave(self, link: "Link") -> None:
        """The link is closed, or known to be. May be said twice."""
        ...


@dataclass(slots=True, eq=False)
class Link:
    """A connection between two workers."""

    reader: "ShardReader"
    owner: Owner
    shard: ShardId  # of the owner
    job: "Job | None" = None  # that is out on it
    is_cut: bool = False  # by either end, or both
    is_sending: bool = False  # a frame is on its way out of memory, or to the reader
    has_left: bool = False  # the owner knows that it is over


Job = Receive[Link]
AnyJob = Dial[Link] | Job
SimulatedGrant = Grant[Link]


@dataclass(slots=True)
class ShardReader:
    incarnation: Incarnation
    kv: KvShard
    memory: ShardMemory
    clock: Clock
    random: Random
    page_faults: PageFaults
    cut_of: Callable[[Incarnation], Cut]  # of a peer
    find: Callable[[Incarnation], Owner | Status | None]  # of that very life; another one refuses; None: nobody
    is_written: Callable[[RequestId, PageId], None]  # a page is about to be
    report: Callable[[Event], None]
    puller: Puller[Link] = field(init=False)
    give_ups: dict[AnyJob, int] = field(default_factory=dict)  # jobs that do not move, and when their time is over
    is_going: bool = False
    wakes_at: int | None = None
    has_no_socket: bool = False  # the next job fails for it

    def __post_init__(self) -> None:
        self.puller = Puller(
            self.kv,
            report=self.report,
            cut=self._cut,
            close=self._close,
            timeout_ns=TIMEOUT_NS,
            max_jobs=MAX_JOBS,
        )

    def pull(self, command: PullPages) -> None:
        cut = self.cut_of(command.peer)
        self.puller.learn(command.peer, cut, [PeerAddress(command.peer.name, 0, "") for _ in cut.shards])
        self.puller.pull(command, self.clock.time)
        self._go_on()

    # -- jobs

    def _go_on(self) -> None:
        if self.is_going:
            return  # whoever goes on asks again
        self.is_going = True
        while (job := self.puller.next_job(self.clock.time)) is not None:
            self._begin(job)
        self.is_going = False
        wake_at = self.puller.wake_at(self.clock.time)
        if wake_at is not None and (self.wakes_at is None or wake_at < self.wakes_at):
            self.wakes_at = wake_at
            self.clock.at(wake_at, self._wake, wake_at)

    def _wake(self, wake_at: int) -> None:
        if self.wakes_at == wake_at:
            self.wakes_at = None
            self._go_on()

    def _begin(self, job: AnyJob) -> None:
        if self.has_no_socket:
            self.has_no_socket = False
            self._fail(job, Trouble.OURS, "no socket")
        elif isinstance(job, Receive):
            self._ask(job)
        else:
            self._dial(job)

    def _fail(self, job: AnyJob, trouble: Trouble, detail: str = "", status: Status = Status.OK) -> None:
        self.give_ups.pop(job, None)
        if isinstance(job, Receive):
            job.link.job = None
        self.puller.failed(job, JobFailure(trouble, detail, status), self.clock.time)
        self._go_on()

    def _stall(self, job: AnyJob, look: Callable[..., None]) -> None:
        """Nothing moves. `look` again later, until the job has had its time."""
        give_up_at = self.give_ups.get(job)
        if give_up_at is None:
            give_up_at = self.give_ups[job] = self.clock.time + self.page_faults.give_up_ns()
        if self.clock.time >= give_up_at:
            self._fail(job, Trouble.FROZEN, "no answer")
        else:
            self.clock.after(LOOK_EVERY_NS, look, job)

    # -- a connection

    def _dial(self, job: Dial[Link]) -> None:
        transit_ns = self.page_faults.transit_ns(self.incarnation.name, job.origin.peer.name)
        if transit_ns is None:
            self._stall(job, self._dial)
        else:
            self.clock.after(transit_ns, self._greet, job)

    def _greet(self, job: Dial[Link]) -> None:
        owner = self.find(job.origin.peer)
        if owner is None or (not isinstance(owner, Status) and job.origin.shard in owner.dead):
            self._fail(job, Trouble.BROKEN, "nobody listens")
        elif isinstance(owner, Status):
            self.page_faults.answered(owner)
            self._fail(job, Trouble.REFUSED, status=owner)
        elif owner.is_frozen:
            self._stall(job, self._greet)
        else:
            self._welcomed(job, Link(self, owner, job.origin.shard))

    def _welcomed(self, job: Dial[Link], link: Link) -> None:
        answer = link.owner.admit(link)
        if answer is not Status.OK:
            self.page_faults.answered(answer)
            self._fail(job, Trouble.REFUSED, status=answer)
            return
        self.give_ups.pop(job, None)
        following = self.puller.dialled(job, link, self.clock.time)
        if following is not None:
            self._ask(following)
        self._go_on()

    def _cut(self, link: Link) -> None:
        """By us, in the middle of a job."""
        link.is_cut = True
        if not link.is_sending and link.job is not None:
            self.clock.after(self.page_faults.linger_ns(), self._break_off, link.job)

    def _break_off(self, job: Job) -> None:
        if job.link.job is job:
            job.link.owner.leave(job.link)
            self._fail(job, Trouble.BROKEN, "cut")

    def _close(self, link: Link) -> None:
        link.is_cut = True
        if not link.is_sending:
            link.owner.leave(link)

    # -- a Read

    def _ask(self, job: Job) -> None:
        link = job.link
        link.job = job
        if link.is_cut:
            self._fail(job, Trouble.BROKEN, "closed while it was idle")
            return
        self._send_read(job)

    def _send_read(self, job: Job) -> None:
        if job.link.job is not job:
            return
        transit_ns = self.page_faults.transit_ns(self.incarnation.name, job.origin.peer.name)
        if transit_ns is None:
            self._stall(job, self._send_read)
        else:
            self.clock.after(transit_ns, self._is_heard, job)

    def _is_heard(self, job: Job) -> None:
        if job.link.job is job and not job.link.has_left:
            job.link.owner.hear(job.link)
        self._want_page(job)

    def _want_page(self, job: Job) -> None:
        """It is the owner's turn."""
        link = job.link
        if link.job is not job:
            return
        if self.find(job.origin.peer) is not link.owner or link.shard in link.owner.dead:
            self._fail(job, Trouble.BROKEN, "the peer is gone")
        elif link.is_cut:
            self._break_off(job)
        elif link.owner.is_frozen:
            self._stall(job, self._want_page)
        else:
            link.owner.send_page(link, job)

    def refused(self, job: Job, status: Status) -> None:
        """The owner has said so and closes the link."""
        if job.link.job is job:
            self._fail(job, Trouble.REFUSED, status=status)

    def broken(self, job: Job) -> None:
        if job.link.job is job:
            self._fail(job, Trouble.BROKEN, "the peer is gone")

    def lost(self, job: Job) -> None:
        """What was sent does not arrive."""
        if job.link.job is job:
            self._stall(job, self.lost)

    def frame_comes(self, job: Job, contents: list[int]) -> None:
        """Write first, then compare: that is what a real reader does, and why destinations need draining."""
        link = job.link
        link.is_sending = False
        if self.find(self.incarnation) is None or link.job is not job:
            link.owner.leave(link)  # this life is over
            return
        self.give_ups.pop(job, None)
        if self.page_faults.corrupts():
            contents = contents.copy()
            contents[self.random.randrange(len(contents))] ^= 1 << self.random.randrange(64)
        destination = job.command.destinations[job.start]
        self.is_written(job.pull.attempt.key[0], destination)
        self.memory.copy_in(destination, contents, job.tile.here)
        if int.from_bytes(digest(contents), "little") != job.offer.digests[job.start]:
            link.owner.leave(link)
            self._fail(job, Trouble.CORRUPT)
        elif not self.puller.landed(job, 1, self.clock.time) or link.is_cut:
            self.clock.after(self.page_faults.linger_ns(), self._break_off, job)
        elif job.start < job.stop:
            self._want_page(job)
        else:
            self._received(job)

    def _received(self, job: Job) -> None:
        link = job.link
        link.owner.idle(link)
        link.job = None
        following = self.puller.received(job, self.clock.time)
        if following is not None:
            self._ask(following)
        self._go_on()
