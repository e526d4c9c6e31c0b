"""What comes to a node from its own edge and from its connections, and has to be done in that very step."""

from collections.abc import Collection, Iterator, Sequence

from tandem.core.commands import Command, FailRequest, Tell
from tandem.core.disagg.messages import Abort, Ready, Release
from tandem.core.disagg.promises import promised
from tandem.core.events import Event, FlushRequested, HooksChanged, PeerLost, PeerReturned, PeerSaid, TransferFailed
from tandem.core.kv.storage_tier import Act, StorageTier
from tandem.core.kv.tree import NOWHERE, PrefixTree
from tandem.core.values import Cause, Incarnation, Room
from tandem.simulator.actors.replica import Life
from tandem.simulator.checkers.base import where
from tandem.simulator.oracle import Violation


class Orders:
    """After a flush no page is cached that nobody holds; after a change of the hooks they are as they were ordered."""

    id = "S35"

    def after_step(self, life: Life, events: Sequence[Event]) -> None:
        state = life.node.state
        if any(isinstance(event, FlushRequested) for event in events) and len(set(map(type, events))) == 1:
            left = state.tree.num_evictable  # other events may end a request, whose pages are cached from then on
            if not state.host.copies:
                held = num_pinned_copies(state.tree) + num_awaited(state.storage)
                left += state.host.pool.num_pages - state.host.pool.num_free - held
            if left:
                raise Violation(self.id, f"{where(life)} is flushed and keeps {left} cached pages that nobody holds")
        ordered = [event.force_retry_prob for event in events if isinstance(event, HooksChanged)]
        if ordered and state.settings.force_retry_prob != ordered[-1]:
            raise Violation(
                self.id, f"{where(life)} forces {state.settings.force_retry_prob:g} of all retries, not {ordered[-1]:g}"
            )


def num_pinned_copies(tree: PrefixTree) -> int:
    """Of pages that somebody holds on the device, and of those above them."""
    return sum(node.host != NOWHERE and node.pins > 0 for node in tree.nodes.values())


def num_awaited(storage: StorageTier) -> int:
    """Pages of host memory that are being read from storage, and belong to nobody else yet."""
    return sum(len(one.host_pages) for one in storage.operations.values() if one.act is Act.FETCH)


class Returns:
    """What was said before may be lost, so READY is said again; nothing that the peer has or is to give is lost."""

    id = "S36"

    def after_step(self, life: Life, events: Sequence[Event], commands: Sequence[Command]) -> None:
        back = [event.peer for event in events if isinstance(event, PeerReturned)]
        if not back:
            return
        said = {
            command.message.room
            for command in commands
            if isinstance(command, Tell) and isinstance(command.message, Ready)
        }
        for progress, _, _ in promised(life.node.state):
            peer = progress.side.counterpart
            if peer in back and progress.request.room not in said:
                raise Violation(
                    self.id, f"{where(life, progress.id)}: the connection to {peer} is back, and READY is not said"
                )
        if any(isinstance(event, PeerLost | TransferFailed) for event in events):
            return
        asked = {event.message.room for event in events if isinstance(event, PeerSaid)}
        for peer in losses(commands, asked):
            raise Violation(self.id, f"{where(life)}: {peer} is given up in the step in which {back} are back")


def losses(commands: Sequence[Command], asked: Collection[Room]) -> Iterator[Incarnation | str]:
    """Whom a node says that it has lost; not who asks for a room of `asked` and hears how that ended long ago."""
    for command in commands:
        match command:
            case FailRequest(cause=Cause.PEER_LOST, peer=peer):
                yield peer
            case Tell(peer, Release(cause=Cause.PEER_LOST) | Abort(cause=Cause.PEER_LOST) as last) if (
                last.room not in asked
            ):
                yield peer
            case _:
                pass
