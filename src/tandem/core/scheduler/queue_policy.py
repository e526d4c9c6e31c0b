"""In which order queued requests are looked at in one pass of admission.

A prefill half to which no decode has said READY comes behind all others, then counts priority, then what the policy
says. Under plain `fcfs` nothing counts but the queue.

`fcfs` takes them as they stand in the queue, where who was pushed back stands first. `lpm` orders the first so many of
them by how much of their prompt is cached, so a long queue costs no more than a short one; `lof` orders all by the
tokens that they may say. Whoever has said something already, or has spent half of the time until its deadline, goes
before all others of its priority, in queue order: so nobody waits without an end because its key is always the last.

Priority is strict. Who is less urgent than all who come waits until there are fewer of those, or ends at its deadline.

The order decides who gets slots, pages and result slots first; never who waits for whom. A half that is not READY
blocks nobody and gives way to those that are, however urgent it is: so the halves of a pair may stand in different
orders.
"""

import heapq
from bisect import bisect_left
from itertools import islice
from typing import Protocol

from tandem.core.disagg.sides import PrefillSide
from tandem.core.scheduler.priorities import precedence
from tandem.core.scheduler.request_state import Progress, State
from tandem.core.scheduler.state import NodeState
from tandem.core.settings import NodeSettings, SchedulePolicy
from tandem.core.values import RequestId

LOOK_AHEAD = 64  # queued requests looked at in one step, beside those that hope for storage


def look_ahead(node: NodeState) -> int:
    """Who waits for storage is passed over, and keeps nobody behind it from being looked at."""
    return LOOK_AHEAD + len(node.storage.prefetches)


class QueuePolicy(Protocol):
    def first(self, node: NodeState) -> list[RequestId]:
        """At most `look_ahead` queued requests, in the order in which they are looked at."""
        ...


class FirstCome:
    def first(self, node: NodeState) -> list[RequestId]:
        queue = node.queues[State.QUEUED]
        if node.settings.priorities is None:
            return list(islice(queue, look_ahead(node)))
        return heapq.nsmallest(look_ahead(node), queue, key=lambda request: precedence(node, node.requests[request]))


class LongestPrefix:
    def first(self, node: NodeState) -> list[RequestId]:
        def key(request: RequestId) -> tuple[bool, int, bool, int]:
            progress = node.requests[request]
            return place(node, progress, -num_cached(node, progress))

        return sorted(FirstCome().first(node), key=key)


class LongestOutput:
    def first(self, node: NodeState) -> list[RequestId]:
        def key(request: RequestId) -> tuple[bool, int, bool, int]:
            progress = node.requests[request]
            return place(node, progress, -progress.request.max_new_tokens)

        return heapq.nsmallest(look_ahead(node), node.queues[State.QUEUED], key=key)


def queue_policy(settings: NodeSettings) -> QueuePolicy:
    match settings.schedule_policy:
        case SchedulePolicy.FCFS:
            return FirstCome()
        case SchedulePolicy.LPM:
            return LongestPrefix()
        case SchedulePolicy.LOF:
            return LongestOutput()


def candidates(node: NodeState) -> list[RequestId]:
    """Those who are looked at. When parked or requeued requests hold what these lack, also those further back that are
    READY, or hold a result slot: one of them may have to run before it is given back."""
    queue, chosen = node.queues[State.QUEUED], queue_policy(node.settings).first(node)
    if len(queue) > LOOK_AHEAD and (node.queues[State.PARKED] or not node.results.free_slots):
        known, owners = frozenset(chosen), node.results.owners
        behind = (request for request in queue if request not in known)
        chosen += islice(
            (request for request in behind if has_taker(node.requests[request]) or request in owners), LOOK_AHEAD
        )
    return chosen


def has_taker(progress: Progress) -> bool:
    return isinstance(progress.side, PrefillSide) and progress.side.is_ready


def place(node: NodeState, progress: Progress, key: int) -> tuple[bool, int, bool, int]:
    """Smaller is first. The key tells those apart who can wait."""
    can_wait = not is_overdue(node, progress)
    return *precedence(node, progress), can_wait, key if can_wait else 0


def is_overdue(node: NodeState, progress: Progress) -> bool:
    """Its client has begun to read, or it has waited for half of the time that it has."""
    allowed_ns = progress.deadline - progress.arrived_at
    return progress.generated > 0 or 2 * (node.now - progress.arrived_at) >= allowed_ns


def num_cached(node: NodeState, progress: Progress) -> int:
    """Pages of its known tokens that the prefix tree has on the device. What is there has all before it there."""
    if not node.settings.prefix_cache:
        return 0
    nodes, hashes = node.tree.nodes, progress.hashes

    def is_missing(index: int) -> bool:
        found = nodes.get(hashes[index])
        return found is None or not found.is_landed

    return bisect_left(range(len(hashes)), True, key=is_missing)
