"""What strikes a world at one moment, by order of the fault schedule or of a scenario; and how everything is healed.

A name is that of a server, of one of its ranks, or of a gateway. A server that loses its only rank is lost with it; one
that has more lives on with the others. A replica of several shards has one brain: with any of its workers the whole
replica is lost, a moment later. What only hangs is found by the watchdog of its server.
"""

from dataclasses import dataclass
from random import Random
from typing import Protocol

from tandem.core.events import Event, FlushRequested, HooksChanged
from tandem.core.scheduler.node import EngineNode
from tandem.core.values import SECOND, ShardId
from tandem.simulator.actors.bootstraps import Bootstraps
from tandem.simulator.actors.direct import DirectClients
from tandem.simulator.actors.edge import Edge
from tandem.simulator.actors.gateway import Gateway
from tandem.simulator.actors.replica import Life, Replica
from tandem.simulator.actors.servers import Server, server_of
from tandem.simulator.actors.vitals import Hang
from tandem.simulator.actors.watchdog import Watchdogs
from tandem.simulator.clock import Clock
from tandem.simulator.network.data_plane_faults import DataPlaneFaults
from tandem.simulator.network.http import Http
from tandem.simulator.network.links import Network

QUIET_NS = 5 * SECOND  # late copies of messages still come
HOST_SHARE = 0.3  # of dead servers: nothing answers in their place
LONGEST_RESTART_NS = 60 * SECOND
DRAIN_NS = 30 * SECOND  # for a replica that drains; then it is killed


class Victim(Protocol):
    """What may be done to a `World`."""

    network: Network
    http: Http
    page_faults: DataPlaneFaults
    replicas: dict[str, Replica]
    servers: dict[str, Server]
    gateways: dict[str, Gateway]
    edge: Edge
    direct: DirectClients
    bootstraps: Bootstraps
    watchdogs: Watchdogs
    num_planned: int
    is_healed: bool
    quiet_at: int

    def push(self, life: Life, event: Event) -> None: ...

    def start(self, replica: Replica) -> None: ...

    def start_server(self, server: Server) -> None: ...

    def start_gateway(self, gateway: Gateway) -> None: ...

    def step_if_due(self, life: Life) -> None: ...

    def worker_goes_on(self, life: Life) -> None: ...

    def copy_of(self, life: Life) -> EngineNode: ...

    def count(self, fault: str) -> None: ...


@dataclass(slots=True)
class FaultInjector:
    """The `Target` of the fault schedule."""

    world: Victim
    random: Random  # of what follows from a blow: who notices when
    hosts: Random  # whether a server dies with its host
    supervisor: Random  # when a server that ended by itself is started again
    clock: Clock
    sizes: Random | None = None  # how many DP ranks a server has when it comes back; None: as many as it had

    def _ranks_of(self, name: str) -> list[Replica]:
        world = self.world
        return [world.replicas[name]] if name in world.replicas else world.servers[name].ranks

    # -- deaths

    def crash(self, name: str, *, down_ns: int, dp_size: int | None = None) -> None:
        """A server with all of its ranks, or one of several ranks. dp_size: of the server that comes back."""
        server = self.world.servers[server_of(name)]
        if name != server.name:
            self._lose_rank(self.world.replicas[name], down_ns)
        elif server.is_up:
            self.world.count("F6")
            self._stop_server(server, down_ns, with_host=self._takes_host(), dp_size=dp_size)

    def lose_shard(self, name: str, *, down_ns: int) -> None:
        """One of several workers dies; without several, one of several ranks."""
        replica = self.world.replicas[name]
        life, num_shards = replica.life, len(replica.template.shards)
        if num_shards == 1:
            self._lose_rank(replica, down_ns)
        elif life is not None and not life.store.dead:
            self.world.count("F7")
            self.world.num_planned += 1
            life.store.dead.add(ShardId(self.random.randrange(num_shards)))
            self.clock.after(int(SECOND * 10 ** self.random.uniform(-3.0, 0.0)), self._miss_shard, life, down_ns)

    def _miss_shard(self, life: Life, down_ns: int) -> None:
        self.world.num_planned -= 1
        server = self.world.servers[server_of(life.replica.name)]
        if not life.is_alive:
            return
        down_ns = 0 if self.world.is_healed else down_ns
        if len(server.ranks) > 1:
            self._stop_rank(life, down_ns)
        else:
            self._stop_server(server, down_ns, with_host=self._takes_host())

    def _lose_rank(self, replica: Replica, down_ns: int) -> None:
        if replica.life is not None and len(self.world.servers[server_of(replica.name)].ranks) > 1:
            self.world.count("F7")
            self._stop_rank(replica.life, down_ns)

    def end_hanging(self, life: Life) -> None:
        """Its watchdog has fired: requests hear why, the server ends, and its supervisor starts it again."""
        server = self.world.servers[server_of(life.replica.name)]
        down_ns = int(LONGEST_RESTART_NS * 10 ** self.supervisor.uniform(-3.0, 0.0))
        if self.world.is_healed:  # it was too late to go on: others have to find that out, too
            down_ns = 0
            self._let_gateways_find_out()
        if len(server.ranks) > 1:
            self._stop_rank(life, down_ns)
        else:
            self._end_life(life)
            self._stop_server(server, down_ns, with_host=False)

    def _takes_host(self) -> bool:
        return self.hosts.random() < HOST_SHARE

    def _stop_server(self, server: Server, down_ns: int, *, with_host: bool, dp_size: int | None = None) -> None:
        """With its host, or its processes only: then who talks to it learns at once."""
        server.stop(is_unreachable=with_host)
        for rank in server.ranks:
            if rank.life is not None:
                self._end_life(rank.life)
        self.world.num_planned += 1
        self.clock.after(down_ns, self._restart_server, server, dp_size)

    def _stop_rank(self, life: Life, down_ns: int) -> None:
        self._end_life(life)
        self.world.num_planned += 1
        self.clock.after(down_ns, self._restart_rank, life.replica)

    def _end_life(self, life: Life) -> None:
        world = self.world
        if life.vitals.hang is Hang.NODE:
            self._thaw(life.replica)
        life.replica.life = None
        with_host = world.servers[server_of(life.replica.name)].is_unreachable
        world.network.die(life.host, with_host=with_host)
        world.edge.see_death(life)

    def _restart_server(self, server: Server, dp_size: int | None = None) -> None:
        self.world.num_planned -= 1
        if not server.is_up and not server.is_gone:
            dp_size = self._next_size(server) if dp_size is None else dp_size
            if dp_size != len(server.ranks):
                server.resize(dp_size)
            self.world.start_server(server)

    def _next_size(self, server: Server) -> int:
        """Whoever starts it again may have given it other flags."""
        if self.sizes is None or len(server.places) == 1:
            return len(server.ranks)
        self.world.count("F21")
        return self.sizes.randrange(1, len(server.places) + 1)

    def _restart_rank(self, replica: Replica) -> None:
        """Unless its server has come back meanwhile, with fewer ranks."""
        self.world.num_planned -= 1
        server = self.world.servers[server_of(replica.name)]
        if replica.life is None and server.is_up and replica in server.ranks:
            self.world.start(replica)

    def lose_bootstrap(self, name: str, *, down_ns: int) -> None:
        """Its process restarts, and knows neither ranks nor rooms."""
        server = self.world.servers[name]
        if server.registry is not None:
            self.world.count("F6")
            server.registry = None
            self.world.num_planned += 1
            self.clock.after(down_ns, self._restart_bootstrap, server, server.epoch)

    def _restart_bootstrap(self, server: Server, epoch: int) -> None:
        self.world.num_planned -= 1
        if server.is_up and server.epoch == epoch and server.registry is None:
            server.start_bootstrap()
            self.world.bootstraps.register_all(server.ranks)

    def lose_gateway(self, name: str, *, down_ns: int) -> None:
        gateway = self.world.gateways[name]
        if gateway.router is not None:
            self.world.count("F6")
            gateway.crash()
            self.world.num_planned += 1
            self.clock.after(down_ns, self._restart_gateway, gateway)

    def _restart_gateway(self, gateway: Gateway) -> None:
        self.world.num_planned -= 1
        if gateway.router is None:
            self.world.start_gateway(gateway)

    # -- scaling

    def drain(self, name: str, *, down_ns: int | None) -> None:
        """Scaled down and, later, up: the server takes no more, ends what it has, and goes. None: for good."""
        server = self.world.servers[server_of(name)]
        if not server.is_up or server.is_draining:
            return
        self.world.count("F21")
        self.world.num_planned += 1
        self.world.edge.drain(server)
        self.clock.after(SECOND, self._look_whether_drained, server, server.epoch, self.clock.time + DRAIN_NS, down_ns)

    def scale_down(self, name: str) -> None:
        """For good, if there is another one for its work."""
        server = self.world.servers[name]
        others = [other for other in self.world.servers.values() if other.role is server.role and other is not server]
        if server.is_up and not server.is_draining:
            server.is_leaving = not all(other.is_leaving for other in others)
            self.drain(name, down_ns=None if server.is_leaving else SECOND)

    def _look_whether_drained(self, server: Server, epoch: int, until: int, down_ns: int | None) -> None:
        lives = [rank.life for rank in server.ranks if rank.life is not None]
        is_same = server.is_up and server.epoch == epoch
        if is_same and any(life.node.state.requests for life in lives) and self.clock.time < until:
            self.clock.after(SECOND, self._look_whether_drained, server, epoch, until, down_ns)
            return
        if is_same:
            for life in lives:
                self.world.bootstraps.unregister(life)
            server.is_gone = server.is_leaving = down_ns is None and not self.world.is_healed
            down_ns = 0 if self.world.is_healed or down_ns is None else down_ns
            self._stop_server(server, down_ns, with_host=self._takes_host())
        self.clock.after(QUIET_NS, self._plan_is_over)  # not before its peers have heard of it

    def _plan_is_over(self) -> None:
        self.world.num_planned -= 1

    def scale_up(self, name: str, *, after_ns: int) -> None:
        """Before anything happens: this server comes only now."""
        server = self.world.servers[name]
        self.world.count("F21")
        server.stop(is_unreachable=True)
        for rank in server.ranks:
            if rank.life is not None:
                self.world.network.die(rank.life.host, with_host=True)
            rank.life = None
        self.world.num_planned += 1
        self.clock.after(after_ns, self._restart_server, server)

    # -- slowness

    def pause(self, name: str, *, duration_ns: int) -> None:
        for replica in self._ranks_of(name):
            if replica.paused_until <= self.clock.time:
                self.world.count("F8")
                replica.paused_until = self.clock.time + duration_ns
                replica.pauses_ns += duration_ns

    def hang(self, name: str, what: Hang, *, duration_ns: int) -> None:
        """For so long, or until it is ended for it. Nobody hangs in two ways, and nobody who is paused."""
        replica = self.world.replicas[name]
        life = replica.life
        if life is None or life.vitals.hang is not None or replica.paused_until > self.clock.time:
            return
        self.world.count("F9")
        life.vitals.hang = what
        life.vitals.num_hangs += 1
        life.store.is_frozen = what is Hang.WORKER
        if what is Hang.NODE:
            replica.paused_until = self.clock.time + duration_ns
            replica.pauses_ns += duration_ns
        self.world.watchdogs.watch(life)
        self.clock.after(duration_ns, self._go_on, life)

    def _go_on(self, life: Life) -> None:
        """If it has not been killed for it."""
        if life.is_alive and life.vitals.hang is not None:
            life.vitals.hang = None
            self.world.worker_goes_on(life)

    def _thaw(self, replica: Replica) -> None:
        replica.pauses_ns -= max(0, replica.paused_until - self.clock.time)
        replica.paused_until = 0
        if replica.life is not None:
            self.clock.after(0, replica.life.host.go_on)

    def slow_down(self, name: str, *, factor: float, duration_ns: int) -> None:
        self.world.count("F9")
        for replica in self._ranks_of(name):
            replica.slowdown = factor
            self.clock.after(duration_ns, self._speed_up, replica)

    def _speed_up(self, replica: Replica) -> None:
        replica.slowdown = 1.0

    def slow_shard(self, name: str, shard: int, *, factor: float, duration_ns: int) -> None:
        """Its batches hold up the others, which run in lock step; its transfers do not."""
        self.slow_down(name, factor=factor, duration_ns=duration_ns)
        replica = self.world.replicas[name]
        if replica.life is not None:
            replica.life.store.slowness[ShardId(shard)] = factor
            self.clock.after(duration_ns, self._speed_up_shard, replica.life, ShardId(shard))

    def _speed_up_shard(self, life: Life, shard: ShardId) -> None:
        life.store.slowness.pop(shard, None)

    # -- the way between

    def partition(self, source: str, target: str, *, duration_ns: int) -> None:
        """One direction, between all that live at the two places."""
        if source == target:
            return
        self.world.count("F5")
        for left, right in self._links(source, target):
            self.world.network.cut(left, right)
        self.clock.after(duration_ns, self.mend, source, target)

    def cut(self, source: str, target: str) -> None:
        for left, right in self._links(source, target):
            self.world.network.cut(left, right)

    def mend(self, source: str, target: str) -> None:
        for left, right in self._links(source, target):
            self.world.network.heal(left, right)

    def _links(self, source: str, target: str) -> list[tuple[str, str]]:
        return [(left, right) for left in self._ends(source) for right in self._ends(target)]

    def _ends(self, place: str) -> list[str]:
        server = self.world.servers.get(place)
        return list(dict.fromkeys([place, *(rank.name for rank in server.ranks)])) if server is not None else [place]

    def flicker(self, source: str, target: str, *, down_ns: int) -> None:
        """The connection between each two of their ranks breaks, and can be made again after `down_ns`."""
        for left, right in self._links(source, target):
            self.world.count("F23")
            self.world.network.break_off(left, right, down_ns=down_ns)

    def silence(self, source: str, target: str) -> None:
        """Nothing arrives any more on the connections that they have, in either direction, and nobody is told."""
        for left, right in self._links(source, target):
            self.world.count("F23")
            self.world.network.silence(left, right)

    # -- operators

    def flush(self, name: str) -> None:
        """Of every rank: cached pages that nobody holds."""
        self._tell_ranks(name, FlushRequested())

    def change_hooks(self, name: str, *, force_retry_prob: float) -> None:
        self._tell_ranks(name, HooksChanged(force_retry_prob))

    def _tell_ranks(self, name: str, event: Event) -> None:
        for replica in self._ranks_of(name):
            if replica.life is not None:
                self.world.count("F24")
                self.world.push(replica.life, event)

    # -- clients

    def disconnect(self, share: float) -> None:
        self.world.direct.disconnect(share)
        for gateway in self.world.gateways.values():
            gateway.disconnect(share)

    # -- what must change nothing

    def swap_for_snapshot(self, name: str) -> None:
        """From here on a restored copy decides beside the original; see `Checkers.compare_with_twin`."""
        life = self.world.replicas[name].life
        if life is not None and life.twin is None:
            self.world.count("F22")
            life.twin = self.world.copy_of(life)
            life.twin_steps = 100

    # -- the end of all harm

    def heal(self) -> None:
        world = self.world
        world.num_planned -= 1
        world.is_healed = world.page_faults.is_calm = world.http.is_calm = True
        self._let_gateways_find_out()
        world.network.heal_all()
        for replica in world.replicas.values():
            replica.slowdown = 1.0
            self._thaw(replica)
            if replica.life is not None:
                self._go_on(replica.life)
                replica.life.store.find_sockets()
        for server in world.servers.values():
            self._revive(server)
            world.edge.go_on(server)
        for gateway in world.gateways.values():
            if gateway.router is None:
                world.start_gateway(gateway)

    def _let_gateways_find_out(self) -> None:
        finding_out = [gateway.finds_out_ns() for gateway in self.world.gateways.values()]
        self.world.quiet_at = self.clock.time + max(finding_out, default=0)

    def _revive(self, server: Server) -> None:
        world = self.world
        if server.is_gone:
            return
        if not server.is_up:
            world.start_server(server)
            return
        if server.lacks_bootstrap:
            server.start_bootstrap()
            world.bootstraps.register_all(server.ranks)
        for rank in server.ranks:
            if rank.life is None:
                world.start(rank)
                continue
            rank.life.store.slowness.clear()
            if rank.life.is_step_due:
                self.clock.after(0, world.step_if_due, rank.life)
