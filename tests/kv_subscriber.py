"""A subscriber as cache-aware routers are: with the types that vLLM documents, and a set of blocks as its index.

The types are those of vLLM's example `kv_events_subscriber.py`; SGLang's have one field less and decode the same bytes.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import zmq

PATIENCE_MS = 20_000


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[int | bytes]
    medium: str | None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(EventBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


read_batch = msgspec.msgpack.Decoder(type=KVEventBatch).decode


class Index:
    """Which blocks an engine holds, by the events alone. A block is known by the tokens of its whole prefix."""

    def __init__(self) -> None:
        self.blocks: dict[int | bytes, tuple[int, ...]] = {}  # by hash: all tokens up to its end

    def take(self, batch: KVEventBatch) -> None:
        for event in batch.events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    for block in event.block_hashes:
                        del self.blocks[block]
                case AllBlocksCleared():
                    self.blocks.clear()

    def _store(self, event: BlockStored) -> None:
        size, before = event.block_size, ()
        assert len(event.token_ids) == size * len(event.block_hashes)
        if event.parent_block_hash is not None:
            before = self.blocks[event.parent_block_hash]
        for index, block in enumerate(event.block_hashes):
            assert block not in self.blocks, "stored twice"
            before += tuple(event.token_ids[index * size : (index + 1) * size])
            self.blocks[block] = before

    @property
    def prefixes(self) -> set[tuple[int, ...]]:
        return set(self.blocks.values())


def pages_of(tokens: Sequence[int], page_size: int = 16) -> set[tuple[int, ...]]:
    """The prefixes that an index holds where all full pages of `tokens` are cached."""
    return {tuple(tokens[:stop]) for stop in range(page_size, len(tokens) + 1, page_size)}


class Subscriber:
    """Use as a context."""

    def __init__(self, port: int, *, replay_port: int | None = None, topic: str = "", host: str = "127.0.0.1") -> None:
        self._context = zmq.Context()
        self.sub = self._context.socket(zmq.SUB)
        self.sub.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.sub.connect(f"tcp://{host}:{port}")
        self._replay = self._context.socket(zmq.DEALER)
        if replay_port is not None:
            self._replay.connect(f"tcp://{host}:{replay_port}")

    def __enter__(self) -> "Subscriber":
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def next(self) -> tuple[int, bytes, KVEventBatch]:
        """The next live batch: its number, topic and content."""
        assert self.sub.poll(PATIENCE_MS), "no event comes"
        topic, number, payload = self.sub.recv_multipart()
        return int.from_bytes(number, "big"), topic, read_batch(payload)

    def replay(self, first: int = 0) -> Iterator[tuple[int, KVEventBatch]]:
        """All that the engine still has from a number on."""
        self._replay.send_multipart([b"", first.to_bytes(8, "big")])
        while True:
            assert self._replay.poll(PATIENCE_MS), "no end of the replay comes"
            empty, number, payload = self._replay.recv_multipart()
            assert empty == b""
            if not payload:
                assert int.from_bytes(number, "big", signed=True) == -1
                return
            yield int.from_bytes(number, "big"), read_batch(payload)

    def index(self) -> Index:
        """From the first batch on, without a gap."""
        index, expected = Index(), 0
        for number, batch in self.replay():
            assert number == expected
            expected += 1
            index.take(batch)
        assert expected, "nothing was published, not even that the cache is empty"
        return index
