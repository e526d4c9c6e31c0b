"""What a node holds at one moment, in words: one line per request that it still knows, for a story to show.

= request 1 sending: 4 pages, a result slot, 4 pages offered to decode-0.1; waits for collection
= request 2 draining: 3 pages in quarantine; waits for drain of shard 0 1
= nothing, 4 pages cached
"""

from collections.abc import Iterator

from tandem.core.disagg.sides import Arrival, DecodeSide, PrefillSide
from tandem.core.kv.pool import PageState
from tandem.core.scheduler.request_state import SLOT_STATES, Progress, State
from tandem.core.scheduler.state import NodeState


def holdings(node: NodeState) -> Iterator[str]:
    """Nothing but cached pages is one line, so that a story can say that nothing is held."""
    for progress in node.requests.values():
        wait = f"; waits for {_wait(progress)}" if progress.waiting_for is not None else ""
        yield f"    = request {progress.id} {progress.state}: {', '.join(_held(node, progress)) or 'nothing'}{wait}"
    for room in node.stash:
        yield f"    = room {room}: a word of decode for a request that has not come"
    if not node.requests and not node.stash:
        cached = node.pool.counts[PageState.CACHED]
        yield "    = nothing" + (f", {_count(cached, 'page')} cached" if cached else "")


def _held(node: NodeState, progress: Progress) -> Iterator[str]:
    if progress.pages:
        where = " in quarantine" if progress.state is State.DRAINING else ""
        yield f"{_count(len(progress.pages), 'page')}{where}"
    if progress.state in SLOT_STATES:
        yield "a slot"
    if progress.id in node.results.owners:
        yield "a result slot"
    if progress.in_flight:
        yield _count(progress.in_flight, "batch", "batches") + " under way"
    peer = progress.side.counterpart
    if progress.state is State.DRAINING or peer is None:
        return
    match progress.side:
        case PrefillSide(reader=reader):
            offered = reader.offered - reader.held_pages if reader is not None else 0
            what = f"{_count(offered, 'page')} offered to" if offered else "READY of"
            yield f"{what} {peer.name}.{peer.id}"
        case DecodeSide(arrival=Arrival(pulling=True)) if progress.state is State.ARRIVING:
            yield f"a pull from {peer.name}.{peer.id}"
        case _:
            pass


def _wait(progress: Progress) -> str:
    shards = "".join(f" {shard}" for shard in progress.drains)
    return f"{progress.waiting_for}{' of shard' + shards if shards else ''}"


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
