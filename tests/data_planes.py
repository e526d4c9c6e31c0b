"""Data planes of servers that are one worker each: what most tests speak of."""

import socket
from collections.abc import Sequence

from tandem.core.commands import PullPages
from tandem.core.kv_parts import Runs, Tile
from tandem.core.values import Cut, Incarnation, ShardId
from tandem.transfer import protocol
from tandem.transfer.jobs import Attempt, OfferedPages, Origin, PeerAddress, Pull, Receive
from tandem.transfer.port import KvTransfer

PAGE_BYTES = 4096


def introduce(transfer: KvTransfer, peer: Incarnation, host: str, port: int, unix: str = "") -> None:
    """Tell a data plane where the one worker of a peer listens."""
    transfer.connect(peer, Cut(), [PeerAddress(host, port, unix)])


def whole(page_bytes: int = PAGE_BYTES) -> Runs:
    """All bytes of a page."""
    return Runs(0, page_bytes, page_bytes, 1)


def tile(page_bytes: int = PAGE_BYTES) -> Tile:
    """What a worker pulls from the one worker of a peer: whole pages."""
    return Tile(0, ShardId(0), whole(page_bytes), whole(page_bytes), page_bytes)


def pack_read(
    room: int, secret: bytes, pages: Sequence[int], generations: Sequence[int], *, page_bytes: int = PAGE_BYTES
) -> bytes:
    """A Read of whole pages."""
    return protocol.pack_read(room, secret, whole(page_bytes), pages, generations)


def job_of(command: PullPages, offer: OfferedPages, link: socket.socket, page_bytes: int) -> Receive[socket.socket]:
    """As a puller makes it for all pages of a command, from the one worker of a peer."""
    attempt: Attempt[socket.socket] = Attempt((command.request, command.attempt), command.room, command.peer, 0, 0)
    pull = Pull(attempt, Origin(command.peer, ShardId(0)), tile(page_bytes), landed=0)
    return Receive(
        pull,
        0,
        link=link,
        command=command,
        offer=offer,
        start=0,
        stop=len(command.sources),
        was_idle=False,
        began_at=0,
        reported_at=0,
    )
