"""One server: an address, the DP ranks behind it, and what its API process decides for them.

What is decided here is decided by objects of the product: which rank takes a request and how it ends
(`server/api/live_requests.py`), who is registered and which rank has a room (`core/bootstrap_registry.py`), what the
delayers of all ranks have said (`core/scheduler/delayer_sync.py`). A server with one rank has the name of its replica;
further ranks are called `prefill-0/0`, `prefill-0/1`, ...
"""

from dataclasses import dataclass, field

from msgspec import structs

from tandem.core.bootstrap_registry import BootstrapRegistry
from tandem.core.scheduler.delayer_sync import DelayerSync
from tandem.core.settings import DpConflictPolicy, NodeSettings, PrefillInfo, Role
from tandem.core.values import Nanos, RequestId
from tandem.server.api.live_requests import LiveRequests
from tandem.simulator.actors.clients import Half
from tandem.simulator.actors.replica import Replica
from tandem.simulator.actors.vitals import Hang
from tandem.simulator.clock import LocalClock


def server_of(replica: str) -> str:
    return replica.partition("/")[0]


def rank_number(replica: str) -> int:
    return int(replica.partition("/")[2] or 0)


def rank_names(server: str, dp_size: int) -> list[str]:
    return [server] if dp_size == 1 else [f"{server}/{rank}" for rank in range(dp_size)]


@dataclass(slots=True, eq=False)
class Server:
    name: str
    role: Role
    info: PrefillInfo  # its method is not `auto`; of other roles than prefill only that counts
    places: list[Replica] = field(default_factory=list)  # for the most ranks that it ever has
    ranks: list[Replica] = field(default_factory=list)  # those of its life, the first ones of them
    epoch: int = 0  # lives of the API process
    is_up: bool = False
    is_unreachable: bool = False  # down with its host: who calls is not even refused
    is_draining: bool = False
    is_leaving: bool = False  # for good, once it has drained
    is_gone: bool = False
    clock: LocalClock = field(default_factory=LocalClock)
    registry: BootstrapRegistry | None = None  # of a prefill, while its bootstrap server is up
    gathering: DelayerSync | None = None
    requests: LiveRequests | None = None  # while it is up
    halves: dict[RequestId, Half] = field(default_factory=dict)  # those whose clients have heard no end
    wakes_at: Nanos | None = None  # on its clock: when the machine is woken next

    def resize(self, dp_size: int) -> None:
        """Its next life has so many ranks. The others are not there until one that has them."""
        self.info = structs.replace(self.info, dp_size=dp_size)
        self.ranks = self.places[:dp_size]
        for number, rank in enumerate(self.ranks):
            rank.template = ranked(rank.template, self.role, number, self.info)

    def start(self, clock: LocalClock, template: NodeSettings) -> None:
        """A new API process, which knows nothing of the old one's. template: of each of its ranks."""
        self.epoch += 1
        self.is_up, self.is_unreachable, self.is_draining = True, False, False
        self.clock = clock
        self.wakes_at = None
        moves = self.info.conflict is DpConflictPolicy.RESOLVE
        self.requests = LiveRequests(
            self.info.dp_size, template.stall_timeout_ns, self.info.method, moves, template.force_query
        )
        delayer = template.delayer
        self.gathering = DelayerSync(delayer) if delayer is not None and delayer.num_ranks > 1 else None
        if self.role is Role.PREFILL:
            self.start_bootstrap()

    def start_bootstrap(self) -> None:
        self.registry = BootstrapRegistry()

    @property
    def lacks_bootstrap(self) -> bool:
        return self.role is Role.PREFILL and self.registry is None

    def stop(self, *, is_unreachable: bool) -> None:
        self.is_up, self.is_unreachable = False, is_unreachable
        self.registry = self.gathering = self.requests = None

    @property
    def is_healthy(self) -> bool:
        """What `/health` says."""
        is_known = self.registry.is_ready if self.registry is not None else self.role is not Role.PREFILL
        return is_known and not self.is_draining and self.requests is not None and self.requests.is_healthy

    @property
    def is_stalled(self) -> bool:
        """`/health` says why it is not well: a node, or a worker of it, stands still."""
        return self.requests is not None and not self.requests.is_healthy

    @property
    def serves(self) -> bool:
        """A rank of it works."""
        return self.requests is not None and self.requests.is_any_active

    def trusts(self, rank: Replica) -> bool:
        """It gives this rank requests, whatever the others do."""
        return self.requests is not None and self.requests.ranks[rank_number(rank.name)].is_active

    def local_time(self, time_ns: int) -> Nanos:
        return self.clock.read(time_ns)

    @property
    def frozen_until(self) -> int:
        """A pause stops all of its processes. Where one of them hangs, the API process goes on."""
        latest = 0
        for rank in self.ranks:
            if rank.paused_until > latest and not has_hanging_node(rank):
                latest = rank.paused_until
        return latest


def ranked(template: NodeSettings, role: Role, dp_rank: int, info: PrefillInfo) -> NodeSettings:
    """The settings of one rank. Only a prefill tells of its ranks; those of any server delay prompts together."""
    delayer = template.delayer
    if delayer is not None:
        delayer = structs.replace(delayer, num_ranks=info.dp_size)
    template = structs.replace(template, delayer=delayer)
    return structs.replace(template, dp_rank=dp_rank, prefill_info=info) if role is Role.PREFILL else template


def has_hanging_node(rank: Replica) -> bool:
    return rank.life is not None and rank.life.vitals.hang is Hang.NODE
