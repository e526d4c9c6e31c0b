"""The API of `socket` over virtual streams: as much of it as asyncio, httpx and the product use.

A socket belongs to the process that made it, or that has inherited its descriptor. Its calls wait in virtual time.
"""

import errno
import os
import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any  # an address, or what a descriptor refers to

from tandem.core.values import SECOND
from tandem.simulator.whole.kernel import Kernel, Process
from tandem.simulator.whole.network import Address, Listening, Network, Poll, Stream

LOOPBACK = ("127.0.0.1", "::1")
EVERY = ("0.0.0.0", "::", "")
Buffer = bytes | bytearray | memoryview
INT_BYTES = 4
ANSWER_OF_OPTIONS = b"\0" * 4


class Machine:
    """What the sockets of a simulation have in common; there is one at a time."""

    kernel: Kernel
    network: Network


class VirtualSocket:
    """`socket.socket`. Unnamed as long as it is neither bound nor connected."""

    def __init__(
        self, family: int = -1, type: int = -1, proto: int = -1, fileno: int | None = None, *, process=None
    ) -> None:
        self.process: Process = process or Machine.kernel.current().process
        self.family = socket.AddressFamily(socket.AF_INET if family in (-1, 0) else family)
        self.type = socket.SocketKind(socket.SOCK_STREAM if type in (-1, 0) else type & 0xF)
        self.proto = 0 if proto == -1 else proto
        self._timeout: float | None = None
        self._receive_s: float | None = None  # SO_RCVTIMEO
        self._send_s: float | None = None
        self._bound: Address | None = None
        self._blank: Listening | None = None
        self.machine = ""  # on which names of AF_UNIX are; empty: this one
        if fileno is None:
            self._blank = Listening(Machine.kernel, Machine.network, ("", 0))
            self._fd = Machine.kernel.open_fd(self.process, self._blank)
        else:
            self._fd = fileno
            if (found := self._description()) is not None and isinstance(found, Stream):
                self.family = socket.AF_UNIX if found.line.name.startswith(("pair", "unix")) else socket.AF_INET

    # --- descriptors -------------------------------------------------------------------------------------------------

    @classmethod
    def of(cls, process: Process, stream: Stream, family: int) -> "VirtualSocket":
        """Raises OSError where the process has no descriptor left."""
        return cls(family, fileno=Machine.kernel.open_fd(process, stream), process=process)

    def _description(self) -> Any:
        return self.process.fds.get(self._fd)

    def _open(self) -> Any:
        Machine.kernel.check_alive_process(self.process)
        found = self._description()
        if found is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return found

    def _stream(self) -> Stream:
        found = self._open()
        if not isinstance(found, Stream):
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        return found

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        number, self._fd = self._fd, -1
        Machine.kernel.close_fd(self.process, number)

    def __del__(self) -> None:
        """Python would close it now, and warn: who opens a socket is to close it, not whoever forgets it last."""
        number, process = getattr(self, "_fd", -1), getattr(self, "process", None)
        if process is not None and number in process.fds and process.is_alive:
            Machine.kernel.lost.append((process, number, process.fds[number]))

    def detach(self) -> int:
        number, self._fd = self._fd, -1
        return number

    def dup(self) -> "VirtualSocket":
        number = Machine.kernel.open_fd(self.process, self._open())
        return VirtualSocket(self.family, self.type, self.proto, number, process=self.process)

    def __enter__(self) -> "VirtualSocket":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def set_inheritable(self, inheritable: bool) -> None:
        """Descriptors are passed on by name only."""

    def get_inheritable(self) -> bool:
        return False

    # --- options -----------------------------------------------------------------------------------------------------

    def setblocking(self, flag: bool) -> None:
        self._timeout = None if flag else 0.0

    def getblocking(self) -> bool:
        return self._timeout != 0

    def settimeout(self, value: float | None) -> None:
        self._timeout = value

    def gettimeout(self) -> float | None:
        return self._timeout

    def setsockopt(self, level: int, option: int, value: object, optlen: int | None = None) -> None:
        self._open()
        if level == socket.SOL_SOCKET and option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            assert isinstance(value, bytes)
            whole, micros = struct.unpack("@ll", value)
            seconds = (whole + micros / 1e6) or None
            if option == socket.SO_RCVTIMEO:
                self._receive_s = seconds
            else:
                self._send_s = seconds

    def getsockopt(self, level: int, option: int, buflen: int = 0) -> int | bytes:
        found = self._open()
        if level == socket.SOL_SOCKET and option == socket.SO_ERROR:
            code = 0
            if isinstance(found, Stream):
                code, found.error = found.error, 0
            return code
        if level == socket.SOL_SOCKET and option == socket.SO_PEERCRED:
            return struct.pack("3i", 1, os.getuid(), os.getgid())
        return ANSWER_OF_OPTIONS[:buflen] if buflen else 0

    # --- names -------------------------------------------------------------------------------------------------------

    def getsockname(self):  # type: ignore[no-untyped-def]
        found = self._open()
        address = found.local if isinstance(found, Stream) else self._bound or found.address
        return self._shown(address)

    def getpeername(self):  # type: ignore[no-untyped-def]
        stream = self._stream()
        if stream.is_connecting or stream.is_broken:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        return self._shown(stream.remote)

    def _shown(self, address: Address):  # type: ignore[no-untyped-def]
        if self.family == socket.AF_UNIX:
            return ""
        return (*address, 0, 0) if self.family == socket.AF_INET6 else address

    def _machine(self, host: str) -> str:
        return self.process.host if host in (*LOOPBACK, *EVERY) else host

    def bind(self, address) -> None:  # type: ignore[no-untyped-def]
        if self.family == socket.AF_UNIX:
            self._bound = (self.machine or self.process.host, str(address))
            return
        host, port = str(address[0]), int(address[1])
        if self._machine(host) != self.process.host:
            raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
        port = port or Machine.network.free_port()
        self._bound = (host, port)

    def _at(self, address: Address) -> Address:
        """Where it is in the network: loopback of one machine is not that of another."""
        return (self._machine(address[0]), address[1])

    # --- connections -------------------------------------------------------------------------------------------------

    def listen(self, backlog: int = 128) -> None:
        found = self._open()
        if isinstance(found, Listening) and self._bound is not None:
            if found.address[0] == "":
                Machine.network.listen(found, self._at(self._bound))
            found.backlog = backlog

    def accept(self) -> "tuple[VirtualSocket, object]":
        found = self._open()
        assert isinstance(found, Listening)
        self._wait(lambda: found.is_readable, self._timeout)
        stream = found.waiting[0]
        accepted = VirtualSocket.of(self.process, stream, self.family)
        found.waiting.popleft()
        found.num_used += 1
        return accepted, accepted._shown(stream.remote)

    def connect(self, address) -> None:  # type: ignore[no-untyped-def]
        stream = self._dial(address)
        if self._timeout == 0:
            raise BlockingIOError(errno.EINPROGRESS, os.strerror(errno.EINPROGRESS))
        self._wait(lambda: not stream.is_connecting, self._timeout, at_timeout=TimeoutError)
        if stream.is_broken:
            code = stream.error or errno.ECONNREFUSED
            raise OSError(code, os.strerror(code))

    def connect_ex(self, address) -> int:  # type: ignore[no-untyped-def]
        try:
            self.connect(address)
        except OSError as error:
            return error.errno or errno.ECONNREFUSED
        return 0

    def _dial(self, address) -> Stream:  # type: ignore[no-untyped-def]
        found = self._open()
        if isinstance(found, Stream):
            raise OSError(errno.EISCONN, os.strerror(errno.EISCONN))
        is_unix = self.family == socket.AF_UNIX
        if is_unix:
            local: Address = (self.process.host, "")
            remote: Address = (self.machine or self.process.host, str(address))
        else:
            host, port = str(address[0]), int(address[1])
            if not 0 <= port < 1 << 16:
                raise OverflowError("port must be 0-65535")
            remote = (self._machine(host), port)
            local = (self.process.host if remote[0] != self.process.host else host, Machine.network.free_port())
        is_by_worker = self.process.name.endswith("worker_process")
        stream = Machine.network.dial(local, remote, is_unix=is_unix, is_by_worker=is_by_worker)
        Machine.kernel.close_fd(self.process, self._fd)
        Machine.kernel.open_fd(self.process, stream, self._fd)
        return stream

    def shutdown(self, how: int) -> None:
        stream = self._stream()
        if stream.is_connecting:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        if how in (socket.SHUT_WR, socket.SHUT_RDWR):
            stream.shut()
        if how in (socket.SHUT_RD, socket.SHUT_RDWR):
            stream.has_end = True
            stream.changed()

    def connects_workers(self) -> None:
        """From here on it is known as one over which the workers of a replica compute."""
        Machine.network.worker_ends[self._stream()] = self.process

    # --- bytes -------------------------------------------------------------------------------------------------------

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        stream = self._stream()
        found: list[bytes] = []
        left = bufsize

        def is_done() -> bool:
            nonlocal left
            while (data := stream.take(left, peeks=bool(flags & socket.MSG_PEEK))) is not None:
                found.append(data)
                left -= len(data)
                if not data or left == 0 or not flags & socket.MSG_WAITALL:
                    return True
            return False

        timeout = 0.0 if flags & socket.MSG_DONTWAIT else self._timeout
        try:
            self._wait(is_done, timeout, self._receive_s)
        except BlockingIOError:
            if not found:
                raise
        return b"".join(found)

    def recv_into(self, buffer: Buffer, nbytes: int = 0, flags: int = 0) -> int:
        view = memoryview(buffer).cast("B")
        data = self.recv(nbytes or len(view), flags)
        view[: len(data)] = data
        return len(data)

    def recvmsg_into(self, buffers: Iterable[Buffer], ancbufsize: int = 0, flags: int = 0):  # type: ignore[no-untyped-def]  # as of a socket
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        data = self.recv(sum(map(len, views)), flags)
        start = 0
        for view in views:
            part = data[start : start + len(view)]
            view[: len(part)] = part
            start += len(part)
        return len(data), [], 0, None

    def send(self, data: Buffer, flags: int = 0) -> int:
        stream = self._stream()
        whole = bytes(data)
        taken = 0

        def is_done() -> bool:
            nonlocal taken
            taken = stream.put(whole)
            return taken > 0 or not whole

        self._wait(is_done, 0.0 if flags & socket.MSG_DONTWAIT else self._timeout, self._send_s)
        return taken

    def sendall(self, data: Buffer, flags: int = 0) -> None:
        rest = memoryview(bytes(data))
        while rest := rest[self.send(rest, flags) :]:
            Machine.kernel.pause()  # other threads of this process may write in between

    def recvmsg(self, bufsize: int, ancbufsize: int = 0, flags: int = 0):  # type: ignore[no-untyped-def]  # as of a socket
        """With the descriptors that came along, as far as there is room for them; others are dropped."""
        data = self.recv(bufsize, flags)
        coming, rights = self._stream().descriptions, []
        while data and coming:
            description = coming.popleft()
            if len(rights) < (ancbufsize - socket.CMSG_LEN(0)) // INT_BYTES:
                number = Machine.kernel.open_fd(self.process, description)
                rights.append((socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", number)))
        return data, rights, 0, None

    def sendmsg(
        self, buffers: Iterable[Buffer], ancdata: Sequence[tuple[int, int, Buffer]] = (), flags: int = 0
    ) -> int:
        sent, peer = self.send(b"".join(bytes(buffer) for buffer in buffers), flags), self._stream().peer
        if peer is not None:
            for _, _, numbers in ancdata:
                peer.descriptions += (self.process.fds[number] for (number,) in struct.iter_unpack("i", numbers))
        return sent

    def _wait(
        self,
        is_done: Callable[[], bool],
        timeout_s: float | None,
        option_s: float | None = None,
        at_timeout: type[OSError] = TimeoutError,
    ) -> None:
        """Until it is done. Raises BlockingIOError where the socket does not block, TimeoutError where it is late."""
        if is_done():
            return
        again = BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        if timeout_s == 0:
            Machine.kernel.check_patience()
            raise again
        kernel = Machine.kernel
        seconds = timeout_s if timeout_s is not None else option_s
        deadline = None if seconds is None else kernel.now + int(seconds * SECOND)
        poll = Poll(kernel.current())
        watched = self._open()
        watched.polls[poll] = None
        try:
            while not is_done():
                if deadline is not None and kernel.now >= deadline:
                    raise again if timeout_s is None else at_timeout("timed out")
                kernel.block(deadline)
                self._open()
        finally:
            watched.polls.pop(poll, None)


def socketpair(family: int | None = None, type: int = socket.SOCK_STREAM, proto: int = 0):  # type: ignore[no-untyped-def]
    process = Machine.kernel.current().process
    ours, theirs = Machine.network.pair()
    first = VirtualSocket.of(process, ours, socket.AF_UNIX)
    try:
        return first, VirtualSocket.of(process, theirs, socket.AF_UNIX)
    except OSError:
        first.close()
        raise


def create_server(address, *, family: int = socket.AF_INET, backlog: int | None = None, **_: object):  # type: ignore[no-untyped-def]
    sock = VirtualSocket(family)
    try:
        sock.bind(address)
        sock.listen(128 if backlog is None else backlog)
    except OSError:
        sock.close()
        raise
    return sock


def create_connection(address, timeout=None, source_address=None, *, all_errors: bool = False):  # type: ignore[no-untyped-def]
    host, port = address
    family, *_, found = getaddrinfo(host, port)[0]
    sock = VirtualSocket(family)
    sock.settimeout(timeout)
    try:
        sock.connect(found)
    except OSError:
        sock.close()
        raise
    return sock


def getaddrinfo(host, port, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0):  # type: ignore[no-untyped-def]  # as of a socket
    """Numbers are themselves; names are looked up in the table of the network."""
    name = "127.0.0.1" if host in (None, "localhost") else str(host)
    numbers = [name] if name.replace(".", "").isdigit() or ":" in name else Machine.network.names.get(name, [])
    if not numbers:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    kind = socket.SOCK_STREAM
    return [
        (socket.AF_INET6, kind, 6, "", (number, int(port or 0), 0, 0))
        if ":" in number
        else (socket.AF_INET, kind, 6, "", (number, int(port or 0)))
        for number in numbers
    ]


def gethostname() -> str:
    return "host-" + Machine.kernel.current().process.host.replace(".", "-")
