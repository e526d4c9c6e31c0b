"""What a node counts, from its state at this moment. How that is called outside, `metrics/node_numbers.py` says.

A prefill half is in the bootstrap queue until READY, whatever its policy has computed of it by then; one that is being
computed meanwhile is running too.
"""

from msgspec import Struct

from tandem.core.disagg.sides import DecodeSide
from tandem.core.kv.host_tier import HostTier
from tandem.core.kv.storage_tier import StorageTier
from tandem.core.scheduler.node import EngineNode
from tandem.core.scheduler.request_state import WAITING_STATES, Progress, State, has_ended, is_early
from tandem.core.scheduler.state import DelayerState, NodeState


class WindowNumbers(Struct, frozen=True):
    """Of layers with a window."""

    usage: float  # share of their KV that requests may need at one time
    max_tokens: int  # of their KV that there is memory for


class HostNumbers(Struct, frozen=True):
    """Tokens of KV in host memory, and those that were copied there, back, or lost on their way."""

    used_tokens: int
    max_tokens: int
    stored_tokens: int
    loaded_tokens: int
    lost_tokens: int


class StorageNumbers(Struct, frozen=True):
    fetched_tokens: int
    written_tokens: int
    lost_tokens: int
    hits: int
    misses: int
    prefetches: int  # under way


class DelayerPasses(Struct, frozen=True):
    """How often the prefill delayer has decided so."""

    estimation: str
    allows: bool
    reason: str
    executed: bool  # a prompt batch followed
    count: int


class DelayerTuning(Struct, frozen=True):
    """What a queue gate that tunes itself goes by; zeros until it knows."""

    batch_ns: int  # what a prompt batch costs beside its tokens
    num_wanted: int  # requests that the last pass with prompts found worth waiting for


class NodeNumbers(Struct, frozen=True):
    """Requests by where they are, tokens of KV, and what has happened since the node's start."""

    running: int
    queued: int  # to be computed, but for those without READY
    retracting: int
    bootstrapping: int  # prefill: without READY
    early: int  # those of them that are being computed
    sending: int
    preallocating: int  # decode: without pages, the prompt that these are for, or their peer
    arriving: int
    used_tokens: int
    max_tokens: int
    token_usage: float
    page_size: int
    num_pages: int
    hit_rate: float  # of prompt tokens, those that are computed again left out
    retractions: int
    failed_bootstraps: int
    failed_transfers: int
    retries: dict[str, int]  # by reason
    window: WindowNumbers | None
    host: HostNumbers | None
    storage: StorageNumbers | None
    delayer: tuple[DelayerPasses, ...]
    tuning: DelayerTuning | None


RETRY_REASONS = ("not_ready", "forced", "yield", "rendered")


def numbers(node: EngineNode) -> NodeNumbers:
    """None of what this node does not have."""
    state = node.state
    queues, pool, counters = state.queues, state.pool, state.counters
    unready = [progress.state for progress in state.requests.values() if waits_for_ready(progress)]
    decodes = [progress.state for progress in state.requests.values() if isinstance(progress.side, DecodeSide)]
    used = pool.num_pages - pool.num_free - state.tree.num_evictable
    page_size = state.settings.page_size
    return NodeNumbers(
        running=len(queues[State.RUNNING]) + len(queues[State.COMPUTING]),
        queued=len(queues[State.QUEUED]) - unready.count(State.QUEUED),
        retracting=len(queues[State.RETRACTING]),
        bootstrapping=len(unready),
        early=unready.count(State.COMPUTING),
        sending=len(queues[State.SENDING]),
        preallocating=sum(map(decodes.count, WAITING_STATES)),
        arriving=len(queues[State.ARRIVING]) + len(queues[State.RECOVERING]),
        used_tokens=used * page_size,
        max_tokens=pool.num_pages * page_size,
        token_usage=used / pool.num_pages,
        page_size=page_size,
        num_pages=pool.num_pages,
        hit_rate=counters.hit_tokens / counters.input_tokens if counters.input_tokens else 0.0,
        retractions=counters.retractions,
        failed_bootstraps=counters.bootstrap_failed,
        failed_transfers=counters.transfer_failed,
        retries={reason: counters.prefill_retries.get(reason, 0) for reason in RETRY_REASONS},
        window=window_numbers(state, page_size) if state.windows.are_there else None,
        host=host_numbers(state.host, page_size) if state.host.is_there else None,
        storage=storage_numbers(state.storage, page_size) if state.storage.settings is not None else None,
        delayer=delayer_passes(state.delayer),
        tuning=tuning(state) if state.settings.delayer is not None and state.settings.delayer.tunes_itself else None,
    )


def waits_for_ready(progress: Progress) -> bool:
    return is_early(progress) and not has_ended(progress)


def window_numbers(state: NodeState, page_size: int) -> WindowNumbers:
    most = state.pool.max_parts
    return WindowNumbers(sum(p.window_claim for p in state.requests.values()) / most, most * page_size)


def host_numbers(host: HostTier, page_size: int) -> HostNumbers:
    return HostNumbers(
        used_tokens=(host.pool.num_pages - host.pool.num_free) * page_size,
        max_tokens=host.pool.num_pages * page_size,
        stored_tokens=host.counters.stored * page_size,
        loaded_tokens=host.counters.loaded * page_size,
        lost_tokens=host.counters.lost * page_size,
    )


def storage_numbers(storage: StorageTier, page_size: int) -> StorageNumbers:
    counters = storage.counters
    return StorageNumbers(
        fetched_tokens=counters.fetched * page_size,
        written_tokens=counters.written * page_size,
        lost_tokens=counters.lost * page_size,
        hits=counters.hits,
        misses=counters.misses,
        prefetches=len(storage.prefetches),
    )


def delayer_passes(delayer: DelayerState) -> tuple[DelayerPasses, ...]:
    return tuple(DelayerPasses(*outcome, count) for outcome, count in delayer.outcomes.items())


def tuning(state: NodeState) -> DelayerTuning:
    return DelayerTuning(state.chunk_budget.cost.fixed_ns, state.delayer.num_wanted)
