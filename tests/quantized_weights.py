"""Random weights of few bits, in shapes that fill what kernels take at once, and that do not."""

import torch

from tandem.engine.layers.quantized import QuantizedWeight

# rows, outputs, inputs, inputs of a group
SHAPES = (
    (1, 1, 1, 32),
    (1, 33, 48, 64),
    (2, 7, 5, 128),
    (4, 96, 1000, 64),
    (6, 64, 96, 32),
    (7, 37, 300, 96),
    (11, 64, 4000, 32),  # of more inputs than are multiplied at once
    (12, 34, 416, 416),
    (13, 40, 160, 32),
    (65, 130, 1000, 128),
)
NUMBERS = "e4m3"  # of 8 bits, in place of whole numbers
SIXTEENS = ((1, 64, 16, 16), (3, 32, 80, 16), (8, 33, 1008, 16), (20, 40, 304, 16))  # of 8 bits only


def drawn(
    draw: torch.Generator, outputs: int, inputs: int, *, bits: int | str, group: int, offsets: bool
) -> tuple[QuantizedWeight, torch.Tensor]:
    """And the exact weight, fp64. 6 bits are kept as 8."""
    groups = -(-inputs // group)
    codes = drawn_numbers(draw, outputs, inputs) if isinstance(bits, str) else drawn_codes(draw, outputs, inputs, bits)
    scales = (torch.rand(outputs, groups, generator=draw) + 0.01).half()  # packed codes have them as exact as that
    added = torch.randn(outputs, groups, generator=draw).half() if offsets else None
    of_input = torch.arange(inputs) // group
    exact = codes.double() * scales.double()[:, of_input]
    if added is not None:
        exact += added.double()[:, of_input]
    return QuantizedWeight.of(codes, scales, added, bits=4 if bits == 4 else 8, group=group), exact


def drawn_codes(draw: torch.Generator, outputs: int, inputs: int, bits: int) -> torch.Tensor:
    half = 1 << (bits - 1)
    return torch.randint(-half, half, (outputs, inputs), dtype=torch.int8, generator=draw)


def drawn_numbers(draw: torch.Generator, outputs: int, inputs: int) -> torch.Tensor:
    """All that there are may come, e4m3."""
    sizes = torch.randint(0, 127, (outputs, inputs), dtype=torch.uint8, generator=draw)
    signs = torch.randint(0, 2, (outputs, inputs), dtype=torch.uint8, generator=draw)
    return (sizes + 128 * signs).view(torch.float8_e4m3fn)
