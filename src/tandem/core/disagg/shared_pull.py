"""Pages that come for one request come for all that want them: they are pulled once, as the prompt is computed once.

A decode half says READY at once and reserves all its pages, so that its prefill half never waits for another one. What
it does not do is pull what another request is pulling from the same prefill: it holds its first pull back until that
one has everything, or has ended, for whatever reason. Then it reads what the prefix tree has got, gives back the pages
that it had reserved for that, and pulls the rest; if nothing has come, all of it.

From the same prefill only: whether another one delivers is nothing on which its own answer should depend. It goes on
asking meanwhile as anyone whose READY may be lost does, and by the time that anyone has the KV has to be here.
"""

from tandem.core.disagg.sides import Arrival, DecodeSide
from tandem.core.scheduler.page_tables import adopt_cached
from tandem.core.scheduler.request_state import Progress, State, WaitingFor, num_shared
from tandem.core.scheduler.state import NodeState


def comes_for_another(node: NodeState, progress: Progress, arrival: Arrival) -> bool:
    """Before its first pull: take over what has come for others, and hold back while most of the rest is coming."""
    take_over(node, progress, arrival)
    if another_pulls(node, progress, arrival):
        node.held_back[progress.id] = None
        progress.blocked_on = WaitingFor.PREFIX
        return True
    if progress.id in node.held_back:
        del node.held_back[progress.id]
        progress.blocked_on = None
    return False


def take_over(node: NodeState, progress: Progress, arrival: Arrival) -> None:
    """Pages of the prefix tree take the place of its own, in which nothing has landed."""
    assert not arrival.pulling
    adopt_cached(node, progress)
    arrival.num_wanted -= progress.inserted - arrival.first_wanted
    arrival.first_wanted = progress.inserted
    arrival.offered = max(arrival.offered, progress.inserted)


def another_pulls(node: NodeState, progress: Progress, arrival: Arrival) -> bool:
    """At least half of the pages that it wants are on their way to another request, from the same prefill."""
    if not node.settings.prefix_cache:
        return False
    first = arrival.first_wanted
    for other in node.live(State.ARRIVING):
        if not isinstance(other.side, DecodeSide) or other.side.arrival is None or other is progress:
            continue
        theirs = other.side.arrival
        if not theirs.pulling or theirs.peer != arrival.peer:
            continue
        last = min(len(progress.hashes), len(other.hashes))
        if first < last and 2 * num_shared(progress, other, first, last) >= arrival.num_wanted:
            return True
    return False


def no_longer_held_back(node: NodeState) -> list[tuple[Progress, DecodeSide, Arrival]]:
    """Those for whom nobody pulls any more. They have taken over what has come, and are to ask for the rest."""
    free: list[tuple[Progress, DecodeSide, Arrival]] = []
    for request in list(node.held_back):
        progress = node.requests.get(request)
        side = progress.side if progress is not None else None
        if progress is None or progress.state is not State.ARRIVING or not isinstance(side, DecodeSide):
            del node.held_back[request]  # it has ended, or its transfer has
        elif side.arrival is not None and not comes_for_another(node, progress, side.arrival):
            free.append((progress, side, side.arrival))
    return free
