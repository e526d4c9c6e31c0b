"""Log-probabilities of prompt tokens are transformers', however the prompt is cut, and on however many workers."""

from pathlib import Path

import pytest
import torch
from engine_world import EngineWorld, prompt_of
from shard_group import ThreadGroup, ThreadPipeline, on_every_shard, on_every_worker
from test_engine_stages import told_by_one_with_scores
from tiny_models import make_llama, make_qwen3, reference_logits
from torch import Tensor

from tandem.core.batch import BatchOutcome
from tandem.engine import prompt_scores
from tandem.engine.engine import Engine
from tandem.engine.weights import load
from tandem.sampling import TokenScore, read_scores

PROMPT = prompt_of(90)
CLOSE = 1e-4


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    """A checkpoint, and the log-softmax of all its scores behind each token of the prompt."""
    where = tmp_path_factory.mktemp("llama")
    return where, reference_logits(make_llama(where), PROMPT).log_softmax(-1)


def told(outcomes: list[BatchOutcome], request: int) -> list[TokenScore]:
    chunks = [extra for outcome in outcomes for told_of, extra in outcome.prompt_extras if told_of == request]
    return [score for chunk in chunks for score in read_scores(chunk)]


def check(scores: list[TokenScore], logprobs: Tensor, *, first: int, top: int) -> None:
    assert len(scores) == len(PROMPT) - 1 - first
    for position, score in enumerate(scores, start=first):
        row = logprobs[position]
        assert score.logprob == pytest.approx(float(row[PROMPT[position + 1]]), abs=CLOSE)
        assert score.top_logprobs == pytest.approx(row.topk(top).values.tolist(), abs=CLOSE)
        assert [float(row[id]) for id in score.top_ids] == pytest.approx(list(score.top_logprobs), abs=CLOSE)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("first", "chunk"), [(0, 1 << 20), (0, 7), (33, 16), (89, 16), (0, 89)])
def test_they_are_those_of_transformers(
    expected: tuple[Path, Tensor], first: int, chunk: int, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_scores, "SLICE_ROWS", 20)
    where, logprobs = expected
    world = EngineWorld(where, num_pages=64, deterministic=deterministic)
    other = world.add(prompt_of(9))
    world.prefill(other)
    request = world.add(PROMPT, prompt_logprobs_from=first, prompt_top_logprobs=3)
    outcomes = []
    for start in range(0, len(PROMPT), chunk):
        join = [other] if start == 0 else []
        outcomes.append(world.run((request, start, min(len(PROMPT), start + chunk)), decodes=True, join=join))
    check(told(outcomes, request), logprobs, first=first, top=3)
    assert told(outcomes, other) == []


def test_they_have_the_same_bits_however_the_prompt_is_cut_where_rows_keep_theirs(
    expected: tuple[Path, Tensor],
) -> None:
    found = []
    for chunk in (1 << 20, 7, 16):
        world = EngineWorld(expected[0], num_pages=64, deterministic=True)
        request = world.add(PROMPT, prompt_logprobs_from=0, prompt_top_logprobs=2)
        cuts = range(0, len(PROMPT), chunk)
        outcomes = [world.run((request, start, min(len(PROMPT), start + chunk))) for start in cuts]
        found.append(told(outcomes, request))
    assert found[0] == found[1] == found[2]


def test_a_prompt_behind_a_cached_prefix_is_told_from_there_on(expected: tuple[Path, Tensor]) -> None:
    where, logprobs = expected
    world = EngineWorld(where, num_pages=64)
    request = world.add(PROMPT, prompt_logprobs_from=35, prompt_top_logprobs=1)
    world.run((request, 0, 32))
    outcomes = [world.run((request, 32, 60)), world.run((request, 60, 90))]
    check(told(outcomes, request), logprobs, first=35, top=1)


@pytest.mark.parametrize("size", [2, 4])
def test_shards_of_the_vocabulary_tell_it_together(expected: tuple[Path, Tensor], size: int) -> None:
    where, logprobs = expected

    def program(group: ThreadGroup) -> list[TokenScore]:
        world = EngineWorld(where, num_pages=64, group=group)
        request = world.add(PROMPT, prompt_logprobs_from=0, prompt_top_logprobs=2)
        return told([world.run((request, 0, 50)), world.run((request, 50, 90))], request)

    for scores in on_every_shard(size, program):
        check(scores, logprobs, first=0, top=2)


@pytest.mark.parametrize(("tp_size", "pp_size"), [(1, 2), (2, 2)])
def test_of_several_stages_the_one_that_samples_tells_it(
    expected: tuple[Path, Tensor], tp_size: int, pp_size: int
) -> None:
    where, logprobs = expected
    request, story = told_by_one_with_scores(where, PROMPT)

    def program(group: ThreadGroup, pipeline: ThreadPipeline) -> list[TokenScore]:
        torch.set_num_threads(1)
        model = load(where, dtype="auto", device="cpu", group=group, stage=pipeline.stage)
        engine = Engine(model, page_size=16, num_pages=64, pipeline=pipeline)
        outcomes = []
        for step in story:
            if isinstance(step, tuple):
                engine.forget(step)
            elif hasattr(step, "sampling"):
                engine.add(step)
            else:
                outcomes.append(engine.run(step))
        return told(outcomes, request)

    found = on_every_worker(tp_size, pp_size, program)
    tellers = [scores for scores in found if scores]
    assert len(tellers) == 1
    check(tellers[0], logprobs, first=0, top=2)


def test_tied_and_normed_models_tell_it_too(tmp_path: Path) -> None:
    logprobs = reference_logits(make_qwen3(tmp_path), PROMPT).log_softmax(-1)
    world = EngineWorld(tmp_path, num_pages=64)
    request = world.add(PROMPT, prompt_logprobs_from=0, prompt_top_logprobs=1)
    check(told([world.run((request, 0, 90))], request), logprobs, first=0, top=1)
