"""Attention of encoders: every token of a prompt sees every other one of it, and no token of anybody else.

A prompt is one call, of exactly its keys. Nothing is masked, padded or kept: what a token is to the others depends on
all of them, so its keys are worth nothing to another prompt, or to the rest of the same one.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tandem.engine.attention.base import AttentionRules
from tandem.engine.batch import Batch
from tandem.engine.documents import ModelError
from tandem.engine.kv_memory import KvMemory


class BothWays:
    """An `AttentionBackend`."""

    needs_tiles = False

    def __init__(self, kv: KvMemory, *, rules: AttentionRules, deterministic: bool) -> None:
        if deterministic:
            raise ModelError("--deterministic is not there for encoders; leave it out")
        self._rules = rules
        self._prompts: list[slice] = []  # of the batch's tokens

    def plan(self, batch: Batch) -> None:
        assert batch.decoding is None, "an encoder has no next token"
        assert all(chunk.start == 0 for chunk in batch.chunks), "what looks both ways is computed in one piece"
        self._prompts = [slice(chunk.first, chunk.last) for chunk in batch.chunks]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, layer: int) -> Tensor:
        out = torch.empty_like(q)
        for rows in self._prompts:
            queries, keys, values = (x[rows].transpose(0, 1).unsqueeze(0) for x in (q, k, v))
            mixed = scaled_dot_product_attention(queries, keys, values, scale=self._rules.scale)
            out[rows] = mixed.squeeze(0).transpose(0, 1)
        return out
