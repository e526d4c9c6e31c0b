"""What a GGUF file says of the computation, and transformers does not read or does not miss.

It makes a model of the sizes alone: how positions are stretched, a part of the head that is turned, soft caps and some
windows are left out, tensors that it has no name for are left away, and those that are not there are drawn at random.
What our architectures compute of that is put into the configuration; the rest is refused by name.
"""

from collections.abc import Collection
from typing import Any  # a configuration of transformers, a reader and values of gguf

import gguf

from tandem.engine.documents import ModelError
from tandem.engine.models.table import FAMILIES

# Factors of the angles, one for each pair of a head: of Llama 3.1 and later, and of Phi 3.5 and later.
FREQS, SHORT, LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
DERIVED = ".attn_rot_embd.weight"  # of older files, and nobody reads them
EXPERTS = "_exps.weight"  # all of a layer, for which transformers and the file have names of their own
# Fields that change what is computed and are not read for any architecture of ours.
UNREAD = (
    *("attention.scale", "attention.clamp_kqv", "attention.max_alibi_bias", "attention.sliding_window_pattern"),
    *("logit_scale", "residual_scale", "embedding_scale", "expert_weights_scale"),
    *("rope.scaling.alpha", "rope.scaling.yarn_log_multiplier", "rope.scaling.yarn_ext_factor"),
    "rope.scaling.yarn_attn_factor",
)
BETAS = {"beta_fast": "rope.scaling.yarn_beta_fast", "beta_slow": "rope.scaling.yarn_beta_slow"}
SIZES = {"head_dim": "attention.key_length", "moe_intermediate_size": "expert_feed_forward_length"}
ORIGINAL = "original_max_position_embeddings"
# Layers of those Gemmas (27B) whose scores are divided as if heads filled the hidden size; llama.cpp counts them, too.
WIDE_GEMMAS = {"gemma2": 46, "gemma3_text": 62}


class GgufFields:
    """The fields of a file's architecture, and its tensors."""

    def __init__(self, reader: Any) -> None:
        self.architecture: str = reader.fields["general.architecture"].contents()
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._fields = reader.fields
        self._of_tokenizer: dict[str, Any] = {}  # to read a vocabulary takes as long as all else here

    def of(self, name: str) -> Any:
        """None where it is not there, or says nothing."""
        found = self._fields.get(f"{self.architecture}.{name}")
        return (found.contents() or None) if found is not None else None

    def tokenizer(self, name: str) -> Any:
        """None where it is not there."""
        if name not in self._of_tokenizer:
            found = self._fields.get(f"tokenizer.{name}")
            self._of_tokenizer[name] = found.contents() if found is not None else None
        return self._of_tokenizer[name]

    def factors(self, tensor: str) -> list[float]:
        return [float(factor) for factor in self.tensors[tensor].data.reshape(-1)]


def refuse_lost(said: GgufFields, names: list[str], missing: list[str]) -> None:
    """names: of the weights of transformers' model; missing: those that it has found no tensor for.

    Raises ModelError where a weight is not in the file, or a tensor of the file is nobody's weight.
    """
    if missing:
        raise ModelError(f"it has no tensor for {missing[0]} and {len(missing) - 1} other weights of the model")
    known = {FREQS, SHORT, LONG, *_tensors_of(names, said.architecture)}
    has_experts = any(".experts." in name for name in names)
    for name in said.tensors:
        if name not in known and not name.endswith(DERIVED) and not (has_experts and name.endswith(EXPERTS)):
            raise ModelError(f"the tensor {name} is in it, and transformers has no place for it")


def _tensors_of(names: list[str], architecture: str) -> set[str]:
    """As the file names the weights. Bare layers, without what stands on top of them, are named without a prefix."""
    places = places_of(names, architecture)
    found = set[str]()
    for name in (*names, *(name.partition(".")[2] for name in names)):
        layer, dot, kind = name.rpartition(".")
        found.add(f"{places.get_name(layer) if places is not None else None}{dot}{kind}")
    return found


def places_of(names: Collection[str], architecture: str) -> Any:
    """The library's table of names, for as many layers as these weights can have. None: it does not know it."""
    kinds = [kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture]
    return gguf.get_tensor_name_map(kinds[0], len(names)) if kinds else None


def put_sizes(config: Any, said: GgufFields) -> None:
    """Those that transformers takes for granted, before a model is made of them."""
    for name, field in SIZES.items():
        if said.of(field) and hasattr(config, name):
            setattr(config, name, int(said.of(field)))


def complete(config: Any, said: GgufFields) -> None:
    """Puts into transformers' configuration what the file says beyond it. Raises ModelError."""
    angles = _angles(said)
    if config.architectures[0] in FAMILIES:
        _refuse_unread(said)
        angles |= _part(config, said)
        _put_rest(config, said)
    if angles:
        _put_angles(config, angles)


def _refuse_unread(said: GgufFields) -> None:
    for name in UNREAD:
        if said.of(name) not in (None, 1.0):
            raise ModelError(f"{said.architecture}.{name} is {said.of(name)}, which is not supported")


def _angles(said: GgufFields) -> dict[str, Any]:
    """What is not usual about them, as `rope_parameters` of a checkpoint says it."""
    kind = said.of("rope.scaling.type") or "linear"
    factor = float(said.of("rope.scaling.factor") or said.of("rope.scale_linear") or 1)
    context = said.of("rope.scaling.original_context_length") or said.of("context_length")
    is_stretched = kind in ("linear", "yarn") and factor != 1
    longs = [name for name in (FREQS, SHORT) if name in said.tensors]
    attention = float(said.of("rope.scaling.attn_factor") or 1)
    if (
        len(longs) + is_stretched > 1
        or (attention != 1 and SHORT not in longs)
        or kind not in ("none", "linear", "yarn", "longrope")
    ):
        raise ModelError(
            f"{said.architecture}.rope.scaling is of the type {kind} with the attn_factor {attention:g}, beside "
            f"{' and '.join(longs) or 'no factors'}, which is not supported"
        )
    if FREQS in longs:
        return _longrope(said.factors(FREQS), said.factors(FREQS), 1.0, said.of("context_length"))
    if SHORT in longs:
        return _longrope(said.factors(SHORT), said.factors(LONG), attention, context)
    if not is_stretched:
        return {}
    if kind == "linear":
        return {"rope_type": kind, "factor": factor}
    betas = {name: float(said.of(field)) for name, field in BETAS.items() if said.of(field)}
    return {"rope_type": kind, "factor": factor, ORIGINAL: int(context), **betas}


def _longrope(short: list[float], long: list[float], attention: float, context: int) -> dict[str, Any]:
    factors = {"short_factor": short, "long_factor": long, "attention_factor": attention}
    return {"rope_type": "longrope", **factors, ORIGINAL: int(context)}


def _part(config: Any, said: GgufFields) -> dict[str, float]:
    """Of a head, that is turned."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    turned = said.of("rope.dimension_count") or head_dim
    return {"partial_rotary_factor": turned / head_dim} if turned != head_dim else {}


def _put_angles(config: Any, angles: dict[str, Any]) -> None:
    """Where layers with a window turn by angles of their own, these stay."""
    if ORIGINAL in angles and hasattr(config, ORIGINAL):
        setattr(config, ORIGINAL, angles[ORIGINAL])
    given = getattr(config, "rope_parameters", None)
    if not isinstance(given, dict):  # before transformers 5
        config.rope_scaling = {**(getattr(config, "rope_scaling", None) or {}), **angles}
        return
    config.rope_parameters = (
        {**given, "full_attention": {**given["full_attention"], **angles}}
        if "full_attention" in given
        else {**given, **angles}
    )


def _put_rest(config: Any, said: GgufFields) -> None:
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if said.of(name):
            setattr(config, name, float(said.of(name)))
    if said.of("attention.sliding_window"):
        config.sliding_window = int(said.of("attention.sliding_window"))
    if (layers := WIDE_GEMMAS.get(config.model_type)) is not None:
        is_wide = config.num_hidden_layers == layers
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads if is_wide else config.head_dim
