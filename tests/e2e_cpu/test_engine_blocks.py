"""The engine on a model of block diffusion, against whole sequences computed anew for every pass."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from block_reference import Draw, NearTie, block_reference, drawn, greedy
from engine_world import EngineWorld, prompt_of
from reference import use_one_thread
from tiny_models import SDAR, make_sdar
from transformers import PreTrainedModel

from tandem.core.batch import TokenFlag
from tandem.engine.documents import ModelError

BLOCK, MASK = SDAR["block_size"], SDAR["mask_token_id"]
THRESHOLD = 0.3  # low enough that some passes settle several tokens
PAGE = 16


@dataclass(frozen=True)
class Asked:
    prompt: list[int]
    answer: list[int]  # to the end of a block
    passes: list[int]  # that each block took


@pytest.fixture(scope="module")
def sdar(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    use_one_thread()
    where = tmp_path_factory.mktemp("sdar")
    return where, make_sdar(where)


def asked_without_ties(
    model: PreTrainedModel,
    length: int,
    count: int,
    *,
    block: int = BLOCK,
    threshold: float = THRESHOLD,
    draw: Draw = greedy,
) -> Asked:
    """The first prompt of this length of which no decision is a near-tie."""
    rules = {"block": block, "mask_id": MASK, "threshold": threshold, "draw": draw}
    for seed in range(40):
        try:
            return Asked(prompt := prompt_of(length, seed=seed), *block_reference(model, prompt, count, **rules))
        except NearTie:
            continue
    raise AssertionError(f"every prompt of {length} tokens has a near-tie")


def test_tokens_are_those_of_whole_sequences_for_any_chunks(sdar: tuple[Path, PreTrainedModel]) -> None:
    where, model = sdar
    for length in (1, 3, 4, 15, 16, 17, 50):
        one = asked_without_ties(model, length, 22)
        for page_size, chunk in ((4, 8), (16, 16), (16, 1 << 30), (32, 32)):
            world = EngineWorld(where, page_size=page_size, block_threshold=THRESHOLD)
            assert world.generate(one.prompt, 7, chunk=chunk)[: len(one.answer)] == one.answer


def test_rows_of_one_batch_do_not_see_each_other(sdar: tuple[Path, PreTrainedModel]) -> None:
    where, model = sdar
    asked = [asked_without_ties(model, length, 20) for length in (2, 19, 32, 37)]
    world = EngineWorld(where, page_size=PAGE, block_threshold=THRESHOLD)
    ids = [world.add(one.prompt) for one in asked]
    world.run((ids[0], 0, 2), (ids[1], 0, 19))
    world.run((ids[2], 0, 32), decodes=True, join=ids[:2])
    world.run((ids[3], 0, 16), decodes=True, join=[ids[2]])
    world.run((ids[3], 16, 37), decodes=True)
    world.run(decodes=True, join=[ids[3]])
    world.decode(3)
    for request, one in zip(ids, asked, strict=True):
        answer = world.tokens[request][len(one.prompt) :][:20]
        assert len(answer) > 16
        assert answer == one.answer[: len(answer)]


def test_who_is_pushed_back_or_finds_a_prefix_goes_on_alike(sdar: tuple[Path, PreTrainedModel]) -> None:
    where, model = sdar
    one = asked_without_ties(model, 37, 24)
    world = EngineWorld(where, page_size=PAGE, block_threshold=THRESHOLD)
    first = world.add(one.prompt)
    world.prefill(first, chunk=16)
    world.run(decodes=True, join=[first])
    world.decode(2)
    world.retract(first)
    world.prefill(first, chunk=16)
    world.run(decodes=True, join=[first])
    world.decode(1)
    assert world.tokens[first][37:][:24] == one.answer[:24]

    second = world.add(one.prompt)
    world.tables[second] = world.tables[first][:2]  # two full pages of the first one's: found in the prefix tree
    world.prefill(second, start=2 * PAGE)
    world.run(decodes=True, join=[second])
    world.decode(5)
    assert world.tokens[second][37:][:24] == one.answer[:24]


@pytest.mark.parametrize(("threshold", "block"), [(0.02, 4), (1.0, 4), (0.3, 2), (0.3, 16)])
def test_any_threshold_and_any_size_of_blocks(tmp_path: Path, threshold: float, block: int) -> None:
    model = make_sdar(tmp_path, seed=block, blocks={"block_size": block, "mask_token_id": MASK})
    for length in (5, 24):
        one = asked_without_ties(model, length, 2 * block, block=block, threshold=threshold)
        world = EngineWorld(tmp_path, page_size=PAGE, block_threshold=threshold)
        assert world.generate(one.prompt, 3)[: len(one.answer)] == one.answer


def test_the_threshold_decides_how_many_passes_a_block_takes(sdar: tuple[Path, PreTrainedModel]) -> None:
    where, model = sdar
    taken: dict[float, int] = {}
    for threshold in (1.0, THRESHOLD, 1e-9):
        one = asked_without_ties(model, 16, 16, threshold=threshold)
        world = EngineWorld(where, page_size=PAGE, block_threshold=threshold)
        request = world.add(one.prompt)
        world.prefill(request)
        world.run(decodes=True, join=[request])
        world.decode(2)
        assert world.tokens[request][16:] == one.answer
        assert len(world.recording.batches) == sum(one.passes)
        taken[threshold] = sum(one.passes)
    assert taken[1.0] == 16, "one by one"
    assert taken[1e-9] == 4, "a block at once"
    assert 4 < taken[THRESHOLD] < 16


def test_draws_are_those_of_the_seed_and_position_in_any_batch(sdar: tuple[Path, PreTrainedModel]) -> None:
    where, model = sdar
    one = asked_without_ties(model, 21, 19, draw=drawn(7, 0.8))
    world = EngineWorld(where, page_size=PAGE, block_threshold=THRESHOLD)
    other, greedily = world.add(prompt_of(33)), world.add(one.prompt)
    request = world.add(one.prompt, temperature=0.8, seed=7)
    world.run((other, 0, 33), (request, 0, 21), (greedily, 0, 21))
    world.run(decodes=True, join=[other, request, greedily])
    world.decode(3)
    assert world.tokens[request][21:] == one.answer
    assert world.tokens[greedily] != world.tokens[request]


def test_an_end_of_sequence_inside_a_block_is_the_last_that_is_said(sdar: tuple[Path, PreTrainedModel]) -> None:
    where, model = sdar
    one = asked_without_ties(model, 16, 16)
    stops = [at for at in range(16) if one.answer[at] not in one.answer[:at]]
    for stop in stops:
        world = EngineWorld(where, page_size=PAGE, block_threshold=THRESHOLD)
        request = world.add(one.prompt, stop_token_ids=(one.answer[stop],))
        world.prefill(request)
        if not world.flags[request]:
            world.run(decodes=True, join=[request])
        while not world.flags[request]:
            world.decode(1)
        assert world.flags[request] == TokenFlag.STOP
        assert world.tokens[request][16:] == one.answer[: stop + 1]
    assert {stop % BLOCK for stop in stops} == {0, 1, 2, 3}


def test_pages_are_named_as_those_of_any_other_model(sdar: tuple[Path, PreTrainedModel]) -> None:
    """A page that output has filled gets its name when its last block is final, and the same for any chunks."""
    where, _ = sdar
    prompt = prompt_of(21)
    names = []
    for chunk in (16, 64):
        world = EngineWorld(where, page_size=PAGE, block_threshold=THRESHOLD)
        request = world.add(prompt)
        world.prefill(request, chunk=chunk)
        world.run(decodes=True, join=[request])
        world.decode(10)
        names.append(world.hashes[request])
        assert len(world.hashes[request]) == (len(world.tokens[request]) - BLOCK) // PAGE - 1
    assert names[0] == names[1]


@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("length", [17, 18, 20, 21, 31])
def test_what_others_left_in_a_page_is_gone_before_somebody_pulls_it(
    sdar: tuple[Path, PreTrainedModel], length: int, chunk: int
) -> None:
    """Also in a page of which no slot is written yet: the prompt ends inside its first block."""
    world = EngineWorld(sdar[0], page_size=PAGE, block_threshold=THRESHOLD)
    request = world.add(prompt_of(length))
    world.prefill(request, chunk=chunk)
    pages = world.engine.kv.tensor[world.tables[request]]
    assert pages.isfinite().all()
    final = length // BLOCK * BLOCK - PAGE
    assert (pages[1, :, :, :, final:] == 0).all()
    assert pages[0].abs().sum(dim=-1).gt(0).all()


def test_scores_that_are_no_numbers_end_their_request_only(sdar: tuple[Path, PreTrainedModel]) -> None:
    where, _ = sdar
    world = EngineWorld(where, page_size=PAGE, block_threshold=THRESHOLD)
    wrong, fine = world.add(prompt_of(20)), world.add(prompt_of(21))
    world.run((wrong, 0, 20), (fine, 0, 21))
    world.engine.kv.tensor[world.tables[wrong][0]] = torch.nan
    world.run(decodes=True, join=[wrong, fine])
    assert world.flags[wrong] == TokenFlag.INVALID
    assert world.flags[fine] == 0


def test_what_stands_in_the_checkpoint_is_checked(tmp_path: Path) -> None:
    for blocks, said in (
        ({"block_size": 3, "mask_token_id": 1}, "block_size 3 is no power of two"),
        ({"block_size": 128, "mask_token_id": 1}, "block_size"),
        ({"block_size": 4, "mask_token_id": 300}, "mask_token_id 300 is not in the vocabulary of 300"),
    ):
        make_sdar(tmp_path, blocks=blocks)
        with pytest.raises(ModelError, match=said):
            EngineWorld(tmp_path)


def test_what_blocks_cannot_have_is_refused_by_name(sdar: tuple[Path, PreTrainedModel]) -> None:
    for asked, flag in (({"deterministic": True}, "--deterministic"), ({"kv_is_int8": True}, "--kv-cache-dtype int8")):
        with pytest.raises(ModelError, match=flag):
            EngineWorld(sdar[0], **asked)  # type: ignore[arg-type]  # flags of any type
