"""A worker without torch: executes `BatchPlan`s over simulated page memory, in launch order.

It keeps what `core/batch.py` says a worker keeps - per request its tokens and page table, and the ordered decode set -
and reads every position through the page table. A batch touches memory at its end: the latest moment, and so the one
at which a page that was given away too early has already been written by somebody else.

Memory is per shard. Pages are never cleared, as in a real device, so stale content is there to be found.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from tandem.core.batch import BatchOutcome, BatchPlan, Join, TokenFlag
from tandem.core.values import MILLISECOND, PageHash, PageId, RequestId
from tandem.pagehash import hash_of, page_link
from tandem.simulator.model import EOS_TOKEN, MASK, content_of_shards, kv_content, sample, shard_weight
from tandem.simulator.oracle import Script, Violation


@dataclass(slots=True)
class PageMemory:
    """The KV of one shard: `page_size` slots of 64 bits per page, and their sum."""

    num_pages: int
    page_size: int
    slots: list[list[int]] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slots = [[0] * self.page_size for _ in range(self.num_pages)]
        self.sums = [0] * self.num_pages

    def write(self, page: PageId, slot: int, content: int) -> None:
        content &= MASK
        row = self.slots[page]
        self.sums[page] += content - row[slot]
        row[slot] = content

    def read(self, table: list[PageId], length: int) -> int:
        """Sum of the slots of positions [0, length)."""
        num_full, rest = divmod(length, self.page_size)
        total = sum(map(self.sums.__getitem__, table[:num_full]))
        return total + sum(self.slots[table[num_full]][:rest]) if rest else total

    def copy_out(self, page: PageId) -> list[int]:
        return self.slots[page].copy()

    def copy_in(self, page: PageId, contents: list[int]) -> None:
        self.slots[page] = contents.copy()
        self.sums[page] = sum(contents)


def digest(contents: list[int]) -> bytes:
    """8 bytes over a whole page, the slots behind the last token included."""
    mixed = 0
    for content in contents:
        mixed = (mixed * 0x9E3779B97F4A7C15 + content + 1) & MASK
    return mixed.to_bytes(8, "little")


@dataclass(slots=True)
class WorkerRequest:
    """What the worker knows of one request."""

    request: RequestId
    script: Script
    tokens: list[int]
    hashes: list[bytes]  # links of the full pages of `tokens`, as far as they were needed
    root: bytes
    num_reported: int  # leading pages whose hash the node has or was told
    table: list[PageId] = field(default_factory=list)
    is_broken: bool = False  # a batch with it failed: what follows is garbage that the node has to drop


@dataclass(slots=True)
class CostModel:
    """How long a batch takes. One seed draws one; a slow executor multiplies it."""

    base_ns: int = 2 * MILLISECOND
    prompt_token_ns: int = 20_000
    decode_row_ns: int = 50_000
    jitter: float = 0.2
    slowdown: float = 1.0

    def batch_ns(self, plan: BatchPlan, num_decode_rows: int, random: Random) -> int:
        prompt_tokens = sum(row.stop - row.start for row in plan.rows)
        exact = self.base_ns + prompt_tokens * self.prompt_token_ns + num_decode_rows * self.decode_row_ns
        return int(exact * self.slowdown * (1 + self.jitter * random.random()))


# Called before a row touches memory: (request, page table, pages read, pages written as a half-open index range).
MemoryGuard = Callable[[RequestId, list[PageId], int, int], None]


@dataclass(slots=True)
class Executor:
    """All shards of one replica in lock step: they run the same plans, so they differ only in what they hold."""

    num_pages: int
    page_size: int
    num_shards: int
    guard: MemoryGuard
    memories: list[PageMemory] = field(default_factory=list)
    seats: dict[RequestId, WorkerRequest] = field(default_factory=dict)
    decode_set: dict[RequestId, None] = field(default_factory=dict)
    last_iteration: int = 0

    def __post_init__(self) -> None:
        self.memories = [PageMemory(self.num_pages, self.page_size) for _ in range(self.num_shards)]

    def seat(self, request: RequestId, script: Script, root: bytes) -> None:
        """What a real worker gets as `Payload`, before the node hears of the request."""
        num_pages = len(script.prompt) // self.page_size
        self.seats[request] = WorkerRequest(request, script, list(script.prompt), [], root, num_reported=num_pages)

    def forget(self, requests: tuple[RequestId, ...]) -> None:
        """In its turn between the batches, as on the one socket of a real worker."""
        for request in requests:
            self.decode_set.pop(request, None)
            self.seats.pop(request, None)

    def change_sets(self, plan: BatchPlan) -> None:
        """Everything of a plan that comes before the forward pass."""
        for request in plan.leave:
            self.decode_set.pop(request, None)
        for join in plan.join:
            self._join(self.seats[join.request], join)
        for grow in plan.grow:
            _cut_and_append(self.seats[grow.request].table, grow.first_page, grow.pages)

    def run(self, plan: BatchPlan, *, invalid: frozenset[int] = frozenset()) -> BatchOutcome:
        """The forward pass. `invalid`: rows of the outcome whose logits are not finite."""
        if plan.iteration <= self.last_iteration:
            raise Violation("S24", f"iteration {plan.iteration} after {self.last_iteration}")
        self.last_iteration = plan.iteration
        self.change_sets(plan)
        sampled: list[int] = []
        flags = bytearray()
        hashes: list[tuple[RequestId, PageHash]] = []
        for row in plan.rows:
            seat = self.seats[row.request]
            _cut_and_append(seat.table, row.first_page, row.pages)
            seat.tokens.extend(array("i", row.token))
            kv_sum = self._forward(seat, row.start, row.stop)
            if row.stop > len(seat.script.prompt):
                hashes.extend((row.request, page_hash) for page_hash in self._new_hashes(seat, row.stop))
            if row.samples:
                del seat.tokens[row.stop :]  # sampled before a retraction, and never told to the client
                self._sample(seat, kv_sum, sampled, flags, invalid)
        if plan.decodes:
            for request in self.decode_set:
                seat = self.seats[request]
                position = len(seat.tokens) - 1
                kv_sum = self._forward(seat, position, position + 1)
                self._sample(seat, kv_sum, sampled, flags, invalid)
                if (position + 1) % self.page_size == 0:
                    hashes.extend((request, page_hash) for page_hash in self._new_hashes(seat, position + 1))
        return BatchOutcome(plan.id, plan.iteration, array("i", sampled).tobytes(), bytes(flags), tuple(hashes))

    def break_off(self, plan: BatchPlan) -> None:
        """The forward pass raises: sets and tables have changed, nothing is sampled, KV may be half written."""
        self.last_iteration = plan.iteration
        self.change_sets(plan)
        for row in plan.rows:
            seat = self.seats[row.request]
            _cut_and_append(seat.table, row.first_page, row.pages)
            seat.tokens.extend(array("i", row.token))
            seat.is_broken = True
        if plan.decodes:
            for request in self.decode_set:
                self.seats[request].is_broken = True

    def _join(self, seat: WorkerRequest, join: Join) -> None:
        _cut_and_append(seat.table, join.first_page, join.pages)
        seat.tokens.extend(array("i", join.token))
        self.decode_set[join.request] = None
        length = len(seat.tokens) - 1
        if length != len(seat.script.prompt) and join.token:
            raise Violation(
                "S19", f"request {seat.request} joins with KV of {length} of {len(seat.script.prompt)} tokens"
            )
        if not seat.is_broken and self._read(seat.table, length) != seat.script.kv_sum(length):
            raise Violation("S19", f"request {seat.request} starts to decode before its KV is whole")

    def _sample(
        self, seat: WorkerRequest, kv_sum: int, sampled: list[int], flags: bytearray, invalid: frozenset[int]
    ) -> None:
        token = sample(kv_sum=kv_sum, position=len(seat.tokens) - 1, eos_one_in=seat.script.eos_one_in)
        if len(sampled) in invalid:
            flags.append(TokenFlag.INVALID)
            seat.is_broken = True
        else:
            flags.append(TokenFlag.EOS if token == EOS_TOKEN else 0)
        sampled.append(token)
        seat.tokens.append(token)

    def _forward(self, seat: WorkerRequest, start: int, stop: int) -> int:
        """Write the KV of [start, stop) and return the sum of [0, stop), all through the page table."""
        table, page_size = seat.table, self.page_size
        if len(table) * page_size < stop:
            raise Violation("S5", f"request {seat.request}: {len(table)} pages for {stop} tokens")
        if stop > len(seat.tokens):
            raise Violation("S5", f"request {seat.request}: span [{start}, {stop}) of {len(seat.tokens)} tokens")
        self.guard(seat.request, table, start // page_size, (stop - 1) // page_size + 1)
        kv_sum = self._read(table, start)
        if kv_sum != seat.script.kv_sum(start) and not seat.is_broken:
            raise Violation("S5", f"request {seat.request}: KV of [0, {start}) is not what its tokens make")
        for position in range(start, stop):
            content = kv_content(sum_before=kv_sum, token=seat.tokens[position], position=position)
            page, slot = table[position // page_size], position % page_size
            for index, memory in enumerate(self.memories):
                memory.write(page, slot, content * shard_weight(index))
            kv_sum = (kv_sum + content) & MASK
        return kv_sum

    def _read(self, table: list[PageId], length: int) -> int:
        total = sum(memory.read(table, length) for memory in self.memories)
        return content_of_shards(total, self.num_shards)

    def _new_hashes(self, seat: WorkerRequest, length: int) -> list[PageHash]:
        """Hashes of the full pages of [0, length) that were not reported yet; the chain before them is made as well."""
        full = length // self.page_size
        while len(seat.hashes) < full:
            start = len(seat.hashes) * self.page_size
            parent = seat.hashes[-1] if seat.hashes else seat.root
            seat.hashes.append(page_link(parent, seat.tokens[start : start + self.page_size]))
        new = [hash_of(link) for link in seat.hashes[seat.num_reported : full]]
        seat.num_reported = max(seat.num_reported, full)
        return new


def _cut_and_append(table: list[PageId], first_page: int, pages: tuple[PageId, ...]) -> None:
    if first_page > len(table):
        raise Violation("S5", f"a table of {len(table)} pages cannot be cut to {first_page}")
    del table[first_page:]
    table.extend(pages)
