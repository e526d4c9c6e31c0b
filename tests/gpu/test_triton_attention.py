"""Attention by Triton against attention written out in fp64, and against torch: on a device, else interpreted."""

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from gpu_world import DEVICE, needs_triton

from attention_world import NUM_PAGES, World, sequence
from tandem.engine.attention.base import AttentionRules, attention_backend
from tandem.engine.batch import BatchBuilder, TokenSpan
from tandem.engine.decode_set import ArrayDecodeSet
from tandem.engine.kv_memory import KvMemory, KvShape
from tandem.engine.model_config import ModelError

pytestmark = needs_triton
COMPILES = Path(__file__).with_name("compile_kernels.py")


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short texts take several steps, tiles and parts, some of them empty."""
    monkeypatch.setattr("tandem.engine.attention.triton.MOST_KEYS", 16)
    monkeypatch.setattr("tandem.engine.attention.triton.TILE_ROWS", 16)
    monkeypatch.setattr("tandem.engine.attention.triton.ENOUGH_PROGRAMS", 16)


def short_play(world: World) -> float:
    """A prompt in two chunks, beside another and a decoding row; then three rows decode. The largest error.

    What lies in the pool before is NaN.
    """
    results = world.step((1, 0, 23), (2, 0, 7))
    world._join(2)
    results += world.step((1, 23, 40), (3, 0, 20), decodes=True)
    world._append()
    results += world.step((3, 20, 33))
    for request in (1, 3):
        world._join(request)
    for _ in range(2):
        results += world.step(decodes=True)
        world._append()
    assert all(out.shape == expected.shape for out, expected in results)
    return max(float((out.double().cpu() - expected.cpu()).abs().max()) for out, expected in results)


@pytest.mark.parametrize(
    ("heads", "head_dim", "page_size", "windows", "scale", "cap"),
    [
        ((2, 2), 64, 16, (None, None), 0.125, None),
        ((6, 2), 80, 8, (None, 5), 0.1, None),
        ((4, 1), 96, 1, (17, None), 0.2, 3.0),
        ((3, 1), 128, 16, (1, 30), 0.1, None),
        ((8, 2), 10, 4, (None, None), 0.7, 0.8),
    ],
    ids=str,
)
def test_every_query_sees_its_keys_and_no_others(
    heads: tuple[int, int],
    head_dim: int,
    page_size: int,
    windows: tuple[int | None, int | None],
    scale: float,
    cap: float | None,
) -> None:
    rules = AttentionRules(windows, scale, soft_cap=cap)

    assert short_play(World("triton", heads, page_size, head_dim=head_dim, rules=rules, device=DEVICE)) < 1e-5


@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 3e-2), (torch.float16, 4e-3)], ids=str)
def test_types_of_two_bytes(dtype: torch.dtype, error: float) -> None:
    assert short_play(World("triton", (6, 2), 8, 9, head_dim=64, dtype=dtype, device=DEVICE)) < error


def test_it_says_what_torch_says() -> None:
    """Random lengths and sizes, each backend with a pool of its own; also the pools are the same then."""
    draw = np.random.default_rng(5)
    for heads, page_size in product(((3, 3), (8, 2)), (1, 8)):
        lengths, rules = draw.integers(1, 50, size=3).tolist(), AttentionRules((None,), 0.3)
        pools = [
            KvMemory(
                KvShape(1, heads[1], 80),
                page_size=page_size,
                num_pages=NUM_PAGES * 16,
                dtype=torch.float32,
                device=DEVICE,
            )
            for _ in range(2)
        ]
        pages = iter(draw.permutation(NUM_PAGES * 16).tolist())
        made = [sequence(i, n, pages=pages, page_size=page_size) for i, n in enumerate(lengths)]
        decode_set = ArrayDecodeSet()
        decode_set.join(made[2])
        spans = [TokenSpan(each, 0, len(each.tokens), samples=False) for each in made[:2]]
        batch = BatchBuilder(page_size=page_size, device=DEVICE, tiles=False).build(spans, decode_set)
        q, k, v = (
            torch.from_numpy(draw.normal(size=(len(batch.slots), n, 80))).to(DEVICE, torch.float32)
            for n in (heads[0], heads[1], heads[1])
        )
        said = []
        for kv, name in zip(pools, ("triton", "torch_native"), strict=True):
            attention = attention_backend(name)(kv, rules=rules, deterministic=False)
            attention.plan(batch)
            said.append(attention.forward(q, k, v, layer=0))

        torch.testing.assert_close(said[0], said[1], rtol=1e-5, atol=1e-5)
        assert torch.equal(pools[0].tensor, pools[1].tensor)


def test_rows_planned_into_reserved_room_say_the_same() -> None:
    kv = KvMemory(KvShape(1, 2, 64), page_size=4, num_pages=64, dtype=torch.float32, device=DEVICE)
    attention = attention_backend("triton")(kv, rules=AttentionRules((None,), 0.125), deterministic=False)
    reserved, pages = attention.reserve(3, width=16), iter(range(64))
    draw = torch.Generator().manual_seed(0)
    for lengths in ((9, 30, 1), (33, 2, 17)):
        decode_set = ArrayDecodeSet()
        for request, length in enumerate(lengths):
            decode_set.join(sequence(request, length, pages=pages, page_size=4))
        batch = BatchBuilder(page_size=4, device=DEVICE, tiles=False).build([], decode_set)
        q, k, v = (torch.randn(3, heads, 64, generator=draw).to(DEVICE) for heads in (4, 2, 2))
        attention.plan(batch)
        expected = attention.forward(q, k, v, layer=0)

        attention.plan_into(reserved, batch)
        torch.testing.assert_close(attention.forward(q, k, v, layer=0), expected)


@pytest.mark.parametrize(
    ("is_int8", "deterministic", "reason"), [(True, False, "leave --kv-cache-dtype out"), (False, True, "no bits")]
)
def test_what_it_cannot_do_is_refused_by_name(is_int8: bool, deterministic: bool, reason: str) -> None:
    with pytest.raises(ModelError, match=f"--attention-backend triton .*{reason}.* use --attention-backend torch"):
        World("triton", (2, 2), 4, is_int8=is_int8, deterministic=deterministic, device=DEVICE)


@pytest.mark.parametrize("arguments", [{"looks_both_ways": True}, {"block_tokens": 4}], ids=str)
def test_models_that_look_ahead_are_refused_by_name(arguments: dict[str, int]) -> None:
    with pytest.raises(ModelError, match="--attention-backend triton looks back only"):
        attention_backend("triton", **arguments)


def test_kernels_compile_for_devices_that_are_not_here() -> None:
    """Down to machine code of Ampere and Hopper, in a process in which nothing is interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, COMPILES], env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "compiled 10 kernels"


@pytest.mark.skipif(DEVICE == "cuda", reason="there is a device")
def test_without_a_device_it_is_refused_unless_it_is_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.engine.attention.triton.IS_INTERPRETED", False)

    with pytest.raises(ModelError, match="--attention-backend triton needs an NVIDIA device: give --device cuda"):
        World("triton", (2, 2), 4)
