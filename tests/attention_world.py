"""Requests of several lengths through one attention backend, beside attention written out in fp64, row by row."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tandem.engine.attention.base import AttentionBackend, AttentionRules, attention_backend
from tandem.engine.batch import Batch, BatchBuilder, TokenSpan
from tandem.engine.decode_set import ArrayDecodeSet
from tandem.engine.kv_memory import KvMemory, KvShape
from tandem.engine.sequence import EngineSequence
from tandem.sampling import Payload, SamplingParams

LAYERS, HEAD_DIM, NUM_PAGES = 2, 10, 60
LENGTHS = (1, 40, 7, 33, 16)


def sequence(request: int, length: int, *, pages: Iterator[int], page_size: int) -> EngineSequence:
    payload = Payload(request, array("i", range(length)).tobytes(), SamplingParams(), bytes(16))
    made = EngineSequence.of(payload, page_size=page_size)
    made.set_pages(0, tuple(next(pages) for _ in range(-(-(length + 8) // page_size))))
    return made


@dataclass
class Reference:
    """Keeps keys and values of every request by position, and attends to them one query at a time."""

    rules: AttentionRules
    seen: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def write(self, who: list[tuple[int, int]], k: Tensor, v: Tensor, *, layer: int) -> None:
        for row, (request, position) in enumerate(who):
            self.seen[layer, request, position] = (k[row].double(), v[row].double())

    def attend(self, who: list[tuple[int, int]], q: Tensor, *, layer: int) -> Tensor:
        return torch.stack([self._row(q[row].double(), *at, layer=layer) for row, at in enumerate(who)])

    def _row(self, q: Tensor, request: int, position: int, *, layer: int) -> Tensor:
        window = self.rules.windows[layer]
        first = 0 if window is None else max(0, position + 1 - window)
        found = [self.seen[layer, request, at] for at in range(first, position + 1)]
        group = q.shape[0] // found[0][0].shape[0]
        keys = torch.stack([k for k, _ in found]).repeat_interleave(group, dim=1)
        values = torch.stack([v for _, v in found]).repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,thd->ht", q, keys) * self.rules.scale
        if (cap := self.rules.soft_cap) is not None:
            scores = cap * (scores / cap).tanh()
        return torch.einsum("ht,thd->hd", scores.softmax(dim=1), values)


def in_255_steps(values: Tensor) -> Tensor:
    """What int8 memory keeps of [n, heads, head_dim], fp64."""
    scales = (values.float().abs().amax(dim=-1, keepdim=True) / 127).double()
    return torch.where(scales > 0, (values.double() / scales).round() * scales, 0.0)


@dataclass
class World:
    """One backend, requests of several lengths, and random q, k, v."""

    backend: str
    heads: tuple[int, int]
    page_size: int
    window: int | None = None
    deterministic: bool = False
    head_dim: int = HEAD_DIM
    dtype: torch.dtype = torch.float32
    rules: AttentionRules | None = None  # the window in all layers, unless they are given
    is_int8: bool = False  # keys and values in memory
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        torch.set_num_threads(1)
        self.draw = torch.Generator().manual_seed(self.seed)
        shape = KvShape(LAYERS, self.heads[1], self.head_dim, self.is_int8)
        self.kv = KvMemory(
            shape, page_size=self.page_size, num_pages=NUM_PAGES * 16, dtype=self.dtype, device=self.device
        )
        self.kv.tensor.fill_(
            -1 if self.is_int8 else float("nan")
        )  # a scale of such bytes is NaN: a slot that is read before it was written shows
        rules = self.rules or AttentionRules((self.window,) * LAYERS, self.head_dim**-0.5)
        self.attention: AttentionBackend = attention_backend(self.backend)(
            self.kv, rules=rules, deterministic=self.deterministic
        )
        self.batches = BatchBuilder(page_size=self.page_size, device=self.device, tiles=self.attention.needs_tiles)
        pages = iter(np.random.default_rng(self.seed).permutation(NUM_PAGES * 16).tolist())
        self.requests = [sequence(i, n, pages=pages, page_size=self.page_size) for i, n in enumerate(LENGTHS)]
        self.decode_set = ArrayDecodeSet()
        self.reference = Reference(rules)

    def step(self, *spans: tuple[int, int, int], decodes: bool = False) -> list[tuple[Tensor, Tensor]]:
        """Of each layer: what came out, and what should have."""
        made = [TokenSpan(self.requests[request], start, stop, samples=False) for request, start, stop in spans]
        batch = self.batches.build(made, self.decode_set if decodes else None)
        self.kv.clear(batch.pages_to_clear)
        self.attention.plan(batch)
        who = self._who(batch)
        return [self._layer(who, layer) for layer in range(LAYERS)]

    def _layer(self, who: list[tuple[int, int]], layer: int) -> tuple[Tensor, Tensor]:
        q, k, v = (
            torch.randn(len(who), heads, self.head_dim, generator=self.draw).to(self.device, self.dtype)
            for heads in (self.heads[0], self.heads[1], self.heads[1])
        )
        given = [tensor.clone() for tensor in (q, k, v)]
        out = self.attention.forward(q, k, v, layer=layer)
        assert all(map(torch.equal, (q, k, v), given)), "q, k and v may only be read"
        kept = (in_255_steps(k), in_255_steps(v)) if self.is_int8 else (k, v)
        self.reference.write(who, *kept, layer=layer)
        return out, self.reference.attend(who, q, layer=layer)

    def _who(self, batch: Batch) -> list[tuple[int, int]]:
        """Request and position of each token: whose page its slot lies in."""
        owner = {page: s.request for s in self.requests for page in s.pages}
        positions = batch.rows.tokens(batch.positions).tolist()
        return [(owner[slot // self.page_size], at) for slot, at in zip(batch.slots.tolist(), positions, strict=True)]

    def play(self) -> list[tuple[Tensor, Tensor]]:
        """Prompts whole and in chunks, some beside decoding rows; then all decode, beyond the end of a page."""
        results = self.step((0, 0, 1), (1, 0, 17), (2, 0, 7))
        for request in (0, 2):
            self._join(request)
        results += self.step((1, 17, 40), (3, 0, 20), decodes=True)
        self._append()
        results += self.step((3, 20, 33), (4, 0, 16), decodes=True)
        self._append()
        for request in (1, 3, 4):
            self._join(request)
        for _ in range(5):
            results += self.step(decodes=True)
            self._append()
        return results

    def _join(self, request: int) -> None:
        self.requests[request].append(1)  # the token that its prompt has sampled
        self.decode_set.join(self.requests[request])

    def _append(self) -> None:
        self.decode_set.append(np.ones(len(self.decode_set), dtype=np.int64))
