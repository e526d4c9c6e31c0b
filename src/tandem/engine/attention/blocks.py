"""Attention of models of block diffusion: a query sees its whole block and all blocks before it.

A batch has two kinds of chunks. Those of final tokens are whole blocks, whose keys and values are written to their
pages first, and read from there. Drafts are blocks some tokens of which are still unknown: they see the pages before
them and themselves, and nothing of them is kept (`engine/denoising.py`).

A chunk is one call, in plain torch, of exactly the keys that its last query sees. So a draft has the same bits whatever
else is in the batch, as far as the products around it do.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tandem.engine.attention.base import AttentionRules
from tandem.engine.batch import Batch, Chunk
from tandem.engine.documents import ModelError
from tandem.engine.kv_memory import KvMemory


@dataclass(frozen=True, slots=True)
class BlockCall:
    rows: slice  # of the batch's tokens
    pages: Tensor  # [pages] int64: of the keys that were written
    num_written: int  # of these keys, so many are seen
    is_draft: bool  # its own keys come behind them
    mask: Tensor | None  # [queries, keys] bool: what is seen; None: everything


class BlockAttention:
    """An `AttentionBackend`."""

    needs_tiles = False

    def __init__(self, kv: KvMemory, *, rules: AttentionRules, deterministic: bool) -> None:
        if deterministic:
            raise ModelError("--deterministic is not there for models of block diffusion; leave it out")
        if kv.is_int8:
            raise ModelError("--kv-cache-dtype int8 is not there for models of block diffusion; leave it out")
        assert rules.soft_cap is None, "no such model has one"
        assert not any(rules.windows), "no such model has one"
        self._kv = kv
        self._rules = rules
        self._pages = self._slots = torch.empty(0, dtype=torch.int64)  # [k] where the KV of each final token goes
        self._calls: list[BlockCall] = []

    def plan(self, batch: Batch) -> None:
        assert batch.decoding is None, "the newest block of a request is a chunk"
        self._pages, self._slots = (self._tensor(part) for part in np.divmod(batch.slots, self._kv.page_size))
        self._calls = [self._call(chunk, is_draft=chunk.last > len(batch.slots)) for chunk in batch.chunks]

    def _call(self, chunk: Chunk, *, is_draft: bool) -> BlockCall:
        num_written = chunk.start if is_draft else chunk.stop
        rows, block = slice(chunk.first, chunk.last), self._rules.block_tokens
        mask = None
        if chunk.stop - chunk.start > block:
            ends = torch.arange(chunk.start, chunk.stop, device=self._kv.tensor.device) // block * block + block
            mask = torch.arange(num_written, device=ends.device)[None, :] < ends[:, None]
        return BlockCall(rows, self._tensor(chunk.pages), num_written, is_draft, mask)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, layer: int) -> Tensor:
        count = len(self._slots)
        memory = self._kv.tensor  # [pages, heads, layers, 2, page_size, head_dim]
        for kind, values in enumerate((k[:count], v[:count])):
            memory[self._pages, :, layer, kind, self._slots] = values
        out = torch.empty_like(q)
        for call in self._calls:
            own = (k[call.rows], v[call.rows]) if call.is_draft else (k[:0], v[:0])
            keys, values = (self._seen(call, layer, kind, own[kind]) for kind in (0, 1))
            mixed = scaled_dot_product_attention(
                q[call.rows].transpose(0, 1)[None],
                keys,
                values,
                attn_mask=call.mask,
                scale=self._rules.scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            out[call.rows] = mixed[0].transpose(0, 1)
        return out

    def _seen(self, call: BlockCall, layer: int, kind: int, own: Tensor) -> Tensor:
        """own: [n, heads, head_dim]; returns [1, heads, keys, head_dim]"""
        pages = self._kv.tensor[call.pages, :, layer, kind]  # [pages, heads, page_size, head_dim]
        written = pages.transpose(0, 1).flatten(1, 2)[:, : call.num_written]
        return torch.cat((written, own.transpose(0, 1)), dim=1)[None]

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self._kv.tensor.device)
