"""What a node shows of itself: for `/debug/waits` and `/debug/state`. Reads, never changes."""

from itertools import islice

from msgspec import structs

from tandem.core.disagg.prefill_lookup import key
from tandem.core.disagg.sides import AnySide, DecodeSide
from tandem.core.kv.pool import PageState
from tandem.core.scheduler.node import EngineNode
from tandem.core.scheduler.request_state import State, WaitingFor, has_ended
from tandem.core.values import SECOND, Nanos

MAX_SHOWN = 500  # requests on a page for people


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
PEER_WAITS = (WaitingFor.PEER, WaitingFor.DP_RANK, WaitingFor.PREFILL, WaitingFor.LANDING, WaitingFor.COLLECTION)


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
            "prompt_batch_us": own.chunk_budget.cost.fixed_ns / 1000,  # beside its tokens
            "load_page_from_host_us": own.host.break_even.page_load_ns / 1000,
            "load_page_from_storage_us": own.storage.break_even.page_load_ns / 1000,
        },  # as measured here; 0: not yet
        "result_slots": {
            "total": own.results.num_slots,
            "free": len(own.results.free_slots),
            "by_request": {int(request): slot for request, slot in own.results.owners.items()},
        },
        "rooms": len(own.rooms),
        "stashed": len(own.stash),
        "tombstones": len(own.tombstones),
        "peers": {address: known.incarnation.name for address, known in own.peers.items()},
        "draining": own.draining,
        "delayer": [structs.asdict(load) for load in own.delayer.ranks],  # what its last pass saw, by DP rank
    }
