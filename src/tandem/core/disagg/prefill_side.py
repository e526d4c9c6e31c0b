"""The prefill half of a rendezvous: offers the pages of a prompt to the decode that said READY.

A request with a room and no peer address has a `PrefillSide`. It computes as any other; here is what it does beside:
take a result slot, publish final pages as chunks return, park or give back when nobody has said READY, and end when
decode releases. Nothing here knows how a chunk is planned.
"""

from typing import assert_never

from msgspec import structs

from tandem.core.batch import TOKEN_BYTES
from tandem.core.commands import (
    AnnounceDpRank,
    EmitTokens,
    FinishReason,
    FinishRequest,
    Path,
    PublishPages,
    RenderAgain,
    RevokePages,
    Tell,
)
from tandem.core.disagg.dp_rank import Announce, Conflict, Quiet, RequestFacts, settle
from tandem.core.disagg.messages import LAYOUT_DIFFERS, SHUTTING_DOWN, Abort, Moved, Offer, Ready, Release, ResultSlot
from tandem.core.disagg.optimistic_prefill import Verdict, View, bootstrap_policy, should_force_retry
from tandem.core.disagg.sides import PrefillSide, Reader
from tandem.core.disagg.transfer_state import DIGEST_BYTES, TransferTrigger
from tandem.core.events import PageRead, PagesDigested, RoomElsewhere, TransferFailed
from tandem.core.request import Request
from tandem.core.scheduler.leaving import end, failure, record_closed_room
from tandem.core.scheduler.page_tables import give_back_if_idle
from tandem.core.scheduler.priorities import least_urgent_first
from tandem.core.scheduler.request_state import Progress, State, Trigger, has_ended, start_of
from tandem.core.scheduler.state import (
    NodeState,
    Stashed,
    charge_stage,
    enter,
    is_over,
    later,
    page_generations,
    pages_for,
    schedule,
)
from tandem.core.settings import OptimisticPolicy
from tandem.core.values import Cause, Incarnation, Nanos, Room

MAX_OFFER_BYTES = 8 << 20  # of pages in one message; the result slot may have half as many
NAME_BYTES = 18  # of a page and its generation, at most

# --- bootstrap -------------------------------------------------------------------------------------------------------


def create_side(node: NodeState, request: Request, room: Room) -> PrefillSide:
    is_forced = is_chosen_for_retry(node, request)
    return PrefillSide(room, is_forced, bootstrap_until=later(node, node.settings.bootstrap_timeout_ns))


def open_room(node: NodeState, progress: Progress, side: PrefillSide) -> Stashed | None:
    """Returns what decode has said of this room already, READY or that it was given up."""
    node.rooms[side.room] = progress.id
    stashed = node.stash.pop(side.room, None)
    announce_rank(node, progress, side)
    return None if stashed is None or stashed.expires_at <= node.now else stashed


def announce_rank(node: NodeState, progress: Progress, side: PrefillSide) -> None:
    """Decode must find this rank: by its own reckoning, or because we announce it. Else it would look elsewhere."""
    info, rank = node.settings.prefill_info, node.settings.dp_rank
    facts = RequestFacts(side.room, progress.request.dp_rank_hint)
    found = settle(facts, info, actual=rank, force_query=node.settings.force_query)
    match found:
        case Quiet():
            pass
        case Announce(_, sought):
            side.sought = sought
            send_rank(node, side)
        case Conflict(explanation, sought):
            side.sought = sought
            send_rank(node, side)
            fail(node, progress, side, Cause.ROUTE_CONFLICT, explanation)
        case _:
            assert_never(found)


def send_rank(node: NodeState, side: PrefillSide) -> None:
    """Until READY comes: a bootstrap server may restart, or hear it before it knows this rank."""
    side.announce_at = Nanos(node.now + node.settings.resend_ns)
    node.out.append(AnnounceDpRank(side.room, node.settings.dp_rank, side.sought))


def on_elsewhere(node: NodeState, event: RoomElsewhere) -> None:
    """Whoever looks for this room here is sent on; also to hear there that it was refused."""
    if event.room in node.rooms:
        return  # a number that is used again
    moved = Moved(event.room, node.settings.incarnation, event.dp_rank)
    waiting = node.stash.pop(event.room, None)
    if waiting is not None:
        node.out.append(Tell(waiting.peer, moved))
    record_closed_room(node, event.room, moved)


def stash(node: NodeState, peer: Incarnation, message: Ready | Release) -> None:
    """It overtook its request. What decode said last counts; saying it again does not make it wait longer."""
    known = node.stash.get(message.room)
    if known is None and len(node.stash) >= node.settings.stashed_messages:
        oldest = next(iter(node.stash))
        if node.stash[oldest].expires_at > node.now:
            return  # decode says READY again; a release that is lost here ends by its deadline
        del node.stash[oldest]
    expires_at = known.expires_at if known is not None else Nanos(node.now + patience(node, message))
    node.stash[message.room] = Stashed(peer, message, expires_at)


def patience(node: NodeState, message: Ready | Release) -> Nanos:
    """How long the other half of what decode speaks of is waited for. Not as long where decode has had its own since
    before this life began: both are sent at about the same time, so this one went to an earlier life, and with it. Of
    several DP ranks one that is older may have it, so there the life of the server counts.
    """
    began_at = node.began_at if node.settings.prefill_info.dp_size == 1 else node.settings.server_began_at
    is_astray = isinstance(message, Ready) and began_at is not None and message.waited_ns > node.now - began_at
    return node.settings.resend_ns if is_astray else node.settings.stash_ns


def on_ready(node: NodeState, peer: Incarnation, ready: Ready) -> None:
    """Decode will collect. The same READY said again renews the lease and asks for what it has not seen."""
    progress = node.in_room(ready.room)
    side = progress.side if progress is not None else None
    if progress is None or not isinstance(side, PrefillSide):
        answer_unknown_room(node, peer, ready)
        return
    if side.reader is not None and side.reader.peer == ready.source and ready.attempt < side.reader.attempt:
        return  # a late copy of an earlier attempt
    refusal = refuse(node, progress.request, side.reader, ready)
    if refusal is not None:
        cause, detail = refusal
        reject(node, peer, ready, cause, detail)
        is_final = cause is not Cause.PEER_LOST and is_other_half(side, progress.request, peer, ready)
        if is_final and not has_ended(progress):
            fail(node, progress, side, cause, detail)
        return
    if has_ended(progress):
        tombstone = node.tombstones.get(ready.room)
        if tombstone is not None:
            node.out.append(Tell(peer, tombstone))
        return
    finalize_bootstrap(node, progress, side, peer, ready)


def answer_unknown_room(node: NodeState, peer: Incarnation, ready: Ready) -> None:
    tombstone = node.tombstones.get(ready.room)
    if tombstone is not None:
        node.out.append(Tell(peer, tombstone))
    elif ready.target != node.settings.incarnation:
        reject(node, peer, ready, Cause.PEER_LOST, meant_for_another(node, ready))
    elif node.draining:
        reject(node, peer, ready, Cause.DRAINING, SHUTTING_DOWN)
    elif ready.room in node.stash and node.stash[ready.room].expires_at <= node.now:
        del node.stash[ready.room]
        detail = "prefill has not got this request; does its router send both halves here?"
        reject(node, peer, ready, Cause.PEER_ABORTED, detail)
    else:
        stash(node, peer, ready)


def reject(node: NodeState, peer: Incarnation, ready: Ready, cause: Cause, detail: str) -> None:
    node.out.append(Tell(peer, Abort(ready.room, node.settings.incarnation, cause, detail)))


def meant_for_another(node: NodeState, ready: Ready) -> str:
    return f"READY is for another incarnation ({ready.target.id}) than this one ({node.settings.incarnation.id})"


def refuse(node: NodeState, request: Request, reader: Reader | None, ready: Ready) -> tuple[Cause, str] | None:
    if ready.target != node.settings.incarnation:
        return Cause.PEER_LOST, meant_for_another(node, ready)
    if ready.layout != node.settings.layout:
        return Cause.LAYOUT_MISMATCH, LAYOUT_DIFFERS
    if ready.prompt_len != request.prompt_len:
        return Cause.PROTOCOL, f"decode means {ready.prompt_len} prompt tokens, prefill {request.prompt_len}"
    if ready.prompt_digest != request.prompt_digest:
        return Cause.PROTOCOL, "decode means another prompt"
    if reader is not None and reader.peer != ready.source:
        return Cause.PEER_LOST, "another decode has said READY for this room"
    if reader is not None and reader.attempt != ready.attempt:
        return Cause.PEER_ABORTED, "decode has begun anew in this room"
    if reader is not None and reader.cut != ready.cut:
        return Cause.PROTOCOL, "decode is cut otherwise than it has said before"
    if not 0 <= ready.held_pages <= pages_for(node, ready.prompt_len):
        return Cause.PROTOCOL, "decode claims to hold more pages than the prompt has"
    return None


def is_other_half(side: PrefillSide, request: Request, peer: Incarnation, ready: Ready) -> bool:
    """Whether a READY that does not fit is nevertheless that of the decode which this half waits for.

    Before a READY is checked only the other half of the request can say the keyed digest of its prompt. A member that
    knows no more than the room hears why it is refused, and the half goes on waiting for the right one. A prompt that
    was rendered anew is that of the READY which named its time, and of no other.
    """
    if side.reader is not None:
        return side.reader.peer == peer
    return side.is_rendered_anew or ready.prompt_digest == request.prompt_digest


def finalize_bootstrap(node: NodeState, progress: Progress, side: PrefillSide, peer: Incarnation, ready: Ready) -> None:
    """READY is checked: from here on the KV has a reader, and what is computed already can be offered."""
    side.move(TransferTrigger.READY_CHECKED)
    reader = side.reader
    if reader is not None:  # said again
        reader.lease_until = Nanos(node.now + node.settings.lease_ns)
        says_result = not (ready.has_result and is_large(side.result))
        if reader.offered > ready.known_pages or (reader.result_offered and says_result):
            first_page = min(max(ready.known_pages, reader.held_pages), reader.offered)
            offer(node, progress, side, reader, first_page=first_page, says_result=says_result)
    else:
        side.reader = Reader(
            peer,
            ready.attempt,
            ready.cut,
            held_pages=ready.held_pages,
            published=ready.held_pages,
            offered=ready.held_pages,
            ready_at=node.now,
            lease_until=Nanos(node.now + node.settings.lease_ns),
            resend_at=Nanos(node.now + node.settings.resend_ns),
        )
        side.announce_at = None
        if progress.state is State.BOOTSTRAPPING:
            enter(node, progress, Trigger.PEER_READY)
        elif progress.state is State.PARKED:
            enter(node, progress, Trigger.SEND)
        publish(node, progress, side)
    schedule(node, progress)


# --- optimistic prefill ----------------------------------------------------------------------------------------------


def policy_view(node: NodeState, progress: Progress, side: PrefillSide) -> View:
    return View(
        ready=side.is_ready,
        forced=side.is_forced,
        retries=side.prefill_retry_count,
        yields=side.yields,
        prompt_len=progress.request.prompt_len,
        parked_tokens=sum(parked.request.prompt_len for parked in node.live(State.PARKED)),
    )


def is_chosen_for_retry(node: NodeState, request: Request) -> bool:
    """Once, at arrival. Without optimistic prefill there is nothing to retry: it would never be published."""
    return node.settings.optimistic is not OptimisticPolicy.OFF and should_force_retry(
        request.rid, prob=node.settings.force_retry_prob, prefill_retry_count=0
    )


def may_start(node: NodeState, progress: Progress, side: PrefillSide) -> bool:
    """Without waiting in the bootstrap queue, for READY or for a prompt that is rendered anew."""
    if side.ready is not None:
        return False
    return bootstrap_policy(node.settings).may_start(policy_view(node, progress, side))


def after_chunk(node: NodeState, progress: Progress, side: PrefillSide) -> None:
    """A chunk that is not the last has returned."""
    verdict = bootstrap_policy(node.settings).at_boundary(policy_view(node, progress, side))
    if verdict in GIVE_BACK_REASONS:
        give_back(node, progress, side, retry_reason(side, verdict))
    else:
        publish(node, progress, side)


def after_prompt(
    node: NodeState, progress: Progress, side: PrefillSide, *, token: bytes, flags: int, extra: bytes
) -> None:
    """The prompt is computed and the first token sampled: offer, park, or give back."""
    verdict = bootstrap_policy(node.settings).at_end(policy_view(node, progress, side))
    if verdict in GIVE_BACK_REASONS:
        give_back(node, progress, side, retry_reason(side, verdict))
        return
    of_prompt = tuple(progress.prompt_extras)
    progress.prompt_extras = []  # the result has them from here on
    side.result = ResultSlot(side.room, token, flags, extra, progress.cached_tokens, prompt_extras=of_prompt)
    side.computed_at = node.now
    enter(node, progress, Trigger.PARK if verdict is Verdict.PARK else Trigger.SEND)
    publish(node, progress, side)


GIVE_BACK_REASONS = {Verdict.GIVE_BACK: "not_ready", Verdict.YIELD: "yield"}


def retry_reason(side: PrefillSide, verdict: Verdict) -> str:
    return "forced" if side.is_forced else GIVE_BACK_REASONS[verdict]


def give_back(node: NodeState, progress: Progress, side: PrefillSide, reason: str) -> None:
    """Pages go to the prefix tree as soon as no batch writes them; then the request runs again, or waits for READY."""
    side.give_back_reason = reason
    enter(node, progress, Trigger.GIVE_BACK)
    finish_give_back(node, progress, side)


def finish_give_back(node: NodeState, progress: Progress, side: PrefillSide) -> None:
    if not give_back_if_idle(node, progress):
        return
    reset_prefill_retry_time(progress, side)
    rendering = side.ready  # means a prompt that is rendered anew
    reason = "rendered" if rendering is not None else side.give_back_reason
    side.yields += reason == "yield"
    unready = structs.replace(policy_view(node, progress, side), ready=False)  # READY that came meanwhile is no budget
    may_retry = rendering is None and bootstrap_policy(node.settings).may_start(unready)
    if may_retry or reason in ("yield", "rendered"):  # a retry that there is no budget for is none (sglang#26780)
        node.counters.prefill_retries[reason] = node.counters.prefill_retries.get(reason, 0) + 1
        side.prefill_retry_count += 1
    if may_retry:
        enter(node, progress, Trigger.REQUEUE, first=reason != "yield")  # it made room for those who wait
        return
    node.results.maybe_release_metadata_buffer(progress.id)
    enter(node, progress, Trigger.REQUEUE if side.is_ready else Trigger.FALL_BACK)
    if rendering is not None:
        node.out.append(RenderAgain(progress.id, rendering.rendered_at))


def reset_prefill_retry_time(progress: Progress, side: PrefillSide) -> None:
    """A retry starts its stages anew; the arrival, and with it the deadline and the TTFT clock, stays."""
    side.result = None
    side.is_forced = False
    progress.stages = {"prefill_retried": Nanos(sum(progress.stages.values()))}


def yield_parked(node: NodeState, *, gives_result_slot: bool) -> bool:
    """Under pressure of slots, pages or result slots: the least urgent parked request, and of these the newest, gives
    back what it holds; its result slot only for want of one, or if it may not run again. However urgent it is: nobody
    waits for it yet."""
    for progress in least_urgent_first(node, node.live(State.PARKED)[::-1]):
        if isinstance(progress.side, PrefillSide):
            give_back(node, progress, progress.side, "yield")
            if gives_result_slot:
                node.results.maybe_release_metadata_buffer(progress.id)
            return True
    return False


# --- offering --------------------------------------------------------------------------------------------------------


def publish(node: NodeState, progress: Progress, side: PrefillSide) -> None:
    """Hand final pages that were not handed out yet to the shards, which digest them and let the peer read."""
    reader = side.reader
    if reader is None or side.is_forced:
        return
    if progress.state not in (State.COMPUTING, State.SENDING):
        return
    is_done = side.result is not None
    total = pages_for(node, progress.request.prompt_len)
    stop = total if is_done else progress.computed // node.settings.page_size
    start = reader.published
    if stop > start:
        pages = tuple(progress.pages[start:stop])
        reader.published = stop
        generations = page_generations(node, pages)
        room, cut = side.room, reader.cut
        node.out.append(PublishPages(progress.id, reader.attempt, start, pages, generations, room, cut))
    # The result slot may be ready after the last page was offered, or there is no page to wait for.
    if is_done and not reader.result_offered and reader.digested(node.settings.shards) == total:
        offer(node, progress, side, reader, first_page=reader.offered)


def on_digested(node: NodeState, event: PagesDigested) -> None:
    found = read_by_peer(node.requests.get(event.request))
    if found is None:
        return
    progress, side, reader = found
    if event.attempt != reader.attempt or event.first_page != reader.digested([event.shard]):
        return  # of an earlier attempt, or a duplicate
    if event.first_page + event.num_pages > reader.published:
        return  # pages that no shard was given
    reader.record_digests(event.shard, event.num_pages, event.digests, event.secret)
    if reader.digested(node.settings.shards) > reader.offered:
        offer(node, progress, side, reader, first_page=reader.offered)


def read_by_peer(progress: Progress | None) -> tuple[Progress, PrefillSide, Reader] | None:
    """A request that has not ended, and that a decode reads."""
    if progress is None or has_ended(progress) or not isinstance(progress.side, PrefillSide):
        return None
    reader = progress.side.reader
    return (progress, progress.side, reader) if reader is not None else None


def is_large(result: ResultSlot | None) -> bool:
    """It tells of the prompt's tokens, and a connection may not have room for many such: whoever has it says so."""
    return result is not None and bool(result.prompt_extras)


def offer(
    node: NodeState,
    progress: Progress,
    side: PrefillSide,
    reader: Reader,
    *,
    first_page: int,
    says_result: bool = True,
) -> None:
    """OFFER or PUBLISH all digested pages from `first_page` on, in as many messages as connections take; with the last
    one goes the result slot."""
    stop = reader.digested(node.settings.shards)
    total = pages_for(node, progress.request.prompt_len)
    result = side.result if stop == total and says_result else None
    offered_at = reader.offered_at = node.now if reader.offered_at is None else reader.offered_at
    reader.offered = stop
    reader.result_offered = reader.result_offered or result is not None
    reader.lease_until = Nanos(node.now + node.settings.lease_ns)
    reader.resend_at = Nanos(node.now + node.settings.resend_ns)
    if result is not None:
        moments = progress.computing_since, side.computed_at
        result = timed_result(result, *moments, ready_at=reader.ready_at, offered_at=offered_at)
    most = pages_of_an_offer(reader.num_parts(node.settings.shards))
    for start in range(first_page, max(stop, first_page + 1), most):
        end_page = min(start + most, stop)
        pages = tuple(progress.pages[start:end_page])
        message = Offer(
            room=side.room,
            attempt=reader.attempt,
            source=node.settings.incarnation,
            first_page=start,
            pages=pages,
            generations=page_generations(node, pages),
            digests=reader.digest_slices(node.settings.shards, start, end_page),
            secrets=reader.secrets(node.settings.shards),
            lease_ns=node.settings.lease_ns,
            total_pages=total,
            result=result if end_page == stop else None,
        )
        node.out.append(Tell(reader.peer, message))
    schedule(node, progress)


def pages_of_an_offer(num_parts: int) -> int:
    """That one message names at most: a connection ends where a frame is too long."""
    return max(1, MAX_OFFER_BYTES // (NAME_BYTES + DIGEST_BYTES * num_parts))


def timed_result(
    result: ResultSlot, computing_since: Nanos, computed_at: Nanos, *, ready_at: Nanos, offered_at: Nanos
) -> ResultSlot:
    """With prefill's own durations since READY, for decode's TTFT ledger."""
    began = max(computing_since, ready_at)
    ended = max(computed_at, began)
    return structs.replace(
        result,
        queue_ns=Nanos(min(began, offered_at) - ready_at),
        compute_ns=Nanos(max(0, min(ended, offered_at) - began)),
        overlapped_ns=Nanos(max(0, ended - max(began, offered_at))),
    )


def on_transfer_failed(node: NodeState, event: TransferFailed) -> None:
    """A shard cannot hand its pages out, or could not be bootstrapped."""
    progress = node.requests.get(event.request)
    side = progress.side if progress is not None else None
    if progress is None or not isinstance(side, PrefillSide) or has_ended(progress) or event.attempt != side.attempt:
        return
    fail(node, progress, side, event.cause, f"shard {event.shard}: {event.detail}")


def on_page_read(node: NodeState, event: PageRead) -> None:
    found = read_by_peer(node.requests.get(event.request))
    if found is None:
        return
    _, side, reader = found
    side.move(TransferTrigger.PAGE_MOVED)
    reader.lease_until = Nanos(node.now + node.settings.lease_ns)


# --- ends ------------------------------------------------------------------------------------------------------------


def on_release(node: NodeState, peer: Incarnation, release: Release) -> None:
    """Decode reads no more: it has everything, gave up, or never needed us."""
    progress = node.in_room(release.room)
    if progress is None:
        node.stash.pop(release.room, None)
        last_word = node.tombstones.get(release.room)
        if isinstance(last_word, Moved):
            node.out.append(Tell(peer, last_word))
        elif last_word is None and release.outcome != "done":
            stash(node, peer, release)
        return
    side = progress.side
    if not isinstance(side, PrefillSide) or has_ended(progress) or not may_end(side, progress.request, peer, release):
        return
    has_everything = side.reader is not None and side.reader.result_offered
    if release.outcome == "aborted":
        said = ": ".join(filter(None, (release.cause, release.detail))) or "no cause given"
        final = release.cause is Cause.LAYOUT_MISMATCH  # no other pair of these two servers will fare better
        final_cause = Cause.LAYOUT_MISMATCH if final else Cause.PEER_ABORTED
        fail(node, progress, side, final_cause, f"decode gave up: {said}")
    elif release.outcome == "done" and not has_everything:
        fail(node, progress, side, Cause.PROTOCOL, "decode released as done before everything was offered")
    else:
        side.move(TransferTrigger.RELEASED)
        path = Path.REMOTE if release.outcome == "done" else Path.LOCAL
        finish(node, progress, side, path, num_pulled=release.num_pulled)


def may_end(side: PrefillSide, request: Request, peer: Incarnation, release: Release) -> bool:
    """Whether it is said by the decode of this room, and not of an earlier request in it.

    READY binds the room to who has said it. Before, whoever is in the cluster may have seen the number of the room, but
    only the other half of the request has its prompt, of which the digest is keyed. Where both show a time, and not the
    same, their digests tell nothing, and the number has to do.
    """
    if side.counterpart is not None and side.counterpart != peer:
        return False
    if side.reader is not None:
        return release.attempt == side.reader.attempt
    has_times = bool(request.rendered_at and release.rendered_at) and request.rendered_at != release.rendered_at
    return release.outcome != "done" and (has_times or release.prompt_digest == request.prompt_digest)


def finish(node: NodeState, progress: Progress, side: PrefillSide, path: Path, *, num_pulled: int) -> None:
    """Decode has committed: the request ends here with the tokens that were sampled, as far as they were asked for. Not
    needed: with none. num_pulled: pages, as decode says.
    """
    charge_stage(node, progress)
    if side.result is not None and path is Path.REMOTE:
        node.out.append(start_of(progress, path))
        extras = ((progress.id, side.result.extra),) if side.result.extra else ()
        count = min(len(side.result.token) // TOKEN_BYTES, progress.request.max_new_tokens)
        node.out.append(EmitTokens((progress.id,) * count, side.result.token[: TOKEN_BYTES * count], extras))
    num_offered = side.reader.offered - side.reader.held_pages if side.reader is not None else 0
    revoke(node, progress, side)
    end(
        node,
        progress,
        FinishRequest(
            progress.id,
            FinishReason.LENGTH,
            path,
            progress.cached_tokens,
            progress.computed_tokens,
            min(num_pulled, num_offered),
            progress.ledger,
            side.prefill_retry_count,
            host_tokens=progress.host_tokens,
            storage_tokens=progress.storage_tokens,
        ),
    )


def fail(node: NodeState, progress: Progress, side: PrefillSide, cause: Cause, detail: str = "") -> None:
    """End without success; the peer is told now, or when it speaks of the room for the first time."""
    abort = Abort(side.room, node.settings.incarnation, cause, detail)
    if side.counterpart is not None and cause is not Cause.PEER_ABORTED:
        node.out.append(Tell(side.counterpart, abort))
    record_closed_room(node, side.room, abort)
    if side.reader is None:
        node.counters.bootstrap_failed += 1
    else:
        node.counters.transfer_failed += 1
    verdict = failure(node, progress, cause, detail)
    side.move(TransferTrigger.FAULT)
    revoke(node, progress, side)
    end(node, progress, verdict)


def revoke(node: NodeState, progress: Progress, side: PrefillSide) -> None:
    """If any page was handed out, the shards must say that nobody reads it any more before it can be used again."""
    reader = side.reader
    if reader is not None and reader.published > reader.held_pages:
        progress.drains = dict.fromkeys(node.settings.shards)
        node.out.append(RevokePages(progress.id, reader.attempt, side.room))


def on_timer(node: NodeState, progress: Progress, side: PrefillSide) -> None:
    """Say the last offer again, or find that the peer has stopped renewing its lease."""
    reader = side.reader
    if reader is None:
        if is_over(node, side.bootstrap_until):
            fail(node, progress, side, Cause.BOOTSTRAP_TIMEOUT, "decode has not said READY in time")
        elif is_over(node, side.announce_at):
            send_rank(node, side)
        return
    if reader.lease_until <= node.now:
        fail(node, progress, side, Cause.LEASE_EXPIRED, "decode neither reads nor says READY any more")
    elif progress.state is State.SENDING and reader.resend_at <= node.now:
        reader.resend_at = Nanos(node.now + node.settings.resend_ns)
        if reader.result_offered:
            lease_until = reader.lease_until
            says_result = not is_large(side.result)  # decode asks again for what it lacks
            offer(node, progress, side, reader, first_page=reader.offered, says_result=says_result)
            reader.lease_until = lease_until  # our own voice does not renew the peer's lease
