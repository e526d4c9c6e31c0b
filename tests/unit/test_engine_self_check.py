"""`--deterministic` is checked at start: what shows that may not show is refused, with cause and remedy."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

import tandem
from tandem.engine import self_check
from tandem.engine.model_config import ModelError
from tandem.engine.native.library import OFF, SWITCH
from tandem.engine.parallel import Shard
from tandem.engine.self_check import CHUNKS, WHOLE, ForwardPath, proven, thread_counts
from tandem.engine.summation import Products, cancelling
from tandem.engine.weights import LoadedModel, load

MINI = Path(tandem.__file__).parent / "bundled" / "mini"


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def mini() -> LoadedModel:
    return load(MINI)


class Linear(Protocol):
    weight: Tensor

    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass
class WrongLinear:
    linear: Linear
    error: Callable[[Tensor], Tensor | float]

    @property
    def weight(self) -> Tensor:
        return self.linear.weight

    @property
    def group(self) -> object:
        return self.linear.group  # type: ignore[attr-defined]  # of those that a group shares

    def __call__(self, x: Tensor) -> Tensor:
        return self.linear(x) + 1e-3 * self.error(x)


HOLDERS = {"q_proj": "qkv.q_proj", "o_proj": "o_proj", "up_proj": "mlp.gate_up.up_proj", "down_proj": "mlp.down_proj"}


def with_product(model: LoadedModel, name: str, error: Callable[[Tensor], Tensor | float]) -> LoadedModel:
    """The model, with one product of its first layer (or its head) that is off by `error` of its input."""

    def wrong(linear: Linear) -> WrongLinear:
        return WrongLinear(linear, error)

    module = model.module
    if name == "head":
        return replace(model, module=replace(module, head=wrong(module.head)))
    block = with_part(module.blocks[0], HOLDERS[name], wrong)
    return replace(model, module=replace(module, blocks=(block, *module.blocks[1:])))


def with_part(holder: Any, path: str, change: Callable[[Any], object]) -> Any:
    name, _, rest = path.partition(".")
    part = getattr(holder, name)
    return replace(holder, **{name: with_part(part, rest, change) if rest else change(part)})


def refusal(model: LoadedModel, *, threads: int) -> str:
    with pytest.raises(ModelError) as caught:
        proven(model, threads=threads, may_lower=False, page_size=16)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("page_size", [1, 16, 512])
def test_the_bundled_model_on_one_thread_passes_and_its_layout_says_which_numbers_it_has(
    dtype: str, page_size: int
) -> None:
    model = load(MINI, dtype=dtype)
    assert model.layout_fields["deterministic"] == "off"

    checked = proven(model, threads=1, may_lower=False, page_size=page_size)

    assert checked.layout_fields["deterministic"].startswith("on, ")
    assert checked.layout_fields | {"deterministic": "off"} == model.layout_fields


def test_other_numbers_make_another_layout(mini: LoadedModel) -> None:
    def numbers(model: LoadedModel) -> str:
        return proven(model, threads=1, may_lower=False, page_size=16).layout_fields["deterministic"]

    assert numbers(mini) == numbers(mini)
    assert numbers(with_product(mini, "head", lambda x: 1.0)) != numbers(mini)


@pytest.mark.parametrize("name", ["q_proj", "o_proj", "down_proj", "head"])
def test_a_product_that_depends_on_the_number_of_threads_is_refused(mini: LoadedModel, name: str) -> None:
    model = with_product(mini, name, lambda x: float(torch.get_num_threads()))

    text = refusal(model, threads=4)

    assert text.startswith("--deterministic cannot be kept: that there are 4 threads shows in the float32 sums")
    assert "use --cpu-threads 1, or " in text
    assert text.endswith(", or leave --deterministic out")


@pytest.mark.parametrize("name", ["q_proj", "o_proj", "down_proj", "head"])
def test_a_product_that_depends_on_the_rows_beside_it_is_refused(mini: LoadedModel, name: str) -> None:
    model = with_product(mini, name, lambda x: x.mean())

    assert "how a prompt is cut and what else is in its batch shows" in refusal(model, threads=1)


def test_without_native_kernels_a_product_may_depend_on_the_number_of_rows_because_all_have_sixteen(
    mini: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, OFF)
    model = with_product(mini, "down_proj", lambda x: float(x.shape[0]))

    proven(model, threads=1, may_lower=False, page_size=16)


def test_a_product_that_is_never_twice_the_same_is_refused(mini: LoadedModel) -> None:
    draw = torch.Generator().manual_seed(1)

    text = refusal(with_product(mini, "down_proj", lambda x: float(torch.rand((), generator=draw))), threads=1)

    assert "two runs of the same rows differ" in text


def test_fewer_threads_are_taken_where_nobody_asked_for_so_many(mini: LoadedModel) -> None:
    model = with_product(mini, "up_proj", lambda x: float(torch.get_num_threads()))

    checked = proven(model, threads=4, may_lower=True, page_size=16)

    assert torch.get_num_threads() == 1
    assert checked.layout_fields["deterministic"].startswith("on, ")


@pytest.mark.parametrize(
    ("threads", "shows_from", "steady"), [(6, 3, 2), (16, 16, 8), (12, 5, 4), (3, 3, 2), (7, 100, 7)]
)
def test_the_remedy_is_the_most_threads_that_do_not_show(
    mini: LoadedModel, monkeypatch: pytest.MonkeyPatch, threads: int, shows_from: int, steady: int
) -> None:
    monkeypatch.setattr(ForwardPath, "bits", lambda *_, threads, **__: "same" if threads < shows_from else "other")
    monkeypatch.setattr(Products, "compare", lambda _, counts: (set(counts), False, ""))

    if steady < threads:
        assert f"use --cpu-threads {steady}," in refusal(mini, threads=threads)
    proven(mini, threads=threads, may_lower=True, page_size=16)

    assert torch.get_num_threads() == steady


@pytest.mark.parametrize(
    ("dtype", "setting", "named"),
    [
        ("bfloat16", "AVX2,STRICT", "--dtype float32"),
        ("float32", "AUTO", "take MKL_CBWR out of the environment"),
    ],
)
def test_the_remedy_names_what_else_would_help(
    monkeypatch: pytest.MonkeyPatch, dtype: str, setting: str, named: str
) -> None:
    monkeypatch.setenv("MKL_CBWR", setting)
    monkeypatch.setattr(ForwardPath, "bits", lambda *_, threads, **__: str(threads))

    text = refusal(load(MINI, dtype=dtype), threads=2)

    assert named in text
    assert ("--dtype" in text, "MKL_CBWR" in text) == (dtype == "bfloat16", setting == "AUTO")


# --- sums ------------------------------------------------------------------------------------------------------------


def in_shares(x: Tensor, weight: Tensor) -> Tensor:
    """Each thread sums one share of the terms, as a library may."""
    shares = torch.get_num_threads()
    parts = zip(x.float().chunk(shares, dim=1), weight.float().chunk(shares, dim=1), strict=True)
    return torch.stack([a @ b.T for a, b in parts]).sum(0).to(x.dtype)


def with_a_look_aside(x: Tensor, weight: Tensor) -> Tensor:
    return functional.linear(x + 1e-30 * x.sum(0), weight) + 1e-9 * x[0].float().sum().to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_in_shares_are_noticed_whatever_is_rounded_away(mini: LoadedModel, dtype: torch.dtype) -> None:
    products = Products(mini.module.product_shapes(), dtype=dtype, device="cpu", product=in_shares)

    steady, neighbours_show, _ = products.compare([1, 2, 3])

    assert (steady, neighbours_show) == ({1}, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_look_aside_are_noticed(dtype: torch.dtype) -> None:
    products = Products([(48, 64)], dtype=dtype, device="cpu", product=with_a_look_aside)

    assert products.compare([1])[:2] == ({1}, True)


def by_number_of_outputs(x: Tensor, weight: Tensor) -> Tensor:
    return functional.linear(x, weight) + 1e-9 * weight.shape[0]


@pytest.mark.parametrize(("product", "shows"), [(by_number_of_outputs, True), (functional.linear, False)])
def test_sums_that_depend_on_how_many_outputs_are_computed_are_noticed(
    product: Callable[[Tensor, Tensor], Tensor], *, shows: bool
) -> None:
    products = Products([(48, 64), (96, 32)], dtype=torch.float32, device="cpu", product=product)

    assert products.parts_show([(24, 64)]) is shows
    assert not products.parts_show([(48, 64)]), "that is the whole"


def test_a_part_of_a_model_has_the_layout_of_the_whole(mini: LoadedModel) -> None:
    stage = load(MINI, stage=Shard(1, 2))
    fields = proven(mini, threads=1, may_lower=False, page_size=16).layout_fields

    checked = proven(mini, threads=1, may_lower=False, page_size=16, part=stage)

    assert checked.module is stage.module
    assert checked.layout_fields == fields


def test_each_shape_is_that_of_a_layer(mini: LoadedModel) -> None:
    products = {
        tuple(tensor.shape)
        for name, tensor in load_file(MINI / "model.safetensors").items()
        if tensor.ndim == 2 and name != "lm_head.weight"
    }

    assert set(mini.module.product_shapes()) == products


def test_the_terms_of_every_sum_cancel() -> None:
    for outputs, inputs in ((1, 2), (300, 65), (64, 192)):
        x, weight = cancelling(outputs, inputs, dtype=torch.float32, device="cpu")
        assert weight.shape == (outputs, inputs)
        assert not (x.double() @ weight.double().T).round(decimals=12).any()
        assert x.any()
        assert weight.any()


def test_the_counts_are_one_two_the_number_wanted_and_those_between() -> None:
    assert thread_counts("cpu", 1) == [1]
    assert thread_counts("cpu", 2) == [1, 2]
    assert thread_counts("cpu", 12) == [1, 2, 4, 8, 12]
    assert thread_counts("cuda:0", 12) == [12]
    assert WHOLE == (sum(CHUNKS),) == (33,)
    assert self_check.CACHED_TOKENS > 512, "more keys than one block of attention"
