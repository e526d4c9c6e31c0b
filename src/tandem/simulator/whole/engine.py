"""An engine without torch, for worker processes of a simulation: what it samples shows every byte of KV it has read.

KV of a position is one 64-bit number made of its token, its position and all KV before it (`simulator/model.py`), kept
in the memory that the data plane sends from and receives into. The next token is made of the sum of all KV of its row.
So a page that is wrong, stale, foreign or half written anywhere changes every token after it, and the right tokens are
known from the prompt alone (`right_tokens`). A grammar is followed as the engine follows it: of the tokens that it
allows, that number picks one. The tokens of a block are found as if one came after the other, some in every pass, and
their KV is written once all of them are known: so blocks of any size have the same right tokens. Of several workers
each has its own part of the KV (`shards.py`), and one samples: the others take its tokens as those of a real engine do
(`engine/late_tokens.py`, and of blocks `engine/drafts.py`).
"""

import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol  # Any: rows, which each engine has of its own

import msgspec

from tandem.batch_tables import BatchTables, PlainDecodeSet, TokenSpan
from tandem.batch_tables import Sequence as Tokens
from tandem.core.batch import BatchOutcome, BatchPlan, TokenFlag
from tandem.core.kv_parts import KvGrid, box_of
from tandem.core.values import Nanos, RequestId
from tandem.engine.drafts import Draft, agree
from tandem.engine.late_tokens import LateTokens, RunBatch
from tandem.grammar import Matcher, Vocabulary
from tandem.ranks import Rank
from tandem.sampling import Payload, SamplingParams, TokenScore
from tandem.simulator.actors.executor import FIRST_WINDOWED
from tandem.simulator.model import MASK, cell_weight, content_of, kv_content, mixed
from tandem.simulator.whole.shards import Shards

SLOT_BYTES = 8
FIRST_TOKEN = 16  # of ordinary ones
EOS_TOKEN = 2
EOS_ONE_IN = 40
DIMENSIONS = 4  # of a vector
LOGPROB = -0.5  # of every token


def next_token(kv_sum: int, position: int, *, vocab_size: int, may_end: bool, matcher: Matcher | None) -> int:
    """The token that follows `position`, given the sum of the KV of [0, position]."""
    number = mixed(kv_sum, position)
    if matcher is not None and not matcher.is_finished:
        allowed = ids_in(matcher.allowed())
        return allowed[(number >> 8) % len(allowed)]
    if may_end and number % EOS_ONE_IN == 0:
        return EOS_TOKEN
    return FIRST_TOKEN + (number >> 8) % (vocab_size - FIRST_TOKEN)


def vector_of(kv_sum: int) -> list[float]:
    """Of a prompt, given the sum of all its KV: numbers of 16 bits each, so that fp32 holds them as they are."""
    return [float(kv_sum >> 16 * part & 0xFFFF) for part in range(DIMENSIONS)]


def vector_bytes(kv_sum: int) -> bytes:
    return array("f", vector_of(kv_sum)).tobytes()


def ids_in(allowed: bytes) -> list[int]:
    """The tokens whose bits are set, as `Matcher.allowed` has them."""
    bits = int.from_bytes(allowed, "little")
    return [id for id in range(8 * len(allowed)) if bits >> id & 1]


def right_tokens(
    prompt: Sequence[int], count: int, *, vocab_size: int, ignore_eos: bool, matcher: Matcher | None = None
) -> list[int]:
    """What every engine, and every pair of them, has to answer; shorter than `count` where it ends by itself."""
    kv_sum, answer = 0, []
    for position, token in enumerate(prompt):
        kv_sum = (kv_sum + kv_content(sum_before=kv_sum, token=token, position=position)) & MASK
    while len(answer) < count:
        position = len(prompt) + len(answer) - 1
        token = next_token(kv_sum, position, vocab_size=vocab_size, may_end=not ignore_eos, matcher=matcher)
        answer.append(token)
        if matcher is not None:
            matcher.accept(token)
        if (token == EOS_TOKEN and not ignore_eos) or (matcher is not None and matcher.is_finished):
            break
        kv_sum = (kv_sum + kv_content(sum_before=kv_sum, token=token, position=position + 1)) & MASK
    return answer


def _score(row: "Row", token: int) -> bytes:
    tops = tuple(range(16, 16 + min(row.params.top_logprobs, 3)))
    return msgspec.msgpack.encode(TokenScore(LOGPROB, tops, tuple(-1.0 for _ in tops)))


def prompt_logprob(token: int, position: int) -> float:
    return -(token + position / 4096)


@dataclass(slots=True, kw_only=True)
class Row(Tokens):
    """One request."""

    params: SamplingParams
    matcher: Matcher | None = None
    num_said: int = 0

    def append(self, token: int) -> None:
        Tokens.append(self, token)
        if self.matcher is not None:
            self.matcher.accept(token)

    def cut(self, stop: int) -> None:
        Tokens.cut(self, stop)
        if self.matcher is not None:
            self.matcher.restart(self.tokens[self.prompt_len - self.num_said :])


class PlainKv:
    """`num_pages` pages, each of which has for every cell of this shard (`core/kv_parts.py`) `page_size` slots, and
    one more for the state behind the last that was written (`simulator/model.py`). Where layers have a window, each
    cell has as much again of one of them, whose numbers are others.
    """

    def __init__(self, num_pages: int, page_size: int, grid: KvGrid, rank: Rank, *, window_tokens: int) -> None:
        box = box_of(grid, rank.cut, rank.shard)
        cell_slots = (page_size + 1) * (2 if window_tokens else 1)
        self.cell_bytes = cell_slots * SLOT_BYTES
        self.page_bytes = box.num_cells * self.cell_bytes
        self.buffer: memoryview | None = memoryview(bytearray(num_pages * self.page_bytes))
        self.fd: int | None = None  # once the memory is shared
        self.copies = None  # it is no device's
        self._slots = self.buffer.cast("Q")
        self._page_size, self._page_slots = page_size, box.num_cells * cell_slots
        self._cells = [  # where each begins in a page, and its number in the whole model
            (at * cell_slots, layer * grid.num_kv_heads + head) for at, (head, layer) in enumerate(box.cells())
        ]
        self._window_tokens = window_tokens
        self._windowed = [(start + page_size + 1, FIRST_WINDOWED + cell) for start, cell in self._cells]
        self.window_bytes = 0

    def free_windows(self, pages: Iterable[int]) -> None:
        for page in pages:
            for start, _ in self._windowed:
                first = page * self._page_slots + start
                for slot in range(first, first + self._page_size + 1):
                    self._slots[slot] = 0

    def write(self, pages: Sequence[int], position: int, content: int) -> None:
        page, slot = divmod(position, self._page_size)
        first = pages[page] * self._page_slots + slot
        for start, cell in self._cells + self._windowed if self._window_tokens else self._cells:
            self._slots[first + start] = content * cell_weight(cell) & MASK

    def leave(self, pages: Sequence[int], position: int, kv_sum: int) -> None:
        """The state behind this position, in its page."""
        state = pages[position // self._page_size] * self._page_slots + self._page_size
        for start, cell in self._cells:
            self._slots[state + start] = kv_sum * cell_weight(cell) & MASK

    def read(self, pages: Sequence[int], stop: int) -> int:
        """The sum of [0, stop), as all cells have it and as their states say; nonsense where they differ."""
        slots, size, page_slots = self._slots, self._page_size, self._page_slots
        places = [pages[position // size] * page_slots + position % size for position in range(stop)]
        found = [content_of(sum(slots[place + start] for place in places), cell) for start, cell in self._cells]
        if stop:
            state = pages[(stop - 1) // size] * page_slots + size
            found += [content_of(slots[state + start], cell) for start, cell in self._cells]
        if self._window_tokens:
            seen = places[max(0, stop + 1 - self._window_tokens) // size * size :]
            before = sum(slots[place] for place in places[: len(places) - len(seen)])
            of_windows = [content_of(sum(slots[place + at] for place in seen), cell) for at, cell in self._windowed]
            found += [content_of(before, self._cells[0][1]) + one & MASK for one in of_windows]
        return found[0] if len(set(found)) == 1 else sum(found) + 1 & MASK


class SimulatedEngine(Protocol):
    """An engine of a simulated worker, whose next forward pass may be told to fail."""

    fails_next: bool
    runs: Callable[[BatchPlan, RunBatch[Any]], None] | None  # told of every batch
    ends: Callable[[], None] | None  # told when its worker is about to end, as one of several


class PlainEngine:
    """The part of `engine.Engine` that a worker process uses."""

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        vocab_size: int,
        tokenizer: Path,
        base_s: float,
        token_s: float,
        grid: KvGrid,
        block_tokens: int,
        window_tokens: int,
        shards: Shards,
    ) -> None:
        """tokenizer: its file, for grammars. base_s, token_s: how long a batch takes, and each of its tokens.

        block_tokens: that a row samples at once, as `core/batch.py` says
        window_tokens: that a query sees in layers with a window; 0: no layer has one
        """
        self.kv = PlainKv(num_pages, page_size, grid, shards.rank, window_tokens=window_tokens)
        self._page_size = page_size
        self._vocab_size, self._tokenizer = vocab_size, tokenizer
        self._base_s, self._token_s = base_s, token_s
        self._tables: BatchTables[Row] = BatchTables(defaultdict(PlainDecodeSet), block_tokens=block_tokens)
        self._block_tokens = block_tokens
        self._shards = shards
        self._late_tokens = LateTokens(self._tables, shards.pipeline)
        self.fails_next = False
        self.runs: Callable[[BatchPlan, RunBatch[Any]], None] | None = None
        self.ends: Callable[[], None] | None = None

    def add(self, payload: Payload) -> None:
        tokens = array("i")
        tokens.frombytes(payload.tokens)
        matcher = self._matcher_of(payload.sampling)
        if matcher is not None:
            matcher.restart(tokens[len(tokens) - payload.num_said :])
        self._tables.add(
            Row(
                request=RequestId(payload.request),
                prompt_len=len(tokens),
                page_size=self._page_size,
                tokens=tokens,
                prompt_hash=payload.last_hash,
                params=payload.sampling,
                matcher=matcher,
                num_said=payload.num_said,
            )
        )

    def prepare(self, payload: Payload) -> None:
        """Compile its grammar."""
        self._matcher_of(payload.sampling)

    def _matcher_of(self, params: SamplingParams) -> Matcher | None:
        if not params.grammar or not self._shards.rank.samples:
            return None
        return self._vocabulary.matcher(params.grammar, eos_ids=(EOS_TOKEN,), ignores_eos=params.ignore_eos)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary(self._tokenizer, size=self._vocab_size)

    def forget(self, requests: Iterable[int]) -> None:
        gone = set(requests)
        self._late_tokens.before_forgetting(gone)
        self._tables.forget(gone)

    def run(self, plan: BatchPlan) -> BatchOutcome:
        """Where another worker samples, there are no tokens. Raises WorkerGone."""
        began = time.monotonic_ns()
        self._late_tokens.before(plan)
        spans = self._tables.apply(plan)
        batch = RunBatch(plan, spans, self._tables.sampling(plan, spans))
        if self.runs is not None:
            self.runs(plan, batch)
        sampled, vectors = self._forward(batch)
        samples, is_told = self._shards.rank.samples, self._block_tokens > 1  # pass by pass
        if batch.samplers and not samples and not is_told:
            self._late_tokens.wait_for(batch)
            return BatchOutcome(plan.id, plan.iteration, b"", b"", duration_ns=since(began))
        following = list(chain.from_iterable(sampled))
        if batch.samplers and not is_told:
            self._shards.send_tokens(following)
        if not samples:
            self._tables.append(plan, spans, following)
            return BatchOutcome(plan.id, plan.iteration, b"", b"", duration_ns=since(began))
        said = [self._said(row, tokens) for row, tokens in zip(batch.samplers, sampled, strict=True)]
        flags = bytes(self._flag(row, tokens[-1]) for row, tokens in zip(batch.samplers, said, strict=True))
        hashes = self._tables.finish(plan, spans, following)
        flags = bytes(flag | self._end_of_grammar(row) for row, flag in zip(batch.samplers, flags, strict=True))
        return BatchOutcome(
            batch=plan.id,
            iteration=plan.iteration,
            tokens=array("i", chain.from_iterable(said)).tobytes(),
            flags=flags,
            hashes=tuple(hashes),
            extras=tuple(
                (row.request, _score(row, tokens[-1]))
                for row, tokens in zip(batch.samplers, said, strict=True)
                if row.params.logprobs
            ),
            prompt_extras=tuple(self._prompt_scores(spans)),
            vectors=tuple(vectors),
            duration_ns=since(began),
            counts=tuple(map(len, said)) if self._block_tokens > 1 else (),
        )

    def _prompt_scores(self, spans: Sequence[TokenSpan[Row]]) -> Iterator[tuple[RequestId, bytes]]:
        """Of each prompt token behind a position: its own number, so that one in another's place is noticed."""
        for span in spans:
            row, first = span.sequence, span.sequence.params.prompt_logprobs_from
            if first is not None:
                positions = range(max(span.start, first), min(span.stop, row.prompt_len - 1))
                found = [TokenScore(prompt_logprob(row.tokens[at + 1], at + 1)) for at in positions]
                yield row.request, msgspec.msgpack.encode(found)

    def _said(self, row: Row, tokens: list[int]) -> list[int]:
        """Of those of a block: up to the one that ends the answer."""
        stop = next((count for count, token in enumerate(tokens, 1) if self._flag(row, token)), len(tokens))
        return tokens[:stop]

    def _flag(self, row: Row, token: int) -> int:
        is_end = token == EOS_TOKEN and not row.params.ignore_eos
        is_stop = token in row.params.stop_token_ids
        return (TokenFlag.EOS if is_end else 0) | (TokenFlag.STOP if is_stop else 0)

    def _end_of_grammar(self, row: Row) -> int:
        """A token after which a grammar allows nothing is the last one."""
        return TokenFlag.STOP if row.matcher is not None and row.matcher.is_finished else 0

    def _forward(self, batch: RunBatch[Row]) -> tuple[list[list[int]], list[tuple[RequestId, bytes]]]:
        """Write the KV of all rows, through their page tables. Returns the tokens of those that sample, and the vectors
        of those that pool.
        """
        inputs = self._tables.inputs(batch.plan, batch.spans)
        rows = [(span.sequence, span.start, span.stop, span.samples) for span in inputs]
        handed_on = self._shards.from_stage_before(len(rows))
        length_s = self._base_s + self._token_s * sum(stop - start for _, start, stop, _ in rows)
        time.sleep(length_s / self._shards.rank.pp_size)  # a stage has its part of the layers
        if self.fails_next:
            self.fails_next = False
            if self.ends is not None:
                self.ends()
            raise RuntimeError("a forward pass that fails, as drawn")
        sums = self._shards.agreed([self.kv.read(row.pages, start) for row, start, _, _ in rows], handed_on)
        if self._shards.ranks.meet(len(rows)):
            sums = self._shards.shared(sums)
        contents = self._as_all_ranks_say(
            [
                self._contents(row, start, stop, kv_sum)
                for (row, start, stop, _), kv_sum in zip(rows, sums, strict=True)
            ],
            num_spans=len(batch.spans),
        )
        ends = [
            self._write(row, start, part, kv_sum)
            for (row, start, _, _), part, kv_sum in zip(rows, contents, sums, strict=True)
        ]
        self._shards.to_stage_behind(sums)
        pooled = zip(batch.spans, ends, strict=False)
        vectors = [(span.sequence.request, vector_bytes(kv_sum)) for span, kv_sum in pooled if span.pools]
        sampling = [(row, kv_sum) for (row, _, _, samples), kv_sum in zip(rows, ends, strict=True) if samples]
        if self._block_tokens > 1:
            return self._found_in_passes(*zip(*sampling, strict=True)) if sampling else [], vectors
        return [[self._next(row, kv_sum, len(row.tokens))] for row, kv_sum in sampling], vectors

    def _next(self, row: Row, kv_sum: int, position: int) -> int:
        """The token at this position. kv_sum: of all before."""
        may_end = not row.params.ignore_eos
        size = self._vocab_size
        return next_token(kv_sum, position - 1, vocab_size=size, may_end=may_end, matcher=row.matcher)

    def _found_in_passes(self, rows: Sequence[Row], sums: Sequence[int]) -> list[list[int]]:
        """Their tokens up to the border of the block of each. sums: of all before these blocks, from the first pass."""
        drafts = [Draft[Row].of(row, block_tokens=self._block_tokens, mask_id=0) for row in rows]
        unfinished = drafts
        while True:
            if self._shards.rank.samples:
                for draft, kv_sum in zip(unfinished, sums, strict=True):
                    self._settle(draft, kv_sum)
            unfinished = agree(self._shards.pipeline, unfinished)
            if not unfinished:
                return [draft.found.tolist() for draft in drafts]
            sums = self._pass_again(unfinished)

    def _settle(self, draft: Draft[Row], kv_sum: int) -> None:
        """The next ones of its tokens: how many, is drawn from the KV, too. kv_sum: of all before the block."""
        masks = set(draft.masks)
        last = min(masks) + (kv_sum >> 5) % len(masks)
        for place in range(last + 1):
            position = draft.start + place
            if place in masks:
                draft.put(place, self._next(draft.sequence, kv_sum, position), 0)
            token = int(draft.tokens[place])
            kv_sum = (kv_sum + kv_content(sum_before=kv_sum, token=token, position=position)) & MASK

    def _pass_again(self, drafts: Sequence[Draft[Row]]) -> list[int]:
        """Through all stages. Returns the sum of all KV before each of these blocks."""
        handed_on = self._shards.from_stage_before(len(drafts))
        if self._shards.rank.num_shards > 1:  # of one worker a batch takes its time, in however many passes
            time.sleep(self._base_s / self._shards.rank.pp_size)
        sums = self._shards.agreed([self.kv.read(one.sequence.pages, one.start) for one in drafts], handed_on)
        self._shards.to_stage_behind(sums)
        return sums

    def accompany(self) -> None:
        """Take part in a step without a batch. Raises WorkerGone."""
        if self._shards.ranks.meet(None):
            self._shards.shared([])

    def _as_all_ranks_say(self, contents: list[list[int]], *, num_spans: int) -> list[list[int]]:
        """What each row writes, if the context-parallel ranks have computed their parts of the prompts' rows."""
        prompts = iter(self._shards.of_all_tokens(list(chain.from_iterable(contents[:num_spans]))))
        return [list(islice(prompts, len(part))) for part in contents[:num_spans]] + contents[num_spans:]

    def _contents(self, row: Row, start: int, stop: int, kv_sum: int) -> list[int]:
        """Of the KV of [start, stop), given the sum of all before."""
        found: list[int] = []
        for position in range(start, stop):
            found.append(kv_content(sum_before=kv_sum, token=row.tokens[position], position=position))
            kv_sum = (kv_sum + found[-1]) & MASK
        return found

    def _write(self, row: Row, start: int, contents: list[int], kv_sum: int) -> int:
        """The KV from `start` on, given the sum of all before. Returns the sum of all."""
        for position, content in enumerate(contents, start):
            self.kv.write(row.pages, position, content)
            kv_sum = (kv_sum + content) & MASK
            self.kv.leave(row.pages, position, kv_sum)
        return kv_sum


def since(began: int) -> Nanos:
    return Nanos(time.monotonic_ns() - began)
