"""One half of one attempt: its connection, from the gateway that dispatched it to the server and back.

A server's edge answers as the product's does: a stream gets its head with the first token, a document when it is whole;
a failure before the head is a status, after it the last word of the body. What the gateway makes of head, pieces and
end is decided by the product's `UpstreamCall`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol  # Any: the world writes down what it is given

from tandem.core.commands import FailRequest
from tandem.core.router.messages import DispatchPair, HalfFailure, RouterEvent, Side
from tandem.core.router.router import Router
from tandem.core.router.upstream_call import Said, UpstreamCall
from tandem.core.settings import Role
from tandem.core.values import SECOND, Address, Cause, Nanos, RequestId
from tandem.server.api.errors import RULES
from tandem.simulator.actors.clients import Half, RoutedRequest
from tandem.simulator.actors.edge import BOOTSTRAP_PORT, Edge
from tandem.simulator.actors.servers import Server
from tandem.simulator.clock import Clock
from tandem.simulator.network.http import CONNECT_NS, Http, Way
from tandem.simulator.oracle import Violation

STALL_NS = Nanos(60 * SECOND)  # between two pieces of a stream
HTTP_OK = 200


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
    """What a connection sees of the gateway that sent it."""

    name: str
    world: Surroundings
    epoch: int
    router: Router | None
    random: Random

    def draw_error(self) -> int | None: ...

    def tell(self, *events: RouterEvent) -> None: ...

    def end(self, caller: "Caller", outcome: str) -> None: ...


@dataclass(slots=True, eq=False)
class SimulatedConnection:
    gateway: Dispatcher
    caller: "Caller"
    upstream: UpstreamCall
    server: Server
    epoch: int  # of the gateway
    num_said: int = 0  # tokens that the client has from a decode that was lost
    has_all: bool = False  # and nothing can follow them: what comes is not for the client
    up: Way = field(init=False)
    down: Way = field(init=False)

    # At the server.
    half: Half | None = None
    num_emitted: int = 0
    document: list[int] = field(default_factory=list)  # tokens of an answer that is not streamed
    is_head_sent: bool = False
    is_server_done: bool = False

    # At the gateway.
    tokens: list[int] = field(default_factory=list)  # that have come
    last_piece_at: int = 0

    @property
    def num_told(self) -> int:
        """Tokens of the answer, with those of a decode that was lost."""
        return self.num_said + (0 if self.has_all else self.num_emitted)

    @property
    def side(self) -> Side:
        return self.upstream.half

    @property
    def is_over(self) -> bool:
        """Nothing that comes is heard any more."""
        return self.upstream.is_over

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
            world.clock.after(CONNECT_NS, self._failed, HalfFailure.REFUSED, "cannot connect")
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
            world.clock.after(world.http.delay_ns(), self._failed, HalfFailure.REFUSED, "connection refused")
            return
        room = sent.pair.rooms[0]
        peer = None if self.side is Side.PREFILL else Address(sent.pair.prefill.host, BOOTSTRAP_PORT)
        if (status := gateway.draw_error()) is not None:
            self._reject(status)
            return
        half = world.edge.submit(
            self.caller.exchange,
            self.server,
            room,
            peer,
            timeout_ns=sent.timeout_ns,
            listener=self,
            routed=ask.routed_rank,
            is_given_up=self.is_over,
            num_said=0 if self.has_all else self.num_said,
            may_move=self.side is Side.DECODE and self.caller.can_be_resumed,
        )
        if not isinstance(half, Half):
            self._reject(half.status, is_retryable=RULES[half.code].retryable)
            return
        self.half = half
        if self.is_over:
            self._let_go()

    def hang_up(self) -> None:
        """The gateway closes the connection; the server learns it if it can be told."""
        if self.is_over:
            return
        self.upstream.cancel()
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
        failure = half.answer if isinstance(half.answer, FailRequest) else None
        cause = failure.cause if failure is not None else None
        if cause is not None and not self.is_head_sent:
            self._reject(RULES[cause].status, is_retryable=RULES[cause].retryable)
            return
        if not self.is_head_sent:
            self._say(self._heard_head)
        if self.document:
            self._say(self._heard_piece, tuple(self.document))
        self._say(self._heard_end, cause)
        self.is_server_done = True

    def was_cut(self, half: Half) -> None:
        self._say(self._failed, HalfFailure.BROKEN, "connection reset")
        self.is_server_done = True

    def server_died(self, half: Half) -> None:
        if not self.server.is_unreachable:
            self._say(self._failed, HalfFailure.BROKEN, "connection reset")
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
            world.clock.after(world.http.delay_ns(), self._failed, HalfFailure.BROKEN, "connection reset")

    # -- at the gateway

    def _heard_head(self) -> None:
        if self._is_heard():
            caller = self.caller
            self._hear(self.upstream.head(HTTP_OK, is_event_stream=caller.streams, is_resumable=caller.can_be_resumed))

    def _heard_piece(self, tokens: tuple[int, ...]) -> None:
        """The first one of decode's stream brings its head."""
        if not self._is_heard() or self.side is Side.PREFILL:
            return
        if not self.upstream.status:
            self._heard_head()
        self.last_piece_at = self.gateway.world.clock.time
        self.tokens.extend(tokens)
        if self.caller.source is self:
            self.pass_on(tokens)
        was_patient = self.upstream.patience_ns is None
        self._hear(self.upstream.piece())
        if was_patient and self.upstream.patience_ns is not None:
            self.gateway.world.clock.after(self.upstream.patience_ns, self._look)

    def _look(self) -> None:
        """A stream that says nothing for too long has broken."""
        patience_ns = self.upstream.patience_ns
        if not self._is_heard() or patience_ns is None:
            return
        if self.last_piece_at + patience_ns > self.gateway.world.clock.time:
            self.gateway.world.clock.at(self.last_piece_at + patience_ns, self._look)
        else:
            self._hear_last(self.upstream.stall())

    def _heard_end(self, cause: Cause | None) -> None:
        if not self._is_heard():
            return
        if cause is not None and self.upstream.is_resumable and may_go_on(cause):
            self.caller.give_up_message = f"error {cause}"
            serves_on = cause is Cause.WORKER_LOST and self.server.serves
            self._hear_last(self.upstream.give_up(cause.value, silent_ns=self._silent_ns, serves_on=serves_on))
            return
        said = self.upstream.end(cause, "the worker is lost" if cause is Cause.WORKER_LOST else "")
        if self.side is Side.DECODE and self.caller.source is self:
            self.gateway.end(self.caller, "finished" if cause is None else f"error {cause}")
        self._hear_last(said)

    def _heard_rejection(self, status: int, is_retryable: bool | None) -> None:
        if self._is_heard():
            self._hear(self.upstream.head(status, is_event_stream=False))
            self._hear(self.upstream.reject(is_retryable=is_retryable))

    def _failed(self, failure: HalfFailure, detail: str) -> None:
        if self._is_heard():
            self._hear_last(self.upstream.fail(failure, detail, silent_ns=self._silent_ns))

    def break_off(self, silent_ns: Nanos, detail: str) -> None:
        """Where nothing has come for so long. What happens is told behind the step that wants it."""
        if not self._is_heard() or self._silent_ns < silent_ns:
            return
        said = self.upstream.fail(HalfFailure.BROKEN, detail, silent_ns=self._silent_ns)
        self._let_go()
        self.gateway.world.clock.after(1, self._hear_of_break, said)

    def _hear_of_break(self, said: Said) -> None:
        if self.gateway.epoch == self.epoch:
            self._hear(said)

    @property
    def _silent_ns(self) -> Nanos:
        return Nanos(self.gateway.world.clock.time - self.last_piece_at if self.last_piece_at else 0)

    def _hear(self, said: Said) -> None:
        if said:
            self.gateway.tell(*said)

    def _hear_last(self, said: Said) -> None:
        """Its task ends, and with it the connection."""
        self._let_go()
        self._hear(said)

    def _is_heard(self) -> bool:
        return not self.is_over and self.gateway.epoch == self.epoch and self.gateway.router is not None

    def pass_on(self, tokens: Sequence[int]) -> None:
        """The client hears these; a document is whole by then."""
        for token in () if self.has_all else tokens:
            self.caller.hear(token)
        if not self.caller.streams:
            self.gateway.end(self.caller, "finished")


def may_go_on(cause: Cause) -> bool:
    """As a decode says it of a stream that it ends (`telling.last_frame`)."""
    return RULES[cause].retryable and cause is not Cause.DEADLINE_EXCEEDED


@dataclass(slots=True, eq=False)
class Caller:
    """A client, and what it has heard."""

    exchange: RoutedRequest
    request: RequestId
    deadline: int
    streams: bool
    merges: bool
    connections: dict[Side, SimulatedConnection] = field(default_factory=dict)
    source: SimulatedConnection | None = None  # whose answer it gets
    num_tokens: int = 0
    give_up_message: str = ""  # of a stream that gave up, unless somebody goes on with it
    num_resumes: int = 0
    outcome: str = ""
    has_left: bool = False

    @property
    def can_be_resumed(self) -> bool:
        """As `telling.can_tell` has it; some decodes are of another make."""
        return self.streams and self.exchange.ask.script.logprobs_from is None and self.exchange.ask.index % 5 != 4

    @property
    def has_all(self) -> bool:
        """Nothing can follow what it has heard."""
        assert self.exchange.rendered_at is not None
        ask = self.exchange.ask
        length = ask.script_at(self.exchange.rendered_at, Role.DECODE).output_length()
        return self.num_tokens >= (length if ask.stops_after is None else min(length, ask.stops_after))

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
        if outcome == "finished" and self.source is not None and self.num_tokens != self.source.num_told:
            raise Violation("S15", f"{self}: has {self.num_tokens} of {self.source.num_told} tokens at the end")

    def __str__(self) -> str:
        return f"client of request {self.exchange.ask.index}"
