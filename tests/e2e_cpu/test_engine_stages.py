"""Engines of several pipeline stages and shards run the plans of one engine and sample its tokens, once.

All workers are threads of one process.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any  # keyword arguments

import pytest
import torch
from engine_world import EngineWorld, prompt_of
from shard_group import ThreadGroup, ThreadPipeline, on_every_worker
from tiny_models import (
    make_gemma2,
    make_gemma3,
    make_granite,
    make_llama,
    make_mistral,
    make_mixtral,
    make_olmo2,
    make_phi3,
    make_qwen2,
    make_qwen3,
    make_qwen3_moe,
)
from torch import Tensor

from tandem.core.batch import BatchOutcome, BatchPlan
from tandem.core.kv_parts import KvGrid, box_of
from tandem.core.values import Cut, ShardId
from tandem.engine.engine import Engine
from tandem.engine.model_config import ModelError
from tandem.engine.parallel import OneStage, Shard
from tandem.engine.weights import load
from tandem.sampling import Payload

NUM_PAGES = 64
SAMPLING = {"temperature": 0.9, "top_k": 20, "seed": 5, "repetition_penalty": 1.2, "logprobs": True}
Story = list[Payload | BatchPlan | tuple[int, ...]]  # what the engine is told, in order
Told = tuple[Story, list[BatchOutcome]]


class Listener:
    """Stands where the engine stands, and keeps what it is told and says."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.kv = engine, engine.kv
        self.story: Story = []
        self.outcomes: list[BatchOutcome] = []

    def add(self, payload: Payload) -> None:
        self.story.append(payload)
        self.engine.add(payload)

    def forget(self, requests: list[int]) -> None:
        self.story.append(tuple(requests))
        self.engine.forget(requests)

    def run(self, plan: BatchPlan) -> BatchOutcome:
        self.story.append(plan)
        self.outcomes.append(self.engine.run(plan))
        return self.outcomes[-1]


def listening_to(world: EngineWorld) -> Listener:
    """From now on everything that the world asks of its engine is heard."""
    listener = Listener(world.engine)
    world.engine = listener  # type: ignore[assignment]  # it has all that is asked of it
    return listener


def told_by_one_with_scores(where: Path, prompt: list[int]) -> tuple[int, Story]:
    """A prompt in chunks of which log-probabilities are wanted, beside one that decodes."""
    world = EngineWorld(where, num_pages=NUM_PAGES)
    listener = listening_to(world)
    other = world.add(prompt_of(9))
    request = world.add(prompt, prompt_logprobs_from=0, prompt_top_logprobs=2)
    world.prefill(other)
    world.run((request, 0, 40), decodes=True, join=[other])
    world.run((request, 40, 80))
    world.run((request, 80, len(prompt)), decodes=True)
    world.finish(request)
    return request, listener.story


def told_by_one(where: Path, **options: Any) -> Told:
    """Prompts in chunks, two of them in one batch, decoding beside prompts, a retraction, a request that is forgotten
    right after its token, and one that draws with penalties."""
    world = EngineWorld(where, num_pages=NUM_PAGES, **options)
    listener = listening_to(world)
    first, second, third = world.add(prompt_of(50)), world.add(prompt_of(9)), world.add(prompt_of(33), **SAMPLING)
    world.run((first, 0, 20))
    world.run((first, 20, 50), (second, 0, 9))
    world.run((third, 0, 16))
    world.run((third, 16, 33))
    world.run(decodes=True, join=[first, second])
    fourth = world.add(prompt_of(12))
    world.run((fourth, 0, 12), decodes=True, join=[third])
    world.finish(fourth)
    world.decode(2)
    world.retract(second)
    world.decode(1)
    world.prefill(second, chunk=8)
    world.run(decodes=True, join=[second])
    world.decode(8)
    world.finish(first)
    world.decode(2)
    return listener.story, listener.outcomes


def engine_of(where: Path, group: ThreadGroup, pipeline: ThreadPipeline) -> Engine:
    model = load(where, group=group, stage=pipeline.stage)
    return Engine(model, page_size=16, num_pages=NUM_PAGES, pipeline=pipeline)


def run_story(where: Path, story: Story, group: ThreadGroup, pipeline: ThreadPipeline) -> list[BatchOutcome]:
    engine = engine_of(where, group, pipeline)
    outcomes = outcomes_of(engine, story)
    engine.close()
    return outcomes


def outcomes_of(engine: Engine, story: Story) -> list[BatchOutcome]:
    outcomes = []
    for item in story:
        match item:
            case Payload():
                engine.add(item)
            case BatchPlan():
                outcomes.append(engine.run(item))
            case _:
                engine.forget(item)
    return outcomes


FAMILIES: dict[str, Callable[[Path], object]] = {
    "llama": lambda where: make_llama(where, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4),
    "mistral": lambda where: make_mistral(where, num_hidden_layers=5, sliding_window=24),
    "qwen2_untied": lambda where: make_qwen2(where, num_hidden_layers=4, tie_word_embeddings=False),
    "qwen3": lambda where: make_qwen3(where, num_hidden_layers=6),
    "qwen3_moe": lambda where: make_qwen3_moe(where, num_hidden_layers=4, decoder_sparse_step=2),
    "phi3": lambda where: make_phi3(where, num_hidden_layers=4),
    "olmo2": lambda where: make_olmo2(where, num_hidden_layers=4),
    "gemma2": lambda where: make_gemma2(where, num_hidden_layers=4),
    "gemma3": lambda where: make_gemma3(where, num_hidden_layers=7, layer_types=None),
    "mixtral": lambda where: make_mixtral(where, num_hidden_layers=4),
    "granite_hybrid": lambda where: make_granite(
        where,
        layer_types=["mamba"] * 3 + ["attention"] * 2 + ["mamba"],
        num_hidden_layers=6,
        num_key_value_heads=6,
        mamba_n_heads=12,
    ),
}


@pytest.mark.parametrize(("tp_size", "pp_size"), [(1, 2), (1, 4), (2, 2), (3, 3), (2, 1)])
@pytest.mark.parametrize("family", FAMILIES)
def test_workers_together_sample_once_what_one_engine_samples(
    tmp_path: Path, family: str, tp_size: int, pp_size: int
) -> None:
    FAMILIES[family](tmp_path)
    story, expected = told_by_one(tmp_path)

    workers = on_every_worker(
        tp_size, pp_size, lambda group, pipeline: (pipeline.samples, run_story(tmp_path, story, group, pipeline))
    )

    for samples, outcomes in workers:
        assert [o.iteration for o in outcomes] == [o.iteration for o in expected]
        if samples:
            assert [(o.tokens, o.flags, o.hashes) for o in outcomes] == [
                (o.tokens, o.flags, o.hashes) for o in expected
            ]
            assert [[request for request, _ in o.extras] for o in outcomes] == [
                [request for request, _ in o.extras] for o in expected
            ]
        else:
            assert {(o.tokens, o.flags, o.hashes, o.extras) for o in outcomes} == {(b"", b"", (), ())}
    assert [samples for samples, _ in workers].index(True) == tp_size * (pp_size - 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "qwen3_moe"])
def test_ranks_that_share_out_prompts_keep_the_bits_of_one_engine_and_all_hold_its_kv(
    tmp_path: Path, family: str, size: int, dtype: str
) -> None:
    """With --deterministic a row's bits depend on its own tokens only, so also not on who computes it."""
    FAMILIES[family](tmp_path)
    story, expected = told_by_one(tmp_path, deterministic=True, dtype=dtype)
    alone = run_deterministic(tmp_path, dtype, story)

    ranks = on_every_worker(
        1,
        1,
        lambda _, pipeline: (
            *run_deterministic(tmp_path, dtype, story, pipeline=pipeline, context=pipeline.context),
            pipeline.context.group.num_exchanged,
        ),
        cp_size=size,
    )

    assert [(o.tokens, o.extras) for o in ranks[0][0]] == [(o.tokens, o.extras) for o in expected]
    for _, kv, num_exchanged in ranks:
        assert torch.equal(kv, alone[1])
        assert num_exchanged > 0


@pytest.mark.parametrize(
    ("tp_size", "pp_size", "cp_size", "attention"),
    [(2, 1, 1, "native"), (3, 1, 1, "torch_native"), (1, 2, 1, "torch_native"), (2, 2, 2, "native")],
)
@pytest.mark.parametrize("family", ["llama", "olmo2", "mixtral"])
def test_deterministic_workers_keep_the_bits_of_one_engine(
    tmp_path: Path, family: str, tp_size: int, pp_size: int, cp_size: int, attention: str
) -> None:
    """However the model is cut: no sum is."""
    FAMILIES[family](tmp_path)
    story, expected = told_by_one(tmp_path, deterministic=True)
    alone = run_deterministic(tmp_path, "float32", story, attention=attention)

    def program(group: ThreadGroup, pipeline: ThreadPipeline) -> tuple[list[BatchOutcome], Tensor]:
        group.is_exact = True
        options = {"pipeline": pipeline, "context": pipeline.context, "attention": attention}
        return run_deterministic(tmp_path, "float32", story, group=group, **options)

    workers = on_every_worker(tp_size, pp_size, program, cp_size=cp_size)

    sampled = [outcomes for outcomes, _ in workers if any(outcome.tokens for outcome in outcomes)]
    assert [[(o.tokens, o.extras) for o in outcomes] for outcomes in sampled] == [
        [(o.tokens, o.extras) for o in alone[0]]
    ]
    grid = KvGrid(alone[1].shape[2], alone[1].shape[1])
    for shard, (_, kv) in enumerate(workers):
        box = box_of(grid, Cut(tp_size, pp_size, cp_size), ShardId(shard))
        own = alone[1][:, box.heads.start : box.heads.stop, box.layers.start : box.layers.stop]
        assert torch.equal(kv, own)
    if attention == "native":
        assert [(o.tokens, o.extras) for o in alone[0]] == [(o.tokens, o.extras) for o in expected]


def run_deterministic(
    where: Path, dtype: str, story: Story, *, group: ThreadGroup | None = None, **options: Any
) -> tuple[list[BatchOutcome], Tensor]:
    """And the bytes of the KV that it leaves."""
    pipeline = options.get("pipeline", OneStage())
    model = load(where, dtype=dtype, group=group, stage=pipeline.stage)
    engine = Engine(model, page_size=16, num_pages=NUM_PAGES, deterministic=True, **options)
    outcomes = outcomes_of(engine, story)
    kv = engine.kv.tensor.view(torch.uint8).clone()
    engine.close()
    return outcomes, kv


@pytest.mark.parametrize("attention", ["native", "torch_native"])
def test_ranks_that_share_out_prompts_all_hold_the_kv_of_8_bits_of_one_engine(tmp_path: Path, attention: str) -> None:
    FAMILIES["llama"](tmp_path)
    story, _ = told_by_one(tmp_path, kv_is_int8=True)
    alone = run_with_int8_kv(tmp_path, story, attention=attention)

    ranks = on_every_worker(
        1,
        1,
        lambda _, pipeline: run_with_int8_kv(
            tmp_path, story, attention=attention, pipeline=pipeline, context=pipeline.context
        ),
        cp_size=2,
    )

    assert [o.tokens for o in ranks[0][0]] == [o.tokens for o in alone[0]]
    assert torch.equal(ranks[0][1], ranks[1][1])
    parted = (ranks[0][1] != alone[1]).float().mean()
    assert parted < 0.01, "products of other batches may move a code by a step"


def run_with_int8_kv(where: Path, story: Story, **options: Any) -> tuple[list[BatchOutcome], Tensor]:
    """And the codes that it leaves."""
    engine = Engine(load(where, kv_is_int8=True), page_size=16, num_pages=NUM_PAGES, **options)
    outcomes = outcomes_of(engine, story)
    codes = engine.kv.tensor[..., : engine.kv.head_dim].clone()
    engine.close()
    return outcomes, codes


def test_prompts_of_others_begin_before_the_token_of_a_prompt_is_back(tmp_path: Path) -> None:
    """The first stage asks for nobody's token until a batch needs it: then for all, in order."""
    make_llama(tmp_path)
    world = EngineWorld(tmp_path, num_pages=NUM_PAGES)
    listener = listening_to(world)
    requests = [world.add(prompt_of(20, seed=seed)) for seed in range(3)]
    for request in requests:
        world.prefill(request, chunk=16)
    before_join = len(listener.outcomes)
    world.run(decodes=True, join=requests)

    def taken(group: ThreadGroup, pipeline: ThreadPipeline) -> list[int]:
        engine = engine_of(tmp_path, group, pipeline)
        counts = []
        for item in listener.story:
            if isinstance(item, Payload):
                engine.add(item)
            elif isinstance(item, BatchPlan):
                engine.run(item)
                counts.append(pipeline.num_received)
        return counts

    first_stage, last_stage = on_every_worker(1, 2, taken)

    assert first_stage == [0] * before_join + [3]
    assert last_stage == [0] * (before_join + 1), "who samples asks nobody"


@pytest.mark.parametrize("pp_size", [1, 2, 3, 4])
def test_stages_hold_all_layers_once_and_only_the_ends_hold_the_vocabulary(tmp_path: Path, pp_size: int) -> None:
    make_llama(tmp_path, num_hidden_layers=4, tie_word_embeddings=False)
    whole = load(tmp_path)
    stages = [load(tmp_path, stage=Shard(rank, pp_size)) for rank in range(pp_size)]

    assert sum(stage.kv_shape.num_layers for stage in stages) == 4
    assert [len(stage.module.blocks) for stage in stages] == [stage.kv_shape.num_layers for stage in stages]
    assert [stage.module.embedding.weight.numel() > 0 for stage in stages] == [True] + [False] * (pp_size - 1)
    assert [stage.module.head.weight.numel() > 0 for stage in stages] == [False] * (pp_size - 1) + [True]
    assert all(stage.layout_fields == whole.layout_fields for stage in stages), "digests are those of the whole model"


def test_more_stages_than_layers_are_refused(tmp_path: Path) -> None:
    make_llama(tmp_path, num_hidden_layers=2)
    with pytest.raises(ModelError, match="2 layers cannot be spread over 3 pipeline stages; take fewer"):
        load(tmp_path, stage=Shard(0, 3))
