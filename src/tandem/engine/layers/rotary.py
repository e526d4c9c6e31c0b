"""Rotary position embedding: angles per position, with the scalings that transformers defines.

The table is computed in blocks of a fixed size, so an angle's last bit does not depend on how long the table is.
Formulas follow `transformers.modeling_rope_utils`, which the tests compare with.
"""

import math
from typing import Any  # values of JSON documents

import torch
from torch import Tensor

from tandem.engine.native import library
from tandem.engine.rope_config import RopeConfig

BLOCK_POSITIONS = 1024


class RotaryTable:
    """cos and sin of every position so far asked for. Grows by blocks; never changes what it has answered."""

    def __init__(self, rope: RopeConfig, *, head_dim: int, dtype: torch.dtype, device: str) -> None:
        """head_dim: of a whole head; the table is as wide as the part of it that is turned."""
        self._inverse, self._scale = inverse_frequencies(rope, head_dim=head_dim)
        self.width = 2 * len(self._inverse)
        self._dtype = dtype
        self._device = device
        self._num_positions = 0
        self._cos = torch.empty(0, self.width, dtype=dtype, device=device)
        self._sin = torch.empty(0, self.width, dtype=dtype, device=device)

    def at(self, positions: Tensor, *, last_position: int) -> tuple[Tensor, Tensor]:
        """cos and signed sin, each [n, 1, width]: `x * cos + roll(x, width / 2) * sin` rotates x.

        positions: [n] int64, none beyond `last_position`, which the caller knows without asking the device.
        """
        cos, sin = self.up_to(last_position)
        return cos.index_select(0, positions).unsqueeze(1), sin.index_select(0, positions).unsqueeze(1)

    def up_to(self, last_position: int) -> tuple[Tensor, Tensor]:
        """cos and signed sin of every position up to this one at least, each [positions, width]."""
        if last_position >= self._num_positions:
            self._grow(last_position + 1)
        return self._cos, self._sin

    def _grow(self, num_positions: int) -> None:
        cos, sin = [self._cos], [self._sin]
        while self._num_positions < num_positions:
            block = torch.arange(self._num_positions, self._num_positions + BLOCK_POSITIONS, dtype=torch.float32)
            angles = block[:, None] * self._inverse[None, :]
            c, s = angles.cos() * self._scale, angles.sin() * self._scale
            cos.append(torch.cat((c, c), dim=-1).to(self._dtype).to(self._device))
            sin.append(torch.cat((-s, s), dim=-1).to(self._dtype).to(self._device))
            self._num_positions += BLOCK_POSITIONS
        self._cos, self._sin = torch.cat(cos), torch.cat(sin)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """In the memory of x, or not. x: [n, heads, head_dim]; cos, sin from `RotaryTable.at`; what is behind their width
    stays as it is.
    """
    width = cos.shape[-1]
    if width < x.shape[-1]:
        return torch.cat((rotate(x[..., :width].contiguous(), cos, sin), x[..., width:]), dim=-1)
    kernels = library.fitting(x)
    if kernels is not None:
        return kernels.rotate(x, cos, sin)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def inverse_frequencies(rope: RopeConfig, *, head_dim: int) -> tuple[Tensor, float]:
    """fp32 radians per position of each pair that is turned, and the factor on cos and sin."""
    head_dim = rope.rotary_dim(head_dim)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    plain = 1.0 / (rope.theta**exponents)
    match rope.kind:
        case "linear":
            return plain / rope.parameters["factor"], 1.0
        case "llama3":
            return _llama3(plain, rope.parameters), 1.0
        case "yarn":
            return _yarn(rope.theta**exponents, rope.parameters, head_dim=head_dim, theta=rope.theta)
        case "longrope":  # within the length before it was stretched
            factors = torch.tensor(rope.parameters["short_factor"], dtype=torch.float32)
            return 1.0 / (factors * rope.theta**exponents), rope.parameters["attention_factor"]
        case _:  # default, and dynamic within the trained length
            return plain, 1.0


def _llama3(plain: Tensor, given: dict[str, Any]) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    trained, factor = given["original_max_position_embeddings"], given["factor"]
    low, high = given.get("low_freq_factor", 1.0), given.get("high_freq_factor", 4.0)
    wavelengths = 2 * math.pi / plain
    stretched = torch.where(wavelengths > trained / low, plain / factor, plain)
    smooth = (trained / wavelengths - low) / (high - low)
    between = (1 - smooth) * stretched / factor + smooth * stretched
    is_between = (wavelengths >= trained / high) & (wavelengths <= trained / low)
    return torch.where(is_between, between, stretched)


def _yarn(powers: Tensor, given: dict[str, Any], *, head_dim: int, theta: float) -> tuple[Tensor, float]:
    factor, trained = given["factor"], given["original_max_position_embeddings"]

    def dimension(rotations: float) -> float:
        return (head_dim * math.log(trained / (rotations * 2 * math.pi))) / (2 * math.log(theta))

    low, high = dimension(given.get("beta_fast") or 32), dimension(given.get("beta_slow") or 1)
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high += 0.001 if low == high else 0
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    inverse = (1.0 / (factor * powers)) * (1 - kept) + (1.0 / powers) * kept
    return inverse, _yarn_scale(given, factor)


def _yarn_scale(given: dict[str, Any], factor: float) -> float:
    def growth(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    if given.get("mscale") and given.get("mscale_all_dim"):
        return growth(given["mscale"]) / growth(given["mscale_all_dim"])
    return growth(1.0)
