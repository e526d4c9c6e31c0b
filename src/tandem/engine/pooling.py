"""From the states of a prompt's tokens to its one vector: an embedding, or the score of a cross-encoder.

Computed in fp32 by the worker that would sample, where all states are behind the last layer. An embedding has length 1,
of as many dimensions as were asked for. Of what is not finite there is no vector, which the core takes for a failure of
that request.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor
from torch.nn import functional

from tandem.batch_tables import TokenSpan
from tandem.core.values import RequestId
from tandem.engine.batch import Batch, Chunk
from tandem.engine.pooling_config import Pooling
from tandem.engine.sequence import EngineSequence
from tandem.engine.weights import LoadedModel

Vectors = tuple[tuple[RequestId, bytes], ...]


def pooled(model: LoadedModel, batch: Batch, hidden: Tensor, spans: Sequence[TokenSpan[EngineSequence]]) -> Vectors:
    """As `BatchOutcome.vectors` has them. spans: the first chunks of the batch are theirs. hidden: [n, hidden]."""
    found: list[tuple[RequestId, bytes]] = []
    for span, chunk in zip(spans, batch.chunks, strict=False):
        if not span.pools:
            continue
        vector = _vector(model, batch, hidden, chunk, span.sequence).cpu().numpy().astype("<f4")
        if np.isfinite(vector).all():
            found.append((span.sequence.request, vector.tobytes()))
    return tuple(found)


def _vector(model: LoadedModel, batch: Batch, hidden: Tensor, chunk: Chunk, of: EngineSequence) -> Tensor:
    """[dimensions] fp32"""
    config = model.config
    assert config.pooling is not None, "who wants a vector asks a model that makes them"
    states = model.module.states(batch.sampling(_tokens(chunk, config.pooling)), hidden).float()
    if config.encoder is not None and config.encoder.scores:
        return model.module.score(states[0]).view(1)
    dimensions = of.vector.dimensions if of.vector is not None else None
    return functional.normalize(states.mean(dim=0)[:dimensions], dim=0)


def _tokens(chunk: Chunk, pooling: Pooling) -> range:
    """Of the batch, those whose states the vector is the mean of."""
    match pooling:
        case Pooling.CLS:
            return range(chunk.first, chunk.first + 1)
        case Pooling.MEAN:
            return range(chunk.first, chunk.last)
        case Pooling.LAST:
            return range(chunk.last - 1, chunk.last)
