"""The parts that two sides exchange: whatever their cuts, each byte of a decode's page comes once, from where it is."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.kv_parts import Box, KvGrid, KvShard, Runs, box_of, holders, kv_heads_of, parts, runs_of, share
from tandem.core.values import Cut

CELL_BYTES = 3

cuts = st.builds(Cut, tp_size=st.integers(1, 6), pp_size=st.integers(1, 4), cp_size=st.integers(1, 3))
grids = st.builds(KvGrid, num_layers=st.integers(4, 7), num_kv_heads=st.integers(1, 6))


def page_of(box: Box) -> bytes:
    """What a worker that holds this box has of a page: every cell says which it is."""
    return b"".join(bytes((head, layer, 7)) for head, layer in box.cells())


def bytes_of(page: bytes, runs: Runs) -> bytes:
    starts = range(runs.first, runs.first + runs.count * runs.stride, runs.stride)
    return b"".join(page[start : start + runs.size] for start in starts)


@given(total=st.integers(0, 40), size=st.integers(1, 9))
def test_shares_are_everything_once_in_order(total: int, size: int) -> None:
    assert [one for rank in range(size) for one in share(total, rank, size)] == list(range(total))


@given(tp_size=st.integers(1, 9), num_kv_heads=st.integers(1, 6))
def test_every_head_has_holders_and_every_shard_a_head(tp_size: int, num_kv_heads: int) -> None:
    held = [kv_heads_of(rank, tp_size, num_kv_heads) for rank in range(tp_size)]
    assert all(held)
    assert {head for heads in held for head in heads} == set(range(num_kv_heads))
    for head in range(num_kv_heads):
        assert holders(head, tp_size, num_kv_heads) == [rank for rank, heads in enumerate(held) if head in heads]


@given(cut=cuts)
def test_every_worker_has_one_place_in_its_cut(cut: Cut) -> None:
    places = [cut.place(shard) for shard in cut.shards]
    assert places == sorted(set(places))
    assert [cut.shard(*place) for place in places] == list(cut.shards)
    assert places[-1] == (cut.pp_size - 1, cut.cp_size - 1, cut.tp_size - 1)


@given(grid=grids, source=cuts, target=cuts)
def test_every_cell_of_every_worker_comes_once_and_from_one_that_has_it(grid: KvGrid, source: Cut, target: Cut) -> None:
    found = parts(grid, source, target)
    for shard in target.shards:
        own = [part for part in found if part.target == shard]
        assert Counter(cell for part in own for cell in part.box.cells()) == Counter(
            box_of(grid, target, shard).cells()
        )
    for part in found:
        assert set(part.box.cells()) <= set(box_of(grid, source, part.source).cells())
    names = [(part.source, part.target) for part in found]
    assert names == sorted(set(names))


@given(grid=grids, source=cuts, target=cuts)
def test_what_is_read_there_and_written_here_is_the_page_of_this_worker(grid: KvGrid, source: Cut, target: Cut) -> None:
    for shard in target.shards:
        here = KvShard(grid, target, shard, CELL_BYTES)
        page = bytearray(here.page_bytes)
        times_written = bytearray(here.page_bytes)
        for tile in here.pulls(source):
            owner = KvShard(grid, source, tile.source, CELL_BYTES)
            there = page_of(owner.box)
            assert (len(there), tile.there.end <= len(there)) == (tile.page_bytes, True)
            sent = bytes_of(there, tile.there)
            assert len(sent) == tile.there.num_bytes == tile.here.num_bytes
            for at in range(tile.here.count):
                start = tile.here.first + at * tile.here.stride
                page[start : start + tile.here.size] = sent[at * tile.here.size : (at + 1) * tile.here.size]
                for byte in range(start, start + tile.here.size):
                    times_written[byte] += 1
        assert page == page_of(here.box)
        assert set(times_written) == {1}


@given(grid=grids, source=cuts, target=cuts)
def test_owners_and_readers_mean_the_same_part_by_its_number(grid: KvGrid, source: Cut, target: Cut) -> None:
    lent = [(shard, runs) for shard in source.shards for runs in KvShard(grid, source, shard, CELL_BYTES).lends(target)]
    pulled = {
        tile.index: (tile.source, tile.there)
        for shard in target.shards
        for tile in KvShard(grid, target, shard, CELL_BYTES).pulls(source)
    }
    assert pulled == dict(enumerate(lent))


@given(grid=grids, cut=cuts)
def test_sides_that_are_cut_alike_exchange_whole_pages_worker_by_worker(grid: KvGrid, cut: Cut) -> None:
    for shard in cut.shards:
        kv = KvShard(grid, cut, shard, CELL_BYTES)
        (tile,) = kv.pulls(cut)
        assert (tile.index, tile.source) == (shard, shard)
        assert tile.here == tile.there == Runs(0, kv.page_bytes, kv.page_bytes, 1)


@given(grid=grids, tp_size=st.integers(1, 6), others=st.integers(1, 6))
def test_where_only_heads_are_cut_a_part_is_one_run(grid: KvGrid, tp_size: int, others: int) -> None:
    for shard in Cut(tp_size=tp_size).shards:
        for tile in KvShard(grid, Cut(tp_size=tp_size), shard, CELL_BYTES).pulls(Cut(tp_size=others)):
            assert (tile.here.count, tile.there.count) == (1, 1)


@pytest.mark.parametrize(
    ("source", "target", "want"),
    [
        (Cut(4), Cut(8), [0, 0, 1, 1, 2, 2, 3, 3]),  # each worker of the prefill is read by as many
        (Cut(8), Cut(4), [0, 2, 4, 6]),
        (Cut(8), Cut(8), [0, 1, 2, 3, 4, 5, 6, 7]),
        (Cut(1, 1, 2), Cut(4), [0, 1, 0, 1]),  # context-parallel ranks all have everything
        (Cut(2, 1, 2), Cut(4), [0, 2, 1, 3]),
    ],
)
def test_shards_with_the_same_head_are_spread_over_those_that_have_it_there(
    source: Cut, target: Cut, want: list[int]
) -> None:
    found = parts(KvGrid(num_layers=1, num_kv_heads=2), source, target)
    assert [part.source for part in sorted(found, key=lambda part: part.target)] == want


def test_a_part_of_some_layers_is_a_run_for_each_head() -> None:
    held = Box(range(4), range(6))
    assert runs_of(Box(range(1, 3), range(2, 4)), held, 10) == Runs(first=80, size=20, stride=60, count=2)
    assert runs_of(Box(range(1, 3), range(6)), held, 10) == Runs(first=60, size=120, stride=120, count=1)


@pytest.mark.parametrize(
    ("cut", "can"),
    [
        (Cut(9, 2), True),
        (Cut(1, 2, 9), True),
        (Cut(1, 3), False),
        (Cut(0), False),
        (Cut(1, 0), False),
        (Cut(1, 1, 0), False),
    ],
)
def test_a_stage_needs_a_layer_and_shards_share_heads(cut: Cut, *, can: bool) -> None:
    assert KvGrid(num_layers=2, num_kv_heads=2).can_be_cut(cut) is can
