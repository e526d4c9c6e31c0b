"""Rows times a weight: by the native kernels where there are some, else by torch."""

from torch import Tensor

from tandem.engine.layers import quantized, torch_linear
from tandem.engine.layers.quantized import LinearWeight
from tandem.engine.native import library


def product(x: Tensor, weight: LinearWeight, bias: Tensor | None = None) -> Tensor:
    """x: [n, in_features], weight: [out_features, in_features]; returns [n, out_features]."""
    kernels = library.fitting(x)
    if kernels is not None:
        return kernels.linear(x, weight, bias)
    return torch_linear.linear(x, weight, bias) if isinstance(weight, Tensor) else quantized.product(x, weight, bias)
