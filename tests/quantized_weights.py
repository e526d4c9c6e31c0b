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
SIXTEENS = ((1, 64, 16, 16), (3, 32, 80, 16), (8, 33, 1008, 16), (20, 40, 304, 16))  # of 8 bits only


def drawn(
    draw: torch.Generator, outputs: int, inputs: int, *, bits: int, group: int, offsets: bool
) -> tuple[QuantizedWeight, torch.Tensor]:
    """And the exact weight, fp64. 6 bits are kept as 8."""
    half, groups = 1 << (bits - 1), -(-inputs // group)
    codes = torch.randint(-half, half, (outputs, inputs), dtype=torch.int8, generator=draw)
    scales = (torch.rand(outputs, groups, generator=draw) + 0.01).half()  # packed codes have them as exact as that
    added = torch.randn(outputs, groups, generator=draw).half() if offsets else None
    of_input = torch.arange(inputs) // group
    exact = codes.double() * scales.double()[:, of_input]
    if added is not None:
        exact += added.double()[:, of_input]
    return QuantizedWeight.of(codes, scales, added, bits=8 if bits == 6 else bits, group=group), exact
