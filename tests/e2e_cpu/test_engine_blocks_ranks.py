"""Engines of several shards and stages find the blocks that one engine finds, in as many passes, and sample them once.

All workers are threads of one process; what one engine finds is compared with whole sequences in `test_engine_blocks`.
"""

from pathlib import Path
from typing import Any  # fields of a configuration

import pytest
import torch
from block_reference import Draw, drawn, greedy
from engine_world import EngineWorld, prompt_of
from shard_group import ThreadGroup, ThreadPipeline, on_every_worker
from test_engine_blocks import MASK, PAGE, THRESHOLD, Asked, asked_without_ties
from test_engine_stages import NUM_PAGES, Told, listening_to, outcomes_of
from tiny_models import make_sdar
from transformers import PreTrainedModel

from tandem.core.batch import BatchOutcome, TokenFlag
from tandem.engine.engine import Engine
from tandem.engine.weights import load

SIZES: dict[str, Any] = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2}
CUTS = [(2, 1), (4, 1), (1, 2), (1, 4), (2, 2), (3, 3)]  # shards, stages; of four shards two have the same KV head


@pytest.fixture(scope="module")
def sdar(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    where = tmp_path_factory.mktemp("sdar")
    return where, make_sdar(where, **SIZES)


def world_of(where: Path) -> EngineWorld:
    return EngineWorld(where, page_size=PAGE, num_pages=NUM_PAGES, block_threshold=THRESHOLD)


def engine_of(where: Path, group: ThreadGroup, pipeline: ThreadPipeline) -> Engine:
    model = load(where, group=group, stage=pipeline.stage)
    return Engine(model, page_size=PAGE, num_pages=NUM_PAGES, pipeline=pipeline, block_threshold=THRESHOLD)


def told_by_one(where: Path, model: PreTrainedModel) -> Told:
    """Prompts in chunks that sample nothing, two of them in one batch, decoding beside prompts, a draw, an end inside a
    block, a retraction.
    """

    def asked(length: int, draw: Draw = greedy) -> Asked:
        return asked_without_ties(model, length, 24, draw=draw)

    world, (one, two, three) = world_of(where), (asked(50), asked(9), asked(33, drawn(5, 0.9)))
    listener = listening_to(world)
    first, second = world.add(one.prompt), world.add(two.prompt, stop_token_ids=(two.answer[5],))
    third = world.add(three.prompt, temperature=0.9, seed=5)
    world.run((first, 0, 16))
    world.run((first, 16, 50), (second, 0, 9))
    world.run((third, 0, 16), decodes=True, join=[first, second])
    world.run((third, 16, 33), decodes=True)
    world.run(decodes=True, join=[third])
    world.finish(second)
    world.decode(1)
    world.retract(first)
    world.decode(1)
    world.prefill(first, chunk=16)
    world.run(decodes=True, join=[first])
    for request, found in ((first, one), (third, three)):
        answer = world.tokens[request][len(found.prompt) :][:24]
        assert len(answer) > 16
        assert answer == found.answer[: len(answer)]
    return listener.story, listener.outcomes


@pytest.mark.parametrize(("tp_size", "pp_size"), CUTS)
def test_workers_together_find_once_what_one_engine_finds(
    sdar: tuple[Path, PreTrainedModel], tp_size: int, pp_size: int
) -> None:
    story, expected = told_by_one(*sdar)

    def program(group: ThreadGroup, pipeline: ThreadPipeline) -> tuple[bool, list[BatchOutcome]]:
        return pipeline.samples, outcomes_of(engine_of(sdar[0], group, pipeline), story)

    workers = on_every_worker(tp_size, pp_size, program)

    for samples, outcomes in workers:
        assert [o.iteration for o in outcomes] == [o.iteration for o in expected]
        said = [(o.tokens, o.flags, o.counts, o.hashes) for o in outcomes]
        if samples:
            assert said == [(o.tokens, o.flags, o.counts, o.hashes) for o in expected]
        else:
            assert set(said) == {(b"", b"", (), ())}
    assert [samples for samples, _ in workers].index(True) == tp_size * (pp_size - 1)


@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (1, 2)])
def test_the_others_are_told_once_a_pass_and_of_prompts_that_sample_nothing_nothing(
    sdar: tuple[Path, PreTrainedModel], tp_size: int, pp_size: int
) -> None:
    where, model = sdar
    one = asked_without_ties(model, 40, 12)
    world = world_of(where)
    listener = listening_to(world)
    request = world.add(one.prompt)
    world.prefill(request, chunk=16)
    world.run(decodes=True, join=[request])
    world.decode(1)

    def program(group: ThreadGroup, pipeline: ThreadPipeline) -> tuple[bool, int]:
        outcomes_of(engine_of(where, group, pipeline), listener.story)
        return pipeline.samples, pipeline.num_received

    told = on_every_worker(tp_size, pp_size, program)

    assert len(one.passes) == 3
    assert sorted(told) == [(False, sum(one.passes)), (True, 0)]


def test_scores_that_are_no_numbers_end_their_request_on_all_workers(sdar: tuple[Path, PreTrainedModel]) -> None:
    where, _ = sdar
    world = world_of(where)
    listener = listening_to(world)
    wrong, fine = world.add(prompt_of(20)), world.add(prompt_of(21))
    world.run((wrong, 0, 20), (fine, 0, 21))
    num_before, page = len(listener.story), world.tables[wrong][0]
    world.engine.kv.tensor[page] = torch.nan
    world.run(decodes=True, join=[wrong, fine])
    assert world.flags[wrong] == TokenFlag.INVALID

    def program(group: ThreadGroup, pipeline: ThreadPipeline) -> list[BatchOutcome]:
        engine = engine_of(where, group, pipeline)
        outcomes_of(engine, listener.story[:num_before])
        engine.kv.tensor[page] = torch.nan
        return outcomes_of(engine, listener.story[num_before:])

    _, _, (found,), _ = on_every_worker(2, 2, program)  # the first shard of the last stage samples
    assert (found.tokens, found.flags) == (listener.outcomes[-1].tokens, listener.outcomes[-1].flags)


def test_a_mask_among_the_tokens_of_a_prompt_is_a_token(sdar: tuple[Path, PreTrainedModel]) -> None:
    where, _ = sdar
    world = world_of(where)
    listener = listening_to(world)
    world.generate([*prompt_of(16), MASK, 7], 4)

    def program(group: ThreadGroup, pipeline: ThreadPipeline) -> list[BatchOutcome]:
        return outcomes_of(engine_of(where, group, pipeline), listener.story)

    _, last = on_every_worker(1, 2, program)
    assert [o.tokens for o in last] == [o.tokens for o in listener.outcomes]
