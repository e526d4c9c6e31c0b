"""Byte streams between virtual processes: ordered, delayed, bounded, and ending in every way a connection can end.

Each connection has two ends (`Stream`), each with what has arrived for it. What is written is cut into pieces at drawn
places; pieces of one direction arrive in order, each after a drawn delay. A direction holds at most `capacity` bytes,
on their way and unread together; then its writer has to wait.

    close           the other end reads what was written, then the end. With unread bytes left: a reset instead
    reset           what is on its way is lost; the other end reads what has arrived, then ECONNRESET
    cut             a reset of both ends, by somebody in between
    stall           nothing arrives for a while, in both directions
    vanish          nothing arrives any more, and nobody is told: half open for ever
    dribble         for a while reads give one byte, and writes take one
"""

import errno
import os
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from random import Random
from zlib import crc32

from tandem.core.values import MILLISECOND
from tandem.simulator.whole.kernel import Description, Kernel, Process, VirtualThread

Address = tuple[str, str | int]  # (machine, name) of a unix socket, or (host, port)

DIALLED = ">"  # side of a connection; the other is "<"
LOCAL_CAPACITY = 208 << 10
TCP_CAPACITY = 128 << 10
WHOLE_BYTES = 256  # at most, that an empty connection takes at once or not at all
LOCAL_DELAY_NS = 60_000
TCP_DELAY_NS = 2 * MILLISECOND


@dataclass(eq=False, slots=True)
class Poll:
    """A thread that waits for descriptions, while it does."""

    thread: VirtualThread | None = None


@dataclass(eq=False, slots=True)
class Watched:
    """What threads can wait for."""

    kernel: Kernel
    polls: dict[Poll, None] = field(default_factory=dict, kw_only=True)
    num_used: int = field(default=0, kw_only=True)  # calls that have moved something
    refs: int = field(default=0, kw_only=True)

    def changed(self) -> None:
        for poll in self.polls:
            self.kernel.wake(poll.thread)

    @property
    def is_readable(self) -> bool:
        return False

    @property
    def is_writable(self) -> bool:
        return False

    def release(self) -> None:
        """No descriptor refers to it any more."""


@dataclass(eq=False, slots=True)
class Line:
    """What both ends of one connection share: how bytes travel on it."""

    name: str
    random: Random
    capacity: int
    delay_ns: int
    dribbles: int = 0  # so many calls at either end move one byte
    stalled_until: int = 0
    has_vanished: bool = False
    corrupts_after: int | None = None  # bytes in each direction until one is changed


@dataclass(eq=False, slots=True)
class Stream(Watched):
    """One end."""

    line: Line
    local: Address
    remote: Address
    side: str  # in the log
    peer: "Stream | None" = None
    arrived: bytearray = field(default_factory=bytearray)
    descriptions: deque[Description] = field(default_factory=deque)  # that come with bytes: what descriptors refer to
    num_coming: int = 0  # bytes on their way to this end
    last_arrival: int = 0
    on_way: deque[Callable[[], None]] = field(default_factory=deque)  # from this end, in order
    num_sent: int = 0
    is_connecting: bool = False
    has_end: bool = False  # the other end will write no more
    has_shut: bool = False  # this end will write no more
    is_closed: bool = False
    error: int = 0  # of this connection, told once
    is_broken: bool = False
    is_widowed: bool = False  # the process at the other end has ended

    @property
    def is_readable(self) -> bool:
        return bool(self.arrived) or self.has_end or self.is_broken

    @property
    def is_writable(self) -> bool:
        return self.is_broken or (not self.is_connecting and (self.has_shut or self.room > 0))

    @property
    def room(self) -> int:
        peer = self.peer
        return 0 if peer is None else max(0, self.line.capacity - peer.num_coming - len(peer.arrived))

    # --- by who holds this end ---------------------------------------------------------------------------------------

    def take(self, most: int, *, peeks: bool = False) -> bytes | None:
        """What has arrived; b"" at the end; None: nothing now. Raises OSError."""
        if self.arrived and most > 0:
            if self.line.dribbles > 0:
                self.line.dribbles -= 1
                most = 1
            data = bytes(self.arrived[:most])
            if not peeks:
                self.num_used += 1
                del self.arrived[:most]
                if self.peer is not None:
                    self.peer.changed()
            return data
        if self.is_broken:
            self._raise(errno.ECONNRESET)
        return b"" if self.has_end or self.has_shut_reading else None

    @property
    def has_shut_reading(self) -> bool:
        return self.is_closed

    def put(self, data: bytes) -> int:
        """How many bytes were taken; 0: none now. Raises OSError."""
        if self.is_broken:
            self._raise(errno.EPIPE)
        if self.has_shut:
            raise OSError(errno.EPIPE, os.strerror(errno.EPIPE))
        if self.is_connecting or self.peer is None:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        taken = min(len(data), self.room)
        if self.line.dribbles > 0:
            self.line.dribbles -= 1
            taken = min(taken, 1)
        elif taken > 1 and self.line.random.random() < 0.1:
            part = self.line.random.randint(1, taken)
            taken = taken if self._is_small(taken) else part
        if taken:
            self.num_used += 1
            self._send(data[:taken])
        return taken

    def _is_small(self, size: int) -> bool:
        return size <= WHOLE_BYTES and self.peer is not None and not (self.peer.num_coming or self.peer.arrived)

    def shut(self) -> None:
        """Write no more."""
        if not self.has_shut and not self.is_broken:
            self.has_shut = True
            self._after_what_was_sent(self._end_at_peer)
            self.changed()

    def release(self) -> None:
        self.is_closed = True
        if self.peer is not None:
            self.peer.is_widowed = self.kernel.is_exiting
        if self.is_broken:
            return
        if self.arrived:
            self.reset()
        else:
            self.shut()

    def reset(self) -> None:
        """End it from this side, at once."""
        if not self.is_broken:
            self._break(errno.ECONNRESET)
            peer = self.peer
            if peer is not None and not self.line.has_vanished:
                self.kernel.after(self._delay(), lambda: peer._break(errno.ECONNRESET))

    # --- from outside ------------------------------------------------------------------------------------------------

    def fail(self, code: int) -> None:
        """A connection that is not to be."""
        self.is_connecting = False
        self._break(code)

    def establish(self) -> None:
        self.is_connecting = False
        self.changed()

    def cut(self) -> None:
        self._break(errno.ECONNRESET)
        if self.peer is not None:
            self.peer._break(errno.ECONNRESET)

    def _break(self, code: int) -> None:
        if self.is_broken:
            return
        self.is_broken, self.error = True, code
        self.kernel.note(f"{self.line.name}{self.side} broken {errno.errorcode.get(code, code)}")
        self.changed()

    def _raise(self, usual: int) -> None:
        code, self.error = self.error or usual, 0
        raise OSError(code, os.strerror(code))

    # --- on the way --------------------------------------------------------------------------------------------------

    def _delay(self) -> int:
        return self.line.random.randrange(1, self.line.delay_ns)

    def _send(self, data: bytes) -> None:
        start = 0
        while start < len(data):
            whole = len(data) - start < 2 or self.line.random.random() < 0.7
            stop = len(data) if whole else self.line.random.randrange(start + 1, len(data) + 1)
            piece = data[start:stop]
            assert self.peer is not None
            self.peer.num_coming += len(piece)
            self._after_what_was_sent(lambda piece=piece: self._arrive(piece))
            start = stop

    def _after_what_was_sent(self, call: Callable[[], None]) -> None:
        peer = self.peer
        if peer is not None:
            peer.last_arrival = max(peer.last_arrival, self.kernel.now + self._delay(), self.line.stalled_until)
            self.on_way.append(call)
            self.kernel.at(peer.last_arrival, self._next_comes)

    def _next_comes(self) -> None:
        """Whatever was sent first: what a stall holds up is not overtaken by what was sent in it."""
        if self.line.has_vanished:
            return
        if self.kernel.now < self.line.stalled_until:
            self.kernel.at(self.line.stalled_until, self._next_comes)
        else:
            self.on_way.popleft()()

    def _arrive(self, piece: bytes) -> None:
        peer = self.peer
        assert peer is not None
        peer.num_coming -= len(piece)
        if peer.is_broken or self.is_broken:
            return
        if peer.is_closed:
            peer.kernel.after(self._delay(), lambda: self._break(errno.ECONNRESET))
            return
        piece = self._spoiled(piece)
        self.num_sent += len(piece)
        self.kernel.note(f"{self.line.name}{self.side} {len(piece)} {crc32(piece):08x}")
        peer.arrived += piece
        peer.changed()

    def _spoiled(self, piece: bytes) -> bytes:
        at = self.line.corrupts_after
        if at is None or not self.num_sent <= at < self.num_sent + len(piece):
            return piece
        self.line.corrupts_after = None
        spoiled = bytearray(piece)
        spoiled[at - self.num_sent] ^= 1 << self.line.random.randrange(8)
        return bytes(spoiled)

    def _end_at_peer(self) -> None:
        peer = self.peer
        if peer is not None and not peer.is_broken:
            peer.has_end = True
            self.kernel.note(f"{self.line.name}{self.side} end")
            peer.changed()


@dataclass(eq=False, slots=True)
class Listening(Watched):
    """A socket that listens, or may once it is told to."""

    network: "Network"
    address: Address
    backlog: int = 0
    waiting: deque[Stream] = field(default_factory=deque)

    @property
    def is_readable(self) -> bool:
        return bool(self.waiting)

    def release(self) -> None:
        self.network.listening.pop(self.address, None)
        for stream in self.waiting:
            stream.reset()
        self.waiting.clear()


@dataclass(slots=True)
class Network:
    """Who listens where, and all connections between servers."""

    kernel: Kernel
    random: Random
    names: dict[str, list[str]] = field(default_factory=dict)  # of hosts
    listening: dict[Address, Listening] = field(default_factory=dict)
    streams: dict[Stream, None] = field(default_factory=dict)  # the dialling ends of connections over TCP
    worker_ends: dict[Stream, Process] = field(default_factory=dict)  # both ends of those over which workers compute
    tcp_capacity: int = TCP_CAPACITY
    pair_capacity: int = LOCAL_CAPACITY  # between processes of one server
    peer_capacity: int | None = None  # between servers, but for HTTP; None: as others
    page_delay_ns: int | None = None  # of what workers dial; None: as others
    http_ports: set[int] = field(default_factory=set)
    num_lines: int = 0
    num_ports: int = 20_000
    deaf: set[tuple[str, str]] = field(default_factory=set)  # pairs of machines whose connections never come to be
    opened: Callable[[Stream], None] | None = None  # told of every connection over TCP

    def pair(self) -> tuple[Stream, Stream]:
        """A socket pair inside of one machine."""
        return self._linked("pair", ("", "pair"), ("", "pair"), self.pair_capacity, LOCAL_DELAY_NS)

    def free_port(self) -> int:
        self.num_ports += 1
        return self.num_ports

    def listen(self, socket: Listening, address: Address) -> None:
        """Raises OSError for an address in use."""
        if address in self.listening:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        socket.address = address
        self.listening[address] = socket

    def dial(self, local: Address, remote: Address, *, is_unix: bool, is_by_worker: bool = False) -> Stream:
        """A stream that is connecting: established or broken a little later."""
        capacity, delay = (LOCAL_CAPACITY, LOCAL_DELAY_NS) if is_unix else (self.tcp_capacity, TCP_DELAY_NS)
        if self.peer_capacity is not None and remote[1] not in self.http_ports:
            capacity = self.peer_capacity
        if self.page_delay_ns is not None and is_by_worker:
            delay = self.page_delay_ns
        ours, theirs = self._linked("unix" if is_unix else "tcp", local, remote, capacity, delay)
        ours.is_connecting = theirs.is_connecting = True
        if not is_unix:
            self.streams[ours] = None
        self.kernel.after(ours._delay(), lambda: self._reach(ours, theirs))
        return ours

    def _reach(self, ours: Stream, theirs: Stream) -> None:
        if ours.is_closed or (ours.local[0], str(ours.remote[0])) in self.deaf:
            return
        target = self.listening.get(ours.remote)
        if target is None or len(target.waiting) > target.backlog:
            self.kernel.after(ours._delay(), lambda: ours.fail(errno.ECONNREFUSED))
            return
        theirs.is_connecting = False
        target.waiting.append(theirs)
        target.changed()
        ours.last_arrival = self.kernel.now + ours._delay()  # no byte comes before the word that there is somebody
        self.kernel.at(ours.last_arrival, ours.establish)
        if self.opened is not None and ours in self.streams:
            self.opened(ours)

    def _linked(
        self, kind: str, local: Address, remote: Address, capacity: int, delay_ns: int
    ) -> tuple[Stream, Stream]:
        self.num_lines += 1
        name = f"{kind}{self.num_lines}"
        line = Line(name, Random(self.random.random()), capacity, delay_ns)
        ours = Stream(self.kernel, line, local, remote, DIALLED)
        theirs = Stream(self.kernel, line, remote, local, "<")
        ours.peer, theirs.peer = theirs, ours
        return ours, theirs

    def open_connections(self) -> list[Stream]:
        """Over TCP, that are neither closed nor broken; forgets the others."""
        for stream in [stream for stream in self.streams if stream.is_broken or stream.is_closed]:
            del self.streams[stream]
        return list(self.streams)

    def between_workers(self, some: Collection[Process]) -> list[Stream]:
        """Ends at these processes, of open connections over which they compute with others; forgets what is over."""
        for end in [end for end in self.worker_ends if end.is_broken or end.is_closed]:
            del self.worker_ends[end]
        ends = self.worker_ends
        return [
            end
            for end, process in ends.items()
            if process in some and end.peer is not None and end.peer in ends and ends[end.peer] not in some
        ]
