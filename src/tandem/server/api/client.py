"""The API process's side of the nodes: who waits for tokens, and who is told.

Everything here runs on the event loop. `NodeClient` owns the live requests: it numbers them, gives each to a DP rank
(`core/dp_dispatch.py`), hands arriving tokens to the `Generation` that asked for them, and makes sure that each ends
exactly once: by its node's terminal message, by the loss of that node, or, should the node keep silent past the
deadline, by its own word.

A request lives inside a `with NodeClient.running(...)` block and nowhere else. What the block may fail at later, it
fails at with an owner; what could fail before (numbers that do not fit, names in use) fails before the node knows.
"""

import asyncio
import itertools
import logging
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tandem.core import commands, events
from tandem.core.commands import Path
from tandem.core.disagg.messages import SHUTTING_DOWN
from tandem.core.dp_dispatch import NO_ROOM, Loads, Newcomer, Refused, dispatch
from tandem.core.request import Request
from tandem.core.settings import LoadBalanceMethod
from tandem.core.values import MILLISECOND, SECOND, Cause, RequestId, Room
from tandem.server import wire
from tandem.server.api.errors import Problem, Refusal, invalid
from tandem.server.api.hosts import Hosts
from tandem.server.api.node_rank import QUERY_SECONDS, NodePort, NodeRank

SILENCE_GRACE_NS = 500 * MILLISECOND  # how long after a deadline the node may still say it itself
SWEEP_SECONDS = 0.25

logger = logging.getLogger("tandem.client")


@dataclass(slots=True, eq=False)
class Live:
    """One request from submission to its terminal message. `tokens` and `extras` hold what nobody has taken yet."""

    request: Request
    rank: NodeRank
    names: tuple[str, ...]  # the rids under which it can be aborted
    generation: "Generation"
    give_up_ns: int  # on time.monotonic_ns: by then the node must have spoken
    is_canary: bool = False  # sent by a probe, not by a user
    tokens: list[int] = field(default_factory=list)
    extras: list[bytes] = field(default_factory=list)  # extras[i] belongs to tokens[i]; shorter when the last have none
    started: commands.StartRequest | None = None
    ended: commands.FinishRequest | commands.FailRequest | None = None
    num_tokens: int = 0  # that have come
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
    """Talks to the nodes of all DP ranks. `stall_timeout` in seconds bounds the gap between two tokens.

    method: how a request finds its rank, unless it names one.
    """

    def __init__(
        self,
        *ports: NodePort,
        stall_timeout: float,
        hosts: Hosts | None = None,
        method: LoadBalanceMethod = LoadBalanceMethod.ROUND_ROBIN,
        rooms_move: bool = True,
        announce: Callable[[Room, int], None] = lambda room, dp_rank: None,
    ) -> None:
        """One port for each DP rank, in order. rooms_move: see `dp_dispatch`. announce: of a prefill: tells its
        bootstrap server which rank knows of a room that never came to be, or that is lost.
        """
        self.ranks = [NodeRank(dp_rank, port, hosts or Hosts()) for dp_rank, port in enumerate(ports)]
        self.is_draining = False
        self.has_started = False  # every rank has been ready once
        self._method = method if len(ports) > 1 else LoadBalanceMethod.ROUND_ROBIN  # needs nothing of a request
        self._rooms_move = rooms_move
        self._announce = announce
        self._next_rank = 0
        self._stall_ns = int(stall_timeout * SECOND)
        self._request_ids = itertools.count(1)
        self._live: dict[int, Live] = {}
        self._named: dict[str, list[Live]] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        self._succeeded: tuple[Path, int] | None = None  # the last request that got its tokens, and when
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
    def is_ready(self) -> bool:
        return self.has_started and self.node is not None and not self.is_draining

    @property
    def is_healthy(self) -> bool:
        return self.is_ready and any(rank.is_active for rank in self.ranks)

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
        """Raises `Refusal` while there is no node, and at the start while one is missing."""
        if self.node is None or not self.has_started:
            for rank in self.ranks:
                rank.check_there()

    def check_healthy(self) -> None:
        """Raises `Refusal` while nothing can be accepted, or in no rank all processes make progress."""
        self.check_acceptable()
        if not self.is_healthy:
            raise Refusal(Problem.NODE_SILENT, next(rank.trouble for rank in self.there))

    def last_success(self) -> tuple[Path, int] | None:
        """The path of the last request that got its tokens, canaries aside, and nanoseconds since; None: none yet."""
        if self._succeeded is None:
            return None
        path, at_ns = self._succeeded
        return path, time.monotonic_ns() - at_ns

    @contextmanager
    def running(
        self,
        submits: Sequence[wire.Submit],
        names: Sequence[tuple[str, ...]],
        *,
        routed: Sequence[int | None] = (),
        is_canary: bool = False,
    ) -> Iterator[Generation]:
        """Have nodes run these requests, all or none, until the block is left: what has not ended then is aborted.

        `names[i]` are the rids by which the i-th can be aborted, `routed[i]` is the DP rank that it asks for. Raises
        `Refusal` when nothing can be accepted or a rid is live already; then the nodes hear of that only.
        """
        generation = Generation()
        self._submit(submits, names, routed or [None] * len(submits), generation, is_canary=is_canary)
        try:
            yield generation
        finally:
            for live in generation.lives:
                self.abort(live)

    def _submit(
        self,
        submits: Sequence[wire.Submit],
        names: Sequence[tuple[str, ...]],
        routed: Sequence[int | None],
        generation: Generation,
        *,
        is_canary: bool,
    ) -> None:
        self.check_there()
        ranks: list[NodeRank] = []
        try:
            self.check_acceptable()
            self._check_names({name for group in names for name in group})
            ranks = self._ranks_for([submit.request for submit in submits], routed, is_canary=is_canary)
            self._send(submits, ranks)
        except Refusal as refusal:
            self._decline([submit.request for submit in submits], routed, ranks, refusal)
            raise
        now_ns = time.monotonic_ns()
        for submit, rank, group in zip(submits, ranks, names, strict=True):
            give_up_ns = now_ns + submit.request.timeout_ns + SILENCE_GRACE_NS
            live = Live(submit.request, rank, group, generation, give_up_ns, is_canary)
            generation.lives.append(live)
            self._live[live.request.id] = live
            for name in live.names:
                self._named.setdefault(name, []).append(live)
            rank.num_requests += 1
            rank.num_tokens += submit.request.prompt_len
        self._idle.clear()
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep)

    def _ranks_for(
        self, requests: Sequence[Request], routed: Sequence[int | None], *, is_canary: bool
    ) -> list[NodeRank]:
        """Raises `Refusal`; nothing has changed then. A canary takes any rank."""
        # Where in every rank something hangs, each still gets its own: it may go on.
        usable = [rank for rank in self.ranks if rank.is_active] or self.there
        loads = Loads(tuple(rank.load(is_active=rank in usable) for rank in self.ranks), self._next_rank)
        found: list[NodeRank] = []
        for request, wanted in zip(requests, routed, strict=True):
            newcomer = Newcomer(request.prompt_len, request.room, wanted)
            method = LoadBalanceMethod.TOTAL_REQUESTS if is_canary else self._method
            chosen, loads = dispatch(newcomer, loads, method, moves=self._rooms_move)
            if isinstance(chosen, Refused):
                if chosen.reason == NO_ROOM:
                    raise invalid("bootstrap_room", chosen.reason)
                raise Refusal(Problem.NOT_READY, chosen.reason)
            found.append(self.ranks[chosen.rank])
        self._next_rank = loads.next_rank
        return found

    def _send(self, submits: Sequence[wire.Submit], ranks: Sequence[NodeRank]) -> None:
        """Raises `Refusal` when a node cannot take its share; those that have taken theirs are told to end it."""
        taken: list[tuple[NodeRank, wire.Submit]] = []
        for rank in dict.fromkeys(ranks):
            share = tuple(submit for submit, at in zip(submits, ranks, strict=True) if at is rank)
            try:
                rank.port.send(wire.SubmitAll(share))
            except Refusal:
                for other, submit in taken:
                    other.port.send(events.AbortRequested(submit.request.id))
                raise
            taken += [(rank, submit) for submit in share]

    def _check_names(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self._named:
                raise Refusal(
                    Problem.DUPLICATE_RID, f"rid {name!r} is in use by a request that is still running", param="rid"
                )

    def _decline(
        self,
        requests: Sequence[Request],
        routed: Sequence[int | None],
        ranks: Sequence[NodeRank],
        refusal: Refusal,
    ) -> None:
        """The other half of a request must not wait for one that never was. It looks for it on the rank that would
        have had it. `ranks` is empty when none were chosen yet."""
        code = refusal.failure.code
        cause = code if isinstance(code, Cause) else Cause.PEER_ABORTED
        chosen = ranks or [self._rank_that_would_have(*one) for one in zip(requests, routed, strict=True)]
        for request, rank in zip(requests, chosen, strict=True):
            self._close_room(request, rank, cause, refusal.failure.message)

    def _close_room(self, request: Request, rank: NodeRank, cause: Cause, reason: str) -> None:
        """Whoever asks for the room of this request is told by this rank that there is nothing."""
        if request.room is None:
            return
        rank.port.send(events.RequestRefused(request, cause, reason))
        if request.peer is None and len(self.ranks) > 1:
            self._announce(request.room, rank.dp_rank)

    def _rank_that_would_have(self, request: Request, wanted: int | None) -> NodeRank:
        """Takes no turn of the round robin."""
        turn = self._next_rank
        try:
            (rank,) = self._ranks_for([request], [wanted], is_canary=False)
        except Refusal:
            rank = self.there[0]
        self._next_rank = turn
        return rank

    def rendered(self, live: Live, submit: wire.Submit) -> None:
        """The prompt that the node has asked for."""
        if live.ended is None:
            live.rank.port.send(wire.Rendered(submit))

    def abort(self, live: Live, cause: Cause = Cause.ABORTED) -> bool:
        """Nobody wants this request any more. Its terminal message still comes. False if it was told to end before."""
        if live.ended is not None or live.is_told:
            return False
        live.is_told = True
        live.give_up_ns = time.monotonic_ns() + self._stall_ns
        live.rank.port.send(events.AbortRequested(live.request.id, cause))
        return True

    def stop(self, live: Live) -> None:
        """Its text is complete: a stop string was found. Its terminal message still comes."""
        if live.ended is None and not live.is_told:
            live.is_told = True
            live.rank.port.send(events.StopMatched(live.request.id))

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
            self._tell_all(events.DrainRequested())

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
        """The node of this rank, or that of every rank, is gone, with everything it ran. Other halves that look for
        it are told by a rank that is left."""
        gone = self.ranks if dp_rank is None else [self.ranks[dp_rank]]
        for rank in gone:
            rank.lose(reason)
        left = self.there
        for live in [live for live in self._live.values() if live.rank in gone]:
            if left:
                self._close_room(live.request, left[0], Cause.WORKER_LOST, reason)
            self._end(live, commands.FailRequest(live.request.id, Cause.WORKER_LOST, "node", reason))

    async def close(self) -> None:
        """End what runs on the event loop on behalf of this client."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
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
                if (live := self._live.get(message.request)) is not None:
                    self._end(live, message)
            case commands.RenderAgain():
                if (live := self._live.get(message.request)) is not None:
                    live.render_at = message.rendered_at
                    live.generation.note(live)
            case wire.Answer() | commands.LearnPeer() | commands.AskDpRank() | wire.NodeReady():
                self.ranks[dp_rank].receive(message)
                self.has_started = self.has_started or len(self.there) == len(self.ranks)
            case wire.Died():
                self.lose(f"{message.who}: {message.reason}", dp_rank)

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
            live.num_tokens += 1
            live.rank.num_tokens += 1
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
        live.rank.num_requests -= 1
        live.rank.num_tokens -= live.request.prompt_len + live.num_tokens
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
            live.rank.port.send(events.AbortRequested(request, cause))
            self._end(live, commands.FailRequest(request, cause, "node", "the node kept silent"))
        if self._live:
            self._sweeper = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep)
