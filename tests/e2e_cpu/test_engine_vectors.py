"""Requests that end with their prompt: the engine against transformers, on tiny random checkpoints."""

import json
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_world import ROOT, prompt_of
from shard_group import ThreadGroup, ThreadRanks, on_every_shard
from tiny_models import (
    make_bert,
    make_cross_encoder,
    make_gemma3,
    make_llama,
    make_qwen3,
    reference_states,
    write_pooling,
)
from torch import Tensor
from transformers import PreTrainedModel

from tandem.core.batch import BatchKind, BatchOutcome, BatchPlan, Row
from tandem.core.values import BatchId, PageId, RequestId, ceil_div
from tandem.engine.engine import Engine
from tandem.engine.model_config import ModelError, read_config
from tandem.engine.parallel import Group, OneShard
from tandem.engine.weights import load
from tandem.sampling import Payload, SamplingParams, VectorParams

PAGE = 16
LENGTHS = (1, 2, 15, 16, 17, 33, 70, 128)
Maker = Callable[[Path], PreTrainedModel]


class VectorWorld:
    """One engine that is asked for vectors; every request has pages of its own."""

    def __init__(self, model_dir: Path, *, group: Group | None = None, **options: object) -> None:
        torch.set_num_threads(1)
        loaded = load(model_dir, group=group, is_embedding=True)
        self.engine = Engine(loaded, page_size=PAGE, num_pages=256, **options)  # type: ignore[arg-type]  # of several types
        self.engine.kv.tensor.fill_(float("nan"))
        self.num_pages = 0
        self.pages: dict[int, tuple[PageId, ...]] = {}
        self.iteration = 0

    def add(self, tokens: Sequence[int], **wants: int) -> int:
        request, count = len(self.pages), ceil_div(len(tokens), PAGE)
        self.pages[request] = tuple(map(PageId, range(self.num_pages, self.num_pages + count)))
        self.num_pages += count
        params = VectorParams(**wants)
        self.engine.add(Payload(request, array("i", tokens).tobytes(), SamplingParams(), ROOT, params))
        return request

    def run(self, *spans: tuple[int, int, int, bool]) -> BatchOutcome:
        """spans: (request, start, stop, whether it ends there)."""
        self.iteration += 1
        rows = tuple(
            Row(RequestId(request), start, stop, 0, self.pages[request], samples=False, pools=ends)
            for request, start, stop, ends in spans
        )
        return self.engine.run(BatchPlan(BatchId(self.iteration), self.iteration, BatchKind.PREFILL, rows))

    def vectors(self, prompts: Sequence[Sequence[int]], **wants: int) -> list[Tensor]:
        """Of all of them, in one batch."""
        requests = [self.add(prompt, **wants) for prompt in prompts]
        outcome = self.run(*((r, 0, len(p), True) for r, p in zip(requests, prompts, strict=True)))
        assert outcome.tokens == outcome.flags == b""
        found = dict(outcome.vectors)
        return [vector_of(found[RequestId(request)]) for request in requests]


def vector_of(raw: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(raw, "<f4").copy())


def normalised(vector: Tensor) -> Tensor:
    return torch.nn.functional.normalize(vector, dim=-1)


POOLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "cls_token": lambda states: states[0],
    "mean_tokens": lambda states: states.mean(dim=0),
    "lasttoken": lambda states: states[-1],
}


@pytest.mark.parametrize("pooling", POOLINGS)
def test_an_encoders_vectors_are_those_of_transformers_at_any_lengths_in_one_batch(
    tmp_path: Path, pooling: str
) -> None:
    theirs = make_bert(tmp_path, pooling=pooling)
    prompts = [prompt_of(length) for length in LENGTHS]

    ours = VectorWorld(tmp_path).vectors(prompts)

    for prompt, vector in zip(prompts, ours, strict=True):
        expected = normalised(POOLINGS[pooling](reference_states(theirs, prompt)))
        torch.testing.assert_close(vector, expected, rtol=0, atol=1e-3)


def test_an_encoder_takes_its_first_token_where_nothing_says_how_it_pools(tmp_path: Path) -> None:
    theirs = make_bert(tmp_path, hidden_act="gelu_new")

    (vector,) = VectorWorld(tmp_path).vectors([prompt_of(40)])

    torch.testing.assert_close(vector, normalised(reference_states(theirs, prompt_of(40))[0]), rtol=0, atol=1e-3)


DECODERS: dict[str, Maker] = {
    "qwen3": lambda where: make_qwen3(where),
    "qwen3_untied": lambda where: make_qwen3(where, tie_word_embeddings=False),
    "llama": lambda where: make_llama(where),
    "gemma3": lambda where: make_gemma3(where),
}


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoders_vectors_are_the_last_tokens_states_however_a_prompt_is_cut(
    tmp_path: Path, name: str, deterministic: bool
) -> None:
    theirs = DECODERS[name](tmp_path).model
    world = VectorWorld(tmp_path, deterministic=deterministic)
    prompts = [prompt_of(length) for length in LENGTHS]

    ours = world.vectors(prompts)
    whole = world.add(prompts[-1])
    first = world.run((whole, 0, 48, False), (world.add(prompts[2]), 0, LENGTHS[2], True))
    second = world.run((whole, 48, LENGTHS[-1], True))

    for prompt, vector in zip(prompts, ours, strict=True):
        expected = normalised(reference_states(theirs, prompt)[-1])
        torch.testing.assert_close(vector, expected, rtol=0, atol=1e-3)
    assert len(first.vectors) == len(second.vectors) == 1
    torch.testing.assert_close(vector_of(second.vectors[0][1]), ours[-1], rtol=0, atol=1e-5)


def test_a_checkpoint_of_bare_layers_makes_vectors(tmp_path: Path) -> None:
    """As Qwen3-Embedding is published: no head, and names without their prefix."""
    full = make_qwen3(tmp_path / "full")
    full.model.save_pretrained(tmp_path / "bare")
    assert json.loads((tmp_path / "bare" / "config.json").read_text())["architectures"] == ["Qwen3Model"]

    (vector,) = VectorWorld(tmp_path / "bare").vectors([prompt_of(33)])

    expected = normalised(reference_states(full.model, prompt_of(33))[-1])
    torch.testing.assert_close(vector, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("maker", [make_bert, make_qwen3], ids=["encoder", "decoder"])
def test_the_first_dimensions_are_taken_before_the_length_becomes_one(tmp_path: Path, maker: Maker) -> None:
    maker(tmp_path)
    world = VectorWorld(tmp_path)

    (whole,) = world.vectors([prompt_of(20)])
    (part,) = world.vectors([prompt_of(20)], dimensions=7)

    assert part.shape == (7,)
    torch.testing.assert_close(part, normalised(whole[:7]))


@pytest.mark.parametrize("activation", ["", "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Sigmoid"])
def test_a_cross_encoders_scores_are_those_of_transformers(tmp_path: Path, activation: str) -> None:
    theirs = make_cross_encoder(tmp_path, activation=activation)
    world = VectorWorld(tmp_path)
    prompts = [(prompt_of(length), length // 3) for length in (5, 17, 70, 128)]

    requests = [world.add(prompt, second_from=second) for prompt, second in prompts]
    alone = world.add(prompts[0][0])  # one text: no token is of the second type
    outcome = world.run(
        *((r, 0, len(p), True) for r, (p, _) in zip(requests, prompts, strict=True)),
        (alone, 0, len(prompts[0][0]), True),
    )

    found = {request: vector_of(raw) for request, raw in outcome.vectors}
    for request, (prompt, second) in zip([*requests, alone], [*prompts, (prompts[0][0], 999)], strict=True):
        types = [int(position >= second) for position in range(len(prompt))]
        with torch.inference_mode():
            logit = theirs(torch.tensor([prompt]), token_type_ids=torch.tensor([types])).logits[0]
        expected = logit if "Identity" in activation else logit.sigmoid()
        torch.testing.assert_close(found[request], expected, rtol=0, atol=1e-3)
    assert found[requests[0]] != found[alone]


@pytest.mark.parametrize("shards", [2, 3])
@pytest.mark.parametrize("maker", [make_bert, make_cross_encoder, make_qwen3], ids=["bert", "cross", "qwen3"])
def test_shards_together_make_the_vectors_of_one(tmp_path: Path, maker: Maker, shards: int) -> None:
    maker(tmp_path)
    prompts = [prompt_of(length) for length in (3, 40)]

    whole = VectorWorld(tmp_path).vectors(prompts)
    parts = on_every_shard(shards, lambda group: VectorWorld(tmp_path, group=group).vectors(prompts))

    for found in parts:
        for vector, expected in zip(found, whole, strict=True):
            torch.testing.assert_close(vector, expected, rtol=0, atol=1e-4)


def test_what_is_not_finite_is_no_vector_and_spoils_no_other(tmp_path: Path) -> None:
    make_bert(tmp_path)
    world = VectorWorld(tmp_path)
    world.engine.model.module.embeddings.positions[30] = float("nan")  # type: ignore[attr-defined]

    requests = [world.add(prompt_of(length)) for length in (20, 40)]
    outcome = world.run((requests[0], 0, 20, True), (requests[1], 0, 40, True))

    assert [request for request, _ in outcome.vectors] == requests[:1]


# --- refusals --------------------------------------------------------------------------------------------------------


def test_poolings_that_are_not_computed_are_refused(tmp_path: Path) -> None:
    make_qwen3(tmp_path / "decoder")
    write_pooling(tmp_path / "decoder", "mean_tokens")
    with pytest.raises(ModelError, match="only the last token's state"):
        read_config(tmp_path / "decoder", is_embedding=True)
    read_config(tmp_path / "decoder")  # who generates does not pool

    make_bert(tmp_path / "weighted", pooling="weightedmean_tokens")
    with pytest.raises(ModelError, match="weightedmean_tokens"):
        read_config(tmp_path / "weighted")

    make_bert(tmp_path / "dense")
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": ""} for kind in ("Transformer", "Dense")]
    (tmp_path / "dense" / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelError, match="'Dense'"):
        read_config(tmp_path / "dense")


def test_a_classifier_of_several_labels_is_refused(tmp_path: Path) -> None:
    make_cross_encoder(tmp_path, num_labels=3)

    with pytest.raises(ModelError, match="3 labels"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"is_decoder": True}, "is_decoder"),
    ],
)
def test_an_encoder_that_would_compute_otherwise_is_refused(
    tmp_path: Path, change: dict[str, object], complaint: str
) -> None:
    make_bert(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))

    with pytest.raises(ModelError, match=complaint):
        read_config(tmp_path)


def test_encoders_have_no_native_attention_and_promise_no_bits(tmp_path: Path) -> None:
    make_bert(tmp_path)
    with pytest.raises(ModelError, match="looks back only"):
        VectorWorld(tmp_path, attention="native")
    with pytest.raises(ModelError, match="--deterministic"):
        VectorWorld(tmp_path, deterministic=True)


@pytest.mark.parametrize("maker", [make_bert, make_qwen3], ids=["encoder", "decoder"])
def test_ranks_that_share_their_mlps_say_what_one_engine_says(tmp_path: Path, maker: Maker) -> None:
    """DP attention: the first has two batches, the second has one, and nothing in the step after it."""
    maker(tmp_path)
    prompts = [prompt_of(length) for length in (5, 40, 33, 17)]

    def run(group: ThreadGroup) -> list[Tensor]:
        ranks = ThreadRanks(group)
        world = VectorWorld(tmp_path, group=OneShard(shared=ranks), ranks=ranks)
        if group.shard.rank == 0:
            return [*world.vectors(prompts[:2]), *world.vectors(prompts[2:3])]
        found = world.vectors(prompts[3:])
        world.engine.accompany()
        return found

    parts = on_every_shard(2, run)

    expected = VectorWorld(tmp_path).vectors(prompts)
    for ours, theirs in zip([*parts[0], *parts[1]], expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
