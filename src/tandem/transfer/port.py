"""What the worker process needs of a KV data plane, whatever carries the bytes.

PULL only: decode reads; nothing remote ever writes, and nobody holds an address in somebody else's memory. The calls
mirror the commands of `core/commands.py`: they return at once and never fail for anything a peer does. Results are
events, handed to `report` from threads of the transfer (so `report` is thread-safe and short). After `close` has
returned no event follows and no byte lands.

    publish   -> PagesDigested         per command, unless it is revoked first; the pages may be read from then on
                 TransferFailed        instead, where they cannot be read here
                 PageRead              at the first read of a request and then at most once per second
    revoke    -> ReadsDrained          the pages may be overwritten. A revoke while this answer is due adds none
    pull      -> PagesLanded*          watermarks; only pages count all of whose parts are here, with equal digests
                 TransferFailed        at most once per attempt, which is over by then: later pulls of it are ignored
    cancel    -> TransferDrained       exactly once per attempt, also for one that ended, failed or never began;
                                       the last event of the attempt: the destination pages may be reused
"""

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from msgspec import Struct

from tandem.core.commands import CancelPull, PublishPages, PullPages, RevokePages
from tandem.core.values import Cut, Incarnation
from tandem.transfer.jobs import PeerAddress


class Backend(Enum):
    """How pages travel: the values of `--disaggregation-transfer-backend`."""

    AUTO = "auto"  # through shared memory where both sides can, else over the socket; by NIXL where the other side must
    SOCK = "sock"  # over the socket only
    SHM = "shm"  # through shared memory, or not at all
    NIXL = "nixl"  # read by NIXL, or not at all


class Held(Struct, frozen=True):
    """What a data plane holds at this moment, counted from its own tables. All 0 when nothing moves or may be read."""

    live_rooms: int = 0  # with pages that a peer may read, or that are being pulled
    pinned_pages: int = 0  # that a peer may read, or into which bytes may land
    open_transfers: int = 0  # frames on their way out, and pulls with bytes on their way in


class KvTransfer(Protocol):
    """One shard's data plane. `host`, `port` and `unix` say where peers can pull from it."""

    host: str
    port: int
    unix: str

    def connect(self, peer: Incarnation, cut: Cut, shards: Sequence[PeerAddress]) -> None:
        """Remember how `peer` is cut and where each of its shards listens. Opens nothing."""
        ...

    def disconnect(self, peer: Incarnation) -> None:
        """Forget it, and close what is open and idle. A pull that runs ends by itself."""
        ...

    def publish(self, command: PublishPages) -> None: ...

    def revoke(self, command: RevokePages) -> None: ...

    def pull(self, command: PullPages) -> None: ...

    def cancel(self, command: CancelPull) -> None: ...

    def held(self) -> Held:
        """Thread-safe, and as short as the other calls."""
        ...

    def connections(self) -> dict[str, int]:
        """Open ones to workers of peers, in both directions, by how pages travel on them: shm, nixl, unix, tcp."""
        ...

    def close(self) -> None: ...
