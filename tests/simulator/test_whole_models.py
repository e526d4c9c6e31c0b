"""Whole clusters of the product's engine with models that the bundled one is not."""

import json
from dataclasses import replace
from functools import partial

import msgspec
import pytest
from torch import Tensor

from tandem.core.batch import BatchOutcome, BatchPlan
from tandem.core.disagg import decode_side
from tandem.core.kv.windows import Windows
from tandem.engine.batch import Chunk
from tandem.engine.model_config import read_config
from tandem.engine.native import library
from tandem.engine.recurrent_states import NO_PAGE, RecurrentStates, StatefulChunk
from tandem.engine.row_exchange import RowExchange
from tandem.simulator.hunt import run_each
from tandem.simulator.report import SeedResult
from tandem.simulator.whole.options import DECODER, ENCODER, TORCH, Options, draw_options
from tandem.simulator.whole.random_models import BERT, GEMMA, GRANITE, LLAMA, SDAR, checkpoint
from tandem.simulator.whole.torch_engine import TimedEngine, with_torch
from tandem.simulator.whole.vectors import are_near
from tandem.simulator.whole.world import run_seed

WINDOWED, STATES, TOGETHER, BLOCKS = 10_107, 10_005, 10_130, 10_020  # pairs
VECTORS, ENCODED = 10_044, 10_034
KINDS = {WINDOWED: GEMMA, STATES: GRANITE, TOGETHER: LLAMA, BLOCKS: SDAR, VECTORS: "", ENCODED: BERT}
MORE = (
    10_118,  # windows, of two shards and two stages
    10_124,  # windows, and a prefill whose workers share out prompts
    10_249,  # windows, and ranks that step together
    10_126,  # three ranks that step together
    10_144,  # blocks, over three shards and over two stages
    10_215,  # an encoder of two stages
    10_426,  # vectors by three shards
    10_094,  # KV of 8 bits, of two shards
    10_321,  # the same of a prefill whose shards share out prompts
)
run = partial(run_seed, engine=TORCH)
pytestmark = pytest.mark.skipif(library.best() is None, reason="without native kernels rows keep no bits")


@pytest.mark.parametrize("seed", KINDS)
def test_what_comes_is_what_one_engine_says(seed: int) -> None:
    result = run(seed, watches=True)
    assert drawn(seed).model == KINDS[seed]
    assert not result.invariant, f"{result.line}: {result.detail}"
    assert result.num_finished > 5
    if drawn(seed).layout == "pairs":
        assert result.occurred["Path remote"] > 0
    assert (result.occurred.get("FreeWindows", 0) > 0) == (seed == WINDOWED)


def drawn(seed: int) -> Options:
    return with_torch(draw_options(seed))


def test_each_seed_is_of_its_kind() -> None:
    assert drawn(TOGETHER).flags["enable_dp_attention"]
    assert (drawn(VECTORS).vectors, drawn(ENCODED).vectors) == (DECODER, ENCODER)
    assert drawn(WINDOWED).flags["deterministic"]
    assert not any(drawn(seed).flags["deterministic"] for seed in (STATES, TOGETHER, BLOCKS, VECTORS, ENCODED))


def test_every_kind_of_model_is_drawn_and_none_of_the_seeds_on_record_has_one() -> None:
    found = [drawn(seed) for seed in range(10_000, 10_400)]
    assert {one.model for one in found} == {*KINDS.values()}
    assert 100 < sum(not one.model for one in found) < 300
    assert not any(drawn(seed).model for seed in range(400))
    for one in found:
        assert (one.block_tokens > 1) == (one.model == SDAR)
        assert one.model in (LLAMA, "") or "kv_cache_dtype" not in one.flags
        assert (one.window_tokens > 0) == (one.model == GEMMA)


def test_a_checkpoint_is_what_it_is_asked_for() -> None:
    windowed = read_config(checkpoint(GEMMA, window_tokens=40))
    assert [windowed.window_of(layer) for layer in range(windowed.num_layers)] == [40, None, 40, None]
    assert read_config(checkpoint(GRANITE)).attention_layers == (1, 3)
    blocks = read_config(checkpoint(SDAR, block_tokens=2)).blocks
    assert blocks is not None
    assert blocks.block_tokens == 2
    assert read_config(checkpoint(BERT)).encoder is not None
    assert json.loads((checkpoint(LLAMA) / "config.json").read_text())["model_type"] == LLAMA


def test_a_vector_is_near_another_one_only_as_far_as_rounding_goes() -> None:
    assert are_near([[0.1, 65535.0]], [[0.1 + 1e-7, 65535.0]])
    assert not are_near([[0.1, 65535.0]], [[0.1, 65534.0]])
    assert not are_near([[0.1, 0.2]], [[0.2, 0.1]])
    assert not are_near([[0.1]], [[0.1, 0.2]])
    assert not are_near([], [[0.1]])


@pytest.fixture(scope="module")
def results() -> dict[int, SeedResult]:
    return {result.seed: result for result in run_each((*MORE, *KINDS), run, are_long=True)}


@pytest.mark.slow
@pytest.mark.parametrize("seed", MORE)
def test_every_request_ends_as_promised(results: dict[int, SeedResult], seed: int) -> None:
    result = results[seed]
    assert not result.invariant, f"{result.line}: {result.detail}"
    assert result.num_finished > 0


@pytest.mark.slow
def test_another_process_has_given_the_same_bytes(results: dict[int, SeedResult]) -> None:
    assert {seed: run(seed).log_hash for seed in KINDS} == {seed: results[seed].log_hash for seed in KINDS}


# What has to be noticed, one break each


@pytest.mark.slow
def test_kv_that_is_given_back_while_a_window_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Windows, "first_seen", lambda self, position: max(0, position - 1) // self.page_size)
    assert run(WINDOWED).invariant


@pytest.mark.slow
def test_a_chunk_that_does_not_go_on_from_the_state_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk_of = RecurrentStates._chunk

    def from_the_beginning(states: RecurrentStates, chunk: Chunk) -> StatefulChunk:
        return replace(chunk_of(states, chunk), source=NO_PAGE)

    monkeypatch.setattr(RecurrentStates, "_chunk", from_the_beginning)
    assert run(STATES).invariant == "S14"


@pytest.mark.slow
def test_a_rank_that_adds_up_its_own_part_only(monkeypatch: pytest.MonkeyPatch) -> None:
    sums_of = RowExchange.sums

    def own(ranks: RowExchange, part: Tensor) -> Tensor:
        sums_of(ranks, part)
        start = sum(ranks._sizes[: ranks.shard.rank])
        return part[start : start + ranks._sizes[ranks.shard.rank]].clone()

    monkeypatch.setattr(RowExchange, "sums", own)
    assert run(TOGETHER).invariant == "S14"


@pytest.mark.slow
def test_a_decode_that_expects_one_token_of_a_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_side, "num_sampled", lambda length, block_tokens: 1)
    assert run(BLOCKS).invariant


@pytest.mark.slow
@pytest.mark.parametrize("seed", [VECTORS, ENCODED])
def test_a_vector_of_another_prompt(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run_batch = TimedEngine.run
    first: list[bytes] = []

    def said_again(engine: TimedEngine, plan: BatchPlan) -> BatchOutcome:
        outcome = run_batch(engine, plan)
        first.extend(vector for _, vector in outcome.vectors[: 0 if first else 1])
        return msgspec.structs.replace(outcome, vectors=tuple((request, first[0]) for request, _ in outcome.vectors))

    monkeypatch.setattr(TimedEngine, "run", said_again)
    assert run(seed).invariant == "S14"
