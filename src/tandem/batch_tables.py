"""What a worker keeps of its requests, and what a `BatchPlan` makes of it: for the engine, the simulator and tests.

`core/batch.py` says what a plan means; here it is done in exactly that order. Who computes the forward pass calls

    spans = tables.apply(plan)                      leave, join, grow, then page tables and tokens of the rows
    ...                                             the forward pass, which writes the KV of `tables.inputs(...)` and
                                                    samples `tables.num_sampled(...)` for each `tables.sampling(...)`
    hashes = tables.finish(plan, spans, tokens)     the sampled tokens, and the pages that are full since

A forward pass that fails is not finished: tables and sets have changed, nothing was sampled.

A worker keeps more of a request than this (sampling parameters, a script of what to say): it derives its class from
`Sequence`. A decode set is a port, because the engine keeps its numbers as arrays.
"""

from array import array
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Values
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from msgspec import Struct, structs

from tandem.core.batch import BatchPlan, Row, num_sampled
from tandem.core.kv_parts import share
from tandem.core.values import PageHash, PageId, RequestId
from tandem.pagehash import hash_of, page_link


class PlanError(Exception):
    """The plan speaks of requests, pages or tokens that are not there: a bug of whoever has made it."""


@dataclass(slots=True, kw_only=True)
class Sequence:
    """One request: its tokens, its page table, and the hash chain of the pages that it has filled."""

    request: RequestId
    prompt_len: int
    page_size: int
    tokens: array  # int32: prompt, then output
    prompt_hash: bytes  # link of the last full prompt page, or the root: parent of `chain[0]`
    chain: list[bytes] = field(default_factory=list)  # links of the full pages after the full prompt pages
    num_reported: int = 0  # how many of `chain` the node has been told
    pages: list[PageId] = field(default_factory=list)

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.prompt_len

    def set_pages(self, first_page: int, pages: Values[PageId]) -> None:
        """Cut the table to `first_page` entries, then append `pages`. Raises PlanError for a gap."""
        if first_page > len(self.pages):
            raise PlanError(f"request {self.request}: a table of {len(self.pages)} pages cannot be cut to {first_page}")
        del self.pages[first_page:]
        self.pages.extend(pages)

    def append(self, token: int) -> None:
        self.tokens.append(token)

    def cut(self, stop: int) -> None:
        """Forget the tokens from `stop` on: they are about to be sampled again. A prompt is never cut."""
        if stop >= len(self.tokens):
            return
        if stop < self.prompt_len:
            raise PlanError(f"request {self.request}: a prompt of {self.prompt_len} tokens cannot be cut to {stop}")
        del self.tokens[stop:]
        del self.chain[max(0, stop // self.page_size - self.prompt_len // self.page_size) :]
        self.num_reported = min(self.num_reported, len(self.chain))

    def take_hashes(self, stop: int) -> list[PageHash]:
        """Hashes of full pages of [0, stop) that nobody was told yet: each page that holds output, once, in order."""
        first = self.prompt_len // self.page_size
        while len(self.chain) < stop // self.page_size - first:
            start = (first + len(self.chain)) * self.page_size
            parent = self.chain[-1] if self.chain else self.prompt_hash
            self.chain.append(page_link(parent, self.tokens[start : start + self.page_size]))
        new = self.chain[self.num_reported : max(0, stop // self.page_size - first)]
        self.num_reported += len(new)
        return [hash_of(link) for link in new]


S = TypeVar("S", bound=Sequence)


class TokenSpan(Struct, Generic[S], frozen=True):
    """Tokens [start, stop) of a request, whose KV this batch writes."""

    sequence: S
    start: int
    stop: int
    samples: bool
    pools: bool = False


def shared_out(spans: Values[TokenSpan[S]], num_ranks: int) -> list[list[TokenSpan[S]]] | None:
    """The tokens of these spans, in order, in as many equal runs as there are ranks: each rank's, as spans.

    None where there is nothing to share out: one rank, or fewer tokens than ranks. Who has the last token of a span has
    what it ends with.
    """
    total = sum(span.stop - span.start for span in spans)
    if num_ranks == 1 or total < num_ranks:
        return None
    parts: list[list[TokenSpan[S]]] = [[] for _ in range(num_ranks)]
    runs = [share(total, rank, num_ranks) for rank in range(num_ranks)]
    first = 0
    for span in spans:
        last = first + span.stop - span.start
        for part, run in zip(parts, runs, strict=True):
            start, stop = max(first, run.start) - first + span.start, min(last, run.stop) - first + span.start
            if start < stop:
                is_end = stop == span.stop
                samples, pools = span.samples and is_end, span.pools and is_end
                part.append(structs.replace(span, start=start, stop=stop, samples=samples, pools=pools))
        first = last
    return parts


class DecodeSet(Protocol[S]):
    """The requests of one micro-batch: each gets a token (or block) from every batch that decodes it, in join order."""

    @property
    def members(self) -> Collection[S]: ...

    def __contains__(self, request: int) -> bool: ...

    def join(self, sequence: S) -> None: ...

    def leave(self, requests: Collection[int]) -> None:
        """Unknown ones are ignored: a request may be forgotten after it has left."""
        ...

    def refresh_table(self, sequence: S) -> None:
        """The sequence's page table has changed, if it is a member."""
        ...

    def append(self, tokens: Values[int]) -> None:
        """Every member has got its next tokens, as many as the others, in join order."""
        ...


class PlainDecodeSet(Generic[S]):
    """A `DecodeSet` without arrays."""

    def __init__(self) -> None:
        self.of: dict[int, S] = {}

    @property
    def members(self) -> Collection[S]:
        return self.of.values()

    def __contains__(self, request: int) -> bool:
        return request in self.of

    def join(self, sequence: S) -> None:
        self.of[sequence.request] = sequence

    def leave(self, requests: Collection[int]) -> None:
        for request in requests:
            self.of.pop(request, None)

    def refresh_table(self, sequence: S) -> None:
        """Members are looked at when their batch runs."""

    def append(self, tokens: Values[int]) -> None:
        members = list(self.of.values())
        each = len(tokens) // max(1, len(members))
        for index, token in enumerate(tokens):
            members[index // each].append(token)


class BatchTables(Generic[S]):
    """Owns the sequences of a worker. Raises PlanError; the requests of that batch are then in an unknown state."""

    def __init__(self, decode_sets: Mapping[int, DecodeSet[S]], *, block_tokens: int = 1) -> None:
        """decode_sets: by micro-batch; one that is asked for is there, a `defaultdict` for example

        block_tokens: as `core/batch.py` says.
        """
        self.decode_sets = decode_sets
        self.block_tokens = block_tokens
        self.sequences: dict[RequestId, S] = {}

    def add(self, sequence: S) -> None:
        """Make a request known, before the first plan that names it.

        A second time replaces it: its prompt was rendered anew, and no plan that named it is to come or under way.
        """
        assert not any(sequence.request in of for of in self.decode_sets.values()), (
            "a request that decodes keeps its prompt"
        )
        self.sequences[sequence.request] = sequence

    def forget(self, requests: Iterable[int]) -> None:
        """Drop tokens and tables, and the place in the decode set. Unknown requests are ignored."""
        gone = set(requests)
        for decode_set in self.decode_sets.values():
            decode_set.leave(gone)
        for request in gone:
            self.sequences.pop(RequestId(request), None)

    def apply(self, plan: BatchPlan) -> list[TokenSpan[S]]:
        """Everything of a plan that comes before the forward pass. Returns what its rows are about, in order."""
        decode_set = self.decode_sets[plan.micro_batch]
        if plan.leave:
            decode_set.leave(set(plan.leave))
        for join in plan.join:
            sequence = self._known(join.request)
            _extend(sequence, join.token)
            sequence.set_pages(join.first_page, join.pages)
            decode_set.join(sequence)
        for grow in plan.grow:
            sequence = self._known(grow.request)
            sequence.set_pages(grow.first_page, grow.pages)
            decode_set.refresh_table(sequence)
        return [self._span(row) for row in plan.rows]

    def _span(self, row: Row) -> TokenSpan[S]:
        sequence = self._known(row.request)
        sequence.set_pages(row.first_page, row.pages)
        _extend(sequence, row.token)
        if row.samples:
            sequence.cut(row.stop)  # a prompt may run twice; its token is sampled anew
        return TokenSpan(sequence, row.start, row.stop, row.samples, row.pools)

    def _known(self, request: RequestId) -> S:
        sequence = self.sequences.get(request)
        if sequence is None:
            raise PlanError(f"request {request} is not known")
        return sequence

    def members(self, plan: BatchPlan) -> Collection[S]:
        """Who gets tokens from this batch without a row of its plan, in join order."""
        return self.decode_sets[plan.micro_batch].members if plan.decodes else ()

    def sampling(self, plan: BatchPlan, spans: Values[TokenSpan[S]]) -> list[S]:
        """Whose tokens come when: one entry per row of the outcome."""
        return [*(span.sequence for span in spans if span.samples), *self.members(plan)]

    def inputs(self, plan: BatchPlan, spans: Values[TokenSpan[S]]) -> list[TokenSpan[S]]:
        """The tokens whose KV this batch writes: those of its rows, in order, then the last token or block of each
        member. The span of a row that samples ends where its last whole block does, and may be empty.
        """
        block = self.block_tokens
        rows = [
            structs.replace(span, stop=span.stop - span.stop % block) if span.samples and span.stop % block else span
            for span in spans
        ]
        return rows + [
            TokenSpan(member, len(member.tokens) - block, len(member.tokens), True) for member in self.members(plan)
        ]

    def num_sampled(self, sequence: S) -> int:
        """How many tokens it gets from a batch that samples for it."""
        return num_sampled(len(sequence.tokens), self.block_tokens)

    def finish(
        self, plan: BatchPlan, spans: Values[TokenSpan[S]], tokens: Values[int]
    ) -> list[tuple[RequestId, PageHash]]:
        """The forward pass is done, and `append` what it sampled. Returns pages with output that are full now.

        In row order. After a retraction spans run over pages that were told before: those are not told again.
        """
        ends = [(span.sequence, span.stop) for span in spans]
        ends += [
            (member, len(member.tokens)) for member in self.members(plan) if len(member.tokens) % member.page_size == 0
        ]
        hashes = [(sequence.request, h) for sequence, stop in ends for h in sequence.take_hashes(stop)]
        self.append(plan, spans, tokens)
        return hashes

    def append(self, plan: BatchPlan, spans: Values[TokenSpan[S]], tokens: Values[int]) -> None:
        """`tokens` in the order of `sampling`, of each as many as it samples, even where one before the last of them
        ends it. All that is to be done for a batch of a worker that tells no hashes."""
        stop = 0
        for span in spans:
            if span.samples:
                start, stop = stop, stop + self.num_sampled(span.sequence)
                for token in tokens[start:stop]:
                    span.sequence.append(token)
        if plan.decodes:
            self.decode_sets[plan.micro_batch].append(tokens[stop:])


def _extend(sequence: Sequence, tokens: bytes) -> None:
    """tokens: int32 little endian, as in `Row` and `Join`: first tokens that were sampled elsewhere."""
    for token in array("i", tokens):
        sequence.append(token)
