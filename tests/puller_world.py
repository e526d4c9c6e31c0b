"""A puller alone, told by hand what becomes of its jobs. Links are numbers."""

from dataclasses import dataclass, field
from typing import Any

import msgspec

from tandem.core.commands import CancelPull, PullPages
from tandem.core.events import Event, TransferFailed
from tandem.core.kv_parts import KvShard, parts
from tandem.core.values import SECOND, Cut, Incarnation, PageId, RequestId
from tandem.transfer.jobs import Dial, JobFailure, PeerAddress, Receive, Trouble
from tandem.transfer.protocol import Status
from tandem.transfer.puller import Puller

ONE, TWO = RequestId(1), RequestId(2)
PEER = Incarnation("prefill", "1")
FIRST_PORT = 10
TIMEOUT_NS = 5 * SECOND
MAX_JOBS = 4
Job = Dial[int] | Receive[int]


@dataclass
class World:
    """A puller, what it has said and done to links, and the time.

    A digest is that of its part, a secret of its worker.
    """

    kv: KvShard = KvShard.whole(64)  # noqa: RUF009 - it never changes
    theirs: Cut = Cut()  # noqa: RUF009 - of all peers
    now: int = 1
    events: list[Event] = field(default_factory=list)
    is_cut: list[int] = field(default_factory=list)
    is_closed: list[int] = field(default_factory=list)
    num_links: int = 0

    def __post_init__(self) -> None:
        self.puller: Puller[int] = Puller(
            self.kv,
            report=self.events.append,
            cut=self.is_cut.append,
            close=self.is_closed.append,
            timeout_ns=TIMEOUT_NS,
            max_jobs=MAX_JOBS,
        )
        self.learn(PEER)

    def learn(self, peer: Incarnation) -> None:
        self.puller.learn(peer, self.theirs, [PeerAddress(peer.name, FIRST_PORT + at, "") for at in self.theirs.shards])

    def pull(
        self, request: RequestId = ONE, *, count: int = 3, peer: Incarnation = PEER, first_wanted: int = 0, **other: Any
    ) -> None:
        pages = tuple(range(count))
        num_parts = len(parts(self.kv.grid, self.theirs, self.kv.cut))
        digests = tuple(bytes([part]) * 8 * count for part in range(num_parts))
        secrets = tuple(bytes([shard]) * 16 for shard in self.theirs.shards)
        places = tuple(map(PageId, pages))
        command = PullPages(request, 0, 7, peer, first_wanted, pages, pages, places, digests, secrets)
        self.puller.pull(msgspec.structs.replace(command, **other), self.now)

    def cancel(self, request: RequestId = ONE) -> None:
        self.puller.cancel(CancelPull(request, 0))

    def dial(self) -> Dial[int]:
        job = self.puller.next_job(self.now)
        assert isinstance(job, Dial), job
        return job

    def receive(self) -> Receive[int]:
        """The next job, behind a handshake if it needs one."""
        job = self.puller.next_job(self.now)
        if isinstance(job, Dial):
            job = self.welcome(job)
        assert isinstance(job, Receive), job
        return job

    def welcome(self, job: Dial[int]) -> Receive[int] | None:
        self.num_links += 1
        return self.puller.dialled(job, self.num_links, self.now)

    def land(self, job: Receive[int], count: int) -> bool:
        return self.puller.landed(job, count, self.now)

    def fail(self, job: Job, trouble: Trouble, status: Status = Status.OK) -> None:
        self.puller.failed(job, JobFailure(trouble, "so it is", status), self.now)

    def failure(self) -> TransferFailed:
        (event,) = [event for event in self.events if isinstance(event, TransferFailed)]
        return event

    def said(self, kind: type) -> int:
        return sum(isinstance(event, kind) for event in self.events)

    def jobs(self) -> list[Job]:
        """All that can begin now."""
        jobs: list[Job] = []
        while (job := self.puller.next_job(self.now)) is not None:
            jobs.append(job)
        return jobs

    def sleep(self) -> None:
        wake_at = self.puller.wake_at(self.now)
        assert wake_at is not None, "it waits for nothing"
        self.now = max(self.now, wake_at)

    def finish(self, job: Receive[int]) -> Receive[int] | None:
        """All of its Read comes."""
        self.land(job, job.stop - job.start)
        return self.puller.received(job, self.now)
