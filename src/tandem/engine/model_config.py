"""What a checkpoint says about itself: `config.json` of a Hugging Face directory, checked and reduced to what is used.

Whatever would change the mathematics and is not implemented is refused here, never ignored. The fields of transformers'
configurations of these architectures (`models/table.py`) fall into four kinds:

    computed    sizes, rms_norm_eps, tie_word_embeddings, attention_bias, mlp_bias, rotary settings: `ModelConfig`;
                sliding_window and layer_types; experts (`experts_config.py`), state-space layers
                (`state_space_config.py`), blocks (`block_config.py`), soft caps and scales, of architectures that have
                them
    refused     unless they say what is computed anyway: `UNSUPPORTED`, hidden_act, hidden_activation; layer_types and
                a window of some layers, where an architecture has the same in all
    ending      eos_token_id, with generation_config.json and the tokenizer: `eos.py`
    silent      training and bookkeeping: initializer_range, attention_dropout, resid_pdrop, embd_pdrop, use_cache,
                pretraining_tp, max_window_layers (says which layers have a window, and none has), pad_token_id,
                bos_token_id, output_router_logits, router_aux_loss_coef, router_jitter_noise,
                _sliding_window_pattern (what layer_types came from)

What the fields of other decoders mean is transformers' affair, where it is installed: `transformers_facts.py`.

Encoders have positions that are embeddings, and no next token: `encoder_config.py`. A decoder may be asked for vectors
instead of tokens; a checkpoint of its bare layers (Qwen3Model) can do nothing else.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any  # values of JSON documents

from tandem.core.values import PAGE_TOKENS
from tandem.engine.block_config import BlockConfig, read_blocks
from tandem.engine.documents import MOST_FEATURES, MOST_HEADS, Fields, ModelError, read_json
from tandem.engine.encoder_config import EncoderConfig, read_encoder
from tandem.engine.eos import eos_ids, tokenizer_eos
from tandem.engine.experts_config import ExpertsConfig, read_experts
from tandem.engine.models.table import FAMILIES, Family
from tandem.engine.pooling_config import Pooling, read_pooling
from tandem.engine.quantization import Quantization, read_quantization
from tandem.engine.rope_config import MOST_POSITIONS, RopeConfig, read_rope, read_ropes
from tandem.engine.state_space_config import StateSpaceConfig, read_state_space
from tandem.engine.transformers_facts import Examine, TransformersFacts, examined_elsewhere
from tandem.logtext import shown

__all__ = ["ModelConfig", "ModelError", "RopeConfig", "parse_config", "read_config", "read_json"]

MOST_VOCAB = 1 << 24
MOST_LAYERS = 1 << 12
MOST_HEAD_DIM = 1 << 13
MOST_PAGE_TOKENS = 512  # that a page has unless told
WHERE = "config.json"
CHUNKED = "dual_chunk_attention_config"
HEADLESS, WITH_HEAD = "Model", "ForCausalLM"  # how architectures are named without a head, and with one
NO_ROPE = RopeConfig("none", 1.0, {})  # of an encoder, and where transformers computes the angles
SAME_SCALE = 1e-6  # of attention scores, relatively: what two ways to compute it differ by
LAYER_TYPES = ("full_attention", "sliding_attention")


_NO = (None, False)
_ONE = (None, 1)
# Names of the activations that a family may have, as `Family.activation` calls them.
ACTIVATIONS = {"silu": ("silu", "swish"), "gelu_tanh": ("gelu_pytorch_tanh",)}
SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")  # null says that there is none
# Fields that change what is computed, here or in a relative of these architectures, and the values that change nothing.
# What a family computes is read where it is used.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("compression_config", "quantization", "quantize_config"), (None,)),
    **dict.fromkeys((*SOFT_CAPS, "query_pre_attn_scalar"), (None,)),
    **dict.fromkeys(("attention_multiplier", "attention_scale", "clip_qkv", "logit_softcapping"), (None,)),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"), _ONE),
    **dict.fromkeys(("scale_emb", "rotary_pct", "rotary_percent", "rope_ratio"), _ONE),
    **dict.fromkeys(("scale_depth", "dim_model_base", "rotary_dim", "rope_local_base_freq"), (None,)),
    **dict.fromkeys(("qk_norm", "use_qk_norm", "qk_layernorm", "rope_interleave", "rope_interleaved"), _NO),
    **dict.fromkeys(("alibi", "use_alibi", "use_logn_attn", "use_dynamic_ntk", "attn_temperature_tuning"), _NO),
    **dict.fromkeys(("parallel_attn", "use_parallel_residual", "parallel_residual"), _NO),
    **dict.fromkeys(("is_encoder_decoder", "add_cross_attention", "use_bidirectional_attention"), _NO),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), (None, 0)),
    **dict.fromkeys(("no_rope_layers", "no_rope_layer_interval", "sliding_window_pattern"), (None,)),
    **dict.fromkeys(("attention_chunk_size", "per_layer_config", "text_config", "vision_config"), (None,)),
    "is_causal": (None, True),
    "position_embedding_type": (None, "rope", "rotary"),
    "pruned_heads": (None, {}),
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    tied_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    sliding_window: int | None  # tokens that a query sees, itself included; None: all before it
    rope: RopeConfig
    max_context: int  # tokens, prompt and output together
    stored_dtype: str | None  # as config.json names it; the files have the last word
    eos_ids: tuple[int, ...]
    # None: not used, and then no part of the digest by which two servers know that they compute the same.
    experts: ExpertsConfig | None = None
    sliding_layers: tuple[int, ...] | None = None  # that have the window, and turn as `local_rope` says; None: all
    local_rope: RopeConfig | None = None  # None: as `rope`
    score_divisor: float | None = None  # its square root divides attention scores; None: that of head_dim
    attention_cap: float | None = None  # `cap * tanh(score / cap)`
    logit_cap: float | None = None
    encoder: EncoderConfig | None = None
    pooling: Pooling | None = None  # how a prompt becomes a vector, where that is what the model is for
    quantization: Quantization | None = None  # of the checkpoint
    is_headless: bool | None = None  # the checkpoint has no weights that tokens could be scored with
    state_space: StateSpaceConfig | None = None  # of some layers, which do not attend
    turns_nothing: bool | None = None  # attention knows no positions
    embedding_scale: float | None = None  # of what the embedding says
    residual_scale: float | None = None  # of what attention, state-space layer or MLP add
    logit_divisor: float | None = None
    # It computes the layers; of their norms, MLPs and angles nothing is known here then.
    transformers: TransformersFacts | None = None
    blocks: BlockConfig | None = None  # of which the tokens are found together

    @property
    def attention_layers(self) -> tuple[int, ...]:
        scans = self.state_space.layers if self.state_space is not None else ()
        return tuple(layer for layer in range(self.num_layers) if layer not in scans)

    def window_of(self, layer: int) -> int | None:
        return self.sliding_window if self._slides(layer) else None

    def rope_of(self, layer: int) -> RopeConfig:
        return self.local_rope if self.local_rope is not None and self._slides(layer) else self.rope

    def _slides(self, layer: int) -> bool:
        return self.sliding_layers is None or layer in self.sliding_layers


def read_config(model_dir: Path, *, is_embedding: bool = False, examine: Examine = examined_elsewhere) -> ModelConfig:
    """Parse `config.json`, and what `generation_config.json` and the tokenizer say of the end. Raises ModelError.

    is_embedding: vectors are wanted of a decoder, too. examine: asks transformers about other architectures.
    """
    if not model_dir.is_dir():
        raise ModelError(f"model directory {model_dir} does not exist; give a Hugging Face checkpoint directory")
    raw = read_json(model_dir / "config.json")
    generation = read_json(model_dir / "generation_config.json", optional=True)
    config = parse_config(raw, generation=generation, tokenizer_eos=tokenizer_eos(model_dir), examine=examine)
    if config.transformers is not None and is_embedding:
        raise ModelError(
            f"{config.architecture} is computed by transformers, and makes no vectors; leave --is-embedding out"
        )
    is_encoder = config.encoder is not None
    if is_encoder or is_embedding or config.is_headless:
        return replace(config, pooling=read_pooling(model_dir, is_encoder=is_encoder))
    return config


def parse_config(
    raw: dict[str, Any],
    *,
    generation: dict[str, Any],
    tokenizer_eos: int | None = None,
    examine: Examine | None = None,
) -> ModelConfig:
    """Raises ModelError, whatever the objects hold. tokenizer_eos: id of what the tokenizer calls the end, if known.

    examine: asks transformers about architectures that are not in the table; None: they are refused.
    """
    architecture = _architecture(raw)
    if architecture not in FAMILIES and examine is not None:
        return _by_transformers(raw, architecture, examine(raw), generation=generation, tokenizer_eos=tokenizer_eos)
    family = _family(raw, architecture)
    if family.is_encoder:
        return _encoder(raw, architecture, family, tokenizer_eos)
    said = {name: value for name, value in raw.items() if value is not None or name in SOFT_CAPS}
    config = Fields(WHERE, {**family.defaults, **said})
    rope, local_rope = _ropes(config, family)
    max_context = min(_max_context(config, each) for each in (rope, local_rope or rope))
    _refuse_unsupported(config, family)
    heads = config.integer("num_attention_heads", most=MOST_HEADS)
    hidden = config.integer("hidden_size", most=MOST_FEATURES)
    head_dim = _head_dim(config, hidden, heads)
    for each in (rope, local_rope or rope):
        _check_pairs(each, head_dim)
    vocab_size = config.integer("vocab_size", most=MOST_VOCAB)
    num_layers = config.integer("num_hidden_layers", most=MOST_LAYERS)
    num_kv_heads = _kv_heads(config, heads)
    attention_cap, logit_cap = (_soft_cap(config, name) for name in SOFT_CAPS)
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=config.integer(family.mlp_size, most=MOST_FEATURES),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=config.number("rms_norm_eps", least=1e-30, most=1, default=1e-6),
        tied_embeddings=config.flag("tie_word_embeddings", default=False),
        attention_bias=_switch(config, family, "attention_bias"),
        mlp_bias=_switch(config, family, "mlp_bias"),
        sliding_window=_window(config, family, max_context, is_null=raw.get("sliding_window", 0) is None),
        rope=rope,
        max_context=max_context,
        stored_dtype=_stored_dtype(config),
        eos_ids=eos_ids(config, Fields("generation_config.json", generation), tokenizer_eos, vocab_size=vocab_size),
        experts=_experts(config, family, num_layers),
        sliding_layers=_sliding_layers(config, family, num_layers),
        local_rope=local_rope,
        score_divisor=_score_divisor(config, family, head_dim),
        attention_cap=attention_cap,
        logit_cap=logit_cap,
        quantization=read_quantization(config),
        is_headless=True if raw["architectures"] != [architecture] else None,
        state_space=(
            read_state_space(config, num_layers=num_layers, num_kv_heads=num_kv_heads, hidden=hidden)
            if family.may_scan
            else None
        ),
        turns_nothing=True if _turns_nothing(config, family) else None,
        embedding_scale=_scale(config, family, "embedding_multiplier"),
        residual_scale=_scale(config, family, "residual_multiplier"),
        logit_divisor=_scale(config, family, "logits_scaling"),
        blocks=read_blocks(config, vocab_size=vocab_size) if family.has_blocks else None,
    )


def check_heads(num_heads: int, num_shards: int) -> None:
    """Raises ModelError where a shard would have no attention head."""
    if num_shards > num_heads:
        raise ModelError(f"{num_heads} attention heads cannot be spread over {num_shards} shards; take fewer")


def check_layers(num_layers: int, num_stages: int) -> None:
    """Raises ModelError where a stage would have no layer."""
    if num_stages > num_layers:
        raise ModelError(f"{num_layers} layers cannot be spread over {num_stages} pipeline stages; take fewer")


def page_tokens(config: ModelConfig) -> int:
    """Tokens of a page, unless told. Where a model has states each page has one: pages are as large as it takes for
    keys and values to be as many numbers, but not larger than a usual chunk of a prompt. Blocks are never cut by one.
    """
    if config.state_space is None:
        return PAGE_TOKENS if config.blocks is None else max(PAGE_TOKENS, config.blocks.block_tokens)
    sizes = config.state_space
    state = len(sizes.layers) * sizes.inner_size * sizes.state_size
    each = len(config.attention_layers) * 2 * config.num_kv_heads * config.head_dim
    tokens = PAGE_TOKENS
    while tokens < MOST_PAGE_TOKENS and tokens * each < state:
        tokens *= 2
    return tokens


def _encoder(raw: dict[str, Any], architecture: str, family: Family, tokenizer_eos: int | None) -> ModelConfig:
    config = Fields(WHERE, {name: value for name, value in raw.items() if value is not None})
    encoder = read_encoder(config, scores=family.scores)
    heads = config.integer("num_attention_heads", most=MOST_HEADS, default=12)
    hidden = config.integer("hidden_size", most=MOST_FEATURES, default=768)
    if hidden % heads != 0:
        raise ModelError(f"config.json: hidden_size {hidden} is not divisible by {heads} heads; the file is broken")
    vocab_size = config.integer("vocab_size", most=MOST_VOCAB, default=30_522)
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size", most=MOST_FEATURES, default=3072),
        num_layers=config.integer("num_hidden_layers", most=MOST_LAYERS, default=12),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        norm_eps=config.number("layer_norm_eps", least=1e-30, most=1, default=1e-12),
        tied_embeddings=False,
        attention_bias=True,
        mlp_bias=True,
        sliding_window=None,
        rope=NO_ROPE,
        max_context=config.integer("max_position_embeddings", most=MOST_POSITIONS, default=512),
        stored_dtype=_stored_dtype(config),
        eos_ids=eos_ids(config, Fields("generation_config.json", {}), tokenizer_eos, vocab_size=vocab_size),
        encoder=encoder,
    )


def _by_transformers(
    raw: dict[str, Any],
    architecture: str,
    facts: TransformersFacts,
    *,
    generation: dict[str, Any],
    tokenizer_eos: int | None,
) -> ModelConfig:
    config = Fields(WHERE, raw)
    own_scale = facts.head_dim**-0.5
    windows = [window for window in facts.windows if window is not None]
    return ModelConfig(
        architecture=architecture,
        vocab_size=facts.vocab_size,
        hidden_size=facts.hidden_size,
        intermediate_size=0,
        num_layers=facts.num_layers,
        num_heads=facts.num_heads,
        num_kv_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        norm_eps=0.0,
        tied_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
        sliding_window=windows[0] if windows else None,
        rope=NO_ROPE,
        max_context=facts.max_context,
        stored_dtype=_stored_dtype(config),
        eos_ids=eos_ids(
            config, Fields("generation_config.json", generation), tokenizer_eos, vocab_size=facts.vocab_size
        ),
        sliding_layers=tuple(layer for layer, window in enumerate(facts.windows) if window is not None),
        score_divisor=None if abs(facts.scale / own_scale - 1) < SAME_SCALE else facts.scale**-2,
        attention_cap=facts.soft_cap,
        transformers=facts,
    )


def _architecture(raw: dict[str, Any]) -> str:
    """As the table spells it, if it has it."""
    given = raw.get("architectures")
    if not isinstance(given, list) or len(given) != 1 or not isinstance(given[0], str):
        raise ModelError(f"config.json names the architectures {shown(given)}; exactly one is needed")
    headed = given[0].removesuffix(HEADLESS) + WITH_HEAD
    return headed if given[0] not in FAMILIES and given[0].endswith(HEADLESS) and headed in FAMILIES else given[0]


def _family(raw: dict[str, Any], name: str) -> Family:
    if name not in FAMILIES:
        raise ModelError(
            f"config.json: the architecture {shown(name)} is not supported; known are {', '.join(FAMILIES)} "
            "(docs/models.md says what another one needs)"
        )
    known = FAMILIES[name].model_type
    if (model_type := Fields(WHERE, raw).text("model_type", default=known)) != known:
        raise ModelError(
            f"config.json: {name} of the model_type {shown(model_type)} is not supported, only of {known!r}: "
            "the fields of another one may mean something else"
        )
    return FAMILIES[name]


def _ropes(config: Fields, family: Family) -> tuple[RopeConfig, RopeConfig | None]:
    if family.local_theta is None:
        return read_rope(config, default_theta=family.theta, may_turn_a_part=family.may_turn_a_part), None
    return read_ropes(config, default_theta=family.theta, default_local=family.local_theta)


def _kv_heads(config: Fields, heads: int) -> int:
    kv_heads = config.integer("num_key_value_heads", most=MOST_HEADS, default=heads)
    if heads % kv_heads != 0:
        raise ModelError(f"config.json: {heads} attention heads cannot share {kv_heads} KV heads; the file is broken")
    return kv_heads


def _head_dim(config: Fields, hidden: int, heads: int) -> int:
    if not config.has("head_dim") and hidden % heads != 0:
        raise ModelError(f"config.json: hidden_size {hidden} is not divisible by {heads} heads; the file is broken")
    head_dim = config.integer("head_dim", most=MOST_HEAD_DIM, default=hidden // heads)
    if head_dim % 2 != 0:
        raise ModelError(f"config.json: the head dimension {head_dim} is odd, so it has no pairs to rotate")
    return head_dim


def _check_pairs(rope: RopeConfig, head_dim: int) -> None:
    dim = rope.rotary_dim(head_dim)
    if dim == 0 or dim % 2 != 0:
        raise ModelError(
            f"config.json: partial_rotary_factor turns {dim} of the {head_dim} elements of a head, which are no pairs; "
            "choose another checkpoint"
        )
    factors = rope.parameters.get("short_factor")
    if factors is not None and len(factors) != dim // 2:
        raise ModelError(
            f"config.json: short_factor has {len(factors)} numbers, and {dim // 2} pairs of a head are turned; "
            "the file is broken"
        )


def _switch(config: Fields, family: Family, name: str) -> bool:
    is_on = config.flag(name, default=family.fixed.get(name, False))
    if is_on != family.fixed.get(name, is_on):
        raise _unsupported(name, config.values[name])
    return is_on


def _experts(config: Fields, family: Family, num_layers: int) -> ExpertsConfig | None:
    if family.expert_size is None:
        return None
    normed = _switch(config, family, "norm_topk_prob")
    return read_experts(config, size_field=family.expert_size, num_layers=num_layers, normed=normed)


def _window(config: Fields, family: Family, max_context: int, *, is_null: bool) -> int | None:
    """A window that no context outgrows is none. is_null: the field is there and says that there is none."""
    unless_told = None if is_null else family.window
    if is_null and family.full_layer_every is not None:
        raise config.wrong("sliding_window", f"a whole number from 1 to {MOST_POSITIONS} is needed")
    has_one = config.has("sliding_window") or unless_told is not None
    is_used = config.flag("use_sliding_window", default=family.has_window_unless_told and has_one)
    if not is_used and not (family.computes_window and has_one):
        return None
    window = config.integer("sliding_window", most=MOST_POSITIONS, default=unless_told or 1)
    if window >= max_context:
        return None
    if not (family.computes_window and is_used and has_one):
        name = "sliding_window" if config.has("sliding_window") else "use_sliding_window"
        raise _unsupported(name, config.values.get(name))
    if config.has("layer_types") and family.full_layer_every is None:
        raise _unsupported("layer_types", config.values["layer_types"])
    return window


def _sliding_layers(config: Fields, family: Family, num_layers: int) -> tuple[int, ...] | None:
    if family.full_layer_every is None:
        return None
    if not config.has("layer_types"):
        every = config.integer("sliding_window_pattern", most=MOST_LAYERS, default=family.full_layer_every)
        return tuple(layer for layer in range(num_layers) if (layer + 1) % every)
    named = config.values["layer_types"]
    if not isinstance(named, list) or len(named) != num_layers or any(kind not in LAYER_TYPES for kind in named):
        raise config.wrong("layer_types", f"{num_layers} times {' or '.join(LAYER_TYPES)} is needed")
    return tuple(layer for layer, kind in enumerate(named) if kind == "sliding_attention")


def _score_divisor(config: Fields, family: Family, head_dim: int) -> float | None:
    if "attention_multiplier" in family.computes:  # of scores themselves; absent it is 1
        divisor = config.number("attention_multiplier", least=1e-6, most=1e6, default=1.0) ** -2
    else:
        divisor = config.number("query_pre_attn_scalar", least=1e-3, most=1e9, default=head_dim)
    return divisor if divisor != head_dim else None


def _scale(config: Fields, family: Family, name: str) -> float | None:
    """None where it changes nothing. Of other architectures it is refused, unless it does not."""
    factor = config.number(name, least=1e-6, most=1e6, default=1.0) if name in family.computes else 1.0
    return factor if factor != 1.0 else None


def _turns_nothing(config: Fields, family: Family) -> bool:
    if "position_embedding_type" not in family.computes:
        return False
    named = config.text("position_embedding_type", default="nope")
    if named not in ("nope", "rope"):
        raise config.wrong("position_embedding_type", "rope or nope is needed")
    return named == "nope"


def _soft_cap(config: Fields, name: str) -> float | None:
    return config.number(name, least=1e-3, most=1e6) if config.has(name) else None


def _stored_dtype(config: Fields) -> str | None:
    name = config.text("dtype", default=config.text("torch_dtype", default=""))
    if len(name) > 32 or not name.isascii():
        raise config.wrong("dtype", "the name of a type is needed")
    return name or None


def _max_context(config: Fields, rope: RopeConfig) -> int:
    """`dynamic` is exact up to the trained length, where it equals `default`; beyond it a key's angle would depend on
    how long its sequence has become, which no page cache can hold. So that is where the context ends. `longrope` is
    alike: up to the length before it was stretched its short factors hold. So are Qwen2's checkpoints for a million
    tokens: in the first chunk dual chunk attention is that of others.
    """
    trained = config.integer("max_position_embeddings", most=MOST_POSITIONS)
    if (chunks := config.section(CHUNKED)) is not None:
        size = chunks.integer("chunk_size", most=MOST_POSITIONS)
        trained = min(trained, size - chunks.integer("local_size", most=size - 1))
    if rope.kind == "longrope":
        return min(trained, rope.parameters["original_max_position_embeddings"])
    if rope.kind == "yarn":
        stretched = int(rope.parameters["original_max_position_embeddings"] * rope.parameters["factor"])
        return min(max(trained, stretched), MOST_POSITIONS)
    return trained


# --- refusals --------------------------------------------------------------------------------------------------------


def _refuse_unsupported(config: Fields, family: Family) -> None:
    names = ACTIVATIONS[family.activation]
    for name in ("hidden_act", "hidden_activation"):
        if config.text(name, default=names[0]) not in names:
            raise _unsupported(name, config.values[name])
    for name, harmless in UNSUPPORTED.items():
        value = config.values.get(name)
        if name not in family.computes and not any(_is_same(value, other) for other in harmless):
            raise _unsupported(name, value)
    if family.full_layer_every is not None or family.may_scan:
        return
    layer_types = config.values.get("layer_types", [])
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        raise _unsupported("layer_types", layer_types)


def _is_same(value: object, other: object) -> bool:
    """JSON's true is not its 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _unsupported(name: str, value: object) -> ModelError:
    return ModelError(f"config.json: {name} is {shown(value)}, which is not supported; choose another checkpoint")
