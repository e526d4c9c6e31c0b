"""Ids and units of the core, and the small arithmetic on them."""

from enum import StrEnum
from functools import cache
from typing import NewType

from msgspec import Struct

RequestId = NewType("RequestId", int)  # local to one node, made by its edge; never travels to a peer
PageId = NewType("PageId", int)
ShardId = NewType("ShardId", int)  # a worker of a replica, which has some layers and heads of every page
BatchId = NewType("BatchId", int)
Room = NewType("Room", int)  # non-zero 63-bit id that pairs one request on both sides
Nanos = NewType("Nanos", int)  # integer nanoseconds on the injected monotonic clock

PageHash = bytes  # 16 bytes: keyed chain over (parent, tenant, tokens of the page); made outside the core

ZERO_NS = Nanos(0)
PAGE_TOKENS = 16  # of KV, unless told
MAX_SHARDS = 256  # of one replica
MAX_BLOCK_TOKENS = 64  # that a row may sample at once
MAX_RENDERED_AT = 253_402_300_799  # Unix seconds: where the calendar of every server ends, with the year 9999
MILLISECOND = 1_000_000
SECOND = 1_000_000_000
MAX_TIMEOUT_SECONDS = 7 * 24 * 3600.0  # that any request has, and any flag gives


class Cause(StrEnum):
    """Why a request ended without its tokens, or why a transfer failed. A closed list: `docs/errors.md`."""

    ABORTED = "aborted"  # the client left or asked for it
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"  # OpenAI's word: clients shorten what they send
    QUEUE_FULL = "queue_full"
    DUPLICATE_ROOM = "duplicate_room"
    DRAINING = "draining"  # the server is shutting down
    OUT_OF_PAGES = "out_of_pages"  # alone in the pool and still too large to go on
    PEER_LOST = "peer_lost"
    PEER_UNKNOWN = "peer_unknown"  # nobody answers at the bootstrap address
    PEER_ABORTED = "peer_aborted"
    ROUTE_CONFLICT = "route_conflict"  # the DP rank that the request names, or its room implies, is not where it is
    BOOTSTRAP_TIMEOUT = "bootstrap_timeout"  # decode has not said READY
    WAITING_TIMEOUT = "waiting_timeout"  # the KV that prefill was told READY for has not come
    LAYOUT_MISMATCH = "layout_mismatch"
    LEASE_EXPIRED = "lease_expired"
    CORRUPT_PAGES = "corrupt_pages"  # digest or generation differs
    TRANSFER_FAILED = "transfer_failed"
    PROTOCOL = "protocol"  # a peer said what it may not say in this state
    INVALID_LOGITS = "invalid_logits"
    WORKER_LOST = "worker_lost"  # the engine process ended
    ENGINE_FAILED = "engine_failed"  # a forward pass raised
    GRAMMAR_TOO_COMPLEX = "grammar_too_complex"  # a row of its parser has too many items


class Incarnation(Struct, frozen=True, order=True, cache_hash=True):
    """One life of one server, from start to end. Messages name it, so that those of another life are told apart.

    name: for people: log lines, errors, debug pages. Two servers may have the same one.
    id: 32 random hex digits, drawn at start, never used again. An address is no identity: it passes from one server to
        the next, and two hosts may use the same.
    """

    name: str
    id: str


@cache
def _first_shards(count: int) -> tuple[ShardId, ...]:
    return tuple(map(ShardId, range(count)))


class Cut(Struct, frozen=True, order=True):
    """Into how many workers a replica is cut: pipeline stages, each of so many context-parallel ranks, each of so many
    tensor-parallel shards.

    Shards are numbered stage by stage, and rank by rank within a stage. Context-parallel ranks share out the tokens of
    prompts, and all hold the KV of all tokens: they are alike in everything else.
    """

    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1

    @property
    def num_shards(self) -> int:
        return self.tp_size * self.pp_size * self.cp_size

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.tp_size, self.pp_size, self.cp_size

    def place(self, shard: ShardId) -> tuple[int, int, int]:
        """Its stage, its context-parallel rank there, and its tensor-parallel rank."""
        rest, tp_rank = divmod(shard, self.tp_size)
        return (*divmod(rest, self.cp_size), tp_rank)

    def shard(self, stage: int, cp_rank: int, tp_rank: int) -> ShardId:
        """The inverse of `place`."""
        return ShardId((stage * self.cp_size + cp_rank) * self.tp_size + tp_rank)

    @property
    def shards(self) -> tuple[ShardId, ...]:
        return _first_shards(self.num_shards)

    @property
    def name(self) -> str:
        context = "" if self.cp_size == 1 else f" x CP {self.cp_size}"
        return f"TP {self.tp_size} x PP {self.pp_size}{context}"


class Address(Struct, frozen=True, order=True):
    """Where a prefill's bootstrap server listens, as the request names it."""

    host: str
    port: int


def ceil_div(amount: int, unit: int) -> int:
    return -(-amount // unit)


def earlier(one: Nanos | None, other: Nanos | None) -> Nanos | None:
    """Of two times, of which each may never come."""
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)
