"""One half of one attempt: its connection, from the gateway that dispatched it to the server and back.

A server's edge answers as the product's does: a stream gets its head with the first token, a document when it is whole;
a failure before the head is a status, after it the last word of the body. What the gateway hears is told to its core in
the words that the product's shell uses.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol  # Any: the world writes down what it is given

from tandem.core.commands import FailRequest
from tandem.core.router.messages import (
    DecodeSpoke,
    DispatchPair,
    Failure,
    HalfAnswered,
    HalfEnded,
    HalfFailed,
    HalfRejected,
    RouterEvent,
    Side,
)
from tandem.core.router.router import Router
from tandem.core.settings import Role
from tandem.core.values import SECOND, Address, Cause, Nanos, RequestId
from tandem.simulator.actors.clients import Half, RoutedRequest
from tandem.simulator.actors.edge import BOOTSTRAP_PORT, Edge
from tandem.simulator.actors.replica import Life
from tandem.simulator.actors.servers import HTTP_UNAVAILABLE, Server
from tandem.simulator.clock import Clock
from tandem.simulator.network.http import CONNECT_NS, Http, Way
from tandem.simulator.oracle import Violation

STALL_NS = 60 * SECOND  # between two pieces of a stream

STATUS = {  # as `server/api/errors.py` has it; a test compares them
    Cause.ABORTED: 499,
    Cause.DEADLINE_EXCEEDED: 504,
    Cause.PROMPT_TOO_LONG: 400,
    Cause.QUEUE_FULL: 503,
    Cause.DUPLICATE_ROOM: 409,
    Cause.DRAINING: 503,
    Cause.OUT_OF_PAGES: 413,
    Cause.ROUTE_CONFLICT: 400,
    Cause.BOOTSTRAP_TIMEOUT: 504,
    Cause.WAITING_TIMEOUT: 504,
    Cause.INVALID_LOGITS: 500,
    Cause.WORKER_LOST: 503,
    Cause.ENGINE_FAILED: 500,
}
OTHER_STATUS = 502
FINAL = frozenset({Cause.INVALID_LOGITS})  # 5xx that no other pair answers better: the same table, the same test


class Surroundings(Protocol):
    """What a gateway sees of a `World`."""

    clock: Clock
    servers: dict[str, Server]
    edge: Edge
    http: Http
    is_healed: bool

    def log_step(self, name: str, now: Nanos, events: Any, commands: Any, wake_at: int | None) -> None: ...

    def count(self, fault: str) -> None: ...


class Dispatcher(Protocol):
    """What a leg sees of the gateway that sent it."""

    name: str
    world: Surroundings
    epoch: int
    router: Router | None
    random: Random

    def draw_error(self) -> int | None: ...

    def tell(self, *events: RouterEvent) -> None: ...

    def end(self, caller: "Caller", outcome: str) -> None: ...


@dataclass(slots=True, eq=False)
class UpstreamCall:
    gateway: Dispatcher
    caller: "Caller"
    attempt: int
    side: Side
    server: Server
    epoch: int  # of the gateway
    up: Way = field(init=False)
    down: Way = field(init=False)

    # At the server.
    half: Half | None = None
    num_emitted: int = 0
    document: list[int] = field(default_factory=list)  # tokens of an answer that is not streamed
    is_head_sent: bool = False
    is_server_done: bool = False

    # At the gateway.
    status: int = 0
    tokens: list[int] = field(default_factory=list)  # that have come
    is_over: bool = False  # nothing that comes is heard any more
    last_piece_at: int = 0

    def __post_init__(self) -> None:
        gateway, server = self.gateway.name, self.server.name
        self.up = Way(gateway, server, lambda: None)
        self.down = Way(server, gateway, self._cannot_answer)

    # -- there

    def send(self, sent: DispatchPair) -> None:
        """Connect, and say the whole request."""
        world = self.gateway.world
        is_lost = world.http.network.is_cut(self.up.source, self.up.target)
        if is_lost or (not self.server.is_up and self.server.is_unreachable):
            world.clock.after(CONNECT_NS, self._failed, Failure.REFUSED, "cannot connect")
            return
        world.edge.num_to_come += 1
        world.clock.after(world.http.delay_ns(), self._arrive, sent)

    def _arrive(self, sent: DispatchPair) -> None:
        """A request that was cancelled under way may be seen, with its end right behind it."""
        gateway, world, ask = self.gateway, self.gateway.world, self.caller.exchange.ask
        world.edge.num_to_come -= 1
        if self.is_over and gateway.random.random() < 0.5:
            return
        if not self.server.is_up:
            world.clock.after(world.http.delay_ns(), self._failed, Failure.REFUSED, "connection refused")
            return
        room = sent.pair.rooms[0]
        status = gateway.draw_error()
        life = status or self.server.choose(len(ask.script.prompt), room, ask.routed_rank, world.clock.time)
        peer = None if self.side is Side.PREFILL else Address(sent.pair.prefill.host, BOOTSTRAP_PORT)
        exchange, timeout_ns = self.caller.exchange, sent.timeout_ns
        if isinstance(life, Life):
            life = world.edge.refuse(exchange, life, self.server, room, peer) or life
        if isinstance(life, int):
            self._reject(life)
            return
        self.half = world.edge.submit(
            exchange, life, room, peer, timeout_ns=timeout_ns, listener=self, is_given_up=self.is_over
        )
        if self.is_over:
            self._let_go()

    def hang_up(self) -> None:
        """The gateway closes the connection; the server learns it if it can be told."""
        if self.is_over:
            return
        self.is_over = True
        self._let_go()

    def _let_go(self) -> None:
        if self.half is not None and self.half.is_open:
            if self.half.abort_sent_at is None:
                self.half.abort_sent_at = self.gateway.world.clock.time
            self.gateway.world.http.say(self.up, self._abort)

    def abort(self) -> None:
        """By name, over a connection of its own."""
        self.gateway.world.clock.after(self.gateway.world.http.delay_ns(), self._abort)

    def _abort(self) -> None:
        if self.half is not None and not self.is_server_done:
            self.gateway.world.edge.abort(self.half)

    # -- at the server

    def token_left(self, half: Half, token: int) -> None:
        self.num_emitted += 1
        if not self.caller.streams:
            self.document.append(token)
        elif self.side is Side.DECODE:
            self._say(self._heard_piece, (token,))
        elif not self.is_head_sent:
            self._say(self._heard_head)
        self.is_head_sent = self.is_head_sent or self.caller.streams

    def half_ended(self, half: Half) -> None:
        failure = half.terminal if isinstance(half.terminal, FailRequest) else None
        cause = failure.cause if failure is not None else None
        if cause is not None and not self.is_head_sent:
            status = STATUS.get(cause, OTHER_STATUS)
            self._reject(status, is_retryable=status >= 500 and cause not in FINAL)
            return
        if not self.is_head_sent:
            self._say(self._heard_head)
        if self.document:
            self._say(self._heard_piece, tuple(self.document))
        self._say(self._heard_end, cause)
        self.is_server_done = True

    def replica_died(self, half: Half) -> None:
        """The API process of a server with more ranks lives on, and says so; otherwise the connection breaks."""
        if self.server.is_up:
            self.gateway.world.edge.codes[Cause.WORKER_LOST] += 1
            if self.is_head_sent:
                self._say(self._heard_end, Cause.WORKER_LOST)
            else:
                self._reject(HTTP_UNAVAILABLE)
        elif not self.server.is_unreachable:
            self._say(self._failed, Failure.BROKEN, "connection reset")
        self.is_server_done = True

    def _reject(self, status: int, *, is_retryable: bool | None = None) -> None:
        self._say(self._heard_rejection, status, is_retryable)
        self.is_server_done = True

    def _say(self, action, *arguments) -> None:  # type: ignore[no-untyped-def]
        if not self.is_server_done:
            self.gateway.world.http.say(self.down, action, *arguments)

    def _cannot_answer(self) -> None:
        """The connection is broken for the server: nobody reads any more. The gateway may not know yet."""
        world = self.gateway.world
        self.is_server_done = True
        if self.half is not None:
            world.edge.abort(self.half)
        if not world.http.network.is_cut(self.server.name, self.gateway.name):
            world.clock.after(world.http.delay_ns(), self._failed, Failure.BROKEN, "connection reset")

    # -- at the gateway

    def _heard_head(self) -> None:
        """Of a stream of decode the first piece counts."""
        self.status = 200
        if self._is_heard() and not (self.side is Side.DECODE and self.caller.streams):
            self.gateway.tell(HalfAnswered(self.caller.request, self.attempt, self.side))

    def _heard_piece(self, tokens: tuple[int, ...]) -> None:
        if not self._is_heard() or self.side is Side.PREFILL:
            return
        is_first = not self.tokens
        self.last_piece_at = self.gateway.world.clock.time
        self.tokens.extend(tokens)
        if self.caller.source is self:
            self.pass_on(tokens)
        if is_first and self.caller.streams:
            self.gateway.world.clock.after(STALL_NS, self._look)
            self.gateway.tell(DecodeSpoke(self.caller.request, self.attempt))

    def _look(self) -> None:
        """A stream that says nothing for too long has broken."""
        stalls_at = self.last_piece_at + STALL_NS
        if not self._is_heard():
            return
        if stalls_at > self.gateway.world.clock.time:
            self.gateway.world.clock.at(stalls_at, self._look)
        else:
            self._failed(Failure.STALLED, "no byte")

    def _heard_end(self, cause: Cause | None) -> None:
        if not self._is_heard():
            return
        if self.side is Side.PREFILL and cause is Cause.WORKER_LOST:
            self._failed(Failure.BROKEN, "its server ends")
            return
        self.is_over = True
        request = self.caller.request
        ended = HalfEnded(request, self.attempt, self.side, has_error=cause is not None and self.side is Side.PREFILL)
        if self.side is Side.DECODE and self.caller.source is self:
            self.gateway.end(self.caller, "finished" if cause is None else f"error {cause}")
        if self.side is Side.DECODE and not self.caller.streams:
            self.gateway.tell(DecodeSpoke(request, self.attempt), ended)
        else:
            self.gateway.tell(ended)

    def _heard_rejection(self, status: int, is_retryable: bool | None) -> None:
        if self._is_heard():
            self.is_over = True
            self.status = status
            self.gateway.tell(HalfRejected(self.caller.request, self.attempt, self.side, status, is_retryable))

    def _failed(self, failure: Failure, detail: str) -> None:
        if self._is_heard():
            self.hang_up()
            self.gateway.tell(HalfFailed(self.caller.request, self.attempt, self.side, failure, detail))

    def _is_heard(self) -> bool:
        return not self.is_over and self.gateway.epoch == self.epoch and self.gateway.router is not None

    def pass_on(self, tokens: Sequence[int]) -> None:
        """The client hears these; a document is whole by then."""
        for token in tokens:
            self.caller.hear(token)
        if not self.caller.streams:
            self.gateway.end(self.caller, "finished")


@dataclass(slots=True, eq=False)
class Caller:
    """A client, and what it has heard."""

    exchange: RoutedRequest
    request: RequestId
    deadline: int
    streams: bool
    merges: bool
    legs: dict[Side, UpstreamCall] = field(default_factory=dict)
    source: UpstreamCall | None = None  # whose answer it gets
    num_tokens: int = 0
    outcome: str = ""
    has_left: bool = False

    def hear(self, token: int) -> None:
        rendered_at = self.exchange.rendered_at
        assert rendered_at is not None, "a router stamps its time"
        script = self.exchange.ask.script_at(rendered_at, Role.DECODE)
        if self.outcome:
            raise Violation("S12", f"{self}: a token after the end ({self.outcome})")
        if self.num_tokens >= script.output_length() or token != script.output_token(self.num_tokens):
            raise Violation("S14", f"{self}: token {self.num_tokens} is {token}")
        self.num_tokens += 1

    def end(self, outcome: str) -> None:
        if self.outcome:
            raise Violation("S12", f"{self}: ends as {outcome} after it has ended as {self.outcome}")
        self.outcome = outcome
        if outcome == "finished" and self.source is not None and self.num_tokens != self.source.num_emitted:
            raise Violation("S15", f"{self}: has {self.num_tokens} of {self.source.num_emitted} tokens at the end")

    def __str__(self) -> str:
        return f"client of request {self.exchange.ask.index}"
