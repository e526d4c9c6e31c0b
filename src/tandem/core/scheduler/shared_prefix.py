"""Who would compute what another request is computing right now waits for that one's pages.

So the samples of one prompt come from one prefill, as do the branches of an agent that arrive together; without this
only who arrives after the pages are in the prefix tree finds them there.

The wait is in the queue, before slot and pages are taken: who waits is passed over. It ends in the step in which the
pages are there, or in which who computes them has gone, for whatever reason; then the next one computes them. What
arrives from a peer is not waited for here: whether that peer delivers is not this node's to say. Those who want it from
the same peer are told apart when they pull (`core/disagg/shared_pull.py`).
"""

from tandem.core.disagg.sides import DecodeSide
from tandem.core.scheduler.page_tables import reusable_tokens
from tandem.core.scheduler.priorities import precedence
from tandem.core.scheduler.request_state import Progress, State, num_shared
from tandem.core.scheduler.state import NodeState, pages_for


def computes_shareable(node: NodeState, progress: Progress) -> bool:
    """The next page that it gives to the prefix tree is one that the tree does not have."""
    if not node.settings.prefix_cache or progress.state is not State.COMPUTING:
        return False
    if progress.inserted >= num_full(node, progress):
        return False
    found = node.tree.nodes.get(progress.hashes[progress.inserted])
    return found is None or not found.is_landed


def num_full(node: NodeState, progress: Progress) -> int:
    """Pages that it gives to the prefix tree in all."""
    return min(len(progress.hashes), progress.length // node.settings.page_size)


def awaits_prefix(node: NodeState, progress: Progress, computing: list[Progress]) -> bool:
    """At least half of the pages that it lacks are being computed by one of these, which compute what can be shared."""
    if isinstance(progress.side, DecodeSide):
        return False
    most = min(len(progress.hashes), reusable_tokens(progress) // node.settings.page_size)
    for other in computing:
        if precedence(node, other) > precedence(node, progress):
            continue  # others may come before it without an end
        first, last = other.inserted, min(most, num_full(node, other))
        if first < last and progress.hashes[first] == other.hashes[first]:
            shared = num_shared(progress, other, first, last)
            if 2 * shared >= pages_for(node, progress.length) - first:
                return True
    return False
