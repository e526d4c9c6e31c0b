"""The numbers a node is built with. Every queue, stash, window, retry and cache has its bound here."""

from enum import StrEnum

from msgspec import Struct

from tandem.core.values import SECOND, Incarnation, Nanos, ShardId


class Role(StrEnum):
    UNIFIED = "unified"
    PREFILL = "prefill"
    DECODE = "decode"


class OptimisticPolicy(StrEnum):
    """What a prefill does while decode's READY is missing (contract section 7)."""

    OFF = "off"  # do not start
    RETRY = "retry"  # start; at the end give the pages back to the prefix tree and run again later
    PARK = "park"  # start; at the end keep pages and result row until READY comes


class LoadFailurePolicy(StrEnum):
    RECOMPUTE = "recompute"
    FAIL = "fail"


class DelayerSettings(Struct, frozen=True):
    """When prompts wait for those who decode (`sched.gates`)."""

    max_delay_passes: int = 30
    low_watermark: float | None = None  # share of the KV pool in use below which nothing waits; None: no such share
    queue_min_ratio: float | None = None  # of the running requests; None: no queue gate
    max_delay_ns: Nanos = Nanos(5 * SECOND)  # how long the queue gate may hold
    prompt_batch_max: int | None = None  # requests in a prompt batch, where that is limited
    window: int = 16  # prompt batches looked back on


class NodeSettings(Struct, frozen=True):
    role: Role
    incarnation: Incarnation
    num_pages: int
    page_size: int = 16  # tokens
    layout: str = ""  # digest compared with the peer's
    shards: tuple[ShardId, ...] = (ShardId(0),)
    max_running: int = 32
    max_queued: int = 2048
    chunk_tokens: int = 512  # prompt tokens per batch
    window_depth: int = 2  # launched batches; 1 is no overlap
    mixed_chunk: bool = False
    prefill_streak: int = 4  # prompt batches in a row while decode rows wait
    delayer: DelayerSettings | None = None  # None: prompts never wait for decode rows
    prefix_cache: bool = True
    reserved_decode_tokens: int = 512  # clip of what a running request is assumed to need still
    conservativeness: float = 0.3  # share of that which admission keeps free
    metadata_slots: int = 64
    optimistic: OptimisticPolicy = OptimisticPolicy.PARK
    optimistic_retries: int = 3
    force_retry_prob: float = 0.0  # test hook of the seed: share of request ids that must be retried once
    park_max_tokens: int = 1 << 20
    load_failure: LoadFailurePolicy = LoadFailurePolicy.RECOMPUTE
    stall_timeout_ns: Nanos = Nanos(30 * SECOND)
    lease_ns: Nanos = Nanos(30 * SECOND)
    resend_ns: Nanos = Nanos(1 * SECOND)  # how long to wait for an answer before saying it again
    learn_peer_ns: Nanos = Nanos(1 * SECOND)  # between two questions to a bootstrap server that knows nobody
    learn_peer_tries: int = 5  # questions without an answer until a request stops waiting for that prefill
    tombstones: int = 1024  # ended rooms whose late messages are still answered
    stashed_readies: int = 1024  # READYs that overtook their request
    stash_ns: Nanos = Nanos(60 * SECOND)
