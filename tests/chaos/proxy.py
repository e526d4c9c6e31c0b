"""A fault proxy for TCP in user space, and the way to put it between a decode and its prefills without a product hook.

A `Link` listens, dials its target for every connection, and passes bytes on in both directions. It knows nothing of
the frames in them. What it can do to them:

    delay        every piece waits for about so long
    stall        nothing moves, in either direction, until `resume`
    cut          connections are reset; or, half of each closed
    corrupt      one bit of the next pieces is flipped where headers are, or their bytes come in another order
    duplicate    a stretch of the next pieces comes twice

Corruption and duplication are for links whose both ends are Tandem's own protocols: HTTP has no digest that could
notice. A target that refuses connections makes the link refuse them too, until it listens again.

A `RouteProxy` stands in for a prefill's bootstrap server. It answers `GET /route` with the addresses of links in the
place of the real ones and with no unix socket, so that the control plane goes through its link. Where its pages are
read a prefill says itself, on the control plane, whose link names the link of the data plane instead (`greetings.py`).
"""

import asyncio
import contextlib
import json
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any  # a JSON document

from greetings import Regreeter

PIECE_BYTES = 1 << 16
HEAD_BYTES = 64  # at the beginning of a piece, where headers are
SHIFT_BYTES = 64  # numbers in another place are numbers still: nothing but a digest can notice
DIAL_S = 5.0
RETRY_S = 0.05
RECORDED_BYTES = 4096  # of what a dialler says, kept for an attacker ...
RECORDED = 8  # ... of so many connections
LOOPBACK = "127.0.0.1"

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(eq=False)
class Connection:
    """Both ends of one proxied connection."""

    near: asyncio.StreamWriter
    far: asyncio.StreamWriter

    def reset(self) -> None:
        for end in (self.near, self.far):
            reset(end)

    def close_half(self, end: asyncio.StreamWriter) -> None:
        """Tell one end that the other has nothing more to say, which is not true."""
        with contextlib.suppress(OSError, RuntimeError):
            end.write_eof()


@dataclass(eq=False)
class Link:
    """Bytes between whoever connects to `port` and the target. Owned by one event loop."""

    name: str
    target_port: int
    random: Random
    is_damageable: bool  # may be corrupted and duplicated
    port: int = 0
    regreeter: Callable[[], Regreeter] | None = None  # of a control plane: one for each connection
    recorded: deque[bytearray] = field(default_factory=lambda: deque(maxlen=RECORDED))
    harmed: dict[str, int] = field(default_factory=dict)  # what was done, counted where it was done
    connections: set[Connection] = field(default_factory=set)
    _server: asyncio.Server | None = None
    _flow: asyncio.Event = field(default_factory=asyncio.Event)
    _delay_s: float = 0.0
    _armed: list[str] = field(default_factory=list)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def open(self) -> None:
        self._flow.set()
        await self._listen()

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._stop_listening()
        for connection in list(self.connections):
            connection.reset()

    # --- faults -----------------------------------------------------------------------------------------------------

    def delay(self, seconds: float) -> None:
        self._delay_s = seconds

    def stall(self) -> None:
        self._flow.clear()

    def heal(self) -> None:
        """No delay, no stall, nothing armed. Connections that were cut stay cut."""
        self._delay_s = 0.0
        self._armed.clear()
        self._flow.set()

    def cut(self, *, half: bool) -> int:
        """Returns how many connections there were to cut."""
        found = list(self.connections)
        for connection in found:
            if half:
                connection.close_half(self.random.choice((connection.near, connection.far)))
            else:
                connection.reset()
        return len(found)

    def arm(self, harm: str, pieces: int) -> None:
        """`corrupt` or `duplicate` the next pieces that pass."""
        assert self.is_damageable
        assert harm in ("corrupt", "duplicate")
        self._armed += [harm] * pieces

    # --- connections ------------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accepted, LOOPBACK, self.port, limit=PIECE_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]

    def _stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            far_reader, far_writer = await asyncio.wait_for(
                asyncio.open_connection(LOOPBACK, self.target_port, limit=PIECE_BYTES), DIAL_S
            )
        except (OSError, TimeoutError):
            reset(writer)
            self._refuse()
            return
        except asyncio.CancelledError:  # `close`; asyncio.start_server would log what is cancelled as an error
            reset(writer)
            return
        connection = Connection(writer, far_writer)
        self.connections.add(connection)
        try:
            regreeter = self.regreeter() if self.regreeter is not None else None
            self.recorded.append(bytearray())
            record = Recorder(self.recorded[-1], regreeter)
            await asyncio.gather(
                self._pump(reader, far_writer, connection, seen=record.see),
                self._pump(far_reader, writer, connection, change=regreeter and regreeter.pass_acceptor),
            )
        except asyncio.CancelledError:
            connection.reset()
        finally:
            self.connections.discard(connection)
            for end in (writer, far_writer):
                end.close()

    def _refuse(self) -> None:
        """Nobody listens there: neither do we, until somebody does."""
        if self._server is None:
            return
        self._stop_listening()
        task = asyncio.get_running_loop().create_task(self._listen_again())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _listen_again(self) -> None:
        while not await is_open(self.target_port):
            await asyncio.sleep(RETRY_S)
        await self._listen()

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        connection: Connection,
        *,
        change: Callable[[bytes], bytes] | None = None,
        seen: Callable[[bytes], None] | None = None,
    ) -> None:
        """`change` is given what comes, `seen` what goes out."""
        try:
            while piece := await reader.read(PIECE_BYTES):
                await self._flow.wait()
                if self._delay_s:
                    await asyncio.sleep(self._delay_s * self.random.uniform(0.5, 1.5))
                piece = change(piece) if change is not None else piece
                if not piece:
                    continue
                piece = self._harm(piece)
                if seen is not None:
                    seen(piece)
                writer.write(piece)
                await writer.drain()
            await self._flow.wait()
            connection.close_half(writer)
        except OSError:
            connection.reset()

    def _harm(self, piece: bytes) -> bytes:
        if not self._armed:
            return piece
        harm = self._armed.pop()
        self.harmed[harm] = self.harmed.get(harm, 0) + 1
        if harm == "corrupt":
            return self._flipped(piece) if self.random.random() < 0.3 else self._shifted(piece)
        start = self.random.randrange(len(piece))
        stop = self.random.randint(start + 1, len(piece))
        return piece[:stop] + piece[start:]

    def _flipped(self, piece: bytes) -> bytes:
        at = self.random.randrange(min(len(piece), HEAD_BYTES))
        return piece[:at] + bytes([piece[at] ^ (1 << self.random.randrange(8))]) + piece[at + 1 :]

    def _shifted(self, piece: bytes) -> bytes:
        at = min(SHIFT_BYTES, len(piece) // 2)
        return piece[at:] + piece[:at]


@dataclass(frozen=True)
class Recorder:
    """Sees what a dialler says on its way to the one that accepted."""

    kept: bytearray
    regreeter: Regreeter | None

    def see(self, piece: bytes) -> None:
        self.kept.extend(piece[: max(0, RECORDED_BYTES - len(self.kept))])
        if self.regreeter is not None:
            self.regreeter.see_dialler(piece)


class RouteProxy:
    """The bootstrap server of one prefill, as decodes see it."""

    def __init__(self, target_port: int, link: Callable[[str, int], Awaitable[Link]]) -> None:
        """`link(kind, port)`: the link to this real port; `kind` is `control` or `data`."""
        self.target_port = target_port
        self.document: dict[str, Any] | None = None  # the real one, as it was told last
        self._link = link
        self._server: asyncio.Server | None = None
        self.port = 0
        self.data_ports: dict[int, int] = {}  # of links, by the real ones

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._accepted, LOOPBACK, 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            method, path, _ = head.split(b" ", 2)
            sizes = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            sent = await reader.readexactly(int(sizes[0].partition(b":")[2]) if sizes else 0)
            status, body = await self._fetch(method, path, sent)
            if path.partition(b"?")[0] == b"/route" and status == 200:
                body = await self._rewritten(body)
            writer.write(b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\nconnection: close\r\n" % status)
            writer.write(b"content-length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError, ValueError):
            pass  # the prefill is down, or whoever asked has left
        finally:
            writer.close()

    async def _fetch(self, method: bytes, path: bytes, sent: bytes) -> tuple[int, bytes]:
        reader, writer = await asyncio.open_connection(LOOPBACK, self.target_port)
        try:
            writer.write(method + b" " + path + b" HTTP/1.1\r\nhost: bootstrap\r\nconnection: close\r\n")
            writer.write(b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(sent) + sent)
            head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
            return int(head.split(b" ", 2)[1]), body
        finally:
            writer.close()

    async def _rewritten(self, body: bytes) -> bytes:
        replica, self.document = json.loads(body), json.loads(body)
        rank = f" DP{replica['dp_rank']}" if replica["dp_rank"] else ""
        replica["control_port"] = (await self._link(f"control{rank}", replica["control_port"])).port
        for index, shard in enumerate(replica["shards"]):
            real = shard["port"]
            kind = f"data{rank} {index}" if index else f"data{rank}"
            self.data_ports[real] = shard["port"] = (await self._link(kind, real)).port
            shard["unix"] = ""
        return json.dumps(replica).encode()


def reset(end: asyncio.StreamWriter) -> None:
    """Close with RST."""
    sock = end.get_extra_info("socket")
    if sock is not None and not end.is_closing():
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.transport.abort()


async def is_open(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(LOOPBACK, port)
    except OSError:
        return False
    writer.close()
    return True
