"""Whom to push back when pages run out, and how they return: queued at the head, everything computed again.

Victims are those with the least output, and among equals the longest prompts: they lose the least work. One request
always stays, so that somebody can finish and give its pages back.
"""

from collections.abc import Sequence

from tandem.core.disagg.sides import Local
from tandem.core.scheduler.page_tables import checkpoint, give_back_if_idle
from tandem.core.scheduler.request_state import Progress, Trigger
from tandem.core.scheduler.state import NodeState, enter


def victims(running: Sequence[Progress], num_pages: int) -> list[Progress]:
    """Requests whose pages are enough, together, to cover `num_pages`; never all of them."""
    order = sorted(running, key=lambda progress: (progress.generated, -progress.length, -progress.id))
    chosen: list[Progress] = []
    freed = 0
    for progress in order[:-1]:
        if freed >= num_pages:
            break
        chosen.append(progress)
        freed += len(progress.pages) + 1  # and it no longer needs the page that it lacked
    return chosen


def retract(node: NodeState, progress: Progress) -> None:
    checkpoint(node, progress)
    node.micro_batches.leave(progress)
    progress.side = Local()  # if KV had arrived it was released: from here on it is computed here
    progress.retractions += 1
    node.counters.retractions += 1
    enter(node, progress, Trigger.GIVE_BACK)
    finish_retraction(node, progress)


def finish_retraction(node: NodeState, progress: Progress) -> None:
    if give_back_if_idle(node, progress):
        enter(node, progress, Trigger.REQUEUE, first=True)
