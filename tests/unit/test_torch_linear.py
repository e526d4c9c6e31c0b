"""Products of many rows by torch: widened where the processor has no instructions for their type, and right."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tandem.engine.layers import torch_linear

HALVES = (torch.bfloat16, torch.float16)
NO_HALVES = frozenset({"avx2", "fma", "avx512f", "avx512_vnni"})


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch):
    """What the processor says that it has."""

    def say(*names: str) -> None:
        torch_linear.is_widened.cache_clear()
        monkeypatch.setattr(torch_linear, "processor_flags", lambda: frozenset(names))

    yield say
    torch_linear.is_widened.cache_clear()


@pytest.mark.parametrize("dtype", HALVES)
def test_a_type_is_widened_where_the_processor_says_that_it_does_not_multiply_it(flags, dtype: torch.dtype) -> None:
    for names, is_widened in (
        (NO_HALVES, True),
        ({*NO_HALVES, *torch_linear.INSTRUCTIONS[dtype]}, False),
        (frozenset(), False),  # it says nothing
    ):
        flags(*names)
        assert torch_linear.is_widened(dtype) is is_widened
        assert not torch_linear.is_widened(torch.float32)


def case(rows: int, dtype: torch.dtype, *, bias: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, 130).to(dtype), torch.randn(77, 130).to(dtype)
    return x, weight, torch.randn(77).to(dtype) if bias else None


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("bias", [False, True])
def test_widened_products_are_those_in_double_precision_rounded_once(
    flags, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, bias: bool
) -> None:
    flags(*NO_HALVES)
    monkeypatch.setattr(torch_linear, "PIECE_ELEMENTS", 1000)  # seven outputs
    for rows in (torch_linear.WIDENED_ROWS, 33, 200):
        x, weight, added = case(rows, dtype, bias=bias)
        found = torch_linear.linear(x, weight, added)
        right = functional.linear(x.double(), weight.double(), None if added is None else added.double())
        assert found.dtype == dtype
        # Half a unit of its last place, and what fp32 sums may be off where they cancel.
        error = (found.double() - right).abs()
        assert bool((error <= right.abs() * torch.finfo(dtype).eps * 0.51 + 1e-4).all())


def test_few_rows_and_fast_types_are_left_to_torch(flags, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[torch.dtype] = []

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        called.append(weight.dtype)
        return weight.new_zeros(x.shape[0], weight.shape[0])

    monkeypatch.setattr(torch_linear.functional, "linear", linear)
    flags(*NO_HALVES)
    few, many = torch_linear.WIDENED_ROWS - 1, torch_linear.WIDENED_ROWS
    for rows, dtype, seen in (
        (few, torch.bfloat16, torch.bfloat16),
        (many, torch.bfloat16, torch.float32),
        (many, torch.float32, torch.float32),
    ):
        torch_linear.linear(*case(rows, dtype, bias=False))
        assert called.pop() == seen
    flags(*NO_HALVES, "avx512_bf16")
    torch_linear.linear(*case(many, torch.bfloat16, bias=False))
    assert called.pop() == torch.bfloat16
