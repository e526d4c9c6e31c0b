"""From a checkpoint directory to a model that runs.

Weights are memory-mapped: where the stored type is the wanted one, nothing is copied, and several engines on one
machine share the pages. Everything a user can get wrong ends in a `ModelError` of one line.
"""

import hashlib
import math
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from tandem.core.kv_parts import KvGrid
from tandem.engine import devices, digest_cache, machine_memory, mapped_files, trial
from tandem.engine.attention.base import AttentionRules
from tandem.engine.checkpoint import Checkpoint
from tandem.engine.digest_cache import DigestCache
from tandem.engine.documents import ModelError
from tandem.engine.kv_memory import KvShape, StateShape
from tandem.engine.model_config import ModelConfig, read_config
from tandem.engine.models.base import Model, build_of
from tandem.engine.models.table import FAMILIES
from tandem.engine.native import library
from tandem.engine.native.library import Kernels
from tandem.engine.parallel import Group, HeadShard, OneShard, Shard, layers_of
from tandem.engine.quantization import Quantization, quantization_of
from tandem.engine.quantized_formats import FLOAT8
from tandem.engine.transformers_facts import examined_here
from tandem.engine.weight_source import STORED, WeightSource
from tandem.engine.weights_digest import tensor_digests, weights_digest
from tandem.logtext import shown

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
READABLE_CHARS = 64  # a field of a layout is short
WHOLE_MODEL = Shard(0, 1)
PACKING_SHARE = 0.25  # of the memory of the machine, for all engines on it that are known of
STORED_BITS = {"I32": 32, "I8": 8, "U8": 8, FLOAT8: 8}  # of tensors that are codes
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ENCODER_EMBEDDING = "bert.embeddings.word_embeddings.weight"
# Angles that older checkpoints store; they follow from config.json, and transformers ignores them too.
DERIVED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")

# What a model has no use for that is asked for vectors only: heads of other tasks, and what BERT counts positions with.
UNUSED = re.compile(r"lm_head\.weight|cls\..*|bert\.pooler\.dense\.\w+|bert\.embeddings\.(position|token_type)_ids")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    config: ModelConfig
    module: Model
    kv_shape: KvShape
    kv_grid: KvGrid  # of the whole model
    dtype: torch.dtype
    device: str
    num_parameters: int  # of the whole model
    weight_bytes: int  # in memory; mapped ones come there as they are used
    is_packed: bool  # all linear layers
    attention: AttentionRules  # of the layers of its stage
    layout_fields: dict[str, str]  # what two engines must agree on before KV may travel between them

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self.config.eos_ids

    @property
    def max_context(self) -> int:
        """Tokens, prompt and output together."""
        return self.config.max_context


def load(
    model_dir: Path,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    cache: DigestCache | None = None,
    group: Group | None = None,
    stage: Shard = WHOLE_MODEL,
    is_embedding: bool = False,
    quantization: str | None = None,
    kv_is_int8: bool = False,
    packing_share: float = PACKING_SHARE,
) -> LoadedModel:
    """One worker's part of a model: the shard that `group` says, of the layers of `stage`; unless told, all of it.
    Digests and layout are those of the whole model.

    dtype: a key of `DTYPES`, or "auto": as stored (float16 becomes float32 on CPU, bfloat16 elsewhere or beside codes).

    cache: of digests read before; the user's own when it is None.

    is_embedding: vectors are wanted of a decoder; encoders know nothing else.

    quantization: as of `quantization.chosen`: to how many bits linear layers are quantised here.

    kv_is_int8: keys and values are kept in 8 bits.

    packing_share: of the machine's memory, up to which this worker's weights are packed (`layers/packed.py`).
    """
    config = read_config(model_dir, is_embedding=is_embedding, examine=examined_here)
    device = devices.take(device)
    checkpoint, stored = _open(config, model_dir)
    chosen = _choose_dtype(dtype, stored=stored, device=device, of_codes=config.quantization is not None)
    _refuse_overflow(config, chosen)
    scheme = _scheme(config, quantization)
    group = group if group is not None else OneShard()
    own_memories = 1 if device == "cpu" else group.mlp.shard.size * stage.size  # else workers share the machine's
    weight_bytes = _refuse_too_large(checkpoint, chosen, device, scheme, own_memories)
    packing = _packing(chosen, device, weight_bytes // (group.shard.size * stage.size), packing_share)
    source = WeightSource(checkpoint, dtype=chosen, device=device, quantization=scheme, packing=packing)
    module = build_of(config.architecture)(config, source, group, stage)
    heads = HeadShard.of(group.shard, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads)
    own_layers = layers_of(stage, config.num_layers)
    copies = _untaken(checkpoint, source, config)
    known = cache if cache is not None else DigestCache(digest_cache.default_path())
    digests = tensor_digests(checkpoint, source.taken + copies, known)
    _refuse_another_head(digests, copies)
    mapped_files.forget(source.packed_bytes, checkpoint.files)
    loaded = LoadedModel(
        config=config,
        module=module,
        kv_shape=_kv_shape(config, own_layers, heads, is_int8=kv_is_int8),
        kv_grid=KvGrid(config.num_layers if config.state_space is None else stage.size, config.num_kv_heads),
        dtype=chosen,
        device=device,
        num_parameters=source.num_parameters,
        weight_bytes=weight_bytes,
        is_packed=source.are_packed,
        attention=_attention_rules(config, own_layers),
        layout_fields=_layout_fields(
            config, chosen, weights_digest({n: digests[n] for n in source.taken}), scheme, kv_is_int8, stage.size
        ),
    )
    if isinstance(module, trial.Borrowed):
        trial.run(module, config, replace(loaded.kv_shape, is_int8=False), loaded.attention, chosen, device)
    return loaded


def _open(config: ModelConfig, model_dir: Path) -> tuple[Checkpoint, str]:
    """The checkpoint, and the type in which it is stored: of the embedding, or where that is codes or its name is not
    known here, of the largest plain weight.
    """
    embedding = EMBEDDING if config.encoder is None else ENCODER_EMBEDDING
    prefix = "" if config.pooling is None else embedding.partition(".")[0] + "."
    checkpoint = Checkpoint(model_dir, prefix=prefix)
    if config.transformers is not None or (config.quantization and not checkpoint.has(embedding)):
        plain = (name for name in checkpoint.names() if config.transformers or name.endswith(".weight"))
        embedding = max(plain, key=lambda name: math.prod(checkpoint.shape_of(name)), default=embedding)
    return checkpoint, checkpoint.dtype_of(embedding)


def _scheme(config: ModelConfig, asked: str | None) -> Quantization | None:
    if config.transformers is not None and asked is not None:
        raise ModelError(
            f"--quantization is for Tandem's own architectures, and {config.architecture} is computed by "
            f"{config.transformers.library}; leave it out"
        )
    return quantization_of(config.quantization, asked)


def _packing(dtype: torch.dtype, device: str, own_bytes: int, share: float) -> Kernels | None:
    """What the weights are packed for; None: they stay as they are."""
    kernels = library.best()
    if device != "cpu" or kernels is None or dtype not in library.DTYPES:
        return None
    return kernels if own_bytes <= share * machine_memory.total_bytes(device) else None


def _kv_shape(config: ModelConfig, layers: range, heads: HeadShard, *, is_int8: bool) -> KvShape:
    if config.encoder is not None:
        return KvShape(0, heads.num_kv, config.head_dim, is_int8)
    attending = [layer for layer in layers if layer in config.attention_layers]
    sizes, state = config.state_space, None
    if sizes is not None:
        state = StateShape(
            num_layers=len(layers) - len(attending),
            num_heads=sizes.num_heads // config.num_kv_heads,
            head_dim=sizes.head_dim,
            state_size=sizes.state_size,
            conv_width=sizes.conv_width,
            group_features=sizes.group_features,
        )
    windowed = tuple(own for own, layer in enumerate(attending) if config.window_of(layer) is not None)
    return KvShape(len(attending), heads.num_kv, config.head_dim, is_int8, state, windowed)


def _layout_fields(
    config: ModelConfig,
    dtype: torch.dtype,
    weights: str,
    scheme: Quantization | None,
    kv_is_int8: bool,
    stages: int,
) -> dict[str, str]:
    """What both sides of a transfer must have in common. weights: the digest of all."""
    return {
        "model": config.architecture,
        "dtype": str(dtype).removeprefix("torch."),
        "layers": str(config.num_layers),
        "kv_heads": str(config.num_kv_heads),
        "head_dim": str(config.head_dim),
        "config": _config_digest(config),
        "eos_token_ids": in_short(config.eos_ids),
        "weights": weights,
        "deterministic": "off",  # until a self-check says otherwise
        **({"quantization": scheme.method} if scheme is not None else {}),
        **({"kv_cache_dtype": "int8"} if kv_is_int8 else {}),
        **({"computed_by": config.transformers.library} if config.transformers is not None else {}),
        **({"pp_size": str(stages)} if config.state_space is not None else {}),  # a state is not cut by layers
    }


def _attention_rules(config: ModelConfig, layers: range) -> AttentionRules:
    divisor = config.head_dim if config.score_divisor is None else config.score_divisor
    return AttentionRules(
        windows=tuple(config.window_of(layer) for layer in layers if layer in config.attention_layers),
        scale=divisor**-0.5,
        soft_cap=config.attention_cap,
        looks_both_ways=config.encoder is not None,
        block_tokens=1 if config.blocks is None else config.blocks.block_tokens,
    )


def _refuse_overflow(config: ModelConfig, dtype: torch.dtype) -> None:
    if dtype == torch.float16 and config.transformers is None and FAMILIES[config.architecture].outgrows_float16:
        raise ModelError(
            f"{config.architecture} has hidden states beyond the largest number of float16; use --dtype bfloat16 or "
            "float32"
        )


def _refuse_too_large(
    checkpoint: Checkpoint, dtype: torch.dtype, device: str, quantization: Quantization | None, own_memories: int
) -> int:
    """Bytes of all weights in the wanted type, before anything is read or made. own_memories: they are spread over."""
    needed = sum(_bytes_of(checkpoint, name, dtype, quantization) for name in checkpoint.names())
    total = machine_memory.total_bytes(device) * own_memories
    if needed > total:
        raise ModelError(
            f"the weights take {needed / (1 << 30):.1f} GiB as {str(dtype).removeprefix('torch.')}, and there are "
            f"{total / (1 << 30):.1f} GiB of memory; choose a smaller checkpoint, or --quantization int8"
        )
    return needed


def _bytes_of(checkpoint: Checkpoint, name: str, dtype: torch.dtype, quantization: Quantization | None) -> int:
    shape = checkpoint.shape_of(name)
    bits = 8 * dtype.itemsize
    if quantization is not None and quantization.is_made_here and len(shape) == 2 and ".layers." in name:
        bits = quantization.bits + 1  # scales are less than a bit
    elif checkpoint.dtype_of(name) not in STORED:
        bits = STORED_BITS.get(checkpoint.dtype_of(name), 64)
    return math.prod(shape) * bits // 8


def _untaken(checkpoint: Checkpoint, source: WeightSource, config: ModelConfig) -> list[str]:
    """Tensors that no module took and that may be there: a head beside tied embeddings, if it is their copy.

    Raises ModelError for others: who wrote them meant them to be computed with.
    """
    left = sorted(set(checkpoint.names()) - set(source.taken))
    copies = [name for name in left if name == HEAD and config.tied_embeddings]
    silent = {name for name in left if DERIVED.fullmatch(name) or (config.pooling and UNUSED.fullmatch(name))}
    if config.quantization is not None:  # some programs that quantise give every linear layer a bias
        silent |= {name for name in left if name.endswith(".bias") and not checkpoint.tensor(name).any()}
    unknown = [name for name in left if name not in copies and name not in silent]
    if unknown:
        raise ModelError(
            f"{config.architecture} as config.json describes it has no place for {shown(unknown[0])} and "
            f"{len(unknown) - 1} other tensors of the checkpoint; config.json belongs to another model"
        )
    return copies


def _refuse_another_head(digests: dict[str, str], copies: list[str]) -> None:
    for name in copies:
        if digests[name] != digests[EMBEDDING]:
            raise ModelError(
                f"config.json ties the embeddings, but {name} differs from {EMBEDDING}; "
                "set tie_word_embeddings to false, or remove the tensor"
            )


def in_short(ids: tuple[int, ...]) -> str:
    """Readable where that fits into a field of a layout."""
    text = ",".join(str(id) for id in ids)
    return text if len(text) <= READABLE_CHARS else hashlib.sha256(text.encode()).hexdigest()[:32]


def _config_digest(config: ModelConfig) -> str:
    """Of all that is computed with: not of a context's end, the name of a stored type, or when an answer ends.

    What has been computed since an earlier version counts where it is used only, so versions can be put together.
    """
    silent = {"max_context", "stored_dtype", "eos_ids"}
    fields = sorted(asdict(config).items())
    computed = {name: value for name, value in fields if name not in silent and value is not None}
    return hashlib.sha256(repr(computed).encode()).hexdigest()[:32]


def _choose_dtype(asked: str, *, stored: str, device: str, of_codes: bool) -> torch.dtype:
    """of_codes: what is stored stands beside linear layers of few bits, which float32 makes no more exact."""
    if asked in DTYPES:
        return DTYPES[asked]
    if asked != "auto":
        raise ModelError(f"the dtype {asked!r} is not known; use auto, {' or '.join(DTYPES)}")
    match stored:
        case "F32":
            return torch.float32
        case "BF16":
            return torch.bfloat16
        case "F16":
            return torch.float32 if device == "cpu" and not of_codes else torch.bfloat16
        case _:
            raise ModelError(f"weights are stored as {stored}, which is not supported; choose another checkpoint")
