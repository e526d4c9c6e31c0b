"""How fast KV pages travel between two processes, as a share of what one core copies in memory.

One round publishes `--pages` pages in random order in the serving process (digests made there), hands the digests over,
pulls the pages into other random places of the reading process and checks them. The clock runs, in the reading
process, from asking for the publication until the last page has landed. Between the rounds the same page-sized pieces
are copied by one core from random to random places, in the same minute on the same machine: the ratio is the result.
`pull` is the same round without publishing, which in real life overlaps with the forward passes. `handshake` is what a
new connection costs before its first page: dialling, and the proofs of both ends.

    python bench/transfer.py [--rounds 15] [--pages 1024] [--json]

Three threads want two cores at the same time, a copy wants one: on a machine with other work the ratio tells about
that work. `chrt -f 10 python bench/transfer.py` keeps it away (needs root); scheduler and load are in the JSON line,
and so are the CPU seconds of each side, which depend on it less.
"""

import argparse
import json
import mmap
import multiprocessing
import os
import platform
import queue
import random
import statistics
import subprocess
import time
from multiprocessing.connection import Connection

from tandem.core.commands import CancelPull, PublishPages, PullPages, RevokePages
from tandem.core.events import Event, PagesDigested, PagesLanded, ReadsDrained, TransferDrained, TransferFailed
from tandem.core.kv_parts import KvShard
from tandem.core.values import Cut, Incarnation, PageId, RequestId, ShardId
from tandem.membership import ClusterSecret
from tandem.storage_config import is_nixl_installed
from tandem.transfer import link, protocol, shared_memory
from tandem.transfer.handshake import ReaderHandshake
from tandem.transfer.jobs import PeerAddress
from tandem.transfer.pages import Pages
from tandem.transfer.port import Backend
from tandem.transfer.sock import SockTransfer

PEER = Incarnation("bench-prefill", "1")
READER = Incarnation("bench-decode", "2")
SECRET = ClusterSecret(b"the secret of the two processes")
HANDSHAKES = 200
SCHEDULERS = {os.SCHED_OTHER: "normal", os.SCHED_FIFO: "fifo", os.SCHED_RR: "rr"}
BACKENDS = {"shm": Backend.SHM, "unix": Backend.SOCK, "tcp": Backend.SOCK}
UCX_TLS = {
    "nixl": None,
    "nixl-tcp": "tcp",
}  # what NIXL may use: all (on one host the owner's memory), or as on a network
if is_nixl_installed():
    BACKENDS |= dict.fromkeys(UCX_TLS, Backend.NIXL)
POOL_FACTOR = 2  # the pool has twice as many pages as are moved, so that they lie scattered


def make_pool(num_pages: int, page_bytes: int) -> tuple[memoryview, int]:
    """As a worker has its KV: a memfd, with its descriptor."""
    descriptor = os.memfd_create("bench", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, num_pages * page_bytes)
    pool = memoryview(mmap.mmap(descriptor, num_pages * page_bytes))
    shared_memory.seal(descriptor)
    return pool, descriptor


def wait_for(events: "queue.SimpleQueue[Event]", kind: type) -> Event:
    while True:
        event = events.get(timeout=60)
        if isinstance(event, kind):
            return event
        if isinstance(event, TransferFailed):
            raise RuntimeError(f"{event.cause}: {event.detail}")


def serve(control: Connection, num_pages: int, page_bytes: int, fabric: str) -> None:
    """The prefill side: publishes what the reading process asks for, until it hangs up."""
    pool, descriptor = make_pool(num_pages, page_bytes)
    rng = random.Random(1)
    for page in range(num_pages):
        pool[page * page_bytes : (page + 1) * page_bytes] = rng.randbytes(page_bytes)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    transfer = SockTransfer(
        Pages(pool, page_bytes),
        KvShard.whole(page_bytes),
        incarnation=PEER,
        secret=SECRET,
        host="127.0.0.1",
        report=events.put,
        unix_dir=None,
        memory=descriptor,
        backend=BACKENDS[fabric],
    )
    if fabric in UCX_TLS:
        transfer.start_nixl(lends=True)
    control.send((transfer.host, transfer.port, transfer.unix))
    try:
        while True:
            command = control.recv()
            if command == "cpu":
                control.send(time.process_time())
            elif isinstance(command, PublishPages):
                transfer.publish(command)
                control.send(wait_for(events, PagesDigested))
            else:
                transfer.revoke(command)
                control.send(wait_for(events, ReadsDrained))
    except EOFError:
        transfer.close()


class Reading:
    """The decode side, and the memory that the copies are compared in."""

    def __init__(self, control: Connection, *, pages: int, page_bytes: int, fabric: str) -> None:
        self.control, self.num_pages, self.page_bytes, self.fabric = control, pages, page_bytes, fabric
        self.pool_pages = POOL_FACTOR * pages
        self.pool, descriptor = make_pool(self.pool_pages, page_bytes)
        self.source_pool, _ = make_pool(self.pool_pages, page_bytes)
        for pool in (self.pool, self.source_pool):  # touched, so that no page fault is measured
            for page in range(self.pool_pages):
                pool[page * page_bytes] = 1
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.transfer = SockTransfer(
            Pages(self.pool, page_bytes),
            KvShard.whole(page_bytes),
            incarnation=READER,
            secret=SECRET,
            host="127.0.0.1",
            report=self.events.put,
            unix_dir=None,
            memory=descriptor,
            backend=BACKENDS[fabric],
        )
        if fabric in UCX_TLS:
            self.transfer.start_nixl(lends=False)
        host, port, unix = control.recv()
        self.address = (host, port, "" if fabric == "tcp" else unix)
        self.transfer.connect(PEER, Cut(), [PeerAddress(*self.address)])
        self.rng = random.Random(2)
        self.request = 0

    def choose(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        everywhere = range(self.pool_pages)
        return tuple(self.rng.sample(everywhere, self.num_pages)), tuple(self.rng.sample(everywhere, self.num_pages))

    def copy_round(self) -> float:
        """Seconds that one core needs to copy the pages inside this process."""
        sources, destinations = self.choose()
        size = self.page_bytes
        pairs = [
            (self.pool[d * size : (d + 1) * size], self.source_pool[s * size : (s + 1) * size])
            for d, s in zip(destinations, sources, strict=True)
        ]
        begin = time.perf_counter()
        for destination, source in pairs:
            destination[:] = source
        return time.perf_counter() - begin

    def handshake(self) -> float:
        """Seconds from dialling until the owner's welcome is checked."""
        reader = protocol.reader_digest(READER, ShardId(0))
        begin = time.perf_counter()
        with link.dial(*self.address, timeout_s=5) as one:
            ours = ReaderHandshake(
                SECRET,
                peer=PEER,
                reader=reader,
                page_bytes=self.page_bytes,
                wants_memory=self.fabric == "shm",
                needs_nixl=self.fabric in UCX_TLS,
            )
            challenge = link.receive(one, protocol.CHALLENGE_MESSAGE_BYTES, timeout_s=5)
            link.send(one, [ours.hello(challenge)], timeout_s=5)
            welcome, memory = link.receive_with_descriptor(one, protocol.WELCOME_BYTES, timeout_s=5)
            status = ours.hear(welcome)
            seconds = time.perf_counter() - begin
            if memory is not None:
                os.close(memory)
        assert status in (protocol.Status.OK, protocol.Status.BUSY)
        return seconds

    def cpu(self) -> tuple[float, float]:
        """CPU seconds that owner and reader have used so far."""
        self.control.send("cpu")
        return self.control.recv(), time.process_time()

    def transfer_round(self) -> tuple[float, float]:
        """Seconds from asking for the publication, and from asking for the pull, until all has landed."""
        sources, destinations = self.choose()
        self.request += 1
        request, room = RequestId(self.request), self.request + (1 << 40)
        generations = tuple([self.request] * self.num_pages)
        begin = time.perf_counter()
        self.control.send(PublishPages(request, 0, 0, tuple(map(PageId, sources)), generations, room))
        digested = self.control.recv()
        pull_begin = time.perf_counter()
        pull = PullPages(
            request=request,
            attempt=0,
            room=room,
            peer=PEER,
            first_wanted=0,
            sources=sources,
            generations=generations,
            destinations=tuple(map(PageId, destinations)),
            digests=digested.digests,
            secrets=(digested.secret,),
        )
        self.transfer.pull(pull)
        while wait_for(self.events, PagesLanded).landed < self.num_pages:  # type: ignore[attr-defined]
            pass
        end = time.perf_counter()
        self.transfer.cancel(CancelPull(request, 0))
        wait_for(self.events, TransferDrained)
        self.control.send(RevokePages(request, 0, room))
        self.control.recv()
        return end - begin, end - pull_begin


def measure(fabric: str, *, pages: int, page_bytes: int, rounds: int, warm_up: int) -> dict:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    if (transports := UCX_TLS.get(fabric)) is not None:
        os.environ["UCX_TLS"] = transports
    server = context.Process(target=serve, args=(theirs, POOL_FACTOR * pages, page_bytes, fabric), daemon=True)
    server.start()
    theirs.close()
    reading = Reading(ours, pages=pages, page_bytes=page_bytes, fabric=fabric)
    samples = []
    cpu_s = [0.0, 0.0]  # owner, reader: all rounds with everything around them
    for _ in range(warm_up + rounds):
        copy_s = reading.copy_round()
        before = reading.cpu()
        both_s, pull_s = reading.transfer_round()
        cpu_s = [total + after - b for total, after, b in zip(cpu_s, reading.cpu(), before, strict=True)]
        samples.append((copy_s, both_s, pull_s))
    handshakes_s = [reading.handshake() for _ in range(HANDSHAKES)]
    reading.transfer.close()
    ours.close()
    server.join(10)
    if transports is not None:
        del os.environ["UCX_TLS"]
    copies, boths, pulls = zip(*samples[warm_up:], strict=True)
    gigabytes = pages * page_bytes / 1e9
    return {
        "fabric": fabric,
        "page_kib": page_bytes // 1024,
        "memcpy_gb_s": round(gigabytes / statistics.median(copies), 2),
        "publish_and_pull_gb_s": round(gigabytes / statistics.median(boths), 2),
        "pull_gb_s": round(gigabytes / statistics.median(pulls), 2),
        "ratio": round(statistics.median(copies) / statistics.median(boths), 3),
        "ratio_quartiles": [
            round(q, 3) for q in statistics.quantiles([c / b for c, b, _ in samples[warm_up:]], n=4)[::2]
        ],
        "pull_ratio": round(statistics.median(copies) / statistics.median(pulls), 3),
        "handshake_us": round(1e6 * statistics.median(handshakes_s)),
        "cpu_s_per_gb": {
            side: round(total / (len(samples) * gigabytes), 2)
            for side, total in zip(("owner", "reader"), cpu_s, strict=True)
        },
    }


def conditions(pages: int, rounds: int, warm_up: int) -> dict:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "machine": platform.machine(),
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "scheduler": SCHEDULERS.get(os.sched_getscheduler(0), "other"),
        "python": platform.python_version(),
        "commit": commit.stdout.strip() or "none",
        "pages": pages,
        "rounds": rounds,
        "warm_up": warm_up,
        "seed": 2,
    }


def as_row(r: dict) -> str:
    low, high = r["ratio_quartiles"]
    speeds = f"{r['memcpy_gb_s']:5.2f} GB/s  {r['publish_and_pull_gb_s']:5.2f} GB/s    {r['pull_gb_s']:5.2f} GB/s"
    ratios = f"{r['ratio']:5.3f} ({low:5.3f}-{high:5.3f})   {r['pull_ratio']:5.3f}"
    return f"{r['fabric']:8} {r['page_kib']:3} KiB  {speeds}   {ratios}       {r['handshake_us']:5} us"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--pages", type=int, default=1024)
    parser.add_argument("--page-kib", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--fabric", nargs="+", default=list(BACKENDS), choices=list(BACKENDS))
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    args = parser.parse_args()
    results = [
        measure(fabric, pages=args.pages, page_bytes=kib * 1024, rounds=args.rounds, warm_up=args.warm_up)
        for kib in args.page_kib
        for fabric in args.fabric
    ]
    if not args.json:
        print(f"{args.pages} pages, random to random, median of {args.rounds} rounds; ratio = of one core's memcpy")
        print("fabric    page     memcpy    publish+pull  pull alone   ratio (quartiles)     of pull alone   handshake")
        for r in results:
            print(as_row(r))
    print(json.dumps({"bench": "transfer", **conditions(args.pages, args.rounds, args.warm_up), "results": results}))


if __name__ == "__main__":
    main()
