"""The socket under a `HostSession`: whole frames in and out on an event loop, and nobody silent for too long.

Frames are read to the byte: what follows the last of them is for whom the socket is handed to.
"""

import asyncio
import contextlib
import socket
from typing import Any, Generic, TypeVar  # Any: a union type as a value, which the type system cannot spell

from msgspec import Struct

from tandem.membership import ClusterSecret
from tandem.server.channel import ChannelClosed, ChannelKeys
from tandem.server.frames import HEAD_BYTES
from tandem.server.hosts.messages import Beat
from tandem.server.hosts.session import HostSession, body_bytes

Incoming = TypeVar("Incoming")

HANDSHAKE_S = 5.0  # until the other end has said its first sealed word
WRITE_S = 5.0  # until the kernel has taken a frame


class HostConnection(Generic[Incoming]):
    """Owns `sock` until `release`. One task reads, any may say."""

    def __init__(self, sock: socket.socket, secret: ClusterSecret, incoming: Any, *, is_dialler: bool) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self._session: HostSession[Incoming] = HostSession(secret, incoming, is_dialler=is_dialler)
        self._saying = asyncio.Lock()
        self._is_torn = False  # a frame was begun, and not written to its end

    @property
    def own_address(self) -> str:
        """The address of this host by which the other end is reached."""
        return str(self.sock.getsockname()[0])

    async def meet(self) -> None:
        """Exchange hellos. Both ends begin with theirs, so none may read only after it has written.

        Raises ChannelClosed, MalformedFrame.
        """
        writing = asyncio.ensure_future(self._write(self._session.hello))
        try:
            self._session.meet(await self._body())
            await writing
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    async def hear(self) -> Incoming:
        """The next message. Raises ChannelClosed, MalformedFrame; NotAMember for the first."""
        return self._session.open(await self._body())

    async def say(self, message: Struct) -> None:
        """Raises ChannelClosed, also where the other end does not read: no frame can follow one that is cut.

        One after the other: frames are numbered in the order in which they are sent.
        """
        try:
            async with asyncio.timeout(WRITE_S), self._saying:
                if self._is_torn:
                    raise ChannelClosed("the other end does not read")
                self._is_torn = True
                await self._write(self._session.seal(message))
                self._is_torn = False
        except TimeoutError:
            raise ChannelClosed("the other end does not read") from None

    async def beat(self, interval_s: float) -> None:
        """Say that this end is here, until it cannot."""
        with contextlib.suppress(ChannelClosed):
            while True:
                await self.say(Beat())
                await asyncio.sleep(interval_s)

    def release(self) -> tuple[socket.socket, ChannelKeys]:
        """The socket goes to somebody else, with the keys for what is said on it from now on."""
        return self.sock, self._session.channel_keys()

    def close(self) -> None:
        self.sock.close()

    async def _body(self) -> bytes:
        return await self._exactly(body_bytes(await self._exactly(HEAD_BYTES)))

    async def _exactly(self, size: int) -> bytes:
        loop, found = asyncio.get_running_loop(), bytearray()
        while len(found) < size:
            try:
                piece = await loop.sock_recv(self.sock, size - len(found))
            except OSError as error:
                raise ChannelClosed(error.strerror or str(error)) from error
            if not piece:
                raise ChannelClosed("the connection was closed")
            found += piece
        return bytes(found)

    async def _write(self, data: bytes) -> None:
        try:
            await asyncio.get_running_loop().sock_sendall(self.sock, data)
        except OSError as error:
            raise ChannelClosed(error.strerror or str(error)) from error
