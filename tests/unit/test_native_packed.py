"""Packed weights: the products of fp64, whatever the rows and threads, and the weight itself again."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tandem.engine.layers.packed import PackedWeight
from tandem.engine.layers.product import product
from tandem.engine.native import library

VARIANTS = library.available()
# Rows, outputs, inputs: one and many, blocks and tiles that are full and not, an odd number of inputs.
SHAPES = ((1, 1, 1), (1, 33, 48), (2, 7, 5), (5, 64, 96), (12, 32, 64), (13, 31, 1001), (65, 130, 70), (150, 16, 64))
SHAPES += ((11, 9, 66), (24, 70, 1410), (97, 33, 1601), (7, 100, 33))


pytestmark = pytest.mark.usefixtures("poisoned")


def pair(draw: torch.Generator, kernels: library.Kernels, outputs: int, inputs: int) -> tuple[Tensor, PackedWeight]:
    """A weight, and the same packed."""
    weight = torch.randn(outputs, inputs, generator=draw).bfloat16()
    return weight, PackedWeight.of(weight, kernels)


@pytest.mark.parametrize("name", VARIANTS)
def test_products_are_those_of_fp64_whatever_the_rows_and_threads(name: str, draw: torch.Generator) -> None:
    kernels = library.opened(name)
    for rows, outputs, inputs in SHAPES:
        weight, packed = pair(draw, kernels, outputs, inputs)
        x = torch.randn(rows, inputs, generator=draw).bfloat16()
        for bias in (None, torch.randn(outputs, generator=draw).bfloat16()):
            added = x.double().abs() @ weight.double().abs().T + (0 if bias is None else bias.double().abs())
            exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
            torch.set_num_threads(1)
            found = kernels.linear(x, packed, bias)

            assert (found.double() - exact).abs().max() <= 2**-7 * added.max() * (1 + inputs / 1000)
            torch.set_num_threads(2)
            assert torch.equal(kernels.linear(x, packed, bias), found), "threads do not show"
            torch.set_num_threads(1)
            for row in (0, rows // 2, rows - 1):
                assert torch.equal(kernels.linear(x[row:][:1], packed, bias), found[row:][:1]), "nor other rows"
            if name != "avx512_bf16":  # whose sums of packed weights have an order of their own
                assert torch.equal(kernels.linear(x, weight, bias), found), "it is packed or unpacked, and nothing else"


@pytest.mark.parametrize("name", VARIANTS)
def test_the_weight_is_found_again_and_zeros_behind_it(name: str, draw: torch.Generator) -> None:
    kernels = library.opened(name)
    for _, outputs, inputs in SHAPES:
        weight, packed = pair(draw, kernels, outputs, inputs)

        assert packed.shape == (outputs, inputs)
        assert torch.equal(packed.plain(torch.bfloat16), weight)
        rows = slice(outputs // 3, outputs // 3 + 2)
        count = weight[rows].shape[0]
        assert torch.equal(packed.plain(torch.bfloat16, first=rows.start, count=count), weight[rows])
        assert torch.equal(kernels.plain_rows(packed, rows.start, torch.empty_like(weight[rows])), weight[rows])
        assert packed.values.count_nonzero() == weight.count_nonzero()


@pytest.mark.parametrize("name", VARIANTS)
def test_where_no_kernel_takes_the_rows_torch_multiplies_them(name: str, draw: torch.Generator) -> None:
    weight, packed = pair(draw, library.opened(name), 70, 130)
    x = torch.randn(130, 9, generator=draw).bfloat16().T
    assert library.fitting(x) is None, "rows that do not lie one after the other"

    torch.testing.assert_close(product(x, packed), functional.linear(x, weight))
