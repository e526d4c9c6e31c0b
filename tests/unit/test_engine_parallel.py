"""Whose part of a layer is whose: every head, feature and token belongs to one shard; KV heads follow their heads."""

import pytest

from tandem.engine.layers.vocabulary import vocab_parts
from tandem.engine.model_config import ModelError
from tandem.engine.parallel import HeadShard, OneShard, Shard

HEADS = [(1, 1), (6, 2), (7, 7), (7, 1), (8, 4), (9, 3), (14, 2), (32, 8), (64, 8), (28, 4)]


@pytest.mark.parametrize("total", [1, 2, 7, 96, 97, 32000])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_parts_of_all_shards_are_everything_once_and_differ_by_one_at_most(total: int, size: int) -> None:
    parts = [range(total)[Shard(rank, size).part(total)] for rank in range(size)]

    assert [index for part in parts for index in part] == list(range(total))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert vocab_parts(total, Shard(0, size)) == list(map(len, parts))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
def test_every_head_has_one_shard_and_finds_its_kv_head_there(num_heads: int, num_kv_heads: int, size: int) -> None:
    if size > num_heads:
        with pytest.raises(ModelError, match=f"{num_heads} attention heads cannot be spread over {size} shards"):
            HeadShard.of(Shard(0, size), num_heads=num_heads, num_kv_heads=num_kv_heads)
        return

    shards = [HeadShard.of(Shard(rank, size), num_heads=num_heads, num_kv_heads=num_kv_heads) for rank in range(size)]

    assert [head for shard in shards for head in range(num_heads)[shard.query]] == list(range(num_heads))
    assert {head for shard in shards for head in range(num_kv_heads)[shard.kv]} == set(range(num_kv_heads))
    for shard in shards:
        assert shard.num_query % shard.num_kv == 0
        for place, head in enumerate(range(num_heads)[shard.query]):
            local = place * shard.num_kv // shard.num_query
            assert shard.kv.start + local == head * num_kv_heads // num_heads


def test_kv_heads_are_shared_only_where_there_are_too_few() -> None:
    for num_heads, num_kv_heads in HEADS:
        for size in range(1, num_kv_heads + 1):
            held = [
                HeadShard.of(Shard(rank, size), num_heads=num_heads, num_kv_heads=num_kv_heads).num_kv
                for rank in range(size)
            ]
            assert sum(held) == num_kv_heads


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_lies_within_its_size(rank: int, size: int) -> None:
    with pytest.raises(AssertionError):
        Shard(rank, size)


def test_a_model_that_is_not_divided_is_its_own_group() -> None:
    assert OneShard().shard == Shard(0, 1)
