"""The decode half of a rendezvous: gets the KV of a prompt from the prefill that computed it.

A request with a room and a peer address has a `Receiver` until its KV has arrived or the transfer has failed. It
learns who the peer is, reserves pages, says READY, pulls what is offered, and commits once: every page of every shard
landed, result slot read. A failed transfer is drained first; then the request is queued like any other, and its prompt
is computed here.
"""

from typing import assert_never

from tandem.core.commands import AskDpRank, CancelPull, LearnPeer, Path, PullPages, Tell
from tandem.core.disagg.dp_rank import Ask, Conflict, Known, RequestFacts, resolve
from tandem.core.disagg.local_prefill import LocalView, local_prefill_policy
from tandem.core.disagg.messages import LAYOUT_DIFFERS, MAX_GRANT_SECRET_BYTES, Abort, Offer, Ready, Release, ResultSlot
from tandem.core.disagg.shard_progress import Failed, Failure, ShardReport
from tandem.core.disagg.transfer_state import Receiver, TransferState, TransferTrigger
from tandem.core.events import DpRankAnswered, PagesLanded, PeerLearned, PeerUnknown, TransferFailed
from tandem.core.request import Request
from tandem.core.scheduler.request_state import Progress, State, Trigger
from tandem.core.scheduler.state import (
    KnownPeer,
    NodeState,
    add_stage,
    charge_stage,
    end,
    enter,
    failure,
    give_back_pages,
    is_over,
    later,
    pages_for,
    record_closed_room,
    schedule,
)
from tandem.core.settings import LoadFailurePolicy, LocalPrefill, PrefillInfo
from tandem.core.values import Address, Cause, Incarnation, Nanos, RequestId, ShardId

# Causes that another attempt on this node cannot mend, or that the user wanted.
FINAL_CAUSES = frozenset(
    {Cause.ABORTED, Cause.LAYOUT_MISMATCH, Cause.PROTOCOL, Cause.PROMPT_TOO_LONG, Cause.ROUTE_CONFLICT}
)
TOKEN_BYTES = 4
RELEARN_EVERY = 4  # questions for a rank


def key(address: Address, dp_rank: int | None = None) -> str:
    where = f"{address.host}:{address.port}"
    return where if dp_rank is None else f"{where}/{dp_rank}"


# --- bootstrap -------------------------------------------------------------------------------------------------------


def create_receiver(node: NodeState, progress: Progress) -> None:
    room, address = progress.request.room, progress.request.peer
    assert room is not None
    assert address is not None
    node.attempts += 1
    total_pages = pages_for(node, progress.request.prompt_len)
    progress.receiver = Receiver(address, attempt=node.attempts, total_pages=total_pages)
    node.rooms[room] = progress.id
    find_peer(node, progress)


def find_peer(node: NodeState, progress: Progress) -> None:
    """What prefill is there, which of its DP ranks has the room, who is that? What is not known yet is asked for."""
    receiver = progress.receiver
    assert receiver is not None
    found = find_rank(node, progress.request, receiver.dp_rank)
    if isinstance(found, Ask) and not receiver.asks_rank:
        receiver.ask_at = node.now  # a new question
    receiver.asks_rank = isinstance(found, Ask)
    match found:
        case None:
            learn(node, progress, None)
        case Known(rank):
            known = node.peers.get(key(receiver.address, rank))
            if known is not None:
                meet(node, progress, known)
            else:
                learn(node, progress, rank)
        case Ask():
            ask_rank(node, progress)
        case Conflict(explanation):
            fail_transfer(node, progress, Cause.ROUTE_CONFLICT, explanation)
        case _:
            assert_never(found)


def find_rank(node: NodeState, request: Request, answered: int | None = None) -> Known | Ask | Conflict | None:
    """Which DP rank of the prefill has the request. None: nothing is known of that prefill."""
    assert request.room is not None
    assert request.peer is not None
    prefill = node.prefills.get(key(request.peer))
    if prefill is None:
        return None
    facts = RequestFacts(request.room, request.dp_rank_hint)
    found = resolve(facts, prefill, force_query=node.settings.force_query)
    return Known(answered) if isinstance(found, Ask) and answered is not None else found


def tell_prefill(node: NodeState, request: Request, release: Release) -> None:
    """A half that never said READY is over. Where its rank is not known, the answer to a question brings it over."""
    found = find_rank(node, request)
    assert request.peer is not None
    assert request.room is not None
    if isinstance(found, Known):
        known = node.peers.get(key(request.peer, found.rank))
        if known is not None:
            node.out.append(Tell(known.incarnation, release))
    elif isinstance(found, Ask):
        node.out.append(AskDpRank(request.peer, request.room))


def learn(node: NodeState, progress: Progress, dp_rank: int | None) -> None:
    assert progress.receiver is not None
    progress.receiver.learns_rank = dp_rank
    asked_at = ask_who(node, progress.receiver.address, dp_rank)
    progress.receiver.ask_at = Nanos(asked_at + node.settings.learn_peer_ns)
    schedule(node, progress)


def ask_who(node: NodeState, address: Address, dp_rank: int | None) -> Nanos:
    """One question per rank and interval, however many requests wait for the answer. Returns when it was asked."""
    while node.asked and next(iter(node.asked.values())) + node.settings.learn_peer_ns <= node.now:
        del node.asked[next(iter(node.asked))]  # in the order in which they were asked
    question = key(address, dp_rank)
    if question not in node.asked:
        node.asked[question] = node.now
        node.out.append(LearnPeer(address, dp_rank))
    return node.asked[question]


def ask_rank(node: NodeState, progress: Progress) -> None:
    """The prefill's bootstrap server knows the rank as soon as the request has come to it. If ever: not for ever."""
    receiver, room = progress.receiver, progress.request.room
    assert receiver is not None
    assert room is not None
    if receiver.rank_until is None:
        receiver.rank_until = later(node, node.settings.stash_ns)
    if is_over(node, receiver.rank_until):
        detail = "no DP rank of prefill has got this request; does its router send both halves there?"
        fail_transfer(node, progress, Cause.PEER_ABORTED, detail)
        return
    if receiver.ask_at <= node.now:
        if receiver.rank_asked % RELEARN_EVERY == RELEARN_EVERY - 1:
            ask_who(node, receiver.address, None)  # its next life may have other ranks
        patience = min(node.settings.ask_rank_ns << receiver.rank_asked, node.settings.ask_rank_max_ns)
        receiver.ask_at = Nanos(node.now + patience)
        receiver.rank_asked += 1
        node.out.append(AskDpRank(receiver.address, room))
    schedule(node, progress)


def on_rank_answered(node: NodeState, event: DpRankAnswered) -> None:
    request = node.rooms.get(event.room)
    progress = node.requests.get(request) if request is not None else None
    receiver = progress.receiver if progress is not None else None
    if progress is None or receiver is None:
        tombstone = node.tombstones.get(event.room)
        known = node.peers.get(key(event.address, event.dp_rank)) if event.dp_rank is not None else None
        if tombstone is not None and known is not None:
            node.out.append(Tell(known.incarnation, tombstone))
    elif progress.state is State.BOOTSTRAPPING and receiver.address == event.address and event.dp_rank is not None:
        receiver.dp_rank = event.dp_rank
        find_peer(node, progress)


def on_peer_learned(node: NodeState, event: PeerLearned) -> None:
    node.asked.pop(key(event.address), None)
    node.asked.pop(key(event.address, event.dp_rank), None)
    remember_prefill(node, key(event.address), event.prefill)
    node.peers[key(event.address, event.dp_rank)] = KnownPeer(event.peer, event.layout, event.differs)
    for progress in node.live(State.BOOTSTRAPPING):
        if progress.receiver is not None and progress.receiver.address == event.address:
            find_peer(node, progress)


def remember_prefill(node: NodeState, address: str, prefill: PrefillInfo) -> None:
    node.prefills.pop(address, None)
    node.prefills[address] = prefill
    while len(node.prefills) > node.settings.max_prefills:
        oldest = next(iter(node.prefills))
        del node.prefills[oldest]
        for known in [known for known in node.peers if known.rpartition("/")[0] == oldest]:
            del node.peers[known]


def on_peer_unknown(node: NodeState, event: PeerUnknown) -> None:
    """Asked again at the next timer of those who wait, some times: a gateway that sent us here waits for our answer."""
    for progress in node.live(State.BOOTSTRAPPING):
        receiver = progress.receiver
        if receiver is None or receiver.address != event.address:
            continue
        if event.dp_rank is not None and (receiver.asks_rank or receiver.learns_rank != event.dp_rank):
            continue  # nobody asked that for it
        progress.first_cause = event.detail
        if receiver.missed_at is not None and node.now < receiver.missed_at + node.settings.learn_peer_ns // 2:
            continue  # ranks are asked for more often than one would give up
        receiver.missed_at = node.now
        receiver.unanswered += 1
        if receiver.unanswered >= node.settings.learn_peer_tries:
            node.prefills.pop(key(event.address), None)
            fail_transfer(node, progress, Cause.PEER_UNKNOWN, event.detail)


def meet(node: NodeState, progress: Progress, known: KnownPeer) -> None:
    assert progress.receiver is not None
    progress.receiver.peer = known.incarnation
    if known.layout != node.settings.layout:
        fail_transfer(node, progress, Cause.LAYOUT_MISMATCH, known.differs or LAYOUT_DIFFERS)
    elif progress.state is State.BOOTSTRAPPING:
        enter(node, progress, Trigger.PEER_READY)


# --- local prefill ----------------------------------------------------------------------------------------------------


def prefers_local(node: NodeState, progress: Progress, backlog: int) -> bool:
    """By policy, is this prompt computed here although a peer was named? `backlog`: prompt tokens that wait here."""
    if node.settings.local_prefill is LocalPrefill.OFF:
        return False  # a look at the tree costs something
    prompt_len, page_size = progress.request.prompt_len, node.settings.page_size
    cached = len(node.tree.match(progress.hashes[: (prompt_len - 1) // page_size])) * page_size
    if pages_for(node, prompt_len) - cached // page_size > node.pool.num_free + node.tree.num_evictable:
        return False  # prefill may compute it meanwhile
    view = LocalView(uncached=prompt_len - cached, backlog=backlog, chunk=node.settings.chunk_tokens)
    return local_prefill_policy(node.settings).may_compute_here(view)


def compute_here(node: NodeState, progress: Progress) -> None:
    """Tell prefill that it is not needed; from here on this is a request like any other."""
    receiver, room = progress.receiver, progress.request.room
    assert receiver is not None
    assert receiver.peer is not None
    assert room is not None
    assert receiver.state is TransferState.BOOTSTRAPPING, "READY is said: prefill may send already"
    release = Release(room, node.settings.incarnation, "not_needed", attempt=receiver.attempt)
    node.out.append(Tell(receiver.peer, release))
    record_closed_room(node, room, release)
    charge_stage(node, progress)
    progress.receiver = None


# --- arrival ---------------------------------------------------------------------------------------------------------


def await_arrival(node: NodeState, progress: Progress) -> None:
    """Pages and slot are reserved: tell prefill that somebody will collect."""
    receiver = progress.receiver
    assert receiver is not None
    receiver.held_pages = progress.inserted
    receiver.offered = progress.inserted
    receiver.ready_at = node.now
    receiver.arrival_until = later(node, node.settings.waiting_timeout_ns)
    receiver.move(TransferTrigger.READY_SENT)
    send_ready(node, progress)
    enter(node, progress, Trigger.ARRIVE)


def send_ready(node: NodeState, progress: Progress) -> None:
    receiver, room = progress.receiver, progress.request.room
    assert receiver is not None
    assert receiver.peer is not None
    assert room is not None
    receiver.resend_at = Nanos(node.now + node.settings.resend_ns)
    message = Ready(
        room=room,
        attempt=receiver.attempt,
        source=node.settings.incarnation,
        target=receiver.peer,
        layout=node.settings.layout,
        prompt_len=progress.request.prompt_len,
        held_pages=receiver.held_pages,
        known_pages=receiver.offered,
        prompt_digest=progress.request.prompt_digest,
        rendered_at=progress.request.rendered_at,
    )
    node.out.append(Tell(receiver.peer, message))
    schedule(node, progress)


def on_peer_returned(node: NodeState, peer: Incarnation) -> None:
    """Do not wait for the timer: what READY asks for may have been lost with the connection, or READY itself."""
    for progress in node.live(State.ARRIVING):
        if progress.receiver is not None and progress.receiver.peer == peer:
            send_ready(node, progress)


def on_offer(node: NodeState, peer: Incarnation, offer: Offer) -> None:
    """Pull what is new. What was offered before, or leaves a gap after a lost message, changes nothing."""
    request = node.rooms.get(offer.room)
    progress = node.requests.get(request) if request is not None else None
    receiver = progress.receiver if progress is not None else None
    if progress is None or receiver is None or progress.state is not State.ARRIVING:
        tombstone = node.tombstones.get(offer.room)
        if tombstone is not None:
            node.out.append(Tell(peer, tombstone))
        return
    if (
        peer != receiver.peer
        or offer.source != peer
        or offer.attempt != receiver.attempt
        or offer.first_page > receiver.offered
    ):
        return
    complaint = misfit(node, receiver, offer)
    if complaint is not None:
        fail_transfer(node, progress, Cause.PROTOCOL, complaint)
        return
    if receiver.offered_at is None:
        receiver.offered_at = node.now
    pull(node, progress, offer)
    if offer.result is not None:
        receiver.result = offer.result
        receiver.result_at = receiver.result_at or node.now


def misfit(node: NodeState, receiver: Receiver, offer: Offer) -> str | None:
    num_pages = len(offer.pages)
    stop = offer.first_page + num_pages
    if offer.total_pages != receiver.total_pages or stop > receiver.total_pages:
        return f"prefill offers up to page {stop} of {offer.total_pages}, want {receiver.total_pages}"
    if len(offer.generations) != num_pages or offer.first_page < receiver.held_pages:
        return "offer is malformed"
    if len(offer.digests) != len(node.settings.shards) or any(len(d) != 8 * num_pages for d in offer.digests):
        return "offer has the wrong number of digests"
    if len(offer.secrets) != len(node.settings.shards) or max(map(len, offer.secrets)) > MAX_GRANT_SECRET_BYTES:
        return "offer has the wrong number of secrets"
    if offer.result is not None and offer.result.room != offer.room:
        return "result slot belongs to another room"
    if offer.result is not None and not is_well_formed(offer.result):
        return "result slot is malformed"
    return None


def is_well_formed(row: ResultSlot) -> bool:
    durations = (row.queue_ns, row.compute_ns, row.overlapped_ns)
    return len(row.token) == TOKEN_BYTES and 0 <= row.flags < 256 and min(durations) >= 0


def pull(node: NodeState, progress: Progress, offer: Offer) -> None:
    receiver = progress.receiver
    assert receiver is not None
    assert receiver.peer is not None
    skip = receiver.offered - offer.first_page
    if skip >= len(offer.pages):
        return
    start, stop = receiver.offered, offer.first_page + len(offer.pages)
    receiver.offered = stop
    receiver.pulling = True
    node.out.append(
        PullPages(
            request=progress.id,
            attempt=receiver.attempt,
            room=offer.room,
            peer=receiver.peer,
            first_wanted=start - receiver.held_pages,
            sources=offer.pages[skip:],
            generations=offer.generations[skip:],
            destinations=tuple(progress.pages[start:stop]),
            digests=tuple(digests[8 * skip :] for digests in offer.digests),
            secrets=offer.secrets,
        )
    )


def on_landed(node: NodeState, event: PagesLanded) -> None:
    hear_shard(node, event.request, event.shard, ShardReport(event.attempt, event.landed))


def hear_shard(node: NodeState, request: RequestId, shard: ShardId, report: ShardReport) -> None:
    """A shard has reported on a transfer. A transfer that has ended is latched: it hears nothing any more."""
    progress = node.requests.get(request)
    receiver = progress.receiver if progress is not None else None
    if progress is None or receiver is None or progress.state is not State.ARRIVING:
        return
    if report.attempt != receiver.attempt or shard not in node.settings.shards:
        return
    receiver.hear(shard, report)
    found = receiver.verdict(node.settings.shards)
    if isinstance(found, Failed):
        fail_transfer(node, progress, found.cause, f"shard {found.shard}: {found.detail}")
    else:
        receiver.move(TransferTrigger.PAGE_MOVED)


def is_landed(node: NodeState, progress: Progress) -> bool:
    return progress.receiver is not None and progress.receiver.is_complete(node.settings.shards)


def commit(node: NodeState, progress: Progress) -> tuple[bytes, int, bytes]:
    """Everything is here: one step from 'arriving' to 'the prompt is known'. Returns the first token, flags, extra."""
    receiver, room = progress.receiver, progress.request.room
    assert receiver is not None
    assert receiver.peer is not None
    assert receiver.result is not None
    assert room is not None
    receiver.move(TransferTrigger.COMMITTED)
    release = Release(room, node.settings.incarnation, "done", attempt=receiver.attempt)
    node.out.append(Tell(receiver.peer, release))
    record_closed_room(node, room, release)
    split_arrival_stage(node, progress, receiver)
    progress.path = Path.REMOTE
    progress.kv_pages = receiver.total_pages - receiver.held_pages
    progress.computed = progress.launched = progress.request.prompt_len
    progress.cached_tokens = max(progress.cached_tokens, receiver.result.cached_tokens)
    return receiver.result.token, receiver.result.flags, receiver.result.extra


def split_arrival_stage(node: NodeState, progress: Progress, receiver: Receiver) -> None:
    """By its own clock, what prefill did since READY; else it is wire up to the first offer, and transfer beyond it."""
    assert receiver.ready_at is not None
    assert receiver.result is not None
    assert receiver.result_at is not None
    offered_at = receiver.offered_at if receiver.offered_at is not None else receiver.result_at
    answer_ns = offered_at - receiver.ready_at
    queue_ns = min(receiver.result.queue_ns, answer_ns)
    compute_ns = min(receiver.result.compute_ns, answer_ns - queue_ns)
    add_stage(progress, "prefill_waiting", Nanos(queue_ns))
    overlapped_ns = min(receiver.result.overlapped_ns, receiver.result_at - offered_at)
    add_stage(progress, "prefill_forward", Nanos(compute_ns + overlapped_ns))
    add_stage(progress, "peer_wire", Nanos(answer_ns - queue_ns - compute_ns))
    progress.entered_at = Nanos(offered_at + overlapped_ns)  # the rest of the state is charged as usual


# --- failures --------------------------------------------------------------------------------------------------------


def on_transfer_failed(node: NodeState, event: TransferFailed) -> None:
    failure = Failure(event.cause, event.detail)
    hear_shard(node, event.request, event.shard, ShardReport(event.attempt, failure=failure))


def on_peer_abort(node: NodeState, peer: Incarnation, abort: Abort) -> None:
    request = node.rooms.get(abort.room)
    progress = node.requests.get(request) if request is not None else None
    if progress is None or progress.receiver is None or progress.receiver.peer != peer:
        return
    if progress.state in (State.QUEUED, State.ARRIVING, State.BOOTSTRAPPING):
        fail_transfer(node, progress, abort.cause, abort.detail or "prefill gave up")


def fail_transfer(node: NodeState, progress: Progress, cause: Cause, detail: str) -> None:
    """The KV will not come. By policy the request ends, or its prompt is computed here once its pages are drained."""
    recompute = node.settings.load_failure is LoadFailurePolicy.RECOMPUTE and cause not in FINAL_CAUSES
    if not recompute:
        shown = Cause.PEER_ABORTED if cause is Cause.ABORTED else cause
        fail(node, progress, shown, detail)
        return
    progress.first_cause = f"{cause}: {detail}"
    progress.path = Path.FALLBACK
    if progress.state is State.ARRIVING:
        enter(node, progress, Trigger.PEER_FAILED)
        abandon_transfer(node, progress, cause, detail)
        recover_if_drained(node, progress)
    else:
        abandon_transfer(node, progress, cause, detail)
        enter(node, progress, Trigger.PEER_FAILED)
        progress.receiver = None


def recover_if_drained(node: NodeState, progress: Progress) -> None:
    if progress.state is State.RECOVERING and not progress.drains:
        give_back_pages(node, progress)
        enter(node, progress, Trigger.REQUEUE, first=True)
        progress.receiver = None


def abandon_transfer(node: NodeState, progress: Progress, cause: Cause, detail: str) -> None:
    """Stop reading and tell the peer that nobody will collect. Idempotent."""
    receiver, room = progress.receiver, progress.request.room
    assert receiver is not None
    assert room is not None
    if receiver.state in (TransferState.FAILED, TransferState.SUCCESS):
        return
    receiver.move(TransferTrigger.FAULT)
    node.counters.transfer_failed += receiver.ready_at is not None
    node.counters.bootstrap_failed += receiver.ready_at is None
    release = Release(room, node.settings.incarnation, "aborted", cause, receiver.attempt, detail)
    if receiver.peer is not None:
        node.out.append(Tell(receiver.peer, release))
    else:
        tell_prefill(node, progress.request, release)
    record_closed_room(node, room, release)
    if receiver.pulling:
        progress.drains = dict.fromkeys(node.settings.shards)
        node.out.append(CancelPull(progress.id, receiver.attempt))


def fail(node: NodeState, progress: Progress, cause: Cause, detail: str = "") -> None:
    verdict = failure(node, progress, cause, detail or progress.first_cause)
    if progress.receiver is not None:
        abandon_transfer(node, progress, cause, detail)
    end(node, progress, verdict)


def on_timer(node: NodeState, progress: Progress) -> None:
    receiver = progress.receiver
    assert receiver is not None
    if progress.state is State.BOOTSTRAPPING and receiver.ask_at <= node.now:
        find_peer(node, progress)
    elif progress.state is State.ARRIVING and is_over(node, receiver.arrival_until):
        fail_transfer(node, progress, Cause.WAITING_TIMEOUT, "the KV has not come in time")
    elif progress.state is State.ARRIVING and receiver.resend_at <= node.now:
        send_ready(node, progress)
