"""The decode half of a rendezvous: gets the KV of a prompt from the prefill that computed it.

A request with a room and a peer address has a `DecodeSide` until its transfer has failed or is not wanted, or until it
is pushed back; then it is `Local`. Before that it learns who the peer is, reserves pages, says READY, pulls what is
offered, and commits once: every page of every shard landed, result slot read. By another policy (`allocation.py`) it
says READY first, reserves pages when all is computed, and asks with READY for what was offered meanwhile. A failed
transfer is drained first; then the request is queued like any other, and its prompt is computed here.
"""

from typing import assert_never

from tandem.core.batch import TOKEN_BYTES, num_sampled
from tandem.core.commands import AskDpRank, CancelPull, Path, PullPages, Tell
from tandem.core.disagg.allocation import allocation_policy
from tandem.core.disagg.dp_rank import AskBootstrap, Conflict, Known, Likely, RequestFacts
from tandem.core.disagg.local_prefill import LocalView, local_prefill_policy
from tandem.core.disagg.messages import (
    LAYOUT_DIFFERS,
    Abort,
    Moved,
    Offer,
    Ready,
    Release,
    ReleaseOutcome,
    ResultSlot,
)
from tandem.core.disagg.prefill_lookup import (
    ask_where,
    ask_who,
    find_rank,
    key,
    nobody_to_tell,
    on_rank_found,
    remember_prefill,
    send_farewell,
    send_farewells,
    tell_prefill,
)
from tandem.core.disagg.promises import arriving, decode_sides, promise, promised
from tandem.core.disagg.shard_progress import Failed, ShardReport, TransferFailure
from tandem.core.disagg.shared_pull import comes_for_another, no_longer_held_back
from tandem.core.disagg.sides import Arrival, DecodeSide, Local, PeerSearch
from tandem.core.disagg.transfer_state import DIGEST_BYTES, TransferState, TransferTrigger
from tandem.core.events import DpRankAnswered, PagesLanded, PeerLearned, PeerUnknown, TransferFailed
from tandem.core.request import Request
from tandem.core.scheduler.leaving import end, failure, record_closed_room
from tandem.core.scheduler.page_tables import give_back_pages, reusable_tokens, worth_loading
from tandem.core.scheduler.request_state import WANTS_KV, Progress, State, Trigger
from tandem.core.scheduler.state import (
    Farewell,
    KnownPeer,
    NodeState,
    add_stage,
    charge_stage,
    enter,
    is_over,
    later,
    pages_for,
    prompt_backlog,
    schedule,
)
from tandem.core.settings import LoadFailurePolicy, LocalPrefill, PrefillInfo
from tandem.core.values import SECOND, Address, Cause, Incarnation, Nanos, RequestId, Room, ShardId

# Causes that another attempt on this node cannot mend, or that the user wanted.
FINAL_CAUSES = frozenset(
    {
        Cause.ABORTED,
        Cause.LAYOUT_MISMATCH,
        Cause.PROTOCOL,
        Cause.CONTEXT_LENGTH_EXCEEDED,
        Cause.ROUTE_CONFLICT,
        Cause.GRAMMAR_TOO_COMPLEX,
    }
)
RELEARN_EVERY = 4  # questions for a rank
SAME_DEADLINE_NS = SECOND // 10  # by which the deadlines of two halves differ, at most, that were sent at once


# --- bootstrap -------------------------------------------------------------------------------------------------------


def create_side(node: NodeState, request: Request, room: Room, address: Address) -> DecodeSide:
    node.attempts += 1
    return DecodeSide(room, address, attempt=node.attempts, total_pages=pages_for(node, request.prompt_len))


def open_room(node: NodeState, progress: Progress, side: DecodeSide) -> None:
    node.rooms[side.room] = progress.id
    find_peer(node, progress, side)


def find_peer(node: NodeState, progress: Progress, side: DecodeSide) -> None:
    """What prefill is there, which of its DP ranks has the room, who is that? What is not known yet is asked for."""
    search = side.search
    found = find_rank(node, side.address, facts_of(progress, side))
    if search.dp_rank is not None and isinstance(found, AskBootstrap | Likely):
        found = Known(search.dp_rank)
    elif search.is_astray and isinstance(found, Likely):
        found = AskBootstrap()
    if isinstance(found, AskBootstrap) and not search.asks_rank:
        search.ask_at = node.now  # a new question
    search.asks_rank = isinstance(found, AskBootstrap)
    search.is_likely = isinstance(found, Likely)
    match found:
        case None:
            learn(node, progress, side, None)
        case Known(rank) | Likely(rank):
            known = node.peers.get(key(side.address, rank))
            if known is not None:
                bind_peer(node, progress, side, known)
            else:
                learn(node, progress, side, rank)
        case AskBootstrap():
            ask_rank(node, progress, side)
        case Conflict() if not search.is_informed:
            learn(node, progress, side, None)  # since it was asked last it may have come back with more ranks
        case Conflict(explanation):
            fail_transfer(node, progress, side, Cause.ROUTE_CONFLICT, explanation)
        case _:
            assert_never(found)


def facts_of(progress: Progress, side: DecodeSide) -> RequestFacts:
    return RequestFacts(side.room, progress.request.dp_rank_hint)


def learn(node: NodeState, progress: Progress, side: DecodeSide, dp_rank: int | None) -> None:
    side.search.learns_rank = dp_rank
    asked_at = ask_who(node, side.address, dp_rank)
    side.search.ask_at = Nanos(asked_at + node.settings.learn_peer_ns)
    schedule(node, progress)


def ask_rank(node: NodeState, progress: Progress, side: DecodeSide) -> None:
    """The prefill's bootstrap server knows the rank as soon as the request has come to it. If ever: not for ever."""
    search = side.search
    if search.rank_until is None:
        search.rank_until = later(node, node.settings.stash_ns)
    if is_over(node, search.rank_until):
        detail = "no DP rank of prefill has got this request; does its router send both halves there?"
        fail_transfer(node, progress, side, Cause.PEER_ABORTED, detail)
        return
    if search.ask_at <= node.now:
        if search.rank_asked % RELEARN_EVERY == RELEARN_EVERY - 1:
            ask_who(node, side.address, None)  # its next life may have other ranks
        patience = min(node.settings.ask_rank_ns << search.rank_asked, node.settings.ask_rank_max_ns)
        search.ask_at = Nanos(node.now + patience)
        search.rank_asked += 1
        node.out.append(AskDpRank(side.address, side.room))
    schedule(node, progress)


def on_rank_answered(node: NodeState, event: DpRankAnswered) -> None:
    if event.prefill is not None and key(event.address) in node.prefills:
        on_prefill_info(node, event.address, event.prefill)
    progress = node.in_room(event.room)
    side = progress.side if progress is not None else None
    if progress is None or not isinstance(side, DecodeSide):
        on_rank_found(node, event)
    elif side.address != event.address or event.dp_rank is None:
        hurry_if_astray(node, progress, side, event)
    elif progress.state is State.BOOTSTRAPPING:
        side.search.dp_rank = event.dp_rank
        find_peer(node, progress, side)
    elif side.arrival is not None:
        go_on_to(node, progress, side, side.arrival, event.dp_rank)


def hurry_if_astray(node: NodeState, progress: Progress, side: DecodeSide, event: DpRankAnswered) -> None:
    """No rank has the room yet. One of a server that is younger than this half was sent to an earlier life."""
    search = side.search
    if side.address != event.address or event.age_ns is None or search.rank_until is None:
        return
    if node.now - progress.arrived_at > event.age_ns:
        search.rank_until = min(search.rank_until, Nanos(node.now + node.settings.resend_ns))


def on_peer_learned(node: NodeState, event: PeerLearned) -> None:
    node.asked.pop(key(event.address), None)
    node.asked.pop(key(event.address, event.dp_rank), None)
    is_another = remember_prefill(node, event.address, event.prefill)
    node.peers[key(event.address, event.dp_rank)] = KnownPeer(event.address, event.peer, event.layout, event.differs)
    inform(node, event.address, is_another=is_another)
    for progress, side, arrival in promised(node):
        if side.address == event.address and arrival.moved_to == event.dp_rank:
            go_on_to(node, progress, side, arrival, event.dp_rank)


def on_prefill_info(node: NodeState, address: Address, prefill: PrefillInfo) -> None:
    """Said beside the answer to another question. Mostly it is no news."""
    if remember_prefill(node, address, prefill):
        inform(node, address, is_another=True)


def inform(node: NodeState, address: Address, *, is_another: bool) -> None:
    """Those who wait hear what the prefill says of itself. If that is another one, what they had found is void."""
    send_farewells(node, address)
    for progress, side in decode_sides(node, State.BOOTSTRAPPING):
        if side.address == address:
            if is_another:
                side.search = PeerSearch()
            side.search.is_informed = True
            find_peer(node, progress, side)


def on_peer_unknown(node: NodeState, event: PeerUnknown) -> None:
    """Asked again at the next timer of those who wait, some times: a gateway that sent us here waits for our answer."""
    nobody_to_tell(node, event.address, event.dp_rank)
    for progress, side in decode_sides(node, State.BOOTSTRAPPING):
        search = side.search
        if side.address != event.address:
            continue
        if event.dp_rank is not None and (search.asks_rank or search.learns_rank != event.dp_rank):
            continue  # nobody asked that for it
        if event.dp_rank is not None and search.is_likely:
            search.is_astray = True  # while that rank is down, its rooms go to others
            find_peer(node, progress, side)
            continue
        progress.first_cause = event.detail
        if search.missed_at is not None and node.now < search.missed_at + node.settings.learn_peer_ns // 2:
            continue  # ranks are asked for more often than one would give up
        search.missed_at = node.now
        search.unanswered += 1
        if search.unanswered >= node.settings.learn_peer_tries:
            node.prefills.pop(key(event.address), None)
            fail_transfer(node, progress, side, Cause.PEER_UNKNOWN, event.detail)
        elif event.dp_rank is not None:
            ask_who(node, event.address, None)  # its next life may have other ranks


def bind_peer(node: NodeState, progress: Progress, side: DecodeSide, known: KnownPeer) -> None:
    side.peer = known.incarnation
    if known.layout != node.settings.layout:
        fail_transfer(node, progress, side, Cause.LAYOUT_MISMATCH, known.differs or LAYOUT_DIFFERS)
    elif progress.state is State.BOOTSTRAPPING:
        is_late = not allocation_policy(node.settings).may_reserve(is_computed=False)
        if is_late and not compute_here_if_preferred(node, progress, side, prompt_backlog(node)):
            say_ready(node, progress, side)
            enter(node, progress, Trigger.AWAIT)
        else:
            enter(node, progress, Trigger.PEER_READY)


# --- local prefill ----------------------------------------------------------------------------------------------------


def prefers_local(node: NodeState, progress: Progress, backlog: int) -> bool:
    """By policy, is this prompt computed here although a peer was named? `backlog`: prompt tokens that wait here."""
    if node.settings.local_prefill is LocalPrefill.OFF:
        return False  # a look at the tree costs something
    prompt_len, page_size = progress.request.prompt_len, node.settings.page_size
    hashes = progress.hashes[: reusable_tokens(progress) // page_size]
    num_matched = len(node.tree.match(hashes))
    cached = (num_matched + len(worth_loading(node, progress, hashes[num_matched:]))) * page_size
    if pages_for(node, prompt_len) - num_matched > node.pool.num_free + node.tree.num_evictable:
        return False  # prefill may compute it meanwhile
    view = LocalView(uncached=prompt_len - cached, backlog=backlog, chunk=node.settings.chunk_tokens)
    return local_prefill_policy(node.settings).may_compute_here(view)


def compute_here_if_preferred(node: NodeState, progress: Progress, side: DecodeSide, backlog: int) -> bool:
    """Tell prefill that it is not needed; from here on this is a request like any other."""
    if not prefers_local(node, progress, backlog):
        return False
    assert side.state is TransferState.BOOTSTRAPPING, "READY is said: prefill may send already"
    release = last_word(node, progress.request, side.room, "not_needed", attempt=side.attempt)
    close_room(node, progress, side, release)
    charge_stage(node, progress)
    progress.side = Local()
    return True


# --- arrival ---------------------------------------------------------------------------------------------------------


def await_arrival(node: NodeState, progress: Progress, side: DecodeSide) -> None:
    """Pages and slot are reserved: tell prefill, now or again, so that all that they lack is offered."""
    if side.arrival is None:
        say_ready(node, progress, side)
    else:
        want_pages(node, progress, side, side.arrival)
    enter(node, progress, Trigger.ARRIVE)


def say_ready(node: NodeState, progress: Progress, side: DecodeSide) -> None:
    """Tell prefill that somebody will collect; what is reserved, if anything is, may begin with a prefix."""
    assert side.peer is not None, "it was queued because its peer is known"
    arrival = side.arrival = Arrival(
        side.peer,
        held_pages=progress.inserted,
        first_wanted=progress.inserted,
        num_wanted=side.total_pages - progress.inserted,
        offered=progress.inserted,
        ready_at=node.now,
        until=later(node, node.settings.waiting_timeout_ns),
    )
    side.move(TransferTrigger.READY_SENT)
    side.search.ask_at = Nanos(node.now + node.settings.resend_ns)
    send_ready(node, progress, side, arrival)


def want_pages(node: NodeState, progress: Progress, side: DecodeSide, arrival: Arrival) -> None:
    """What was offered before there were pages for it is asked for once more, and the result slot with it."""
    arrival.first_wanted = arrival.offered = progress.inserted
    arrival.num_wanted = side.total_pages - progress.inserted
    arrival.result = None  # even if no page has to come: when it is here again, everything is
    arrival.until = later(node, node.settings.waiting_timeout_ns)
    send_ready(node, progress, side, arrival)


def send_ready(node: NodeState, progress: Progress, side: DecodeSide, arrival: Arrival) -> None:
    arrival.resend_at = Nanos(node.now + node.settings.resend_ns)
    message = Ready(
        room=side.room,
        attempt=side.attempt,
        source=node.settings.incarnation,
        target=arrival.peer,
        layout=node.settings.layout,
        prompt_len=progress.request.prompt_len,
        held_pages=arrival.held_pages,
        known_pages=arrival.offered,
        prompt_digest=progress.request.prompt_digest,
        rendered_at=progress.request.rendered_at,
        cut=node.settings.cut,
        has_result=arrival.result is not None,
        waited_ns=Nanos(node.now - progress.arrived_at),
    )
    node.out.append(Tell(arrival.peer, message))
    schedule(node, progress)


def send_again(node: NodeState, progress: Progress, side: DecodeSide, arrival: Arrival) -> None:
    """READY may be lost, or the answer to who it goes to next."""
    rank = arrival.moved_to
    if rank is None or key(side.address, rank) in node.peers:
        send_ready(node, progress, side, arrival)
        return
    arrival.resend_at = Nanos(node.now + node.settings.resend_ns)
    ask_who(node, side.address, rank)
    schedule(node, progress)


def on_peer_returned(node: NodeState, peer: Incarnation) -> None:
    """Do not wait for the timer: what READY asks for may have been lost with the connection, or READY itself."""
    for progress, side, arrival in promised(node):
        if arrival.peer == peer:
            send_again(node, progress, side, arrival)


def ask_if_astray(node: NodeState, side: DecodeSide) -> None:
    """The likely rank has not offered anything yet. It tells us when the room is elsewhere, unless that was lost."""
    search = side.search
    if side.is_unmet and is_over(node, search.ask_at):
        search.ask_at = Nanos(node.now + (node.settings.resend_ns << search.rank_asked))
        search.rank_asked += 1
        node.out.append(AskDpRank(side.address, side.room))


def on_moved(node: NodeState, peer: Incarnation, moved: Moved) -> None:
    """The likely rank has not got the room: say what it was told where it was meant to go."""
    found = promise(node.in_room(moved.room))
    if found is not None:
        progress, side, arrival = found
        if peer == arrival.peer:
            go_on_to(node, progress, side, arrival, moved.dp_rank)
        return
    tombstone = node.tombstones.get(moved.room)
    known = next((known for known in node.peers.values() if known.incarnation == peer), None)
    if tombstone is not None and known is not None and moved.room not in node.rooms:
        send_farewell(node, Farewell(known.address, RequestFacts(moved.room), moved.dp_rank), tombstone)


def go_on_to(node: NodeState, progress: Progress, side: DecodeSide, arrival: Arrival, dp_rank: int) -> None:
    """Another rank has the room: READY is said there, once it is known who that is. Only once, and before any offer."""
    if arrival.offered_at is not None or arrival.moved_to not in (None, dp_rank):
        return
    known = node.peers.get(key(side.address, dp_rank))
    if known is None:
        arrival.moved_to = dp_rank
        ask_who(node, side.address, dp_rank)
    elif known.incarnation != arrival.peer:
        arrival.moved_to = dp_rank
        side.peer = arrival.peer = known.incarnation
        send_ready(node, progress, side, arrival)


def on_offer(node: NodeState, peer: Incarnation, offer: Offer) -> None:
    """Pull what is new. What was offered before, or leaves a gap after a lost message, changes nothing."""
    found = promise(node.in_room(offer.room))
    if found is None:
        tombstone = node.tombstones.get(offer.room)
        if tombstone is not None:
            node.out.append(Tell(peer, tombstone))
        return
    progress, side, arrival = found
    if (
        peer != arrival.peer
        or offer.source != peer
        or offer.attempt != side.attempt
        or offer.first_page > arrival.offered
    ):
        return
    complaint = misfit(node, progress, side, arrival, offer)
    if complaint is not None:
        fail_transfer(node, progress, side, Cause.PROTOCOL, complaint)
        return
    if arrival.offered_at is None:
        arrival.offered_at = node.now
    if progress.state is State.ARRIVING:
        pull(node, progress, side, arrival, offer)
    else:
        arrival.offered = max(arrival.offered, offer.first_page + len(offer.pages))
    if offer.result is not None:
        if arrival.result is None:
            arrival.result_at = node.now
        arrival.result = offer.result
    if progress.state is State.AWAITING:
        want_turn(node, progress, arrival)


def want_turn(node: NodeState, progress: Progress, arrival: Arrival) -> None:
    """If pages may be reserved now, be queued for them; that is waited for as long as for any others."""
    if allocation_policy(node.settings).may_reserve(is_computed=arrival.result is not None):
        split_arrival_stage(progress, arrival)
        arrival.until = None
        enter(node, progress, Trigger.PEER_READY)


def go_on_pulling(node: NodeState) -> list[RequestId]:
    """Whose pages were pulled for another request, which has them now or has ended: what they lack is asked for."""
    free = no_longer_held_back(node)
    for progress, side, arrival in free:
        send_ready(node, progress, side, arrival)
    return [progress.id for progress, _, _ in free]


def misfit(node: NodeState, progress: Progress, side: DecodeSide, arrival: Arrival, offer: Offer) -> str | None:
    num_pages = len(offer.pages)
    stop = offer.first_page + num_pages
    if offer.total_pages != side.total_pages or stop > side.total_pages:
        return f"prefill offers up to page {stop} of {offer.total_pages}, want {side.total_pages}"
    if len(offer.generations) != num_pages or offer.first_page < arrival.held_pages:
        return "offer is malformed"
    wanted_bytes = DIGEST_BYTES * num_pages
    if any(len(digests) != wanted_bytes for digests in offer.digests):
        return "offer has the wrong number of digests"
    if offer.result is not None and offer.result.room != offer.room:
        return "result slot belongs to another room"
    if offer.result is not None and not is_well_formed(
        offer.result, num_sampled(progress.request.prompt_len, node.settings.block_tokens)
    ):
        return "result slot is malformed"
    if offer.result is not None and offer.result.cached_tokens > progress.request.prompt_len:
        return "prefill found more of the prompt than there is"
    return None


def is_well_formed(slot: ResultSlot, num_tokens: int) -> bool:
    """num_tokens: that a prompt of this length is followed by; fewer only if the last of them ends the answer"""
    durations = (slot.queue_ns, slot.compute_ns, slot.overlapped_ns)
    least = TOKEN_BYTES if slot.flags else TOKEN_BYTES * num_tokens
    has_tokens = len(slot.token) % TOKEN_BYTES == 0 and least <= len(slot.token) <= TOKEN_BYTES * num_tokens
    return has_tokens and 0 <= slot.flags < 256 and min(durations) >= 0


def pull(node: NodeState, progress: Progress, side: DecodeSide, arrival: Arrival, offer: Offer) -> None:
    if not arrival.pulling and comes_for_another(node, progress, arrival):
        return
    skip = arrival.offered - offer.first_page
    if skip >= len(offer.pages):
        return
    start, stop = arrival.offered, offer.first_page + len(offer.pages)
    arrival.offered = stop
    arrival.pulling = True
    node.out.append(
        PullPages(
            request=progress.id,
            attempt=side.attempt,
            room=offer.room,
            peer=arrival.peer,
            first_wanted=start - arrival.first_wanted,
            sources=offer.pages[skip:],
            generations=offer.generations[skip:],
            destinations=tuple(progress.pages[start:stop]),
            digests=tuple(digests[DIGEST_BYTES * skip :] for digests in offer.digests),
            secrets=offer.secrets,
        )
    )


def on_landed(node: NodeState, event: PagesLanded) -> None:
    on_shard_report(node, event.request, event.shard, ShardReport(event.attempt, event.landed))


def on_shard_report(node: NodeState, request: RequestId, shard: ShardId, report: ShardReport) -> None:
    """A shard has reported on a transfer. A transfer that has ended is latched: it hears nothing any more."""
    found = arriving(node.requests.get(request))
    if found is None:
        return
    progress, side, arrival = found
    shards = node.settings.shards
    if report.attempt != side.attempt or shard not in shards:
        return
    arrival.record_report(shard, report)
    verdict = arrival.verdict(shards)
    if isinstance(verdict, Failed):
        fail_transfer(node, progress, side, verdict.cause, f"shard {verdict.shard}: {verdict.detail}")
    else:
        side.move(TransferTrigger.PAGE_MOVED)


def commit_if_landed(node: NodeState, request: RequestId | None) -> tuple[Progress, ResultSlot] | None:
    """If everything is here, one step from 'arriving' to 'the prompt is known'. Returns what prefill has sampled."""
    found = arriving(node.requests.get(request) if request is not None else None)
    if found is None:
        return None
    progress, side, arrival = found
    result = arrival.landed_result(node.settings.shards)
    if result is None:
        return None
    side.move(TransferTrigger.COMMITTED)
    done = last_word(node, progress.request, side.room, "done", attempt=side.attempt, num_pulled=arrival.num_wanted)
    close_room(node, progress, side, done)
    split_arrival_stage(progress, arrival)
    progress.path = Path.REMOTE
    progress.kv_pages = arrival.num_wanted
    progress.computed = progress.launched = progress.request.prompt_len
    progress.cached_tokens = max(progress.cached_tokens, result.cached_tokens)
    return progress, result


def split_arrival_stage(progress: Progress, arrival: Arrival) -> None:
    """By its own clock, what prefill did since READY; else it is wire up to the first offer, and transfer beyond it."""
    if arrival.result is None or arrival.is_booked:
        return
    result, arrival.is_booked = arrival.result, True
    offered_at = arrival.offered_at if arrival.offered_at is not None else arrival.result_at
    answer_ns = offered_at - arrival.ready_at
    queue_ns = min(result.queue_ns, answer_ns)
    compute_ns = min(result.compute_ns, answer_ns - queue_ns)
    add_stage(progress, "prefill_waiting", Nanos(queue_ns))
    overlapped_ns = min(result.overlapped_ns, arrival.result_at - offered_at)
    add_stage(progress, "prefill_forward", Nanos(compute_ns + overlapped_ns))
    add_stage(progress, "peer_wire", Nanos(answer_ns - queue_ns - compute_ns))
    progress.entered_at = Nanos(offered_at + overlapped_ns)  # the rest of the state is charged as usual


# --- failures --------------------------------------------------------------------------------------------------------


def on_transfer_failed(node: NodeState, event: TransferFailed) -> None:
    failure = TransferFailure(event.cause, event.detail)
    on_shard_report(node, event.request, event.shard, ShardReport(event.attempt, failure=failure))


def on_peer_abort(node: NodeState, peer: Incarnation, abort: Abort) -> None:
    progress = node.in_room(abort.room)
    side = progress.side if progress is not None else None
    if progress is None or not isinstance(side, DecodeSide) or side.peer != peer:
        return
    if abort.cause is Cause.DEADLINE_EXCEEDED and progress.deadline <= node.now + SAME_DEADLINE_NS:
        return  # it is this half's deadline too, which ends it in the wait that it is in
    if progress.state is State.BOOTSTRAPPING or progress.state in WANTS_KV:
        fail_transfer(node, progress, side, abort.cause, abort.detail or "prefill gave up")


def lose_prefill(node: NodeState, progress: Progress, side: DecodeSide, cause: Cause, detail: str) -> None:
    """Its rank is gone. If it has offered nothing the room may be elsewhere: at its next life, or at another rank where
    it was only likely to be, or was told to be. Who has it is to hear of the end.
    """
    if side.arrival is None or side.arrival.offered_at is None:
        side.search.is_astray |= side.search.is_likely
        side.peer = None
    fail_transfer(node, progress, side, cause, detail)


def fail_transfer(node: NodeState, progress: Progress, side: DecodeSide, cause: Cause, detail: str) -> None:
    """The KV will not come. By policy the request ends, or its prompt is computed here once its pages are drained."""
    recompute = node.settings.load_failure is LoadFailurePolicy.RECOMPUTE and cause not in FINAL_CAUSES
    if not recompute:
        if cause is Cause.ABORTED:  # there; nobody has aborted it here
            cause, detail = Cause.PEER_ABORTED, f"{detail}: {cause}"
        fail(node, progress, side, cause, detail)
        return
    progress.first_cause = f"{cause}: {detail}"
    progress.path = Path.FALLBACK
    if progress.state is State.ARRIVING:
        enter(node, progress, Trigger.PEER_FAILED)
        abandon_transfer(node, progress, side, cause, detail)
        recover_if_drained(node, progress)
    else:
        if progress.state is State.LOADING:
            give_back_pages(node, progress)
            enter(node, progress, Trigger.REQUEUE, first=True)
        abandon_transfer(node, progress, side, cause, detail)
        enter(node, progress, Trigger.PEER_FAILED)
        progress.side = Local()


def recover_if_drained(node: NodeState, progress: Progress) -> None:
    if progress.state is State.RECOVERING and not progress.drains:
        give_back_pages(node, progress)
        enter(node, progress, Trigger.REQUEUE, first=True)
        progress.side = Local()


def abandon_transfer(node: NodeState, progress: Progress, side: DecodeSide, cause: Cause, detail: str) -> None:
    """Stop reading and tell the peer that nobody will collect. Idempotent."""
    if side.state in (TransferState.FAILED, TransferState.SUCCESS):
        return
    side.move(TransferTrigger.FAULT)
    node.counters.transfer_failed += side.arrival is not None
    node.counters.bootstrap_failed += side.arrival is None
    release = last_word(node, progress.request, side.room, "aborted", cause, detail, attempt=side.attempt)
    close_room(node, progress, side, release)
    if side.arrival is not None and side.arrival.pulling:
        progress.drains = dict.fromkeys(node.settings.shards)
        node.out.append(CancelPull(progress.id, side.attempt))


def close_room(node: NodeState, progress: Progress, side: DecodeSide, release: Release) -> None:
    """The last word to prefill, now and whenever it speaks of the room again."""
    if side.peer is not None:
        node.out.append(Tell(side.peer, release))
    elif side.search.is_astray:
        ask_where(node, side.address, facts_of(progress, side))
    else:
        tell_prefill(node, side.address, facts_of(progress, side), release, is_informed=side.search.is_informed)
    record_closed_room(node, side.room, release)


def fail(node: NodeState, progress: Progress, side: DecodeSide, cause: Cause, detail: str = "") -> None:
    verdict = failure(node, progress, cause, detail or progress.first_cause)
    abandon_transfer(node, progress, side, cause, detail)
    end(node, progress, verdict)


def on_timer(node: NodeState, progress: Progress, side: DecodeSide) -> None:
    match progress.state, side.arrival:
        case State.BOOTSTRAPPING, _ if side.search.ask_at <= node.now:
            find_peer(node, progress, side)
        case state, Arrival() as arrival if state in WANTS_KV and is_over(node, arrival.until):
            fail_transfer(node, progress, side, Cause.WAITING_TIMEOUT, "the KV has not come in time")
        case state, Arrival() as arrival if state in WANTS_KV and arrival.resend_at <= node.now:
            ask_if_astray(node, side)
            send_again(node, progress, side, arrival)
        case _:
            pass


def last_word(
    node: NodeState,
    request: Request,
    room: Room,
    outcome: ReleaseOutcome,
    cause: Cause | None = None,
    detail: str = "",
    *,
    attempt: int = 0,
    num_pulled: int = 0,
) -> Release:
    """With what shows a prefill that was never told READY that it is told by the other half of its request."""
    own, digest = node.settings.incarnation, request.prompt_digest
    return Release(room, own, outcome, cause, attempt, detail, digest, request.rendered_at, num_pulled)
