"""What it costs that prefill and decode are cut differently: their KV transfer, as a ratio to that of two whole sides.

All workers of the prefill are data planes of one process, those of the decode of another one, over AF_UNIX. A round
publishes `--pages` pages in random order (digests made there), hands the digests over and pulls the pages into other
random places; the clock runs from asking for the publication until the last worker has everything. Pages have 2 x 16
tokens of 64 numbers in bf16 for each of 8 heads and 16 layers: 512 KiB over all workers of a side, whatever the cut.
The pairs take turns in every round, so that whatever else the machine does meets all of them.

    python bench/unequal.py [--rounds 15] [--pages 64] [--json]

A ratio over 1 is slower than one worker to one worker. More workers than cores cost by themselves: compare a pair with
the equal one of as many workers.
"""

import argparse
import json
import mmap
import multiprocessing
import queue
import random
import statistics
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

from conditions import conditions

from tandem.core.commands import CancelPull, PublishPages, PullPages, RevokePages
from tandem.core.events import Event, PagesDigested, PagesLanded, ReadsDrained, TransferDrained, TransferFailed
from tandem.core.kv_parts import KvGrid, KvShard
from tandem.core.values import Cut, Incarnation, PageId, RequestId
from tandem.membership import ClusterSecret
from tandem.transfer.jobs import PeerAddress
from tandem.transfer.pages import Pages
from tandem.transfer.sock import SockTransfer

GRID, CELL_BYTES = KvGrid(num_layers=16, num_kv_heads=8), 2 * 16 * 64 * 2
PAGE_BYTES = GRID.num_layers * GRID.num_kv_heads * CELL_BYTES
SECRET = ClusterSecret(b"the secret of the two processes")
WHOLE = Cut()
PAIRS = (
    (WHOLE, WHOLE),
    (WHOLE, Cut(2)),
    (Cut(2), WHOLE),
    (Cut(2), Cut(2)),
    (Cut(2), Cut(4)),
    (WHOLE, Cut(1, 2)),
    (Cut(1, 2), WHOLE),
    (Cut(1, 2), Cut(1, 2)),
    (Cut(1, 2), Cut(2)),
    (Cut(2), Cut(1, 2)),
    (Cut(2, 2), WHOLE),
)


class Side:
    """The data planes of one server's workers, over memory that is touched before anything is measured."""

    def __init__(self, who: Incarnation, cut: Cut, num_pages: int) -> None:
        self.cut, self.num_pages = cut, num_pages
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.transfers: list[SockTransfer] = []
        for shard in cut.shards:
            kv = KvShard(GRID, cut, shard, CELL_BYTES)
            pool = memoryview(mmap.mmap(-1, num_pages * kv.page_bytes))
            pool[:] = random.Random(shard).randbytes(kv.page_bytes) * num_pages
            self.transfers.append(
                SockTransfer(
                    Pages(pool, kv.page_bytes),
                    kv,
                    incarnation=who,
                    secret=SECRET,
                    host="127.0.0.1",
                    report=self.events.put,
                )
            )

    def wait(self, kind: type[Event], *, landed: int = 0) -> list[Event]:
        """What each worker says."""
        found: list[Event] = []
        while len(found) < len(self.transfers):
            event = self.events.get(timeout=60)
            if isinstance(event, TransferFailed):
                raise RuntimeError(f"{event.cause}: {event.detail}")
            if isinstance(event, kind) and (not isinstance(event, PagesLanded) or event.landed == landed):
                found.append(event)
        return found


def serve(control: Connection, who: Incarnation, cut: Cut, num_pages: int) -> None:
    """A prefill: publishes what the other process asks for, until that hangs up."""
    side = Side(who, cut, num_pages)
    control.send([(one.host, one.port, one.unix) for one in side.transfers])
    try:
        while True:
            command = control.recv()
            if isinstance(command, PublishPages):
                for transfer in side.transfers:
                    transfer.publish(command)
                said = {event.shard: event for event in side.wait(PagesDigested) if isinstance(event, PagesDigested)}
                in_order = [said[shard] for shard in cut.shards]
                digests = tuple(digests for event in in_order for digests in event.digests)
                control.send((digests, tuple(event.secret for event in in_order)))
            else:
                for transfer in side.transfers:
                    transfer.revoke(command)
                side.wait(ReadsDrained)
                control.send(None)
    except EOFError:
        for transfer in side.transfers:
            transfer.close()


@dataclass
class Pair:
    """A decode here, and its prefill in another process."""

    prefill: Cut
    decode: Cut
    num_pages: int

    def __post_init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.control, theirs = context.Pipe()
        self.peer = Incarnation("bench-prefill", self.name)
        arguments = (theirs, self.peer, self.prefill, 2 * self.num_pages)
        self.process = context.Process(target=serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self.side = Side(Incarnation("bench-decode", self.name), self.decode, 2 * self.num_pages)
        addresses = [PeerAddress(*one) for one in self.control.recv()]
        for transfer in self.side.transfers:
            transfer.connect(self.peer, self.prefill, addresses)
        self.random = random.Random(2)
        self.num_rounds = 0
        self.seconds: list[float] = []

    @property
    def name(self) -> str:
        return f"{self.prefill.name} to {self.decode.name}"

    def round(self) -> float:
        """Seconds from asking for the publication until every worker has all pages."""
        self.num_rounds += 1
        request, room = RequestId(self.num_rounds), self.num_rounds + (1 << 40)
        everywhere = range(2 * self.num_pages)
        sources, destinations = (tuple(map(PageId, self.random.sample(everywhere, self.num_pages))) for _ in range(2))
        generations = (self.num_rounds,) * self.num_pages
        begin = time.perf_counter()
        self.control.send(PublishPages(request, 0, 0, sources, generations, room, reader=self.decode))
        digests, secrets = self.control.recv()
        command = PullPages(request, 0, room, self.peer, 0, sources, generations, destinations, digests, secrets)
        for transfer in self.side.transfers:
            transfer.pull(command)
        self.side.wait(PagesLanded, landed=self.num_pages)
        seconds = time.perf_counter() - begin
        for transfer in self.side.transfers:
            transfer.cancel(CancelPull(request, 0))
        self.side.wait(TransferDrained)
        self.control.send(RevokePages(request, 0, room))
        self.control.recv()
        return seconds

    def close(self) -> None:
        for transfer in self.side.transfers:
            transfer.close()
        self.control.close()
        self.process.join(10)


def main() -> None:
    parser = argparse.ArgumentParser(description="KV transfer between sides that are cut differently")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--pages", type=int, default=64)
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    args = parser.parse_args()
    pairs = [Pair(prefill, decode, args.pages) for prefill, decode in PAIRS]
    for number in range(args.warm_up + args.rounds):
        for pair in pairs:
            seconds = pair.round()
            if number >= args.warm_up:
                pair.seconds.append(seconds)
    whole = pairs[0]
    results = [
        {
            "pair": pair.name,
            "ms": round(1e3 * statistics.median(pair.seconds), 2),
            "gb_s": round(args.pages * PAGE_BYTES / 1e9 / statistics.median(pair.seconds), 2),
            "ratio": round(statistics.median(a / b for a, b in zip(pair.seconds, whole.seconds, strict=True)), 2),
        }
        for pair in pairs
    ]
    for pair in pairs:
        pair.close()
    if not args.json:
        print(f"{args.pages} pages of {PAGE_BYTES >> 10} KiB, median of {args.rounds} rounds; ratio = to {whole.name}")
        for row in results:
            print(f"{row['pair']:28} {row['ms']:7.2f} ms  {row['gb_s']:5.2f} GB/s  {row['ratio']:5.2f}")
    print(
        json.dumps({"bench": "unequal", **conditions(), "pages": args.pages, "rounds": args.rounds, "results": results})
    )


if __name__ == "__main__":
    main()
