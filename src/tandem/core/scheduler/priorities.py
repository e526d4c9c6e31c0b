"""Who is more urgent, where priorities count: by a rank, of which all have the same where they do not."""

from collections.abc import Sequence

from tandem.core.request import Request
from tandem.core.scheduler.request_state import WAITING_STATES, Progress
from tandem.core.scheduler.state import NodeState


def rank(node: NodeState, request: Request) -> int:
    """Who has a smaller one is more urgent. All have the same where priorities do not count."""
    priorities = node.settings.priorities
    if priorities is None:
        return 0
    return request.priority if priorities.low_values_first else -request.priority


def most_urgent_first(node: NodeState, requests: Sequence[Progress]) -> Sequence[Progress]:
    """Those who are equally urgent stay as they are."""
    if node.settings.priorities is None:
        return requests
    return sorted(requests, key=lambda progress: rank(node, progress.request))


def least_urgent_first(node: NodeState, requests: Sequence[Progress]) -> Sequence[Progress]:
    """Those who are equally urgent stay as they are."""
    if node.settings.priorities is None:
        return requests
    return sorted(requests, key=lambda progress: -rank(node, progress.request))


def gives_way(node: NodeState, newcomer: Request) -> Progress | None:
    """The least urgent of those who wait, and of these the newest, if `newcomer` is more urgent. Never one whose client
    has begun to read."""
    if node.settings.priorities is None:
        return None
    waiting = [progress for state in WAITING_STATES for progress in node.live(state) if not progress.generated]
    last = max(waiting, key=lambda progress: (rank(node, progress.request), progress.id), default=None)
    return last if last is not None and rank(node, last.request) > rank(node, newcomer) else None
