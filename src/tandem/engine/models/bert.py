"""BERT: an encoder. Positions are embeddings, norms stand behind what is added, and attention looks both ways.

With a classifier on top it is a cross-encoder: two texts in one prompt, told apart by the types of their tokens, and
one number that says how well they fit.
"""

from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn import functional

from tandem.engine.attention.base import AttentionBackend
from tandem.engine.batch import Batch
from tandem.engine.layers.linear import ColumnParallelLinear, GatheringLinear, QkvLinear, RowParallelLinear
from tandem.engine.layers.norm import LayerNorm
from tandem.engine.layers.vocabulary import VocabParallelEmbedding
from tandem.engine.layers.weights import Weights
from tandem.engine.model_config import ModelConfig
from tandem.engine.models.base import Step
from tandem.engine.parallel import Group, HeadShard, MlpGroup, Shard, layers_of


@dataclass(frozen=True, slots=True)
class Embeddings:
    words: VocabParallelEmbedding
    positions: Tensor  # [max positions, hidden]
    types: Tensor  # [types, hidden]
    norm: LayerNorm

    def __call__(self, batch: Batch) -> Tensor:
        """[n, hidden]"""
        types = self.types[0] if batch.token_types is None else functional.embedding(batch.token_types, self.types)
        return self.norm(self.words(batch.token_ids) + types + functional.embedding(batch.positions, self.positions))


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    qkv: QkvLinear
    o_proj: RowParallelLinear | GatheringLinear
    after_attention: LayerNorm
    up: ColumnParallelLinear
    down: RowParallelLinear | GatheringLinear
    after_mlp: LayerNorm
    approximates_gelu: str

    def __call__(self, x: Tensor, attention: AttentionBackend, *, layer: int) -> Tensor:
        """[n, hidden] to [n, hidden]"""
        attended = attention.forward(*self.qkv(x), layer=layer)
        x = self.after_attention(x + self.o_proj(attended.flatten(1)))
        return self.after_mlp(x + self.mlp(x))

    def mlp(self, x: Tensor) -> Tensor:
        """[n, hidden] to [n, hidden]"""
        inner = functional.gelu(self.up(self.down.group.rows(x)), approximate=self.approximates_gelu)
        return self.down(inner)


@dataclass(frozen=True, slots=True)
class Classifier:
    """Of the first token's state. Every shard of the last stage has all of it."""

    dense: Tensor  # [hidden, hidden]
    dense_bias: Tensor
    weight: Tensor  # [1, hidden]
    bias: Tensor
    is_sigmoid: bool

    def __call__(self, state: Tensor) -> Tensor:
        """[hidden] fp32 to a scalar"""
        summary = functional.linear(state, self.dense.float(), self.dense_bias.float()).tanh()
        score = functional.linear(summary, self.weight.float(), self.bias.float())[0]
        return score.sigmoid() if self.is_sigmoid else score


@dataclass(frozen=True, slots=True)
class Encoder:
    """A `Model`. On a stage that is not the first, or not the last, embeddings, or the classifier, are empty."""

    embeddings: Embeddings
    blocks: tuple[EncoderLayer, ...]
    classifier: Classifier | None

    def forward(self, step: Step, hidden: Tensor | None = None) -> Tensor:
        x = self.embeddings(step.batch) if hidden is None else hidden
        for layer, block in enumerate(self.blocks):
            x = block(x, step.attention, layer=layer)
        return x

    def accompany(self) -> None:
        no_rows = self.embeddings.positions.new_empty(0, self.embeddings.positions.shape[1])
        for block in self.blocks:
            block.mlp(no_rows)

    def logits(self, batch: Batch, hidden: Tensor) -> Tensor:
        raise AssertionError("an encoder has no next token")

    def states(self, batch: Batch, hidden: Tensor) -> Tensor:
        return hidden.index_select(0, batch.sampled)

    def score(self, state: Tensor) -> Tensor:
        assert self.classifier is not None, "only a cross-encoder scores"
        return self.classifier(state)

    def first_layers(self, count: int) -> "Encoder":
        return replace(self, blocks=self.blocks[:count])

    def product_shapes(self) -> list[tuple[int, int]]:
        return [
            (linear.weight.shape[0], linear.weight.shape[1])
            for block in self.blocks
            for linear in (block.qkv.q_proj, block.qkv.k_proj, block.qkv.v_proj, block.o_proj, block.up, block.down)
        ]


def build(config: ModelConfig, weights: Weights, group: Group, stage: Shard) -> Encoder:
    own_layers = layers_of(stage, config.num_layers)
    elsewhere = weights.elsewhere()
    heads = HeadShard.of(group.shard, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads)
    blocks = [
        block(config, weights if index in own_layers else elsewhere, group, heads, f"bert.encoder.layer.{index}.")
        for index in range(config.num_layers)
    ]
    return Encoder(
        embeddings(config, weights if stage.rank == 0 else elsewhere, group),
        tuple(blocks[own_layers.start : own_layers.stop]),
        classifier(config, weights if stage.rank == stage.size - 1 else elsewhere),
    )


def embeddings(config: ModelConfig, weights: Weights, group: Group) -> Embeddings:
    assert config.encoder is not None
    prefix, hidden = "bert.embeddings.", config.hidden_size
    words = group.shard.part(config.vocab_size)
    table = weights.take(f"{prefix}word_embeddings.weight", config.vocab_size, hidden, rows=words)
    return Embeddings(
        words=VocabParallelEmbedding(table, table.dtype, words.start, group),
        positions=weights.take(f"{prefix}position_embeddings.weight", config.max_context, hidden),
        types=weights.take(f"{prefix}token_type_embeddings.weight", config.encoder.type_vocab_size, hidden),
        norm=norm(config, weights, f"{prefix}LayerNorm"),
    )


def block(config: ModelConfig, weights: Weights, group: Group, heads: HeadShard, prefix: str) -> EncoderLayer:
    assert config.encoder is not None
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    shards = group.shard.all
    found = [HeadShard.of(one, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads) for one in shards]
    all_heads = [slice(one.query.start * dim, one.query.stop * dim) for one in found]
    all_inner = [one.part(inner) for one in group.mlp.shard.all]
    own_heads, own_inner = slice(heads.query.start * dim, heads.query.stop * dim), all_inner[group.mlp.shard.rank]

    def column(name: str, outputs: int, part: slice) -> ColumnParallelLinear:
        return ColumnParallelLinear.load(weights, prefix + name, outputs, hidden, part=part, bias=True)

    def row(name: str, inputs: int, parts: list[slice], group: MlpGroup) -> RowParallelLinear | GatheringLinear:
        return RowParallelLinear.load(weights, prefix + name, hidden, inputs, parts=parts, bias=True, group=group)

    q, k, v = (column(f"attention.self.{name}", hidden, own_heads) for name in ("query", "key", "value"))
    return EncoderLayer(
        qkv=QkvLinear(q, k, v, dim),
        o_proj=row("attention.output.dense", hidden, all_heads, group),
        after_attention=norm(config, weights, f"{prefix}attention.output.LayerNorm"),
        up=column("intermediate.dense", inner, own_inner),
        down=row("output.dense", inner, all_inner, group.mlp),
        after_mlp=norm(config, weights, f"{prefix}output.LayerNorm"),
        approximates_gelu=config.encoder.approximates_gelu,
    )


def classifier(config: ModelConfig, weights: Weights) -> Classifier | None:
    assert config.encoder is not None
    if not config.encoder.scores:
        return None
    hidden = config.hidden_size
    return Classifier(
        dense=weights.take("bert.pooler.dense.weight", hidden, hidden),
        dense_bias=weights.take("bert.pooler.dense.bias", hidden),
        weight=weights.take("classifier.weight", 1, hidden),
        bias=weights.take("classifier.bias", 1),
        is_sigmoid=config.encoder.score_is_sigmoid,
    )


def norm(config: ModelConfig, weights: Weights, name: str) -> LayerNorm:
    sizes = config.hidden_size
    return LayerNorm(weights.take(f"{name}.weight", sizes), weights.take(f"{name}.bias", sizes), config.norm_eps)
