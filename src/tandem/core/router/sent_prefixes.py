"""Which prompts were sent where, by hashes of their text: what a router may guess of the caches of its workers.

A prompt comes as the chain of hashes over its blocks, so one hash stands for all of the text before it, too. Only who
got a prefix last is remembered. A guess and no more: a worker evicts as it likes and tells nobody.

The newest prompts are kept, up to a number of blocks; of each the end is forgotten before the beginning. So whenever a
block is known, all blocks before it are.
"""

from array import array
from bisect import bisect_left
from collections.abc import Container
from itertools import islice

import msgspec

from tandem.core.router.worker_registry import WorkerId

Blocks = tuple[bytes, ...]  # of one prompt; all of one length, as `server/router/prompt_blocks.py` makes them

FORGETS_ONE_IN = 8  # of all blocks, when there are too many


class SentPrefixes:
    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._sent_to: dict[bytes, WorkerId] = {}  # the one to be forgotten next comes first

    def __len__(self) -> int:
        """Blocks."""
        return len(self._sent_to)

    def add(self, blocks: Blocks, worker: WorkerId) -> None:
        for block in reversed(blocks[: self._max_blocks]):
            self._sent_to.pop(block, None)
            self._sent_to[block] = worker
        if len(self._sent_to) > self._max_blocks:
            kept = max(min(len(blocks), self._max_blocks), self._max_blocks - self._max_blocks // FORGETS_ONE_IN)
            self._forget(len(self._sent_to) - kept)

    def _forget(self, count: int) -> None:
        """Some at a time: to find the first of a dictionary takes longer with every one that was there before."""
        for block in list(islice(self._sent_to, count)):
            del self._sent_to[block]

    def longest(self, blocks: Blocks, among: Container[WorkerId]) -> tuple[int, WorkerId | None]:
        """The longest prefix that went to one of these last: its number of blocks, and who got it."""
        num_known = bisect_left(blocks, True, key=lambda block: block not in self._sent_to)
        for count in range(num_known, 0, -1):
            if (worker := self._sent_to[blocks[count - 1]]) in among:
                return count, worker
        return 0, None

    def snapshot(self) -> bytes:
        """In two buffers: made of each block by itself it would hold up a router's loop."""
        return msgspec.msgpack.encode((b"".join(self._sent_to), array("q", self._sent_to.values()).tobytes()))

    def restore(self, snapshot: bytes) -> None:
        blocks, workers = msgspec.msgpack.decode(snapshot, type=tuple[bytes, bytes])
        ids = array("q", workers)
        size = len(blocks) // len(ids) if ids else 0
        self._sent_to = {blocks[size * i : size * i + size]: WorkerId(worker) for i, worker in enumerate(ids)}
