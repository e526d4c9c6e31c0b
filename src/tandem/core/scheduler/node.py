"""The step: drain events, settle, expire, admit, plan. One for all roles and modes.

There is no loop per mode here. Normal and overlapped execution differ in `window_depth`; unified, prefill and decode
differ in what a request carries: one with a room and no peer has a `PrefillSide`, one with a room and a peer has a
`DecodeSide`, and one with neither is `Local`, computed and decoded here.
"""

from collections.abc import Sequence
from typing import assert_never

from msgspec import structs

from tandem.core.batch import TOKEN_BYTES, BatchOutcome, TokenFlag, num_sampled
from tandem.core.commands import (
    Effects,
    EmitTokens,
    FailRequest,
    FinishReason,
    Path,
    Tell,
)
from tandem.core.disagg import decode_side, prefill_lookup, prefill_side, rendering
from tandem.core.disagg.dp_rank import RequestFacts
from tandem.core.disagg.messages import SHUTTING_DOWN, Abort, Message, Moved, Offer, Ready, Release
from tandem.core.disagg.sides import AnySide, DecodeSide, Local, PrefillSide
from tandem.core.events import (
    AbortRequested,
    BatchFailed,
    BatchReturned,
    DpRankAnswered,
    DrainRequested,
    Event,
    FlushRequested,
    HooksChanged,
    LoadsGathered,
    LoadWanted,
    PageRead,
    PagesCopied,
    PagesDigested,
    PagesFound,
    PagesLanded,
    PeerLearned,
    PeerLost,
    PeerReturned,
    PeerSaid,
    PeerUnknown,
    PromptRendered,
    ReadsDrained,
    RequestArrived,
    RequestRefused,
    RoomElsewhere,
    StopMatched,
    TransferDrained,
    TransferFailed,
)
from tandem.core.request import Request
from tandem.core.scheduler.admission import admit
from tandem.core.scheduler.batch_planner import plan
from tandem.core.scheduler.ends import expire, fail, finish, give_up, stop
from tandem.core.scheduler.leaving import forget_command, forget_if_drained, record_closed_room
from tandem.core.scheduler.loading import on_copied
from tandem.core.scheduler.page_tables import checkpoint, flush_cache, too_long
from tandem.core.scheduler.preemption import finish_retraction
from tandem.core.scheduler.prefetch import begin_prefetch, on_found
from tandem.core.scheduler.prefill_delayer import on_load_wanted, on_loads_gathered, prefill_gate
from tandem.core.scheduler.priorities import gives_way
from tandem.core.scheduler.request_state import (
    WAITING_STATES,
    WANTS_KV,
    InflightBatch,
    Progress,
    State,
    Trigger,
    has_ended,
    start_of,
)
from tandem.core.scheduler.state import NodeState, charge_stage, due, earliest_timer, enter, mixes, schedule
from tandem.core.scheduler.window_claims import free_windows_command, pass_window
from tandem.core.settings import NodeSettings
from tandem.core.values import Cause, Incarnation, Nanos, RequestId, ShardId, earlier

NO_VECTOR = "no vector: what was computed of the prompt is not finite"
NO_TOKEN = "no token can be sampled: logits are not finite"
OUTGROWN = "no token can be sampled: the grammar has too many parts of rules at one place, or takes too long to follow"


class EngineNode:
    """One replica. Implements `ports.Node`."""

    def __init__(self, settings: NodeSettings) -> None:
        self.state = NodeState.empty(settings)

    def step(self, events: Sequence[Event], now: Nanos) -> Effects:
        node = self.state
        assert now >= node.now, "the clock is monotonic"
        node.now = now
        node.began_at = node.began_at if node.steps else now
        node.steps += 1
        node.tree.step = node.steps
        for event in events:
            handle(node, event)
        for progress in due(node):
            expire(node, progress)
        for request in decode_side.go_on_pulling(node) if node.held_back else ():
            start_if_landed(node, request)
        admit(node)
        while plan(node):
            admit(node)
        forget_command(node)
        free_windows_command(node)
        commands, node.out = tuple(node.out), []
        return Effects(commands, earlier(earliest_timer(node), prefill_gate(node.settings).opens_at(node)))

    def snapshot(self) -> bytes:
        return self.state.encode()

    def restore(self, snapshot: bytes) -> None:
        self.state = NodeState.decode(snapshot)


def handle(node: NodeState, event: Event) -> None:
    """Those that come with every batch, page and transfer are looked for first."""
    match event:
        case BatchReturned(outcome):
            settle(node, outcome)
        case PagesLanded():
            decode_side.on_landed(node, event)
            start_if_landed(node, event.request)
        case PeerSaid(peer, message):
            on_message(node, peer, message)
        case PagesDigested():
            prefill_side.on_digested(node, event)
        case PageRead():
            prefill_side.on_page_read(node, event)
        case ReadsDrained() | TransferDrained():
            drained(node, event.request, event.shard)
        case RequestArrived(request):
            arrive(node, request)
        case RequestRefused(request, cause, detail):
            decline_room(node, request, cause, detail)
        case PromptRendered(request):
            rendering.on_rendered(node, request)
        case AbortRequested(request, cause):
            give_up(node, request, cause)
        case StopMatched(request):
            stop(node, request)
        case BatchFailed():
            settle_failure(node, event)
        case PeerLearned():
            decode_side.on_peer_learned(node, event)
        case PeerUnknown():
            decode_side.on_peer_unknown(node, event)
        case DpRankAnswered():
            decode_side.on_rank_answered(node, event)
        case RoomElsewhere():
            prefill_side.on_elsewhere(node, event)
        case PeerReturned(peer):
            decode_side.on_peer_returned(node, peer)
        case PeerLost():
            lose_peer(node, event)
        case TransferFailed():
            decode_side.on_transfer_failed(node, event)
            prefill_side.on_transfer_failed(node, event)
        case PagesCopied():
            on_copied(node, event)
        case PagesFound():
            on_found(node, event)
        case LoadWanted(number):
            on_load_wanted(node, number)
        case LoadsGathered():
            on_loads_gathered(node, event)
        case HooksChanged(force_retry_prob):
            node.settings = structs.replace(node.settings, force_retry_prob=force_retry_prob)
        case DrainRequested():
            node.draining = True
        case FlushRequested():
            flush_cache(node)
        case _:
            assert_never(event)


# --- arrival ---------------------------------------------------------------------------------------------------------


def arrive(node: NodeState, request: Request) -> None:
    """Accept or refuse. A refused request owns nothing; its peer hears of it when it speaks of the room.

    A full queue takes in who is more urgent than somebody in it, who ends instead.
    """
    if request.id in node.requests:
        return
    assert not (request.wants_vector and request.room is not None), "who wants a vector has no other half"
    assert request.wants_vector or not node.settings.whole_prompts, "an encoder has no next token"
    is_full = num_waiting(node) >= node.settings.max_queued
    last = gives_way(node, request) if is_full else None
    refusal = refuse(node, request, has_place=last is not None or not is_full)
    if refusal is not None:
        cause, detail = refusal
        node.out.append(FailRequest(request.id, cause, "intake", detail))
        decline_room(node, request, cause, detail)
        node.forgotten.append(request.id)
        return
    if last is not None:
        fail(node, last, Cause.QUEUE_FULL, "the queue is full, and a request of higher priority has come")
    side = create_side(node, request)
    state = State.QUEUED if isinstance(side, Local) else State.BOOTSTRAPPING
    deadline, hashes = Nanos(node.now + request.timeout_ns), list(request.page_hashes)
    progress = Progress(request, side, state, node.now, node.now, deadline, request.prompt_len, hashes=hashes)
    node.requests[request.id] = progress
    node.queues[state][request.id] = None
    begin_prefetch(node, progress)
    match side:
        case Local():
            progress.path = Path.UNIFIED if node.settings.role == "unified" else Path.LOCAL
        case PrefillSide():
            await_ready(node, progress, side)
        case DecodeSide():
            decode_side.open_room(node, progress, side)
        case _:
            assert_never(side)
    schedule(node, progress)


def create_side(node: NodeState, request: Request) -> AnySide:
    if request.room is None:
        return Local()
    if request.peer is None:
        return prefill_side.create_side(node, request, request.room)
    return decode_side.create_side(node, request, request.room, request.peer)


def await_ready(node: NodeState, progress: Progress, side: PrefillSide) -> None:
    """On at once if READY is here or the policy does not wait for it."""
    stashed = prefill_side.open_room(node, progress, side)
    if stashed is not None:
        on_message(node, stashed.peer, stashed.message)
    if progress.state is State.BOOTSTRAPPING and prefill_side.may_start(node, progress, side):
        enter(node, progress, Trigger.PEER_READY)


def num_waiting(node: NodeState) -> int:
    return sum(len(node.queues[state]) for state in WAITING_STATES)


def refuse(node: NodeState, request: Request, *, has_place: bool) -> tuple[Cause, str] | None:
    if node.draining:
        return Cause.DRAINING, SHUTTING_DOWN
    if not has_place:
        return Cause.QUEUE_FULL, f"{num_waiting(node)} requests are waiting"
    complaint = too_long(node, request)
    if complaint is not None:
        return Cause.CONTEXT_LENGTH_EXCEEDED, complaint
    if request.room is not None and request.room in node.rooms:
        return Cause.DUPLICATE_ROOM, f"room {request.room} is in use"
    return None


def decline_room(node: NodeState, request: Request, cause: Cause, detail: str) -> None:
    """So that the other half does not wait for its deadline. A room that is in use is another request's."""
    room = request.room
    if room is None or room in node.rooms:
        return
    if request.peer is None:
        abort = Abort(room, node.settings.incarnation, cause, detail)
        from_peer = node.stash.pop(room, None)
        if from_peer is not None:
            node.out.append(Tell(from_peer.peer, abort))
    else:
        abort = decode_side.last_word(node, request, room, "aborted", cause, detail)
        prefill_lookup.tell_prefill(node, request.peer, RequestFacts(room, request.dp_rank_hint), abort)
    record_closed_room(node, room, abort)


# --- results ---------------------------------------------------------------------------------------------------------


def settle(node: NodeState, outcome: BatchOutcome) -> None:
    """A batch has returned: book what it computed, emit its tokens, end who is done. In launch order."""
    if not node.inflight or node.inflight[0].batch != outcome.batch:
        return  # a duplicate
    flight = node.inflight.pop(0)
    assert outcome.iteration == flight.forward_iter
    learn_cost(node, flight, outcome)
    extras, vectors = dict(outcome.extras), dict(outcome.vectors)
    learn_hashes(node, flight, outcome)
    emitted = Emission()
    of_rows, block_tokens = outcome.tokens_by_row(), node.settings.block_tokens
    index = 0
    for row in flight.rows:
        progress = node.requests[row.request]
        progress.in_flight -= 1
        progress.computed = row.stop
        tokens, flags = b"", 0
        if outcome.prompt_extras and progress.state is State.COMPUTING and not progress.generated:
            progress.prompt_extras += [extra for request, extra in outcome.prompt_extras if request == row.request]
        if row.samples:
            tokens, flags = of_rows[index], outcome.flags[index]
            index += 1
            progress.pending -= num_sampled(row.stop, block_tokens)
        if row.pools:
            settle_vector(node, progress, vectors.get(row.request))
        else:
            settle_prompt_row(node, progress, emitted, row.samples, tokens, flags, extras.get(row.request, b""))
        pass_window(node, progress)
    for request in flight.members:
        progress = node.requests[request]
        progress.in_flight -= 1
        progress.pending -= block_tokens
        if progress.state is State.RUNNING:
            progress.computed = progress.length
            extra = extras.get(request, b"") if extras else b""
            pass_window(node, progress)
            take_tokens(node, progress, emitted, of_rows[index], outcome.flags[index], extra)
        else:
            settle_late(node, progress)
        index += 1
    emitted.flush(node)


def learn_cost(node: NodeState, flight: InflightBatch, outcome: BatchOutcome) -> None:
    """What a prompt token costs, and what a batch of prompts costs beside its tokens."""
    num_tokens, num_decoding = sum(row.stop - row.start for row in flight.rows), len(flight.members)
    if num_tokens or not outcome.prefill_ranks:  # else it has waited for the prompts of other ranks
        node.chunk_budget.learn(num_tokens, outcome.duration_ns, num_decoding=num_decoding, is_mixed=mixes(node))


class Emission:
    """The tokens of one step, gathered so that they leave as one command; terminal events come after them."""

    __slots__ = ("ends", "extras", "requests", "tokens")

    def __init__(self) -> None:
        self.requests: list[RequestId] = []
        self.tokens: list[bytes] = []
        self.extras: list[tuple[RequestId, bytes]] = []
        self.ends: list[tuple[Progress, FinishReason]] = []

    def flush(self, node: NodeState) -> None:
        if self.requests:
            node.out.append(EmitTokens(tuple(self.requests), b"".join(self.tokens), tuple(self.extras)))
        for progress, reason in self.ends:
            finish(node, progress, reason)


def settle_prompt_row(
    node: NodeState, progress: Progress, emitted: Emission, is_last: bool, tokens: bytes, flags: int, extra: bytes
) -> None:
    if progress.state is not State.COMPUTING:
        settle_late(node, progress)
        return
    checkpoint(node, progress)
    if flags & TokenFlag.INVALID:
        fail_without_token(node, progress, flags)
    elif isinstance(progress.side, PrefillSide):
        if is_last:
            prefill_side.after_prompt(node, progress, progress.side, token=tokens, flags=flags, extra=extra)
        else:
            prefill_side.after_chunk(node, progress, progress.side)
    elif is_last:
        enter(node, progress, Trigger.RUN)
        if take_tokens(node, progress, emitted, tokens, flags, extra):
            node.micro_batches.join_late(progress)


def fail_without_token(node: NodeState, progress: Progress, flags: int) -> None:
    if flags & TokenFlag.OUTGROWN:
        fail(node, progress, Cause.GRAMMAR_TOO_COMPLEX, OUTGROWN)
    else:
        fail(node, progress, Cause.INVALID_LOGITS, NO_TOKEN)


def settle_vector(node: NodeState, progress: Progress, vector: bytes | None) -> None:
    """The prompt of a request that ends with it. vector: None where what was computed is no number."""
    if progress.state is not State.COMPUTING:
        settle_late(node, progress)
    elif vector is None:
        fail(node, progress, Cause.INVALID_LOGITS, NO_VECTOR)
    else:
        finish(node, progress, FinishReason.PROMPT, vector)


def settle_late(node: NodeState, progress: Progress) -> None:
    """A result for a request that has ended or is being pushed back: it only counts as returned."""
    if has_ended(progress):
        forget_if_drained(node, progress)
    elif progress.state is State.RETRACTING:
        if isinstance(progress.side, PrefillSide):
            prefill_side.finish_give_back(node, progress, progress.side)
        else:
            finish_retraction(node, progress)


def take_tokens(
    node: NodeState, progress: Progress, emitted: Emission, tokens: bytes, flags: int, extra: bytes
) -> bool:
    """More tokens are known: emit them, as far as they were asked for. False if the last of them was the last one."""
    if flags & TokenFlag.INVALID:
        fail_without_token(node, progress, flags)
        return False
    progress.deadline = Nanos(node.now + node.settings.stall_timeout_ns)
    if not progress.generated:
        announce_first_token(node, progress)
        schedule(node, progress)  # the stall timeout may end before the deadline that bounded the first token
    request = progress.request
    count, room = len(tokens) // TOKEN_BYTES, request.max_new_tokens - progress.generated
    if count > room:
        count, tokens, flags = room, tokens[: TOKEN_BYTES * room], 0  # the flags are those of the last one
    progress.length += count
    progress.generated += count
    emitted.requests += (request.id,) * count
    emitted.tokens.append(tokens)
    if extra:
        emitted.extras.append((request.id, extra))
    if flags:
        emitted.ends.append((progress, FinishReason.STOP))
        return False
    if progress.generated >= request.max_new_tokens:
        emitted.ends.append((progress, FinishReason.LENGTH))
        return False
    return True


def announce_first_token(node: NodeState, progress: Progress) -> None:
    charge_stage(node, progress)
    of_prompt, progress.prompt_extras = tuple(progress.prompt_extras), []
    node.out.append(start_of(progress, progress.path, of_prompt))


def learn_hashes(node: NodeState, flight: InflightBatch, outcome: BatchOutcome) -> None:
    """Workers name the pages that filled up with output. A chain with a gap is not continued: it would lie."""
    reported: dict[RequestId, list[bytes]] = {}
    for request, page_hash in outcome.hashes:
        reported.setdefault(request, []).append(page_hash)
    if not reported:
        return
    reach = {row.request: row.stop for row in flight.rows}
    for request, hashes in reported.items():
        progress = node.requests.get(request)
        if progress is None or has_ended(progress):
            continue
        computed = reach.get(request, progress.length)
        if len(progress.hashes) + len(hashes) == computed // node.settings.page_size:
            progress.hashes += hashes


def settle_failure(node: NodeState, event: BatchFailed) -> None:
    """The forward pass raised: its requests end, the others go on."""
    if not node.inflight or node.inflight[0].batch != event.batch:
        return
    flight = node.inflight.pop(0)
    block_tokens = node.settings.block_tokens
    sampled = [(row.request, num_sampled(row.stop, block_tokens) if row.samples else 0) for row in flight.rows]
    for request, count in [*sampled, *((member, block_tokens) for member in flight.members)]:
        progress = node.requests[request]
        progress.in_flight -= 1
        progress.pending -= count
        if has_ended(progress):
            forget_if_drained(node, progress)
        else:
            fail(node, progress, event.cause, event.detail)


# --- transfers -------------------------------------------------------------------------------------------------------


def on_message(node: NodeState, peer: Incarnation, message: Message) -> None:
    match message:
        case Ready():
            rendering.on_ready(node, peer, message)
        case Release():
            prefill_side.on_release(node, peer, message)
        case Offer():
            decode_side.on_offer(node, peer, message)
            start_if_landed(node, node.rooms.get(message.room))
        case Abort():
            decode_side.on_peer_abort(node, peer, message)
        case Moved():
            decode_side.on_moved(node, peer, message)
        case _:
            assert_never(message)


def start_if_landed(node: NodeState, request: RequestId | None) -> None:
    """A request can run when its KV has arrived; its first tokens are those that prefill sampled."""
    landed = decode_side.commit_if_landed(node, request)
    if landed is None:
        return
    progress, first = landed
    if progress.request.prompt_logprobs_from is not None:  # the halves of a room may have come from two clients
        progress.prompt_extras = list(first.prompt_extras)
    enter(node, progress, Trigger.RUN)
    pass_window(node, progress)  # what came of the pages behind it need not be whole
    checkpoint(node, progress)
    emitted = Emission()
    goes_on = take_tokens(node, progress, emitted, first.token, first.flags, first.extra)
    emitted.flush(node)
    if goes_on:
        node.micro_batches.join(progress, token=first.token)


def lose_peer(node: NodeState, event: PeerLost) -> None:
    """Everything between this node and that life of the peer has failed."""
    for address, known in list(node.peers.items()):
        if known.incarnation == event.peer:
            del node.peers[address]
    for room, stashed in list(node.stash.items()):
        if stashed.peer == event.peer and isinstance(stashed.message, Ready):
            del node.stash[room]
    gone = f"{event.peer.name} is gone" + (f": {event.detail}" if event.detail else "")
    for progress in list(node.requests.values()):
        if has_ended(progress):
            continue
        if progress.side.counterpart != event.peer:
            continue
        match progress.side:
            case PrefillSide() as side:
                prefill_side.fail(node, progress, side, event.cause, f"decode {gone}")
            case DecodeSide() as side if progress.state in WANTS_KV:
                decode_side.lose_prefill(node, progress, side, event.cause, f"prefill {gone}")
            case _:
                pass


def drained(node: NodeState, request: RequestId, shard: ShardId) -> None:
    """One shard touches these pages no more."""
    progress = node.requests.get(request)
    if progress is None:
        return
    progress.drains.pop(shard, None)
    decode_side.recover_if_drained(node, progress)
    forget_if_drained(node, progress)
