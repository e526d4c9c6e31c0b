"""torch.distributed for the workers of virtual replicas: as much of it as `engine/process_group.py` uses.

The workers of one replica have one connection between any two of them, on several machines, too. What is sent there has
a tag, and what one tag brings comes in the order in which it was sent. Nobody in between changes a byte. Connections
between machines may be cut, held up, or vanish. A worker that has ended is noticed by who waits for its bytes; one that
is frozen, or whose bytes do not come, by nobody here.
"""

import socket
import struct
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any  # tensors, of which only the bytes are looked at

import numpy as np

from tandem.engine import process_group, row_exchange
from tandem.simulator.whole.kernel import Process
from tandem.simulator.whole.sockets import LOOPBACK, Machine, VirtualSocket

HEAD = struct.Struct("!iI")  # tag, number of bytes
PIECE_BYTES = 48  # with its head less than the narrowest link holds
SHARD = struct.Struct("!I")
AGAIN_S = 0.005  # until a worker that does not listen yet is looked for again
WORLD = 0  # the group of all; groups are tagged with numbers below 0, so that tags of the caller are free

Replacement = tuple[object, str, Any]


class VirtualStore:
    """`TCPStore`: where the members meet. The first of them has inherited the socket that listens there."""

    def __init__(
        self,
        host: str,
        port: int,
        world_size: int,
        is_master: bool,
        *,
        timeout: Any,
        wait_for_workers: bool,
        master_listen_fd: int | None,
    ) -> None:
        self.port = port
        self.machine = "" if host in LOOPBACK else host  # where they meet; empty: all of them are here
        self.patience_s = timeout.total_seconds()
        self.listener = None if master_listen_fd is None else VirtualSocket(fileno=master_listen_fd)


class Done:
    """`Work`: what was sent is on its way."""

    def wait(self) -> None:
        """Returns at once: the bytes were copied."""


@dataclass(frozen=True, slots=True)
class Members:
    """`ProcessGroup`."""

    number: int
    ranks: tuple[int, ...]

    @property
    def tag(self) -> int:
        return -1 - self.number


@dataclass(slots=True)
class Member:
    """One worker, as it sees the others of its replica."""

    shard: int
    store: VirtualStore
    world: Members
    links: dict[int, VirtualSocket] = field(default_factory=dict)  # to the others
    arrived: defaultdict[tuple[int, int], deque[bytes]] = field(default_factory=lambda: defaultdict(deque))
    num_groups: int = 1

    def meet(self) -> None:
        """Returns when all are there: each dials those before it. Raises OSError, RuntimeError."""
        with self._socket() as door:
            door.bind(self._name(self.shard))
            door.listen()
            for other in range(self.shard):
                self.links[other] = self._dial(other)
                self.links[other].sendall(SHARD.pack(self.shard))
            missing = set(range(self.shard + 1, len(self.world.ranks)))
            while missing:
                link, _ = door.accept()
                other = said_by(link)
                if other in missing:
                    missing.remove(other)
                    self.links[other] = link
                else:
                    link.close()
        for link in self.links.values():
            link.connects_workers()

    def _socket(self) -> VirtualSocket:
        found = VirtualSocket(socket.AF_UNIX)
        found.machine = self.store.machine
        return found

    def _name(self, shard: int) -> str:
        return f"group-{self.store.port}-{shard}"

    def _dial(self, other: int) -> VirtualSocket:
        deadline = time.monotonic() + self.store.patience_s
        while time.monotonic() < deadline:
            link = self._socket()
            try:
                link.connect(self._name(other))
            except ConnectionRefusedError:
                link.close()
                time.sleep(AGAIN_S)
            else:
                return link
        raise RuntimeError(f"worker {other} does not come")

    def send(self, to: int, tag: int, data: bytes) -> None:
        with lost_is_an_error():
            self.links[to].sendall(HEAD.pack(tag, len(data)) + data)

    def receive(self, source: int, tag: int) -> bytes:
        """The next of these; what else comes first is kept."""
        wanted = self.arrived[source, tag]
        while not wanted:
            with lost_is_an_error():
                found, size = HEAD.unpack(exactly(self.links[source], HEAD.size))
                self.arrived[source, found].append(exactly(self.links[source], size))
        return wanted.popleft()

    def gather(self, group: Members, data: bytes) -> Iterator[bytes]:
        """What all members gave, as much each, in order of ranks. Piece by piece: nobody reads while he sends here."""
        others = [rank for rank in group.ranks if rank != self.shard]
        came: dict[int, bytes] = dict.fromkeys(others, b"")
        for start in range(0, max(1, len(data)), PIECE_BYTES):
            for other in others:
                self.send(other, group.tag, data[start : start + PIECE_BYTES])
            for other in others:
                came[other] += self.receive(other, group.tag)
        yield from (data if rank == self.shard else came[rank] for rank in group.ranks)


def said_by(link: VirtualSocket) -> int | None:
    """Which shard has dialled; None: a stranger, who says nothing, too little, or some number."""
    try:
        (shard,) = SHARD.unpack(exactly(link, SHARD.size))
    except OSError:
        return None
    return shard


@contextmanager
def lost_is_an_error() -> Iterator[None]:
    """As gloo says it."""
    try:
        yield
    except OSError as error:
        raise RuntimeError(f"Connection closed by peer: {error}") from error


def exactly(link: VirtualSocket, size: int) -> bytes:
    """Raises OSError."""
    data = b""
    while len(data) < size:
        piece = link.recv(size - len(data))
        if not piece:
            raise ConnectionResetError("the end")
        data += piece
    return data


class Collectives:
    """The module: its functions are about the worker that calls them."""

    ProcessGroup = Members
    Work = Done

    class ReduceOp:
        MIN = "min"

    def __init__(self) -> None:
        self._members: dict[Process, Member] = {}

    @property
    def _own(self) -> Member:
        return self._members[Machine.kernel.current().process]

    def init_process_group(
        self, backend: str, *, store: VirtualStore, rank: int, world_size: int, timeout: object
    ) -> None:
        member = Member(rank, store, Members(WORLD, tuple(range(world_size))))
        self._members[Machine.kernel.current().process] = member
        member.meet()

    def new_group(self, ranks: Sequence[int]) -> Members | None:
        """All have to make all groups, in one order. None: for others."""
        own = self._own
        group = Members(own.num_groups, tuple(ranks))
        own.num_groups += 1
        return group if own.shard in ranks else None

    def all_reduce(self, values: Any, *, op: str) -> None:
        assert op == self.ReduceOp.MIN, "nothing else is asked for"
        own, numbers = self._own, values.numpy()
        parts = own.gather(own.world, numbers.tobytes())
        numbers[:] = np.min([np.frombuffer(part, numbers.dtype) for part in parts], axis=0)

    def all_gather(self, found: Sequence[Any], part: Any, *, group: Members | None = None) -> None:
        own = self._own
        for into, data in zip(found, own.gather(group or own.world, part.numpy().tobytes()), strict=True):
            fill(into, data)

    def all_to_all_single(
        self, found: Any, parts: Any, *, output_split_sizes: Sequence[int], input_split_sizes: Sequence[int]
    ) -> None:
        own, data = self._own, parts.numpy().tobytes()
        for other, stop in enumerate(accumulate(input_split_sizes)):
            if other != own.shard:
                own.send(other, own.world.tag, data[stop - input_split_sizes[other] : stop])
        for other, stop in enumerate(accumulate(output_split_sizes)):
            size, start = input_split_sizes[other], sum(input_split_sizes[:other])
            came = data[start : start + size] if other == own.shard else own.receive(other, own.world.tag)
            fill(found[stop - output_split_sizes[other] : stop], came)

    def isend(self, values: Any, *, dst: int, tag: int) -> Done:
        self._own.send(dst, tag, values.numpy().tobytes())
        return Done()

    def recv(self, values: Any, *, src: int, tag: int) -> None:
        fill(values, self._own.receive(src, tag))

    def close_doors(self) -> int:
        """Nobody else is let in."""
        listener = self._own.store.listener
        if listener is not None:
            listener.close()
        return int(listener is not None)


def fill(values: Any, data: bytes) -> None:
    """Raises RuntimeError where it is not as much as was asked for."""
    into = values.numpy()
    if len(data) != into.nbytes:
        raise RuntimeError(f"{len(data)} bytes come instead of {into.nbytes}")
    into[:] = np.frombuffer(data, into.dtype)


def collectives() -> list[Replacement]:
    """For `virtual_machine`."""
    instead = Collectives()
    doors: Callable[[], int] = instead.close_doors
    return [
        (process_group, "dist", instead),
        (process_group, "TCPStore", VirtualStore),
        (process_group, "gloo_at", lambda address: "gloo"),
        (process_group, "close_doors", doors),
        (row_exchange, "dist", instead),
        (row_exchange, "close_doors", doors),
    ]
