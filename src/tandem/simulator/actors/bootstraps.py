"""Questions to the bootstrap servers, and what ranks register there.

The registries are the product's. A rank registers when it starts, and again when its bootstrap server has restarted,
until it is heard; it leaves when it has drained. Questions of decode cross the network: they may be lost, late, or meet
a server that is down, not ready, or cut off.
"""

from dataclasses import dataclass
from random import Random
from typing import Protocol

import msgspec
from msgspec import Struct

from tandem.core.bootstrap_registry import Registration, Rejected
from tandem.core.commands import AnnounceDpRank, AskDpRank, LearnPeer
from tandem.core.events import DpRankAnswered, Event, PeerLearned, PeerUnknown
from tandem.core.settings import PrefillInfo
from tandem.core.values import MILLISECOND, SECOND, Incarnation
from tandem.simulator.actors.replica import Life, Replica
from tandem.simulator.actors.servers import Server, server_of
from tandem.simulator.clock import Clock
from tandem.simulator.network.links import Network
from tandem.simulator.oracle import Violation

NO_ANSWER_NS = 5 * SECOND  # how long who asks waits at most
AGAIN_NS = SECOND  # between two attempts to register


class RankDocument(Struct, frozen=True):
    """What a rank registers, and decode is told."""

    incarnation: Incarnation
    dp_rank: int
    layout: str
    prefill: PrefillInfo


class Surroundings(Protocol):
    """What this sees of a `World`."""

    clock: Clock
    network: Network
    servers: dict[str, Server]

    def push(self, life: Life, event: Event) -> None: ...

    def count(self, fault: str) -> None: ...


@dataclass(slots=True)
class Bootstraps:
    world: Surroundings
    random: Random
    look_up_ns: tuple[int, int]  # from question to answer, half-open range
    register_ns: tuple[int, int]

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
        if server.registry is None:
            self.world.clock.after(AGAIN_NS, self._register_again, life)
            return
        outcome = server.registry.register(registration(life), is_own=True)
        if isinstance(outcome, Rejected) and life.is_alive:
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
        """Answered by an event, or never."""
        settings, clock = self.world.network.settings, self.world.clock
        if settings.loss and self.random.random() < settings.loss:
            self.world.count("F1")
            return
        duration_ns = self.random.randrange(*self.look_up_ns)
        if settings.clog and self.random.random() < settings.clog:
            self.world.count("F2")
            duration_ns += self.random.randrange(settings.clog_ns)
        clock.after(duration_ns // 2, self._arrive, life, question, duration_ns - duration_ns // 2)

    def _arrive(self, life: Life, question: LearnPeer | AskDpRank, way_back_ns: int) -> None:
        host = question.address.host
        server = self.world.servers.get(host)
        if server is None or server.registry is None:
            is_silent = server is not None and server.is_unreachable
            answer = silence(question, "nobody answers")
        elif self.world.network.is_cut(server_of(life.replica.name), host):
            is_silent, answer = True, silence(question, "no answer in time")
        else:
            is_silent, answer = False, self._answer(server, question)
        if is_silent:
            way_back_ns = self.random.randrange(NO_ANSWER_NS)
        self.world.clock.after(way_back_ns, self._deliver, life, answer)

    def _answer(self, server: Server, question: LearnPeer | AskDpRank) -> Event:
        assert server.registry is not None
        now = server.clock.read(self.world.clock.time)
        match question:
            case LearnPeer(address, dp_rank):
                found = server.registry.find(dp_rank)
                if found is None:
                    reason = f"there is no rank {dp_rank}" if server.registry.is_ready else "not all ranks are there"
                    return PeerUnknown(address, reason, dp_rank)
                document = msgspec.msgpack.decode(found.document, type=RankDocument)
                return PeerLearned(
                    address,
                    document.incarnation,
                    document.layout,
                    dp_rank=document.dp_rank,
                    prefill=document.prefill,
                )
            case AskDpRank(address, room):
                return DpRankAnswered(address, room, server.registry.ranks_of([room], now).get(room))

    def _deliver(self, life: Life, answer: Event) -> None:
        if life.is_alive:
            self.world.push(life, answer)

    # -- prefill's own word

    def announce(self, life: Life, command: AnnounceDpRank) -> None:
        """Lost when the bootstrap server is down; said again until READY comes."""
        self.world.clock.after(self.random.randrange(MILLISECOND), self._announced, life, command)

    def _announced(self, life: Life, command: AnnounceDpRank) -> None:
        server = self.world.servers[server_of(life.replica.name)]
        if server.registry is not None:
            server.registry.announce(command.room, command.dp_rank, server.clock.read(self.world.clock.time))


def registration(life: Life) -> Registration:
    settings = life.settings
    document = RankDocument(life.incarnation, settings.dp_rank, settings.layout, settings.prefill_info)
    return Registration(
        life.incarnation,
        settings.dp_rank,
        settings.prefill_info,
        {"layout": settings.layout},
        msgspec.msgpack.encode(document),
    )


def silence(question: LearnPeer | AskDpRank, detail: str) -> Event:
    if isinstance(question, LearnPeer):
        return PeerUnknown(question.address, detail, question.dp_rank)
    return DpRankAnswered(question.address, question.room, None)
