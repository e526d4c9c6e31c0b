"""The native kernels against fp64: fresh random inputs, odd sizes, outputs that begin as NaN, every instruction set."""

import runpy
from itertools import pairwise
from pathlib import Path
from typing import Any  # how a world is made

import pytest
import torch
from torch import Tensor

from attention_world import World, sequence
from tandem.engine import machine_report
from tandem.engine.batch import TokenSpan
from tandem.engine.layers.product import product
from tandem.engine.native import library, sources
from tandem.engine.native.library import OFF, ONE_ORDER, SWITCH, Kernels

VARIANTS = library.available()
DTYPES = (torch.float32, torch.bfloat16)
# An ulp of what is rounded at the end, and for fp32 what long sums lose.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7}
SHAPES = ((1, 1, 1), (1, 33, 48), (2, 7, 5), (6, 64, 96), (17, 100, 100), (33, 31, 1000), (65, 130, 70), (150, 16, 64))
SHAPES += ((4, 9, 66), (10, 38, 66), (103, 36, 33))  # tiles of rows and outputs that are not full
SHAPES += ((8, 37, 2900), (25, 70, 1410), (97, 33, 1601))  # panels of inputs; the last are not full


pytestmark = pytest.mark.usefixtures("poisoned")


def near(found: Tensor, exact: Tensor, dtype: torch.dtype, *, terms: int = 1, added: Tensor | None = None) -> None:
    """`added`: the absolute sum of the terms. A sum may be next to nothing; its rounding is that of what is added."""
    assert found.dtype == dtype
    scale = (exact if added is None else added).abs().max().item() + 1e-30
    assert (found.double() - exact).abs().max().item() <= TOLERANCE[dtype] * scale * (1 + terms / 1000)


@pytest.mark.skipif(not VARIANTS, reason="no libraries")
def test_a_library_of_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python and C++ share structures: it would read and write anywhere."""
    assert machine_report.kernels_complaint() is None
    monkeypatch.setattr(sources, "digest", lambda: 1)
    monkeypatch.setattr(library, "opened", library.opened.__wrapped__)
    with pytest.raises(
        library.StaleKernels, match="compiled from other sources than those that are there now; install"
    ):
        library.best()
    assert "compiled from other sources" in str(machine_report.kernels_complaint())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_products_are_those_of_fp64_whatever_the_rows_and_threads(
    name: str, dtype: torch.dtype, draw: torch.Generator
) -> None:
    kernels = library.opened(name)
    for rows, outputs, inputs in SHAPES:
        x = torch.randn(rows, inputs, generator=draw).to(dtype)
        weight = torch.randn(outputs, inputs, generator=draw).to(dtype)
        for bias in (None, torch.randn(outputs, generator=draw).to(dtype)):
            exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
            added = x.double().abs() @ weight.double().abs().T + (0 if bias is None else bias.double().abs())
            torch.set_num_threads(1)
            found = kernels.linear(x, weight, bias)

            near(found, exact, dtype, terms=inputs, added=added)
            torch.set_num_threads(2)
            assert torch.equal(kernels.linear(x, weight, bias), found), "threads do not show"
            torch.set_num_threads(1)
            for row in (0, rows // 2, rows - 1):
                assert torch.equal(kernels.linear(x[row:][:1], weight, bias), found[row:][:1]), "nor other rows"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_no_rows_are_no_products(name: str, dtype: torch.dtype) -> None:
    nothing = torch.empty(0, 64, dtype=dtype)
    assert library.opened(name).linear(nothing, torch.ones(5, 64, dtype=dtype), None).shape == (0, 5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_where_a_weight_begins_does_not_show_in_a_bit(name: str, dtype: torch.dtype, draw: torch.Generator) -> None:
    """In a checkpoint that is anywhere in a line of the cache; what stands around it in its lines is not seen."""
    kernels = library.opened(name)
    line = 64 // dtype.itemsize
    for outputs, inputs in ((7, 64), (33, 1056), (5, 2912), (5, 100)):
        weight = torch.randn(outputs, inputs, generator=draw).to(dtype)
        for rows in (1, 2, 5, 7, 12, 13, 40):
            x = torch.randn(rows, inputs, generator=draw).to(dtype)
            found = kernels.linear(x, weight, None)
            for begin in (1, 2, line // 2, line - 2):
                memory = torch.full((weight.numel() + 2 * line,), torch.nan, dtype=dtype)
                elsewhere = memory[begin : begin + weight.numel()].view_as(weight).copy_(weight)
                assert torch.equal(kernels.linear(x, elsewhere, None), found), (outputs, inputs, rows, begin)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_numbers_of_products_before_are_not_seen(name: str, dtype: torch.dtype, draw: torch.Generator) -> None:
    kernels = library.opened(name)
    nothing = torch.full((20, 64), torch.nan, dtype=dtype)
    for inputs in (5, 33, 50):
        kernels.linear(nothing, nothing, None)
        x = torch.randn(9, inputs, generator=draw).to(dtype)
        assert kernels.linear(x, x, None).isfinite().all(), "between rows and behind them are zeros"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_libraries_of_one_process_have_memory_of_their_own(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statics of templates are one for all libraries where they are not hidden, and not of one size."""
    found = []
    for other in (None, *VARIANTS):
        for taken in (other, name):
            monkeypatch.setenv(SWITCH, taken or name)
            world = World("native", (6, 2), 4, head_dim=64, dtype=dtype)
            found.append([out for out, _ in world.step((1, 0, 40), (2, 0, 7), (3, 0, 33))])
    own = found[1::2]
    assert all(torch.equal(*pair) for again in own for pair in zip(own[0], again, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_what_happens_to_a_row_is_what_fp64_says(name: str, dtype: torch.dtype, draw: torch.Generator) -> None:
    kernels = library.opened(name)
    for rows, count in ((1, 2), (3, 30), (17, 64), (9, 250)):
        x, y, weight = (torch.randn(n, count, generator=draw).to(dtype) for n in (rows, rows, 1))
        exact = x.double()
        normed = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        near(kernels.rms_norm(x, weight, 1e-5), normed, dtype)
        gated = exact * torch.sigmoid(exact) * y.double()
        near(kernels.silu_and_mul(x.clone(), y), gated, dtype)
        heads = torch.randn(rows, 3, count, generator=draw).to(dtype)
        cos, sin = (angles.unsqueeze(1) for angles in (x, y))
        kept, turned = heads.double() * cos.double(), heads.double().roll(count // 2, -1) * sin.double()
        near(kernels.rotate(heads.clone(), cos, sin), kept + turned, dtype, added=kept.abs() + turned.abs())


@pytest.mark.parametrize("name", VARIANTS)
def test_a_gate_far_from_zero_is_open_or_shut(name: str) -> None:
    gate = torch.tensor([[-1e30, -200.0, -89.0, 0.0, 89.0, 200.0, 1e30, float("nan")]])

    found = library.opened(name).silu_and_mul(gate.clone(), torch.ones_like(gate))

    torch.testing.assert_close(found[:, :7], torch.nn.functional.silu(gate[:, :7]), rtol=1e-6, atol=1e-36)
    assert found[0, 7].isnan()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "page_size", "head_dim", "window"),
    [((6, 2), 4, 10, None), ((3, 3), 16, 64, 30), ((40, 1), 1, 36, 5), ((4, 2), 16, 32, 1)],
)
@pytest.mark.parametrize("name", VARIANTS)
def test_attention_is_that_of_fp64(
    name: str,
    heads: tuple[int, int],
    page_size: int,
    head_dim: int,
    window: int | None,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SWITCH, name)
    world = World("native", heads, page_size, window, head_dim=head_dim, dtype=dtype)

    for out, expected in world.play():
        near(out, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "given",
    [
        {"heads": (8, 2), "page_size": 16, "head_dim": 64},
        {"heads": (6, 2), "page_size": 32, "head_dim": 96, "window": 70},
        {"heads": (4, 4), "page_size": 16, "head_dim": 32, "window": 5},
        {"heads": (16, 1), "page_size": 16, "head_dim": 80},
        {"heads": (5, 1), "page_size": 6, "head_dim": 64, "window": 40},
        {"heads": (7, 1), "page_size": 64, "head_dim": 160, "window": 33},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_row_of_attention_has_the_bits_that_it_has_among_others(
    name: str, given: dict[str, Any], dtype: torch.dtype, draw: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, name)
    length = 200
    heads, kv_heads = given["heads"]
    q, k, v = (torch.randn(length, n, given["head_dim"], generator=draw) for n in (heads, kv_heads, kv_heads))

    def computed(*stops: int) -> Tensor:
        """The prompt in parts that end there; of memory all is NaN that they do not see"""
        world = World("native", **given, dtype=dtype)
        mine = sequence(0, length, pages=iter(range(5, 5 + length)), page_size=world.page_size)
        found = []
        for start, stop in pairwise((0, *stops)):
            batch = world.batches.build([TokenSpan(mine, start, stop, samples=False)], None)
            for position in range(start + 1 - (world.window or start + 1)):
                page, slot = divmod(position, world.page_size)
                world.kv.tensor[mine.pages[page], ..., slot, :] = float("nan")
            world.attention.plan(batch)
            found.append(world.attention.forward(*(each[start:stop].to(dtype) for each in (q, k, v)), layer=1))
        return torch.cat(found)

    whole = computed(length)

    assert whole.isfinite().all()
    assert torch.equal(computed(*range(1, length + 1)), whole), "alone"
    assert torch.equal(computed(2, 5, 64, 65, 67, 130, 131, length), whole), "or beside some of them"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_numbers_of_attention_before_are_not_seen(
    name: str, dtype: torch.dtype, draw: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, name)

    def computed(value: float, *stops: int) -> Tensor:
        """A prompt in parts that end there; in a window, so that on both sides there are keys that are not seen."""
        world = World("native", (2, 1), 16, 20, head_dim=64, dtype=dtype)
        mine = sequence(0, stops[-1], pages=iter(range(9)), page_size=16)
        found = []
        for start, stop in pairwise((0, *stops)):
            batch = world.batches.build([TokenSpan(mine, start, stop, samples=False)], None)
            world.attention.plan(batch)
            q, k, v = (torch.full((stop - start, n, 64), value).to(dtype) for n in (2, 1, 1))
            found.append(world.attention.forward(q, k, v, layer=0))
        return torch.cat(found)

    each = range(1, 46)
    assert computed(float("nan"), *each).isnan().all()
    for stops in ((44, 45), each):
        assert torch.equal(computed(1.0, *stops), torch.ones(45, 2, 64).to(dtype))
        assert computed(float("nan"), *each).isnan().all()


@pytest.mark.parametrize("name", VARIANTS)
def test_threads_do_not_show_in_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, name)
    results = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        world = World("native", (6, 2), 4, head_dim=36)
        results.append([out for out, _ in world.step((1, 0, 40), (2, 0, 7), (3, 0, 33))])

    assert all(torch.equal(*pair) for other in results[1:] for pair in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_libraries_of_one_order_give_the_same_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = []
    for name in (name for name in ONE_ORDER if name in VARIANTS):
        monkeypatch.setenv(SWITCH, name)
        kernels = library.best(deterministic=True)
        assert kernels is not None
        assert kernels.name == name
        draw = torch.Generator().manual_seed(1)
        x, weight = (torch.randn(n, 1000, generator=draw).to(dtype) for n in (70, 37))
        world = World("native", (6, 2), 4, 30, True, head_dim=36, dtype=dtype)
        results = [kernels.linear(x, weight, None), kernels.rms_norm(x, weight[0], 1e-5)]
        results += [kernels.silu_and_mul(x.clone(), x), *(out for out, _ in world.play())]
        digests.append(results)

    for other in digests[1:]:
        assert all(map(torch.equal, digests[0], other))


def test_the_library_that_is_asked_for_is_taken_and_the_order_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(wanted: str, *, deterministic: bool) -> str | None:
        monkeypatch.setenv(SWITCH, wanted)
        found: Kernels | None = library.best(deterministic=deterministic)
        return None if found is None else found.name

    in_order = [name for name in VARIANTS if name in ONE_ORDER]
    assert chosen("", deterministic=False) == next(iter(VARIANTS), None)
    assert chosen("", deterministic=True) == next(iter(in_order), None)
    for name in VARIANTS:
        assert chosen(name, deterministic=False) == name
        assert chosen(name, deterministic=True) == (name if name in ONE_ORDER else in_order[0])
    assert chosen(OFF, deterministic=False) is chosen(OFF, deterministic=True) is None


def test_a_library_needs_all_that_it_is_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler may use each of them anywhere, and a virtual machine may lack any."""
    monkeypatch.setattr(pytest.importorskip("setuptools"), "setup", lambda **_: None)
    compiled = runpy.run_path(str(Path(__file__).parents[2] / "setup.py"))["VARIANTS"]
    assert compiled.keys() == library.NEEDS.keys()
    for name, flags in compiled.items():
        sets = {flag.removeprefix("-m").replace("-", "") for flag in flags if "=" not in flag}
        assert sets == {needed.replace("_", "") for needed in library.NEEDS[name]}


def test_without_a_library_torch_computes() -> None:
    library.use(None)
    x, weight = torch.randn(3, 8), torch.randn(5, 8)

    assert torch.equal(product(x, weight), torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize("name", VARIANTS)
def test_the_largest_logit_is_the_first_of_equals_and_told_from_what_is_not_finite(
    name: str, draw: torch.Generator
) -> None:
    kernels = library.opened(name)
    for rows, vocab in ((1, 1), (3, 7), (2, 16), (5, 50), (33, 1024), (9, 3001)):
        logits = torch.randint(-9, 9, (rows, vocab), generator=draw).float()  # many are equal
        tokens, are_finite = kernels.largest(logits)
        assert tokens.tolist() == [row.index(max(row)) for row in logits.tolist()]
        assert are_finite.all()
        for bad in (float("nan"), float("inf"), -float("inf")):
            for at in (0, vocab // 2, vocab - 1):
                struck = logits.clone()
                struck[rows // 2, at] = bad
                tokens, are_finite = kernels.largest(struck)
                assert are_finite.tolist() == [row != rows // 2 for row in range(rows)]
                assert 0 <= min(tokens) <= max(tokens) < vocab
    assert kernels.largest(torch.full((2, 40), -float("inf")))[0].tolist() == [0, 0]


@pytest.mark.parametrize("name", VARIANTS)
def test_bf16_is_widened_to_the_same_numbers(name: str, draw: torch.Generator) -> None:
    kernels = library.opened(name)
    for shape in ((1, 1), (3, 7), (2, 40_001)):
        x = torch.randn(shape, generator=draw).bfloat16()
        assert torch.equal(kernels.widened(x), x.float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_rows_are_taken_as_often_as_they_are_named_and_no_others(
    name: str, dtype: torch.dtype, draw: torch.Generator
) -> None:
    kernels = library.opened(name)
    table = torch.randn(40, 33, generator=draw).to(dtype)
    for rows in ([], [0], [39, 0, 39], list(range(40)) * 3):
        assert torch.equal(kernels.taken(table, torch.tensor(rows, dtype=torch.int64)), table[rows])
    for wrong in (-1, 40, 1 << 40):
        with pytest.raises(IndexError, match="there are 40 rows"):
            kernels.taken(table, torch.tensor([3, wrong]))
