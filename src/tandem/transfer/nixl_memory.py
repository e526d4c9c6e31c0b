"""KV pages that a peer reads by NIXL (https://github.com/ai-dynamo/nixl), over whatever UCX finds: TCP, RDMA, or the
memory of another process on the same host. Imported where it is used first: NIXL takes a second to load.

The reader reads, the owner does nothing (decision 034). What NIXL does not give decides the rest:

*It has no cancel.* A transfer whose handle was released, or that has failed, may still write into the reader's memory
later. So NIXL never gets an address of the KV pool of a reader: it reads into *slots* of its own, from which pages are
copied when the transfer is done. A slot whose transfer was not done in time is not used again, and the agent, which
writes it, neither (`is_spent`); connections are made anew, with another agent. An agent is destroyed when none of its
transfers is under way any more, and its slots are unmapped after that.

*It has no deadline.* Ours is the timeout of the connection; and when that one has ended, as it does with its process, a
moment more.

*It proves nothing and hides nothing.* Who can reach the port of an agent can read and write what is registered there,
and probably more (docs/security.md). So there is no agent before the flag, or somebody who has proved the cluster's
secret, wants one; and it listens on the interface of the server's address only, unless UCX_NET_DEVICES names others.
"""

import contextlib
import fcntl
import ipaddress
import mmap
import os
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any  # what NIXL's bindings give

import numpy as np

from tandem.core.kv_parts import Runs
from tandem.transfer.copying import address
from tandem.transfer.link import LinkBroken, LinkFrozen
from tandem.transfer.nixl_access import Unavailable
from tandem.transfer.pages import Pages, Reached, spans
from tandem.transfer.protocol import MAX_NIXL_METADATA_BYTES, Malformed, Registered

nixl: Any = import_module("nixl._bindings")  # what NIXL's Python API is made of, and all of its settings
PLUGIN = "UCX"
POLL_S = 50e-6  # between two looks at a transfer; later, up to
MAX_POLL_S = 1e-3
LAST_MOMENT_S = 0.25  # for a transfer whose connection has ended
OWNER_POLL_US = 20_000  # an owner's thread sleeps until something comes, and looks so often in any case
NIXL_ERRORS: tuple[type[Exception], ...] = tuple(  # they have nothing in common but where they are
    found for found in vars(nixl).values() if isinstance(found, type) and issubclass(found, Exception)
)
_SIOCGIFADDR = 0x8915
LIVING: dict["ReadMemory", None] = {}  # until they have ended: what may still be written to is nobody's garbage


class OwnerMemory:
    """The pages of one worker, registered. An agent of its own answers reads, until `close`."""

    def __init__(self, buffer: memoryview, *, host: str) -> None:
        """Raises Unavailable."""
        self._agent: Agent | None = Agent(host, is_owner=True)
        with _named("memory cannot be registered"):
            self._agent.register(buffer)
            metadata = self._agent.metadata()
        if len(metadata) > MAX_NIXL_METADATA_BYTES:
            raise Unavailable(f"its metadata have {len(metadata)} bytes")
        self.registered = Registered(address(buffer), len(buffer), metadata)

    def close(self) -> None:
        """Nothing reads the memory after this."""
        agent, self._agent = self._agent, None
        if agent is not None:
            is_gone = agent.destroy()
            assert is_gone


@dataclass(slots=True, eq=False)
class Slot:
    """Memory of this process into which NIXL reads."""

    buffer: memoryview
    is_quiet: bool = True  # whatever was read into it was done, so nothing writes to it
    transfer: "Transfer | None" = None  # that was not done in time


class ReadMemory:
    """What one life of a worker has registered, as this worker reads it. A `CopySource`; used by several threads."""

    def __init__(
        self, registered: Registered, *, page_bytes: int, host: str, slot_bytes: int, timeout_s: float
    ) -> None:
        """slot_bytes: of the pages that are read at once, at most. Raises Unavailable and Malformed."""
        if registered.num_bytes == 0 or registered.num_bytes % page_bytes:
            raise Malformed(f"the peer registered {registered.num_bytes} bytes, and says that pages have {page_bytes}")
        self._base, self._page_bytes = registered.address, page_bytes
        self._num_pages = registered.num_bytes // page_bytes
        self._slot_bytes, self._timeout_s = slot_bytes, timeout_s
        self._agent: Agent | None = Agent(host, is_owner=False)
        with _named("the peer is not reached, or its metadata are not taken"):
            self._peer = self._agent.meet(registered.metadata)
        self._lock = threading.Lock()
        self._slots: list[Slot] = []  # as many as were in use at once
        self._free: list[Slot] = []
        self._num_used = 0
        self.num_links = 0  # the caller's to count
        self.is_spent = False
        LIVING[self] = None

    @property
    def way(self) -> str:
        return "nixl"

    @contextmanager
    def reach(self, sources: Sequence[int], runs: Runs, *, has_news: Callable[[], bool]) -> Iterator[Reached]:
        """Reads them into a slot, where they lie one behind the other."""
        page_bytes = runs.num_bytes
        if not sources or min(sources) < 0 or max(sources) >= self._num_pages:
            raise Malformed("a frame of pages that the memory does not have")
        num_bytes = len(sources) * page_bytes
        if num_bytes > self._slot_bytes:
            raise Malformed(f"a frame of {num_bytes} bytes to be copied at once")
        slot = self._take()
        try:
            self._read(slot, sources, runs, has_news)
            pages = Pages(slot.buffer[:num_bytes], page_bytes)
            yield Reached(pages, range(len(sources)), pages.whole)
        finally:
            self._give_back(slot)

    def may_end(self) -> bool:
        """No transfer is under way, and none is begun any more: `end` may follow."""
        with self._lock:
            if self._num_used:
                return False
            self.is_spent = True
            return all(slot.transfer is None or slot.transfer.has_ended() for slot in self._slots)

    def end(self) -> None:
        """Destroy the agent. When it is gone nothing writes to the slots, whose memory is given back."""
        with self._lock:
            agent, self._agent = self._agent, None
            for slot in self._slots:
                if slot.transfer is not None:
                    slot.transfer.release()
                    slot.transfer = None
            self._free.clear()
            if agent is not None and agent.destroy():
                del LIVING[self]
                self._slots.clear()

    def _read(self, slot: Slot, sources: Sequence[int], runs: Runs, has_news: Callable[[], bool]) -> None:
        """Until all of it is here."""
        assert slot.is_quiet
        found = spans(sources, runs, page_bytes=self._page_bytes)
        until = time.monotonic() + self._timeout_s
        why, pause_s = f"NIXL has not read within {self._timeout_s:g} s", POLL_S
        is_told = False
        slot.is_quiet = False
        try:
            assert self._agent is not None
            slot.transfer = self._agent.read(self._peer, self._base, found, into=slot.buffer)
            while not slot.transfer.is_done():
                if time.monotonic() >= until:
                    raise (LinkBroken if is_told else LinkFrozen)(why)
                if not is_told and has_news():
                    is_told, why = True, "closed while NIXL read"
                    until = min(until, time.monotonic() + LAST_MOMENT_S)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_POLL_S)
        except NIXL_ERRORS as error:
            raise LinkBroken(f"NIXL: {error}") from error
        slot.transfer.release()
        slot.transfer, slot.is_quiet = None, True

    def _take(self) -> Slot:
        with self._lock:
            if self.is_spent or self._agent is None:
                raise LinkBroken("its NIXL agent is not used any more")
            if self._free:
                slot = self._free.pop()
            else:
                slot = Slot(memoryview(mmap.mmap(-1, self._slot_bytes)))
                try:
                    self._agent.register(slot.buffer)
                except NIXL_ERRORS as error:
                    raise LinkBroken(f"NIXL cannot register memory: {error}") from error
                self._slots.append(slot)
            self._num_used += 1
            return slot

    def _give_back(self, slot: Slot) -> None:
        with self._lock:
            self._num_used -= 1
            if slot.is_quiet:
                self._free.append(slot)
            else:
                self.is_spent = True


class Agent:
    """One of NIXL, with UCX. Thread-safe."""

    def __init__(self, host: str, *, is_owner: bool) -> None:
        """is_owner: peers read, so a thread of its own answers. Who reads looks itself.

        host: the server's address, on whose interface it listens. Raises Unavailable.
        """
        os.environ.setdefault("UCX_DEBUG_SIGNO", "0")  # else UCX takes SIGHUP, and halts the process when it comes
        config = nixl.nixlAgentConfig()
        config.useProgThread = is_owner
        config.useListenThread = config.captureTelemetry = False
        config.pthrDelay = OWNER_POLL_US  # nixl_agent of its Python API sets 0, which polls without a pause
        config.syncMode = nixl.NIXL_THREAD_SYNC_STRICT
        interface = interface_of(host)  # UCX_NET_DEVICES counts more, where it is set
        with _named("it cannot be started"):
            self._agent: Any = nixl.nixlAgent(f"tandem {secrets.token_hex(8)}", config)
            settings = {} if interface is None else {"engine_config": f"NET_DEVICES={interface}"}
            self._ucx = self._agent.createBackend(PLUGIN, settings)

    def destroy(self) -> bool:
        """Whether it is gone. If so its memory is registered no more, and nothing of it reads or writes."""
        still_there = weakref.ref(self._agent)
        self._agent = None
        return still_there() is None

    def register(self, buffer: memoryview) -> None:
        described = nixl.nixlRegDList(nixl.DRAM_SEG, [(address(buffer), len(buffer), 0, "")])
        self._agent.registerMem(described, [self._ucx])

    def metadata(self) -> bytes:
        return self._agent.getLocalMD()

    def meet(self, metadata: bytes) -> bytes:
        """The name of whoever has given these metadata."""
        return self._agent.loadRemoteMD(metadata)

    def read(self, peer: bytes, base: int, found: Sequence[tuple[int, int]], *, into: memoryview) -> "Transfer":
        """Begin to read these spans of the peer's memory, which begins at `base`, one behind the other."""
        there = np.array([(base + start, stop - start, 0) for start, stop in found], np.uint64)
        here = there.copy()
        here[0, 0] = address(into)
        here[1:, 0] = address(into) + np.cumsum(there[:-1, 1])
        sides = (nixl.nixlXferDList(nixl.DRAM_SEG, each) for each in (here, there))
        handle = self._agent.createXferReq(nixl.NIXL_READ, *sides, peer, b"", [self._ucx])
        return Transfer(self._agent, handle)


class Transfer:
    """One read that has begun."""

    def __init__(self, agent: Any, handle: int) -> None:
        """Raises one of NIXL_ERRORS where it fails at once; some of it may be under way then."""
        self._agent: Any = agent
        self._handle = handle
        try:
            self._state = agent.postXferReq(handle, b"")
        except NIXL_ERRORS:
            agent.releaseXferReq(handle)
            raise

    def is_done(self) -> bool:
        """Raises one of NIXL_ERRORS where it will never be."""
        if self._state == nixl.NIXL_IN_PROG:
            self._state = self._agent.getXferStatus(self._handle)
        return self._state == nixl.NIXL_SUCCESS

    def has_ended(self) -> bool:
        """One way or the other."""
        try:
            return self.is_done()
        except NIXL_ERRORS:
            return True

    def release(self) -> None:
        """Forget it, once it has ended: of one that is under way it would not be the end."""
        self._agent.releaseXferReq(self._handle)
        self._agent = None


def interface_of(host: str) -> str | None:
    """The name of the network interface that has this address; None: none has, as of 0.0.0.0."""
    wanted = ipaddress.ip_address(host)
    if wanted.is_loopback:
        return "lo"
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if wanted in _addresses_of(name)), None)


def _addresses_of(name: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    found: list[ipaddress.IPv4Address | ipaddress.IPv6Address] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket, contextlib.suppress(OSError):
        answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        found.append(ipaddress.IPv4Address(answer[20:24]))
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as lines:
        fields = [line.split() for line in lines]
        found += [ipaddress.IPv6Address(bytes.fromhex(one[0])) for one in fields if one[5] == name]
    return found


@contextmanager
def _named(what: str) -> Iterator[None]:
    try:
        yield
    except NIXL_ERRORS as error:
        raise Unavailable(f"NIXL: {what}: {error}") from error
