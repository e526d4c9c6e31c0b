"""The API process's side of the nodes: who waits for tokens, and who is told.

Everything here runs on the event loop. What becomes of a request is decided by `live_requests.py`; here are the ways to
the nodes, one timer, and the tokens that nobody has taken yet: `NodeClient` hands them to the `Generation` that asked
for them.

A request lives inside a `with NodeClient.running(...)` block and nowhere else. What the block may fail at later, it
fails at with an owner; what could fail before (numbers that do not fit, names in use) fails before the node knows.
"""

import asyncio
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path as FilePath

from tandem.core import commands, events
from tandem.core.commands import Path
from tandem.core.request import Request
from tandem.core.settings import LoadBalanceMethod
from tandem.core.values import SECOND, Cause, Nanos, RequestId
from tandem.server import wire
from tandem.server.api.allowed_hosts import AllowedHosts
from tandem.server.api.errors import Failure, Problem, Refusal
from tandem.server.api.last_steps import EdgeLastSteps
from tandem.server.api.live_requests import (
    Action,
    ClientId,
    CloseConnection,
    Declined,
    EndRequest,
    IncomingRequest,
    LiveRequests,
    TellNode,
    declined_as,
)
from tandem.server.api.node_rank import QUERY_SECONDS, NodePort, NodeRank


@dataclass(slots=True, eq=False)
class Live:
    """One request from submission to its terminal message. `tokens` and `extras` hold what nobody has taken yet."""

    request: Request
    rank: NodeRank
    generation: "Generation"
    tokens: list[int] = field(default_factory=list)
    extras: list[bytes] = field(default_factory=list)  # extras[i] belongs to tokens[i]; shorter when the last have none
    started: commands.StartRequest | None = None
    ended: commands.FinishRequest | commands.FailRequest | None = None
    render_at: int | None = None  # the node wants its prompt of this time, in Unix seconds
    is_changed: bool = False


class Generation:
    """The live requests of one HTTP request, and the one task that waits for them.

    cut: closes its client's connection without a word; whoever owns that puts it in.
    """

    __slots__ = ("_changed", "_waiter", "client", "cut", "is_abandoned", "lives")

    def __init__(self) -> None:
        self.lives: list[Live] = []
        self.client = ClientId(0)  # none yet
        self.cut: Callable[[], None] = lambda: None
        self.is_abandoned = False  # the client left
        self._changed: list[Live] = []
        self._waiter: asyncio.Future[None] | None = None

    async def changed(self) -> list[Live]:
        """Wait until there is news, and take the list of those who have some. Empty when the client left."""
        if not self._changed and not self.is_abandoned:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        changed, self._changed = self._changed, []
        for live in changed:
            live.is_changed = False
        return changed

    def abandon(self) -> None:
        self.is_abandoned = True
        self.wake()

    def note(self, live: Live) -> None:
        if not live.is_changed:
            live.is_changed = True
            self._changed.append(live)
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class NodeClient:
    """Talks to the nodes of all DP ranks. `stall_timeout` in seconds bounds the gap between two tokens.

    method: how a request finds its rank, unless it names one.
    """

    def __init__(
        self,
        *ports: NodePort,
        stall_timeout: float,
        hosts: AllowedHosts | None = None,
        method: LoadBalanceMethod = LoadBalanceMethod.ROUND_ROBIN,
        rooms_move: bool = True,
        force_query: bool = False,
        announce: Callable[[commands.AnnounceDpRank], None] = lambda announced: None,
        fault_folder: FilePath | None = None,
    ) -> None:
        """One port for each DP rank, in order. rooms_move, force_query: see `LiveRequests`.

        announce: of a prefill: tells its bootstrap server which rank knows of a room that never came to be, or that is
        lost, where no room tells.
        fault_folder: see `fault_records.py`; None: nothing is kept.
        """
        self._requests = LiveRequests(len(ports), int(stall_timeout * SECOND), method, rooms_move, force_query)
        self.last_steps = EdgeLastSteps(self._requests, fault_folder)
        self.ranks = [
            NodeRank(
                dp_rank,
                port,
                hosts or AllowedHosts(),
                state,
                partial(self._see_trouble, dp_rank),
                num_ranks=len(ports),
            )
            for dp_rank, (port, state) in enumerate(zip(ports, self._requests.ranks, strict=True))
        ]
        self._announce = announce
        self._live: dict[RequestId, Live] = {}
        self._generations: dict[ClientId, Generation] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at = 0  # while there is a timer
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def there(self) -> list[NodeRank]:
        """The ranks whose node is ready."""
        return [rank for rank in self.ranks if rank.node is not None]

    @property
    def node(self) -> wire.NodeReady | None:
        """What the nodes have in common; None while none is ready."""
        return next((rank.node for rank in self.ranks if rank.node is not None), None)

    @property
    def has_started(self) -> bool:
        return self._requests.has_started

    @property
    def is_healthy(self) -> bool:
        return self._requests.is_healthy

    @property
    def is_any_active(self) -> bool:
        return self._requests.is_any_active

    @property
    def num_live(self) -> int:
        return self._requests.num_live

    # requests

    def next_request_id(self) -> RequestId:
        return self._requests.next_id()

    def check_acceptable(self) -> None:
        """Raises `Refusal` while nothing can be accepted."""
        raise_if(self._requests.unacceptable())

    def check_there(self) -> None:
        """Raises `Refusal` while there is no node, and at the start while one is missing."""
        raise_if(self._requests.absence())

    def check_healthy(self) -> None:
        """Raises `Refusal` while nothing can be accepted, or in no rank all processes make progress."""
        self.check_acceptable()
        if not self.is_healthy:
            raise Refusal(Problem.NODE_SILENT, next(rank.trouble for rank in self.there))

    def last_success(self) -> tuple[Path, int] | None:
        """The path of the last request that got its tokens, canaries aside, and nanoseconds since; None: none yet."""
        if self._requests.succeeded is None:
            return None
        path, at_ns = self._requests.succeeded
        return path, time.monotonic_ns() - at_ns

    @contextmanager
    def running(
        self,
        submits: Sequence[wire.Submit],
        names: Sequence[tuple[str, ...]],
        *,
        routed: Sequence[int | None] = (),
        request_id: str = "",
        may_move: bool = False,
        is_canary: bool = False,
    ) -> Iterator[Generation]:
        """Have nodes run these requests, all or none, until the block is left: what has not ended then is aborted.

        `names[i]` are the rids by which the i-th can be aborted, `routed[i]` is the DP rank that it asks for. What
        runs by the same rids for the same `request_id` ends: a router tries again. may_move: see `IncomingRequest`.
        Raises `Refusal` when nothing can be accepted or a rid is live already; then the nodes hear of that only.
        """
        generation = Generation()
        rows = zip(submits, names, routed or [None] * len(submits), strict=True)
        arrivals = [
            IncomingRequest(submit.request, group, dp_rank, request_id, may_move) for submit, group, dp_rank in rows
        ]
        self._submit(submits, arrivals, generation, is_canary=is_canary)
        try:
            yield generation
        finally:
            self.leave(generation)
            del self._generations[generation.client]

    def _submit(
        self,
        submits: Sequence[wire.Submit],
        arrivals: Sequence[IncomingRequest],
        generation: Generation,
        *,
        is_canary: bool,
    ) -> None:
        placed = self._requests.submit(arrivals, self._time(), is_canary=is_canary)
        if isinstance(placed, Declined):
            self._do(placed.actions)
            raise Refusal.of(placed.failure)
        self._do(placed.actions)
        self._send(submits, placed.ranks, placed.client)
        generation.client = placed.client
        self._generations[placed.client] = generation
        for submit, dp_rank in zip(submits, placed.ranks, strict=True):
            live = self._live[submit.request.id] = Live(submit.request, self.ranks[dp_rank], generation)
            generation.lives.append(live)
        if submits:
            self._idle.clear()
        self._set_timer()

    def decline(self, arrivals: Sequence[IncomingRequest], failure: Failure) -> None:
        """These were read, and are refused before they are anything to run: the nodes hear of that only."""
        self._do(self._requests.decline(arrivals, declined_as(failure), failure.message))

    def _send(self, submits: Sequence[wire.Submit], ranks: Sequence[int], client: ClientId) -> None:
        """Raises `Refusal` when a node cannot take its share; then, or if it cannot be encoded, nothing is live."""
        taken: list[int] = []
        for dp_rank in dict.fromkeys(ranks):
            share = tuple(submit for submit, at in zip(submits, ranks, strict=True) if at == dp_rank)
            try:
                self.ranks[dp_rank].port.send(wire.SubmitAll(share))
            except Refusal as refusal:
                failure = refusal.failure
                self._do(self._requests.withdraw(client, taken, declined_as(failure), failure.message))
                raise
            except BaseException:
                self._do(self._requests.withdraw(client, taken, None))
                raise
            taken.append(dp_rank)

    def rendered(self, live: Live, submit: wire.Submit) -> None:
        """The prompt that the node has asked for."""
        if live.ended is None:
            live.rank.port.send(wire.Rendered(submit))

    def abort(self, live: Live, cause: Cause = Cause.ABORTED) -> bool:
        """Nobody wants this request any more. Its terminal message still comes. False if it was told to end before."""
        return self._do(self._requests.abort(live.request.id, self._time(), cause)) > 0

    def stop(self, live: Live) -> None:
        """Its text is complete: a stop string was found. Its terminal message still comes."""
        self._do(self._requests.stop(live.request.id, self._time()))

    def abort_named(self, rid: str) -> int:
        """Abort by exact rid; the number of requests that were told to end."""
        return self._do(self._requests.abort_named(rid, self._time()))

    def abort_all(self, cause: Cause = Cause.ABORTED) -> int:
        return self._do(self._requests.abort_all(self._time(), cause))

    def leave(self, generation: Generation) -> None:
        """Its client has left, or has its answer."""
        self._do(self._requests.leave(generation.client, self._time()))

    @contextmanager
    def writing(self, generation: Generation) -> Iterator[None]:
        """Around each write to its client. Who takes nothing for the stall timeout is cut off."""
        self._requests.blocked(generation.client, self._time())
        self._set_timer()
        try:
            yield
        finally:
            self._requests.reads(generation.client)

    # the server's life

    def drain(self) -> None:
        """Accept nothing any more; what runs goes on. `wait_idle` says when it has ended."""
        self._do(self._requests.drain())

    def tell_elsewhere(self, announced: commands.AnnounceDpRank) -> None:
        """The rank where decode looks for this room sends it on to the one that has it."""
        if announced.sought is not None and announced.sought in range(len(self.ranks)):
            self.ranks[announced.sought].port.send(events.RoomElsewhere(announced.room, announced.dp_rank))

    def change_hooks(self, force_retry_prob: float | None, failure_prob: float | None) -> None:
        """From here on the test hooks work with these probabilities; None: as before. Raises `Refusal`."""
        self.check_there()
        if force_retry_prob is not None:
            self._tell_all(events.HooksChanged(force_retry_prob))
        if failure_prob is not None:
            self._tell_all(wire.FailTransfers(failure_prob))

    def _tell_all(self, message: wire.ApiToNode) -> None:
        for rank in self.ranks:
            rank.port.send(message)

    async def wait_idle(self) -> None:
        await self._idle.wait()

    def lose(self, reason: str, dp_rank: int | None = None) -> None:
        """The node of this rank, or that of every rank, is gone, with everything it ran."""
        for rank in self.ranks if dp_rank is None else [self.ranks[dp_rank]]:
            rank.lose(reason)
        self._do(self._requests.lose(reason, dp_rank))

    async def close(self) -> None:
        """End what runs on the event loop on behalf of this client."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for rank in self.ranks:
            await rank.close()

    async def query(self, what: str, *, timeout: float = QUERY_SECONDS) -> bytes:
        """As `NodeRank.query`, of the first rank that is there."""
        self.check_there()
        return await self.there[0].query(what, timeout=timeout)

    async def query_all(self, what: str, *, timeout: float = QUERY_SECONDS) -> dict[int, bytes]:
        """What each rank answers, by its number. Those are missing that do not answer."""
        there = self.there
        answers = await asyncio.gather(*(rank.query(what, timeout=timeout) for rank in there), return_exceptions=True)
        found: dict[int, bytes] = {}
        for rank, answer in zip(there, answers, strict=True):
            if isinstance(answer, bytes):
                found[rank.dp_rank] = answer
            elif not isinstance(answer, Refusal):
                raise answer
        return found

    # messages from the nodes

    def receive(self, message: wire.NodeToApi, dp_rank: int = 0) -> None:
        """Take one message of a rank's node. Late news about a request that has ended changes nothing."""
        match message:
            case commands.EmitTokens():
                self._take_tokens(message)
            case commands.StartRequest():
                if (live := self._live.get(message.request)) is not None:
                    live.started = message
                    live.generation.note(live)
            case commands.FinishRequest() | commands.FailRequest():
                self._do(self._requests.ended(message, self._time()))
            case commands.RenderAgain():
                if (live := self._live.get(message.request)) is not None:
                    live.render_at = message.rendered_at
                    live.generation.note(live)
            case wire.NodeReady():
                self.ranks[dp_rank].receive(message)
                self._requests.ready(dp_rank, message.replica.prefill)
            case wire.Answer() | commands.LearnPeer() | commands.AskDpRank():
                self.ranks[dp_rank].receive(message)
            case wire.Died():
                self.lose(f"{message.who}: {message.reason}", dp_rank)

    def _take_tokens(self, message: commands.EmitTokens) -> None:
        tokens = array("i")
        tokens.frombytes(message.tokens)
        lives, requests = self._live, message.requests
        for position in self._requests.emitted(requests, self._time()):
            live = lives[requests[position]]
            live.tokens.append(tokens[position])
            if not live.is_changed:
                live.generation.note(live)
        for request, extra in message.extras:
            if (live := lives.get(request)) is not None:
                live.extras += [b""] * (len(live.tokens) - 1 - len(live.extras))
                live.extras.append(extra)
        self._set_timer()

    # what is decided

    def _see_trouble(self, dp_rank: int, trouble: str) -> None:
        self._do(self._requests.see_trouble(dp_rank, trouble, self._time()))

    def _do(self, actions: Sequence[Action]) -> int:
        """How many there were."""
        for action in actions:
            match action:
                case TellNode(dp_rank, event):
                    self.ranks[dp_rank].port.send(event)
                case commands.AnnounceDpRank():
                    self._announce(action)
                case EndRequest(terminal):
                    self._end(terminal)
                case CloseConnection(client):
                    self._generations[client].cut()
        self._set_timer()
        return len(actions)

    def _end(self, terminal: commands.FinishRequest | commands.FailRequest) -> None:
        live = self._live.pop(terminal.request)
        live.ended = terminal
        live.generation.note(live)
        if not self._live:
            self._idle.set()

    def _time(self) -> Nanos:
        return Nanos(time.monotonic_ns())

    def _set_timer(self) -> None:
        """One timer, never later than the machine wants to be woken."""
        wake_at = self._requests.wake_at
        if wake_at is None or (self._timer is not None and self._wakes_at <= wake_at):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._wakes_at = wake_at
        delay_s = max(0, wake_at - time.monotonic_ns()) / SECOND
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._do(self._requests.wake(self._time()))


def raise_if(failure: Failure | None) -> None:
    if failure is not None:
        raise Refusal.of(failure)
