"""With `deterministic=True` the logits of a row depend on its own tokens only, to the last bit."""

import random
from pathlib import Path

import pytest
import torch
from engine_world import EngineWorld, make_llama, make_qwen3, prompt_of, reference_tokens
from torch import Tensor

NUM_OUTPUTS = 20


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    make_llama(tmp_path, hidden_size=72, intermediate_size=200)
    return tmp_path


def alone(model_dir: Path, prompt: list[int], **settings: object) -> Tensor:
    """[NUM_OUTPUTS, vocab]: logits of each output token, one prompt in one piece, nobody else there."""
    world = EngineWorld(model_dir, deterministic=True, **settings)
    request = world.add(prompt)
    world.prefill(request)
    rows = [world.logits[request]]
    for step in range(NUM_OUTPUTS - 1):
        world.run(decodes=True, join=[request] if step == 0 else [])
        rows.append(world.logits[request])
    return torch.stack(rows)


@pytest.mark.parametrize("chunks", [[16] * 6, [1] * 90, [5, 16, 3, 40, 26], [89, 1]], ids=str)
def test_chunks_do_not_show_in_the_logits(model_dir: Path, chunks: list[int]) -> None:
    prompt = prompt_of(90)
    world = EngineWorld(model_dir, deterministic=True)
    request = world.add(prompt)
    at = 0
    for size in chunks:
        world.run((request, at, min(90, at + size)))
        at += size

    assert torch.equal(world.logits[request], alone(model_dir, prompt)[0])


def test_neighbours_do_not_show_in_the_logits(model_dir: Path) -> None:
    prompt = prompt_of(37)
    world = EngineWorld(model_dir, deterministic=True)
    neighbours = [world.add(prompt_of(length, seed=1)) for length in (1, 5, 16, 37, 38, 53, 80)]
    request, late = world.add(prompt), world.add(prompt_of(100))
    world.run(*[(n, 0, len(world.tokens[n])) for n in neighbours[:4]], (request, 0, 20), (neighbours[4], 0, 38))
    world.run((neighbours[5], 0, 53), (request, 20, 37), (neighbours[6], 0, 80), decodes=True, join=neighbours[:3])
    rows = [world.logits[request]]
    draw = random.Random(0)
    for step in range(NUM_OUTPUTS - 1):
        join = [request, *neighbours[3:]] if step == 0 else []
        leave = [neighbours[draw.randrange(3)]] if step == 5 else []
        span = [(late, 9 * step, 9 * step + 9)] if 9 * step + 9 < 100 else []
        world.run(*span, decodes=True, join=join, leave=leave)
        rows.append(world.logits[request])

    assert torch.equal(torch.stack(rows), alone(model_dir, prompt))


def test_a_cached_prefix_does_not_show_in_the_logits(model_dir: Path) -> None:
    prompt = prompt_of(60)
    world = EngineWorld(model_dir, deterministic=True)
    first, second = world.add(prompt_of(60)[:50]), world.add(prompt)
    world.prefill(first, chunk=7)
    world.tables[second] = world.tables[first][:3]

    world.prefill(second, start=48)

    assert torch.equal(world.logits[second], alone(model_dir, prompt)[0])


def test_recomputing_output_gives_the_logits_of_decoding_it(model_dir: Path) -> None:
    prompt = prompt_of(21)
    expected = alone(model_dir, prompt)
    world = EngineWorld(model_dir, deterministic=True)
    request = world.add(prompt)
    world.prefill(request)
    world.run(decodes=True, join=[request])
    world.decode(13)
    world.retract(request)

    world.prefill(request, chunk=11)

    assert torch.equal(world.logits[request], expected[15])


@pytest.mark.parametrize("page_size", [4, 16, 32])
def test_it_holds_for_every_page_size(model_dir: Path, page_size: int) -> None:
    prompt = prompt_of(70)
    world = EngineWorld(model_dir, deterministic=True, page_size=page_size)
    request = world.add(prompt)
    world.prefill(request, chunk=9)

    assert torch.equal(world.logits[request], alone(model_dir, prompt, page_size=page_size)[0])


def test_bfloat16_is_exact_too(model_dir: Path) -> None:
    prompt = prompt_of(50)
    world = EngineWorld(model_dir, deterministic=True, dtype="bfloat16")
    request = world.add(prompt)
    world.prefill(request, chunk=9)

    assert torch.equal(world.logits[request], alone(model_dir, prompt, dtype="bfloat16")[0])


def test_the_number_of_threads_does_not_show(tmp_path: Path) -> None:
    """Not by construction, but found so: CPU matrix products are cut along rows and columns, not along the sum."""
    make_llama(tmp_path, hidden_size=384, intermediate_size=2048)
    world = EngineWorld(tmp_path, deterministic=True)
    request = world.add(prompt_of(40))
    torch.set_num_threads(2)
    try:
        world.prefill(request)
    finally:
        torch.set_num_threads(1)

    assert torch.equal(world.logits[request], alone(tmp_path, prompt_of(40))[0])


def test_without_it_the_last_bits_do_depend_on_the_batch(model_dir: Path) -> None:
    """If this fails, the tests above prove nothing on this machine."""
    prompt = prompt_of(90)
    logits = []
    for chunk in (90, 1, 5, 40):
        world = EngineWorld(model_dir)
        request = world.add(prompt)
        world.prefill(request, chunk=chunk)
        logits.append(world.logits[request])

    assert any(not torch.equal(logits[0], other) for other in logits[1:])
    for other in logits[1:]:
        torch.testing.assert_close(logits[0], other, rtol=1e-4, atol=1e-4)


def test_it_computes_the_same_model(tmp_path: Path) -> None:
    theirs = make_qwen3(tmp_path)

    tokens = EngineWorld(tmp_path, deterministic=True).generate(prompt_of(45), 25, chunk=20)

    assert tokens == reference_tokens(theirs, prompt_of(45), 25)
