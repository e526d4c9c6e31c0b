"""The API processes of all servers: they make ids, feed worker and node, and pass on what the node says.

An edge cannot lose what its own node says, and its clients' deaths do not harm it. What travels between an edge and
who asked is up to the asker: see `direct.py` and `gateway.py`.
"""

from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from tandem.core.commands import FinishRequest
from tandem.core.disagg.messages import SHUTTING_DOWN
from tandem.core.events import AbortRequested, Event, PromptRendered, RequestArrived, RequestRefused, StopMatched
from tandem.core.request import Request
from tandem.core.settings import Role
from tandem.core.values import MILLISECOND, Address, Cause, Nanos, Room
from tandem.pagehash import prompt_digest, prompt_hashes, root_hash
from tandem.simulator.actors.clients import Half, Listener, RoutedRequest
from tandem.simulator.actors.replica import Life, Replica
from tandem.simulator.actors.servers import HTTP_CONFLICT, HTTP_UNAVAILABLE, Server, server_of
from tandem.simulator.clock import Clock
from tandem.simulator.renderings import WallClocks
from tandem.simulator.workload import Ask

BOOTSTRAP_PORT = 8998
RENDERING_NS = 2 * MILLISECOND
SECRET = b"simulation"
DUPLICATE_RID = "duplicate_rid"


class Surroundings(Protocol):
    """What an edge sees of a `World`."""

    clock: Clock
    replicas: dict[str, Replica]

    def push(self, life: Life, event: Event) -> None: ...

    def watch_deadline(self, life: Life, half: Half) -> None: ...


@dataclass(slots=True)
class Edge:
    world: Surroundings
    jitter: Random  # delays between edge and node
    clocks: WallClocks
    rendering: Random
    rendering_range: tuple[float, float]  # how long a prompt takes that is rendered anew: powers of ten, of 2 ms
    exchanges: list[RoutedRequest] = field(default_factory=list)
    num_open: int = 0  # halves without an end
    num_to_come: int = 0  # asks and submissions that are still on the clock
    last_end_at: int = 0
    refuses: bool = False  # what it can refuse by itself; otherwise all of it comes before the node
    codes: Counter[str] = field(default_factory=Counter)  # of `docs/errors.md`, with which edges have ended requests

    def submit(
        self,
        exchange: RoutedRequest,
        life: Life,
        room: Room | None,
        peer: Address | None,
        *,
        timeout_ns: int | None = None,
        listener: Listener | None = None,
        is_given_up: bool = False,
    ) -> Half:
        """One half has reached its rank: worker first, then the node. `is_given_up`: its sender has gone already."""
        timeout_ns = exchange.ask.timeout_ns if timeout_ns is None else timeout_ns
        half = self._new_half(exchange, life, room, timeout_ns, listener)
        half.must_finish = exchange.ask.must_finish
        half.abort_sent_at = self.world.clock.time if is_given_up else None
        life.halves[half.request] = half
        exchange.halves.append(half)
        self.num_open += 1
        self.world.push(life, RequestArrived(self._seat(half, life, peer, timeout_ns)))
        self.world.watch_deadline(life, half)
        return half

    def _new_half(
        self, exchange: RoutedRequest, life: Life, room: Room | None, timeout_ns: int, listener: Listener | None
    ) -> Half:
        ask, replica, now = exchange.ask, life.replica, self.world.clock.time
        pauses_before_ns = replica.pauses_ns - max(0, replica.paused_until - now)
        rendered_at = self._time_for(exchange, server_of(replica.name))
        return Half(
            exchange,
            ask,
            replica.role,
            replica.name,
            life.next_request_id(),
            room,
            now,
            now + timeout_ns,
            pauses_before_ns,
            rendered_at,
            ask.script_at(rendered_at, replica.role),
            listener,
        )

    def refuse(
        self, exchange: RoutedRequest, life: Life, server: Server, room: Room | None, peer: Address | None
    ) -> int | None:
        """The status with which the edge of a server refuses a half by itself, or None.

        The node hears of it for the sake of the other half, which must not wait for one that never was.
        """
        refusal = self._refusal(exchange.ask, server) if self.refuses else None
        if refusal is None:
            return None
        code, cause, detail, status = refusal
        self.codes[code] += 1
        if room is not None:
            half = self._new_half(exchange, life, room, exchange.ask.timeout_ns, None)
            request = self._request(half, life, peer, exchange.ask.timeout_ns)
            self.world.push(life, RequestRefused(request, cause, detail))
        life.num_refused += 1
        return status

    def _refusal(self, ask: Ask, server: Server) -> tuple[str, Cause, str, int] | None:
        """(code, what the node hears, detail, status), as `server/api/client.py` has it."""
        if server.is_draining:
            return Cause.DRAINING, Cause.DRAINING, SHUTTING_DOWN, HTTP_UNAVAILABLE
        lives = [rank.life for rank in server.ranks if rank.life is not None]
        if any(half.is_open and half.ask.rid == ask.rid for life in lives for half in life.halves.values()):
            detail = f"rid {ask.rid!r} is in use by a request that is still running"
            return DUPLICATE_RID, Cause.PEER_ABORTED, detail, HTTP_CONFLICT
        return None

    def _time_for(self, exchange: RoutedRequest, server: str) -> int:
        """One time per request and server: the stamp of its router, or the server's own clock."""
        if exchange.ask.shown is None:
            return 0
        if exchange.rendered_at is not None:
            return exchange.rendered_at
        return self.clocks.seconds(server, self.world.clock.time)

    def _seat(self, half: Half, life: Life, peer: Address | None, timeout_ns: int) -> Request:
        """The worker gets the prompt; the request for the node."""
        root = root_hash(secret=SECRET, tenant=half.ask.tenant)
        life.executor.add(half.request, half.script, root)
        return self._request(half, life, peer, timeout_ns)

    def _request(self, half: Half, life: Life, peer: Address | None, timeout_ns: int) -> Request:
        ask, script = half.ask, half.script
        root = root_hash(secret=SECRET, tenant=ask.tenant)
        return Request(
            id=half.request,
            rid=ask.rid,
            prompt_len=len(script.prompt),
            page_hashes=tuple(prompt_hashes(root, script.prompt, page_size=life.settings.page_size)),
            max_new_tokens=script.max_new_tokens,
            timeout_ns=Nanos(timeout_ns),
            room=half.room,
            peer=peer,
            dp_rank_hint=ask.prefill_rank if half.room is not None else None,
            priority=ask.priority,
            prompt_digest=prompt_digest(script.prompt, b"eos one in %d" % script.eos_one_in, secret=SECRET),
            rendered_at=half.rendered_at,
        )

    def render_again(self, half: Half, rendered_at: int) -> None:
        delay_ns = int(RENDERING_NS * 10 ** self.rendering.uniform(*self.rendering_range))
        self.world.clock.after(delay_ns, self._render_again, half, rendered_at)

    def _render_again(self, half: Half, rendered_at: int) -> None:
        life = self.world.replicas[half.replica].life
        if life is None or life.halves.get(half.request) is not half:
            return
        if not half.is_open and self.rendering.random() < 0.5:
            return  # otherwise the news of its end are still on their way from the node
        half.rendered_at, half.script = rendered_at, half.ask.script_at(rendered_at, half.role)
        self.world.push(life, PromptRendered(self._seat(half, life, None, half.ask.timeout_ns)))

    def abort(self, half: Half) -> None:
        """Its client has gone, or has ended it by name."""
        life = self._life_of(half)
        if life is not None:
            half.abort_sent_at = self.world.clock.time if half.abort_sent_at is None else half.abort_sent_at
            self.world.push(life, AbortRequested(half.request))

    def _life_of(self, half: Half) -> Life | None:
        """While it is there and has not ended."""
        life = self.world.replicas[half.replica].life
        return life if half.is_open and life is not None and life.halves.get(half.request) is half else None

    def see_token(self, half: Half, token: int) -> None:
        half.last_token_at = self.world.clock.time
        stops_after = half.ask.stops_after
        is_stop = stops_after is not None and half.tokens >= stops_after and half.role is not Role.PREFILL
        if is_stop and not half.stop_sent:
            half.stop_sent = True
            self.world.clock.after(self.jitter.randrange(5 * MILLISECOND), self._stop, half)
        if half.listener is not None:
            half.listener.token_left(half, token)

    def _stop(self, half: Half) -> None:
        life = self.world.replicas[half.replica].life
        if life is not None and life.halves.get(half.request) is half:
            self.world.push(life, StopMatched(half.request))

    def see_end(self, half: Half) -> None:
        self._close(half)
        if half.listener is not None:
            half.listener.half_ended(half)

    def see_death(self, life: Life) -> None:
        for half in life.halves.values():
            if half.is_open:
                self._close(half)
                if half.listener is not None:
                    half.listener.replica_died(half)

    def _close(self, half: Half) -> None:
        half.ended_at = self.last_end_at = self.world.clock.time
        self.num_open -= 1

    def num_finished(self) -> int:
        """Halves that got their tokens."""
        halves = (half for exchange in self.exchanges for half in exchange.halves)
        return sum(isinstance(half.terminal, FinishRequest) for half in halves)
