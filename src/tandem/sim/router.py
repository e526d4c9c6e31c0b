"""Clients and router: who asks what of which replica, what the router does with the answers, and what a liar says.

Every request goes out once; nothing is retried. The router sends the same request to both halves of a pair, takes the
other half back when one is refused or fails, and now and then forgets to.
"""

from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from tandem.core.commands import FailRequest, FinishRequest, Path
from tandem.core.events import AbortRequested, Event, PeerSaid, RequestArrived, StopMatched
from tandem.core.request import Request
from tandem.core.settings import Role
from tandem.core.values import MILLISECOND, SECOND, Address, Nanos, RequestId, Room
from tandem.pagehash import prompt_digest, prompt_hashes, root_hash
from tandem.sim.clients import Exchange, Half
from tandem.sim.clock import Clock
from tandem.sim.faults import Options
from tandem.sim.hostile import made_up_message
from tandem.sim.oracle import Script
from tandem.sim.replica import Life, Replica
from tandem.sim.workload import Ask, plain_ask

BOOTSTRAP_PORT = 8998
ROOT = root_hash(secret=b"simulation", tenant="")


class Cluster(Protocol):
    """What the router sees of a `World`."""

    clock: Clock
    replicas: dict[str, Replica]
    is_healed: bool

    def push(self, life: Life, event: Event) -> None: ...

    def count(self, fault: str) -> None: ...

    def watch_deadline(self, life: Life, half: Half) -> None: ...


@dataclass(slots=True)
class Router:
    world: Cluster
    options: Options
    random: Random
    jitter: Random  # shared with the world: delays between edge and node
    exchanges: list[Exchange] = field(default_factory=list)
    num_open: int = 0  # halves without an end
    num_to_come: int = 0  # asks and submissions that are still on the clock
    last_end_at: int = 0

    def expect(self, asks: list[Ask]) -> None:
        for ask in asks:
            self.num_to_come += 1
            self.world.clock.at(ask.arrives_at, self.route, ask)

    def route(self, ask: Ask) -> None:
        """Pick replicas, draw a room, send the same request to both halves."""
        self.num_to_come -= 1
        random = self.random
        exchange = Exchange(ask, None)
        self.exchanges.append(exchange)
        if self.options.num_unified and random.random() < 0.2:
            unified = random.choice(
                [name for name, replica in self.world.replicas.items() if replica.role is Role.UNIFIED]
            )
            self._submit_later(exchange, unified, None, None)
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
        return [name for name, replica in self.world.replicas.items() if replica.role is role]

    def send_pair(self, exchange: Exchange, prefill: str, decode: str) -> None:
        address = Address(prefill, BOOTSTRAP_PORT)
        self._submit_later(exchange, prefill, exchange.room, None)
        self._submit_later(exchange, decode, exchange.room, address)

    def _draw_room(self, ask: Ask) -> Room:
        """A new room; a hostile client repeats one, mostly with another prompt of the same length."""
        paired = [(exchange, exchange.room) for exchange in self.exchanges if exchange.room is not None]
        if not ask.repeats_room or not paired:
            return Room(self.random.randrange(1, 1 << 63))
        self.world.count("F17")
        victim, room = self.random.choice(paired[-3:])
        if self.random.random() < 0.8:
            length = len(victim.ask.script.prompt)
            ask.script = Script((ask.script.prompt * length)[:length], ask.script.max_new_tokens, ask.script.eos_one_in)
        return room

    def _submit_later(self, exchange: Exchange, name: str, room: Room | None, peer: Address | None) -> None:
        random = self.random
        delay_ns = int(random.expovariate(1.0) * 2 * MILLISECOND)
        if "F2" in self.options.classes and random.random() < 0.1:
            self.world.count("F2")
            delay_ns += random.randrange(5 * SECOND)
        self.num_to_come += 1
        self.world.clock.after(delay_ns, self.submit, exchange, name, room, peer)

    def submit(self, exchange: Exchange, name: str, room: Room | None, peer: Address | None) -> None:
        """One half reaches the edge of its replica, which makes the id, feeds the worker, then tells the node."""
        self.num_to_come -= 1
        replica, ask = self.world.replicas[name], exchange.ask
        life = replica.life
        if life is None:  # connection refused
            self._half_is_gone(exchange)
            return
        if exchange.has_left:
            return
        request = RequestId(len(life.halves) + 1)
        now = self.world.clock.time
        pauses_before_ns = replica.pauses_ns - max(0, replica.paused_until - now)
        half = Half(exchange, ask, replica.role, name, request, room, now, now + ask.timeout_ns, pauses_before_ns)
        half.must_finish = ask.must_finish
        life.halves[request] = half
        exchange.halves.append(half)
        self.num_open += 1
        life.executor.seat(request, ask.script, ROOT)
        hashes = tuple(prompt_hashes(ROOT, ask.script.prompt, page_size=life.settings.page_size))
        asked = Request(
            id=request,
            rid=f"rid-{ask.index}",
            prompt_len=len(ask.script.prompt),
            page_hashes=hashes,
            max_new_tokens=ask.script.max_new_tokens,
            timeout_ns=Nanos(ask.timeout_ns),
            room=room,
            peer=peer,
            priority=ask.priority,
            prompt_digest=prompt_digest(ask.script.prompt),
        )
        self.world.push(life, RequestArrived(asked))
        self.world.watch_deadline(life, half)

    def _half_is_gone(self, exchange: Exchange) -> None:
        """The router finds one replica dead; mostly it takes the other half back, sometimes it dies first."""
        if self.random.random() < 0.7:
            self.world.clock.after(self.random.randrange(SECOND), self.leave, exchange, "")

    def leave(self, exchange: Exchange, fault: str) -> None:
        exchange.has_left = True
        for half in exchange.halves:
            if half.is_open and half.abort_sent_at is None:
                if fault:
                    self.world.count(fault)
                self.world.clock.after(self.jitter.randrange(5 * MILLISECOND), self._abort, half)

    def _abort(self, half: Half) -> None:
        life = self.world.replicas[half.replica].life
        if half.is_open and life is not None and life.halves.get(half.request) is half:
            half.abort_sent_at = self.world.clock.time
            self.world.push(life, AbortRequested(half.request))

    def see_token(self, life: Life, half: Half) -> None:
        half.last_token_at = self.world.clock.time
        stops_after = half.ask.stops_after
        if (
            stops_after is not None
            and half.tokens >= stops_after
            and not half.stop_sent
            and half.role is not Role.PREFILL
        ):
            half.stop_sent = True
            self.world.clock.after(self.jitter.randrange(5 * MILLISECOND), self._stop, life, half)

    def _stop(self, life: Life, half: Half) -> None:
        if life.is_alive:
            self.world.push(life, StopMatched(half.request))

    def see_end(self, life: Life, half: Half) -> None:
        self.close(half)
        if half.role is Role.DECODE:  # the router has its answer; now and then it forgets to let go of the prefill
            has_failed = isinstance(half.terminal, FailRequest)
            is_remote = isinstance(half.terminal, FinishRequest) and half.terminal.path is Path.REMOTE
            if has_failed or (self.random.random() < 0.7 and not (half.must_finish and is_remote)):
                delay_ns = self.random.randrange(20 * MILLISECOND if has_failed else 5 * SECOND)
                self.world.clock.after(delay_ns, self.leave, half.exchange, "")

    def close(self, half: Half) -> None:
        half.ended_at = self.last_end_at = self.world.clock.time
        self.num_open -= 1

    def _lie(self, exchange: Exchange) -> None:
        """Somebody who is in no table says something about this room to one of its replicas."""
        if not exchange.halves or exchange.room is None:
            return
        random = self.random
        life = self.world.replicas[random.choice(exchange.halves).replica].life
        if life is not None:
            liar, message = made_up_message(random, exchange.room, life)
            self.world.push(life, PeerSaid(liar, message))

    def disconnect(self, share: float) -> None:
        """Many clients leave in the same instant."""
        for exchange in self.exchanges:
            if any(half.is_open for half in exchange.halves) and self.jitter.random() < share:
                self.leave(exchange, "F18")

    def probe_all(self) -> None:
        """After healing and draining: one plain request per pair, which has to get its tokens."""
        for index, (prefill, decode) in enumerate(self.pairs()):
            self.num_to_come += 1
            self.world.clock.after(index * SECOND, self._probe, prefill, decode)

    def _probe(self, prefill: str, decode: str) -> None:
        self.num_to_come -= 1
        prompt_len_max = min(20, self.options.workload.prompt_len_max)
        ask = plain_ask(self.random, len(self.exchanges), self.world.clock.time, prompt_len_max)
        exchange = Exchange(ask, Room(self.random.randrange(1, 1 << 63)))
        self.exchanges.append(exchange)
        self.send_pair(exchange, prefill, decode)

    def num_finished(self) -> int:
        """Halves that got their tokens."""
        halves = (half for exchange in self.exchanges for half in exchange.halves)
        return sum(isinstance(half.terminal, FinishRequest) for half in halves)
