"""Packed codes: the products of fp64 with what they stand for, whatever the rows and threads, and the codes again."""

import pytest
import torch

from quantized_weights import NUMBERS, SHAPES, SIXTEENS, drawn, drawn_codes, drawn_numbers
from tandem.engine.layers.packed import PackedCodes
from tandem.engine.layers.product import product
from tandem.engine.layers.quantized import QuantizedWeight
from tandem.engine.native import library

VARIANTS = library.available()
# Bits, and whether there are offsets
KINDS = ((8, False), (8, True), (6, False), (6, True), (4, False), (4, True), (NUMBERS, False))
MORE_SHAPES = (
    (3, 40, 700, 192),
    (14, 66, 520, 512),
    (25, 33, 290, 96),  # groups that end within what is widened at once
    (110, 33, 70, 32),  # more rows than go through a block together
)

pytestmark = pytest.mark.usefixtures("poisoned")


def cases(draw: torch.Generator, bits: int | str, offsets: bool) -> list[tuple[int, QuantizedWeight, torch.Tensor]]:
    """Rows, a weight, and what it stands for in fp64."""
    shapes = SHAPES + MORE_SHAPES + (SIXTEENS if bits != 4 and not offsets else ())
    return [
        (rows, *drawn(draw, outputs, inputs, bits=bits, group=group, offsets=offsets))
        for rows, outputs, inputs, group in shapes
    ]


@pytest.mark.parametrize(("bits", "offsets"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_products_are_those_of_fp64_whatever_the_rows_and_threads(
    name: str, dtype: torch.dtype, bits: int | str, offsets: bool, draw: torch.Generator
) -> None:
    kernels = library.opened(name)
    for rows, weight, exact in cases(draw, bits, offsets):
        outputs, inputs = weight.shape
        packed = PackedCodes.of(weight, kernels, dtype)
        x = torch.randn(rows, inputs, generator=draw).to(dtype)
        is_rounded = (name, dtype) in library.CODES_IN_ROWS  # a weight, before it is used
        for bias in (None, torch.randn(outputs, generator=draw).to(dtype)):
            torch.set_num_threads(1)
            found = kernels.linear(x, packed, bias)

            sums = x.double() @ exact.T + (0 if bias is None else bias.double())
            added = (x.double().abs() @ exact.abs().T + (0 if bias is None else bias.double().abs())).max()
            bound = 2e-6 if dtype == torch.float32 else 2**-7
            assert (found.double() - sums).abs().max() <= bound * added * (1 + inputs / 1000) * (1 + is_rounded)
            torch.set_num_threads(2)
            assert torch.equal(kernels.linear(x, packed, bias), found), "threads do not show"
            torch.set_num_threads(1)
            for row in {0, rows // 2, rows - 1}:
                assert torch.equal(kernels.linear(x[row:][:1], packed, bias), found[row:][:1]), "nor other rows"
            if is_rounded:
                assert torch.equal(kernels.linear(x, weight, bias), found), "it is packed, and nothing else"


@pytest.mark.skipif(not set(library.ONE_ORDER) <= set(VARIANTS), reason="one library only")
@pytest.mark.parametrize(("bits", "offsets"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_libraries_of_one_order_give_the_same_bits(
    dtype: torch.dtype, bits: int | str, offsets: bool, draw: torch.Generator
) -> None:
    first, other = (library.opened(name) for name in library.ONE_ORDER)
    for rows, weight, _ in cases(draw, bits, offsets):
        packed = PackedCodes.of(weight, first, dtype)
        x = torch.randn(rows, weight.shape[1], generator=draw).to(dtype)

        assert torch.equal(first.linear(x, packed, None), other.linear(x, packed, None))


@pytest.mark.parametrize(("bits", "offsets"), KINDS)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_weight_is_not_rounded_to_bf16(name: str, bits: int | str, offsets: bool, draw: torch.Generator) -> None:
    """Sums of whole numbers that bf16 holds, with scales and offsets that it does not hold, are exact."""
    kernels = library.opened(name)
    if (name, torch.bfloat16) in library.CODES_IN_ROWS:
        pytest.skip("codes become weights in bf16 there")
    group, outputs, inputs = 32, 40, 96
    codes = drawn_numbers(draw, outputs, inputs) if isinstance(bits, str) else drawn_codes(draw, outputs, inputs, bits)
    scales = 1 + torch.randint(1, 1 << 10, (outputs, 1), generator=draw).repeat(1, inputs // group) / (1 << 10)
    added = torch.randint(1, 1 << 11, (outputs, 1), generator=draw).repeat(1, inputs // group) / (1 << 11)
    packed = PackedCodes.of(
        QuantizedWeight.of(codes, scales, added if offsets else None, bits=4 if bits == 4 else 8, group=group),
        kernels,
        torch.bfloat16,
    )
    x = torch.zeros(13, inputs)
    x[:, 5] = x[:, 70] = 1.0
    exact = codes.double() * scales.double().repeat_interleave(group, 1)
    if offsets:
        exact += added.double().repeat_interleave(group, 1)

    assert torch.equal(kernels.linear(x.bfloat16(), packed, None), (x.double() @ exact.T).bfloat16())


@pytest.mark.parametrize(("bits", "offsets"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_the_codes_are_found_again(
    name: str, dtype: torch.dtype, bits: int | str, offsets: bool, draw: torch.Generator
) -> None:
    kernels = library.opened(name)
    for _, weight, _ in cases(draw, bits, offsets):
        packed = PackedCodes.of(weight, kernels, dtype)

        assert packed.shape == weight.shape
        wanted = 8 if bits == NUMBERS else bits
        assert packed.bits == wanted or weight.shape[0] * weight.shape[1] < 100, (
            "codes of 8 bits may be small by chance"
        )
        assert torch.equal(packed.plain(torch.float32), weight.plain(torch.float32))
        first = weight.shape[0] // 3
        rows = weight.plain(torch.bfloat16, first=first)
        assert torch.equal(packed.plain(torch.bfloat16, first=first), rows)
        assert torch.equal(kernels.plain_rows(packed, first, torch.empty_like(rows)), rows)


@pytest.mark.parametrize("times", [1.0, 2.0**-147, 2.0**-60, 2.0**60])
@pytest.mark.parametrize("name", VARIANTS)
def test_scales_have_the_bits_of_fp16_beside_bf16_and_the_range_of_fp32(
    name: str, times: float, draw: torch.Generator
) -> None:
    kernels = library.opened(name)
    codes = torch.randint(-32, 32, (40, 96), dtype=torch.int8, generator=draw)
    codes[codes == 0] = 1
    scales = (torch.rand(40, 6, generator=draw) + 0.1) * torch.tensor([1.0, 1e-3, 1e3, 1e-3, 0.1, 10.0]) * times
    weight = QuantizedWeight.of(codes, scales, None, bits=8, group=16)
    exact = weight.plain(torch.float32).double()

    whole = PackedCodes.of(weight, kernels, torch.float32)
    assert torch.equal(whole.plain(torch.float32).double(), exact)
    packed = PackedCodes.of(weight, kernels, torch.bfloat16)
    assert packed.values.nbytes == whole.values.nbytes * 7 // 8, "6 and 1 bits a weight, and not 6 and 2"
    for found in (packed.plain(torch.float32), kernels.plain_rows(packed, 0, torch.empty(40, 96))):
        assert ((found.double() - exact).abs() <= exact.abs() * 2.0**-11).all()


@pytest.mark.parametrize(("code", "bits"), [(-33, 8), (-32, 6), (31, 6), (32, 8)])
@pytest.mark.skipif(not VARIANTS, reason="no libraries")
def test_codes_take_six_bits_where_all_of_them_fit(code: int, bits: int) -> None:
    codes = torch.zeros(5, 64, dtype=torch.int8)
    codes[4, 63] = code
    weight = QuantizedWeight.of(codes, torch.ones(5, 2), None, bits=8, group=32)
    packed = PackedCodes.of(weight, library.opened(VARIANTS[0]), torch.bfloat16)

    assert packed.bits == bits
    assert torch.equal(packed.plain(torch.float32), codes.float())


@pytest.mark.skipif(not VARIANTS, reason="no libraries")
def test_numbers_take_eight_bits_however_small() -> None:
    codes = torch.full((5, 64), 2.0**-9).to(torch.float8_e4m3fn)
    weight = QuantizedWeight.of(codes, torch.ones(5, 2), None, bits=8, group=32)
    packed = PackedCodes.of(weight, library.opened(VARIANTS[0]), torch.bfloat16)

    assert packed.bits == 8
    assert torch.equal(packed.plain(torch.float32), codes.float())


@pytest.mark.parametrize("name", VARIANTS)
def test_scales_of_nothing_are_packed(name: str) -> None:
    weight = QuantizedWeight.of(torch.zeros(5, 32, dtype=torch.int8), torch.zeros(5, 1), None, bits=4, group=32)
    packed = PackedCodes.of(weight, library.opened(name), torch.bfloat16)

    assert not packed.plain(torch.float32).any()


@pytest.mark.parametrize("broken", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_scale_that_is_no_number_leaves_other_outputs_as_they_are(name: str, broken: float) -> None:
    scales = torch.tensor([[broken], [1000.0]])
    for offsets in (None, torch.ones(2, 1)):
        weight = QuantizedWeight.of(torch.ones(2, 32, dtype=torch.int8), scales, offsets, bits=4, group=32)
        packed = PackedCodes.of(weight, library.opened(name), torch.bfloat16)

        assert torch.equal(packed.plain(torch.float32)[1], weight.plain(torch.float32)[1])
        assert not packed.plain(torch.float32)[0].isfinite().any()


@pytest.mark.skipif(not VARIANTS, reason="no libraries")
def test_offsets_of_groups_of_sixteen_are_not_packed(draw: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets are multiplied with the sums of 32 inputs."""
    kernels = library.opened(VARIANTS[0])
    monkeypatch.setattr(library, "SCALED_SUMS", {(VARIANTS[0], torch.bfloat16)})
    monkeypatch.setattr(library, "CODES_IN_ROWS", set())
    for group, offsets, packs in ((16, True, False), (16, False, True), (32, True, True)):
        weight, _ = drawn(draw, 32, 64, bits=8, group=group, offsets=offsets)
        assert kernels.packs_codes(torch.bfloat16, weight) == packs


@pytest.mark.parametrize("name", VARIANTS)
def test_where_no_kernel_takes_the_rows_torch_multiplies_them(name: str, draw: torch.Generator) -> None:
    weight, exact = drawn(draw, 70, 130, bits=4, group=32, offsets=True)
    packed = PackedCodes.of(weight, library.opened(name), torch.bfloat16)
    x = torch.randn(130, 9, generator=draw).bfloat16().T
    assert library.fitting(x) is None, "rows that do not lie one after the other"

    torch.testing.assert_close(product(x, packed), (x.double() @ exact.T).bfloat16(), rtol=0.05, atol=0.5)
