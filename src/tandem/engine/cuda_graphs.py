"""CUDA graphs of decoding: what a step of so many rows launches is captured once and then launched as a whole.

A step of few rows is hundreds of short kernels, and the host takes longer to launch them one by one than a device to
run them. A graph has fixed shapes and addresses, so there is one for each of some numbers of rows (`buckets`), and a
step takes the smallest in which it fits. What is left of it is *padding*: rows of one token on a page that no request
has, whose scores nobody reads.

Captured are the layers and the scores; who plans and samples stays outside. So only models can be captured whose layers
never ask the device for what to launch next (`can_be_captured`), on an attention backend that plans into tensors which
stay where they are (`ReservingBackend`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol  # Any: what attention has reserved, and torch's handles

import numpy as np
import torch
from torch import Tensor

from tandem.core.values import ceil_div
from tandem.engine.attention.base import ReservingBackend
from tandem.engine.batch import Batch, DecodingRows
from tandem.engine.models.base import Model, Step
from tandem.engine.rows import Rows
from tandem.engine.weights import LoadedModel

WARM_UPS = 2  # before a capture: kernels are compiled, and libraries take the memory that they keep


class Graph(Protocol):
    """Launches that can be repeated."""

    def capture(self, compute: Callable[[], Tensor]) -> Tensor:
        """Once. Returns what `compute` does; each replay fills it anew, from what is then where `compute` has read."""
        ...

    def replay(self) -> None: ...


@cache
def shared_pool() -> Any:
    """Where all graphs compute: no two are replayed at a time, and what one returns is read before the next."""
    return torch.cuda.graph_pool_handle()


class CudaGraph:
    """A `Graph` of CUDA."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, compute: Callable[[], Tensor]) -> Tensor:
        own = torch.cuda.Stream()
        own.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(own):
            for _ in range(WARM_UPS):
                compute()
        torch.cuda.current_stream().wait_stream(own)
        with torch.cuda.graph(self._graph, pool=shared_pool()):
            return compute()

    def replay(self) -> None:
        self._graph.replay()


@dataclass(frozen=True, slots=True)
class Captured:
    """A step of as many rows as `batch` has."""

    batch: Batch  # what the graph reads of it is on the device, and filled before each replay
    reserved: Any
    graph: Graph
    logits: Tensor  # fp32 [rows, vocab]


class DecodeGraphs:
    """The graphs of one model over one KV memory. They are captured here, so that no request waits for it."""

    def __init__(
        self,
        model: Model,
        attention: ReservingBackend,
        *,
        most_rows: int,
        max_tokens: int,
        page_size: int,
        scratch_page: int,
        device: str,
        new_graph: Callable[[], Graph],
    ) -> None:
        """max_tokens: of a request, at most. scratch_page: of the KV memory, one that no request ever has."""
        self._model = model
        self._attention = attention
        self._max_tokens = max_tokens
        self._page_size = page_size
        self._width = ceil_div(max_tokens, page_size)
        self._scratch_page = scratch_page
        self._device = device
        self._new_graph = new_graph
        self._captured = [self._capture(rows) for rows in reversed(buckets(most_rows))][::-1]

    def logits(self, batch: Batch) -> Tensor | None:
        """Of the rows that are sampled, in order, fp32 [d, vocab]; None where no graph fits: nothing is computed."""
        rows = batch.decoding
        if batch.chunks or rows is None or rows.tables.shape[1] > self._width:
            return None
        count = len(rows.lengths)
        taken = next((each for each in self._captured if len(each.batch.slots) >= count), None)
        if taken is None:
            return None
        taken.batch.token_ids[:count].copy_(batch.token_ids)
        taken.batch.positions[:count].copy_(batch.positions)
        # Padding keeps what another step has left there: some token at some position within the context.
        self._attention.plan_into(taken.reserved, self._padded(batch, rows, to=taken.batch))
        taken.graph.replay()
        return taken.logits.index_select(0, batch.sampled)

    def _capture(self, rows: int) -> Captured:
        tokens, positions = torch.zeros(2, rows, dtype=torch.int64, device=self._device)
        nobody = np.empty(0, dtype=np.int64)
        decoding = DecodingRows(0, nobody, np.empty((0, 1), dtype=np.int64))
        batch = Batch(
            token_ids=tokens,
            positions=positions,
            last_position=self._max_tokens - 1,
            chunks=[],
            decoding=decoding,
            slots=np.zeros(rows, dtype=np.int64),
            rows=Rows(),
            sampled=torch.arange(rows, device=self._device),
            sampled_place=None,
            pages_to_clear=[],
        )
        reserved = self._attention.reserve(rows, width=self._width)
        self._attention.plan_into(reserved, self._padded(batch, decoding, to=batch))
        graph = self._new_graph()
        step = Step(batch, self._attention)
        logits = graph.capture(lambda: self._model.logits(batch, self._model.forward(step)))
        return Captured(batch, reserved, graph, logits)

    def _padded(self, batch: Batch, rows: DecodingRows, *, to: Batch) -> Batch:
        """`rows` of `batch` as attention is to plan them, in a step of as many as `to` has."""
        missing = len(to.slots) - len(rows.lengths)
        lengths = np.concatenate((rows.lengths, np.ones(missing, dtype=np.int64)))
        tables = np.pad(rows.tables, ((0, missing), (0, 0)), constant_values=self._scratch_page)
        own, scratch_slot = batch.slots[: len(rows.lengths)], self._scratch_page * self._page_size
        slots = np.pad(own, (0, missing), constant_values=scratch_slot)
        return replace(to, decoding=DecodingRows(0, lengths, tables), slots=slots)


def buckets(most_rows: int) -> list[int]:
    """Powers of two below `most_rows`, and that: a step is padded to less than twice its rows."""
    return [*(1 << exponent for exponent in range((most_rows - 1).bit_length())), most_rows] if most_rows > 0 else []


def can_be_captured(model: LoadedModel) -> bool:
    """Experts are chosen on the host, states are kept by it, and what transformers computes does as it likes; encoders
    and blocks do not decode a token at a time.
    """
    config = model.config
    return config.experts is config.state_space is config.transformers is config.blocks is config.encoder is None
