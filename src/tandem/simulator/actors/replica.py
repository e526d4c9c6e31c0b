"""One simulated replica: a place with a name, and the lives (incarnations) it has had.

A `Life` is what `tandem serve` is: the production node, a worker and a data plane, with queues between them. A crash
drops a life whole; nothing of it answers any more, and the next one starts empty with another id.
"""

from collections import deque
from dataclasses import dataclass, field

from tandem.core.batch import BatchPlan
from tandem.core.disagg.message_checks import Bounds, admitted
from tandem.core.disagg.messages import Message
from tandem.core.events import Event, PeerSaid
from tandem.core.scheduler.node import EngineNode
from tandem.core.settings import NodeSettings, Role
from tandem.core.values import Incarnation, RequestId
from tandem.simulator.actors.clients import Half
from tandem.simulator.actors.executor import CostModel, Executor
from tandem.simulator.actors.transfer import KvStore
from tandem.simulator.actors.vitals import Vitals
from tandem.simulator.clock import LocalClock

TOKEN_IDS = 1 << 31  # the simulated model has no vocabulary


@dataclass(slots=True)
class Life:
    replica: "Replica"
    incarnation: Incarnation
    settings: NodeSettings
    node: EngineNode
    executor: Executor
    store: KvStore
    cost: CostModel
    local_clock: LocalClock = field(default_factory=LocalClock)
    inbox: list[Event] = field(default_factory=list)
    is_step_due: bool = False  # a step is on the clock
    wake_at: int | None = None
    num_steps: int = 0
    num_idle_steps: int = 0  # in a row, without an event and without a command
    work: deque[BatchPlan | tuple[RequestId, ...]] = field(default_factory=deque)  # batches, and requests to forget
    is_working: bool = False
    halves: dict[RequestId, Half] = field(default_factory=dict)
    num_refused: int = 0  # by its edge: they have had ids, too
    vitals: Vitals = field(default_factory=Vitals)
    twin: EngineNode | None = None  # restored from a snapshot of `node`; has to decide the same
    twin_steps: int = 0  # how long they still run side by side

    @property
    def is_alive(self) -> bool:
        return self.replica.life is self

    @property
    def is_last(self) -> bool:
        """No other life has begun at its place, whether this one has ended or not."""
        return self.incarnation.id == str(self.replica.epoch)

    def next_request_id(self) -> RequestId:
        return RequestId(len(self.halves) + self.num_refused + 1)

    def hear(self, peer: Incarnation, message: Message) -> PeerSaid | None:
        """What the node is told when `peer` says this: it comes through the same door as in a server."""
        bounds = Bounds(len(self.settings.shards), TOKEN_IDS, lambda extra: True)
        told = admitted(message, bounds)
        return PeerSaid(peer, told) if told is not None else None

    def touches(self, request: RequestId) -> bool:
        """Whether a launched batch or the data plane still has something of this request, or its word is under way."""
        for flight in self.node.state.inflight:
            if request in flight.members or any(row.request == request for row in flight.rows):
                return True
        if any(getattr(event, "request", None) == request for event in (*self.inbox, *self.store.held)):
            return True
        grants = [grant for grant in self.store.grants.values() if grant.request == request]
        pulls = [pull for (pulled, _), pull in self.store.pulls.items() if pulled == request]
        return any(any(grant.num_reading) for grant in grants) or any(
            stream.is_moving for pull in pulls for stream in pull.streams
        )


@dataclass(slots=True)
class Replica:
    name: str
    role: Role
    template: NodeSettings
    epoch: int = 0
    life: Life | None = None
    paused_until: int = 0
    pauses_ns: int = 0  # all pauses so far, for deadlines that a frozen node cannot keep
    slowdown: float = 1.0
