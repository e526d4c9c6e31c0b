"""The workers of this replica, as its node sees them: what is said to all of them, and what all of them have said.

They live and die together. A worker that is gone, or has parted from the others (`core/worker_group.py`), ends the
server.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from tandem.core.events import BatchReturned, Event, TransferFailed
from tandem.core.kv_parts import KvGrid
from tandem.core.settings import WindowSettings
from tandem.core.worker_group import WorkerGroup, WorkersParted
from tandem.ranks import Rank
from tandem.server import wire
from tandem.server.channel import PolledChannel
from tandem.server.node.local_peer import LocalPeer, LocalPeerLost, SelectorPoller

MOST_NAMED = 4  # workers in one line


@dataclass(frozen=True, slots=True)
class Engines:
    """What all engines together report when they have loaded the model."""

    num_pages: int  # the same on all
    page_bytes: int  # of one page on all of them
    grid: KvGrid
    layout: str
    layout_fields: dict[str, str]
    vocab_size: int
    shards: tuple[wire.DataEndpoint, ...]
    whole_prompts: bool = False
    host_pages: int = 0  # the same on all
    block_tokens: int = 1
    windows: WindowSettings | None = None  # the same on all


class Workers:
    """What each worker has to say for itself is reported, or answered, when the last of them has said it."""

    def __init__(
        self,
        ranks: Sequence[Rank],
        channels: Sequence[PolledChannel[wire.WorkerToNode]],
        poller: SelectorPoller,
        *,
        report: Callable[[Event], None],
        answer: Callable[[wire.Answer], None],
    ) -> None:
        """`ranks` and `channels` in order of shards."""
        self._report = report
        self._answer = answer
        self._ranks = ranks
        self._group = WorkerGroup(len(ranks))
        self._ready: dict[int, wire.EngineReady] = {}
        self._echoes = [0] * len(ranks)
        self._answers: dict[int, list[bytes]] = {}
        self._peers = [
            LocalPeer(rank.name, channel, poller, self._hearing(rank))
            for rank, channel in zip(ranks, channels, strict=True)
        ]

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    @property
    def engines(self) -> Engines | None:
        """None until all are ready."""
        if self.num_ready < len(self._peers):
            return None
        ready = [self._ready[shard] for shard in range(len(self._peers))]
        first = ready[0]
        return Engines(
            num_pages=first.num_pages,
            page_bytes=sum(one.page_bytes for one in ready),
            grid=first.grid,
            layout=first.layout,
            layout_fields=first.layout_fields,
            vocab_size=first.vocab_size,
            shards=tuple(one.data for one in ready),
            whole_prompts=first.whole_prompts,
            host_pages=first.host_pages,
            block_tokens=first.block_tokens,
            windows=first.windows,
        )

    @property
    def echoes(self) -> int:
        """How often the one that has answered least has answered."""
        return min(self._echoes)

    @property
    def slowest(self) -> Rank:
        """The one that has answered least; the first of several."""
        return self._ranks[self._echoes.index(self.echoes)]

    @property
    def behind(self) -> str:
        """Who has not returned the oldest batch, by name unless they are many."""
        names = [self._ranks[shard].name for shard in self._group.behind]
        return " or ".join(names) if len(names) <= MOST_NAMED else "worker"

    @property
    def pending_bytes(self) -> int:
        return max(peer.pending_bytes for peer in self._peers)

    def send(self, message: msgspec.Struct | msgspec.Raw) -> None:
        """To every worker, in the same order. Raises LocalPeerLost."""
        for peer in self._peers:
            peer.send(message)

    def flush(self) -> None:
        """Raises LocalPeerLost."""
        for peer in self._peers:
            peer.flush()

    def with_rank(self, event: Event) -> Event:
        """A failure says which worker it was: requests end with these words, and the core knows shards only."""
        if not isinstance(event, TransferFailed) or len(self._ranks) == 1:
            return event
        name = self._ranks[event.shard].name
        return msgspec.structs.replace(event, detail=f"{name}: {event.detail}" if event.detail else name)

    def _hearing(self, rank: Rank) -> Callable[[wire.WorkerToNode], None]:
        return lambda message: self._hear(rank, message)

    def _hear(self, rank: Rank, message: wire.WorkerToNode) -> None:
        match message:
            case wire.EngineReady():
                self._ready[rank.shard] = message
                self._check_layout(rank, message)
            case wire.Died():
                raise LocalPeerLost(message.who, message.reason)
            case wire.Answer(id, body):
                bodies = self._answers.setdefault(id, [])
                bodies.append(body)
                if len(bodies) == len(self._peers):
                    self._answer(wire.Answer(id, b"[" + b",".join(self._answers.pop(id)) + b"]"))
            case wire.Echo():
                self._echoes[rank.shard] += 1
            case BatchReturned(outcome):
                try:
                    whole = self._group.returned(rank.shard, outcome)
                except WorkersParted as error:
                    raise LocalPeerLost(rank.name, str(error)) from error
                if whole is not None:
                    self._report(BatchReturned(whole))
            case _:
                self._report(message)

    def _check_layout(self, rank: Rank, ready: wire.EngineReady) -> None:
        first = next(iter(self._ready.values()))
        sizes = [(one.layout, one.num_pages, one.host_pages, one.windows) for one in (ready, first)]
        if sizes[0] != sizes[1]:
            fields = first.layout_fields
            different = [name for name, value in ready.layout_fields.items() if fields.get(name) != value]
            why = f" ({', '.join(different)})" if different else ""
            raise LocalPeerLost(rank.name, f"{rank.name} has loaded another model than the other workers{why}")
