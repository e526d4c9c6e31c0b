"""What `docs/dynamo/kv_event_relay.py` tells Dynamo's index of a Tandem. That index itself is run by `make clients`."""

import runpy
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any  # of a file that is no part of a package

import msgspec
import pytest

ROOT = Path(__file__).parents[2]
RELAY = runpy.run_path(str(ROOT / "docs" / "dynamo" / "kv_event_relay.py"))
CommonHashes, BatchOrder = RELAY["CommonHashes"], RELAY["BatchOrder"]
SIZE = 2
CLEARED = ["AllBlocksCleared"]


@dataclass
class Index:
    """Dynamo's, as far as it matters: a block stands behind one that is there, and goes once."""

    blocks: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])  # with all tokens before it

    def publish_stored(
        self, token_ids: list[int], num_block_tokens: list[int], block_hashes: list[int], parent_hash: int | None
    ) -> None:
        before = () if parent_hash is None else self.blocks[parent_hash]
        for index, block in enumerate(block_hashes):
            before = (*before, *token_ids[index * SIZE : (index + 1) * SIZE])
            assert num_block_tokens[index] == SIZE
            assert self.blocks.setdefault(block, before) == before

    def publish_removed(self, block_hashes: list[int]) -> None:
        for block in block_hashes:
            del self.blocks[block]

    @property
    def prefixes(self) -> set[tuple[int, ...]]:
        return set(self.blocks.values())


def stored(blocks: list[int], parent: int | None, tokens: list[int]) -> list[Any]:
    return ["BlockStored", blocks, parent, tokens, SIZE, None, "GPU", None]


def removed(*blocks: int) -> list[Any]:
    return ["BlockRemoved", list(blocks), "GPU"]


def batch(*events: list[Any]) -> bytes:
    return msgspec.msgpack.encode([0.0, events, 0])


def test_two_servers_with_hashes_of_their_own_have_one_for_the_same_tokens() -> None:
    index = Index()
    one, other = CommonHashes(index), CommonHashes(index)
    one.take([stored([11, 12], None, [1, 2, 3, 4])])
    other.take([stored([91], None, [1, 2]), stored([92], 91, [3, 4]), stored([93], 92, [5, 6])])
    assert sorted(index.prefixes) == [(1, 2), (1, 2, 3, 4), (1, 2, 3, 4, 5, 6)]


def test_a_hash_is_of_all_tokens_before_it_and_has_64_bits_with_a_sign() -> None:
    index = Index()
    CommonHashes(index).take(
        [stored([11, 12], None, [1, 2, 1, 2]), stored([13], None, [5, 6]), stored([14], 13, [1, 2])]
    )
    assert len(index.blocks) == 4
    assert all(-(1 << 63) <= block < 1 << 63 for block in index.blocks)


def test_what_is_removed_or_cleared_goes() -> None:
    index = Index()
    hashes = CommonHashes(index)
    hashes.take([stored([11, 12, 13], None, [1, 2, 3, 4, 5, 6]), removed(13)])
    assert index.prefixes == {(1, 2), (1, 2, 3, 4)}
    hashes.take([CLEARED])
    assert (index.prefixes, hashes.common, dict(hashes.blocks)) == (set(), {}, {})


def test_a_block_that_two_tenants_have_goes_with_the_last_of_them() -> None:
    index = Index()
    hashes = CommonHashes(index)
    hashes.take([stored([11], None, [1, 2]), stored([21], None, [1, 2]), removed(11)])
    assert index.prefixes == {(1, 2)}
    hashes.take([removed(21)])
    assert index.prefixes == set()


def test_a_block_behind_one_that_nobody_has_told_of_is_left_out() -> None:
    index = Index()
    hashes = CommonHashes(index)
    hashes.take([stored([12], 11, [3, 4]), stored([13], None, [5, 6])])
    assert index.prefixes == {(5, 6)}
    hashes.take([removed(12), removed(11)])
    assert index.prefixes == {(5, 6)}


@dataclass
class Server:
    """What a Tandem has published, and what of it is told again."""

    batches: list[bytes]
    kept_from: int = 0
    asked: list[int] = field(default_factory=list[int])

    def replay(self, first: int) -> Iterator[tuple[int, bytes]]:
        self.asked.append(first)
        yield from list(enumerate(self.batches))[max(first, self.kept_from) :]


CHAIN = [batch(CLEARED), *(batch(stored([n + 1], n or None, [n, n])) for n in range(5))]
PREFIXES = {tuple(token for n in range(stop) for token in (n, n)) for stop in range(1, 6)}


def listening(server: Server) -> tuple[Index, Any]:
    index = Index()
    return index, BatchOrder(CommonHashes(index), server.replay)


def test_what_was_published_before_is_asked_for_and_not_taken_twice() -> None:
    server = Server(CHAIN[:4])
    index, order = listening(server)
    order.begin()
    assert len(index.prefixes) == 3
    for number in range(2, 6):  # it was connected before it asked
        order.hear(number, CHAIN[number])
    assert (index.prefixes, server.asked) == (PREFIXES, [0])


def test_batches_that_are_lost_are_asked_for() -> None:
    server = Server([])
    index, order = listening(server)
    order.begin()
    for number in (0, 1, 2, 3):
        order.hear(number, CHAIN[number])
    server.batches = CHAIN
    order.hear(5, CHAIN[5])
    assert (index.prefixes, server.asked) == (PREFIXES, [0, 4])


@pytest.mark.parametrize("kept_from", [4, 6])
def test_after_a_loss_that_nobody_makes_good_all_is_forgotten(kept_from: int) -> None:
    server = Server([])
    index, order = listening(server)
    for number in (0, 1, 2):
        order.hear(number, CHAIN[number])
    server.batches, server.kept_from = CHAIN, kept_from
    order.hear(5, CHAIN[5])
    assert index.prefixes == set()


@pytest.mark.parametrize("first_heard", [0, 2])
def test_a_server_that_has_started_anew_is_another_one(first_heard: int) -> None:
    index, order = listening(server := Server(CHAIN))
    order.begin()
    order.hear(6, batch(stored([9], None, [7, 7])))
    server.batches = [batch(CLEARED), batch(stored([31], None, [8, 8])), batch(stored([32], 31, [9, 9]))]
    for number in range(first_heard, 3):
        order.hear(number, server.batches[number])
    assert index.prefixes == {(8, 8), (8, 8, 9, 9)}
