"""What the prefix tree holds, for routers that send a prompt where its KV is: vLLM's and SGLang's KV events.

The core announces pages by their hashes and knows no token; here the tokens come to them. The node process forwards
every prompt to the workers and every sampled token to the API, so it sees both without asking anybody. It keeps the
tokens of live requests only: the same bytes, for the same time, as each of its workers. That is enough, since only a
live request has pages to announce.

A block's hash on the wire is the first 63 bits of the page's hash: subscribers read signed or unsigned 64 bits, and
both read the same of these. It is keyed (`pagehash.py`), so routers that look for a prompt hash its tokens themselves.
"""

from array import array
from collections.abc import Sequence
from typing import Protocol

import msgspec
from msgspec import Struct

from tandem.core.batch import TOKEN_BYTES
from tandem.core.commands import (
    AnnounceCleared,
    AnnounceRemoved,
    AnnounceStored,
    Effects,
    EmitTokens,
    ForgetRequests,
)
from tandem.core.events import Event
from tandem.core.values import Nanos, PageHash, RequestId
from tandem.sampling import Payload

MEDIUM = "GPU"  # vLLM's word for where attention reads KV, whatever the device is


class BlockStored(Struct, frozen=True, array_like=True, tag=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: None = None
    medium: str = MEDIUM
    lora_name: None = None


class BlockRemoved(Struct, frozen=True, array_like=True, tag=True):
    block_hashes: list[int]
    medium: str = MEDIUM


class AllBlocksCleared(Struct, frozen=True, array_like=True, tag=True):
    pass


class KVEventBatch(Struct, frozen=True, array_like=True):
    """What one step has changed, in order."""

    ts: float  # Unix seconds
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int


class KvAnnouncement(Struct, frozen=True):
    """An announcement of the core with the tokens of the pages that it names."""

    what: AnnounceStored | AnnounceRemoved | AnnounceCleared
    tokens: bytes = b""  # int32 little endian


class CannotPublish(Exception):
    """One line with cause and remedy."""


class Publisher(Protocol):
    def publish(self, announced: Sequence[KvAnnouncement]) -> None:
        """What a step has changed. Must not block."""
        ...

    def close(self) -> None: ...


class KvEvents:
    """Observes the stream."""

    def __init__(self, publisher: Publisher, *, page_size: int) -> None:
        self._publisher = publisher
        self._page_bytes = page_size * TOKEN_BYTES
        self._tokens: dict[RequestId, bytearray] = {}

    def prompt_came(self, payload: Payload) -> None:
        """A prompt on its way to the workers, before the core hears of it. Rendered anew, it takes its own place."""
        self._tokens[RequestId(payload.request)] = bytearray(payload.tokens)

    def before(self, now: Nanos, happened: Sequence[Event]) -> None:
        pass

    def after(self, now: Nanos, happened: Sequence[Event], effects: Effects) -> None:
        announced: list[KvAnnouncement] = []
        for command in effects.commands:
            match command:
                case AnnounceStored():
                    announced.append(KvAnnouncement(command, self._tokens_of(command)))
                case AnnounceRemoved() | AnnounceCleared():
                    announced.append(KvAnnouncement(command))
                case EmitTokens(requests, tokens):
                    for index, request in enumerate(requests):
                        self._tokens[request] += tokens[TOKEN_BYTES * index : TOKEN_BYTES * (index + 1)]
                case ForgetRequests(requests):
                    for request in requests:
                        self._tokens.pop(request, None)
                case _:
                    pass
        if announced:
            self._publisher.publish(announced)

    @property
    def num_kept(self) -> int:
        """Requests whose tokens are kept."""
        return len(self._tokens)

    def _tokens_of(self, stored: AnnounceStored) -> bytes:
        start = stored.first_page * self._page_bytes
        tokens = bytes(self._tokens[stored.request][start : start + len(stored.hashes) * self._page_bytes])
        assert len(tokens) == len(stored.hashes) * self._page_bytes, "pages hold tokens that were told before"
        return tokens


def encode(announced: Sequence[KvAnnouncement], *, ts: float, page_size: int, dp_rank: int) -> bytes:
    """A batch as subscribers read it: msgpack, positional, as all of them can."""
    return msgspec.msgpack.encode(KVEventBatch(ts, [event_of(one, page_size) for one in announced], dp_rank))


def event_of(announced: KvAnnouncement, page_size: int) -> BlockStored | BlockRemoved | AllBlocksCleared:
    match announced.what:
        case AnnounceStored(_, _, parent, hashes):
            above = None if parent is None else block_hash(parent)
            tokens = array("i", announced.tokens).tolist()
            return BlockStored([block_hash(page_hash) for page_hash in hashes], above, tokens, page_size)
        case AnnounceRemoved(hashes):
            return BlockRemoved([block_hash(page_hash) for page_hash in hashes])
        case AnnounceCleared():
            return AllBlocksCleared()


def block_hash(page_hash: PageHash) -> int:
    return int.from_bytes(page_hash[:8], "big") >> 1
