"""The native scan of Mamba 2 against the recurrence written out in fp64, with every instruction set."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from kernel_inputs import fresh_generator
from tandem.engine.native import library
from tandem.engine.native.library import Kernels, ScanView, StatesView

VARIANTS = library.available()
NO_PAGE = -1


pytestmark = pytest.mark.usefixtures("poisoned")


@dataclass
class Layer:
    """Random weights, and states of some pages between numbers that belong to others."""

    kv_heads: int
    heads_per_kv: int
    dim: int
    size: int
    groups: int
    width: int
    has_bias: bool
    draw: torch.Generator
    num_pages: int = 9

    def __post_init__(self) -> None:
        heads = self.kv_heads * self.heads_per_kv
        self.own, self.shared = heads * self.dim, 2 * self.groups * self.size
        self.weight = self.random(self.width, self.own + self.shared)
        self.bias = self.random(self.own + self.shared) if self.has_bias else None
        self.decay, self.dt_bias, self.skip = -self.random(heads).abs(), self.random(heads), self.random(heads)
        self.group = torch.arange(heads) // (heads // self.groups)
        self.part = self.heads_per_kv * self.dim
        self.scanned = self.heads_per_kv * self.dim * self.size
        convolved = (self.width - 1) * (self.part + self.shared)
        self.first = 3
        self.states = self.random(self.num_pages, self.kv_heads, self.first + self.scanned + convolved + 5)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.draw)

    def run(
        self, kernels: Kernels, requests: Sequence[Sequence[tuple[int, int, int, int]]], seen: tuple[Tensor, ...]
    ) -> Tensor:
        bias = self.bias.data_ptr() if self.bias is not None else None
        tensors = (self.decay, self.dt_bias, self.skip, self.group)
        heads = self.kv_heads * self.heads_per_kv
        view = ScanView(
            *(heads, self.heads_per_kv, self.dim, self.size, self.groups, self.width, self.weight.data_ptr(), bias),
            *(tensor.data_ptr() for tensor in tensors),
        )
        page, head, _ = self.states.stride()
        at = StatesView(self.states.data_ptr(), page, head, self.first, self.first + self.scanned)
        stretches = np.array([one for request in requests for one in request], dtype=np.int64)
        begins = np.cumsum([0, *(len(request) for request in requests)], dtype=np.int64)
        return kernels.scan(view, at, stretches, begins, *seen)

    def state(self, page: int) -> tuple[Tensor, Tensor]:
        """fp64: [heads, dim, size], [width - 1, own + shared]"""
        of = self.states[page, :, self.first :].double()
        kept = of[:, self.scanned : self.scanned + (self.width - 1) * (self.part + self.shared)]
        kept = kept.view(self.kv_heads, self.width - 1, -1)
        before = torch.cat((kept[..., : self.part].transpose(0, 1).flatten(1), kept[0, :, self.part :]), dim=1)
        return of[:, : self.scanned].reshape(-1, self.dim, self.size), before

    def exact(self, state: tuple[Tensor, Tensor], rows: slice, seen: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """y [t, own] and the state behind, token by token."""
        own, shared, dt = (each[rows].double() for each in seen)
        scanned, before = state
        out = []
        for x, s, d in zip(own, shared, dt, strict=True):
            before = torch.cat((before, torch.cat((x, s))[None]))
            convolved = (before[-self.width :] * self.weight.double()).sum(0)
            convolved = torch.nn.functional.silu(convolved + (0 if self.bias is None else self.bias.double()))
            heads = convolved[: self.own].view(-1, self.dim)
            b, c = convolved[self.own :].view(2, self.groups, self.size)[:, self.group]
            step = torch.nn.functional.softplus(d + self.dt_bias.double())[:, None, None]
            scanned = scanned * (step * self.decay.double()[:, None, None]).exp()
            scanned = scanned + step * heads[:, :, None] * b[:, None]
            out.append(((scanned * c[:, None]).sum(2) + heads * self.skip.double()[:, None]).flatten())
        return torch.stack(out), scanned, before[len(before) - self.width + 1 :]


SHAPES = (
    {"kv_heads": 1, "heads_per_kv": 1, "dim": 1, "size": 1, "groups": 1, "width": 2, "has_bias": False},
    {"kv_heads": 2, "heads_per_kv": 3, "dim": 5, "size": 17, "groups": 3, "width": 4, "has_bias": True},
    {"kv_heads": 3, "heads_per_kv": 2, "dim": 32, "size": 64, "groups": 1, "width": 4, "has_bias": True},
)
# Of three requests (first, last, source, target): through two pages, from nothing; one token in its own page; a few
# tokens behind another page, fewer than the convolution sees.
REQUESTS = (((0, 6, NO_PAGE, 0), (6, 11, 0, 1)), ((11, 12, 2, 2),), ((12, 14, 3, 4), (14, 15, 4, 5)))


@pytest.mark.parametrize("dtype", library.DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape['kv_heads']}x{shape['heads_per_kv']}")
@pytest.mark.parametrize("name", VARIANTS)
def test_tokens_and_states_are_those_of_fp64(name: str, shape: dict, dtype: torch.dtype) -> None:
    layer = Layer(**shape, draw=fresh_generator())
    heads = layer.kv_heads * layer.heads_per_kv
    seen = tuple(layer.random(15, count).to(dtype) for count in (layer.own, layer.shared, heads))
    nothing = (torch.zeros(heads, layer.dim, layer.size).double(), torch.zeros(layer.width - 1, layer.weight.shape[1]))
    before = layer.states.clone()
    expected = {}
    for request in REQUESTS:
        source = request[0][2]
        state = nothing if source == NO_PAGE else layer.state(source)
        for first, last, _, target in request:
            y, *state = layer.exact(tuple(state), slice(first, last), seen)
            expected[first, last, target] = y, *state

    found = layer.run(library.opened(name), REQUESTS, seen)

    for (first, last, target), (y, scanned, kept) in expected.items():
        torch.testing.assert_close(found[first:last].double(), y, rtol=1e-4, atol=1e-4)
        ours = layer.state(target)
        torch.testing.assert_close(ours[0], scanned, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours[1], kept.double(), rtol=0, atol=0)
    untouched = [page for page in range(layer.num_pages) if page not in {target for _, _, target in expected}]
    assert torch.equal(layer.states[untouched], before[untouched])
    assert torch.equal(layer.states[..., : layer.first], before[..., : layer.first])
    assert torch.equal(layer.states[..., -5:], before[..., -5:])


@pytest.mark.parametrize("name", VARIANTS)
def test_neither_threads_nor_pieces_nor_others_show_in_a_bit(name: str) -> None:
    shape, draw = SHAPES[1], fresh_generator()
    seed = draw.initial_seed()
    rows, states = [], []
    for threads, requests in (
        (1, [[(0, 15, NO_PAGE, 1)]]),
        (2, [[(0, 4, NO_PAGE, 0), (4, 8, 0, 2), (8, 15, 2, 1)]]),
        (2, [[(0, 15, NO_PAGE, 1)], [(15, 16, 3, 3)], [(16, 20, 4, 5)]]),
    ):
        layer = Layer(**shape, draw=torch.Generator().manual_seed(seed))
        seen = tuple(layer.random(20, count) for count in (layer.own, layer.shared, 6))
        torch.set_num_threads(threads)
        rows.append(layer.run(library.opened(name), requests, tuple(each[: requests[-1][-1][1]] for each in seen))[:15])
        states.append(layer.states[1])
    torch.set_num_threads(1)

    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])
    assert torch.equal(states[0], states[1])
    assert torch.equal(states[0], states[2])
