"""What a node shows of itself: for `/metrics`, `/debug/waits` and `/debug/state`. Reads, never changes."""

from collections.abc import Mapping
from itertools import accumulate, islice

from msgspec import structs

from tandem.core.disagg.prefill_lookup import key
from tandem.core.disagg.sides import AnySide, DecodeSide
from tandem.core.kv.host_tier import HostTier
from tandem.core.kv.pool import PageState
from tandem.core.kv.storage_tier import StorageTier
from tandem.core.scheduler.node import EngineNode
from tandem.core.scheduler.request_state import Progress, State, WaitingFor, has_ended, is_early
from tandem.core.scheduler.state import DelayerState
from tandem.core.settings import DelayerSettings
from tandem.core.values import SECOND, Nanos

MAX_SHOWN = 500  # requests on a page for people


def gauges(node: EngineNode) -> dict[str, float]:
    """Numbers for the metrics, computed from state now. Names without their prefix.

    A prefill half is in the bootstrap queue until READY, whatever its policy has computed of it by then; one that is
    being computed meanwhile is running too (`tandem:num_prefill_early_reqs`).
    """
    state = node.state
    queues, pool, counters = state.queues, state.pool, state.counters
    unready = [p.state for p in state.requests.values() if waits_for_ready(p)]
    decode_sides = [p for p in state.requests.values() if isinstance(p.side, DecodeSide)]
    used = pool.num_pages - pool.num_free - state.tree.num_evictable
    page_size = state.settings.page_size
    numbers: dict[str, float] = {
        "num_running_reqs": len(queues[State.RUNNING]) + len(queues[State.COMPUTING]),
        "num_queue_reqs": len(queues[State.QUEUED]) - unready.count(State.QUEUED),
        "num_used_tokens": used * page_size,
        "max_total_num_tokens": pool.num_pages * page_size,
        "token_usage": used / pool.num_pages,
        "cache_hit_rate": counters.hit_tokens / counters.input_tokens if counters.input_tokens else 0.0,
        "num_retracted_reqs": len(queues[State.RETRACTING]),
        "num_retracted_requests_total": counters.retractions,
        "num_prefill_bootstrap_queue_reqs": len(unready),
        "tandem:num_prefill_early_reqs": unready.count(State.COMPUTING),
        "num_prefill_inflight_queue_reqs": len(queues[State.SENDING]),
        "num_decode_prealloc_queue_reqs": sum(p.state in (State.BOOTSTRAPPING, State.QUEUED) for p in decode_sides),
        "num_decode_transfer_queue_reqs": len(queues[State.ARRIVING]) + len(queues[State.RECOVERING]),
        "num_bootstrap_failed_reqs_total": counters.bootstrap_failed,
        "num_transfer_failed_reqs_total": counters.transfer_failed,
        "page_size": page_size,
        "num_pages": pool.num_pages,
    }
    for reason in ("not_ready", "forced", "yield", "rendered"):
        numbers[f"num_prefill_retries_total{{reason={reason}}}"] = counters.prefill_retries.get(reason, 0)
    if state.windows.are_there:
        numbers |= {
            "swa_token_usage": sum(p.window_claim for p in state.requests.values()) / pool.max_parts,
            "tandem:swa_max_total_num_tokens": pool.max_parts * page_size,
        }
    if state.host.is_there:
        numbers |= host_numbers(state.host, page_size)
    if state.storage.settings is not None:
        numbers |= storage_numbers(state.storage, page_size)
    if state.settings.delayer is not None:
        numbers |= delayer_numbers(state.delayer, state.settings.delayer)
    return numbers


def host_numbers(host: HostTier, page_size: int) -> dict[str, float]:
    """The first two are SGLang's."""
    return {
        "hicache_host_used_tokens": (host.pool.num_pages - host.pool.num_free) * page_size,
        "hicache_host_total_tokens": host.pool.num_pages * page_size,
        "tandem:hicache_stored_tokens_total": host.counters.stored * page_size,
        "tandem:hicache_loaded_tokens_total": host.counters.loaded * page_size,
        "tandem:hicache_lost_tokens_total": host.counters.lost * page_size,
    }


def storage_numbers(storage: StorageTier, page_size: int) -> dict[str, float]:
    """The first two are SGLang's."""
    counters = storage.counters
    return {
        "prefetched_tokens_total": counters.fetched * page_size,
        "backuped_tokens_total": counters.written * page_size,
        "tandem:hicache_storage_lost_tokens_total": counters.lost * page_size,
        "tandem:hicache_storage_look_ups_total{outcome=hit}": counters.hits,
        "tandem:hicache_storage_look_ups_total{outcome=miss}": counters.misses,
        "tandem:hicache_storage_prefetches": len(storage.prefetches),
    }


def waits_for_ready(progress: Progress) -> bool:
    return is_early(progress) and not has_ended(progress)


def delayer_numbers(delayer: DelayerState, settings: DelayerSettings) -> dict[str, float]:
    """Outcomes of all passes, and how long the delays were that ended with a prompt batch (0: there was none)."""
    numbers: dict[str, float] = {}
    for (estimation, allows, reason, executed), count in delayer.outcomes.items():
        labels = (
            f"input_estimation={estimation},output_allow={str(allows).lower()},output_reason={reason},"
            f"actual_execution={str(executed).lower()}"
        )
        numbers[f"prefill_delayer_outcomes_total{{{labels}}}"] = count
    passes = delayer.waits_by_passes
    last = settings.max_delay_passes - 1
    bounds = sorted({0, last, *(bound for bound in settings.wait_passes_bounds if bound < last)})
    numbers |= histogram(
        "prefill_delayer_wait_forward_passes",
        {bound: sum(count for waited, count in passes.items() if waited <= bound) for bound in bounds},
        count=sum(passes.values()),
        total=sum(waited * count for waited, count in passes.items()),
    )
    seconds = (0, *settings.wait_seconds_bounds)
    counts = (delayer.waits_by_seconds.get(bucket, 0) for bucket in range(len(seconds)))
    return numbers | histogram(
        "prefill_delayer_wait_seconds",
        dict(zip(seconds, accumulate(counts), strict=True)),
        count=sum(delayer.waits_by_seconds.values()),
        total=delayer.waited_ns_total / SECOND,
    )


def histogram(name: str, cumulative: Mapping[float, int], *, count: int, total: float) -> dict[str, float]:
    """As a scraper wants it: observations up to each bound, all of them, and their sum."""
    buckets = {f"{name}_bucket{{le={float(bound)}}}": float(up_to) for bound, up_to in cumulative.items()}
    return {**buckets, f"{name}_bucket{{le=+Inf}}": float(count), f"{name}_count": float(count), f"{name}_sum": total}


def waits(node: EngineNode, now: Nanos) -> list[dict[str, object]]:
    """Every request that is not running: what it waits for, who owns that, since when, until when (seconds)."""
    shown: list[dict[str, object]] = []
    for progress in node.state.requests.values():
        waiting_for = progress.waiting_for
        if waiting_for is None or progress.state is State.RUNNING:
            continue
        shown.append(
            {
                "request": progress.id,
                "rid": progress.request.rid,
                "room": progress.request.room,
                "state": str(progress.state),
                "waiting_for": str(waiting_for),
                "owner": wait_owner(progress.side, waiting_for),
                "age_seconds": (now - progress.entered_at) / SECOND,
                "deadline_in_seconds": None if has_ended(progress) else (progress.deadline - now) / SECOND,
            }
        )
    return shown


def flow(node: EngineNode, now: Nanos) -> list[dict[str, object]]:
    """Where requests are, the oldest first, `MAX_SHOWN` at most. A room as text: pages take numbers for floats."""
    return [
        {
            "rid": progress.request.rid,
            "room": None if progress.request.room is None else str(progress.request.room),
            "state": str(progress.state),
            "age_seconds": (now - progress.entered_at) / SECOND,
            "prompt_tokens": progress.request.prompt_len,
            "computed": progress.computed,
            "generated": progress.generated,
        }
        for progress in islice(node.state.requests.values(), MAX_SHOWN)
        if not has_ended(progress)
    ]


# Of this server; everything else is its node's.
OWN_WAITS = {
    WaitingFor.PREFIX: "worker",
    WaitingFor.WINDOW: "worker",
    WaitingFor.TIER: "worker",
    WaitingFor.STORAGE: "worker",
    WaitingFor.DRAIN: "worker",
}
PEER_WAITS = (WaitingFor.PEER, WaitingFor.DP_RANK, WaitingFor.LANDING, WaitingFor.COLLECTION)


def wait_owner(side: AnySide, waiting_for: WaitingFor) -> str:
    """Who ends this wait: the peer, or the bootstrap server that is asked for it; this server's worker, or its node."""
    if waiting_for not in PEER_WAITS:
        return OWN_WAITS.get(waiting_for, "node")
    if side.counterpart is not None:
        return side.counterpart.name
    return f"bootstrap server {key(side.address)}" if isinstance(side, DecodeSide) else "decode"


def state(node: EngineNode) -> dict[str, object]:
    """Pools by owner, queues, window."""
    own = node.state
    return {
        "role": str(own.settings.role),
        "name": own.settings.incarnation.name,
        "incarnation": own.settings.incarnation.id,
        "steps": own.steps,
        "forward_ct": own.forward_ct,
        "window": [{"batch": f.batch, "iteration": f.forward_iter} for f in own.inflight],
        "micro_batches": [len(one.members) for one in own.micro_batches.each],
        "queues": {str(queue): [int(request) for request in ids] for queue, ids in own.queues.items()},
        "pages": {page_state.name.lower(): own.pool.counts[page_state] for page_state in PageState},
        "pages_by_request": {int(p.id): len(p.pages) for p in own.requests.values() if p.pages},  # cached ones too
        "pages_pinned_by_tree": own.tree.num_pinned,
        "host_pages": {page_state.name.lower(): own.host.pool.counts[page_state] for page_state in PageState},
        "copies": {number: "load" if copy.is_load else "store" for number, copy in own.host.copies.items()},
        "storage": {number: str(operation.act) for number, operation in own.storage.operations.items()},
        "costs": {
            "prompt_token_us": own.chunk_budget.token_ns / 1000,
            "load_page_from_host_us": own.host.break_even.page_load_ns / 1000,
            "load_page_from_storage_us": own.storage.break_even.page_load_ns / 1000,
        },  # as measured here; 0: not yet
        "result_rows": {
            "total": own.results.num_rows,
            "free": len(own.results.free_rows),
            "by_request": {int(request): row for request, row in own.results.owners.items()},
        },
        "rooms": len(own.rooms),
        "stashed": len(own.stash),
        "tombstones": len(own.tombstones),
        "peers": {address: known.incarnation.name for address, known in own.peers.items()},
        "draining": own.draining,
        "delayer": [structs.asdict(load) for load in own.delayer.ranks],  # what its last pass saw, by DP rank
    }
