"""Builders for the tests of the KV data plane: two sides in one process, a serving process, and a faulty network."""

import json
import mmap
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

import pytest

from attackers_data import Target
from data_planes import introduce
from tandem.core.commands import CancelPull, PublishPages, PullPages, RevokePages
from tandem.core.events import Event, PagesDigested, PagesLanded, ReadsDrained, TransferDrained, TransferFailed
from tandem.core.kv_parts import KvShard
from tandem.core.values import Incarnation, PageId, RequestId
from tandem.membership import ClusterSecret
from tandem.storage_config import is_nixl_installed
from tandem.transfer import shared_memory
from tandem.transfer.pages import PageAccess, Pages
from tandem.transfer.port import Backend
from tandem.transfer.protocol import GRANT_SECRET_BYTES
from tandem.transfer.sock import SockTransfer

E = TypeVar("E")
NO_SECRET = bytes(GRANT_SECRET_BYTES)
DEADLINE_S = 10.0
PREFILL = Incarnation("prefill", "7")
DECODE = Incarnation("decode", "1")
SECRET = ClusterSecret(b"the secret of this cluster")
WITH_NIXL = pytest.mark.skipif(not is_nixl_installed(), reason="NIXL is not installed: pip install '.[nixl]'")
NIXL = pytest.param("nixl", marks=WITH_NIXL)  # a fabric of `pair`
NOTHING_OPEN = {"shm": 0, "nixl": 0, "unix": 0, "tcp": 0}


def eventually(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    give_up_at = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < give_up_at, f"never happened: {what}"
        time.sleep(0.001)


class Lender(Protocol):
    secrets: dict[int, bytes]


class Side:
    """A data plane with its own memory, and everything it has reported."""

    def __init__(
        self,
        incarnation: Incarnation,
        *,
        num_pages: int = 256,
        page_bytes: int = 4096,
        kv: KvShard | None = None,
        seed: int = 0,
        secret: ClusterSecret = SECRET,
        gives_back: bool = False,
        stage: Callable[[memoryview, int], PageAccess] | None = None,
        **options: object,
    ) -> None:
        """kv: of a worker that is one of several; else it has all of every page, `page_bytes`

        stage: the memory, in pages of so many bytes, is a device's; None: it is ours
        """
        kv = kv or KvShard.whole(page_bytes)
        self.page_bytes, self.num_pages = kv.page_bytes, num_pages
        page_bytes = kv.page_bytes
        self._descriptor = os.memfd_create("pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._descriptor, num_pages * page_bytes)
        self.mapping = mmap.mmap(self._descriptor, num_pages * page_bytes)
        self.memory = memoryview(self.mapping)
        self.memory[:] = random.Random(seed).randbytes(len(self.memory))
        self._lent = shared_memory.seal(self._descriptor, gives_back=gives_back)
        self.events: list[Event] = []
        self.secrets: dict[int, bytes] = {}  # by room: of the latest grant there
        self.lender: Lender | None = None  # whose secrets are presented when nothing else is said
        self._arrived = threading.Condition()
        self.transfer = SockTransfer(
            (stage or Pages)(self.memory, page_bytes),
            kv,
            incarnation=incarnation,
            secret=secret,
            host="127.0.0.1",
            report=self._report,
            memory=self._lent if stage is None else None,
            gives_back=gives_back,
            **options,  # type: ignore[arg-type]
        )

    def close(self) -> None:
        """Of the data plane. The memory is there as long as this object is."""
        self.transfer.close()
        for descriptor in {self._descriptor, self._lent} - {-1}:
            os.close(descriptor)
        self._descriptor = self._lent = -1

    def _report(self, event: Event) -> None:
        with self._arrived:
            self.events.append(event)
            self._arrived.notify_all()

    def page(self, page: int) -> bytes:
        return bytes(self.memory[page * self.page_bytes : (page + 1) * self.page_bytes])

    def write(self, page: int, content: bytes) -> None:
        self.memory[page * self.page_bytes : (page + 1) * self.page_bytes] = content

    def all(self, kind: type[E], request: int) -> list[E]:
        with self._arrived:
            return [e for e in self.events if isinstance(e, kind) and e.request == request]  # type: ignore[attr-defined]

    def wait(
        self,
        kind: type[E],
        request: int,
        *,
        where: Callable[[E], bool] = lambda _: True,
        deadline_s: float = DEADLINE_S,
    ) -> E:
        """The first event of that kind about the request, now or within the deadline."""

        def found() -> list[E]:
            about = [e for e in self.events if isinstance(e, kind) and e.request == request]  # type: ignore[attr-defined]
            return [e for e in about if where(e)]

        with self._arrived:
            assert self._arrived.wait_for(lambda: bool(found()), deadline_s), (
                f"no {kind.__name__} for request {request}; events: {self.events[-20:]}"
            )
            return found()[0]

    def publish(
        self,
        request: int,
        pages: Sequence[int],
        *,
        attempt: int = 0,
        generation: int = 1,
        first_page: int = 0,
        room: int | None = None,
    ) -> bytes:
        """Publish, wait, and return the digests. The secret of the grant is in `secrets`."""
        command = PublishPages(
            RequestId(request),
            attempt,
            first_page,
            tuple(map(PageId, pages)),
            (generation,) * len(pages),
            room or request,
        )
        self.transfer.publish(command)
        digested = self.wait(PagesDigested, request, where=lambda e: (e.attempt, e.first_page) == (attempt, first_page))
        self.secrets[command.room] = digested.secret
        (digests,) = digested.digests
        return digests

    def revoke(self, request: int, *, attempt: int = 0, room: int | None = None) -> None:
        self.transfer.revoke(RevokePages(RequestId(request), attempt, room or request))

    def pull(
        self,
        request: int,
        sources: Sequence[int],
        destinations: Sequence[int],
        digests: bytes,
        *,
        attempt: int = 0,
        generation: int = 1,
        first_wanted: int = 0,
        peer: Incarnation = PREFILL,
        room: int | None = None,
        secret: bytes | None = None,
    ) -> None:
        """secret: of the grant; that of the lender's latest one in this room, if there is one, else one of nobody"""
        granted = self.lender.secrets.get(room or request) if self.lender is not None else None
        self.transfer.pull(
            PullPages(
                request=RequestId(request),
                attempt=attempt,
                room=room or request,
                peer=peer,
                first_wanted=first_wanted,
                sources=tuple(sources),
                generations=(generation,) * len(sources),
                destinations=tuple(map(PageId, destinations)),
                digests=(digests,),
                secrets=(secret or granted or NO_SECRET,),
            )
        )

    def cancel(self, request: int, *, attempt: int = 0) -> None:
        self.transfer.cancel(CancelPull(RequestId(request), attempt))

    def wait_landed(self, request: int, count: int, deadline_s: float = DEADLINE_S) -> None:
        self.wait(PagesLanded, request, where=lambda e: e.landed >= count, deadline_s=deadline_s)

    def wait_failed(self, request: int, deadline_s: float = DEADLINE_S) -> TransferFailed:
        return self.wait(TransferFailed, request, deadline_s=deadline_s)

    def wait_drained(self, request: int, attempt: int = 0) -> None:
        self.wait(TransferDrained, request, where=lambda e: e.attempt == attempt)

    def wait_reads_drained(self, request: int, deadline_s: float = DEADLINE_S) -> ReadsDrained:
        return self.wait(ReadsDrained, request, deadline_s=deadline_s)


@contextmanager
def pair(fabric: str = "unix", **options: object) -> Iterator[tuple[Side, Side]]:
    """(owner, reader), connected over `fabric`: unix or tcp, where bytes are sent, shm or nixl."""
    options.setdefault("backend", {"shm": Backend.SHM, "nixl": Backend.NIXL}.get(fabric, Backend.SOCK))
    owner, reader = Side(PREFILL, seed=1, **options), Side(DECODE, seed=2, **options)  # type: ignore[arg-type]
    if options["backend"] is Backend.NIXL:
        owner.transfer.start_nixl(lends=True)
        reader.transfer.start_nixl(lends=False)
    with introduced(owner, reader, unix=fabric not in ("tcp", "nixl")):
        yield owner, reader


@contextmanager
def introduced(owner: Side, reader: Side, *, unix: bool) -> Iterator[tuple[Side, Side]]:
    """Both are closed at the end."""
    reader.lender = owner
    plane = owner.transfer
    introduce(reader.transfer, PREFILL, plane.host, plane.port, plane.unix if unix else "")
    try:
        yield owner, reader
    finally:
        reader.close()
        owner.close()


def target(owner: Side, *, fabric: str = "unix") -> Target:
    """Of raw sockets."""
    plane = owner.transfer
    return Target(PREFILL, owner.page_bytes, plane.host, plane.port, plane.unix if fabric == "unix" else "")


def transfer_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("kv-")]


class Gate:
    """A TCP hop before an owner that lets only so many bytes through towards the reader, until it is opened."""

    def __init__(self, owner: Side, *, pass_bytes: int) -> None:
        self._target = (owner.transfer.host, owner.transfer.port)
        self._pass_bytes = pass_bytes
        self._opened = threading.Event()
        self.is_full = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._is_closed = False
        self._threads: list[threading.Thread] = []
        self._spawn(self._accept)

    def open(self) -> None:
        self._opened.set()

    def close(self) -> None:
        self._is_closed = True
        self._opened.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(DEADLINE_S)
        self._listener.close()

    def _spawn(self, run: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=run, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self._spawn(self._forward, near)

    def _forward(self, near: socket.socket) -> None:
        with near, socket.create_connection(self._target) as far:
            while not self._is_closed:
                held = self._pass_bytes <= 0 and not self._opened.is_set()
                if held:
                    self.is_full.set()
                ready, _, _ = select.select([near] if held else [near, far], [], [], 0.02)
                for source, sink in ((near, far), (far, near)):
                    if source not in ready:
                        continue
                    try:
                        is_counted = source is far and not self._opened.is_set()
                        data = source.recv(min(65536, self._pass_bytes) if is_counted else 65536)
                        sink.sendall(data)
                    except OSError:
                        return
                    if not data:
                        return
                    if is_counted:
                        self._pass_bytes -= len(data)


SERVE = """
import json, mmap, os, random, sys, threading, time
from tandem.core.commands import PublishPages
from tandem.core.kv_parts import KvShard
from tandem.core.values import Incarnation
from tandem.membership import ClusterSecret
from tandem.transfer import link, shared_memory
from tandem.transfer.pages import Pages
from tandem.transfer.port import Backend
from tandem.transfer.sock import SockTransfer

name, id, secret, num_pages, page_bytes, frame_ms, shares, backend = json.loads(sys.argv[1])
send = link.send
def slow_send(*args, **options):
    time.sleep(frame_ms / 1000)
    send(*args, **options)
link.send = slow_send
descriptor = os.memfd_create("pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
os.ftruncate(descriptor, num_pages * page_bytes)
memory = memoryview(mmap.mmap(descriptor, num_pages * page_bytes))
shared_memory.seal(descriptor)
memory[:] = random.Random(1).randbytes(len(memory))
def report(event):
    if type(event).__name__ == "PagesDigested":
        at = [transfer.host, transfer.port, transfer.unix]
        print(json.dumps([*at, event.digests[0].hex(), event.secret.hex()]), flush=True)
transfer = SockTransfer(Pages(memory, page_bytes), KvShard.whole(page_bytes),
                        incarnation=Incarnation(name, id), host="127.0.0.1", report=report,
                        secret=ClusterSecret(bytes.fromhex(secret)),
                        memory=descriptor if shares else None, backend=Backend(backend))
if backend == "nixl":
    transfer.start_nixl(lends=True)
transfer.publish(PublishPages(1, 0, 0, tuple(range(num_pages)), (1,) * num_pages, 1))
sys.stdin.read()
"""


def state_of(task: str) -> str:
    with open(f"{task}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0]


class ServingProcess:
    """A real process that has published all its pages as request 1, room 1, and sends slowly, frame by frame."""

    def __init__(
        self,
        *,
        num_pages: int,
        page_bytes: int,
        frame_ms: float,
        shares: bool = False,
        backend: Backend = Backend.AUTO,
    ) -> None:
        """shares: gives its memory to those who want it"""
        self.is_frozen = False
        told = (PREFILL.name, PREFILL.id, SECRET.raw.hex(), num_pages, page_bytes, frame_ms, shares)
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVE, json.dumps([*told, backend.value])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.host, self.port, self.unix, digests, secret = json.loads(self._process.stdout.readline())
        self.digests = bytes.fromhex(digests)
        self.secrets = {1: bytes.fromhex(secret)}

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def freeze(self) -> None:
        """None of its threads runs when this returns."""
        self.signal(signal.SIGSTOP)
        tasks = f"/proc/{self._process.pid}/task"
        eventually(
            lambda: {state_of(f"{tasks}/{one}") for one in os.listdir(tasks)} == {"T"}, "all threads stand still"
        )
        self.is_frozen = True

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()
