"""How a request leaves: its end is told once, and it is forgotten when nothing of it can be touched any more.

Why it ends, and what its other half is told of that, is decided in `ends.py` and by the two sides.
"""

from tandem.core.commands import FailRequest, FinishRequest, ForgetRequests
from tandem.core.disagg.messages import LastWord
from tandem.core.scheduler.page_tables import give_back_pages
from tandem.core.scheduler.request_state import Progress, State, Trigger
from tandem.core.scheduler.state import NodeState, enter
from tandem.core.values import Cause, Nanos, Room


def failure(node: NodeState, progress: Progress, cause: Cause, detail: str) -> FailRequest:
    """The cause in full: in which wait, for how long, on whom."""
    known = progress.side.counterpart
    peer = known.name if known is not None else ""
    stage = str(progress.waiting_for or progress.state)
    return FailRequest(progress.id, cause, stage, detail, peer, Nanos(node.now - progress.entered_at))


def end(node: NodeState, progress: Progress, verdict: FinishRequest | FailRequest) -> None:
    """The one terminal event. What batches and transfers still touch stays quarantined until it is drained."""
    node.out.append(verdict)
    node.micro_batches.leave(progress)
    release_aborted_request(node, progress)
    node.results.maybe_release_metadata_buffer(progress.id)
    enter(node, progress, Trigger.END)
    if progress.in_flight or progress.drains:
        node.pool.quarantine(progress.pages, progress.id)
    forget_if_drained(node, progress)


def release_aborted_request(node: NodeState, progress: Progress) -> None:
    """Its prefetch from storage, if it has one, asks for no more; what is under way belongs to the prefix tree.

    On every way out of the queue. Safe at any time, and twice.
    """
    node.storage.release(progress.id)


def forget_if_drained(node: NodeState, progress: Progress) -> None:
    if progress.state is not State.DRAINING or progress.in_flight or progress.drains:
        return
    give_back_pages(node, progress)
    enter(node, progress, Trigger.DRAINED)
    del node.requests[progress.id]
    if progress.request.room is not None and node.rooms.get(progress.request.room) == progress.id:
        del node.rooms[progress.request.room]
    node.micro_batches.forget(progress.id)
    node.forgotten.append(progress.id)


def forget_command(node: NodeState) -> None:
    if node.forgotten:
        node.out.append(ForgetRequests(tuple(node.forgotten)))
        node.forgotten = []


def record_closed_room(node: NodeState, room: Room, answer: LastWord) -> None:
    """Remember what to answer when the peer speaks of this room again; the oldest is forgotten first."""
    node.tombstones.pop(room, None)
    node.tombstones[room] = answer
    while len(node.tombstones) > node.settings.tombstones:
        del node.tombstones[next(iter(node.tombstones))]
