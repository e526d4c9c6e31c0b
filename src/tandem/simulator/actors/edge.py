"""The API processes of all servers, around the product's `LiveRequests`: ids, prompts, clients, and its timer.

What becomes of a half is decided there. An edge cannot lose what its own node says; what travels between an edge and
who asked is up to the asker: see `direct.py` and `gateway.py`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from tandem.core.commands import AnnounceDpRank, FailRequest, FinishRequest
from tandem.core.events import AbortRequested, DrainRequested, Event, PromptRendered, RequestArrived, RequestRefused
from tandem.core.request import Request
from tandem.core.settings import Role
from tandem.core.values import MILLISECOND, SECOND, Address, Cause, Nanos, RequestId, Room
from tandem.pagehash import hash_of, prompt_digest, prompt_links, root_hash
from tandem.server.api.errors import Failure
from tandem.server.api.live_requests import (
    Action,
    ClientId,
    CloseConnection,
    Declined,
    EndRequest,
    IncomingRequest,
    LiveRequests,
    TellNode,
)
from tandem.simulator.actors.clients import Half, Listener, RoutedRequest
from tandem.simulator.actors.replica import Life, Replica
from tandem.simulator.actors.servers import Server, rank_number, server_of
from tandem.simulator.clock import Clock
from tandem.simulator.oracle import Script
from tandem.simulator.renderings import WallClocks
from tandem.simulator.workload import WorkloadRequest

BOOTSTRAP_PORT = 8998
RENDERING_NS = 2 * MILLISECOND
SECRET = b"simulation"
CHANNEL_FULL = Failure(Cause.QUEUE_FULL, "the channel to the node is full")


class Announcements(Protocol):
    def announced(self, server: Server, command: AnnounceDpRank) -> None:
        """In its own bootstrap server, at once."""
        ...


class Surroundings(Protocol):
    """What an edge sees of a `World`."""

    clock: Clock
    servers: dict[str, Server]
    replicas: dict[str, Replica]
    is_healed: bool

    @property
    def bootstraps(self) -> Announcements: ...

    def push(self, life: Life, event: Event) -> None: ...

    def watch_deadline(self, life: Life, half: Half) -> None: ...

    def edge_refuses(self, server: Server, rank: Replica, request: Request) -> None: ...

    def edge_ends(self, server: Server, half: Half | None, terminal: FinishRequest | FailRequest) -> None: ...

    def io_fails(self) -> bool: ...

    def count(self, fault: str) -> None: ...


@dataclass(slots=True)
class Edge:
    world: Surroundings
    jitter: Random  # delays between edge and node
    clocks: WallClocks
    rendering: Random
    rendering_range: tuple[float, float]  # how long a prompt takes that is rendered anew: powers of ten, of 2 ms
    readers: Random  # which clients take nothing for a while
    slow_readers: float = 0.0  # share of the clients
    exchanges: list[RoutedRequest] = field(default_factory=list)
    num_open: int = 0  # halves without an end
    num_to_come: int = 0  # asks and submissions that are still on the clock
    last_end_at: int = 0
    refuses: bool = False  # whom it knows to drain, or to be there already; otherwise that comes before the node
    codes: Counter[str] = field(default_factory=Counter)  # of `docs/errors.md`, with which edges have ended requests

    # -- in

    def submit(
        self,
        exchange: RoutedRequest,
        server: Server,
        room: Room | None,
        peer: Address | None,
        *,
        timeout_ns: int | None = None,
        listener: Listener | None = None,
        routed: int | None = None,
        is_given_up: bool = False,
        num_said: int = 0,
        may_move: bool = False,
    ) -> Half | Failure:
        """One half has reached its server. `is_given_up`: its sender has gone already. num_said: tokens of the answer
        that its client has from elsewhere: those behind them are wanted. may_move: see `IncomingRequest`."""
        timeout_ns = exchange.ask.timeout_ns if timeout_ns is None else timeout_ns
        requests, rendered_at = self._requests_of(server), self._time_for(exchange, server.name)
        script = exchange.ask.script_at(rendered_at, server.role)
        script.wants_vector = exchange.ask.wants_vector and server.role is Role.UNIFIED
        script = script.behind(num_said) if num_said else script
        page_size = server.ranks[0].template.page_size
        chain = chain_of(exchange.ask, script, page_size=page_size)
        request = request_for(
            exchange.ask, script, requests.next_id(), room, peer, timeout_ns, rendered_at=rendered_at, chain=chain
        )
        names = (exchange.ask.rid,) if self.refuses else ()
        arrival = IncomingRequest(request, names, routed, str(exchange.ask.index), may_move)
        placed = requests.submit([arrival], self._now(server))
        if isinstance(placed, Declined):
            return self._decline(server, placed.failure, placed.actions)
        self._end_what_was_tried(server, placed.actions)
        if self.world.io_fails():
            return self._decline(
                server, CHANNEL_FULL, requests.withdraw(placed.client, (), Cause.QUEUE_FULL, CHANNEL_FULL.message)
            )
        life = server.ranks[placed.ranks[0]].life
        assert life is not None, "a request is given to a rank that is not there"
        half = self._new_half(exchange, life, request, placed.client, script, listener)
        half.abort_sent_at, half.num_said = self.world.clock.time if is_given_up else None, num_said
        self._begin(server, life, half, request, chain)
        return half

    def _end_what_was_tried(self, server: Server, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, TellNode) and isinstance(action.event, AbortRequested):
                server.halves[action.event.request].abort_sent_at = self.world.clock.time
        self._do(server, actions)

    def _requests_of(self, server: Server) -> LiveRequests:
        assert server.requests is not None, "nobody listens"
        return server.requests

    def _decline(self, server: Server, failure: Failure, actions: Sequence[Action]) -> Failure:
        self.codes[failure.code] += 1
        self._do(server, actions)
        return failure

    def _new_half(
        self,
        exchange: RoutedRequest,
        life: Life,
        request: Request,
        client: ClientId,
        script: Script,
        listener: Listener | None,
    ) -> Half:
        replica, now = life.replica, self.world.clock.time
        pauses_before_ns = replica.pauses_ns - max(0, replica.paused_until - now)
        half = Half(
            exchange,
            exchange.ask,
            replica.role,
            replica.name,
            request.id,
            client,
            request.room,
            now,
            now + request.timeout_ns,
            pauses_before_ns,
            request.rendered_at,
            script,
            listener,
        )
        half.must_finish = exchange.ask.must_finish
        return half

    def _begin(self, server: Server, life: Life, half: Half, request: Request, chain: list[bytes]) -> None:
        """Worker first, then the node."""
        server.halves[half.request] = life.halves[half.request] = half
        half.exchange.halves.append(half)
        self.num_open += 1
        life.workers.add(half.request, half.script, chain[-1])
        self.world.push(life, RequestArrived(request))
        self.world.watch_deadline(life, half)
        self._set_timer(server)

    def _time_for(self, exchange: RoutedRequest, server: str) -> int:
        """One time per request and server: the stamp of its router, or the server's own clock."""
        if exchange.ask.shown is None:
            return 0
        if exchange.rendered_at is not None:
            return exchange.rendered_at
        return self.clocks.seconds(server, self.world.clock.time)

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
        chain = chain_of(half.ask, half.script, page_size=life.settings.page_size)
        life.workers.add(half.request, half.script, chain[-1])
        timeout_ns = half.ask.timeout_ns
        request = request_for(
            half.ask, half.script, half.request, half.room, None, timeout_ns, rendered_at=rendered_at, chain=chain
        )
        self.world.push(life, PromptRendered(request))

    # -- clients

    def abort(self, half: Half) -> None:
        """Its client has gone, or has ended it by name."""
        server = self._server_of(half)
        if server is None:
            return
        half.abort_sent_at = self.world.clock.time if half.abort_sent_at is None else half.abort_sent_at
        self._do(server, self._requests_of(server).leave(half.client, self._now(server)))

    def _stop(self, half: Half) -> None:
        server = self._server_of(half)
        if server is not None:
            self._do(server, self._requests_of(server).stop(half.request, self._now(server)))

    def _block(self, server: Server, half: Half) -> None:
        """From here on its client takes nothing for a while: mostly it comes back, sometimes too late."""
        self.world.count("F2")
        self._requests_of(server).blocked(half.client, self._now(server))
        self._set_timer(server)
        self.world.clock.after(SECOND * 10 ** self.readers.uniform(-2.0, 2.0), self._read_again, half)

    def _read_again(self, half: Half) -> None:
        server = self._server_of(half)
        if server is not None:
            self._requests_of(server).reads(half.client)

    def _server_of(self, half: Half) -> Server | None:
        """While it has not ended there."""
        server = self.world.servers[server_of(half.replica)]
        return server if server.halves.get(half.request) is half else None

    # -- what its node says

    def see_tokens(self, life: Life, requests: Sequence[RequestId], tokens: bytes) -> None:
        server = self.world.servers[server_of(life.replica.name)]
        for position in self._requests_of(server).emitted(requests, self._now(server)):
            token = int.from_bytes(tokens[4 * position : 4 * position + 4], "little")
            self._see_token(server, life.halves[requests[position]], token)
        self._set_timer(server)

    def _see_token(self, server: Server, half: Half, token: int) -> None:
        is_first = half.last_token_at is None
        half.last_token_at = self.world.clock.time
        stops_after = half.ask.stops_after
        is_long = stops_after is not None and half.num_said + half.tokens >= stops_after
        is_stop = is_long and half.role is not Role.PREFILL
        if is_stop and not half.stop_sent:
            half.stop_sent = True
            self.world.clock.after(self.jitter.randrange(5 * MILLISECOND), self._stop, half)
        if half.listener is not None:
            half.listener.token_left(half, token)
        if is_first and self.slow_readers and not self.world.is_healed and self.readers.random() < self.slow_readers:
            self._block(server, half)

    def see_end(self, life: Life, terminal: FinishRequest | FailRequest) -> None:
        server = self.world.servers[server_of(life.replica.name)]
        self._do(server, self._requests_of(server).ended(terminal, self._now(server)))

    # -- its ranks

    def see_start(self, life: Life) -> None:
        """The node of a rank is ready."""
        name = life.replica.name
        self._requests_of(self.world.servers[server_of(name)]).ready(rank_number(name), life.settings.prefill_info)

    def see_death(self, life: Life) -> None:
        """Of one of its ranks, or of the server, and then nobody is there to tell clients anything."""
        server = self.world.servers[server_of(life.replica.name)]
        if server.is_up:
            lost = self._requests_of(server).lose("its process ended", rank_number(life.replica.name))
            self._do(server, lost)
            return
        for half in [half for half in server.halves.values() if half.replica == life.replica.name]:
            self._close(server, half)
            if half.listener is not None:
                half.listener.server_died(half)

    def drain(self, server: Server) -> None:
        """Its node refuses by itself; the edge does so before it, if it `refuses`."""
        server.is_draining = True
        if self.refuses:
            self._do(server, self._requests_of(server).drain())
            return
        for rank in server.ranks:
            if rank.life is not None:
                self.world.push(rank.life, DrainRequested())

    # -- what is decided

    def _do(self, server: Server, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case TellNode(dp_rank, event):
                    if isinstance(event, RequestRefused):
                        self.world.edge_refuses(server, server.ranks[dp_rank], event.request)
                    self._tell(server.ranks[dp_rank].life, event)
                case AnnounceDpRank():
                    self.world.bootstraps.announced(server, action)
                case EndRequest(terminal):
                    self._end(server, terminal)
                case CloseConnection(client):
                    self._cut(server, client)
        self._set_timer(server)

    def _tell(self, life: Life | None, event: Event) -> None:
        if life is None:
            return
        if isinstance(event, AbortRequested) and (half := life.halves.get(event.request)) is not None:
            half.abort_sent_at = self.world.clock.time if half.abort_sent_at is None else half.abort_sent_at
        self.world.push(life, event)

    def _end(self, server: Server, terminal: FinishRequest | FailRequest) -> None:
        half = server.halves.get(terminal.request)
        self.world.edge_ends(server, half, terminal)
        assert half is not None, "or it has had its end"
        if half.terminal is not terminal and isinstance(terminal, FailRequest):
            self.codes[terminal.cause] += 1  # the edge's own word
        self._close(server, half)
        half.answer = terminal
        if half.listener is not None:
            half.listener.half_ended(half)

    def _cut(self, server: Server, client: ClientId) -> None:
        for half in [half for half in server.halves.values() if half.client == client]:
            listener, half.listener = half.listener, None
            if listener is not None:
                listener.was_cut(half)

    def _close(self, server: Server, half: Half) -> None:
        del server.halves[half.request]
        half.ended_at = self.last_end_at = self.world.clock.time
        self.num_open -= 1

    # -- time

    def _now(self, server: Server) -> Nanos:
        return server.clock.read(self.world.clock.time)

    def _set_timer(self, server: Server) -> None:
        requests = self._requests_of(server)
        if requests.wake_at is not None and (server.wakes_at is None or requests.wake_at < server.wakes_at):
            server.wakes_at = requests.wake_at
            self.world.clock.at(server.clock.when(requests.wake_at), self._wake, server, requests, requests.wake_at)

    def _wake(self, server: Server, requests: LiveRequests, wakes_at: Nanos) -> None:
        """A server that is frozen looks when it goes on."""
        if server.requests is not requests or server.wakes_at != wakes_at:
            return
        if server.frozen_until > self.world.clock.time:
            self.world.clock.at(server.frozen_until, self._wake, server, requests, wakes_at)
            return
        server.wakes_at = None
        self._do(server, requests.wake(self._now(server)))

    def see_trouble(self, server: Server, dp_rank: int, trouble: str) -> None:
        """As its watchdog has it."""
        if server.requests is not None:
            self._do(server, server.requests.see_trouble(dp_rank, trouble, self._now(server)))

    def go_on(self, server: Server) -> None:
        """It was frozen, and is not any more, sooner than it seemed."""
        if server.requests is not None:
            server.wakes_at = None
            self._do(server, server.requests.wake(self._now(server)))

    def num_finished(self) -> int:
        """Halves that got their tokens."""
        halves = (half for exchange in self.exchanges for half in exchange.halves)
        return sum(isinstance(half.answer, FinishRequest) for half in halves)


def chain_of(ask: WorkloadRequest, script: Script, *, page_size: int) -> list[bytes]:
    """The root of its tenant and the link of each full page of its prompt: a worker goes on from the last."""
    root = root_hash(secret=SECRET, tenant=ask.tenant)
    return [root, *prompt_links(root, script.prompt, page_size=page_size)]


def request_for(
    ask: WorkloadRequest,
    script: Script,
    request: RequestId,
    room: Room | None,
    peer: Address | None,
    timeout_ns: int,
    *,
    rendered_at: int,
    chain: list[bytes],
) -> Request:
    """What a server's node is told of it."""
    return Request(
        id=request,
        rid=ask.rid,
        prompt_len=len(script.prompt),
        page_hashes=tuple(map(hash_of, chain[1:])),
        max_new_tokens=script.max_new_tokens,
        timeout_ns=Nanos(timeout_ns),
        room=room,
        peer=peer,
        dp_rank_hint=ask.prefill_rank if room is not None else None,
        priority=ask.priority,
        prompt_digest=prompt_digest(script.prompt, b"eos one in %d" % script.eos_one_in, secret=SECRET),
        prompt_logprobs_from=script.logprobs_from,
        rendered_at=rendered_at,
        wants_vector=script.wants_vector,
    )
