"""Bootstrap servers, what ranks register there, and the clients of decode servers that ask them.

The registries are the product's, and so is what a client asks and when (`BootstrapQuestions`): one for each rank of a
server that asks, in its API process. A rank registers when it starts, and again when its bootstrap server has
restarted, until it is heard; it leaves when it has drained. Calls cross the network: they may be lost, late, or meet a
server that is down, not ready, or cut off.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

import msgspec

from tandem.core.bootstrap_registry import BootstrapRegistry
from tandem.core.commands import AnnounceDpRank, AskDpRank, LearnPeer
from tandem.core.events import Event, RoomElsewhere
from tandem.core.values import MILLISECOND, SECOND, Nanos
from tandem.server.api.bootstrap_questions import (
    Actions,
    BootstrapQuestions,
    Call,
    FetchRanks,
    FetchReplica,
    GiveUp,
    registration,
)
from tandem.server.api.question_lanes import MAX_UNKNOWN, Lanes
from tandem.server.wire import Connect, DataEndpoint, ReplicaInfo
from tandem.simulator.actors.edge import Edge
from tandem.simulator.actors.replica import Life, Replica
from tandem.simulator.actors.servers import Server, server_of
from tandem.simulator.clock import Clock
from tandem.simulator.network.links import Network
from tandem.simulator.oracle import Violation

AGAIN_NS = SECOND  # between two attempts to register

Arrival = Callable[[Nanos], Actions]  # what a call brings, told to the machine that made it


class Surroundings(Protocol):
    """What this sees of a `World`."""

    clock: Clock
    network: Network
    servers: dict[str, Server]
    replicas: dict[str, Replica]
    edge: Edge

    def push(self, life: Life, event: Event) -> None: ...

    def count(self, fault: str) -> None: ...


@dataclass(slots=True, eq=False)
class Client:
    """Of one rank, in one life of its API process."""

    rank: Replica
    server: Server
    epoch: int
    questions: BootstrapQuestions
    wakes_at: int | None = None

    @property
    def is_alive(self) -> bool:
        return self.server.is_up and self.server.epoch == self.epoch


@dataclass(slots=True)
class Bootstraps:
    world: Surroundings
    random: Random
    look_up_ns: tuple[int, int]  # from question to answer, half-open range
    register_ns: tuple[int, int]
    num_lanes: int = MAX_UNKNOWN
    clients: dict[str, Client] = field(default_factory=dict[str, Client])  # by the name of their rank

    # -- ranks

    def register(self, life: Life) -> None:
        """Said by a rank; may arrive when it lives no more, but not behind the next life at its place.

        Its word goes to the API process that started it, which ends or closes the way to it before it starts another.
        """
        server = self.world.servers[server_of(life.replica.name)]
        self.world.clock.after(self.random.randrange(*self.register_ns), self._registered, life, server, server.epoch)

    def _registered(self, life: Life, server: Server, epoch: int) -> None:
        if server.epoch != epoch or not life.is_last:
            return
        if life.is_alive:
            self.world.edge.see_start(life)
        if server.registry is None:
            self.world.clock.after(AGAIN_NS, self._register_again, life)
            return
        outcome = server.registry.register(registration(description(life)), is_own=True)
        if outcome is not None and life.is_alive:
            raise Violation("S23", f"{life.replica.name} cannot register: {outcome.param} {outcome.reason}")

    def _register_again(self, life: Life) -> None:
        if life.is_alive:
            self.register(life)

    def unregister(self, life: Life) -> None:
        registry = self.world.servers[server_of(life.replica.name)].registry
        if registry is not None:
            registry.unregister(life.incarnation)

    def register_all(self, ranks: list[Replica]) -> None:
        """Their bootstrap server is new."""
        for rank in ranks:
            if rank.life is not None:
                self.register(rank.life)

    # -- questions of decode

    def ask(self, life: Life, question: LearnPeer | AskDpRank) -> None:
        client = self._client_of(life)
        match question:
            case LearnPeer(address, dp_rank):
                now = client.server.local_time(self.world.clock.time)
                self._do(client, client.questions.learn(address, dp_rank, now))
            case AskDpRank(address, room):
                self._do(client, client.questions.ask_rank(address, room))

    def _client_of(self, life: Life) -> Client:
        rank, server = life.replica, self.world.servers[server_of(life.replica.name)]
        client = self.clients.get(rank.name)
        if client is None or client.epoch != server.epoch:
            lanes = Lanes(max_unknown=self.num_lanes)
            questions = BootstrapQuestions(lambda: own_description(rank), lanes=lanes)
            client = self.clients[rank.name] = Client(rank, server, server.epoch, questions)
        return client

    def _do(self, client: Client, actions: Actions) -> None:
        for action in actions:
            match action:
                case FetchReplica() | FetchRanks():
                    self._call(client, action)
                case GiveUp():
                    pass  # what it brings comes nevertheless, and is ignored
                case Connect(address, replica):
                    if (life := client.rank.life) is not None:
                        endpoint = (replica.control_host, replica.control_port)
                        life.host.connect(replica.incarnation, (address, replica.dp_rank), endpoint)
                case _:
                    self._tell(client, action)
        self._plan(client)

    def _tell(self, client: Client, event: Event) -> None:
        if client.rank.life is not None:
            self.world.push(client.rank.life, event)

    def _plan(self, client: Client) -> None:
        """Wake for the next timer. A wake that is too early does no harm."""
        deadline = client.questions.next_deadline()
        if deadline is None:
            return
        at = max(client.server.clock.when(deadline), self.world.clock.time)
        if client.wakes_at is None or at < client.wakes_at:
            client.wakes_at = at
            self.world.clock.at(at, self._wake, client, at)

    def _wake(self, client: Client, at: int) -> None:
        if client.wakes_at == at:
            client.wakes_at = None
            self._hear(client, client.questions.tick)

    def _hear(self, client: Client, arrival: Arrival) -> None:
        """What has come waits while the process is frozen."""
        clock = self.world.clock
        if not client.is_alive:
            return
        if client.server.frozen_until > clock.time:
            clock.at(client.server.frozen_until, self._hear, client, arrival)
            return
        self._do(client, arrival(client.server.local_time(clock.time)))

    # -- one call

    def _call(self, client: Client, call: Call) -> None:
        settings, clock = self.world.network.settings, self.world.clock
        if settings.loss and self.random.random() < settings.loss:
            self.world.count("F1")
            return
        duration_ns = self.random.randrange(*self.look_up_ns)
        if settings.clog and self.random.random() < settings.clog:
            self.world.count("F2")
            duration_ns += self.random.randrange(settings.clog_ns)
        clock.after(duration_ns // 2, self._arrive, client, call, duration_ns - duration_ns // 2)

    def _arrive(self, client: Client, call: Call, way_back_ns: int) -> None:
        """Nothing goes back where nobody says anything."""
        host = call.address.host
        server = self.world.servers.get(host)
        if self.world.network.is_cut(client.server.name, host) or (server is not None and server.is_unreachable):
            return
        if server is None or server.registry is None:
            refused = failed(client, call, "connection refused", is_silent=True)
            self.world.clock.after(way_back_ns, self._hear, client, refused)
            return
        answer = self._answer(client, server, server.registry, call)
        self.world.clock.after(way_back_ns, self._hear, client, answer)

    def _answer(self, client: Client, server: Server, registry: BootstrapRegistry, call: Call) -> Arrival:
        match call:
            case FetchReplica(number, _, dp_rank):
                found = registry.find(dp_rank)
                if found is None:
                    reason = f"there is no rank {dp_rank}" if registry.is_ready else "not all ranks are there"
                    return failed(client, call, reason, is_silent=False)
                replica = msgspec.json.decode(found.document, type=ReplicaInfo)
                return lambda now: client.questions.found(number, replica, now)
            case FetchRanks(number, _, rooms):
                ranks = registry.ranks_of(rooms, server.local_time(self.world.clock.time))
                prefill = registry.prefill
                return lambda now: client.questions.told(number, ranks, prefill, now)

    # -- prefill's own word

    def announce(self, life: Life, command: AnnounceDpRank) -> None:
        """Lost when the bootstrap server is down; said again until READY comes."""
        server = self.world.servers[server_of(life.replica.name)]
        self.world.clock.after(self.random.randrange(MILLISECOND), self.announced, server, command)

    def announced(self, server: Server, command: AnnounceDpRank) -> None:
        """By the server itself, for one of its ranks."""
        if server.registry is None:
            return
        server.registry.announce(command.room, command.dp_rank, server.clock.read(self.world.clock.time))
        sought = self.world.replicas.get(f"{server.name}/{command.sought}")
        if sought is not None and sought.life is not None:
            self.world.push(sought.life, RoomElsewhere(command.room, command.dp_rank))


def failed(client: Client, call: Call, reason: str, *, is_silent: bool) -> Arrival:
    return lambda now: client.questions.failed(call.number, reason, now, is_silent=is_silent)


def description(life: Life) -> ReplicaInfo:
    """What a rank registers, and decode is told."""
    settings, (host, port) = life.settings, life.endpoint
    return ReplicaInfo(
        life.incarnation,
        settings.role.value,
        settings.layout,
        {"layout": settings.layout},
        host,
        port,
        tuple(DataEndpoint(host, port) for _ in settings.shards),
        dp_rank=settings.dp_rank,
        prefill=settings.prefill_info,
    )


def own_description(rank: Replica) -> ReplicaInfo | None:
    return None if rank.life is None else description(rank.life)
