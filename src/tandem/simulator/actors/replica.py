"""One simulated replica: a place with a name, and the lives (incarnations) it has had.

A `Life` is what `tandem serve` is: the production node, a worker and a data plane, with queues between them. A crash
drops a life whole; nothing of it answers any more, and the next one starts empty with another id.
"""

from dataclasses import dataclass, field

from msgspec import structs

from tandem.core.disagg.message_checks import Bounds, admitted
from tandem.core.disagg.messages import Message
from tandem.core.events import Event, PeerSaid
from tandem.core.kv_parts import KvGrid
from tandem.core.scheduler.node import EngineNode
from tandem.core.settings import NodeSettings, Role
from tandem.core.values import Cut, Incarnation, RequestId
from tandem.server.node.candidates import Endpoint
from tandem.simulator.actors.clients import Half
from tandem.simulator.actors.executor import CostModel
from tandem.simulator.actors.host_tier import SimulatedTier
from tandem.simulator.actors.storage import SimulatedStorage
from tandem.simulator.actors.transfer import KvStore
from tandem.simulator.actors.vitals import Vitals
from tandem.simulator.actors.workers import Workers
from tandem.simulator.clock import LocalClock
from tandem.simulator.network.host import Host

TOKEN_IDS = 1 << 31  # the simulated model has no vocabulary


@dataclass(slots=True)
class Life:
    replica: "Replica"
    incarnation: Incarnation
    settings: NodeSettings
    node: EngineNode
    workers: Workers
    store: KvStore
    cost: CostModel
    host: Host
    grid: KvGrid  # of the model of all servers
    local_clock: LocalClock = field(default_factory=LocalClock)
    endpoint: Endpoint = ("", 0)  # where its peers may dial it
    inbox: list[Event] = field(default_factory=list)
    is_step_due: bool = False  # a step is on the clock
    wake_at: int | None = None
    num_steps: int = 0
    num_idle_steps: int = 0  # in a row, without an event and without a command
    halves: dict[RequestId, Half] = field(default_factory=dict)
    vitals: Vitals = field(default_factory=Vitals)
    twin: EngineNode | None = None  # restored from a snapshot of `node`; has to decide the same
    tier: SimulatedTier | None = None  # where it has host memory
    storage: SimulatedStorage | None = None  # and where that is not the last
    twin_steps: int = 0  # how long they still run side by side

    @property
    def is_alive(self) -> bool:
        return self.replica.life is self

    @property
    def is_copying(self) -> bool:
        """Between its tiers."""
        return any(one is not None and one.num_under_way > 0 for one in (self.tier, self.storage))

    @property
    def is_last(self) -> bool:
        """No other life has begun at its place, whether this one has ended or not."""
        return self.incarnation.id == str(self.replica.epoch)

    @property
    def bounds(self) -> Bounds:
        """Of what peers may say."""
        return Bounds(TOKEN_IDS, lambda extra: True, lambda extra: True, self.grid, self.settings.cut)

    def hear(self, peer: Incarnation, peer_cut: Cut, message: Message) -> PeerSaid | None:
        """What the node is told when this comes to it past all connections: through the same door as in a server."""
        told = admitted(message, structs.replace(self.bounds, peer_cut=peer_cut))
        return PeerSaid(peer, told) if told is not None else None

    def touches(self, request: RequestId) -> bool:
        """Whether a launched batch or the data plane still has something of this request, or its word is under way."""
        for flight in self.node.state.inflight:
            if request in flight.members or any(row.request == request for row in flight.rows):
                return True
        if any(getattr(event, "request", None) == request for event in self.inbox):
            return True
        return self.store.touches(request)


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
