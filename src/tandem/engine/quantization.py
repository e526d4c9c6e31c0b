"""In how few bits weights are: what `--quantization` asks for, and what `config.json` says of a checkpoint.

    int8, int4           made here, of a plain checkpoint, when it is loaded
    gptq, awq            4 or 8 bits, and 4, with the layouts of AutoGPTQ and AutoAWQ (GEMM)
    compressed-tensors   `pack-quantized` of 4 or 8 bits, `int-quantized` of 8, `float-quantized` of 8
    fp8                  numbers of 8 bits with a scale for each block of outputs and inputs, or for all of them
    gguf                 8 or 4 bits, layer by layer: of the directory that a GGUF file becomes

Activations stay as they are, whatever a checkpoint would have them rounded to: that is nearer to the model that it was
made of. What of weights is not computed is refused here, by name.
"""

from dataclasses import dataclass
from typing import Any  # values of JSON documents

from tandem.engine.documents import Fields, ModelError
from tandem.engine.quantization_names import MADE_HERE, QUANTIZATIONS, STORED_METHODS
from tandem.logtext import shown

MOST_GROUP = 1 << 20
LEAST_GROUP = 32  # inputs that the kernels take at once; larger groups are multiples of it, the last may be shorter
SMALL_GROUP = 16  # which 8 bits may have, too
GPTQ, GPTQ_V2 = "gptq", "gptq_v2"
PACKED, BYTES, NUMBERS = "pack-quantized", "int-quantized", "float-quantized"
NAIVE = "naive-quantized"  # another name for either of the latter two
WHERE = "config.json: quantization_config"


@dataclass(frozen=True, slots=True)
class Quantization:
    method: str  # int8, int4, or one of `STORED_METHODS`
    bits: int  # 4 or 8; 0: each layer's own
    group: int | None = None  # inputs; None: all of a row. Of what is made here, the layers say it.
    layout: str | None = None  # which of those that a method has
    has_zeros: bool = False  # of compressed-tensors: groups have zeros of their own

    @property
    def is_made_here(self) -> bool:
        return self.method not in STORED_METHODS


@dataclass(frozen=True, slots=True)
class NumberQuantization(Quantization):
    """Codes are numbers of 8 bits, e4m3."""

    block: tuple[int, int] | None = None  # outputs and inputs with one scale; None: each output has one


def quantization_of(stored: Quantization | None, asked: str | None) -> Quantization | None:
    """Of a checkpoint that says `stored` where a user says `asked`, one of `QUANTIZATIONS`. Raises ModelError."""
    if asked is None:
        return stored
    if asked not in QUANTIZATIONS:
        raise ModelError(f"--quantization {asked} is not there; known are {', '.join(QUANTIZATIONS)}")
    if stored is not None and asked != stored.method:
        raise ModelError(f"the checkpoint is quantised by {stored.method} already; leave out --quantization {asked}")
    if stored is not None:
        return stored
    if asked in STORED_METHODS:
        raise ModelError(f"config.json has no quantization_config; use --quantization int8 or int4 instead of {asked}")
    return Quantization(f"int{MADE_HERE[asked]}", MADE_HERE[asked])


def read_quantization(config: Fields) -> Quantization | None:
    """What `config.json` says; None of plain weights. Raises ModelError, whatever it holds."""
    if config.values.get("quantization_config") is None:
        return None
    section = config.section("quantization_config")
    assert section is not None
    said = Fields(WHERE, section.values)
    method = said.text("quant_method", default="")
    match method:
        case "gptq":
            return _gptq(said)
        case "awq":
            return _awq(said)
        case "compressed-tensors":
            return _compressed(said)
        case "fp8":
            return _fp8(said)
        case "gguf":
            return Quantization("gguf", 0)
    raise _refused("quant_method", said.values.get("quant_method"), f"known are {', '.join(STORED_METHODS)}")


def _gptq(said: Fields) -> Quantization:
    if said.flag("desc_act", default=False):
        raise _refused("desc_act", True, "inputs in the order of their activations are not computed")
    if said.values.get("dynamic") not in (None, {}):
        raise _refused("dynamic", said.values["dynamic"], "all layers have to have the same bits")
    layout = said.text("checkpoint_format", default=GPTQ)
    if layout not in (GPTQ, GPTQ_V2):
        raise _refused("checkpoint_format", layout, f"known are {GPTQ} and {GPTQ_V2}")
    return Quantization("gptq", _bits(said, "bits", (4, 8)), _group(said), layout)


def _awq(said: Fields) -> Quantization:
    version = said.text("version", default="gemm").lower()
    if version != "gemm":
        raise _refused("version", version, "only gemm is")
    return Quantization("awq", _bits(said, "bits", (4,)), _group(said))


def _compressed(said: Fields) -> Quantization:
    groups = said.section("config_groups")
    if groups is None or len(groups.values) != 1:
        raise _refused("config_groups", groups and list(groups.values), "exactly one group of layers is needed")
    for name in ("kv_cache_scheme", "transform_config"):
        if said.values.get(name) not in (None, {}):
            raise _refused(name, said.values[name], "weights only are")
    sparsity = said.section("sparsity_config")
    if sparsity is not None and sparsity.text("format", default="dense") != "dense":
        raise _refused("sparsity_config", sparsity.values, "no sparse weights are")
    only = groups.section(next(iter(groups.values)))
    weights = None if only is None else only.section("weights")
    if only is None or weights is None:
        raise _refused("config_groups", groups.values, "it has to say of which weights")
    layout = only.text("format", default=said.text("format", default=""))
    if layout == NAIVE:
        layout = NUMBERS if weights.text("type", default="int") == "float" else BYTES
    if layout not in (PACKED, BYTES, NUMBERS):
        raise _refused("format", layout, f"known are {PACKED}, {BYTES} and {NUMBERS}")
    kind, is_symmetric = "float" if layout == NUMBERS else "int", weights.flag("symmetric", default=True)
    if layout == NUMBERS and not is_symmetric:
        raise _refused("symmetric", False, "numbers with an exponent have no zeros of their own")
    for name, wanted in (("type", kind), ("dynamic", False), ("actorder", None)):
        value = weights.values.get(name, wanted)
        if value not in (wanted, None, "weight", "static") or (name != "actorder" and value is None):
            raise _refused(name, value, "numbers of one kind in the order of the inputs are")
    bits = _bits(weights, "num_bits", (4, 8) if layout == PACKED else (8,))
    strategy = weights.text("strategy", default="tensor")
    known = ("block" if layout == NUMBERS else "group", "channel", "tensor")
    if strategy not in known:
        raise _refused("strategy", strategy, f"known are {', '.join(known)}")
    if strategy == "block":
        return NumberQuantization("compressed-tensors", bits, block=_block(weights, "block_structure"))
    if layout == NUMBERS:
        return NumberQuantization("compressed-tensors", bits)
    group = _group(weights) if strategy == "group" else None
    return Quantization("compressed-tensors", bits, group, layout, has_zeros=not is_symmetric)


def _fp8(said: Fields) -> Quantization:
    if (fmt := said.text("fmt", default="e4m3")) != "e4m3":
        raise _refused("fmt", fmt, "known is e4m3")
    block = _block(said, "weight_block_size") if said.has("weight_block_size") else None
    return NumberQuantization("fp8", 8, block=block)


def _block(said: Fields, name: str) -> tuple[int, int]:
    match said.values.get(name):
        case [int(outputs), int(inputs)] if min(outputs, inputs) > 0 and max(outputs, inputs) <= MOST_GROUP:
            if inputs % LEAST_GROUP == 0 or inputs == SMALL_GROUP:
                return outputs, inputs
    what_is = f"whole numbers of outputs and of inputs are, these multiples of {LEAST_GROUP}, or {SMALL_GROUP}"
    raise _refused(name, said.values.get(name), what_is)


def _bits(said: Fields, name: str, known: tuple[int, ...]) -> int:
    bits = said.values.get(name)
    if type(bits) is not int or bits not in known:
        raise _refused(name, bits, f"known are {' and '.join(map(str, known))}")
    return bits


def _group(said: Fields) -> int | None:
    size = said.integer("group_size", least=-1, most=MOST_GROUP, default=128)
    if size == -1:
        return None
    if size <= 0 or size % LEAST_GROUP != 0:
        raise _refused("group_size", size, f"multiples of {LEAST_GROUP} are")
    return size


def _refused(name: str, value: Any, what_is: str) -> ModelError:
    said = f"{WHERE}: {name} is {shown(value)}"
    return ModelError(f"{said}, which is not supported ({what_is}); choose another checkpoint")
