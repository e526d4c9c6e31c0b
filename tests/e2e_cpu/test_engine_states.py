"""State-space layers between steps: a page is all that it takes to go on behind it."""

from pathlib import Path

import pytest
import torch
from engine_world import EngineWorld, prompt_of
from tiny_models import make_granite, reference_logits, reference_tokens
from torch import Tensor

from tandem.engine.kv_memory import KvMemory, KvShape, StateShape, page_bytes
from tandem.engine.model_config import MOST_PAGE_TOKENS, ModelError, page_tokens, read_config
from tandem.engine.weights import load

LENGTH = 75


def near(ours: Tensor, theirs: Tensor) -> bool:
    return bool((ours - theirs).abs().max() < 1e-4 * theirs.abs().max())


@pytest.mark.parametrize("chunk", [1, 7, 16, 40, 1 << 30])
@pytest.mark.parametrize("page_size", [1, 4, 32, 128])
def test_neither_pages_nor_chunks_show(tmp_path: Path, page_size: int, chunk: int) -> None:
    theirs = make_granite(tmp_path)
    world = EngineWorld(tmp_path, page_size=page_size)

    assert world.generate(prompt_of(LENGTH), 40, chunk=chunk) == reference_tokens(theirs, prompt_of(LENGTH), 40)


@pytest.mark.parametrize("num_pages", [1, 3, 4])
def test_a_request_goes_on_behind_the_cached_pages_of_another(tmp_path: Path, num_pages: int) -> None:
    """Which has gone on itself, so its last page knows more by now."""
    theirs = make_granite(tmp_path)
    world = EngineWorld(tmp_path)
    first = world.add(prompt_of(LENGTH))
    world.prefill(first, chunk=32)
    world.run(decodes=True, join=[first])
    world.decode(9)
    stop = num_pages * world.page_size
    prompt = prompt_of(LENGTH)[:stop] + prompt_of(30, seed=1)
    second = world.add(prompt)
    world.tables[second] = world.tables[first][:num_pages]

    world.prefill(second, start=stop)

    assert near(world.logits[second], reference_logits(theirs, prompt)[-1])


@pytest.mark.parametrize("kv_is_int8", [False, True])
@pytest.mark.parametrize("length", [64, 75, 80])
def test_pages_are_all_that_another_engine_needs(tmp_path: Path, length: int, kv_is_int8: bool) -> None:
    make_granite(tmp_path)
    here, there = (EngineWorld(tmp_path, kv_is_int8=kv_is_int8) for _ in range(2))
    sent, alone = here.add(prompt_of(length)), here.add(prompt_of(length))
    for request in (sent, alone):
        here.prefill(request)
    received = there.add(prompt_of(length))
    there.tables[received] = [there.free.pop() for _ in here.tables[sent]]
    for source, target in zip(here.tables[sent], there.tables[received], strict=True):
        there.engine.kv.page(target)[:] = here.engine.kv.page(source)

    there.run(decodes=True, join=[received], first_token=here.tokens[sent][length])
    here.run(decodes=True, join=[alone])
    for world in (here, there):
        world.decode(20)

    assert there.tokens[received] == here.tokens[alone]


def test_a_row_whose_prompt_of_one_token_failed_harms_no_other(tmp_path: Path) -> None:
    """It has joined before anybody knew."""
    theirs = make_granite(tmp_path)
    world = EngineWorld(tmp_path)
    other, failed = world.add(prompt_of(LENGTH)), world.add(prompt_of(1))
    world.prefill(other)
    world.run(decodes=True, join=[other, failed])
    world.run(decodes=True, leave=[failed])
    world.decode(7)

    assert world.tokens[other][LENGTH:] == reference_tokens(theirs, prompt_of(LENGTH), 10)


def test_the_bytes_of_a_page_are_those_of_keys_values_and_states() -> None:
    state = StateShape(num_layers=3, num_heads=2, head_dim=8, state_size=5, conv_width=4, group_features=10)
    shape = KvShape(2, 4, 16, state=state)
    memory = KvMemory(shape, page_size=4, num_pages=3, dtype=torch.bfloat16)
    keys_and_values = 2 * 2 * 4 * 16 * 2
    states = 4 * 3 * (2 * 8 * 5 + 3 * (2 * 8 + 10))

    assert memory.states.shape == (3, 4, states // 4)
    assert memory.page_bytes == page_bytes(shape, page_size=4, dtype=torch.bfloat16) == 4 * memory.cell_bytes
    assert 0 <= memory.cell_bytes - keys_and_values - states < keys_and_values // 2

    memory.states[1] = 7.0
    assert not memory.tensor[:, :, :2].any()
    assert not memory.tensor[[0, 2]].any()


def test_a_page_is_large_where_a_state_is(tmp_path: Path) -> None:
    make_granite(tmp_path)
    config = read_config(tmp_path)
    each, state = 2 * 2 * 8, 3 * 4 * 24 * 16

    assert page_tokens(config) == 256
    assert 128 * each < state <= 256 * each
    make_granite(tmp_path / "large", mamba_d_state=256)
    assert page_tokens(read_config(tmp_path / "large")) == MOST_PAGE_TOKENS


def test_heads_that_do_not_go_with_those_of_attention_are_refused(tmp_path: Path) -> None:
    make_granite(tmp_path, num_attention_heads=6, num_key_value_heads=3)

    with pytest.raises(ModelError, match="4 heads of state-space layers cannot be spread evenly over 3 KV heads"):
        load(tmp_path)
