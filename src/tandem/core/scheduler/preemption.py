"""Whom to push back when pages run out, and how they return: queued at the head, everything computed again.

Victims are the least urgent, of these those with the least output, and among equals the longest prompts: they lose the
least work. One request always stays, so that somebody can finish and give its pages back.

Where priorities count, who runs is also pushed back for a newcomer that is more urgent by more than a threshold: so
many, the least urgent and of these the newest first, as give it the slot, the pages and the window parts that it needs,
or nobody. Who is pushed back can do the same to none that stands above it, and says at least one token more each time
that it runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.core.disagg.sides import Local
from tandem.core.scheduler.leaving import end, failure
from tandem.core.scheduler.page_tables import checkpoint, count_loads, find_prefix, give_back_if_idle, matchable_pages
from tandem.core.scheduler.priorities import least_urgent_first, rank
from tandem.core.scheduler.request_state import Progress, State, Trigger, is_early
from tandem.core.scheduler.reserve import Reserve
from tandem.core.scheduler.state import NodeState, enter, pages_for
from tandem.core.scheduler.window_claims import claim_of, num_unclaimed
from tandem.core.values import Cause, PageHash


def runners(node: NodeState) -> list[Progress]:
    """Who may be pushed back: of those who decode all who have said a token since they began."""
    members = map(node.requests.__getitem__, node.micro_batches.members)
    return [progress for progress in members if progress.state is State.RUNNING]


def victims(node: NodeState, running: Sequence[Progress], num_pages: int) -> list[Progress]:
    """Requests whose pages are enough, together, to cover `num_pages`; never all of them."""
    order = sorted(running, key=lambda progress: (progress.generated, -progress.length, -progress.id))
    order = least_urgent_first(node, order)
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
    """Queued again, unless it has become too long to be admitted ever again."""
    if not give_back_if_idle(node, progress):
        return
    if pages_for(node, progress.length) > node.pool.num_pages:
        fail_for_lack_of_pages(node, progress)
    else:
        enter(node, progress, Trigger.REQUEUE, first=True)


def fail_for_lack_of_pages(node: NodeState, progress: Progress) -> None:
    detail = f"{progress.length} tokens need more than the {node.pool.num_pages} pages of the pool"
    end(node, progress, failure(node, progress, Cause.OUT_OF_PAGES, detail))


def may_preempt(node: NodeState) -> bool:
    """Somebody runs who could be pushed back for a newcomer."""
    return node.settings.priorities is not None and node.micro_batches.num_members > 0


def preempt(node: NodeState, newcomer: Progress, reserve: Reserve) -> bool:
    """Push back as many as let the newcomer in, as soon as their batches have returned, or nobody: False."""
    if node.settings.priorities is None or is_early(newcomer):
        return False
    node.micro_batches.leave_if_last(node.requests)
    limit = rank(node, newcomer.request) + node.settings.priorities.preemption_threshold
    outranked = [progress for progress in runners(node) if rank(node, progress.request) > limit]
    outranked.sort(key=lambda progress: (rank(node, progress.request), progress.id), reverse=True)
    if not outranked:
        return False
    prefix = newcomer.hashes[: matchable_pages(node, newcomer)]
    matched, below = find_prefix(node, newcomer, prefix)
    found = prefix[: len(matched) + len(below)]
    if found:
        node.tree.lock(found[-1])
    vacancy = Vacancy.of(node, newcomer, len(found), count_loads(node, below), reserve)
    chosen: list[Progress] = []
    while not vacancy.fits(node, newcomer) and len(chosen) < len(outranked):
        vacancy.without(node, outranked[len(chosen)])
        chosen.append(outranked[len(chosen)])
    fits = vacancy.fits(node, newcomer)
    if found:
        node.tree.unlock(found[-1])
    for progress in chosen if fits else ():
        retract(node, progress)
    return fits and bool(chosen)


@dataclass(slots=True)
class Vacancy:
    """What a newcomer finds when some have left: those whose last batch is in flight anyway, and some who run.

    Not counted is what a transfer may still touch: when that comes back is for others to say.
    """

    num_slots: int
    num_pages: int
    num_parts: int  # of windows, on which nobody has a claim
    num_left: int  # who have a slot still
    needed_pages: int  # of the newcomer, besides its cached prefix
    needed_parts: int  # window parts that it may need at one time
    reserve: Reserve
    pins: dict[PageHash, int] = field(default_factory=dict[PageHash, int])  # as `PrefixTree.num_released` has it

    @classmethod
    def of(cls, node: NodeState, newcomer: Progress, num_found: int, num_loads: int, reserve: Reserve) -> "Vacancy":
        """Its cached prefix is locked, and some of it has to be loaded."""
        used, num_pages = node.num_slots_used, pages_for(node, newcomer.length)
        vacancy = cls(
            num_slots=node.settings.max_running - used,
            num_pages=node.pool.num_free + node.tree.num_evictable,
            num_parts=num_unclaimed(node),
            num_left=used,
            needed_pages=num_pages - num_found + num_loads,
            needed_parts=claim_of(node, newcomer, num_pages, num_loads),
            reserve=Reserve(reserve.short_pages, reserve.tokens),
        )
        for progress in node.live(State.DRAINING):
            if not progress.drains:
                vacancy.take_back(node, progress)
        for progress in node.live(State.RETRACTING):
            vacancy.vacate(node, progress)
        members = frozenset(node.micro_batches.members)
        for progress in node.live(State.RUNNING):
            if progress.id not in members:  # its last token is being sampled
                vacancy.without(node, progress)
        return vacancy

    def vacate(self, node: NodeState, progress: Progress) -> None:
        self.num_slots += 1
        self.num_left -= 1
        self.take_back(node, progress)

    def take_back(self, node: NodeState, progress: Progress) -> None:
        """Pages and claim."""
        self.num_parts += progress.window_claim
        self.num_pages += len(progress.pages) - progress.inserted
        if progress.locked is not None:
            self.num_pages += node.tree.num_released(progress.locked, self.pins)

    def without(self, node: NodeState, progress: Progress) -> None:
        """... this one, who runs and has its part of the reserve."""
        self.vacate(node, progress)
        self.reserve.without(node, progress)

    def fits(self, node: NodeState, newcomer: Progress) -> bool:
        reserve = self.reserve.pages(node, newcomer) if self.num_left else 0
        has_pages = self.needed_pages + reserve <= self.num_pages
        return self.num_slots > 0 and has_pages and self.needed_parts <= self.num_parts
