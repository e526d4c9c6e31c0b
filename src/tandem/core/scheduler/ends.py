"""How requests end: with all their tokens, with one named cause, at a stop string of the edge, or at their deadline."""

from tandem.core.commands import FinishReason, FinishRequest, Path
from tandem.core.disagg import decode_side, prefill_side
from tandem.core.disagg.sides import DecodeSide, Local, PrefillSide
from tandem.core.scheduler.leaving import end, failure
from tandem.core.scheduler.loading import stop_if_late
from tandem.core.scheduler.page_tables import checkpoint
from tandem.core.scheduler.prefetch import stop_waiting_if_late
from tandem.core.scheduler.request_state import Progress, has_ended
from tandem.core.scheduler.state import NodeState, charge_stage, schedule
from tandem.core.values import Cause, RequestId


def finish(node: NodeState, progress: Progress, reason: FinishReason, vector: bytes = b"") -> None:
    checkpoint(node, progress)
    charge_stage(node, progress)  # of who has got no token; the others' ledger ended with the first one
    verdict = FinishRequest(
        progress.id,
        reason,
        progress.path,
        progress.cached_tokens,
        progress.computed_tokens,
        progress.kv_pages,
        progress.ledger,
        progress.retractions,
        vector,
        progress.host_tokens,
        progress.storage_tokens,
        progress.first_cause if progress.path is Path.FALLBACK else "",
    )
    end(node, progress, verdict)


def fail(node: NodeState, progress: Progress, cause: Cause, detail: str = "") -> None:
    """One named cause; the peer is told."""
    match progress.side:
        case PrefillSide() as side:
            prefill_side.fail(node, progress, side, cause, detail)
        case DecodeSide() as side:
            decode_side.fail(node, progress, side, cause, detail)
        case Local():
            end(node, progress, failure(node, progress, cause, detail or progress.first_cause))


def give_up(node: NodeState, request: RequestId, cause: Cause) -> None:
    progress = node.requests.get(request)
    if progress is not None and not has_ended(progress):
        fail(node, progress, cause)


def stop(node: NodeState, request: RequestId) -> None:
    """The edge saw a stop string: what was emitted is the answer."""
    progress = node.requests.get(request)
    if progress is None or has_ended(progress) or not progress.generated:
        return
    finish(node, progress, FinishReason.STOP)


def expire(node: NodeState, progress: Progress) -> None:
    """A deadline, or something to say again."""
    if has_ended(progress):
        return
    if progress.deadline <= node.now:
        waited = "no token for too long" if progress.generated else "no first token in time"
        before = "" if progress.first_cause.startswith(Cause.DEADLINE_EXCEEDED) else progress.first_cause
        fail(node, progress, Cause.DEADLINE_EXCEEDED, f"{waited}; before: {before}" if before else waited)
        return
    match progress.side:
        case PrefillSide() as side:
            prefill_side.on_timer(node, progress, side)
        case DecodeSide() as side:
            decode_side.on_timer(node, progress, side)
        case Local():
            pass
    stop_if_late(node, progress)
    stop_waiting_if_late(node, progress)
    if not has_ended(progress):
        schedule(node, progress)
