"""A worker without torch: executes `BatchPlan`s over simulated page memory, in launch order.

Plans are applied by `batch_tables.py`, as in the engine; here is a forward pass that reads every position through the
page table. A batch touches memory at its end: the latest moment, and so the one at which a page that was given away too
early has already been written by somebody else.

Pages are never cleared, as in a real device, so stale content is there to be found.
"""

from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from random import Random

from tandem.batch_tables import BatchTables, PlainDecodeSet, PlanError, Sequence, TokenSpan
from tandem.core.batch import BatchOutcome, BatchPlan, Join, TokenFlag
from tandem.core.commands import PublishPages
from tandem.core.kv_parts import KvShard, Runs
from tandem.core.values import MILLISECOND, PageId, RequestId, ShardId
from tandem.engine.late_tokens import LateTokens, RunBatch
from tandem.pagehash import prompt_links
from tandem.simulator.model import EOS_TOKEN, MASK, cell_weight, content_of, kv_content
from tandem.simulator.oracle import Script, Violation, told_of

WHOLE = Runs(0, 0, 0, 0)  # all cells of a shard
ALL_VALID: Mapping[int, int] = {}  # no row without a token
FIRST_WINDOWED = 1 << 20  # the cells of layers with a window have numbers that no others have


def empty_page(page_size: int) -> tuple[int, ...]:
    """What `ShardMemory.copy_out` says of one cell of a page that nobody has written."""
    return (0,) * (page_size + 1)


@dataclass(slots=True)
class PageMemory:
    """The KV of one cell (`core/kv_parts.py`): `page_size` slots of 64 bits per page, and their sum; and a slot for the
    state behind the last of them that was written (`model.py`).
    """

    num_pages: int
    page_size: int
    slots: list[list[int]] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)
    empty: list[int] = field(default_factory=list)  # what stands for every page that nobody has written yet

    def __post_init__(self) -> None:
        self.empty = list(empty_page(self.page_size))
        self.slots = [self.empty] * self.num_pages
        self.sums = [0] * self.num_pages

    def write(
        self, table: list[PageId], start: int, contents: list[int], states: list[int], *, weight: int = 1
    ) -> None:
        """The slots of positions from `start` on; and of each page the state behind the last of them in it.

        contents, states: by position, of 64 bits; `weight` times as much is written, of 64 bits
        """
        written, page_size = 0, self.page_size
        while written < len(contents):
            index, slot = divmod(start + written, page_size)
            page, new = table[index], contents[written : written + page_size - slot]
            written += len(new)
            if weight != 1:
                new = [content * weight & MASK for content in new]
            row = self.slots[page]
            if row is self.empty:
                row = self.slots[page] = self.empty.copy()
            end = slot + len(new)
            self.sums[page] += sum(new) - sum(row[slot:end])
            row[slot:end] = new
            row[page_size] = states[written - 1] * weight & MASK

    def read(self, table: list[PageId], length: int) -> int:
        """Sum of the slots of positions [0, length); another number where the state behind them is none of theirs."""
        num_full, rest = divmod(length, self.page_size)
        total = sum(map(self.sums.__getitem__, table[:num_full]))
        if rest:
            total += sum(self.slots[table[num_full]][:rest])
        if length and self.slots[table[(length - 1) // self.page_size]][self.page_size] != total & MASK:
            return total + 1
        return total

    def read_between(self, table: list[PageId], first: int, length: int) -> int:
        """Sum of the slots of positions [first, length); `first` begins a page."""
        return sum(self.slots[table[at // self.page_size]][at % self.page_size] for at in range(first, length))

    def forget(self, page: PageId) -> None:
        self.slots[page], self.sums[page] = self.empty, 0

    def copy_out(self, page: PageId) -> list[int]:
        return self.slots[page].copy()

    def copy_in(self, page: PageId, contents: list[int]) -> None:
        self.slots[page] = contents.copy()
        self.sums[page] = sum(contents[: self.page_size])


class ShardMemory:
    """The KV of one shard: of its cells, one behind the other as in a real page. Behind them one of a layer with a
    window, where there is such a layer: what nobody sees any more in it may be forgotten."""

    def __init__(self, num_pages: int, page_size: int, cells: Iterable[int], *, has_window: bool) -> None:
        """cells: their numbers in the whole model"""
        self.page_size = page_size
        self.cells = {cell: PageMemory(num_pages, page_size) for cell in cells}
        self.windowed = PageMemory(num_pages, page_size) if has_window else None
        self.windowed_cell = FIRST_WINDOWED + min(self.cells)
        self._in_order = [*self.cells.values(), *([self.windowed] if self.windowed is not None else [])]

    def free_windows(self, pages: Iterable[PageId]) -> None:
        assert self.windowed is not None, "no layer has a window"
        for page in pages:
            self.windowed.forget(page)

    def copy_out(self, page: PageId, runs: Runs = WHOLE) -> list[int]:
        """The slots of these cells, each cell's state behind its last one; runs of cells, not of bytes."""
        return list(chain.from_iterable([memory.slots[page] for memory in self._picked(runs)]))

    def copy_in(self, page: PageId, contents: list[int], runs: Runs = WHOLE) -> None:
        width = self.page_size + 1
        for at, memory in enumerate(self._picked(runs)):
            memory.copy_in(page, contents[at * width : (at + 1) * width])

    def first_cell(self, page: PageId) -> list[int]:
        return self._in_order[0].copy_out(page)

    def _picked(self, runs: Runs) -> list[PageMemory]:
        if runs is WHOLE or runs.num_bytes == len(self.cells):
            return self._in_order
        starts = range(runs.first, runs.first + runs.count * runs.stride, runs.stride)
        return [memory for start in starts for memory in self._in_order[start : start + runs.size]]


def cell_numbers(kv: KvShard) -> tuple[int, ...]:
    """Of the cells of one shard in the whole model, in its order."""
    return tuple(layer * kv.grid.num_kv_heads + head for head, layer in kv.box.cells())


def digest(contents: list[int]) -> bytes:
    """8 bytes over all slots of a page, those behind the last token included."""
    mixed = 0
    for content in contents:
        mixed = (mixed * 0x9E3779B97F4A7C15 + content + 1) & MASK
    return mixed.to_bytes(8, "little")


def digests(command: PublishPages, kv: KvShard, memory: ShardMemory) -> tuple[bytes, ...]:
    """Of what one shard lends to each worker that reads it."""
    return tuple(
        b"".join(digest(memory.copy_out(page, runs)) for page in command.pages) for runs in kv.lends(command.reader)
    )


@dataclass(slots=True, kw_only=True)
class WorkerRequest(Sequence):
    """What the worker knows of one request."""

    script: Script
    is_broken: bool = False  # a batch with it failed: what follows is garbage that the node has to drop

    @classmethod
    def of(cls, request: RequestId, script: Script, prompt_hash: bytes, *, page_size: int) -> "WorkerRequest":
        return cls(
            request=request,
            prompt_len=len(script.prompt),
            page_size=page_size,
            tokens=array("i", script.prompt),
            prompt_hash=prompt_hash,
            script=script,
        )


def num_told(tokens: list[int]) -> int:
    """Of a block: up to the token that ends the answer."""
    return tokens.index(EOS_TOKEN) + 1 if EOS_TOKEN in tokens else len(tokens)


def last_link(root: bytes, prompt: tuple[int, ...], *, page_size: int) -> bytes:
    """Of the last full page of a prompt; the root where it has none."""
    links = prompt_links(root, prompt, page_size=page_size)
    return links[-1] if links else root


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


class TokensToCome(Exception):
    """The shard that samples has not run that batch yet."""


class SentTokens:
    """From the shard that samples to another one: of each batch that samples, in order."""

    def __init__(self) -> None:
        self._batches: deque[array[int]] = deque()

    def send(self, tokens: "array[int]") -> None:
        self._batches.append(tokens)

    def receive_tokens(self, count: int) -> "array[int]":
        """All of the next batch, for `count` requests. Raises TokensToCome."""
        if not self._batches:
            raise TokensToCome
        return self._batches.popleft()


@dataclass(slots=True)
class Executor:
    """One shard of a replica. All run the same plans, and differ in when, and in what they hold.

    Every cell of a shard has to tell the same of the KV before a batch. What the first shard samples is the outcome of
    the batch; the others take these tokens as late as those of an engine do (`engine/late_tokens.py`), also of blocks,
    which an engine samples pass by pass.
    """

    num_pages: int
    page_size: int
    shard: ShardId
    guard: MemoryGuard
    cells: tuple[int, ...] = ()  # of this shard; the one that has its number, unless told
    memory: ShardMemory = field(init=False)
    tables: BatchTables[WorkerRequest] = field(default_factory=lambda: BatchTables(defaultdict(PlainDecodeSet)))
    last_iteration: int = 0
    block_tokens: int = 1
    window_tokens: int = 0  # that a query sees in a layer with a window; 0: there is no such layer
    sent: SentTokens = field(default_factory=SentTokens)  # to this shard
    send: list[SentTokens] = field(default_factory=list[SentTokens])  # by the one that samples, to the others
    late_tokens: LateTokens[WorkerRequest] = field(init=False)

    def __post_init__(self) -> None:
        self.tables.block_tokens = self.block_tokens
        self.late_tokens = LateTokens(self.tables, self.sent)
        cells, has_window = self.cells or (self.shard,), self.window_tokens > 0
        self.memory = ShardMemory(self.num_pages, self.page_size, cells, has_window=has_window)

    @property
    def samples(self) -> bool:
        return self.shard == 0

    @property
    def requests(self) -> dict[RequestId, WorkerRequest]:
        return self.tables.sequences

    @property
    def decoding(self) -> list[RequestId]:
        """By micro-batch, each in join order."""
        sets = sorted(self.tables.decode_sets.items())
        return [member.request for _, decode_set in sets for member in decode_set.members]

    def add(self, request: RequestId, script: Script, prompt_hash: bytes) -> None:
        """What a real worker gets as `Payload`, before the node hears of the request. prompt_hash: `last_link`"""
        self.tables.add(WorkerRequest.of(request, script, prompt_hash, page_size=self.page_size))

    def forget(self, requests: tuple[RequestId, ...]) -> None:
        """In its turn between the batches, as on the one socket of a real worker. Raises TokensToCome."""
        self.late_tokens.before_forgetting(set(requests))
        self.tables.forget(requests)

    def begin(self, plan: BatchPlan) -> None:
        """To be called before `run` where another shard samples. Raises TokensToCome."""
        self.late_tokens.before(plan)

    def run(self, plan: BatchPlan, *, invalid: Mapping[int, int] = ALL_VALID) -> BatchOutcome:
        """The forward pass. `invalid`: the flags of rows of the outcome that get no token."""
        if plan.iteration <= self.last_iteration:
            raise Violation("S24", f"iteration {plan.iteration} after {self.last_iteration}")
        self.last_iteration = plan.iteration
        spans = self._apply(plan)
        sampled: list[list[int]] = []
        flags = bytearray()
        told: list[tuple[RequestId, bytes]] = []
        vectors: list[tuple[RequestId, bytes]] = []
        samples = self.samples
        for row in self.tables.inputs(plan, spans):
            kv_sum = self._forward(row.sequence, row.start, row.stop, told)
            if row.samples and samples:
                self._sample(row.sequence, kv_sum, sampled, flags, invalid)
            if row.pools:
                vectors.append((row.sequence.request, told_of(kv_sum)))
        if not samples:
            samplers = self.tables.sampling(plan, spans)
            if samplers:
                self.late_tokens.wait_for(RunBatch(plan, spans, samplers))
            return BatchOutcome(plan.id, plan.iteration, b"", b"")
        following = array("i", [token for tokens in sampled for token in tokens])
        if sampled:
            for other in self.send:
                other.send(following)
        hashes = self.tables.finish(plan, spans, following)
        counts = tuple(map(num_told, sampled))
        told_tokens = [tokens[:count] for tokens, count in zip(sampled, counts, strict=True)]
        tokens = array("i", [token for tokens in told_tokens for token in tokens]).tobytes()
        return BatchOutcome(
            plan.id,
            plan.iteration,
            tokens,
            bytes(flags),
            tuple(hashes),
            prompt_extras=tuple(told),
            vectors=tuple(vectors),
            counts=counts if self.block_tokens > 1 else (),
        )

    def break_off(self, plan: BatchPlan) -> None:
        """The forward pass raises: sets and tables have changed, nothing is sampled, KV may be half written."""
        self.last_iteration = plan.iteration
        for span in self._apply(plan):
            span.sequence.is_broken = True
        for member in self.tables.members(plan):
            member.is_broken = True

    def _apply(self, plan: BatchPlan) -> list[TokenSpan[WorkerRequest]]:
        try:
            spans = self.tables.apply(plan)
        except PlanError as error:
            raise Violation("S5", str(error)) from error
        for join in plan.join:
            self._check_join(self.requests[join.request], join)
        return spans

    def _check_join(self, sequence: WorkerRequest, join: Join) -> None:
        length = len(sequence.tokens) - self.block_tokens
        if length != sequence.prompt_len - sequence.prompt_len % self.block_tokens and join.token:
            raise Violation(
                "S19", f"request {sequence.request} joins with KV of {length} of {sequence.prompt_len} tokens"
            )
        if not sequence.is_broken and self._read(sequence.pages, length) != sequence.script.kv_sum(length):
            raise Violation("S19", f"request {sequence.request} starts to decode before its KV is whole")
        self._check_window(sequence, length)

    def _sample(
        self,
        sequence: WorkerRequest,
        kv_sum: int,
        sampled: list[list[int]],
        flags: bytearray,
        invalid: Mapping[int, int],
    ) -> None:
        """A block, of which the tokens at its beginning may be known. kv_sum: of all before it.

        As if they were sampled one after the other: so the right answer is the same for blocks of any size. Their KV is
        not written before all of them are known.
        """
        length = len(sequence.tokens)
        block = list(sequence.tokens[length - length % self.block_tokens :])
        first, position = len(block), length - len(block)
        for token in block:
            kv_sum = (kv_sum + kv_content(sum_before=kv_sum, token=token, position=position)) & MASK
            position += 1
        while len(block) < self.block_tokens:
            token = sequence.script.sampled(kv_sum=kv_sum, position=position - 1)
            block.append(token)
            if len(block) < self.block_tokens:
                kv_sum = (kv_sum + kv_content(sum_before=kv_sum, token=token, position=position)) & MASK
                position += 1
        if len(sampled) in invalid:
            flags.append(invalid[len(sampled)])
            sequence.is_broken = True
        else:
            flags.append(TokenFlag.EOS if EOS_TOKEN in block[first:] else 0)
        sampled.append(block[first:])

    def _forward(self, sequence: WorkerRequest, start: int, stop: int, told: list[tuple[RequestId, bytes]]) -> int:
        """Write the KV of [start, stop) and return the sum of [0, stop), all through the page table.

        told: what the client wants to know of prompt tokens is appended here.
        """
        table, page_size = sequence.pages, self.page_size
        if len(table) * page_size < stop:
            raise Violation("S5", f"request {sequence.request}: {len(table)} pages for {stop} tokens")
        if stop > len(sequence.tokens):
            raise Violation(
                "S5", f"request {sequence.request}: span [{start}, {stop}) of {len(sequence.tokens)} tokens"
            )
        if start < stop:
            self.guard(sequence.request, table, start // page_size, (stop - 1) // page_size + 1)
        kv_sum = self._read(table, start)
        if kv_sum != sequence.script.kv_sum(start) and not sequence.is_broken:
            raise Violation(
                "S5", f"request {sequence.request}: KV or state of [0, {start}) is not what its tokens make"
            )
        if self.memory.windowed is not None:
            self._check_window(sequence, start)
        contents, sums = sequence.script.kv(sequence.tokens[start:stop].tolist(), start, kv_sum)
        for cell, memory in self.memory.cells.items():
            memory.write(table, start, contents, sums, weight=cell_weight(cell))
        if self.memory.windowed is not None:
            weight = cell_weight(self.memory.windowed_cell)
            self.memory.windowed.write(table, start, contents, contents, weight=weight)
        first = sequence.script.logprobs_from
        if first is not None:
            wanted = range(max(first, start), min(stop, sequence.prompt_len - 1))
            if wanted:
                told.append((sequence.request, b"".join(told_of(sums[position - start]) for position in wanted)))
        return sums[-1] if sums else kv_sum

    def _check_window(self, sequence: WorkerRequest, length: int) -> None:
        """What the query at position `length` sees in a layer with a window is there."""
        memory = self.memory.windowed
        if memory is None or sequence.is_broken:
            return
        first = max(0, length + 1 - self.window_tokens) // self.page_size * self.page_size
        found = content_of(memory.read_between(sequence.pages, first, length), self.memory.windowed_cell)
        if found != sequence.script.kv_sum(length) - sequence.script.kv_sum(first) & MASK:
            raise Violation("S5", f"request {sequence.request}: the window [{first}, {length}) is not there")

    def _read(self, table: list[PageId], length: int) -> int:
        """What all cells say; nonsense where they do not say the same."""
        found = [content_of(memory.read(table, length), cell) for cell, memory in self.memory.cells.items()]
        return found[0] if len(set(found)) == 1 else sum(found) + 1 & MASK
