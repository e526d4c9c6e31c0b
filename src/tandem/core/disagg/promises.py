"""Which requests of a node are the decode halves of pairs, and for which of them READY is said and KV is to come."""

from tandem.core.disagg.sides import Arrival, DecodeSide
from tandem.core.scheduler.request_state import WANTS_KV, Progress, State
from tandem.core.scheduler.state import NodeState

Promise = tuple[Progress, DecodeSide, Arrival]


def promise(progress: Progress | None) -> Promise | None:
    """A request for which READY is said, and whose KV has not come."""
    if progress is None or progress.state not in WANTS_KV or not isinstance(progress.side, DecodeSide):
        return None
    arrival = progress.side.arrival
    return (progress, progress.side, arrival) if arrival is not None else None


def promised(node: NodeState) -> list[Promise]:
    found = [promise(progress) for state in WANTS_KV for progress in node.live(state)]
    return [one for one in found if one is not None]


def arriving(progress: Progress | None) -> Promise | None:
    """A request that has pages, into which its KV is being pulled."""
    return promise(progress) if progress is not None and progress.state is State.ARRIVING else None


def decode_sides(node: NodeState, state: State) -> list[tuple[Progress, DecodeSide]]:
    """The requests in one state that have a decode side, in order of entry."""
    return [(progress, progress.side) for progress in node.live(state) if isinstance(progress.side, DecodeSide)]
