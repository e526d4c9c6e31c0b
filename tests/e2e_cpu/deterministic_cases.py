"""With `deterministic=True` the logits of a row depend on its own tokens only, to the last bit.

Run by `test_engine_deterministic.py`, in processes of its own: what libraries read from the environment they read once.
"""

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import cycle
from pathlib import Path

import pytest
import tokenizers
import torch
from engine_world import EngineWorld, prompt_of
from shard_group import ThreadGroup, on_every_shard
from torch import Tensor

import tandem
from tandem.engine import self_check
from tandem.engine.model_config import ModelError
from tandem.engine.native import library
from tandem.engine.weights import load

FOLDER = Path(os.environ["TANDEM_TEST_CHECKPOINTS"])
LLAMA, WIDE, QWEN, MISTRAL = (FOLDER / name for name in ("llama", "wide", "qwen3", "mistral"))
OTHERS = [FOLDER / name for name in ("experts", "part", "after", "capped", "two_windows")]
MINI = Path(tandem.__file__).parent / "bundled" / "mini"
TEXT = Path(__file__).parents[1] / "data" / "gsm8k" / "questions.jsonl"
DTYPES = os.environ.get("TANDEM_TEST_DTYPES", "float32 bfloat16").split()
NUM_OUTPUTS = 20


@pytest.fixture(autouse=True)
def one_thread_afterwards() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


def alone(model_dir: Path, prompt: list[int], *, num_outputs: int = NUM_OUTPUTS, **settings: object) -> Tensor:
    """[num_outputs, vocab]: logits of each output token, one prompt in one piece, nobody else there, one thread."""
    world = EngineWorld(model_dir, deterministic=True, **settings)
    request = world.add(prompt)
    world.prefill(request)
    rows = [world.logits[request]]
    for step in range(num_outputs - 1):
        world.run(decodes=True, join=[request] if step == 0 else [])
        rows.append(world.logits[request])
    return torch.stack(rows)


@cache
def thread_counts(model_dir: Path, dtype: str) -> list[int]:
    """Of one to three, those with which a server would start on this machine. One is always among them."""
    model = load(model_dir, dtype=dtype)

    def may_start(threads: int) -> bool:
        try:
            self_check.proven(model, threads=threads, may_lower=False, page_size=16)
        except ModelError:
            return False
        return True

    return [threads for threads in (1, 2, 3) if may_start(threads)]


# --- tiny models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunks", [[16] * 6, [1] * 90, [5, 16, 3, 40, 26], [89, 1]], ids=len)
def test_chunks_do_not_show_in_the_logits(chunks: list[int], dtype: str) -> None:
    prompt = prompt_of(90)
    world = EngineWorld(LLAMA, deterministic=True, dtype=dtype)
    request = world.add(prompt)
    at = 0
    for size in chunks:
        world.run((request, at, min(90, at + size)))
        at += size

    assert torch.equal(world.logits[request], alone(LLAMA, prompt, num_outputs=1, dtype=dtype)[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbours_do_not_show_in_the_logits(dtype: str) -> None:
    prompt = prompt_of(37)
    world = EngineWorld(LLAMA, deterministic=True, dtype=dtype)
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

    assert torch.equal(torch.stack(rows), alone(LLAMA, prompt, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_behind_a_window_neither_chunks_nor_neighbours_show(dtype: str) -> None:
    prompt = prompt_of(70)
    world = EngineWorld(MISTRAL, deterministic=True, dtype=dtype)
    others = [world.add(prompt_of(length, seed=1)) for length in (5, 37)]
    request = world.add(prompt)
    world.run(*[(other, 0, len(world.tokens[other])) for other in others], (request, 0, 13))
    world.run((request, 13, 50), decodes=True, join=others)
    world.run((request, 50, 70), decodes=True)
    rows = [world.logits[request]]
    for step in range(NUM_OUTPUTS - 1):
        world.run(decodes=True, join=[request] if step == 0 else [])
        rows.append(world.logits[request])

    assert torch.equal(torch.stack(rows), alone(MISTRAL, prompt, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model_dir", OTHERS, ids=lambda path: path.name)
def test_neither_chunks_nor_neighbours_show_in_models_of_other_kinds(model_dir: Path, dtype: str) -> None:
    """Experts, heads turned in part, norms over all heads, soft caps, layers with and without a window."""
    prompt = prompt_of(50)
    world = EngineWorld(model_dir, deterministic=True, dtype=dtype)
    others = [world.add(prompt_of(length, seed=1)) for length in (5, 37, 80)]
    request = world.add(prompt)
    world.run(*[(other, 0, len(world.tokens[other])) for other in others[:2]], (request, 0, 13))
    world.run((others[2], 0, 80), (request, 13, 50), decodes=True, join=others[:2])
    rows = [world.logits[request]]
    for step in range(NUM_OUTPUTS - 1):
        world.run(decodes=True, join=[request, others[2]] if step == 0 else [])
        rows.append(world.logits[request])

    assert torch.equal(torch.stack(rows), alone(model_dir, prompt, dtype=dtype))
    assert 1 in thread_counts(model_dir, dtype), "a server starts"


def test_shards_keep_their_bits() -> None:
    def in_company(group: ThreadGroup) -> Tensor:
        world = EngineWorld(LLAMA, deterministic=True, group=group)
        others = [(world.add(prompt_of(7, seed=seed)), 0, 7) for seed in range(3)]
        request = world.add(prompt_of(60))
        world.run(*others, (request, 0, 13))
        world.prefill(request, start=13, chunk=9)
        return world.logits[request]

    expected = on_every_shard(2, lambda group: alone(LLAMA, prompt_of(60), num_outputs=1, group=group)[0])

    assert all(map(torch.equal, on_every_shard(2, in_company), expected))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cached_prefix_does_not_show_in_the_logits(dtype: str) -> None:
    prompt = prompt_of(60)
    world = EngineWorld(LLAMA, deterministic=True, dtype=dtype)
    first, second = world.add(prompt_of(60)[:50]), world.add(prompt)
    world.prefill(first, chunk=7)
    world.tables[second] = world.tables[first][:3]

    world.prefill(second, start=48)

    assert torch.equal(world.logits[second], alone(LLAMA, prompt, num_outputs=1, dtype=dtype)[0])


def test_recomputing_output_gives_the_logits_of_decoding_it() -> None:
    prompt = prompt_of(21)
    expected = alone(LLAMA, prompt)
    world = EngineWorld(LLAMA, deterministic=True)
    request = world.add(prompt)
    world.prefill(request)
    world.run(decodes=True, join=[request])
    world.decode(13)
    world.retract(request)

    world.prefill(request, chunk=11)

    assert torch.equal(world.logits[request], expected[15])


@pytest.mark.parametrize("page_size", [4, 16, 32])
def test_it_holds_for_every_page_size(page_size: int) -> None:
    prompt = prompt_of(70)
    world = EngineWorld(LLAMA, deterministic=True, page_size=page_size)
    request = world.add(prompt)
    world.prefill(request, chunk=9)

    assert torch.equal(world.logits[request], alone(LLAMA, prompt, num_outputs=1, page_size=page_size)[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_does_not_show(dtype: str) -> None:
    prompt = prompt_of(40)
    expected = alone(WIDE, prompt, num_outputs=1, dtype=dtype)[0]

    for threads in thread_counts(WIDE, dtype):
        world = EngineWorld(WIDE, deterministic=True, dtype=dtype)
        request = world.add(prompt)
        torch.set_num_threads(threads)
        world.prefill(request, chunk=30)
        assert torch.equal(world.logits[request], expected), f"{threads} threads"


def test_where_mkl_can_fix_its_order_any_number_of_threads_may_compute() -> None:
    """Else the test above would pass on one thread alone."""
    processor = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    is_intel = "GenuineIntel" in processor and "avx2" in processor
    is_held_down = "SSE" in os.environ.get("MKL_ENABLE_INSTRUCTIONS", "")
    can_fix = torch.backends.mkl.is_available() and is_intel and not is_held_down

    assert thread_counts(WIDE, "float32") == [1, 2, 3] or not can_fix


def test_a_product_that_depends_on_its_number_of_rows_shows_without_it_only() -> None:
    """So the cases above look closely enough. Where torch computes, the tiles keep the bits; native kernels take rows
    as they come, and a product that is not theirs shows.
    """
    differ = {}
    for deterministic in (False, True):
        logits = []
        for num_others in (0, 3):
            world = EngineWorld(LLAMA, deterministic=deterministic)
            module = world.recording.module
            off_by_rows = partial(lambda head, x: head(x) + 1e-6 * x.shape[0], module.head)
            world.recording.module = replace(module, head=off_by_rows)
            others = [(world.add(prompt_of(5)), 0, 5) for _ in range(num_others)]
            request = world.add(prompt_of(90))
            world.run(*others, (request, 0, 90))
            logits.append(world.logits[request])
        differ[deterministic] = not torch.equal(*logits)

    assert differ == {False: True, True: library.best(deterministic=True) is not None}


def test_it_computes_the_same_model() -> None:
    prompt, expected = prompt_of(45), FOLDER / "qwen3.tokens"

    tokens = EngineWorld(QWEN, deterministic=True).generate(prompt, 25, chunk=20)

    assert str(tokens) == expected.read_text()


# --- the bundled model -----------------------------------------------------------------------------------------------

NUM_PROMPTS = int(os.environ.get("TANDEM_TEST_PROMPTS", "4"))
NUM_TOKENS = 8


@cache
def prompts() -> list[list[int]]:
    tokenizer = tokenizers.Tokenizer.from_file(str(MINI / "tokenizer.json"))
    lengths = cycle((128, 17, 60, 95))
    lines = TEXT.read_text().splitlines()[:NUM_PROMPTS]
    return [tokenizer.encode(line).ids[8 : 8 + length] for line, length in zip(lines, lengths, strict=False)]


@cache
def each_alone(dtype: str) -> list[Tensor]:
    return [alone(MINI, prompt, num_outputs=NUM_TOKENS, dtype=dtype) for prompt in prompts()]


def mini(dtype: str) -> EngineWorld:
    return EngineWorld(MINI, deterministic=True, dtype=dtype)


def in_company(world: EngineWorld, *, chunk: int) -> list[Tensor]:
    """Logits of all prompts, each begun while the one before computes its second chunk and earlier ones decode."""
    requests = [world.add(prompt) for prompt in prompts()]
    at = dict.fromkeys(requests, 0)
    rows: dict[int, list[Tensor]] = {request: [] for request in requests}
    joined: set[int] = set()
    while any(len(rows[request]) < NUM_TOKENS for request in requests):
        length = {request: len(prompts()[request]) for request in requests}
        open_ones = [request for request in requests if at[request] < length[request]][:2]
        spans = [(request, at[request], min(length[request], at[request] + chunk)) for request in open_ones]
        join = [r for r in requests if r not in joined and at[r] == length[r]]
        leave = [r for r in joined if len(rows[r]) == NUM_TOKENS and r in world.decoding]
        at.update({request: stop for request, _, stop in spans})
        joined.update(join)
        world.run(*spans, decodes=True, join=join, leave=leave)
        for request in [*world.decoding, *(r for r, _, stop in spans if stop == length[r])]:
            rows[request].append(world.logits[request])
    return [torch.stack(rows[request]) for request in requests]


@pytest.mark.parametrize("dtype", DTYPES)
def test_real_prompts_in_company_get_the_bits_they_get_alone(dtype: str) -> None:
    together = in_company(mini(dtype), chunk=37)

    differing = [i for i, (a, b) in enumerate(zip(together, each_alone(dtype), strict=True)) if not torch.equal(a, b)]
    assert differing == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_real_prompts_whose_prefix_is_cached_get_the_bits_they_get_without(dtype: str) -> None:
    world = mini(dtype)
    for prompt, expected in zip(prompts(), each_alone(dtype), strict=True):
        first, again = world.add(prompt), world.add(prompt)
        world.prefill(first, chunk=50)
        num_cached = (len(prompt) - 1) // world.page_size
        world.tables[again] = world.tables[first][:num_cached]
        world.prefill(again, start=num_cached * world.page_size)
        assert torch.equal(world.logits[again], expected[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_here_and_decode_there_get_the_bits_of_one_engine_whatever_threads_they_have(dtype: str) -> None:
    prefill, decode = mini(dtype), mini(dtype)
    counts = thread_counts(MINI, dtype)
    for index, (prompt, expected) in enumerate(zip(prompts(), each_alone(dtype), strict=True)):
        sender, receiver = prefill.add(prompt), decode.add(prompt)
        torch.set_num_threads(counts[index % len(counts)])
        prefill.prefill(sender, chunk=64)
        assert torch.equal(prefill.logits[sender], expected[0])
        decode.tables[receiver] = decode.free[-len(prefill.tables[sender]) :]
        del decode.free[-len(prefill.tables[sender]) :]
        for source, destination in zip(prefill.tables[sender], decode.tables[receiver], strict=True):
            decode.engine.kv.page(destination)[:] = prefill.engine.kv.page(source)
        torch.set_num_threads(counts[-1 - index % len(counts)])
        for step in range(1, NUM_TOKENS):
            token = prefill.tokens[sender][-1] if step == 1 else None
            decode.run(decodes=True, join=[receiver] if step == 1 else [], first_token=token)
            assert torch.equal(decode.logits[receiver], expected[step])
        decode.run(leave=[receiver])
