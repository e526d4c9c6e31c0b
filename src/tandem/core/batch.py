"""One forward pass: what to run (`BatchPlan`) and what came of it (`BatchOutcome`). Both immutable, integers only.

A worker keeps, per request, its tokens and its page table, and the ordered *decode sets*: the requests that get the
next token, or block of tokens, from every batch with `decodes=True`, in as many micro-batches as the replica has
pipeline stages, so that each stage has one to compute while the tokens of another are sampled. A plan speaks of one of
these sets, and carries changes, never the set. It is applied in this order: `leave`, `join`, `grow`, then the forward
pass over `rows` and, when `decodes`, over the decode set.

    page table    Row, Join and Grow say `first_page`: the table is cut to that length, then `pages` are appended.
    vectors       a row with `pools` ends its request: no token is sampled behind it, and the outcome brings what the
                  workers have made of the prompt (an embedding, a score) instead.
    row order     outcome buffers have one entry per *sampling* row: first `rows` with `samples=True`, in order, then
                  the decode set in join order.
    decode rows   a member's input is its last token, known or still being sampled by the batch before (that is what
                  overlap needs); it sits at position `tokens so far - 1`, and its KV is written there.
    blocks        a model may sample several tokens at once: those up to the border of the next block of
                  `block_tokens`, of which pages hold a whole number (`num_sampled`). Then a member's input is its last
                  block, and a row that samples writes KV up to the last border before `stop`: what lies behind it is
                  final with its whole block only. One token at a time is a block of one.
    iteration     the launch number of the batch, frozen in the plan and repeated in the outcome.
"""

from enum import StrEnum
from itertools import accumulate

from msgspec import UNSET, Struct, UnsetType

from tandem.core.values import BatchId, Nanos, PageHash, PageId, RequestId

TOKEN_BYTES = 4


class BatchKind(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class Row(Struct, frozen=True, gc=False):
    """A span of known tokens (prompt, or prompt and output after a retraction) whose KV this batch writes."""

    request: RequestId
    start: int  # token span [start, stop); KV of [0, start) is already in the pages
    stop: int
    first_page: int
    pages: tuple[PageId, ...]
    samples: bool  # True for the last span: sample what follows `stop - 1`
    token: bytes = b""  # as in `Join`: first tokens sampled elsewhere, when a retraction came before the join
    pools: bool = False  # True for the last span of a request that wants a vector; then it does not sample


class Join(Struct, frozen=True, gc=False):
    """A request enters the decode set. Its KV covers all its tokens but the last one (or block)."""

    request: RequestId
    first_page: int
    pages: tuple[PageId, ...]
    token: bytes = b""  # int32 little endian: first tokens sampled elsewhere, to append before it runs


class Grow(Struct, frozen=True, gc=False):
    """A decode row has come to a page border."""

    request: RequestId
    first_page: int
    pages: tuple[PageId, ...]


class BatchPlan(Struct, frozen=True, gc=False):
    id: BatchId
    iteration: int
    kind: BatchKind
    rows: tuple[Row, ...] = ()
    decodes: bool = False
    micro_batch: int = 0  # whose decode set it is that this batch changes and decodes
    join: tuple[Join, ...] = ()
    leave: tuple[RequestId, ...] = ()  # out of the decode set; tokens and page table are kept
    grow: tuple[Grow, ...] = ()


class TokenFlag:
    """Bits of `BatchOutcome.flags`, set by the worker, which alone knows token ids and sampling parameters."""

    EOS = 1
    STOP = 2  # one of the request's stop token ids
    INVALID = 4  # no token: logits were not finite
    OUTGROWN = 8  # beside it: they were, and a grammar that has grown beyond its bounds allows none


class BatchOutcome(Struct, frozen=True, gc=False):
    batch: BatchId
    iteration: int
    tokens: bytes  # int32 little endian, of each sampling row one, or as many as `counts` says
    flags: bytes  # one byte of TokenFlag bits per sampling row: of its last token
    hashes: tuple[tuple[RequestId, PageHash], ...] = ()  # pages that decode rows completed in this batch
    extras: tuple[tuple[RequestId, bytes], ...] = ()  # opaque to the core: logprobs of the sampled token
    prompt_extras: tuple[
        tuple[RequestId, bytes], ...
    ] = ()  # the same of prompt tokens, for rows whose request wants them
    vectors: tuple[
        tuple[RequestId, bytes], ...
    ] = ()  # float32 little endian, opaque to the core, of rows that pool; none of a row that is not finite
    duration_ns: Nanos = Nanos(0)
    counts: tuple[int, ...] = ()  # tokens of each sampling row, up to the one that ends it; none: one of each
    prefill_ranks: int | UnsetType = UNSET  # DP attention: how many ranks had prompts in the same step
    cuda_graph: bool | UnsetType = UNSET  # of a device that has them: whether the forward pass was launched as one

    def tokens_by_row(self) -> list[bytes]:
        """Of each sampling row, in order."""
        if not self.counts:
            return [self.tokens[at : at + TOKEN_BYTES] for at in range(0, len(self.tokens), TOKEN_BYTES)]
        ends = list(accumulate(TOKEN_BYTES * count for count in self.counts))
        return [self.tokens[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def num_sampled(length: int, block_tokens: int) -> int:
    """How many tokens a sampling row gets behind `length` known ones: up to the border of the next block."""
    return block_tokens - length % block_tokens
