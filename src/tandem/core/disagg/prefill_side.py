"""The prefill half of a rendezvous: offers the pages of a prompt to the decode that said READY.

A request with a room and no peer address has a `Sender`. It computes as any other; here is what it does beside: take
a row of the result table, publish final pages as chunks return, park or give back when nobody has said READY, and end
when decode releases. Nothing here knows how a chunk is planned.
"""

from typing import assert_never

from msgspec import structs

from tandem.core.commands import (
    AnnounceDpRank,
    EmitTokens,
    FinishReason,
    FinishRequest,
    Path,
    PublishPages,
    RenderAgain,
    RevokePages,
    StageTimings,
    StartRequest,
    Tell,
)
from tandem.core.disagg.dp_rank import Announce, Conflict, Quiet, RequestFacts, settle
from tandem.core.disagg.messages import LAYOUT_DIFFERS, SHUTTING_DOWN, Abort, Offer, Ready, Release, ResultSlot
from tandem.core.disagg.optimistic_prefill import Verdict, View, bootstrap_policy, should_force_retry
from tandem.core.disagg.transfer_state import Sender, TransferState, TransferTrigger
from tandem.core.events import PageRead, PagesDigested, TransferFailed
from tandem.core.request import Request
from tandem.core.scheduler.request_state import Progress, State, Trigger, has_ended
from tandem.core.scheduler.state import (
    NodeState,
    Stashed,
    charge_stage,
    checkpoint,
    end,
    enter,
    failure,
    give_back_pages,
    is_over,
    later,
    page_generations,
    pages_for,
    record_closed_room,
    schedule,
)
from tandem.core.settings import OptimisticPolicy
from tandem.core.values import Cause, Incarnation, Nanos, Room

# --- bootstrap -------------------------------------------------------------------------------------------------------


def create_sender(node: NodeState, progress: Progress) -> Stashed | None:
    """The request has a room: returns what decode has said of it already, READY or that it was given up."""
    room = progress.request.room
    assert room is not None
    progress.sender = Sender(
        is_forced=is_chosen_for_retry(node, progress.request),
        bootstrap_until=later(node, node.settings.bootstrap_timeout_ns),
    )
    node.rooms[room] = progress.id
    stashed = node.stash.pop(room, None)
    announce_rank(node, progress, room)
    return None if stashed is None or stashed.expires_at <= node.now else stashed


def announce_rank(node: NodeState, progress: Progress, room: Room) -> None:
    """Decode must find this rank: by its own reckoning, or because we announce it. Else it would look elsewhere."""
    info, rank = node.settings.prefill_info, node.settings.dp_rank
    facts = RequestFacts(room, progress.request.dp_rank_hint)
    found = settle(facts, info, actual=rank, force_query=node.settings.force_query)
    match found:
        case Quiet():
            pass
        case Announce():
            assert progress.sender is not None
            progress.sender.is_announced = True
            say_rank(node, progress)
        case Conflict(explanation):
            fail(node, progress, Cause.ROUTE_CONFLICT, explanation)
        case _:
            assert_never(found)


def say_rank(node: NodeState, progress: Progress) -> None:
    """Until READY comes: a bootstrap server may restart, or hear it before it knows this rank."""
    sender, room = progress.sender, progress.request.room
    assert sender is not None
    assert room is not None
    sender.resend_at = Nanos(node.now + node.settings.resend_ns)
    node.out.append(AnnounceDpRank(room, node.settings.dp_rank))


def stash(node: NodeState, peer: Incarnation, message: Ready | Release) -> None:
    """It overtook its request. What decode said last counts; saying it again does not make it wait longer."""
    known = node.stash.get(message.room)
    if known is None and len(node.stash) >= node.settings.stashed_messages:
        oldest = next(iter(node.stash))
        if node.stash[oldest].expires_at > node.now:
            return  # decode says READY again; a release that is lost here ends by its deadline
        del node.stash[oldest]
    expires_at = known.expires_at if known is not None else Nanos(node.now + node.settings.stash_ns)
    node.stash[message.room] = Stashed(peer, message, expires_at)


def on_ready(node: NodeState, peer: Incarnation, ready: Ready) -> None:
    """Decode has reserved pages. The same READY said again renews the lease and asks for what it has not seen."""
    request = node.rooms.get(ready.room)
    progress = node.requests.get(request) if request is not None else None
    if progress is None or progress.sender is None:
        answer_unknown_room(node, peer, ready)
        return
    if progress.sender.peer == ready.source and ready.attempt < progress.sender.attempt:
        return  # a late copy of an earlier attempt
    refusal = refuse(node, progress, ready)
    if refusal is not None:
        cause, detail = refusal
        node.out.append(Tell(peer, Abort(ready.room, node.settings.incarnation, cause, detail)))
        if cause is not Cause.PEER_LOST and not has_ended(progress):
            fail(node, progress, cause, detail)
        return
    if has_ended(progress):
        tombstone = node.tombstones.get(ready.room)
        if tombstone is not None:
            node.out.append(Tell(peer, tombstone))
        return
    finalize_bootstrap(node, progress, peer, ready)


def answer_unknown_room(node: NodeState, peer: Incarnation, ready: Ready) -> None:
    tombstone = node.tombstones.get(ready.room)
    if tombstone is not None:
        node.out.append(Tell(peer, tombstone))
    elif ready.target != node.settings.incarnation:
        detail = f"READY is for another incarnation ({ready.target.id}) than this one ({node.settings.incarnation.id})"
        node.out.append(Tell(peer, Abort(ready.room, node.settings.incarnation, Cause.PEER_LOST, detail)))
    elif node.draining:
        node.out.append(Tell(peer, Abort(ready.room, node.settings.incarnation, Cause.DRAINING, SHUTTING_DOWN)))
    elif ready.room in node.stash and node.stash[ready.room].expires_at <= node.now:
        del node.stash[ready.room]
        detail = "prefill has not got this request; does its router send both halves here?"
        node.out.append(Tell(peer, Abort(ready.room, node.settings.incarnation, Cause.PEER_ABORTED, detail)))
    else:
        stash(node, peer, ready)


def refuse(node: NodeState, progress: Progress, ready: Ready) -> tuple[Cause, str] | None:
    sender = progress.sender
    assert sender is not None
    if ready.target != node.settings.incarnation:
        return (
            Cause.PEER_LOST,
            f"READY is for another incarnation ({ready.target.id}) than this one ({node.settings.incarnation.id})",
        )
    if ready.layout != node.settings.layout:
        return Cause.LAYOUT_MISMATCH, LAYOUT_DIFFERS
    if ready.prompt_len != progress.request.prompt_len:
        return Cause.PROTOCOL, f"decode means {ready.prompt_len} prompt tokens, prefill {progress.request.prompt_len}"
    if ready.prompt_digest != progress.request.prompt_digest:
        return Cause.PROTOCOL, "decode means another prompt"
    if sender.peer is not None and sender.peer != ready.source:
        return Cause.PEER_LOST, "another decode has said READY for this room"
    if sender.peer is not None and sender.attempt != ready.attempt:
        return Cause.PEER_ABORTED, "decode has begun anew in this room"
    if not 0 <= ready.held_pages <= pages_for(node, ready.prompt_len):
        return Cause.PROTOCOL, "decode claims to hold more pages than the prompt has"
    return None


def finalize_bootstrap(node: NodeState, progress: Progress, peer: Incarnation, ready: Ready) -> None:
    """READY is checked: from here on the KV has a taker, and what is computed already can be offered."""
    sender = progress.sender
    assert sender is not None
    if sender.is_ready:
        sender.move(TransferTrigger.READY_CHECKED)  # said again
        sender.lease_until = Nanos(node.now + node.settings.lease_ns)
        if sender.offered > ready.known_pages or sender.result_offered:
            offer(node, progress, first_page=min(max(ready.known_pages, sender.held_pages), sender.offered))
    else:
        sender.begin(peer, attempt=ready.attempt, held_pages=ready.held_pages)
        sender.ready_at = node.now
        sender.resend_at = Nanos(node.now + node.settings.resend_ns)
        sender.lease_until = Nanos(node.now + node.settings.lease_ns)
        if progress.state is State.BOOTSTRAPPING:
            enter(node, progress, Trigger.PEER_READY)
        elif progress.state is State.PARKED:
            enter(node, progress, Trigger.SEND)
        publish(node, progress)
    schedule(node, progress)


# --- optimistic prefill ----------------------------------------------------------------------------------------------


def policy_view(node: NodeState, progress: Progress) -> View:
    sender = progress.sender
    assert sender is not None
    return View(
        ready=sender.is_ready,
        forced=sender.is_forced,
        retries=progress.prefill_retry_count,
        yields=progress.yields,
        prompt_len=progress.request.prompt_len,
        parked_tokens=sum(parked.request.prompt_len for parked in node.live(State.PARKED)),
    )


def is_chosen_for_retry(node: NodeState, request: Request) -> bool:
    """Once, at arrival. Without optimistic prefill there is nothing to retry: it would never be published."""
    return node.settings.optimistic is not OptimisticPolicy.OFF and should_force_retry(
        request.rid, prob=node.settings.force_retry_prob, prefill_retry_count=0
    )


def may_start(node: NodeState, progress: Progress) -> bool:
    """Without waiting in the bootstrap queue, for READY or for a prompt that is rendered anew."""
    if progress.sender is None:
        return True
    if progress.sender.ready is not None:
        return False
    return bootstrap_policy(node.settings).may_start(policy_view(node, progress))


def after_chunk(node: NodeState, progress: Progress) -> None:
    """A chunk that is not the last has returned."""
    verdict = bootstrap_policy(node.settings).at_boundary(policy_view(node, progress))
    if verdict in GIVE_BACK_REASONS:
        give_back(node, progress, retry_reason(node, progress, verdict))
    else:
        publish(node, progress)


def after_prompt(node: NodeState, progress: Progress, *, token: bytes, flags: int, extra: bytes) -> None:
    """The prompt is computed and the first token sampled: offer, park, or give back."""
    sender = progress.sender
    room = progress.request.room
    assert sender is not None
    assert room is not None
    verdict = bootstrap_policy(node.settings).at_end(policy_view(node, progress))
    if verdict in GIVE_BACK_REASONS:
        give_back(node, progress, retry_reason(node, progress, verdict))
        return
    sender.result = ResultSlot(room, token, flags, extra, progress.cached_tokens)
    sender.computed_at = node.now
    enter(node, progress, Trigger.PARK if verdict is Verdict.PARK else Trigger.SEND)
    publish(node, progress)


GIVE_BACK_REASONS = {Verdict.GIVE_BACK: "not_ready", Verdict.YIELD: "yield"}


def retry_reason(node: NodeState, progress: Progress, verdict: Verdict) -> str:
    assert progress.sender is not None
    return "forced" if progress.sender.is_forced else GIVE_BACK_REASONS[verdict]


def give_back(node: NodeState, progress: Progress, reason: str) -> None:
    """Pages go to the prefix tree as soon as no batch writes them; then the request runs again, or waits for READY."""
    progress.give_back_reason = reason
    enter(node, progress, Trigger.GIVE_BACK)
    finish_give_back(node, progress)


def finish_give_back(node: NodeState, progress: Progress) -> None:
    if progress.state is not State.RETRACTING or progress.in_flight:
        return
    checkpoint(node, progress)  # chunks that returned meanwhile
    give_back_pages(node, progress)
    progress.length = progress.request.prompt_len + progress.generated
    if progress.sender is None:
        enter(node, progress, Trigger.REQUEUE, first=True)
        return
    reset_prefill_retry_time(progress)
    is_rendered_anew = progress.sender.ready is not None
    reason = "rendered" if is_rendered_anew else progress.give_back_reason
    progress.yields += reason == "yield"
    unready = structs.replace(policy_view(node, progress), ready=False)  # READY that came meanwhile is no budget
    may_retry = not is_rendered_anew and bootstrap_policy(node.settings).may_start(unready)
    if may_retry or reason in ("yield", "rendered"):  # a retry that there is no budget for is none (sglang#26780)
        node.counters.prefill_retries[reason] = node.counters.prefill_retries.get(reason, 0) + 1
        progress.prefill_retry_count += 1
    if may_retry:
        enter(node, progress, Trigger.REQUEUE, first=reason != "yield")  # it made room for those who wait
        return
    node.results.maybe_release_metadata_buffer(progress.id)
    enter(node, progress, Trigger.REQUEUE if progress.sender.is_ready else Trigger.FALL_BACK)
    if progress.sender.ready is not None:
        node.out.append(RenderAgain(progress.id, progress.sender.ready.rendered_at))


def reset_prefill_retry_time(progress: Progress) -> None:
    """A retry starts its stages anew; the arrival, and with it the deadline and the TTFT clock, stays."""
    assert progress.sender is not None
    progress.sender.result = None
    progress.sender.is_forced = False
    progress.stages = {"prefill_retried": Nanos(sum(progress.stages.values()))}


def yield_parked(node: NodeState) -> bool:
    """Under pressure of slots, pages or result slots: the newest parked request gives back what it holds."""
    parked = node.live(State.PARKED)
    if not parked:
        return False
    give_back(node, parked[-1], "yield")
    return True


# --- offering --------------------------------------------------------------------------------------------------------


def publish(node: NodeState, progress: Progress) -> None:
    """Hand final pages that were not handed out yet to the shards, which digest them and let the peer read."""
    sender = progress.sender
    assert sender is not None
    if not sender.is_ready or sender.is_forced:
        return
    if progress.state not in (State.COMPUTING, State.SENDING):
        return
    is_done = sender.result is not None
    stop = pages_for(node, progress.request.prompt_len) if is_done else progress.computed // node.settings.page_size
    start = sender.published
    if stop > start:
        pages = tuple(progress.pages[start:stop])
        sender.published = stop
        room = progress.request.room
        assert room is not None
        generations = page_generations(node, pages)
        node.out.append(PublishPages(progress.id, sender.attempt, start, pages, generations, room))
    if is_done and not sender.result_offered:
        offer_if_whole(node, progress)


def on_digested(node: NodeState, event: PagesDigested) -> None:
    progress = node.requests.get(event.request)
    if progress is None or progress.sender is None or has_ended(progress):
        return
    sender = progress.sender
    known = sender.digests.get(event.shard, b"")
    if event.attempt != sender.attempt or len(known) != (event.first_page - sender.held_pages) * 8:
        return  # of an earlier attempt, or a duplicate
    sender.digests[event.shard] = known + event.digests
    sender.secrets[event.shard] = event.secret
    if sender.digested(node.settings.shards) > sender.offered:
        offer(node, progress, first_page=sender.offered)


def offer_if_whole(node: NodeState, progress: Progress) -> None:
    """The result slot may be ready after the last page was offered, or there is no page to wait for."""
    sender = progress.sender
    assert sender is not None
    if sender.digested(node.settings.shards) == pages_for(node, progress.request.prompt_len):
        offer(node, progress, first_page=sender.offered)


def offer(node: NodeState, progress: Progress, *, first_page: int) -> None:
    """OFFER or PUBLISH all digested pages from `first_page` on; with the last one goes the result slot."""
    sender, room = progress.sender, progress.request.room
    assert sender is not None
    assert sender.peer is not None
    assert room is not None
    stop = sender.digested(node.settings.shards)
    total = pages_for(node, progress.request.prompt_len)
    pages = tuple(progress.pages[first_page:stop])
    is_last = sender.result is not None and stop == total
    if sender.offered_at is None:
        sender.offered_at = node.now
    sender.offered = stop
    sender.result_offered = sender.result_offered or is_last
    sender.lease_until = Nanos(node.now + node.settings.lease_ns)
    sender.resend_at = Nanos(node.now + node.settings.resend_ns)
    message = Offer(
        room=room,
        attempt=sender.attempt,
        source=node.settings.incarnation,
        first_page=first_page,
        pages=pages,
        generations=page_generations(node, pages),
        digests=sender.digest_slices(node.settings.shards, first_page, stop),
        secrets=tuple(sender.secrets.get(shard, b"") for shard in node.settings.shards),
        lease_ns=node.settings.lease_ns,
        total_pages=total,
        result=timed_result(progress, sender) if is_last else None,
    )
    node.out.append(Tell(sender.peer, message))
    schedule(node, progress)


def timed_result(progress: Progress, sender: Sender) -> ResultSlot:
    """The result slot with prefill's own durations since READY, for decode's TTFT ledger."""
    assert sender.result is not None
    assert sender.offered_at is not None
    assert sender.ready_at is not None
    began = max(progress.computing_since, sender.ready_at)
    ended = max(sender.computed_at, began)
    return structs.replace(
        sender.result,
        queue_ns=Nanos(min(began, sender.offered_at) - sender.ready_at),
        compute_ns=Nanos(max(0, min(ended, sender.offered_at) - began)),
        overlapped_ns=Nanos(max(0, ended - max(began, sender.offered_at))),
    )


def on_transfer_failed(node: NodeState, event: TransferFailed) -> None:
    """A shard cannot hand its pages out."""
    progress = node.requests.get(event.request)
    if progress is None or progress.sender is None or has_ended(progress) or event.attempt != progress.sender.attempt:
        return
    fail(node, progress, event.cause, f"shard {event.shard}: {event.detail}")


def on_page_read(node: NodeState, event: PageRead) -> None:
    progress = node.requests.get(event.request)
    if progress is None or progress.sender is None or not progress.sender.is_ready:
        return
    progress.sender.move(TransferTrigger.PAGE_MOVED)
    progress.sender.lease_until = Nanos(node.now + node.settings.lease_ns)


# --- ends ------------------------------------------------------------------------------------------------------------


def on_release(node: NodeState, peer: Incarnation, release: Release) -> None:
    """Decode reads no more: it has everything, gave up, or never needed us."""
    request = node.rooms.get(release.room)
    progress = node.requests.get(request) if request is not None else None
    if progress is None:
        node.stash.pop(release.room, None)
        if release.room not in node.tombstones and release.outcome != "done":
            stash(node, peer, release)
        return
    if progress.sender is None or has_ended(progress) or is_stale(progress.sender, peer, release):
        return
    if release.outcome == "aborted":
        said = ": ".join(filter(None, (release.cause, release.detail))) or "no cause given"
        final = release.cause is Cause.LAYOUT_MISMATCH  # no other pair of these two servers will fare better
        fail(node, progress, Cause.LAYOUT_MISMATCH if final else Cause.PEER_ABORTED, f"decode gave up: {said}")
    elif release.outcome == "done" and not progress.sender.result_offered:
        fail(node, progress, Cause.PROTOCOL, "decode released as done before everything was offered")
    else:
        progress.sender.move(TransferTrigger.RELEASED)
        finish(node, progress, Path.REMOTE if release.outcome == "done" else Path.LOCAL)


def is_stale(sender: Sender, peer: Incarnation, release: Release) -> bool:
    """Said by somebody else, or of an earlier request in the same room."""
    if sender.peer is None:
        return release.outcome == "done"
    return sender.peer != peer or release.attempt != sender.attempt


def finish(node: NodeState, progress: Progress, path: Path) -> None:
    """Decode has committed: the request ends here with the one token that was sampled. Not needed: with none."""
    sender = progress.sender
    assert sender is not None
    charge_stage(node, progress)
    if sender.result is not None and path is Path.REMOTE:
        ledger = StageTimings(tuple(progress.stages.items()))
        node.out.append(StartRequest(progress.id, path, progress.cached_tokens, ledger))
        extras = ((progress.id, sender.result.extra),) if sender.result.extra else ()
        node.out.append(EmitTokens((progress.id,), sender.result.token, extras))
    kv_pages = sender.offered - sender.held_pages
    revoke(node, progress)
    end(
        node,
        progress,
        FinishRequest(
            progress.id,
            FinishReason.LENGTH,
            path,
            progress.cached_tokens,
            progress.computed_tokens,
            kv_pages,
            StageTimings(tuple(progress.stages.items())),
            progress.prefill_retry_count,
        ),
    )


def fail(node: NodeState, progress: Progress, cause: Cause, detail: str = "") -> None:
    """End without success; the peer is told now, or when it speaks of the room for the first time."""
    sender, room = progress.sender, progress.request.room
    assert sender is not None
    assert room is not None
    abort = Abort(room, node.settings.incarnation, cause, detail)
    if sender.counterpart is not None and cause is not Cause.PEER_ABORTED:
        node.out.append(Tell(sender.counterpart, abort))
    record_closed_room(node, room, abort)
    if sender.state is TransferState.BOOTSTRAPPING:
        node.counters.bootstrap_failed += 1
    else:
        node.counters.transfer_failed += 1
    verdict = failure(node, progress, cause, detail)
    sender.move(TransferTrigger.FAULT)
    revoke(node, progress)
    end(node, progress, verdict)


def revoke(node: NodeState, progress: Progress) -> None:
    """If any page was handed out, the shards must say that nobody reads it any more before it can be used again."""
    sender, room = progress.sender, progress.request.room
    assert sender is not None
    assert room is not None
    if sender.published > sender.held_pages:
        progress.drains = dict.fromkeys(node.settings.shards)
        node.out.append(RevokePages(progress.id, sender.attempt, room))


def on_timer(node: NodeState, progress: Progress) -> None:
    """Say the last offer again, or find that the peer has stopped renewing its lease."""
    sender = progress.sender
    assert sender is not None
    if not sender.is_ready:
        if is_over(node, sender.bootstrap_until):
            fail(node, progress, Cause.BOOTSTRAP_TIMEOUT, "decode has not said READY in time")
        elif sender.is_announced and sender.resend_at <= node.now:
            say_rank(node, progress)
        return
    if sender.lease_until <= node.now:
        fail(node, progress, Cause.LEASE_EXPIRED, "decode neither reads nor says READY any more")
    elif progress.state is State.SENDING and sender.resend_at <= node.now:
        sender.resend_at = Nanos(node.now + node.settings.resend_ns)
        if sender.result_offered:
            lease_until = sender.lease_until
            offer(node, progress, first_page=sender.offered)
            sender.lease_until = lease_until  # our own voice does not renew the peer's lease
