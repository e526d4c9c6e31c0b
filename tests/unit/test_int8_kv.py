"""Keys and values in 8 bits: attention against fp64 over what is kept, by every backend and every instruction set."""

import pytest
import torch

from attention_world import World
from tandem.engine.kv_memory import KvMemory, KvShape, from_int8, page_bytes, to_int8
from tandem.engine.native import library
from tandem.engine.native.library import OFF, SWITCH

DTYPES = (torch.float32, torch.bfloat16)
NEAR = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "page_size", "head_dim", "window"), [((6, 2), 4, 10, None), ((3, 3), 16, 64, 30), ((40, 1), 1, 36, 5)]
)
@pytest.mark.parametrize("name", [*library.available(), OFF])
def test_attention_is_that_of_fp64_over_what_is_kept(
    name: str,
    heads: tuple[int, int],
    page_size: int,
    head_dim: int,
    window: int | None,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SWITCH, name)
    backend = "torch_native" if name == OFF else "native"
    world = World(backend, heads, page_size, window, head_dim=head_dim, dtype=dtype, is_int8=True)

    for out, expected in world.play():
        assert out.dtype == dtype
        assert (out.double() - expected).abs().max() <= NEAR[dtype] * expected.abs().max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_goes_with_its_scale_and_comes_back_as_near_as_255_steps_are(dtype: torch.dtype) -> None:
    values = torch.randn(50, 37, generator=torch.Generator().manual_seed(1)).to(dtype)
    values[7] = 0
    rows = to_int8(values)
    found = from_int8(rows, torch.float32)

    steps = values.float().abs().amax(dim=1, keepdim=True) / 127
    assert rows.shape == (50, 41)
    assert ((found - values.float()).abs() <= 0.51 * steps).all()
    assert not found[7].any()


@pytest.mark.parametrize("name", library.available())
def test_kernels_and_torch_keep_the_same_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    for wanted, backend in ((name, "native"), (OFF, "torch_native")):
        monkeypatch.setenv(SWITCH, wanted)
        world = World(backend, (4, 2), 4, head_dim=20, is_int8=True)
        world.step((1, 0, 40), (3, 0, 33))
        kept.append(world.kv.tensor.clone())

    assert torch.equal(*kept)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 0.27), (torch.bfloat16, 0.54)])
def test_a_page_takes_a_quarter_or_half_of_the_bytes(dtype: torch.dtype, most: float) -> None:
    sizes = [page_bytes(KvShape(3, 2, 64, is_int8), page_size=16, dtype=dtype) for is_int8 in (True, False)]
    memory = KvMemory(KvShape(3, 2, 64, True), page_size=16, num_pages=5, dtype=dtype)

    assert sizes[0] == memory.page_bytes == memory.cell_bytes * 6 <= most * sizes[1]
    memory.close()
