"""Linear layers of quantised checkpoints: from the tensors that a format stores to codes, scales and offsets.

    gptq   qweight  [inputs * bits / 32, outputs]   words along the inputs, the first one lowest
           qzeros   [groups, outputs * bits / 32]   words along the outputs; the zero less one, or (gptq_v2) the zero
           scales   [groups, outputs], g_idx [inputs]: the group of each input
    awq    qweight  [inputs, outputs / 8], qzeros [groups, outputs / 8]: along the outputs, in AWQ's order
           scales   [groups, outputs]
    compressed-tensors
           weight_packed [outputs, inputs * bits / 32]   words along the inputs, each value half of its range higher
           weight        [outputs, inputs] int8          of `int-quantized`
           weight_scale  [outputs, groups], or one of all, weight_shape [2]
           weight_zero_point   where it is not symmetric: as many as scales, int8, or packed in words along the outputs
                               as weights are
    fp8, and compressed-tensors `float-quantized`
           weight        [outputs, inputs] e4m3
           weight_scale, weight_scale_inv   [outputs, 1], or one of each block, or one of all
    gguf   codes [outputs, bytes], of 8 bits int8, of 4 uint8, scales and perhaps offsets [outputs, groups] fp32:
           `QuantizedWeight` as it is computed with, so it is mapped; the group follows from the shapes. What a GGUF
           file becomes.

Of the others a weight is (code - zero) * scale. Codes are kept signed; a zero that is not the middle becomes an offset,
exactly where scales are stored in 16 bits. What stands there for activations is not computed with.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tandem.core.values import ceil_div
from tandem.engine.checkpoint import Checkpoint
from tandem.engine.documents import ModelError
from tandem.engine.layers.quantized import QuantizedWeight, packed_bytes
from tandem.engine.quantization import GPTQ, LEAST_GROUP, PACKED, SMALL_GROUP, NumberQuantization, Quantization
from tandem.logtext import shown

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # at which four bits of a word each of eight outputs is
FLOATS = ("F32", "BF16", "F16")
FLOAT8 = "F8_E4M3"
SIZE = 127  # of such a number, without its sign; all of these bits are set of what is no number
ONE = ((), (1,), (1, 1))  # shapes of a scale of all
GGUF_CONFIG = {"quant_method": "gguf"}  # of config.json
ZEROS = "weight_zero_point"
CODES = ".codes"  # ends the names of such codes
OF_ACTIVATIONS = ("input_scale", "input_zero_point")
CODE_BITS = {"I8": 8, "U8": 4}  # by the type that they are stored as: 64 inputs take as many bytes of either


class StoredTensors:
    """Those whose names begin with that of a layer. `taken` is told of each."""

    def __init__(self, checkpoint: Checkpoint, layer: str, taken: list[str]) -> None:
        self.layer = layer
        self._checkpoint = checkpoint
        self._taken = taken

    def has(self, kind: str) -> bool:
        return self._checkpoint.has(f"{self.layer}.{kind}")

    def shape(self, kind: str) -> tuple[int, ...]:
        return self._checkpoint.shape_of(f"{self.layer}.{kind}")

    def dtype(self, kind: str) -> str:
        return self._checkpoint.dtype_of(f"{self.layer}.{kind}")

    def take(self, kind: str, *shape: int, dtypes: tuple[str, ...]) -> Tensor:
        name = f"{self.layer}.{kind}"
        stored, found = self._checkpoint.dtype_of(name), self._checkpoint.shape_of(name)
        if found != shape or stored not in dtypes:
            raise ModelError(
                f"the tensor {name} is {stored} of the shape {shown(found)}, config.json asks for "
                f"{' or '.join(dtypes)} of {shape}; weights and config.json belong to different models"
            )
        self._taken.append(name)
        return self._checkpoint.tensor(name)


@dataclass(frozen=True, slots=True)
class StoredLinear:
    """A whole layer."""

    codes: Tensor  # [outputs, inputs] int8
    scales: Tensor  # [outputs, groups] fp32
    offsets: Tensor | None
    bits: int
    group: int

    def part(self, name: str, rows: slice, columns: slice) -> QuantizedWeight:
        groups = slice(None)
        if self.scales.shape[1] > 1:
            refuse_cut_groups(name, columns, inputs=self.codes.shape[1], group=self.group)
            start, stop, _ = columns.indices(self.codes.shape[1])
            groups = slice(start // self.group, ceil_div(stop, self.group))
        offsets = None if self.offsets is None else self.offsets[rows, groups]
        codes, scales = self.codes[rows, columns], self.scales[rows, groups]
        return QuantizedWeight.of(codes, scales, offsets, bits=self.bits, group=self.group)


@dataclass(frozen=True, slots=True)
class MappedLinear:
    """A whole layer, stored as it is computed with."""

    whole: QuantizedWeight

    def part(self, name: str, rows: slice, columns: slice) -> QuantizedWeight:
        """Rows stay mapped; columns are packed anew."""
        it = self.whole
        offsets = None if it.offsets is None else it.offsets[rows]
        own = replace(it, codes=it.codes[rows], scales=it.scales[rows], offsets=offsets)
        if columns == slice(None):
            return own
        codes, scales = own.signed_codes(), own.scales
        return StoredLinear(codes, scales, offsets, it.bits, it.group).part(name, slice(None), columns)


@dataclass(frozen=True, slots=True)
class NumberLinear:
    """A whole layer of numbers, whose blocks are of several outputs."""

    numbers: Tensor  # [outputs, inputs] e4m3
    scales: Tensor  # [blocks of outputs, blocks of inputs] fp32
    block: tuple[int, int]

    def part(self, name: str, rows: slice, columns: slice) -> QuantizedWeight:
        """A block that is cut gives smaller groups, of the same scale."""
        outputs, inputs = self.numbers.shape
        start, stop, _ = columns.indices(inputs)
        of_outputs, of_groups = torch.arange(outputs)[rows] // self.block[0], torch.zeros(1, dtype=torch.int64)
        group = -(-(stop - start) // LEAST_GROUP) * LEAST_GROUP
        if self.scales.shape[1] > 1:
            group = math.gcd(self.block[1], start, 0 if stop == inputs else stop)
            if group % LEAST_GROUP != 0 and group != SMALL_GROUP:
                refuse_cut_groups(name, columns, inputs=inputs, group=self.block[1])
            of_groups = torch.arange(start, stop, group) // self.block[1]
        codes, scales = self.numbers[rows, columns], self.scales[of_outputs][:, of_groups]
        if bool((codes.view(torch.uint8) & SIZE == SIZE).any()):
            raise ModelError(f"{name}.weight holds what is no number; choose another checkpoint")
        return QuantizedWeight.of(codes, scales, None, bits=8, group=group)


def gguf_tensors(layer: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    """What `read_quantized` reads again."""
    codes = weight.codes.view(torch.int8) if weight.bits == 8 else weight.codes
    parts = {"codes": codes, "scales": weight.scales, "offsets": weight.offsets}
    return {f"{layer}.{kind}": tensor for kind, tensor in parts.items() if tensor is not None}


def refuse_cut_groups(name: str, columns: slice, *, inputs: int, group: int) -> None:
    """Each shard has whole groups, of which it has the scales. A row that is one group may be cut anywhere."""
    start, stop, _ = columns.indices(inputs)
    if start % group != 0 or (stop % group != 0 and stop != inputs):
        raise ModelError(
            f"--tp-size cuts the inputs of {name} at {start} and {stop}, within one of its groups of {group} that are "
            "quantised together; use another --tp-size"
        )


def read_quantized(
    scheme: Quantization, tensors: StoredTensors, outputs: int, inputs: int
) -> StoredLinear | MappedLinear | NumberLinear:
    """Raises ModelError where tensors are missing or have other shapes than the scheme says."""
    for kind in OF_ACTIVATIONS:
        if tensors.has(kind):
            tensors.take(kind, *tensors.shape(kind), dtypes=(*FLOATS, "I8"))
    if isinstance(scheme, NumberQuantization):
        return _numbers(scheme, tensors, outputs, inputs)
    match scheme.method:
        case "gptq":
            return _gptq(scheme, tensors, outputs, inputs)
        case "awq":
            return _awq(scheme, tensors, outputs, inputs)
        case "gguf":
            return _gguf(tensors, outputs, inputs)
    return _compressed(scheme, tensors, outputs, inputs)


def _gptq(scheme: Quantization, tensors: StoredTensors, outputs: int, inputs: int) -> StoredLinear:
    bits, per_word = scheme.bits, 32 // scheme.bits
    group, groups = _groups(scheme, inputs)
    _refuse_odd(tensors.layer, per_word, inputs=inputs, outputs=outputs)
    words = tensors.take("qweight", inputs // per_word, outputs, dtypes=("I32",))
    zero_words = tensors.take("qzeros", groups, outputs // per_word, dtypes=("I32",))
    scales = tensors.take("scales", groups, outputs, dtypes=FLOATS)
    if tensors.has("g_idx"):
        order = tensors.take("g_idx", inputs, dtypes=("I32",))
        if not torch.equal(order.long(), torch.arange(inputs) // group):
            raise ModelError(
                f"{tensors.layer}.g_idx puts inputs into groups by their activations (desc_act), which is not "
                "supported; choose another checkpoint"
            )
    codes, zeros = _values(words.T, bits), _values(zero_words, bits).T
    return _linear(codes, zeros + 1 & (1 << bits) - 1 if scheme.layout == GPTQ else zeros, scales.T, bits, group)


def _awq(scheme: Quantization, tensors: StoredTensors, outputs: int, inputs: int) -> StoredLinear:
    group, groups = _groups(scheme, inputs)
    _refuse_odd(tensors.layer, 8, outputs=outputs)
    words = tensors.take("qweight", inputs, outputs // 8, dtypes=("I32",))
    zero_words = tensors.take("qzeros", groups, outputs // 8, dtypes=("I32",))
    scales = tensors.take("scales", groups, outputs, dtypes=FLOATS)
    codes, zeros = (
        _values(each, 4).view(each.shape[0], -1, 8)[:, :, list(AWQ_ORDER)].reshape(each.shape[0], -1).T
        for each in (words, zero_words)
    )
    return _linear(codes, zeros, scales.T, 4, group)


def _compressed(scheme: Quantization, tensors: StoredTensors, outputs: int, inputs: int) -> StoredLinear:
    bits, per_word = scheme.bits, 32 // scheme.bits
    group, groups = _groups(scheme, inputs)
    for kind in ("weight_g_idx", *(() if scheme.has_zeros else (ZEROS,))):
        if tensors.has(kind):
            raise ModelError(f"{tensors.layer}.{kind} is not supported; choose a checkpoint without it")
    if scheme.layout == PACKED:
        words = tensors.take("weight_packed", outputs, ceil_div(inputs, per_word), dtypes=("I32",))
        sizes = tensors.take("weight_shape", 2, dtypes=("I64", "I32"))
        if sizes.tolist() != [outputs, inputs]:
            raise ModelError(f"{tensors.layer}.weight_shape is {sizes.tolist()}, not {[outputs, inputs]}")
        codes = (_values(words, bits)[:, :inputs] - (1 << (bits - 1))).to(torch.int8)
    else:
        codes = tensors.take("weight", outputs, inputs, dtypes=("I8",))
    kind = "weight_scale"
    is_one = tensors.shape(kind) in ONE
    stored = tensors.take(kind, *(tensors.shape(kind) if is_one else (outputs, groups)), dtypes=FLOATS).float()
    scales = stored.reshape(1, 1).expand(outputs, groups) if is_one else stored
    offsets = -scales * _zeros(tensors, outputs, groups, bits) if scheme.has_zeros else None
    return StoredLinear(codes, scales, offsets, bits, group)


def _zeros(tensors: StoredTensors, outputs: int, groups: int, bits: int) -> Tensor:
    """Of `compressed-tensors`, [outputs, groups] fp32, counted as codes are: signed"""
    if tensors.dtype(ZEROS) == "I8":
        return tensors.take(ZEROS, outputs, groups, dtypes=("I8",)).float()
    words = tensors.take(ZEROS, ceil_div(outputs, 32 // bits), groups, dtypes=("I32",))
    return (_values(words.T, bits)[:, :outputs].T - (1 << (bits - 1))).float()


def _numbers(scheme: NumberQuantization, tensors: StoredTensors, outputs: int, inputs: int) -> NumberLinear:
    numbers = tensors.take("weight", outputs, inputs, dtypes=(FLOAT8,))
    kind = "weight_scale_inv" if tensors.has("weight_scale_inv") else "weight_scale"
    is_one = tensors.shape(kind) in ONE
    block = (outputs, inputs) if is_one else scheme.block or (1, inputs)
    blocks = ceil_div(outputs, block[0]), ceil_div(inputs, block[1])
    scales = tensors.take(kind, *(tensors.shape(kind) if is_one else blocks), dtypes=FLOATS)
    return NumberLinear(numbers, scales.float().view(blocks), block)


def _gguf(tensors: StoredTensors, outputs: int, inputs: int) -> MappedLinear:
    layer = tensors.layer
    stored, width, groups = tensors.dtype("codes"), tensors.shape("codes")[-1:], tensors.shape("scales")[-1:]
    bits = CODE_BITS.get(stored, 0)
    is_whole = bits != 0 and width == (packed_bytes(inputs, bits),)
    group = inputs // groups[0] if groups and groups[0] and inputs % groups[0] == 0 else 0
    if not is_whole or group == 0 or (group % LEAST_GROUP != 0 and (bits, group) != (8, SMALL_GROUP)):
        raise ModelError(
            f"{layer} has {shown(width)} {stored} of codes and {shown(groups)} groups for {inputs} inputs, which is no "
            "format of ours; remove the directory, and let it be made of the GGUF file again"
        )
    codes = tensors.take("codes", outputs, *width, dtypes=(stored,)).view(torch.uint8)
    scales = tensors.take("scales", outputs, *groups, dtypes=("F32",))
    offsets = tensors.take("offsets", outputs, *groups, dtypes=("F32",)) if tensors.has("offsets") else None
    return MappedLinear(QuantizedWeight(codes, scales, offsets, bits, group, inputs))


def _linear(codes: Tensor, zeros: Tensor, scales: Tensor, bits: int, group: int) -> StoredLinear:
    """codes: [outputs, inputs], zeros and scales: [outputs, groups]; codes and zeros count from 0"""
    middle = 1 << (bits - 1)
    off = scales.float() * (middle - zeros).float()
    return StoredLinear((codes - middle).to(torch.int8), scales.float(), off if off.any() else None, bits, group)


def _groups(scheme: Quantization, inputs: int) -> tuple[int, int]:
    """Inputs of a group, and how many there are. Of a row that is one group: as many as fill whole vectors."""
    group = ceil_div(inputs, LEAST_GROUP) * LEAST_GROUP if scheme.group is None else scheme.group
    return group, ceil_div(inputs, group)


def _refuse_odd(layer: str, per_word: int, **sizes: int) -> None:
    for name, size in sizes.items():
        if size % per_word != 0:
            raise ModelError(f"{layer} has {size} {name}, not a multiple of {per_word}; the format cannot hold it")


def _values(words: Tensor, bits: int) -> Tensor:
    """[n, words] int32 to [n, words * 32 / bits] int16, the lowest bits of a word first, from 0"""
    some = words.contiguous().view(torch.uint8).to(torch.int16)
    return some if bits == 8 else torch.stack((some & 15, some >> 4), dim=-1).view(words.shape[0], -1)
