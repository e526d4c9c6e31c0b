"""Tandem's KV events as Dynamo's index wants them: each in order, under hashes that all Tandems have in common.

Tandem's hashes are keyed by a secret of each server. Dynamo's index keeps one hash for the same tokens on all workers:
what a second worker stores behind a beginning that a first one has too, it rejects as a block without a parent. So here
hashes are made of the tokens alone.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Any, Protocol  # any: what is msgpack

import msgspec
import zmq

POLL_MS, REPLAY_MS = 100, 5000


class Publisher(Protocol):
    """Of `dynamo.llm.KvEventPublisher` what is used here."""

    def publish_stored(
        self, token_ids: list[int], num_block_tokens: list[int], block_hashes: list[int], parent_hash: int | None
    ) -> None: ...

    def publish_removed(self, block_hashes: list[int]) -> None: ...


@dataclass
class CommonHashes:
    """The blocks of one Tandem. Tenants and salts have blocks of their own for the same tokens, with one hash here."""

    publisher: Publisher
    common: dict[int, int] = field(default_factory=dict[int, int])  # by Tandem's hash
    blocks: Counter[int] = field(default_factory=Counter[int])  # how many of Tandem's have it

    def take(self, events: Sequence[Sequence[Any]]) -> None:
        """Of the next batch."""
        for name, *fields in events:
            if name == "BlockStored":
                self._store(*fields[:4])
            elif name == "BlockRemoved":
                self._remove(fields[0])
            elif name == "AllBlocksCleared":
                self.clear()

    def clear(self) -> None:
        self._remove(list(self.common))

    def _store(self, blocks: list[int], parent: int | None, tokens: list[int], size: int) -> None:
        above = None if parent is None else self.common.get(parent)
        if parent is not None and above is None:
            return  # nobody has told of it
        stored: list[int] = []
        for index, block in enumerate(blocks):
            behind = stored[-1] if stored else above
            stored.append(common_hash(behind, tokens[index * size : (index + 1) * size]))
            self.common[block] = stored[-1]
            self.blocks[stored[-1]] += 1
        self.publisher.publish_stored(tokens, [size] * len(blocks), stored, above)

    def _remove(self, blocks: list[int]) -> None:
        gone: list[int] = []
        for block in blocks:
            common = self.common.pop(block, None)
            if common is not None:
                self.blocks[common] -= 1
                if not self.blocks[common]:
                    del self.blocks[common]
                    gone.append(common)
        if gone:
            self.publisher.publish_removed(gone)


def common_hash(above: int | None, tokens: Sequence[int]) -> int:
    """Of a block and all before it; a signed number of 64 bits, as Dynamo takes it."""
    text = b"".join(number.to_bytes(8, "big", signed=True) for number in (0 if above is None else above, *tokens))
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big", signed=True)


Replay = Callable[[int], Iterable[tuple[int, bytes]]]  # what is still there from a number on: number and batch of each


class BatchOrder:
    """What was published before anybody listened, and what was lost on the way, is asked for.

    Where Tandem has no more of it, all that was known is forgotten, and blocks behind what was lost stay unknown.
    """

    def __init__(self, hashes: CommonHashes, replay: Replay) -> None:
        self._hashes = hashes
        self._replay = replay
        self._number = -1  # of the last batch that was taken
        self._replayed = -1  # up to which live ones may come again

    def begin(self) -> None:
        """After whoever hears live ones is connected."""
        self._ask()

    def hear(self, number: int, batch: bytes) -> None:
        """A live one."""
        if number <= self._replayed:
            return
        if number <= self._number:  # of another server, whose numbers begin anew
            self._hashes.clear()
            self._number = -1
        if number > self._number + 1:
            self._ask()
        if number > self._number:
            self._take(number, batch)
            self._replayed = -1

    def _ask(self) -> None:
        for number, batch in self._replay(self._number + 1):
            self._take(number, batch)
        self._replayed = self._number

    def _take(self, number: int, batch: bytes) -> None:
        if number != self._number + 1:
            self._hashes.clear()
        self._number = number
        _time, events, *_rank = msgspec.msgpack.decode(batch)
        self._hashes.take(events)


class KvEventRelay:
    """A thread from Tandem's publisher to Dynamo's."""

    def __init__(self, endpoint: str, replay_endpoint: str | None) -> None:
        """replay_endpoint: None, where Tandem has none; then nothing is asked for."""
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._context = zmq.Context()
        self._stopped = Event()
        self._thread: Thread | None = None

    def start(self, publisher: Publisher) -> None:
        self._thread = Thread(target=self._run, args=(publisher,), name="kv-events", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
        self._context.destroy(linger=0)

    def _run(self, publisher: Publisher) -> None:
        order = BatchOrder(CommonHashes(publisher), self._replay)
        live = self._context.socket(zmq.SUB)
        live.setsockopt(zmq.SUBSCRIBE, b"")
        live.connect(self._endpoint)
        order.begin()
        while not self._stopped.is_set():
            if live.poll(POLL_MS):
                _topic, number, batch = live.recv_multipart()
                order.hear(int.from_bytes(number, "big"), batch)

    def _replay(self, first: int) -> Iterator[tuple[int, bytes]]:
        if self._replay_endpoint is None:
            return
        with self._context.socket(zmq.DEALER) as asked:
            asked.linger = 0
            asked.connect(self._replay_endpoint)
            asked.send_multipart([b"", first.to_bytes(8, "big")])
            while asked.poll(REPLAY_MS):
                _empty, number, batch = asked.recv_multipart()
                if not batch:
                    return
                yield int.from_bytes(number, "big"), batch
