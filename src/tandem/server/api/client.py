"""The API process's side of the node: who waits for tokens, and who is told.

Everything here runs on the event loop. `NodeClient` owns the live requests: it numbers them, hands arriving tokens to
the `Generation` that asked for them, and makes sure that each ends exactly once: by the node's terminal message, by
the loss of the node, or, should the node keep silent past the deadline, by its own word.

A request lives inside a `with NodeClient.running(...)` block and nowhere else. What the block may fail at later, it
fails at with an owner; what could fail before (numbers that do not fit, names in use) fails before the node knows.
"""

import asyncio
import itertools
import logging
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from tandem.core import commands, events
from tandem.core.commands import Path
from tandem.core.disagg.messages import SHUTTING_DOWN
from tandem.core.request import Request
from tandem.core.values import MILLISECOND, SECOND, Cause, RequestId
from tandem.server import wire
from tandem.server.api.bootstrap_client import BootstrapClient
from tandem.server.api.errors import Problem, Refusal
from tandem.server.api.hosts import Hosts

SILENCE_GRACE_NS = 500 * MILLISECOND  # how long after a deadline the node may still say it itself
SWEEP_SECONDS = 0.25
QUERY_SECONDS = 5.0

logger = logging.getLogger("tandem.client")


class NodePort(Protocol):
    """The way to the node process. Its messages come back through `NodeClient.receive`."""

    def send(self, message: wire.ApiToNode) -> None:
        """Does not block and keeps the order; never raises for a node that is gone.

        Encodes the whole message before it sends any of it. Of a `SubmitAll` that the node cannot take it raises
        `Refusal`; then nothing was sent.
        """
        ...


@dataclass(slots=True, eq=False)
class Live:
    """One request from submission to its terminal message. `tokens` and `extras` hold what nobody has taken yet."""

    request: Request
    names: tuple[str, ...]  # the rids under which it can be aborted
    generation: "Generation"
    give_up_ns: int  # on time.monotonic_ns: by then the node must have spoken
    is_canary: bool = False  # sent by a probe, not by a user
    tokens: list[int] = field(default_factory=list)
    extras: list[bytes] = field(default_factory=list)  # extras[i] belongs to tokens[i]; shorter when the last have none
    started: commands.StartRequest | None = None
    ended: commands.FinishRequest | commands.FailRequest | None = None
    is_told: bool = False  # the node knows that nobody wants more tokens
    render_at: int | None = None  # the node wants its prompt of this time, in Unix seconds
    is_changed: bool = False


class Generation:
    """The live requests of one HTTP request, and the one task that waits for them."""

    __slots__ = ("_changed", "_waiter", "is_abandoned", "lives")

    def __init__(self) -> None:
        self.lives: list[Live] = []
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
    """Talks to one node. `stall_timeout` in seconds bounds the gap between two tokens."""

    def __init__(self, port: NodePort, *, stall_timeout: float, hosts: Hosts | None = None) -> None:
        self.node: wire.NodeReady | None = None  # None until the node is ready, and again when it is gone
        self.loss = ""  # why the node is gone
        self.trouble = ""  # which process of this server makes no progress, in words; empty: all do
        self.is_draining = False
        self._port = port
        self._stall_ns = int(stall_timeout * SECOND)
        self._request_ids = itertools.count(1)
        self._query_ids = itertools.count(1)
        self._live: dict[int, Live] = {}
        self._named: dict[str, list[Live]] = {}
        self._queries: dict[int, asyncio.Future[bytes]] = {}
        self._bootstraps = BootstrapClient(hosts or Hosts(), own=self._own_replica, report=port.send)
        self._sweeper: asyncio.TimerHandle | None = None
        self._succeeded: tuple[Path, int] | None = None  # the last request that got its tokens, and when
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_ready(self) -> bool:
        return self.node is not None and not self.is_draining

    @property
    def is_healthy(self) -> bool:
        return self.is_ready and not self.trouble

    @property
    def num_live(self) -> int:
        return len(self._live)

    # requests

    def next_request_id(self) -> RequestId:
        return RequestId(next(self._request_ids))

    def is_named(self, rid: str) -> bool:
        """Whether a request with this rid is live."""
        return rid in self._named

    def check_acceptable(self) -> None:
        """Raises `Refusal` while nothing can be accepted."""
        if self.is_draining:
            raise Refusal(Cause.DRAINING, SHUTTING_DOWN)
        self.check_there()

    def check_there(self) -> None:
        """Raises `Refusal` while there is no node."""
        if self.node is None:
            raise Refusal(Problem.NOT_READY, self.loss or "the model is still being loaded")

    def check_healthy(self) -> None:
        """Raises `Refusal` while nothing can be accepted, or a process of this server makes no progress."""
        self.check_acceptable()
        if self.trouble:
            raise Refusal(Problem.NODE_SILENT, self.trouble)

    def last_success(self) -> tuple[Path, int] | None:
        """The path of the last request that got its tokens, canaries aside, and nanoseconds since; None: none yet."""
        if self._succeeded is None:
            return None
        path, at_ns = self._succeeded
        return path, time.monotonic_ns() - at_ns

    @contextmanager
    def running(
        self, submits: Sequence[wire.Submit], names: Sequence[tuple[str, ...]], *, is_canary: bool = False
    ) -> Iterator[Generation]:
        """Have the node run these requests, all or none, until the block is left: what has not ended then is aborted.

        `names[i]` are the rids by which the i-th can be aborted. Raises `Refusal` when nothing can be accepted or a
        rid is live already; then the node hears of that only.
        """
        generation = Generation()
        now_ns = time.monotonic_ns()
        for submit, group in zip(submits, names, strict=True):
            give_up_ns = now_ns + submit.request.timeout_ns + SILENCE_GRACE_NS
            generation.lives.append(Live(submit.request, group, generation, give_up_ns, is_canary))
        self._submit(submits, generation.lives)
        try:
            yield generation
        finally:
            for live in generation.lives:
                self.abort(live)

    def _submit(self, submits: Sequence[wire.Submit], lives: Sequence[Live]) -> None:
        self.check_there()
        try:
            self.check_acceptable()
            self._check_names({name for live in lives for name in live.names})
            self._port.send(wire.SubmitAll(tuple(submits)))
        except Refusal as refusal:
            self._decline([submit.request for submit in submits], refusal)
            raise
        for live in lives:
            self._live[live.request.id] = live
            for name in live.names:
                self._named.setdefault(name, []).append(live)
        self._idle.clear()
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep)

    def _check_names(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self._named:
                raise Refusal(
                    Problem.DUPLICATE_RID, f"rid {name!r} is in use by a request that is still running", param="rid"
                )

    def _decline(self, requests: Sequence[Request], refusal: Refusal) -> None:
        """The other half of a request must not wait for one that never was."""
        code = refusal.failure.code
        cause = code if isinstance(code, Cause) else Cause.PEER_ABORTED
        for request in requests:
            if request.room is not None:
                self._port.send(events.RequestRefused(request, cause, refusal.failure.message))

    def rendered(self, live: Live, submit: wire.Submit) -> None:
        """The prompt that the node has asked for."""
        if live.ended is None:
            self._port.send(wire.Rendered(submit))

    def abort(self, live: Live, cause: Cause = Cause.ABORTED) -> bool:
        """Nobody wants this request any more. Its terminal message still comes. False if it was told to end before."""
        if live.ended is not None or live.is_told:
            return False
        live.is_told = True
        live.give_up_ns = time.monotonic_ns() + self._stall_ns
        self._port.send(events.AbortRequested(live.request.id, cause))
        return True

    def stop(self, live: Live) -> None:
        """Its text is complete: a stop string was found. Its terminal message still comes."""
        if live.ended is None and not live.is_told:
            live.is_told = True
            self._port.send(events.StopMatched(live.request.id))

    def abort_named(self, rid: str) -> int:
        """Abort by exact rid; the number of requests that were told to end."""
        return sum([self.abort(live) for live in list(self._named.get(rid, ()))])

    def abort_all(self) -> int:
        return sum([self.abort(live) for live in list(self._live.values())])

    # the server's life

    def drain(self) -> None:
        """Accept nothing any more; what runs goes on. `wait_idle` says when it has ended."""
        if not self.is_draining:
            self.is_draining = True
            self._port.send(events.DrainRequested())

    def change_hooks(self, force_retry_prob: float | None, failure_prob: float | None) -> None:
        """From here on the test hooks work with these probabilities; None: as before. Raises `Refusal`."""
        self.check_there()
        if force_retry_prob is not None:
            self._port.send(events.HooksChanged(force_retry_prob))
        if failure_prob is not None:
            self._port.send(wire.FailTransfers(failure_prob))

    async def wait_idle(self) -> None:
        await self._idle.wait()

    def lose(self, reason: str) -> None:
        """The node is gone, with everything it ran."""
        self.node = None
        self.loss = reason
        for live in list(self._live.values()):
            self._end(live, commands.FailRequest(live.request.id, Cause.WORKER_LOST, "node", reason))
        for answer in self._queries.values():
            if not answer.done():
                answer.set_exception(Refusal(Problem.NODE_SILENT, f"the node is gone: {reason}"))

    async def close(self) -> None:
        """End what runs on the event loop on behalf of this client."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        await self._bootstraps.close()

    async def query(self, what: str, *, timeout: float = QUERY_SECONDS) -> bytes:
        """Ask the node for one of `wire.Query`'s documents (JSON). Raises `Refusal` when it does not answer."""
        self.check_there()
        query_id = next(self._query_ids)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._queries[query_id] = answer
        self._port.send(wire.Query(query_id, what))
        try:
            return await asyncio.wait_for(answer, timeout)
        except TimeoutError:
            raise Refusal(Problem.NODE_SILENT, f"the node did not answer within {timeout:g} s") from None
        finally:
            del self._queries[query_id]

    # messages from the node

    def receive(self, message: wire.NodeToApi) -> None:
        """Take one message of the node. Late news about a request that has ended changes nothing."""
        match message:
            case commands.EmitTokens():
                self._take_tokens(message)
            case commands.StartRequest():
                if (live := self._live.get(message.request)) is not None:
                    live.started = message
                    live.generation.note(live)
            case commands.FinishRequest() | commands.FailRequest():
                if (live := self._live.get(message.request)) is not None:
                    self._end(live, message)
            case commands.RenderAgain():
                if (live := self._live.get(message.request)) is not None:
                    live.render_at = message.rendered_at
                    live.generation.note(live)
            case wire.Answer():
                answer = self._queries.get(message.id)
                if answer is not None and not answer.done():
                    answer.set_result(message.body)
            case commands.LearnPeer():
                self._bootstraps.learn(message.address, message.dp_rank)
            case commands.AskDpRank():
                self._bootstraps.ask_rank(message.address, message.room)
            case wire.NodeReady():
                self.node = message
            case wire.Died():
                self.lose(f"{message.who}: {message.reason}")

    def _own_replica(self) -> wire.ReplicaInfo | None:
        return None if self.node is None else self.node.replica

    def _take_tokens(self, message: commands.EmitTokens) -> None:
        tokens = array("i")
        tokens.frombytes(message.tokens)
        give_up_ns = time.monotonic_ns() + self._stall_ns + SILENCE_GRACE_NS
        lives = self._live
        for request, token in zip(message.requests, tokens, strict=True):
            live = lives.get(request)
            if live is None:
                continue
            live.tokens.append(token)
            live.give_up_ns = give_up_ns
            if not live.is_changed:
                live.generation.note(live)
        for request, extra in message.extras:
            if (live := lives.get(request)) is not None:
                live.extras += [b""] * (len(live.tokens) - 1 - len(live.extras))
                live.extras.append(extra)

    def _end(self, live: Live, terminal: commands.FinishRequest | commands.FailRequest) -> None:
        live.ended = terminal
        if isinstance(terminal, commands.FinishRequest) and not live.is_canary:
            self._succeeded = (terminal.path, time.monotonic_ns())
        del self._live[live.request.id]
        for name in live.names:
            self._named[name].remove(live)
            if not self._named[name]:
                del self._named[name]
        live.generation.note(live)
        if not self._live:
            self._idle.set()

    def _sweep(self) -> None:
        """End requests on which the node keeps silent: a client never waits for a hung node."""
        self._sweeper = None
        now_ns = time.monotonic_ns()
        for live in [live for live in self._live.values() if live.give_up_ns < now_ns]:
            request, cause = live.request.id, Cause.DEADLINE_EXCEEDED
            self._port.send(events.AbortRequested(request, cause))
            self._end(live, commands.FailRequest(request, cause, "node", "the node kept silent"))
        if self._live:
            self._sweeper = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep)
