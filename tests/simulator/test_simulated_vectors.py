"""Requests that end with their prompts, in the fast worlds and in whole clusters: they come up, wrong ones show."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from tandem.core.batch import BatchOutcome, BatchPlan
from tandem.core.commands import FinishReason, FinishRequest
from tandem.core.values import Cause
from tandem.simulator import world as fast
from tandem.simulator.actors.executor import Executor
from tandem.simulator.faults.options import draw_options
from tandem.simulator.oracle import Violation
from tandem.simulator.whole import options as whole_options
from tandem.simulator.whole.engine import PlainEngine
from tandem.simulator.whole.vectors import VectorAsk
from tandem.simulator.whole.world import World

DECODER_SEEDS, ENCODER_SEEDS = (21, 138), (7, 90)
WHOLE_DECODER, WHOLE_ENCODER = 48, 17  # the first has shards, the second stages


def ends_of(seed: int) -> list[object]:
    """Of everybody who wanted a vector in this world."""
    world = fast.World(draw_options(seed))
    world.schedule_all()
    world.run()
    halves = [half for exchange in world.edge.exchanges for half in exchange.halves]
    return [half.answer for half in halves if half.script.wants_vector]


@pytest.mark.parametrize("seed", [*DECODER_SEEDS, *ENCODER_SEEDS])
def test_fast_worlds_have_requests_that_end_with_their_prompts(seed: int) -> None:
    ends = ends_of(seed)
    assert draw_options(seed).has_encoder == (seed in ENCODER_SEEDS)
    assert any(isinstance(end, FinishRequest) and end.reason is FinishReason.PROMPT for end in ends)


def test_an_encoder_of_a_fast_world_refuses_what_no_batch_holds() -> None:
    assert any(getattr(end, "cause", None) is Cause.CONTEXT_LENGTH_EXCEEDED for end in ends_of(90))


def test_vectors_have_randomness_of_their_own() -> None:
    """Or every seed on record would be another world."""
    for seed in range(40):
        options = draw_options(seed)
        asks = fast.Workload(Random(f"workload {seed}"), options.workload).draw()
        before = [replace(ask) for ask in asks]
        fast.want_vectors(asks, Random(f"vectors {seed}"), is_encoder=False)
        assert [replace(ask, wants_vector=False) for ask in asks] == before


def test_a_wrong_vector_is_noticed_in_a_fast_world(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Executor.run

    def wrong(self: Executor, plan: BatchPlan, **invalid: Mapping[int, int]) -> BatchOutcome:
        outcome = right(self, plan, **invalid)
        vectors = tuple((request, bytes(len(vector))) for request, vector in outcome.vectors)
        return BatchOutcome(
            outcome.batch,
            outcome.iteration,
            outcome.tokens,
            outcome.flags,
            outcome.hashes,
            prompt_extras=outcome.prompt_extras,
            vectors=vectors,
        )

    monkeypatch.setattr(Executor, "run", wrong)
    with pytest.raises(Violation, match="the vector is not that of its prompt"):
        ends_of(DECODER_SEEDS[0])


@pytest.mark.parametrize("seed", [WHOLE_DECODER, WHOLE_ENCODER])
def test_whole_clusters_answer_embeddings_with_the_right_vectors(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where records go
    world = World(whole_options.draw_options(seed))
    result = world.run()
    assert result.invariant == "", result.detail
    right = [answer for answer in world.answers if isinstance(answer.ask, VectorAsk) and answer.status == 200]
    assert len(right) >= 5
    assert all(isinstance(answer.ask, VectorAsk) for answer in world.answers)


def test_a_wrong_vector_is_noticed_in_a_whole_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    right = PlainEngine._forward
    monkeypatch.setattr(
        PlainEngine,
        "_forward",
        lambda self, batch: (
            (told := right(self, batch))[0],
            [(request, bytes(len(vector))) for request, vector in told[1]],
        ),
    )
    world = World(whole_options.draw_options(WHOLE_DECODER))
    assert world.run().invariant == "S14"
