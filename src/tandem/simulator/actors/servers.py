"""One server: an address, the DP ranks behind it, and what its API process decides for them.

What is decided here is decided by objects of the core: which rank takes a request (`pd.dp_dispatch`), who is registered
and which rank has a room (`fleet.bootstrap_registry`), what the delayers of all ranks have said (`sched.gather`). A
server with one rank has the name of its replica; further ranks are called `prefill-0/0`, `prefill-0/1`, ...
"""

from dataclasses import dataclass, field

from tandem.core.bootstrap_registry import Registry
from tandem.core.dp_dispatch import Dispatched, Loads, Newcomer, RankLoad, dispatch
from tandem.core.scheduler.delayer_sync import DelayerSync
from tandem.core.settings import DpConflictPolicy, PrefillInfo, Role
from tandem.core.values import MILLISECOND, Room
from tandem.simulator.actors.replica import Life, Replica
from tandem.simulator.actors.vitals import Hang
from tandem.simulator.clock import LocalClock

LOADS_EVERY_NS = 100 * MILLISECOND  # how old the loads may be by which requests are spread
NO_LOADS = Loads(())
HTTP_BAD_REQUEST = 400
HTTP_CONFLICT = 409
HTTP_UNAVAILABLE = 503


def server_of(replica: str) -> str:
    return replica.partition("/")[0]


def rank_names(server: str, dp_size: int) -> list[str]:
    return [server] if dp_size == 1 else [f"{server}/{rank}" for rank in range(dp_size)]


@dataclass(slots=True, eq=False)
class Server:
    name: str
    role: Role
    info: PrefillInfo  # its method is not `auto`; of other roles than prefill only that counts
    ranks: list[Replica] = field(default_factory=list)
    epoch: int = 0  # lives of the API process
    is_up: bool = False
    is_unreachable: bool = False  # down with its host: who calls is not even refused
    is_draining: bool = False
    is_leaving: bool = False  # for good, once it has drained
    is_gone: bool = False
    clock: LocalClock = field(default_factory=LocalClock)
    registry: Registry | None = None  # of a prefill, while its bootstrap server is up
    gathering: DelayerSync | None = None
    was_ready: bool = False  # no request is taken before
    loads: Loads = NO_LOADS
    loads_at: int | None = None

    def start(self, clock: LocalClock) -> None:
        """A new API process, which knows nothing of the old one's."""
        self.epoch += 1
        self.is_up, self.is_unreachable, self.is_draining, self.was_ready = True, False, False, False
        self.clock = clock
        self.loads, self.loads_at = NO_LOADS, None
        delayer = self.ranks[0].template.delayer
        self.gathering = DelayerSync(delayer) if delayer is not None and delayer.num_ranks > 1 else None
        if self.role is Role.PREFILL:
            self.start_bootstrap()

    def start_bootstrap(self) -> None:
        self.registry = Registry()

    @property
    def lacks_bootstrap(self) -> bool:
        return self.role is Role.PREFILL and self.registry is None

    def stop(self, *, is_unreachable: bool) -> None:
        self.is_up, self.is_unreachable = False, is_unreachable
        self.registry = self.gathering = None

    @property
    def is_healthy(self) -> bool:
        """What `/health` says."""
        is_known = self.registry.is_ready if self.registry is not None else self.role is not Role.PREFILL
        return is_known and not self.is_draining and all(map(is_well, self.ranks))

    @property
    def frozen_until(self) -> int:
        """A pause stops all of its processes. Where one of them hangs, the API process goes on."""
        return max((rank.paused_until for rank in self.ranks if not has_hanging_node(rank)), default=0)

    def choose(self, prompt_len: int, room: Room | None, routed_rank: int | None, now: int) -> Life | int:
        """The rank for a request, or the status with which it is refused."""
        self.was_ready = self.was_ready or self.registry is None or self.registry.is_ready
        if not self.was_ready:
            return HTTP_UNAVAILABLE
        if self.loads_at is None or now >= self.loads_at + LOADS_EVERY_NS:
            self.loads, self.loads_at = Loads(tuple(map(load_of, self.ranks)), self.loads.next_rank), now
        newcomer = Newcomer(prompt_len, room, routed_rank)
        moves = self.info.conflict is DpConflictPolicy.RESOLVE
        chosen, self.loads = dispatch(newcomer, self.loads, self.info.method, moves=moves)
        if not isinstance(chosen, Dispatched):
            is_there = routed_rank is None or 0 <= routed_rank < len(self.ranks)
            return HTTP_UNAVAILABLE if is_there else HTTP_BAD_REQUEST
        life = self.ranks[chosen.rank].life
        return life if life is not None else HTTP_UNAVAILABLE


def is_well(rank: Replica) -> bool:
    """There, and not found to hang."""
    return rank.life is not None and not rank.life.vitals.liveness.longest.is_sick


def has_hanging_node(rank: Replica) -> bool:
    return rank.life is not None and rank.life.vitals.hang is Hang.NODE


def load_of(rank: Replica) -> RankLoad:
    if rank.life is None:
        return RankLoad(is_active=False)
    requests = rank.life.node.state.requests.values()
    return RankLoad(len(requests), sum(progress.request.prompt_len for progress in requests))
