"""Clients that come through other gateways than ours: they pick a pair and a room themselves and send both halves.

Some are careless or hostile: they repeat a room, send one half late or never, name DP ranks that do not fit, forget to
take back what the other half has failed, or say things that nobody who keeps the protocol would say.
"""

from dataclasses import dataclass
from random import Random
from typing import Protocol

from tandem.core.commands import FailRequest, FinishRequest, Path
from tandem.core.events import Event
from tandem.core.settings import Role
from tandem.core.values import MILLISECOND, SECOND, Address, Cut, Incarnation, Room
from tandem.simulator.actors.clients import Half, RoutedRequest
from tandem.simulator.actors.edge import BOOTSTRAP_PORT, Edge
from tandem.simulator.actors.replica import Life, Replica
from tandem.simulator.actors.servers import Server
from tandem.simulator.clock import Clock
from tandem.simulator.faults.hostile import made_up_message, read_wrongly
from tandem.simulator.faults.options import Options
from tandem.simulator.oracle import Script
from tandem.simulator.workload import WorkloadRequest, plain_ask


class Surroundings(Protocol):
    """What these clients see of a `World`."""

    clock: Clock
    servers: dict[str, Server]
    replicas: dict[str, Replica]
    edge: Edge
    is_healed: bool

    def push(self, life: Life, event: Event) -> None: ...

    def count(self, fault: str) -> None: ...

    def cut_of(self, who: Incarnation) -> Cut | None: ...


@dataclass(slots=True)
class DirectClients:
    """All of them. They hear what becomes of a half at its server's edge, without delay."""

    world: Surroundings
    options: Options
    random: Random
    jitter: Random

    def ask(self, ask: WorkloadRequest, exchange: RoutedRequest) -> None:
        """Pick servers, draw a room, send the same request to both halves."""
        random = self.random
        if self.options.num_unified and random.random() < self.options.unified_share:
            self._send_later(exchange, random.choice(self.names(Role.UNIFIED)), None, None)
        else:
            prefill, decode = random.choice(self.pairs())
            exchange.room = self._draw_room(ask)
            self.send_pair(exchange, prefill, decode)
        if ask.leaves_after_ns is not None:
            self.world.clock.after(ask.leaves_after_ns, self.leave, exchange, "F13")
        if self.options.hostility and not self.world.is_healed and random.random() < self.options.hostility:
            self.world.count("F17")
            self.world.clock.after(int(SECOND * 10 ** random.uniform(-3.0, 0.0)), self._lie, exchange)

    def pairs(self) -> list[tuple[str, str]]:
        return [(prefill, decode) for prefill in self.names(Role.PREFILL) for decode in self.names(Role.DECODE)]

    def names(self, role: Role) -> list[str]:
        return [name for name, server in self.world.servers.items() if server.role is role and not server.is_gone]

    def send_pair(self, exchange: RoutedRequest, prefill: str, decode: str) -> None:
        missing = None
        if exchange.ask.loses_half and not self.world.is_healed:
            self.world.count("F17" if "F17" in self.options.classes else "F6")
            missing = self.random.choice((prefill, decode))
        if prefill != missing:
            self._send_later(exchange, prefill, exchange.room, None)
        if decode != missing:
            self._send_later(exchange, decode, exchange.room, Address(prefill, BOOTSTRAP_PORT))

    def _draw_room(self, ask: WorkloadRequest) -> Room:
        """A new room; a hostile client repeats one, mostly with another prompt of the same length."""
        paired = [(exchange, exchange.room) for exchange in self.world.edge.exchanges if exchange.room is not None]
        if not ask.repeats_room or not paired:
            return Room(self.random.randrange(1, 1 << 63))
        self.world.count("F17")
        victim, room = self.random.choice(paired[-3:])
        prompt, theirs = ask.script.prompt, victim.ask.script
        if self.random.random() < 0.8:
            prompt = (prompt * len(theirs.prompt))[: len(theirs.prompt)]
        ask.script = Script(prompt, ask.script.max_new_tokens, theirs.eos_one_in)  # if the prompts are equal by chance
        return room

    def _send_later(self, exchange: RoutedRequest, name: str, room: Room | None, peer: Address | None) -> None:
        random = self.random
        delay_ns = int(random.expovariate(1.0) * 2 * MILLISECOND)
        if "F2" in self.options.classes and not self.world.is_healed and random.random() < 0.1:
            self.world.count("F2")
            delay_ns += random.randrange(5 * SECOND)
        self.world.edge.num_to_come += 1
        self.world.clock.after(delay_ns, self._send, exchange, name, room, peer)

    def _send(self, exchange: RoutedRequest, name: str, room: Room | None, peer: Address | None) -> None:
        """One half reaches its server: refused where nothing listens, and by the server itself."""
        edge, server, ask = self.world.edge, self.world.servers[name], exchange.ask
        edge.num_to_come -= 1
        if exchange.has_left:
            return
        half = None
        if server.is_up:
            half = edge.submit(exchange, server, room, peer, listener=self, routed=ask.routed_rank)
        if not isinstance(half, Half) and self.random.random() < 0.7:  # mostly the gateway takes the other half back
            self.world.clock.after(self.random.randrange(SECOND), self.leave, exchange, "")

    # -- what becomes of them

    def leave(self, exchange: RoutedRequest, fault: str) -> None:
        exchange.has_left = True
        for half in exchange.halves:
            if half.is_open and half.abort_sent_at is None:
                if fault:
                    self.world.count(fault)
                self.world.clock.after(self.jitter.randrange(5 * MILLISECOND), self.world.edge.abort, half)

    def token_left(self, half: Half, token: int) -> None:
        """Nobody reads along."""

    def half_ended(self, half: Half) -> None:
        """The gateway has its answer; now and then it forgets to let go of the prefill."""
        if half.role is Role.DECODE:
            has_failed = isinstance(half.answer, FailRequest)
            is_remote = isinstance(half.answer, FinishRequest) and half.answer.path is Path.REMOTE
            if has_failed or (self.random.random() < 0.7 and not (half.must_finish and is_remote)):
                delay_ns = self.random.randrange(20 * MILLISECOND if has_failed else 5 * SECOND)
                self.world.clock.after(delay_ns, self.leave, half.exchange, "")

    def was_cut(self, half: Half) -> None:
        """Where it takes nothing from one half, it has no use for the other."""
        self.leave(half.exchange, "")

    def server_died(self, half: Half) -> None:
        """The other half goes on, and has to find out."""

    def _lie(self, exchange: RoutedRequest) -> None:
        """Somebody who is in no table says something about this room to one of its replicas, and asks for its pages."""
        if not exchange.halves or exchange.room is None:
            return
        random = self.random
        life = self.world.replicas[random.choice(exchange.halves).replica].life
        if life is not None:
            liar, message = made_up_message(random, exchange.room, life, self.world.cut_of)
            told = life.hear(liar, self.world.cut_of(liar) or life.settings.cut, message)
            if told is not None:
                self.world.push(life, told)
            read_wrongly(life, exchange.room)

    def disconnect(self, share: float) -> None:
        """Many clients leave in the same instant."""
        for exchange in self.world.edge.exchanges:
            mine = [half for half in exchange.halves if half.is_open and half.listener is self]
            if mine and self.jitter.random() < share:
                self.leave(exchange, "F18")

    # -- after healing

    def probe_all(self) -> None:
        """One plain request for every pair of servers, and for every rank of either, which has to get its tokens."""
        for index, (prefill, decode) in enumerate(self.pairs()):
            num_ranks = max(len(self.world.servers[name].ranks) for name in (prefill, decode))
            for rank in range(num_ranks):
                self.world.edge.num_to_come += 1
                self.world.clock.after((index + rank / num_ranks) * SECOND, self._probe, prefill, decode, rank)

    def _probe(self, prefill: str, decode: str, number: int) -> None:
        """Its room leads to the rank where rooms do, so that no rank may refuse it."""
        edge = self.world.edge
        edge.num_to_come -= 1
        prompt_len_max = min(20, self.options.workload.prompt_len_max)
        ask = plain_ask(self.random, len(edge.exchanges), self.world.clock.time, prompt_len_max)
        ask.shown = self.options.time_of_a_probe(ask.index)
        exchange = RoutedRequest(ask, Room(self.random.randrange(1, 1 << 40) * 12 + number + 12))
        edge.exchanges.append(exchange)
        self.send_pair(exchange, prefill, decode)
