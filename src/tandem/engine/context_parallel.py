"""Context parallelism: the tokens of a batch of prompts are shared out among ranks that have the same layers and heads.

The tokens stand in the order of the batch, and every rank has one run of them (`batch_tables.shared_out`). It computes
projections, attention and MLPs of its own; between projections and attention the keys and values of all ranks are
exchanged, so every rank writes those of all tokens: a prompt's pages are alike on all of them, and any may lend them.
Behind the last layer the states of all tokens are put together again for whoever samples.

Decoding rows, and batches of fewer prompt tokens than ranks, every rank computes whole for itself: an exchange costs
more than they do.
"""

import numpy as np
import torch
from torch import Tensor

from tandem.batch_tables import TokenSpan, shared_out
from tandem.engine.attention.base import AttentionBackend
from tandem.engine.batch import Batch
from tandem.engine.kv_memory import KvMemory, to_int8
from tandem.engine.parallel import ContextRanks
from tandem.engine.sequence import EngineSequence

Spans = list[TokenSpan[EngineSequence]]


class SharedPrompts:
    """An `AttentionBackend` for batches that are shared out, around the one of this rank's tokens.

    Each such batch: `share`, then `plan_part`, then the layers, then `whole_states`.
    """

    def __init__(self, ranks: ContextRanks, attention: AttentionBackend, kv: KvMemory) -> None:
        self._ranks = ranks
        self._attention = attention
        self._kv = kv
        self._sizes: list[int] = []  # prompt tokens of every rank
        self._own = slice(0)  # this rank's among those of all
        self._places = (torch.empty(0, dtype=torch.int64),) * 2  # pages and offsets of the others'

    @property
    def needs_tiles(self) -> bool:
        return self._attention.needs_tiles

    def share(self, spans: Spans) -> Spans | None:
        """This rank's part of these; None where every rank computes them all."""
        parts = shared_out(spans, self._ranks.shard.size)
        if parts is None:
            return None
        self._sizes = [sum(span.stop - span.start for span in part) for part in parts]
        return parts[self._ranks.shard.rank]

    def plan_part(self, own: Batch, whole: Batch) -> None:
        """own: of what `share` has returned, and of all decoding rows."""
        first, num_own = sum(self._sizes[: self._ranks.shard.rank]), self._sizes[self._ranks.shard.rank]
        prompts = whole.slots[: sum(self._sizes)]
        elsewhere = np.delete(prompts, slice(first, first + num_own))
        device, size = self._kv.tensor.device, self._kv.page_size
        pages, offsets = (torch.from_numpy(index).to(device) for index in np.divmod(elsewhere, size))
        self._own, self._places = slice(first, first + num_own), (pages, offsets)
        self._attention.plan(own)

    def plan(self, batch: Batch) -> None:
        raise AssertionError("a part of a batch is planned")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, layer: int) -> Tensor:
        num_own = self._own.stop - self._own.start
        both = self._ranks.all_rows(torch.cat([k[:num_own].flatten(1), v[:num_own].flatten(1)], dim=1), self._sizes)
        others = torch.cat([both[: self._own.start], both[self._own.stop :]])
        pages, offsets = self._places
        rows = others.view(-1, self._kv.head_dim)
        rows = to_int8(rows) if self._kv.is_int8 else rows
        for kind, values in enumerate(rows.view(len(others), 2, k.shape[1], -1).unbind(1)):
            self._kv.tensor[:, :, layer, kind][pages, :, offsets] = values
        return self._attention.forward(q, k, v, layer=layer)

    def whole_states(self, own: Batch, whole: Batch, hidden: Tensor) -> Tensor:
        """hidden: [rows of own, hidden]; returns those of all rows of `whole`, on every rank."""
        num_own = self._own.stop - self._own.start
        tokens = own.rows.tokens(hidden)
        prompts = self._ranks.all_rows(tokens[:num_own].contiguous(), self._sizes)
        return whole.rows.padded(torch.cat([prompts, tokens[num_own:]]), num_rows=len(whole.token_ids))
