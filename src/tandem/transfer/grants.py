"""Who may read which pages of this shard, and who is reading right now.

A grant covers the pages that one attempt of one request has published so far, each at one generation. It has a secret,
which is drawn at its first publication and travels to the one decode that it is for: rooms, pages and generations can
be guessed, and members of the cluster may read what they were granted, not what others were. A frame is sent under a
*lease* of its grant: leases are taken under the same lock as revoking, so after `revoke` no lease begins, and when the
last one has ended no byte of the pages is on its way out of memory. A lease that is out when its grant is revoked has
its link cut: nobody waits for a slow reader.
"""

import hmac
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import eq

from tandem.core.values import RequestId
from tandem.transfer import link as links
from tandem.transfer.port import Held
from tandem.transfer.protocol import GRANT_SECRET_BYTES, Status

READ_REPORT_INTERVAL_S = 1.0


@dataclass(slots=True, eq=False)
class Grant:
    request: RequestId
    attempt: int
    room: int
    secret: bytes = field(default_factory=partial(secrets.token_bytes, GRANT_SECRET_BYTES), repr=False)
    generations: dict[int, int] = field(default_factory=dict)  # page -> generation
    readers: list[socket.socket] = field(default_factory=list)  # one per lease
    is_revoked: bool = False
    read_reported_at: float | None = None


def opens(secret: bytes, granted: bytes) -> bool:
    """Whether `secret` is that of the grant. In constant time."""
    return hmac.compare_digest(secret, granted)


class Grants:
    """Thread-safe. No call blocks for longer than a look at the pages of one frame."""

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._by_attempt: dict[tuple[RequestId, int], Grant] = {}  # live, or revoked with leases out
        self._by_room: dict[int, list[Grant]] = {}  # live only; more than one while attempts overlap

    def extend(
        self, request: RequestId, attempt: int, *, room: int, pages: Sequence[int], generations: Sequence[int]
    ) -> bytes:
        """Returns the secret of the grant, the same one until it is revoked."""
        with self._lock:
            grant = self._by_attempt.get((request, attempt))
            if grant is None or grant.is_revoked:
                grant = Grant(request, attempt, room)
                self._by_attempt[request, attempt] = grant
                self._by_room.setdefault(room, []).append(grant)
            assert grant.room == room
            grant.generations.update(zip(pages, generations, strict=True))
            return grant.secret

    def revoke(self, request: RequestId, attempt: int) -> bool:
        """No new lease. Returns whether the attempt is drained now; if not, `end_lease` will say so, once."""
        with self._lock:
            grant = self._by_attempt.get((request, attempt))
            if grant is None:
                return True
            if grant.is_revoked:
                return False
            grant.is_revoked = True
            grants = self._by_room[grant.room]
            grants.remove(grant)
            if not grants:
                del self._by_room[grant.room]
            for reader in grant.readers:
                links.cut(reader)
            return self._drop_when_drained(grant)

    def lease(
        self, room: int, *, secret: bytes, pages: Sequence[int], generations: Sequence[int], reader: socket.socket
    ) -> Grant | Status:
        """Begin to send these pages on `reader`, or the reason why not. `end_lease` must follow.

        Without the secret of a grant nobody learns whether its room or its pages are there.
        """
        refusal = Status.NOT_GRANTED
        with self._lock:
            for grant in self._by_room.get(room, ()):
                if not opens(secret, grant.secret):
                    continue
                granted = grant.generations
                if all(map(eq, map(granted.get, pages), generations)):
                    grant.readers.append(reader)
                    return grant
                if all(page in granted for page in pages):
                    refusal = Status.WRONG_GENERATION
        return refusal

    def end_lease(self, grant: Grant, reader: socket.socket) -> bool:
        """Returns whether this was the last lease of a revoked grant: its reads are drained."""
        with self._lock:
            grant.readers.remove(reader)
            return grant.is_revoked and self._drop_when_drained(grant)

    def is_report_due(self, grant: Grant) -> bool:
        """Whether a read of this grant is to be reported now; asking counts as reporting."""
        now = self._clock()
        with self._lock:
            last = grant.read_reported_at
            if grant.is_revoked or (last is not None and now - last < READ_REPORT_INTERVAL_S):
                return False
            grant.read_reported_at = now
            return True

    def held(self) -> Held:
        """A revoked grant counts until its last reader has left."""
        with self._lock:
            grants = self._by_attempt.values()
            return Held(
                live_rooms=len({grant.room for grant in grants}),
                pinned_pages=sum(len(grant.generations) for grant in grants),
                open_transfers=sum(len(grant.readers) for grant in grants),
            )

    def _drop_when_drained(self, grant: Grant) -> bool:
        if grant.readers:
            return False
        key = (grant.request, grant.attempt)
        if self._by_attempt.get(key) is grant:
            del self._by_attempt[key]
        return True
