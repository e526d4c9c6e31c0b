"""Log-probabilities of prompt tokens, of the rows of one batch.

The scores of a whole vocabulary for every token of a chunk would be gigabytes, so they are made of a few rows at a
time, and of those only what is told is kept. All workers of the last stage take part, in the same order: each has a
part of the vocabulary. A row is looked at by itself, as the sampler does it, so what is said of it does not depend on
how the prompt was cut into chunks.
"""

from collections.abc import Iterator, Sequence

import msgspec
from torch import Tensor

from tandem.batch_tables import TokenSpan
from tandem.core.values import RequestId
from tandem.engine.batch import Batch
from tandem.engine.models.base import Model
from tandem.engine.sampler import score_of
from tandem.engine.sequence import EngineSequence
from tandem.sampling import TokenScore

SLICE_ROWS = 64

_encode = msgspec.msgpack.Encoder().encode


def prompt_scores(
    model: Model, batch: Batch, hidden: Tensor, spans: Sequence[TokenSpan[EngineSequence]], *, is_told: bool
) -> tuple[tuple[RequestId, bytes], ...]:
    """As `BatchOutcome.prompt_extras` has them, each a list of `TokenScore`; none where this worker tells nobody.

    spans: the first chunks of the batch are theirs. hidden: [n, hidden], behind the last layer.
    """
    found: list[tuple[RequestId, bytes]] = []
    for span, chunk in zip(spans, batch.chunks, strict=False):
        wanted = span.sequence.scored(span.start, span.stop)
        if not wanted:
            continue
        scores: list[TokenScore] = []
        for positions in _slices(wanted):
            first = chunk.first + positions.start - chunk.start
            logits = model.logits(batch.sampling(range(first, first + len(positions))), hidden)
            if is_told:
                scores += _scores(logits, positions, span.sequence)
        if is_told:
            found.append((span.sequence.request, _encode(scores)))
    return tuple(found)


def _slices(positions: range) -> Iterator[range]:
    for start in range(0, len(positions), SLICE_ROWS):
        yield positions[start : start + SLICE_ROWS]


def _scores(logits: Tensor, positions: range, of: EngineSequence) -> Iterator[TokenScore]:
    """logits: [len(positions), vocab] fp32. Of the token behind each position."""
    for row, position in zip(logits.cpu(), positions, strict=True):
        yield score_of(row, of.tokens[position + 1], of.params.prompt_top_logprobs, of.params.logprob_ids)
