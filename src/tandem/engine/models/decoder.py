"""The decoder-only transformer that several families share: blocks of attention and an MLP, each with norms.

A block is two functions of rows with attention between them: `project` and `finish` look at one token at a time, so
the batch decides how many rows go through them together (all of them, or fixed tiles: see `rows.py`). In some models
some blocks have a state instead of attention.

A family says of what its blocks consist, with a `Loader`; everything else is here.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from tandem.engine.attention.native import NativeAttention
from tandem.engine.batch import Batch
from tandem.engine.documents import ModelError
from tandem.engine.layers.activation import Activation, silu_and_mul, soft_cap
from tandem.engine.layers.experts import Expert, Experts
from tandem.engine.layers.linear import GateUpLinear, GatheringLinear, QkvLinear, RowParallelLinear, gathers
from tandem.engine.layers.mamba2 import Mamba2
from tandem.engine.layers.mlp import GatedMlp
from tandem.engine.layers.norm import GatheringWidthNorms, HeadNorms, RMSNorm, Scale, WidthNorms
from tandem.engine.layers.rotary import RotaryTable, rotate
from tandem.engine.layers.taking import taken
from tandem.engine.layers.vocabulary import VocabParallelEmbedding, VocabParallelHead
from tandem.engine.layers.weights import Weights
from tandem.engine.model_config import ModelConfig
from tandem.engine.models.base import Step
from tandem.engine.models.flat import FlatBlocks
from tandem.engine.parallel import Group, HeadShard, MlpGroup, Shard, layers_of


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """`before` norms are of what goes into attention or MLP, `after` ones of what comes out, before it is added."""

    before_attention: RMSNorm | None = None
    qkv: QkvLinear
    qk_norm: HeadNorms | WidthNorms | GatheringWidthNorms | None = None  # before the rotation
    o_proj: RowParallelLinear | GatheringLinear
    after_attention: RMSNorm | Scale | None = None
    before_mlp: RMSNorm | None = None
    mlp: GatedMlp | Experts
    after_mlp: RMSNorm | Scale | None = None

    def forward(self, x: Tensor, step: Step, angles: tuple[Tensor, ...], *, layer: int) -> Tensor:
        """x: [n, hidden]; layer: among those that attend."""
        rows = step.batch.rows
        q, k, v = rows.apply(self.project, x, *angles)
        attended = step.attention.forward(rows.tokens(q), rows.tokens(k), rows.tokens(v), layer=layer)
        return rows.apply(self.finish, x, rows.padded(attended.flatten(1), num_rows=x.shape[0]))

    def project(self, x: Tensor, *angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x: [n, hidden], angles: cosine and sine of each row, if it knows positions; returns q [n, heads, head_dim],
        k and v [n, kv_heads, head_dim], q and k rotated.
        """
        q, k, v = self.qkv(_normed(x, self.before_attention))
        if self.qk_norm is not None:
            q, k = self.qk_norm(q, k)
        return (rotate(q, *angles), rotate(k, *angles), v) if angles else (q, k, v)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """x: [n, hidden], attended: [n, heads * head_dim]; returns the block's output [n, hidden]."""
        x = x + _normed(self.o_proj(attended), self.after_attention)
        return x + _normed(self.mlp(_normed(x, self.before_mlp)), self.after_mlp)

    def product_shapes(self) -> list[tuple[int, int]]:
        qkv = (self.qkv.q_proj, self.qkv.k_proj, self.qkv.v_proj)
        linears = (*qkv, self.o_proj)
        return [*((linear.weight.shape[0], linear.weight.shape[1]) for linear in linears), *self.mlp.product_shapes()]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpaceLayer:
    """Its mixer has a state. `before` and `after` as of `DecoderLayer`."""

    before_mixer: RMSNorm
    mixer: Mamba2
    after_mixer: Scale | None = None
    before_mlp: RMSNorm
    mlp: GatedMlp
    after_mlp: Scale | None = None

    def forward(self, x: Tensor, step: Step, angles: tuple[Tensor, ...], *, layer: int) -> Tensor:
        """x: [n, hidden]; layer: among those with a state."""
        assert step.states is not None, "of a model with states the engine keeps them"
        x = x + _normed(self.mixer(self.before_mixer(x), step.states, layer=layer), self.after_mixer)
        return x + _normed(self.mlp(self.before_mlp(x)), self.after_mlp)

    def product_shapes(self) -> list[tuple[int, int]]:
        return [*self.mixer.product_shapes(), *self.mlp.product_shapes()]


def _normed(x: Tensor, norm: RMSNorm | Scale | None) -> Tensor:
    return x if norm is None else norm(x)


@dataclass(frozen=True, slots=True)
class Decoder:
    """A `Model`. On a stage that is not the first, or not the last, the embedding, or norm and head, are empty."""

    embedding: VocabParallelEmbedding
    rotary: tuple[
        RotaryTable | None, ...
    ]  # of each block; one object for those that turn alike, None: it turns nothing
    blocks: tuple[DecoderLayer | StateSpaceLayer, ...]
    norm: RMSNorm
    head: VocabParallelHead | None  # None: it is asked for vectors only
    logit_cap: float | None = None
    logit_divisor: float | None = None
    flat: FlatBlocks | None = field(init=False, repr=False)  # of `blocks`, where one call can run them

    def __post_init__(self) -> None:
        object.__setattr__(self, "flat", self._flat())

    def _flat(self) -> FlatBlocks | None:
        attending = [block for block in self.blocks if isinstance(block, DecoderLayer)]
        table = self.rotary[0]
        if len(attending) < len(self.blocks) or table is None or len(set(self.rotary)) > 1:
            return None
        return FlatBlocks.of(attending, rotary_dim=table.width)

    def forward(self, step: Step, hidden: Tensor | None = None) -> Tensor:
        batch, attention = step.batch, step.attention
        x = self.embedding(batch.token_ids) if hidden is None else hidden
        table = self.rotary[0]
        if self.flat is not None and isinstance(attention, NativeAttention) and self.flat.fits(x, attention):
            assert table is not None, "flat blocks turn"
            return self.flat.forward(x, *table.up_to(batch.last_position), attention)
        angles = {table: _angles(table, batch) for table in set(self.rotary)}
        number_of = Counter[type]()
        for block, table in zip(self.blocks, self.rotary, strict=True):
            x = block.forward(x, step, angles[table], layer=number_of[type(block)])
            number_of[type(block)] += 1
        return x

    def accompany(self) -> None:
        no_rows = self.norm.weight.new_empty(0, self.embedding.weight.shape[1])
        for block in self.blocks:
            block.mlp(no_rows)

    def logits(self, batch: Batch, hidden: Tensor) -> Tensor:
        scores = batch.rows.apply(self._score, taken(hidden, batch.sampled))
        return scores if batch.sampled_place is None else scores.index_select(0, batch.sampled_place)

    def states(self, batch: Batch, hidden: Tensor) -> Tensor:
        states = batch.rows.apply(self.norm, taken(hidden, batch.sampled))
        return states if batch.sampled_place is None else states.index_select(0, batch.sampled_place)

    def score(self, state: Tensor) -> Tensor:
        raise AssertionError("a decoder is no cross-encoder")

    def _score(self, x: Tensor) -> Tensor:
        assert self.head is not None, "of a model that makes vectors no token is sampled"
        scores = self.head(self.norm(x))
        if self.logit_divisor is not None:
            scores /= self.logit_divisor
        return scores if self.logit_cap is None else soft_cap(scores, self.logit_cap)

    def first_layers(self, count: int) -> "Decoder":
        return replace(self, blocks=self.blocks[:count], rotary=self.rotary[:count])

    def product_shapes(self) -> list[tuple[int, int]]:
        shapes = [shape for block in self.blocks for shape in block.product_shapes()]
        head = self.head.weight.shape if self.head is not None else None
        return shapes if head is None else [*shapes, (head[0], head[1])]


def _angles(table: RotaryTable | None, batch: Batch) -> tuple[Tensor, ...]:
    return table.at(batch.positions, last_position=batch.last_position) if table is not None else ()


@dataclass(frozen=True, slots=True)
class Loader:
    """Makes this shard's layers from the tensors whose names begin with `prefix`. Names are those of the file."""

    config: ModelConfig
    weights: Weights
    group: Group
    heads: HeadShard
    index: int = 0  # of the layer
    prefix: str = ""
    norms_add_one: bool = False  # to their weights

    def norm(self, name: str, features: int | None = None) -> RMSNorm:
        """features: of one row, the hidden size unless told."""
        size = self.config.hidden_size if features is None else features
        weight = self.weights.take(f"{self.prefix}{name}.weight", size)
        return RMSNorm(1.0 + weight.float() if self.norms_add_one else weight, self.config.norm_eps)

    def head_norms(self, q_name: str, k_name: str) -> HeadNorms:
        return HeadNorms(*(self.norm(name, self.config.head_dim) for name in (q_name, k_name)))

    def width_norms(self, q_name: str, k_name: str) -> WidthNorms | GatheringWidthNorms:
        config, heads = self.config, self.heads
        features = {q_name: config.num_heads * config.head_dim, k_name: config.num_kv_heads * config.head_dim}

        if gathers(self.group):
            q, k = (self.norm(name, features[name]) for name in (q_name, k_name))
            return GatheringWidthNorms(q, k, heads, self._heads_of_all(), self.group)

        def part(name: str, own: slice) -> RMSNorm:
            rows = slice(own.start * config.head_dim, own.stop * config.head_dim)
            return RMSNorm(self.weights.take(f"{self.prefix}{name}.weight", features[name], rows=rows), config.norm_eps)

        q, k = part(q_name, heads.query), part(k_name, heads.kv)
        return WidthNorms(q, k, *features.values(), adds_keys=heads.is_first, group=self.group)

    def qkv(self, name: str, *, bias: bool, fused: bool = False) -> QkvLinear:
        config = self.config
        return QkvLinear.load(
            self.weights,
            self.prefix + name,
            config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            heads=self.heads,
            bias=bias,
            fused=fused,
        )

    def _heads_of_all(self) -> list[HeadShard]:
        config, shards = self.config, self.group.shard.all
        return [HeadShard.of(one, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads) for one in shards]

    def output(self, name: str, *, bias: bool) -> RowParallelLinear | GatheringLinear:
        """From attention heads back to hidden states."""
        dim = self.config.head_dim
        parts = [slice(one.query.start * dim, one.query.stop * dim) for one in self._heads_of_all()]
        return self._row_parallel(name, self.config.num_heads * dim, parts, bias=bias, group=self.group)

    def mamba2(self, name: str) -> Mamba2:
        config, shards = self.config, self.group.shard.all
        assert config.state_space is not None, "of this layer the configuration says what it is"
        if len(shards) > config.num_kv_heads:
            raise ModelError(
                f"{config.num_kv_heads} KV heads, with which states go, cannot be spread over {len(shards)} shards; "
                "take fewer"
            )
        each = config.state_space.num_heads // config.num_kv_heads
        heads = [slice(one.kv.start * each, one.kv.stop * each) for one in self._heads_of_all()]
        return Mamba2.load(
            self.weights,
            self.prefix + name,
            config.hidden_size,
            config.state_space,
            own_heads=heads[self.group.shard.rank],
            heads_per_kv=each,
            heads_of_all=heads,
            norm_eps=config.norm_eps,
            group=self.group,
        )

    def residual_scale(self) -> Scale | None:
        """Of what is added to the hidden states."""
        factor = self.config.residual_scale
        return Scale(factor) if factor is not None else None

    def mlp(
        self,
        name: str,
        *,
        bias: bool,
        kinds: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        activation: Activation = silu_and_mul,
    ) -> GatedMlp:
        """kinds: names of gate, up and down; gate and up have the same where the file has one tensor."""
        inner, hidden = self.config.intermediate_size, self.config.hidden_size
        shard = self.group.mlp.shard
        part, parts = shard.part(inner), [one.part(inner) for one in shard.all]
        return GatedMlp(
            GateUpLinear.load(self.weights, self.prefix + name, inner, hidden, part=part, bias=bias, kinds=kinds[:2]),
            self._row_parallel(f"{name}.{kinds[2]}", inner, parts, bias=bias, group=self.group.mlp),
            activation,
        )

    def experts(self, name: str, *, kinds: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> Experts:
        """kinds: names of gate, up and down in an expert."""
        sizes, hidden, prefix = self.config.experts, self.config.hidden_size, self.prefix + name
        assert sizes is not None, "of this architecture the configuration says what its experts are"
        inner, group = sizes.intermediate_size, self.group.mlp
        return Experts(
            router=self.weights.take(f"{prefix}.gate.weight", sizes.num_experts, hidden),
            experts=tuple(
                Expert.load(self.weights, f"{prefix}.experts.{index}", hidden, inner, group=group, kinds=kinds)
                for index in range(sizes.num_experts)
            ),
            per_token=sizes.per_token,
            shares_sum_to_one=sizes.shares_sum_to_one,
            group=group,
        )

    def _row_parallel(
        self, name: str, inputs: int, parts: Sequence[slice], *, bias: bool, group: MlpGroup
    ) -> RowParallelLinear | GatheringLinear:
        return RowParallelLinear.load(
            self.weights,
            self.prefix + name,
            self.config.hidden_size,
            inputs,
            parts=parts,
            bias=bias,
            group=group,
        )


def build_decoder(
    config: ModelConfig,
    weights: Weights,
    group: Group,
    stage: Shard,
    block: Callable[[Loader], DecoderLayer | StateSpaceLayer],
    *,
    norms_add_one: bool = False,
    embedding_scale: float = 1.0,
) -> Decoder:
    """block: makes one from the tensors of its layer.

    Raises ModelError as `Build` says.
    """
    own_layers = layers_of(stage, config.num_layers)
    elsewhere = weights.elsewhere()
    is_first, is_last = stage.rank == 0, stage.rank == stage.size - 1
    heads = HeadShard.of(group.shard, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads)
    here, there = (Loader(config, source, group, heads, norms_add_one=norms_add_one) for source in (weights, elsewhere))
    tokens = group.shard.part(config.vocab_size)
    sizes = (config.vocab_size, config.hidden_size)
    has_head = config.pooling is None
    has_embedding = is_first or (is_last and has_head and config.tied_embeddings)
    embedding = (weights if has_embedding else elsewhere).table("model.embed_tokens", *sizes, rows=tokens)
    head = embedding
    if has_head and not config.tied_embeddings:
        head = (weights if is_last else elsewhere).table("lm_head", *sizes, rows=tokens)
    blocks = [
        block(replace(here if index in own_layers else there, index=index, prefix=f"model.layers.{index}."))
        for index in range(config.num_layers)
    ]
    return Decoder(
        embedding=VocabParallelEmbedding(embedding, weights.dtype, tokens.start, group, embedding_scale),
        rotary=_rotary_tables(config, own_layers, weights),
        blocks=tuple(blocks[own_layers.start : own_layers.stop]),
        norm=(here if is_last else there).norm("model.norm"),
        head=VocabParallelHead((weights if is_last else elsewhere).packed(head), config.vocab_size, group)
        if has_head
        else None,
        logit_cap=config.logit_cap,
        logit_divisor=config.logit_divisor,
    )


def _rotary_tables(config: ModelConfig, layers: range, weights: Weights) -> tuple[RotaryTable | None, ...]:
    if config.turns_nothing:
        return (None,) * len(layers)
    made = [
        (rope, RotaryTable(rope, head_dim=config.head_dim, dtype=weights.dtype, device=weights.device))
        for rope in (config.rope, config.local_rope)
        if rope is not None
    ]
    return tuple(next(table for rope, table in made if rope == config.rope_of(layer)) for layer in layers)
