"""Weights of few bits against fp64: fresh random codes, odd sizes, outputs that begin as NaN, every instruction set."""

import pytest
import torch

from quantized_weights import NUMBERS, SHAPES, SIXTEENS, drawn
from tandem.engine.layers import product as products
from tandem.engine.layers import torch_linear
from tandem.engine.layers.packed import PackedCodes
from tandem.engine.layers.quantized import FLOAT8, QuantizedWeight, quantized
from tandem.engine.native import library

VARIANTS = library.available()
DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7}

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize(("bits", "offsets"), [(8, False), (4, False), (8, True), (4, True), (NUMBERS, False)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_products_are_those_of_fp64_and_have_the_bits_of_the_plain_weight(
    name: str, dtype: torch.dtype, bits: int | str, offsets: bool, draw: torch.Generator
) -> None:
    kernels = library.opened(name)
    for rows, outputs, inputs, group in SHAPES + SIXTEENS * (bits != 4):
        weight, exact = drawn(draw, outputs, inputs, bits=bits, group=group, offsets=offsets)
        x = torch.randn(rows, inputs, generator=draw).to(dtype)
        plain = kernels.plain_rows(weight, 0, torch.full((outputs, inputs), float("nan"), dtype=dtype))
        bound = TOLERANCE[dtype] * exact.abs().max().item()
        assert (plain.double() - exact).abs().max().item() <= bound, "a weight is rounded once"
        assert torch.equal(weight.plain(dtype), plain) or dtype == torch.float32

        for bias in (None, torch.randn(outputs, generator=draw).to(dtype)):
            found = kernels.linear(x, weight, bias)
            assert torch.equal(found, kernels.linear(x, plain, bias)), "as if it were plain"
            sums = x.double() @ plain.double().T + (0 if bias is None else bias.double())
            added = x.double().abs() @ plain.double().abs().T + (0 if bias is None else bias.double().abs())
            scale = added.max().item()  # a sum may be next to nothing; its rounding is that of what is added
            assert (found.double() - sums).abs().max().item() <= TOLERANCE[dtype] * scale * (1 + inputs / 1000)
            torch.set_num_threads(2)
            assert torch.equal(kernels.linear(x, weight, bias), found), "threads do not show"
            torch.set_num_threads(1)


@pytest.mark.parametrize("bits", [8, 4, NUMBERS])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_libraries_of_one_order_give_the_same_bits(dtype: torch.dtype, bits: int | str) -> None:
    weight, _ = drawn(torch.Generator().manual_seed(1), 37, 1000, bits=bits, group=96, offsets=bits != NUMBERS)
    x = torch.randn(70, 1000, generator=torch.Generator().manual_seed(2)).to(dtype)
    found = [library.opened(name).linear(x, weight, None) for name in library.ONE_ORDER if name in VARIANTS]

    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("bits", [8, 4, NUMBERS])
def test_many_rows_are_multiplied_by_torch_piece_by_piece(
    bits: int | str, draw: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_linear, "PIECE_ELEMENTS", 700)  # seven outputs of a hundred inputs
    weight, exact = drawn(draw, 40, 100, bits=bits, group=32, offsets=False)
    x, bias = torch.randn(300, 100, generator=draw), torch.randn(40, generator=draw)

    for kernels in (library.best(), None):
        library.use(kernels)
        expected = x.double() @ exact.T + bias.double()
        found = products.product(x, weight, bias)
        assert (found.double() - expected).abs().max() <= 5e-6 * expected.abs().max()


@pytest.mark.parametrize("name", VARIANTS)
def test_every_number_of_8_bits_is_read_as_what_it_is(name: str) -> None:
    kernels = library.opened(name)
    numbers = torch.tensor([code for code in range(256) if code % 128 != 127], dtype=torch.uint8).view(FLOAT8)
    weight = QuantizedWeight.of(numbers[None], torch.ones(1, 1), None, bits=8, group=256)
    for dtype in DTYPES:
        packed = PackedCodes.of(weight, kernels, dtype)
        for each in (weight, packed):
            found = kernels.plain_rows(each, 0, torch.empty(1, 254, dtype=dtype))
            assert torch.equal(found, numbers[None].to(dtype))
            units = kernels.linear(torch.eye(254, dtype=dtype), each, None)
            assert torch.equal(units.T, numbers[None].to(dtype))
        assert torch.equal(packed.plain(dtype), numbers[None].to(dtype))


@pytest.mark.parametrize(("bits", "most"), [(8, 0.004), (4, 0.08)])
def test_what_is_quantised_when_it_is_loaded_is_near_and_zeros_stay(
    bits: int, most: float, draw: torch.Generator
) -> None:
    plain = torch.randn(40, 200, generator=draw)
    plain[3] = 0
    found = quantized(plain, bits=bits)

    error = (found.plain(torch.float32) - plain).abs()
    scale = plain.abs().amax()
    assert found.shape == (40, 200)
    assert error.square().mean().sqrt() < most * scale / 2
    assert not found.plain(torch.float32)[3].any()
    assert found.num_bytes < plain.numel() * (bits + 3) / 8
