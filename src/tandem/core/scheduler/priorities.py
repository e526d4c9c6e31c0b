"""Who is more urgent, where priorities count: by a rank, of which all have the same where they do not.

Who is first goes by precedence. There a prefill half for which no decode waits yet comes behind all others, however
urgent it is: decode may have pages for those others alone, so everybody would wait for them.
"""

from collections.abc import Sequence

from tandem.core.request import Request
from tandem.core.scheduler.request_state import WAITING_STATES, Progress, is_early
from tandem.core.scheduler.state import NodeState


def rank(node: NodeState, request: Request) -> int:
    """Who has a smaller one is more urgent. All have the same where priorities do not count."""
    priorities = node.settings.priorities
    if priorities is None:
        return 0
    return request.priority if priorities.low_values_first else -request.priority


def precedence(node: NodeState, progress: Progress) -> tuple[bool, int]:
    """Who has a smaller one is first. All have the same under plain `fcfs`."""
    return not node.settings.is_plain_fcfs and is_early(progress), rank(node, progress.request)


def in_precedence(node: NodeState, requests: Sequence[Progress]) -> Sequence[Progress]:
    """Of equals the first stays the first."""
    if node.settings.is_plain_fcfs:
        return requests
    return sorted(requests, key=lambda progress: precedence(node, progress))


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
    waiting, own = (progress for state in WAITING_STATES for progress in node.live(state)), rank(node, newcomer)
    outranked = [one for one in waiting if not one.generated and rank(node, one.request) > own]
    return max(outranked, key=lambda one: (rank(node, one.request), one.id), default=None)
