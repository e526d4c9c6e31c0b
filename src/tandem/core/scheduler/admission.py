"""Who may start: slots, pages, result slots and the chunk budget, in queue order, and for those who may not, why."""

from tandem.core.disagg import decode_side, prefill_side
from tandem.core.disagg.sides import DecodeSide, Local, PrefillSide
from tandem.core.scheduler.page_tables import is_loading, matchable_pages, take_pages
from tandem.core.scheduler.preemption import may_preempt, preempt
from tandem.core.scheduler.prefetch import awaits_storage
from tandem.core.scheduler.priorities import precedence
from tandem.core.scheduler.queue_policy import candidates
from tandem.core.scheduler.request_state import Progress, State, Trigger, WaitingFor, is_early
from tandem.core.scheduler.reserve import Reserve, expected_tokens
from tandem.core.scheduler.shared_prefix import awaits_prefix, computes_shareable
from tandem.core.scheduler.state import NodeState, enter, later, pages_for, prompt_backlog, uncomputed


def admit(node: NodeState) -> None:
    """Move queued requests on, in the order of the queue policy, until one does not fit.

    Stops at the first for which there are no pages, no slot, or no room in the batches that may be launched (no
    overtaking), so large requests cannot starve; it may push back who runs and is much less urgent.

    Passed over, so that those behind it may start, is one that

    - finds no result slot, which they may not need (sglang#26780: `continue`, not `break`);
    - has a prefix on its way from storage, as long as the policy waits for it, or one that another request computes;
    - starts early and finds no pages or slot: nobody waits for it. It pushes no parked request out either, and other
      early ones do not overtake it.
    """
    queue = node.queues[State.QUEUED]
    if not queue:
        return
    if node.num_slots_used >= node.settings.max_running and not node.queues[State.PARKED] and not may_preempt(node):
        node.requests[next(iter(queue))].blocked_on = WaitingFor.SLOT  # nobody gives way: no need to count pages
        return
    reserve = Reserve.of(node)
    enough = node.settings.chunk_tokens * max(1, node.settings.window_depth - len(node.inflight))
    backlog = prompt_backlog(node)
    computing = [progress for progress in node.live(State.COMPUTING) if computes_shareable(node, progress)]
    early_blocked_on: WaitingFor | None = None  # of the first that would have started early
    for request in candidates(node):
        progress = node.requests[request]
        if early_blocked_on is not None and is_early(progress):
            progress.blocked_on = early_blocked_on
            continue
        if awaits_storage(node, progress):
            progress.blocked_on = WaitingFor.STORAGE
            continue
        if isinstance(progress.side, DecodeSide) and progress.side.arrival is None:
            decode_side.compute_here_if_preferred(node, progress, progress.side, backlog)
        if awaits_prefix(node, progress, computing):
            progress.blocked_on = WaitingFor.PREFIX
            continue
        if not isinstance(progress.side, DecodeSide) and backlog >= enough and prompts_before(node, progress) >= enough:
            progress.blocked_on = WaitingFor.WINDOW
            return
        blocked_on = try_admit(node, progress, reserve.pages(node, progress))
        if blocked_on in (WaitingFor.SLOT, WaitingFor.PAGES) and preempt(node, progress, reserve):
            reserve = Reserve.of(node)
            blocked_on = try_admit(node, progress, reserve.pages(node, progress))
        progress.blocked_on = blocked_on
        if blocked_on is WaitingFor.RESULT_SLOT:
            continue
        if blocked_on is not None and is_early(progress):
            early_blocked_on = blocked_on
            continue
        if blocked_on is not None:
            return
        reserve.tokens += expected_tokens(node, progress)
        if progress.state in (State.COMPUTING, State.LOADING):
            backlog += uncomputed(progress)
        if computes_shareable(node, progress):
            computing.append(progress)


def prompts_before(node: NodeState, newcomer: Progress) -> int:
    """Tokens of prompts that have begun, without those that its own goes before."""
    begun = (*node.live(State.COMPUTING), *node.live(State.LOADING))
    return sum(uncomputed(one) for one in begun if precedence(node, one) <= precedence(node, newcomer))


def try_admit(node: NodeState, progress: Progress, reserve: int) -> WaitingFor | None:
    """What is missing, or None: then the request has left the queue."""
    if node.num_slots_used >= node.settings.max_running and not may_push(node, progress):
        return WaitingFor.SLOT
    keeps_row = progress.id in node.results.owners  # from an earlier attempt
    if isinstance(progress.side, PrefillSide) and not ensure_metadata_buffer(node, progress):
        return WaitingFor.RESULT_SLOT
    has_pages = reserve_pages(node, progress, reserve)
    while not has_pages and not node.host.makes_room and may_push(node, progress):
        has_pages = reserve_pages(node, progress, reserve)
    if not has_pages:
        if not keeps_row:
            node.results.maybe_release_metadata_buffer(progress.id)
        return WaitingFor.TIER if node.host.makes_room else WaitingFor.PAGES
    if is_loading(node, progress):
        progress.load_until = later(node, node.host.settings.load_timeout_ns)
        enter(node, progress, Trigger.LOAD)
    else:
        begin(node, progress)
    return None


def begin(node: NodeState, progress: Progress) -> None:
    """Its pages are there, and in them what of its prefix was kept."""
    count_hit(node, progress)
    match progress.side:
        case DecodeSide() as side:
            decode_side.await_arrival(node, progress, side)
        case PrefillSide() as side:
            enter(node, progress, Trigger.COMPUTE)
            prefill_side.publish(node, progress, side)  # a cached prefix need not wait for the first chunk
        case Local():
            enter(node, progress, Trigger.COMPUTE)


def count_hit(node: NodeState, progress: Progress) -> None:
    """Once per request, however often it is computed."""
    if not progress.is_counted:
        progress.is_counted = True
        progress.cached_tokens = progress.computed
        node.counters.input_tokens += progress.request.prompt_len
        node.counters.hit_tokens += progress.computed


def may_push(node: NodeState, progress: Progress, *, gives_result_slot: bool = False) -> bool:
    """The newest parked request has given way, unless this one is no better off."""
    return not is_early(progress) and prefill_side.yield_parked(node, gives_result_slot=gives_result_slot)


def ensure_metadata_buffer(node: NodeState, progress: Progress) -> bool:
    """A result slot. When all are taken and this one is READY, the newest parked request yields its own."""
    if node.results.ensure_metadata_buffer(progress.id):
        return True
    given = may_push(node, progress, gives_result_slot=True)
    return given and node.results.ensure_metadata_buffer(progress.id)


def reserve_pages(node: NodeState, progress: Progress, reserve: int) -> bool:
    """Pages for all known tokens. At least one token has to be computed here, unless the rest comes from a peer."""
    is_alone = node.num_slots_used == 0
    return take_pages(
        node,
        progress,
        num_pages=pages_for(node, progress.length),
        match_pages=matchable_pages(node, progress),
        reserve=0 if is_alone else reserve,
    )
