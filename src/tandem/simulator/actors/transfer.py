"""The simulated data plane: one `KvStore` per replica, with a `Lender` and a `Puller` of the product for each shard.

What sockets and threads are to these in a server is here virtual time. Reading a page takes time on both sides: the
lease is asked for when the read begins, memory is copied when the read ends, and the destination is written when the
bytes have arrived. Whatever frees a page in between is seen by the checks here or by the digest.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from tandem.core.commands import CancelPull, PublishPages, PullPages, RevokePages
from tandem.core.events import (
    Event,
    PageRead,
    PagesDigested,
    PagesLanded,
    ReadsDrained,
    TransferDrained,
    TransferFailed,
)
from tandem.core.kv_parts import KvShard, Runs
from tandem.core.values import Cause, Cut, Incarnation, PageId, RequestId, ShardId
from tandem.simulator.actors.executor import WHOLE, ShardMemory, digests
from tandem.simulator.actors.kv_reader import Job, Link, PageFaults, ShardReader, SimulatedGrant
from tandem.simulator.clock import Clock
from tandem.transfer.lender import Grant, Lender
from tandem.transfer.protocol import GRANT_SECRET_BYTES, Status, reader_digest

MAX_LINKS = (8, 64)  # few, so that readers meet a busy owner; and as in a server

Report = PagesDigested | PageRead | ReadsDrained | PagesLanded | TransferFailed | TransferDrained


class Watcher(Protocol):
    """What the oracle wants to see of the data plane."""

    def page_is_read(
        self,
        store: "KvStore",
        grant: SimulatedGrant,
        page: PageId,
        generation: int,
        contents: list[int],
        *,
        is_own: bool,
    ) -> None:
        """A read of a granted page ends. is_own: whoever reads it has the secret of the grant."""
        ...

    def page_is_written(self, store: "KvStore", request: RequestId, page: PageId) -> None:
        """A pulled page is about to be written."""
        ...


@dataclass(slots=True)
class KvStore:
    incarnation: Incarnation
    kv: Sequence[KvShard]  # of its workers
    memories: list[ShardMemory]  # of each
    clock: Clock
    random: Random
    page_faults: PageFaults
    watcher: Watcher
    emit: Callable[[Event], None]
    cut_of: Callable[[Incarnation], Cut]  # of a peer
    find: Callable[[Incarnation], "KvStore | Status | None"]  # of that very life; another one refuses; None: nobody
    lenders: list[Lender[Link]] = field(init=False)
    readers: list[ShardReader] = field(init=False)
    page_indices: dict[tuple[RequestId, int], dict[int, int]] = field(default_factory=dict)  # page -> index in table
    digesting_until: dict[ShardId, int] = field(default_factory=dict)  # per shard: one thread, in order of the commands
    dead: set[ShardId] = field(default_factory=set)  # their workers have died, and the replica will with them
    slowness: dict[ShardId, float] = field(default_factory=dict)  # shards whose transfers take longer
    is_frozen: bool = False  # the worker hangs
    held: list[Report] = field(default_factory=list)  # what it has to say when it goes on

    def __post_init__(self) -> None:
        max_links = self.random.choice(MAX_LINKS)
        shards = [ShardId(shard) for shard in range(len(self.memories))]
        self.lenders = [self._new_lender(shard, max_links) for shard in shards]
        self.readers = [self._new_reader(shard) for shard in shards]

    def _new_lender(self, shard: ShardId, max_links: int) -> Lender[Link]:
        def draw_secret(command: PublishPages) -> bytes:
            """It follows from whose it is: that tells grants apart, and takes nothing from the seed's randomness."""
            number = f"{self.incarnation.id} {command.room} {command.request} {command.attempt} {shard}"
            return hashlib.sha256(number.encode()).digest()[:GRANT_SECRET_BYTES]

        return Lender(shard, draw_secret=draw_secret, report=self._tell, cut=self._cut, max_links=max_links)

    def _new_reader(self, shard: ShardId) -> ShardReader:
        def is_written(request: RequestId, page: PageId) -> None:
            self.watcher.page_is_written(self, request, page)

        return ShardReader(
            self.incarnation,
            self.kv[shard],
            self.memories[shard],
            self.clock,
            self.random,
            self.page_faults,
            self.cut_of,
            lambda peer: self.find(peer),
            is_written,
            self._tell,
        )

    def is_busy(self) -> bool:
        """A page is on its way, or is being read."""
        return any(reader.puller.num_jobs for reader in self.readers) or any(
            grant.readers for lender in self.lenders for grant in lender.grants()
        )

    def touches(self, request: RequestId) -> bool:
        """Whether a page of this request is on its way, or its word."""
        return (
            any(event.request == request for event in self.held)
            or any(reader.puller.can_land(request) for reader in self.readers)
            or any(grant.readers for grant in self.grants() if grant.request == request)
        )

    def grants(self) -> list[SimulatedGrant]:
        """Of all shards: those that may be read, and the revoked ones with leases out."""
        return [grant for lender in self.lenders for grant in lender.grants()]

    def _tell(self, event: Event) -> None:
        """What a dead worker would say is not heard; what one that hangs has to say comes later."""
        assert isinstance(event, Report)
        if self.is_frozen:
            self.held.append(event)
        elif event.shard not in self.dead:
            self.emit(event)

    def thaw(self) -> None:
        """The worker goes on."""
        self.is_frozen = False
        held, self.held = self.held, []
        for event in held:
            self._tell(event)

    # -- commands

    def publish(self, command: PublishPages, failing: ShardId | None = None) -> None:
        """Every shard in its own time. `failing`: a shard that has no memory for it."""
        indices = self.page_indices.setdefault((command.request, command.attempt), {})
        indices.update({page: index for index, page in enumerate(command.pages, start=command.first_page)})
        for shard, lender in enumerate(self.lenders):
            shard = ShardId(shard)
            if shard == failing:
                detail = "no memory for digests"
                self._tell(TransferFailed(command.request, command.attempt, shard, Cause.TRANSFER_FAILED, detail))
                continue
            grant = lender.publish(command)
            duration_ns = self.page_faults.digest_ns(len(command.pages)) * self.slowness.get(shard, 1.0)
            ends_at = max(self.clock.time, self.digesting_until.get(shard, 0)) + int(duration_ns)
            self.digesting_until[shard] = ends_at
            self.clock.at(ends_at, self._digested, command, grant, shard)

    def _digested(self, command: PublishPages, grant: SimulatedGrant, shard: ShardId) -> None:
        if grant.is_revoked or shard in self.dead:
            return
        self.lenders[shard].digested(grant, command, digests(command, self.kv[shard], self.memories[shard]))

    def revoke(self, command: RevokePages) -> None:
        for lender in self.lenders:
            lender.revoke(command.request, command.attempt)

    def pull(self, command: PullPages, failing: ShardId | None = None) -> None:
        """`failing`: a shard that has no socket for it."""
        for reader in self.readers:
            reader.has_no_socket = reader.has_no_socket or reader.kv.shard == failing
            reader.pull(command)

    def find_sockets(self) -> None:
        """There are some again."""
        for reader in self.readers:
            reader.has_no_socket = False

    def cancel(self, command: CancelPull) -> None:
        for reader in self.readers:
            reader.puller.cancel(command)

    # -- the owner of connections

    def admit(self, link: Link) -> Status:
        reader = reader_digest(link.reader.incarnation, link.reader.kv.shard)
        return Status.OK if self.lenders[link.shard].admit(link, reader, self.clock.time) else Status.BUSY

    def hear(self, link: Link) -> None:
        self.lenders[link.shard].asked(link)

    def idle(self, link: Link) -> None:
        if not link.has_left:
            self.lenders[link.shard].idle(link, self.clock.time)

    def leave(self, link: Link) -> None:
        if not link.has_left:
            link.has_left = link.is_cut = True
            self.lenders[link.shard].left(link)

    def _cut(self, link: Link) -> None:
        """By us. What is on its way arrives; whoever waits at the other end finds out."""
        link.is_cut = True
        if not link.is_sending:
            self.clock.after(self.page_faults.linger_ns(), self.leave, link)
            if link.job is not None:
                self.clock.after(self.page_faults.linger_ns(), link.reader.broken, link.job)

    def send_page(self, link: Link, job: Job) -> None:
        start = job.start
        page, generation = job.command.sources[start], job.command.generations[start]
        answer = self.lease(link, job.command.room, page, generation, secret=job.offer.secret)
        if not isinstance(answer, Grant):
            self.leave(link)
            transit_ns = self.page_faults.transit_ns(self.incarnation.name, link.reader.incarnation.name)
            if transit_ns is None:
                link.reader.lost(job)
            else:
                self.clock.after(transit_ns, link.reader.refused, job, answer)
            return
        link.is_sending = True
        duration_ns = self.page_faults.page_read_ns() * self.slowness.get(link.shard, 1.0)
        self.clock.after(duration_ns, self._sent, link, job, answer, page, generation)

    def lease(self, link: Link, room: int, page: int, generation: int, *, secret: bytes) -> SimulatedGrant | Status:
        """Of one page; `end_lease` must follow."""
        lender = self.lenders[link.shard]
        answer = lender.lease(link, room, secret=secret, pages=(page,), generations=(generation,))
        self.page_faults.answered(Status.OK if isinstance(answer, Grant) else answer)
        return answer

    def end_lease(
        self, link: Link, grant: SimulatedGrant, page: PageId, generation: int, *, secret: bytes, runs: Runs = WHOLE
    ) -> list[int]:
        """What these cells of the page held in that moment."""
        contents = self.memories[link.shard].copy_out(page, runs)
        is_own = secret == grant.secret
        seen = self.memories[0].first_cell(page) if link.shard == 0 else []
        self.watcher.page_is_read(self, grant, page, generation, seen, is_own=is_own)
        self.lenders[link.shard].end_lease(grant, link, self.clock.time, is_sent=not link.is_cut)
        return contents

    def _sent(self, link: Link, job: Job, grant: SimulatedGrant, page: PageId, generation: int) -> None:
        if self.find(self.incarnation) is not self:
            link.is_sending = False
            link.reader.broken(job)
            return
        contents = self.end_lease(link, grant, page, generation, secret=job.offer.secret, runs=job.tile.there)
        transit_ns = self.page_faults.transit_ns(self.incarnation.name, link.reader.incarnation.name)
        if transit_ns is None:
            link.is_sending = False
            self.leave(link)
            link.reader.lost(job)
            return
        if link.is_cut:
            transit_ns += self.page_faults.linger_ns()
        self.clock.after(transit_ns, link.reader.frame_comes, job, contents)
