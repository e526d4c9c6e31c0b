"""What the next batch is: prompt chunks first, as long as others may wait, else a token or block for all who run.

Where the replica has several pipeline stages, those who run are divided into as many micro-batches, which take turns.
Plans are made before the results of the batches in flight are known. A decode row refers to 'the last token of this
request', so that costs nothing but one useless row when the token before turns out to be the last.
"""

from msgspec import Struct

from tandem.core.batch import BatchKind, BatchPlan, Grow, Row, num_sampled
from tandem.core.commands import LaunchBatch
from tandem.core.disagg.sides import PrefillSide
from tandem.core.scheduler.leaving import forget_command
from tandem.core.scheduler.micro_batches import MicroBatch, is_last_sampled
from tandem.core.scheduler.page_tables import lacks_page, make_room
from tandem.core.scheduler.preemption import fail_for_lack_of_pages, retract, runners, victims
from tandem.core.scheduler.prefill_delayer import is_fresh, prefill_gate
from tandem.core.scheduler.priorities import in_precedence
from tandem.core.scheduler.request_state import InflightBatch, Progress, State
from tandem.core.scheduler.state import NodeState, charge_stage_as_waiting, mixes, pages_for
from tandem.core.scheduler.window_claims import take_parts
from tandem.core.values import BatchId, RequestId, ceil_div

# States whose requests will give their pages back, or become victims, without a decode batch.
GIVING_BACK = (
    State.DRAINING,
    State.RETRACTING,
    State.RECOVERING,
    State.PARKED,
    State.SENDING,
    State.ARRIVING,
    State.LOADING,
)


def plan(node: NodeState) -> bool:
    """Launch batches until the window is full or there is nothing to run.

    True if running requests were pushed back or ended for lack of pages: somebody who waits may start now.
    """
    num_running = len(node.queues[State.RUNNING])
    gate = prefill_gate(node.settings)
    while len(node.inflight) < node.settings.window_depth:
        num_decoding = num_decodable(node)
        may_begin = True
        rows: tuple[Row, ...] = ()
        budget = prompt_budget(node, others_wait=num_decoding > 0)
        if budget:
            may_begin = gate.may_begin(node, num_decoding)
            rows = prompt_rows(node, budget, may_begin=may_begin)
            gate.planned(node, len(rows))
        decode: DecodeTurn | None = None
        if num_decoding and (not rows or mixes(node)):
            decode = next_decode(node)
        are_held = not budget or not may_begin
        if are_held and not rows and decode is None and not node.inflight:  # nobody decodes after all
            rows = prompt_rows(node, node.settings.chunk_tokens, may_begin=gate.may_begin(node, 0))
            gate.planned(node, len(rows))
        if not rows and decode is None:
            break
        launch(node, rows, decode)
    return len(node.queues[State.RUNNING]) < num_running


class DecodeTurn(Struct, frozen=True):
    """A micro-batch that can get its next tokens, and the pages that some of its members need for that."""

    index: int
    grow: tuple[Grow, ...]


def launch(node: NodeState, rows: tuple[Row, ...], decode: DecodeTurn | None) -> None:
    """The iteration is frozen here, in plan and flight alike."""
    node.forward_ct += 1
    number, members = BatchId(node.forward_ct), tuple[RequestId, ...]()
    if decode is None:
        batch = BatchPlan(number, number, BatchKind.PREFILL, rows)
    else:
        micro_batch = node.micro_batches.each[decode.index]
        members = tuple(micro_batch.members)
        join, leave = micro_batch.take_changes()
        kind = BatchKind.MIXED if rows else BatchKind.DECODE
        batch = BatchPlan(number, number, kind, rows, True, decode.index, join, leave, decode.grow)
    take_turn(node, rows, decode)
    block_tokens = node.settings.block_tokens
    for request in members:
        progress = node.requests[request]
        progress.pending += block_tokens
        progress.in_flight += 1
    join_ahead(node, rows)
    node.inflight.append(InflightBatch(batch.id, batch.iteration, rows, members))
    forget_command(node)  # first: who has ended is still in the workers' decode set
    node.out.append(LaunchBatch(batch))


def join_ahead(node: NodeState, rows: tuple[Row, ...]) -> None:
    """Whose first token is being sampled gets the next one from the next batch, before this result is known.

    Not where there are several stages: the first would have to wait for that token, while others need not. Nor where
    tokens come by the block: where one ends depends on a prompt whose batch may fail.
    """
    if len(node.micro_batches.each) > 1 or node.settings.block_tokens > 1:
        return
    for row in rows:
        progress = node.requests[row.request]
        if row.samples and not isinstance(progress.side, PrefillSide) and not is_last_sampled(progress):
            node.micro_batches.join(progress)


def take_turn(node: NodeState, rows: tuple[Row, ...], decode: DecodeTurn | None) -> None:
    """Count what those who decode wait for behind prompts."""
    if decode is None:
        node.micro_batches.waited()
    else:
        node.micro_batches.decoded(decode.index)
    num_tokens = sum(row.stop - row.start for row in rows)
    all_had_turn = decode is not None and not node.micro_batches.longest_wait
    num_decoding = node.micro_batches.num_members if decode is not None else 0
    node.chunk_budget.launch(num_tokens, num_decoding=num_decoding, all_had_turn=all_had_turn)


def prompt_budget(node: NodeState, *, others_wait: bool) -> int:
    """Prompt tokens that the next batch may have."""
    settings = node.settings
    if not others_wait:
        return settings.chunk_tokens
    if node.micro_batches.longest_wait >= settings.prefill_streak:
        return 0
    return node.chunk_budget.tokens_while_others_wait(
        settings.prefill_stall, settings.chunk_tokens, settings.page_size, num_decoding=node.micro_batches.num_members
    )


def prompt_rows(node: NodeState, budget: int, *, may_begin: bool) -> tuple[Row, ...]:
    """Spans of known tokens, in precedence and of equals of the oldest request first, until the batch is as large as it
    may be. What has begun goes on, whatever the gate says."""
    rows: list[Row] = []
    most = node.settings.prompt_batch_max
    for progress in in_precedence(node, node.live(State.COMPUTING)):
        if budget <= 0 or len(rows) == most:
            break
        if progress.launched >= progress.length or (not may_begin and is_fresh(progress)):
            continue
        row = prompt_row(node, progress, budget)
        if row is None:
            break
        rows.append(row)
        budget -= row.stop - row.start
    return tuple(rows)


def prompt_row(node: NodeState, progress: Progress, budget: int) -> Row | None:
    """The next span; one that is not the last ends at a page border, so that no page is written by two batches."""
    start, stop = progress.launched, min(progress.length, progress.launched + budget)
    if stop < progress.length and node.settings.whole_prompts:
        return None
    if stop < progress.length:
        stop -= stop % node.settings.page_size
        if stop <= start:
            return None
    is_last = stop == progress.length
    pools = is_last and progress.request.wants_vector
    samples = is_last and not pools
    if is_fresh(progress):  # what it waited for the gate, and for its turn after it, was no computing
        progress.computing_since = node.now
        charge_stage_as_waiting(node, progress)
    page_size = node.settings.page_size
    take_parts(node, progress.pages[start // page_size : ceil_div(stop, page_size)])
    first = progress.synced_pages
    row = Row(progress.id, start, stop, first, tuple(progress.pages[first:]), samples, progress.untold_token, pools)
    progress.untold_token = b""
    progress.synced_pages = len(progress.pages)
    progress.launched = stop
    progress.in_flight += 1
    progress.pending += num_sampled(stop, node.settings.block_tokens) if samples else 0
    progress.computed_tokens += max(0, min(stop, progress.request.prompt_len) - start)
    return row


def num_decodable(node: NodeState) -> int:
    node.micro_batches.leave_if_last(node.requests)
    return node.micro_batches.num_members


def next_decode(node: NodeState) -> DecodeTurn | None:
    """Of the micro-batches, from the one whose turn it is, the first that can go on."""
    node.micro_batches.balance(node.requests, node.settings.min_micro_batch)
    for index in node.micro_batches.in_turn():
        grow = decode_rows(node, node.micro_batches.each[index])
        if grow is not None:
            return DecodeTurn(index, grow)
    return None


def decode_rows(node: NodeState, micro_batch: MicroBatch) -> tuple[Grow, ...] | None:
    """Make sure that every member has a page for its next input. None: nobody is left, or pages have to come back."""
    page_size = node.settings.page_size
    while micro_batch.members:
        members = map(node.requests.__getitem__, micro_batch.members)
        # `lacks_page` without the call: this runs once per row and step
        short = [row for row in members if row.length + row.pending > len(row.pages) * page_size]
        if make_room(node, len(short)):
            return tuple(grow(node, progress) for progress in short)
        if not preempt_for_pages(node, len(short)):
            return None
    return None


def grow(node: NodeState, progress: Progress) -> Grow:
    first = len(progress.pages)
    progress.pages += node.pool.allocate(1, progress.id)
    take_parts(node, progress.pages[first:])
    progress.synced_pages = len(progress.pages)
    return Grow(progress.id, first, tuple(progress.pages[first:]))


def preempt_for_pages(node: NodeState, num_pages: int) -> bool:
    """Too few pages for the next decode batch: push somebody back. False: pages are on their way, wait for them."""
    coming = sum(len(progress.pages) for progress in node.live(State.RETRACTING))
    members = [node.requests[request] for request in node.micro_batches.members]
    if leave_again(node, members):
        return True
    chosen = victims(node, runners(node), num_pages - node.pool.num_free - coming)
    if chosen:
        for progress in chosen:
            retract(node, progress)
        return True
    if node.inflight or node.host.copies or any(node.queues[state] for state in GIVING_BACK):
        return False
    (last,) = members
    fits_alone = pages_for(node, last.length + last.pending) <= node.pool.num_pages
    if node.num_slots_used > 1 or fits_alone:
        # Others compute or arrive and hold the rest, or it has copies of pages that its own lock keeps cached.
        retract(node, last)
    else:
        fail_for_lack_of_pages(node, last)
    return True


def leave_again(node: NodeState, members: list[Progress]) -> bool:
    """Whoever is ahead of its first token and needs another page waits until that is known: for its sake nobody is
    pushed back who has said more."""
    early = [progress for progress in members if progress.state is State.COMPUTING and lacks_page(node, progress)]
    for progress in early:
        node.micro_batches.leave(progress)
    return bool(early)
