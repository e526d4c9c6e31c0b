"""The simulated data plane: one `KvStore` per replica publishes pages to be read and pulls pages of peers.

Pages move one after the other. Reading a page takes time on both sides: the source's grant (room, secret and
generation) is checked when the read begins, its memory is copied when the read ends, and the destination is written
when the bytes have arrived. Whatever frees a page in between is seen by the checks here or by the digest.
"""

import hashlib
from collections.abc import Callable
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
from tandem.core.values import SECOND, Cause, Incarnation, PageId, RequestId, ShardId
from tandem.simulator.actors.executor import PageMemory, digest
from tandem.simulator.clock import Clock
from tandem.transfer import grants as granting
from tandem.transfer.protocol import REFUSALS, Status

PAGE_READ_INTERVAL_NS = SECOND
LOOK_EVERY_NS = SECOND // 5  # whether a peer that was out of reach is there again

Report = PagesDigested | PageRead | ReadsDrained | PagesLanded | TransferFailed | TransferDrained


@dataclass(slots=True)
class Grant:
    """Pages of one room that a peer may read now."""

    request: RequestId
    attempt: int
    secrets: list[bytes] = field(default_factory=list)  # per shard
    generations: dict[int, int] = field(default_factory=dict)
    page_indices: dict[int, int] = field(default_factory=dict)  # page -> index in the request's table
    num_reading: list[int] = field(default_factory=list)  # per shard
    is_revoked: bool = False
    told_read_at: dict[ShardId, int] = field(default_factory=dict)


@dataclass(slots=True)
class Stream:
    """One shard of one pull: which pages are wanted, and how far it has come."""

    shard: ShardId
    wanted: list[tuple[int, int, PageId, bytes]] = field(
        default_factory=list
    )  # source, generation, destination, digest
    landed: int = 0
    is_moving: bool = False  # a page is on its way
    has_failed: bool = False


@dataclass(slots=True)
class Pull:
    command: PullPages  # the first one of the attempt
    streams: list[Stream]
    is_cancelled: bool = False


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


class Watcher(Protocol):
    """What the oracle wants to see of the data plane."""

    def page_is_read(
        self, store: "KvStore", grant: Grant, page: PageId, generation: int, contents: list[int], *, is_own: bool
    ) -> None:
        """A read of a granted page ends. is_own: whoever reads it has the secret of the grant."""
        ...

    def page_is_written(self, store: "KvStore", request: RequestId, page: PageId) -> None:
        """A pulled page is about to be written."""
        ...


@dataclass(slots=True)
class KvStore:
    incarnation: Incarnation
    memories: list[PageMemory]
    clock: Clock
    random: Random
    page_faults: PageFaults
    watcher: Watcher
    emit: Callable[[Event], None]
    find: Callable[[Incarnation], "KvStore | Status | None"]  # of that very life; another one refuses; None: nobody
    grants: dict[tuple[int, RequestId, int], Grant] = field(default_factory=dict)
    pulls: dict[tuple[RequestId, int], Pull] = field(default_factory=dict)
    digesting_until: dict[ShardId, int] = field(default_factory=dict)  # per shard: one thread, in order of the commands
    dead: set[ShardId] = field(default_factory=set)  # their workers have died, and the replica will with them
    slowness: dict[ShardId, float] = field(default_factory=dict)  # shards whose transfers take longer
    is_frozen: bool = False  # the worker hangs
    held: list[Report] = field(default_factory=list)  # what it has to say when it goes on

    def is_busy(self) -> bool:
        """A page is on its way, or is being read."""
        return any(stream.is_moving for pull in self.pulls.values() for stream in pull.streams) or any(
            any(grant.num_reading) for grant in self.grants.values()
        )

    # -- source side

    def publish(self, command: PublishPages, failing: ShardId | None = None) -> None:
        """Every shard in its own time. `failing`: a shard that has no memory for it."""
        key = (command.room, command.request, command.attempt)
        grant = self.grants.get(key)
        if grant is None:
            grant = self._new_grant(command)
            self.grants[key] = grant
        for shard in map(ShardId, range(len(self.memories))):
            if shard == failing:
                detail = "no memory for digests"
                self._tell(TransferFailed(command.request, command.attempt, shard, Cause.TRANSFER_FAILED, detail))
                continue
            duration_ns = self.page_faults.digest_ns(len(command.pages)) * self.slowness.get(shard, 1.0)
            ends_at = max(self.clock.time, self.digesting_until.get(shard, 0)) + int(duration_ns)
            self.digesting_until[shard] = ends_at
            self.clock.at(ends_at, self._digested, command, grant, shard)

    def _new_grant(self, command: PublishPages | RevokePages) -> Grant:
        """Its secrets follow from whose it is: they tell grants apart, and take nothing from the seed's randomness."""
        number = f"{self.incarnation.id} {command.room} {command.request} {command.attempt}"
        shards = range(len(self.memories))
        secrets = [hashlib.sha256(f"{number} {shard}".encode()).digest()[:16] for shard in shards]
        return Grant(command.request, command.attempt, secrets, num_reading=[0 for _ in shards])

    def _tell(self, event: Report) -> None:
        """What a dead worker would say is not heard; what one that hangs has to say comes later."""
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

    def _digested(self, command: PublishPages, grant: Grant, shard: ShardId) -> None:
        if grant.is_revoked or shard in self.dead:
            return
        memory = self.memories[shard]
        digests = b"".join(digest(memory.slots[page]) for page in command.pages)
        pages = zip(command.pages, command.generations, strict=True)
        for index, (page, generation) in enumerate(pages, start=command.first_page):
            grant.generations[page] = generation
            grant.page_indices[page] = index
        secret = grant.secrets[shard]
        self._tell(PagesDigested(command.request, command.attempt, shard, command.first_page, digests, secret))

    def revoke(self, command: RevokePages) -> None:
        """No new read; each shard answers when its last one has ended, also when nothing was ever published."""
        grant = self.grants.get((command.room, command.request, command.attempt))
        if grant is None:
            grant = self._new_grant(command)
            self.grants[(command.room, command.request, command.attempt)] = grant
        if grant.is_revoked:
            return
        grant.is_revoked = True
        for shard, num_reading in enumerate(grant.num_reading):
            if num_reading == 0:
                self._tell(ReadsDrained(grant.request, grant.attempt, ShardId(shard)))
        if not any(grant.num_reading):
            self.grants = {key: other for key, other in self.grants.items() if other is not grant}

    def begin_read(self, room: int, page: int, generation: int, shard: ShardId, secret: bytes) -> Grant | Status | None:
        """Whether whoever presents `secret` may read `page` now. A granted read is counted until `end_read`.

        None: nobody answers, since the worker has died.
        """
        if shard in self.dead:
            return None
        answer = self._grant_read(room, page, generation, shard, secret)
        self.page_faults.answered(Status.OK if isinstance(answer, Grant) else answer)
        return answer

    def _grant_read(self, room: int, page: int, generation: int, shard: ShardId, secret: bytes) -> Grant | Status:
        for (granted_room, _, _), grant in self.grants.items():
            is_meant = granted_room == room and granting.opens(secret, grant.secrets[shard])
            if is_meant and not grant.is_revoked and page in grant.generations:
                if grant.generations[page] != generation:
                    return Status.WRONG_GENERATION
                grant.num_reading[shard] += 1
                self._tell_read(grant, shard)
                return grant
        return Status.NOT_GRANTED

    def end_read(self, grant: Grant, page: PageId, generation: int, shard: ShardId, secret: bytes) -> list[int]:
        contents = self.memories[shard].copy_out(page)
        is_own = secret == grant.secrets[shard]
        self.watcher.page_is_read(self, grant, page, generation, contents if shard == 0 else [], is_own=is_own)
        grant.num_reading[shard] -= 1
        if grant.is_revoked and grant.num_reading[shard] == 0:
            self._tell(ReadsDrained(grant.request, grant.attempt, shard))
            if not any(grant.num_reading):
                self.grants = {key: other for key, other in self.grants.items() if other is not grant}
        return contents

    def _tell_read(self, grant: Grant, shard: ShardId) -> None:
        told_at = grant.told_read_at.get(shard)
        if told_at is None or self.clock.time - told_at >= PAGE_READ_INTERVAL_NS:
            grant.told_read_at[shard] = self.clock.time
            self._tell(PageRead(grant.request, shard))

    # -- destination side

    def pull(self, command: PullPages, failing: ShardId | None = None) -> None:
        key = (command.request, command.attempt)
        pull = self.pulls.get(key)
        if pull is None:
            pull = Pull(command, [Stream(ShardId(shard)) for shard in range(len(self.memories))])
            self.pulls[key] = pull
        if pull.is_cancelled:
            return
        for stream in pull.streams:
            digests = command.digests[stream.shard]
            known = len(stream.wanted) - command.first_wanted
            for index, source in enumerate(command.sources):
                if index >= known:
                    page_digest = digests[index * 8 : index * 8 + 8]
                    wanted = (source, command.generations[index], command.destinations[index], page_digest)
                    stream.wanted.append(wanted)
            if stream.shard == failing and not stream.is_moving:
                self._fail(pull, stream, Cause.TRANSFER_FAILED, "no socket")
            self._next_page(pull, stream)

    def cancel(self, command: CancelPull) -> None:
        """Answered per shard once its page on the way has landed or is lost; at once when there is none."""
        pull = self.pulls.get((command.request, command.attempt))
        if pull is None:
            for shard in range(len(self.memories)):
                self._tell(TransferDrained(command.request, command.attempt, ShardId(shard)))
            return
        if pull.is_cancelled:
            return
        pull.is_cancelled = True
        for stream in pull.streams:
            if not stream.is_moving:
                self._drained(pull, stream)

    def forget(self, requests: tuple[RequestId, ...]) -> None:
        if self.pulls:
            gone = frozenset(requests)
            self.pulls = {key: pull for key, pull in self.pulls.items() if key[0] not in gone}

    def _next_page(self, pull: Pull, stream: Stream) -> None:
        if stream.is_moving or stream.has_failed or stream.landed == len(stream.wanted):
            return
        stream.is_moving = True
        self._ask(pull, stream, self.clock.time + self.page_faults.give_up_ns())

    def _ask(self, pull: Pull, stream: Stream, give_up_at: int) -> None:
        """Ask the peer for the next page; while there is no way, until the reader gives up."""
        peer = pull.command.peer
        transit_ns = self.page_faults.transit_ns(self.incarnation.name, peer.name)
        if pull.is_cancelled:
            self._stop(pull, stream)
        elif transit_ns is not None:
            self.clock.after(transit_ns, self._begin, pull, stream, give_up_at)
        elif self.clock.time < give_up_at:
            self.clock.after(LOOK_EVERY_NS, self._ask, pull, stream, give_up_at)
        else:
            self._fail(pull, stream, Cause.TRANSFER_FAILED, "no answer")

    def _begin(self, pull: Pull, stream: Stream, give_up_at: int) -> None:
        source = self.find(pull.command.peer)
        if not isinstance(source, KvStore):
            if source is not None:
                self.page_faults.answered(source)
            self._refused(pull, stream, source, "peer is gone")
            return
        if source.is_frozen:
            self._wait_for(source, pull, stream, give_up_at)
            return
        page, generation, _, _ = stream.wanted[stream.landed]
        secret = pull.command.secrets[stream.shard]
        grant = source.begin_read(pull.command.room, page, generation, stream.shard, secret)
        if not isinstance(grant, Grant):
            self._refused(pull, stream, grant, "not granted")
            return
        duration_ns = self.page_faults.page_read_ns() * source.slowness.get(stream.shard, 1.0)
        self.clock.after(duration_ns, self._end, pull, stream, source, grant, give_up_at)

    def _wait_for(self, source: "KvStore", pull: Pull, stream: Stream, give_up_at: int) -> None:
        """A worker that hangs has not read the question yet."""
        if pull.is_cancelled:
            self._stop(pull, stream)
        elif self.clock.time < give_up_at:
            self.clock.after(LOOK_EVERY_NS, self._begin, pull, stream, give_up_at)
        else:
            self._fail(pull, stream, Cause.TRANSFER_FAILED, "no answer")

    def _end(self, pull: Pull, stream: Stream, source: "KvStore", grant: Grant, give_up_at: int) -> None:
        if self.find(source.incarnation) is not source:
            self._fail(pull, stream, Cause.PEER_LOST, "peer is gone")
            return
        page, generation, _, _ = stream.wanted[stream.landed]
        secret = pull.command.secrets[stream.shard]
        contents = source.end_read(grant, PageId(page), generation, stream.shard, secret)
        transit_ns = self.page_faults.transit_ns(source.incarnation.name, self.incarnation.name)
        if transit_ns is None:
            self.clock.at(give_up_at, self._fail, pull, stream, Cause.TRANSFER_FAILED, "broken off")
            return
        if pull.is_cancelled:
            transit_ns += self.page_faults.linger_ns()
        self.clock.after(transit_ns, self._arrive, pull, stream, contents)

    def _arrive(self, pull: Pull, stream: Stream, contents: list[int]) -> None:
        """Write first, then compare: that is what a real reader does, and why destinations need draining."""
        if self.find(self.incarnation) is not self:
            return
        _, _, destination, expected = stream.wanted[stream.landed]
        if self.page_faults.corrupts():
            contents = contents.copy()
            contents[self.random.randrange(len(contents))] ^= 1 << self.random.randrange(64)
        self.watcher.page_is_written(self, pull.command.request, destination)
        self.memories[stream.shard].copy_in(destination, contents)
        if pull.is_cancelled:
            self._stop(pull, stream)
        elif digest(contents) != expected:
            self._fail(pull, stream, Cause.CORRUPT_PAGES, "digest differs")
        else:
            stream.is_moving = False
            stream.landed += 1
            self._tell(PagesLanded(pull.command.request, pull.command.attempt, stream.shard, stream.landed))
            self._next_page(pull, stream)

    def _refused(self, pull: Pull, stream: Stream, answer: Status | None, detail: str) -> None:
        """What a refusal means for the transfer is the product's table. None: nobody answers any more."""
        self._fail(pull, stream, REFUSALS[answer][0] if answer is not None else Cause.PEER_LOST, detail)

    def _fail(self, pull: Pull, stream: Stream, cause: Cause, detail: str) -> None:
        if pull.is_cancelled:
            self._stop(pull, stream)
            return
        stream.is_moving = False
        stream.has_failed = True
        self._tell(TransferFailed(pull.command.request, pull.command.attempt, stream.shard, cause, detail))

    def _stop(self, pull: Pull, stream: Stream) -> None:
        """Nothing of a cancelled stream is on its way any more; saying so may take a while."""
        self.clock.after(self.page_faults.linger_ns(), self._drained, pull, stream)

    def _drained(self, pull: Pull, stream: Stream) -> None:
        stream.is_moving = False
        self._tell(TransferDrained(pull.command.request, pull.command.attempt, stream.shard))
