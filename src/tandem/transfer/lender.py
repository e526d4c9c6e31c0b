"""Who may read which pages of one shard, who is reading right now, and who may have a connection.

A machine: it is told what happens, with the time in ns, and says what is to be done through `cut` and `report`, which
return at once. It owns no socket, thread or clock, so the simulator drives the very object that serves.

A *grant* covers the pages that one attempt of one request has published so far, each at one generation. It has a
secret, which travels to the one decode that it is for: rooms, pages and generations can be guessed, and members of the
cluster may read what they were granted, not what others were. A frame is sent under a *lease* of its grant, or copied
by its reader from shared memory under one. After `revoke` no lease begins, and when the last one has ended no byte of
the pages is on its way out of memory. A lease that is out when its grant is revoked has its link cut: nobody waits for
a slow reader. One who copies is waited for, for a timeout at most, and then hears that the pages were not lent to the
end: so nothing counts that was copied after `drained`.

There are at most `max_links` connections, and one reader may have a quarter of them, so that one with many, or a frozen
one, leaves room for the others. When there is no room, the connection that has been idle for longest is cut: of the
reader itself when it has its share already, else of anybody. It has to have been idle for `IDLE_GRACE_NS` since its
last Read, and one that was just welcomed is not idle: it was made because there is something to ask.
"""

import hmac
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import eq
from typing import Generic, TypeVar

from tandem.core.commands import PublishPages
from tandem.core.events import Event, PageRead, PagesDigested, ReadsDrained, TransferFailed
from tandem.core.values import MILLISECOND, SECOND, Cause, RequestId, ShardId
from tandem.transfer.port import Held
from tandem.transfer.protocol import Status

READ_REPORT_INTERVAL_NS = SECOND
IDLE_GRACE_NS = 100 * MILLISECOND  # readers ask again at once while they pull; to break their link costs a handshake
SHARE = 4  # one reader may have this part of the connections

Link = TypeVar("Link", bound=Hashable)


@dataclass(slots=True, eq=False)
class Grant(Generic[Link]):
    request: RequestId
    attempt: int
    room: int
    secret: bytes = field(repr=False)
    generations: dict[int, int] = field(default_factory=dict)  # page -> generation; once it is digested
    readers: list[Link] = field(default_factory=list)  # one per lease
    is_revoked: bool = False
    read_reported_at: int | None = None


@dataclass(slots=True, eq=False)
class ReaderConnection:
    """What is known of a connection."""

    reader: bytes  # digest of the worker
    idle_since: int | None = None  # None: at work, or has not asked for anything yet
    is_cut: bool = False  # its place is another one's already


def opens(secret: bytes, granted: bytes) -> bool:
    """Whether `secret` is that of the grant. In constant time."""
    return hmac.compare_digest(secret, granted)


class Lender(Generic[Link]):
    """Grants, leases and connections of one shard."""

    def __init__(
        self,
        shard: ShardId,
        *,
        draw_secret: Callable[[PublishPages], bytes],
        report: Callable[[Event], None],
        cut: Callable[[Link], None],
        max_links: int,
    ) -> None:
        """draw_secret: of a grant, at its first publication; `protocol.GRANT_SECRET_BYTES` that nobody can guess

        cut: make every call on a link fail soon, but for one that waits for the word of a reader who copies; `left` and
        `end_lease` follow as if the reader had gone
        """
        self._shard, self._max_links = shard, max_links
        self._draw_secret, self._report, self._cut = draw_secret, report, cut
        self._by_attempt: dict[tuple[RequestId, int], Grant[Link]] = {}  # live, or revoked with leases out
        self._by_room: dict[int, list[Grant[Link]]] = {}  # live only; more than one while attempts overlap
        self._places: dict[Link, ReaderConnection] = {}

    # -- what may be read

    def publish(self, command: PublishPages) -> Grant[Link]:
        """The grant of this attempt. Its new pages may be read when they are `digested`, one command after another."""
        key = (command.request, command.attempt)
        grant = self._by_attempt.get(key)
        if grant is None or grant.is_revoked:
            grant = Grant(command.request, command.attempt, command.room, self._draw_secret(command))
            self._by_attempt[key] = grant
            self._by_room.setdefault(command.room, []).append(grant)
        assert grant.room == command.room
        return grant

    def digested(self, grant: Grant[Link], command: PublishPages, digests: tuple[bytes, ...]) -> None:
        """Of all pages of the command: for each part that its reader needs. Nothing comes of it when the grant was
        revoked meanwhile."""
        if grant.is_revoked:
            return
        grant.generations.update(zip(command.pages, command.generations, strict=True))
        num_pages = len(command.pages)
        self._report(
            PagesDigested(
                command.request, command.attempt, self._shard, command.first_page, num_pages, digests, grant.secret
            )
        )

    def unreadable(self, grant: Grant[Link], command: PublishPages, why: str) -> None:
        """The pages of the command, which have no digests and are never lent: nobody is to wait for them."""
        if not grant.is_revoked:
            detail = f"pages cannot be read: {why}"
            self._report(TransferFailed(command.request, command.attempt, self._shard, Cause.TRANSFER_FAILED, detail))

    def revoke(self, request: RequestId, attempt: int) -> None:
        """No new lease. ReadsDrained follows, once: now, or when the last lease has ended."""
        grant = self._by_attempt.get((request, attempt))
        if grant is None:
            self._report(ReadsDrained(request, attempt, self._shard))
            return
        if grant.is_revoked:
            return
        grant.is_revoked = True
        grants = self._by_room[grant.room]
        grants.remove(grant)
        if not grants:
            del self._by_room[grant.room]
        for reader in grant.readers:
            self._cut(reader)
        self._say_if_drained(grant)

    # -- who reads

    def lease(
        self, link: Link, room: int, *, secret: bytes, pages: Sequence[int], generations: Sequence[int]
    ) -> Grant[Link] | Status:
        """Begin to send these pages on `link`, or the reason why not. `end_lease` must follow.

        Without the secret of a grant nobody learns whether its room or its pages are there.
        """
        refusal = Status.NOT_GRANTED
        for grant in self._by_room.get(room, ()):
            if not opens(secret, grant.secret):
                continue
            granted = grant.generations
            if all(map(eq, map(granted.get, pages), generations)):
                grant.readers.append(link)
                return grant
            if all(page in granted for page in pages):
                refusal = Status.WRONG_GENERATION
        return refusal

    def end_lease(self, grant: Grant[Link], link: Link, now: int, *, is_sent: bool) -> bool:
        """No byte of the frame is on its way out of memory any more. is_sent: all of it went out. Returns whether the
        pages were lent all the while."""
        grant.readers.remove(link)
        if grant.is_revoked:
            self._say_if_drained(grant)
        elif is_sent and (grant.read_reported_at is None or now - grant.read_reported_at >= READ_REPORT_INTERVAL_NS):
            grant.read_reported_at = now
            self._report(PageRead(grant.request, self._shard))
        return not grant.is_revoked

    # -- who is connected

    def admit(self, link: Link, reader: bytes, now: int) -> bool:
        """Whether `reader` may have this connection, too. May cut one that is idle. If so, `left` must follow."""
        if not self._has_place(reader, now):
            return False
        self._places[link] = ReaderConnection(reader)
        return True

    def asked(self, link: Link) -> None:
        """A Read begins to come."""
        self._places[link].idle_since = None

    def idle(self, link: Link, now: int) -> None:
        """A Read was answered to its end."""
        self._places[link].idle_since = now

    def left(self, link: Link) -> None:
        """The connection is closed, or about to be. It has no lease any more."""
        del self._places[link]

    def _has_place(self, reader: bytes, now: int) -> bool:
        if len(self._places) >= 2 * self._max_links:  # those that were cut have not left yet
            return False
        places = [(link, place) for link, place in self._places.items() if not place.is_cut]
        own = [(link, place) for link, place in places if place.reader == reader]
        if len(own) >= max(1, self._max_links // SHARE):
            return self._cut_idle(own, now)
        return len(places) < self._max_links or self._cut_idle(places, now)

    def _cut_idle(self, places: Iterable[tuple[Link, ReaderConnection]], now: int) -> bool:
        """Cut the one that has been idle for longest, if it has been for long enough."""
        idle = [(place.idle_since, link, place) for link, place in places if place.idle_since is not None]
        if not idle:
            return False
        since, link, place = min(idle, key=lambda each: each[0])
        if now - since < IDLE_GRACE_NS:
            return False
        place.is_cut = True
        self._cut(link)
        return True

    # -- what is held

    def grants(self, room: int | None = None) -> list[Grant[Link]]:
        """Those that may be read, of one room or of all; with None also the revoked ones with leases out."""
        return list(self._by_attempt.values() if room is None else self._by_room.get(room, ()))

    def take_over(self, grant: Grant[Link]) -> None:
        """What another lender of this shard had."""
        self._by_attempt[grant.request, grant.attempt] = grant
        if not grant.is_revoked:
            self._by_room.setdefault(grant.room, []).append(grant)

    def held(self) -> Held:
        """A revoked grant counts until its last reader has left."""
        grants = self._by_attempt.values()
        return Held(
            live_rooms=len({grant.room for grant in grants}),
            pinned_pages=sum(len(grant.generations) for grant in grants),
            open_transfers=sum(len(grant.readers) for grant in grants),
        )

    def _say_if_drained(self, grant: Grant[Link]) -> None:
        if grant.readers:
            return
        key = (grant.request, grant.attempt)
        if self._by_attempt.get(key) is grant:
            del self._by_attempt[key]
        self._report(ReadsDrained(grant.request, grant.attempt, self._shard))
