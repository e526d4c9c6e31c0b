"""The numbers a node is built with. Every queue, stash, window, retry and cache has its bound here."""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from tandem.core.values import MILLISECOND, SECOND, Cut, Incarnation, Nanos, ShardId

MAX_DP_SIZE = 1024


def dp_rank_in(header: str) -> int | None:
    """None: it names no rank that a server could have."""
    rank = int(header) if header.isdecimal() and len(header) <= len(str(MAX_DP_SIZE)) else MAX_DP_SIZE
    return rank if rank < MAX_DP_SIZE else None


class Role(StrEnum):
    UNIFIED = "unified"
    PREFILL = "prefill"
    DECODE = "decode"


class OptimisticPolicy(StrEnum):
    """What a prefill does while decode's READY is missing."""

    OFF = "off"  # do not start
    RETRY = "retry"  # start; at the end give the pages back to the prefix tree and run again later
    PARK = "park"  # start; at the end keep pages and result slot until READY comes


class LocalPrefill(StrEnum):
    """Which prompts decode computes itself, although a prefill was named for them (`disagg/local_prefill.py`)."""

    OFF = "off"
    AUTO = "auto"  # little is left to compute, and nobody else's prompt is computed here
    UP_TO = "up_to"  # at most `local_prefill_tokens` are left to compute


class AllocationPolicy(StrEnum):
    """When decode reserves pages for a prompt that a prefill computes (`disagg/allocation.py`)."""

    EARLY = "early"  # before it says READY
    PREFILL_COMPLETE = "prefill_complete"  # when the whole prompt is on offer


class SchedulePolicy(StrEnum):
    """In which order queued requests are looked at (`scheduler/queue_policy.py`). The words are SGLang's."""

    FCFS = "fcfs"  # first come, first served
    LPM = "lpm"  # longest cached prefix first
    LOF = "lof"  # longest output first


class PrioritySettings(Struct, frozen=True):
    """That requests say how urgent they are counts (`scheduler/queue_policy.py`)."""

    low_values_first: bool = False
    preemption_threshold: int = 10  # who is more urgent by more than this pushes back those who run


class LoadBalanceMethod(StrEnum):
    """How a server spreads requests over its DP ranks (`dp_dispatch.py`)."""

    AUTO = "auto"
    ROUND_ROBIN = "round_robin"
    FOLLOW_BOOTSTRAP_ROOM = "follow_bootstrap_room"
    TOTAL_REQUESTS = "total_requests"
    TOTAL_TOKENS = "total_tokens"


class DpConflictPolicy(StrEnum):
    """What a prefill does with a request that was routed to another rank than its room implies."""

    RESOLVE = "resolve"  # announce the real rank of every request; decode asks
    FAIL = "fail"  # refuse it; decode may trust the room


class PrefillInfo(Struct, frozen=True):
    """What a prefill tells about its DP ranks when decode learns of it (`disagg/dp_rank.py`)."""

    dp_size: Annotated[int, Meta(ge=1, le=MAX_DP_SIZE)] = 1
    method: LoadBalanceMethod = LoadBalanceMethod.FOLLOW_BOOTSTRAP_ROOM
    conflict: DpConflictPolicy = DpConflictPolicy.RESOLVE

    @property
    def rooms_tell_the_rank(self) -> bool:
        return self.method is LoadBalanceMethod.FOLLOW_BOOTSTRAP_ROOM


class LoadFailurePolicy(StrEnum):
    RECOMPUTE = "recompute"
    FAIL = "fail"


class DelayerSettings(Struct, frozen=True):
    """When prompts wait for those who decode (`scheduler/delayer_policy.py`)."""

    max_delay_passes: int = 30
    low_watermark: float | None = None  # share of the KV pool in use below which nothing waits; None: no such share
    queue_min_ratio: float | None = None  # of the running requests; None: no queue gate, or one that tunes itself
    tunes_itself: bool = False  # how many the queue gate waits for is found out from what batches cost
    max_delay_ns: Nanos = Nanos(5 * SECOND)  # how long the queue gate may hold
    prompt_batch_max: int | None = None  # requests in a prompt batch, where that is limited
    window: int = 16  # prompt batches looked back on
    num_ranks: int = 1  # DP ranks that have to decide alike
    pass_ns: Nanos = Nanos(5 * MILLISECOND)  # with several: at least so long between two passes that a rank asks for
    gather_timeout_ns: Nanos = Nanos(100 * MILLISECOND)  # and how long a pass waits for the load of a rank

    @property
    def has_queue_gate(self) -> bool:
        return self.tunes_itself or self.queue_min_ratio is not None


class WritePolicy(StrEnum):
    """When a page of the prefix cache is copied to host memory. The words are SGLang's."""

    WRITE_THROUGH = "write_through"  # as soon as it is computed
    WRITE_THROUGH_SELECTIVE = "write_through_selective"  # when it is used a second time
    WRITE_BACK = "write_back"  # before it leaves the device


class PrefetchPolicy(StrEnum):
    """How long a request waits for its pages from storage. The words are SGLang's."""

    BEST_EFFORT = "best_effort"  # not at all: what has come when it is its turn is used
    WAIT_COMPLETE = "wait_complete"  # until all are there, as long as something moves
    TIMEOUT = "timeout"  # by the length of its prompt


class StorageSettings(Struct, frozen=True):
    """Storage below host memory (`kv/storage_tier.py`)."""

    policy: PrefetchPolicy = PrefetchPolicy.TIMEOUT
    min_pages: int = 16  # a request that misses fewer computes them
    timeout_base_ns: Nanos = Nanos(1 * SECOND)  # of `timeout`
    timeout_per_ki_token_ns: Nanos = Nanos(SECOND // 4)
    io_timeout_ns: Nanos = Nanos(5 * SECOND)  # nobody waits longer for one answer; then nothing new is asked
    max_prefetches: int = 64  # at a time
    fetch_pages: int = 32  # at a time, of one request: who ends meanwhile asks for no more
    max_writing: int = 1024  # pages


class TierSettings(Struct, frozen=True):
    """Host memory below the device (`kv/host_tier.py`)."""

    num_pages: int
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    load_timeout_ns: Nanos = Nanos(5 * SECOND)  # then who waits for a load computes
    storage: StorageSettings | None = None  # None: what leaves host memory is lost

    @property
    def min_hits(self) -> int:
        return 2 if self.write_policy is WritePolicy.WRITE_THROUGH_SELECTIVE else 1


class WindowSettings(Struct, frozen=True):
    """Some layers see the latest tokens only, and the rest of their KV is given back (`kv/windows.py`)."""

    tokens: int  # that a query sees there, itself included
    max_parts: int  # pages whose KV of these layers there is memory for


class PrefillStall(Struct, frozen=True):
    """How long prompts may keep those who decode from their next token (`scheduler/chunk_budget.py`)."""

    max_ns: Nanos
    min_tokens: int = 64  # whatever they cost: a batch reads all weights, however few tokens it has


class NodeSettings(Struct, frozen=True):
    role: Role
    incarnation: Incarnation
    num_pages: int
    page_size: int = 16  # tokens
    block_tokens: int = 1  # that a row samples at once, up to a border of its blocks; pages hold whole blocks
    windows: WindowSettings | None = None  # None: pages are kept and given back whole
    layout: str = ""  # digest compared with the peer's
    cut: Cut = Cut()  # of this replica
    dp_rank: int = 0  # of this replica among those of its server
    prefill_info: PrefillInfo = PrefillInfo()  # of this server, if it is a prefill
    server_began_at: Nanos | None = None  # before which none of its ranks was sent a request; None: nobody tells
    force_query: bool = False  # ask for, and announce, every request's rank
    max_running: int = 32
    max_queued: int = 2048
    schedule_policy: SchedulePolicy = SchedulePolicy.FCFS
    priorities: PrioritySettings | None = None  # None: all are equally urgent, whatever they say
    chunk_tokens: int = 512  # prompt tokens per batch
    prompt_batch_max: int | None = None  # requests in a batch of prompts
    window_depth: int = 2  # launched batches; 1 is no overlap
    num_micro_batches: int = 1  # into which those who decode are divided, at most: one for each pipeline stage
    min_micro_batch: int = 16  # members that are worth one more
    mixed_chunk: bool = False
    prefill_streak: int = 4  # prompt batches in a row while decode rows wait
    prefill_stall: PrefillStall | None = None  # and how long they take together; None: as long as they take
    delayer: DelayerSettings | None = None  # None: prompts never wait for decode rows
    # The model's attention looks both ways (an encoder): a token's state depends on those behind it, so a prompt is
    # computed in one batch or refused, and no prefix of it can be another one's.
    whole_prompts: bool = False
    prefix_cache: bool = True
    announces_cache: bool = False  # say which pages the prefix tree takes and drops
    host_tier: TierSettings | None = None  # None: evicted pages are lost
    reserved_decode_tokens: int = 512  # clip of what a running request is assumed to need still
    conservativeness: float = 0.3  # share of that which admission keeps free
    result_slots: int = 64
    optimistic: OptimisticPolicy = OptimisticPolicy.PARK
    optimistic_retries: int = 3
    force_retry_prob: float = 0.0  # test hook of sglang#26780: share of request ids that must be retried once
    park_max_tokens: int = 1 << 20
    park_attempts: int = 1  # how often a request gives its pages back under pressure until it waits for READY
    local_prefill: LocalPrefill = LocalPrefill.OFF
    local_prefill_tokens: int = 0
    allocation: AllocationPolicy = AllocationPolicy.EARLY
    # How long prefill waits for READY, and decode for the KV that it said READY for. None: as the request's deadline
    # says. Why not some minutes: who waits behind others would fail although everybody makes progress.
    bootstrap_timeout_ns: Nanos | None = None
    waiting_timeout_ns: Nanos | None = None
    load_failure: LoadFailurePolicy = LoadFailurePolicy.RECOMPUTE
    stall_timeout_ns: Nanos = Nanos(30 * SECOND)
    lease_ns: Nanos = Nanos(30 * SECOND)
    resend_ns: Nanos = Nanos(1 * SECOND)  # how long to wait for an answer before saying it again
    learn_peer_ns: Nanos = Nanos(1 * SECOND)  # between two questions to a bootstrap server that knows nobody
    ask_rank_ns: Nanos = Nanos(SECOND // 10)  # between two questions for the DP rank of one room; doubles
    ask_rank_max_ns: Nanos = Nanos(2 * SECOND)
    max_prefills: int = 1024  # bootstrap addresses that are remembered; the oldest is forgotten first
    learn_peer_tries: int = 5  # questions without an answer until a request stops waiting for that prefill
    tombstones: int = 1024  # ended rooms whose late messages are still answered
    stashed_messages: int = 1024  # what decode said of requests that have not come
    stash_ns: Nanos = Nanos(60 * SECOND)  # and how long one half is waited for where the other one is

    @property
    def is_plain_fcfs(self) -> bool:
        """Who came first is first, whatever requests say."""
        return self.schedule_policy is SchedulePolicy.FCFS and self.priorities is None

    @property
    def shards(self) -> tuple[ShardId, ...]:
        return self.cut.shards
