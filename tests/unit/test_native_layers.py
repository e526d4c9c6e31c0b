"""All layers in one call: the bits of the same operations one by one, whatever the sizes and how weights lie."""

import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.engine.layers.packed import PackedCodes, PackedWeight
from tandem.engine.layers.quantized import LinearWeight, quantized
from tandem.engine.native import library
from tandem.engine.native.library import BatchView, DecoderView, Kernels, LayerView, LinearView

VARIANTS = library.available()
PAGE_SIZE = 16
EPS = 1e-5
LAYERS = 2

pytestmark = pytest.mark.usefixtures("poisoned")


@dataclass
class Sizes:
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    dim: int

    def shapes(self) -> dict[str, tuple[int, int]]:
        q, kv = self.heads * self.dim, self.kv_heads * self.dim
        queries, keys = (q, self.hidden), (kv, self.hidden)
        opened, closed = (self.inner, self.hidden), (self.hidden, self.inner)
        return {"q": queries, "k": keys, "v": keys, "o": (self.hidden, q), "gate": opened, "up": opened, "down": closed}


class Layer:
    """Random weights, each plain or codes, packed or not."""

    def __init__(self, sizes: Sizes, kernels: Kernels, dtype: torch.dtype, draw: torch.Generator) -> None:
        self.weights: dict[str, tuple[LinearWeight, Tensor | None]] = {}
        for name, (outputs, inputs) in sizes.shapes().items():
            weight = (torch.randn(outputs, inputs, generator=draw) * inputs**-0.5).to(dtype)
            bias = torch.randn(outputs, generator=draw).to(dtype) if name in "qkv" else None
            self.weights[name] = (drawn_kind(weight, kernels, draw), bias)
        self.norms = [(torch.rand(sizes.hidden, generator=draw) + 0.5).to(dtype) for _ in range(2)]

    def view(self) -> LayerView:
        before, behind = (norm.data_ptr() for norm in self.norms)
        linears = [LinearView.of(weight, bias) for weight, bias in self.weights.values()]
        return LayerView(before, None, None, behind, *linears)


def drawn_kind(weight: Tensor, kernels: Kernels, draw: torch.Generator) -> LinearWeight:
    is_packed, bits = bool(torch.randint(2, (1,), generator=draw)), int(torch.randint(3, (1,), generator=draw)) * 4
    if bits == 0:
        return PackedWeight.of(weight, kernels) if is_packed and weight.dtype == torch.bfloat16 else weight
    codes = quantized(weight, bits=bits)
    if torch.randint(2, (1,), generator=draw):
        codes = replace(codes, offsets=torch.randn(codes.scales.shape, generator=draw) * codes.scales)
    return PackedCodes.of(codes, kernels, weight.dtype) if is_packed else codes


@pytest.mark.parametrize("dtype", library.DTYPES, ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_one_call_for_all_layers_has_the_bits_of_its_operations(
    name: str, dtype: torch.dtype, draw: torch.Generator
) -> None:
    kernels, choose = library.opened(name), random.Random(int(torch.randint(1 << 30, (1,), generator=draw)))
    torch.set_num_threads(2)
    whole = Sizes(128, 224, 4, 4, 64)
    for _ in range(10):
        play(kernels, whole, dtype, [260], draw, x=torch.full((260, whole.hidden), torch.nan))  # what buffers keep
        kv_heads = choose.choice((1, 2))
        sizes = Sizes(
            hidden=choose.choice((20, 65, 100, 128)),
            inner=choose.choice((8, 17, 32, 40, 48, 130)),
            heads=kv_heads * choose.choice((1, 3)),
            kv_heads=kv_heads,
            dim=choose.choice((10, 16, 48, 64)),
        )
        counts = [choose.choice((1, 2, 16, 17, 40, 129)) for _ in range(choose.choice((1, 3)))]
        found, expected = play(kernels, sizes, dtype, counts, draw)

        assert torch.equal(found, expected), (sizes, counts)


def play(
    kernels: Kernels,
    sizes: Sizes,
    dtype: torch.dtype,
    counts: list[int],
    draw: torch.Generator,
    x: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Prompts of so many tokens go through layers in one call, and by operation."""
    layers = [Layer(sizes, kernels, dtype, draw) for _ in range(LAYERS)]
    x = (torch.randn(sum(counts), sizes.hidden, generator=draw) if x is None else x).to(dtype)
    pages = [-(-count // PAGE_SIZE) for count in counts]
    firsts = np.cumsum([0, *pages])
    positions = np.concatenate([np.arange(count) for count in counts])
    tables = np.repeat(firsts[:-1], counts)
    arrays = (positions, tables * PAGE_SIZE + positions, tables, np.arange(firsts[-1]))
    batch = BatchView(len(positions), *(array.ctypes.data for array in arrays), 0)
    kv = torch.zeros(int(firsts[-1]), sizes.kv_heads, LAYERS, 2, PAGE_SIZE, sizes.dim, dtype=dtype)
    cos, sin = (torch.randn(max(counts), sizes.dim, generator=draw).to(dtype) for _ in range(2))
    expected = by_operation(kernels, sizes, layers, batch, x, kv.clone(), [t[positions, None] for t in (cos, sin)])

    views = (LayerView * LAYERS)(*(layer.view() for layer in layers))
    counted = (LAYERS, sizes.hidden, sizes.heads, sizes.kv_heads, sizes.dim, sizes.inner)
    model = DecoderView(*counted, EPS, views, kv.data_ptr(), PAGE_SIZE, 0, cos.data_ptr(), sin.data_ptr())
    found = x.clone()
    kernels.layers(model, batch, found)
    return found, expected


def by_operation(
    kernels: Kernels,
    sizes: Sizes,
    layers: list[Layer],
    batch: BatchView,
    x: Tensor,
    kv: Tensor,
    turns: list[Tensor],
) -> Tensor:
    """turns: cos and sin of each token"""
    x = x.clone()
    for index, layer in enumerate(layers):
        normed = kernels.rms_norm(x, layer.norms[0], EPS)
        q, k, v = (
            kernels.linear(normed, *layer.weights[name]).view(len(x), heads, sizes.dim)
            for name, heads in (("q", sizes.heads), ("k", sizes.kv_heads), ("v", sizes.kv_heads))
        )
        kernels.rotate(q, *turns)
        kernels.rotate(k, *turns)
        mixed = torch.empty_like(q)
        kernels.attention(kv, batch, q, k, v, mixed, layer=index)
        x += kernels.linear(mixed.view(len(x), -1), *layer.weights["o"])
        normed = kernels.rms_norm(x, layer.norms[1], EPS)
        gate, up = (kernels.linear(normed, *layer.weights[name]) for name in ("gate", "up"))
        x += kernels.linear(kernels.silu_and_mul(gate, up), *layer.weights["down"])
    return x
