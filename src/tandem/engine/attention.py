"""Attention over paged KV behind one call. Plain torch: gather the pages a row needs, then scaled dot product.

The call first writes the batch's own keys and values into their pages, so every query finds all keys up to its own
position there. Gathered pages go through two buffers that are kept: fresh ones of that size would cost a page fault
per 4 KiB, more than the attention itself.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tandem.engine.inputs import DecodeGroup, Inputs, PromptSpan, QueryTile
from tandem.engine.kv_memory import KvMemory


class PagedAttention:
    """For one KV memory and one thread."""

    def __init__(self, kv: KvMemory) -> None:
        self._kv = kv
        self._keys = kv.tensor.new_empty(0)
        self._values = kv.tensor.new_empty(0)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, inputs: Inputs, layer: int) -> Tensor:
        """q: [n, num_heads, head_dim], k and v: [n, num_kv_heads, head_dim]; returns [n, num_heads * head_dim].

        Rows that are no tokens (padding of deterministic tiles) come back as zeros.
        """
        if inputs.place is not None:
            return self._by_tiles(q, k[inputs.place], v[inputs.place], inputs=inputs, layer=layer)
        self._write(k, v, inputs=inputs, layer=layer)
        out = torch.empty_like(q)
        for span in inputs.prompts:
            self._prompt(q, k, v, out, span=span, layer=layer)
        for group in inputs.decodes:
            self._decode(q, out, group=group, layer=layer)
        return out.view(q.shape[0], -1)

    def _write(self, k: Tensor, v: Tensor, *, inputs: Inputs, layer: int) -> None:
        rows = inputs.writes + 2 * layer * self._kv.page_size
        self._kv.token_rows.index_copy_(0, rows, k.reshape(-1, self._kv.head_dim))
        self._kv.token_rows.index_copy_(0, rows + self._kv.page_size, v.reshape(-1, self._kv.head_dim))

    def _prompt(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *, span: PromptSpan, layer: int) -> None:
        rows = slice(span.first, span.last)
        queries = q[rows].transpose(0, 1).unsqueeze(0)
        if span.page_rows is None:  # all keys are in this batch
            keys, values = k[rows].transpose(0, 1).unsqueeze(0), v[rows].transpose(0, 1).unsqueeze(0)
            mixed = scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        else:
            keys, values = self._gather(span.page_rows, layer=layer, count=1, num_pages=span.num_pages)
            mixed = scaled_dot_product_attention(queries, keys, values, attn_mask=span.mask, enable_gqa=True)
        out[rows] = mixed.squeeze(0).transpose(0, 1)

    def _decode(self, q: Tensor, out: Tensor, *, group: DecodeGroup, layer: int) -> None:
        count = group.last - group.first
        rows = slice(group.first, group.last)
        keys, values = self._gather(group.page_rows, layer=layer, count=count, num_pages=group.num_pages)
        # Query heads that share a KV head stand where several query positions would: no key is repeated.
        queries = q[rows].view(count, self._kv.num_kv_heads, -1, self._kv.head_dim)
        out[rows] = scaled_dot_product_attention(queries, keys, values, attn_mask=group.mask).view(out[rows].shape)

    def _by_tiles(self, q: Tensor, k: Tensor, v: Tensor, *, inputs: Inputs, layer: int) -> Tensor:
        assert inputs.place is not None
        self._write(k, v, inputs=inputs, layer=layer)
        q_tokens = q[inputs.place]
        out = torch.empty_like(q_tokens)
        for tile in inputs.query_tiles:
            self._tile(q_tokens, out, tile=tile, layer=layer)
        return torch.zeros_like(q).index_copy_(0, inputs.place, out).view(q.shape[0], -1)

    def _tile(self, q: Tensor, out: Tensor, *, tile: QueryTile, layer: int) -> None:
        rows = slice(tile.first, tile.last)
        slots = slice(tile.slot, tile.slot + tile.last - tile.first)
        queries = q.new_zeros(self._kv.page_size, *q.shape[1:])
        queries[slots] = q[rows]
        keys, values = self._gather(tile.page_rows, layer=layer, count=1, num_pages=tile.num_pages)
        queries = queries.transpose(0, 1).unsqueeze(0)
        mixed = scaled_dot_product_attention(queries, keys, values, attn_mask=tile.mask, enable_gqa=True)
        out[rows] = mixed.squeeze(0).transpose(0, 1)[slots]

    def _gather(self, page_rows: Tensor, *, layer: int, count: int, num_pages: int) -> tuple[Tensor, Tensor]:
        """Keys and values, each [count, num_kv_heads, num_pages * page_size, head_dim], valid until the next call."""
        source = self._kv.page_rows
        elements = page_rows.shape[0] * source.shape[1]
        if self._keys.shape[0] < elements:
            self._keys, self._values = source.new_empty(elements), source.new_empty(elements)
        shape = (count, self._kv.num_kv_heads, num_pages * self._kv.page_size, self._kv.head_dim)
        rows = page_rows + 2 * layer
        keys, values = (
            self._keys[:elements].view(-1, source.shape[1]),
            self._values[:elements].view(-1, source.shape[1]),
        )
        torch.index_select(source, 0, rows, out=keys)
        torch.index_select(source, 0, rows.add_(1), out=values)
        return keys.view(shape), values.view(shape)
