"""Stream sockets with deadlines: listening, dialling, sending from and receiving into many pieces of memory.

Sockets block in the kernel (one call moves a whole frame, and Python's lock is free meanwhile) with a short kernel
timeout, so that each call comes back now and then to look at the clock. Another thread interrupts a call with
`cut`; only the thread that uses a socket closes it, so a descriptor is never reused under somebody's feet.
"""

import array
import contextlib
import os
import socket
import struct
import sys
import time
from collections.abc import Sequence

LINUX_UNIX_PATH_MAX = 107
_BACKLOG = 128
_FULL_PAUSE_S = 0.01  # between two tries to connect to a unix socket at which so many wait
_UNIX_SEND_BUFFER_BYTES = 1 << 20  # about one frame: measured, half or four times as much is no faster
_KEEPALIVE_IDLE_S, _KEEPALIVE_INTERVAL_S, _KEEPALIVE_PROBES = 20, 5, 3
_MAX_PIECES = 1024  # that Linux takes in one call
_INT_BYTES = 4
_ONE_DESCRIPTOR = socket.CMSG_LEN(_INT_BYTES)  # room for one, and none for a second behind it
_GLANCES = 8  # how often a call comes back within one timeout


class LinkBroken(Exception):
    """The other side has gone or closed, or this side has cut the link."""


class LinkFrozen(Exception):
    """Nothing moved for the whole timeout."""


def listen_tcp(host: str) -> socket.socket:
    """Listen on a free port of `host`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen(_BACKLOG)
    return listener


def listen_unix(path: str) -> socket.socket:
    """`path` begins with "@" for an abstract socket, which vanishes with its process."""
    if len(path.encode()) > LINUX_UNIX_PATH_MAX:
        raise ValueError(f"path of the unix socket is longer than {LINUX_UNIX_PATH_MAX} bytes: {path}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(unix_address(path))
    listener.listen(_BACKLOG)
    return listener


def unix_address(path: str) -> str:
    return "\0" + path[1:] if path.startswith("@") else path


def dial(host: str, port: int, unix: str, *, timeout_s: float) -> socket.socket:
    """Connect, through the unix socket if there is one on this machine. Raises LinkBroken or LinkFrozen."""
    link = _dial_unix(unix, timeout_s) if unix else None
    if link is None:
        try:
            link = socket.create_connection((host, port), timeout=timeout_s)
        except TimeoutError as error:
            raise LinkFrozen(f"{host}:{port} does not answer") from error
        except OSError as error:
            raise LinkBroken(f"{host}:{port}: {error}") from error
    prepare(link, timeout_s=timeout_s)
    return link


def _dial_unix(path: str, timeout_s: float) -> socket.socket | None:
    try:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:  # no descriptor is left: TCP would have none either
        raise LinkBroken(f"{path}: {error}") from error
    link.settimeout(timeout_s)
    give_up_at = time.monotonic() + timeout_s
    try:
        while not _has_connected(link, unix_address(path)):
            if time.monotonic() >= give_up_at:
                raise TimeoutError
            time.sleep(_FULL_PAUSE_S)
        if is_same_user(link):
            return link
    except TimeoutError as error:
        link.close()
        raise LinkFrozen(f"{path} does not answer") from error
    except OSError:
        pass  # not there, so the peer is on another machine, or gone: dialling TCP will tell
    link.close()
    return None


def _has_connected(link: socket.socket, address: str) -> bool:
    """False: as many wait there to be accepted as may, and on a unix socket the kernel waits for no place. Raises
    OSError."""
    try:
        link.connect(address)
    except BlockingIOError:
        return False
    return True


def is_same_user(link: socket.socket) -> bool:
    """Whether the process at the other end of a unix socket runs under our user id. Both ends ask, and agree."""
    _, uid, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return uid == os.getuid()


def way(link: socket.socket) -> str:
    """How pages travel on it that are sent, in a word."""
    return "unix" if link.family == socket.AF_UNIX else "tcp"


def prepare(link: socket.socket, *, timeout_s: float) -> None:
    """Set up a connected socket for the functions below."""
    link.setblocking(True)
    glance_s = timeout_s / _GLANCES
    glance = struct.pack("@ll", int(glance_s), max(1, int(glance_s % 1 * 1_000_000)))
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, glance)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, glance)
    if link.family == socket.AF_UNIX:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_SEND_BUFFER_BYTES)
        return
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a host that vanished leaves idle connections behind
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)


def cut(link: socket.socket) -> None:
    """Make every call on the link return soon, in whichever thread. What the other side has already is its own."""
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)


def stop_hearing(link: socket.socket) -> None:
    """As `cut`, for calls that wait for the other side; and that one is told nothing. What has been
    sent already is heard."""
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_RD)


def send(link: socket.socket, pieces: Sequence[memoryview | bytes], *, timeout_s: float) -> None:
    """Send all pieces; when this returns or raises, the kernel reads none of them any more."""
    _move(lambda rest: link.sendmsg(rest, [], socket.MSG_NOSIGNAL), pieces, timeout_s)


def receive_into(link: socket.socket, pieces: Sequence[memoryview], *, timeout_s: float) -> None:
    """Fill all pieces; when this returns or raises, the kernel writes to none of them any more."""
    _move(lambda rest: link.recvmsg_into(rest, 0, socket.MSG_WAITALL)[0], pieces, timeout_s)


def _move(call, pieces: Sequence[memoryview | bytes], timeout_s: float) -> None:
    num_bytes = sum(map(len, pieces))
    moved_at = time.monotonic()
    while num_bytes:
        try:
            moved = call(pieces[:_MAX_PIECES])
        except BlockingIOError:
            if time.monotonic() - moved_at >= timeout_s:
                raise LinkFrozen(f"no progress for {timeout_s:g} s") from None
            continue
        except OSError as error:
            raise LinkBroken(str(error)) from error
        if moved == 0:
            raise LinkBroken("closed by the peer")
        num_bytes -= moved
        if num_bytes:
            moved_at = time.monotonic()
            pieces = _after(pieces, moved)


def _after(pieces: Sequence[memoryview | bytes], moved: int) -> list[memoryview | bytes]:
    """What is left of `pieces` behind their first `moved` bytes."""
    for index, piece in enumerate(pieces):
        if moved < len(piece):
            return [memoryview(piece)[moved:], *pieces[index + 1 :]]
        moved -= len(piece)
    return []


def receive(link: socket.socket, num_bytes: int, *, timeout_s: float) -> bytearray:
    """Exactly `num_bytes`, all within the timeout: whoever sends small messages drop by drop is frozen, too."""
    message = bytearray(num_bytes)
    rest = memoryview(message)
    give_up_at = time.monotonic() + timeout_s
    while rest:
        try:
            moved = link.recv_into(rest, 0, socket.MSG_WAITALL)
        except BlockingIOError:
            moved = None
        except OSError as error:
            raise LinkBroken(str(error)) from error
        if moved == 0:
            raise LinkBroken("closed by the peer")
        rest = rest[moved or 0 :]
        if rest and time.monotonic() >= give_up_at:
            raise LinkFrozen(f"no message within {timeout_s:g} s")
    return message


def send_with_descriptor(link: socket.socket, message: bytes, descriptor: int, *, timeout_s: float) -> None:
    """The other side of a unix socket gets a descriptor of its own for the same file, with the first byte."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
    try:
        sent = link.sendmsg([message], rights, socket.MSG_NOSIGNAL)
    except BlockingIOError:
        raise LinkFrozen("no room for a message") from None
    except OSError as error:
        raise LinkBroken(str(error)) from error
    send(link, [memoryview(message)[sent:]], timeout_s=timeout_s)


def receive_with_descriptor(link: socket.socket, num_bytes: int, *, timeout_s: float) -> tuple[bytes, int | None]:
    """As `receive`. The descriptor that came along, if one did, is the caller's to close; there is room for one."""
    message, descriptor = b"", None
    give_up_at = time.monotonic() + timeout_s
    try:
        while len(message) < num_bytes:
            try:
                part, rights, _, _ = link.recvmsg(num_bytes - len(message), _ONE_DESCRIPTOR, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                part, rights = None, []
            except OSError as error:
                raise LinkBroken(str(error)) from error
            for level, kind, data in rights:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS) and len(data) == _INT_BYTES:
                    descriptor = _only(descriptor, int.from_bytes(data, sys.byteorder))
            if part == b"":
                raise LinkBroken("closed by the peer")
            message += part or b""
            if len(message) < num_bytes and time.monotonic() >= give_up_at:
                raise LinkFrozen(f"no message within {timeout_s:g} s")
    except BaseException:
        if descriptor is not None:
            close_descriptor(descriptor)
        raise
    return message, descriptor


def close_descriptor(descriptor: int) -> None:
    os.close(descriptor)


def _only(known: int | None, new: int) -> int:
    """The newer one of two descriptors; there is no use for the other."""
    if known is not None:
        close_descriptor(known)
    return new
