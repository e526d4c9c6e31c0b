"""The life of a server's requests at its API process: who runs where, and how each ends exactly once. No I/O.

A request begins with `submit`, which numbers nobody twice, finds each its DP rank (`core/dp_dispatch.py`) and remembers
until when its node must have spoken:

    before the first token   its deadline, and `SILENCE_GRACE_NS` in which the node may still say so itself
    after a token            the stall timeout, and the same grace
    once told to end         the stall timeout, or what was left if that is less; tokens that still come change nothing

It ends, with one `EndRequest`, by the first of: its node's terminal message, the loss of that node, or that moment. A
stream that may go on elsewhere does not wait for that moment where its rank stands still and others do not: it ends
once nothing has come for `QUIET_NS`. What comes later changes nothing. Whatever ends without its node leaves nobody
waiting: the node is told to abort it, and whoever looks for its room is told by a rank that is left that there is
nothing.

The shell around it owns connections, tokens, text and timers. Of tokens it says for whom they came, of a stop string
that it was found, of a client that it has left, or that it takes nothing (`blocked`, `reads`): who does that for longer
than the stall timeout is cut off. Methods return what is to be done, in this order; after each of them `wake_at` says
when to call `wake` at the latest.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Concatenate, NewType, ParamSpec, Protocol, TypeVar

from msgspec import Struct, structs

from tandem.core.commands import AnnounceDpRank, FailRequest, FinishRequest, Path
from tandem.core.disagg.dp_rank import Quiet, RequestFacts, settle
from tandem.core.disagg.messages import SHUTTING_DOWN
from tandem.core.dp_dispatch import NO_ROOM, DispatchLoad, Loads, Newcomer, Refused, dispatch
from tandem.core.events import AbortRequested, DrainRequested, RequestRefused, StopMatched
from tandem.core.request import Request
from tandem.core.settings import LoadBalanceMethod, PrefillInfo
from tandem.core.values import MILLISECOND, SECOND, Cause, Nanos, RequestId, Room
from tandem.server.api.errors import Failure, Problem

SILENCE_GRACE_NS = 500 * MILLISECOND  # how long after a deadline the node may still say it itself
SWEEP_NS = 100 * MILLISECOND  # between two looks at all requests; so much later than that one may end
QUIET_NS = Nanos(10 * SECOND)  # of a stream that may move, while its rank stands still and others do not
LOADING = "the model is still being loaded"

ClientId = NewType("ClientId", int)  # one HTTP request, with all of its samples


class IncomingRequest(Struct, frozen=True):
    """One sample of a client's request, valid in itself."""

    request: Request
    names: tuple[str, ...] = ()  # the rids under which it can be aborted
    routed: int | None = None  # the DP rank that it asks for
    request_id: str = ""  # of the client's request: the same each time that a router tries it
    may_move: bool = False  # a stream: its router has it go on at another rank, or server, where this one cannot


class TellNode(Struct, frozen=True):
    """To the node of this rank."""

    dp_rank: int
    event: RequestRefused | AbortRequested | StopMatched | DrainRequested


class EndRequest(Struct, frozen=True):
    """The one terminal of a request that was submitted."""

    terminal: FinishRequest | FailRequest


class CloseConnection(Struct, frozen=True):
    """It takes nothing: its connection is closed without a word. What runs for it is being aborted."""

    client: ClientId


Action = TellNode | AnnounceDpRank | EndRequest | CloseConnection


class Placed(Struct, frozen=True):
    """All of them are live. `ranks[i]`: whose node is to be given the i-th."""

    client: ClientId
    ranks: tuple[int, ...]
    actions: tuple[Action, ...] = ()  # what a router has tried before ends


class Declined(Struct, frozen=True):
    """None of them is live, and nobody waits for them."""

    failure: Failure
    actions: tuple[Action, ...] = ()


class Recorder(Protocol):
    """Sees every call that may change something, from outside, and what it gives. Must not change what it sees."""

    def given(self, name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
        """False: it is within another call, which says it all."""
        ...

    def gave(self, result: object) -> None: ...

    def raised(self) -> None: ...


Params = ParamSpec("Params")
Result = TypeVar("Result")
Name = TypeVar("Name", bound=Hashable)


def recorded(
    method: Callable[Concatenate["LiveRequests", Params], Result],
) -> Callable[Concatenate["LiveRequests", Params], Result]:
    """Whoever records is told of its calls."""
    name = method.__name__

    @wraps(method)
    def told(self: "LiveRequests", *args: Params.args, **kwargs: Params.kwargs) -> Result:
        recorder = self.recorder
        if recorder is None or not recorder.given(name, args, kwargs):
            return method(self, *args, **kwargs)
        try:
            result = method(self, *args, **kwargs)
        except BaseException:
            recorder.raised()
            raise
        recorder.gave(result)
        return result

    return told


@dataclass(slots=True)
class LiveRank:
    """One DP rank."""

    is_there: bool = False  # its node is ready
    prefill: PrefillInfo | None = None  # by which decode looks for its rooms
    loss: str = ""  # why it is gone
    trouble: str = ""  # which of its processes makes no progress, in words; empty: all do
    num_requests: int = 0
    num_tokens: int = 0  # of those: prompts, and what has come

    @property
    def is_active(self) -> bool:
        return self.is_there and not self.trouble


@dataclass(slots=True, eq=False)
class LiveRequest:
    """From `submit` to `EndRequest`."""

    request: Request
    dp_rank: int
    names: tuple[str, ...]
    request_id: str
    client: ClientId
    spoke_at: Nanos  # when it came, or its last token did
    give_up_at: Nanos  # by then the node must have spoken
    is_canary: bool
    may_move: bool = False
    num_tokens: int = 0  # that have come
    is_told: bool = False  # the node knows that nobody wants more tokens


@dataclass(slots=True)
class LiveRequests:
    """Of one life of one API process. All times are of one monotonic clock, which the shell reads."""

    num_ranks: int
    stall_ns: int  # between two tokens, and for a client that takes nothing
    method: LoadBalanceMethod = LoadBalanceMethod.ROUND_ROBIN  # how a request finds its rank, unless it names one
    rooms_move: bool = True  # see `dp_dispatch`
    force_query: bool = False  # decode asks for every room, also where it tells its rank
    is_draining: bool = False
    has_started: bool = False  # every rank has been there once
    ranks: list[LiveRank] = field(init=False)
    wake_at: Nanos | None = None
    succeeded: tuple[Path, Nanos] | None = None  # the last request that got its tokens, canaries aside, and when
    _live: dict[RequestId, LiveRequest] = field(default_factory=dict[RequestId, LiveRequest])
    _named: dict[str, list[RequestId]] = field(default_factory=dict[str, list[RequestId]])
    _in_rooms: dict[Room, list[RequestId]] = field(default_factory=dict[Room, list[RequestId]])
    _clients: dict[ClientId, dict[RequestId, None]] = field(default_factory=dict[ClientId, dict[RequestId, None]])
    _blocked: dict[ClientId, Nanos] = field(default_factory=dict[ClientId, Nanos])  # since when
    _next_rank: int = 0
    _last_id: int = 0
    _last_client: int = 0
    recorder: Recorder | None = None

    def __post_init__(self) -> None:
        self.ranks = [LiveRank() for _ in range(self.num_ranks)]
        if self.num_ranks == 1:
            self.method = LoadBalanceMethod.ROUND_ROBIN  # needs nothing of a request

    # what others ask

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def is_healthy(self) -> bool:
        return self.unacceptable() is None and self.is_any_active

    @property
    def is_any_active(self) -> bool:
        """In some rank all processes make progress, whether requests are accepted or not."""
        return any(rank.is_active for rank in self.ranks)

    def absence(self) -> Failure | None:
        """Why nobody can be asked: no rank is there, or at the start one is missing."""
        if self.has_started and any(rank.is_there for rank in self.ranks):
            return None
        loss = next(rank.loss for rank in self.ranks if not rank.is_there)
        return Failure(Problem.NOT_READY, loss or LOADING)

    def unacceptable(self) -> Failure | None:
        """Why nothing is accepted."""
        return Failure(Cause.DRAINING, SHUTTING_DOWN) if self.is_draining else self.absence()

    @recorded
    def next_id(self) -> RequestId:
        """For one more request, whether it is accepted or not."""
        self._last_id += 1
        return RequestId(self._last_id)

    # ranks

    @recorded
    def ready(self, dp_rank: int, prefill: PrefillInfo | None = None) -> None:
        """Its node is there. prefill: what it tells decode of the ranks of this server, if it may have rooms."""
        rank = self.ranks[dp_rank]
        rank.prefill = prefill
        rank.is_there, rank.loss, rank.trouble = True, "", ""
        self.has_started = self.has_started or all(rank.is_there for rank in self.ranks)

    @recorded
    def see_trouble(self, dp_rank: int, trouble: str, now: Nanos) -> list[Action]:
        """Whoever watches over this rank says which of its processes makes no progress; empty: all do. While one does
        not, it is said again and again, as it lasts longer. Where all ranks stand still a router knows by our health.
        """
        self.ranks[dp_rank].trouble = trouble
        if not trouble or not self.is_any_active:
            return []
        actions: list[Action] = []
        for live in [live for live in self._live.values() if live.dp_rank == dp_rank and self._is_to_move(live, now)]:
            request = live.request.id
            actions.append(TellNode(dp_rank, AbortRequested(request)))
            actions += self._end(live, FailRequest(request, Cause.WORKER_LOST, "node", trouble))
        return actions

    @recorded
    def lose(self, reason: str, dp_rank: int | None = None) -> list[Action]:
        """The node of this rank, or that of every rank, is gone, with everything it ran."""
        gone = range(self.num_ranks) if dp_rank is None else (dp_rank,)
        for number in gone:
            self.ranks[number].is_there, self.ranks[number].loss = False, reason
        left = next((number for number, rank in enumerate(self.ranks) if rank.is_there), None)
        actions: list[Action] = []
        for live in [live for live in self._live.values() if live.dp_rank in gone]:
            if left is not None:
                actions += self._close_room(live.request, left, Cause.WORKER_LOST, reason)
            actions += self._end(live, FailRequest(live.request.id, Cause.WORKER_LOST, "node", reason))
        return actions

    @recorded
    def drain(self) -> list[Action]:
        """Accept nothing any more; what runs goes on."""
        if self.is_draining:
            return []
        self.is_draining = True
        return [TellNode(dp_rank, DrainRequested()) for dp_rank in range(self.num_ranks)]

    # requests

    @recorded
    def submit(self, arrivals: Sequence[IncomingRequest], now: Nanos, *, is_canary: bool = False) -> Placed | Declined:
        """All samples of one client, or none. A canary, which is a probe's and no user's, takes any rank."""
        absence = self.absence()
        if absence is not None:
            return Declined(absence)
        failure = self.unacceptable() or self._name_in_use(arrivals)
        if failure is not None:
            return self._declined(arrivals, failure)
        ranks = self._ranks_for(arrivals, is_canary=is_canary)
        if not isinstance(ranks, Failure):
            ranks = self._room_in_use(arrivals, ranks) or ranks
        if isinstance(ranks, Failure):
            return self._declined(arrivals, ranks)
        tried_before = [live for arrival in arrivals for live in self._tried_before(arrival)]
        ended = [action for live in tried_before for action in self.abort(live.request.id, now)]
        self._last_client += 1
        client = ClientId(self._last_client)
        for arrival, dp_rank in zip(arrivals, ranks, strict=True):
            self._begin(arrival, dp_rank, client, now, is_canary=is_canary)
        return Placed(client, tuple(ranks), tuple(ended))

    @recorded
    def decline(self, arrivals: Sequence[IncomingRequest], cause: Cause, reason: str) -> list[Action]:
        """None of them is taken. The other half of a request must not wait for one that never was."""
        if self.absence() is not None:
            return []
        return [
            action
            for arrival, dp_rank in zip(arrivals, self._ranks_that_would_have(arrivals), strict=True)
            for action in self._close_room(arrival.request, dp_rank, cause, reason)
        ]

    @recorded
    def withdraw(self, client: ClientId, taken: Sequence[int], cause: Cause | None, reason: str = "") -> list[Action]:
        """What was just placed could not be given to all nodes; those of the ranks in `taken` have their share.

        None of it has an `EndRequest`: whoever submitted it knows. cause: what other halves hear; None: it cannot be
        said.
        """
        has_it = frozenset(taken)
        mine = [self._live[request] for request in self._clients[client]]
        actions: list[Action] = []
        for live in mine:
            self._forget(live)
            if live.dp_rank in has_it:
                actions.append(TellNode(live.dp_rank, AbortRequested(live.request.id)))
        if cause is not None:
            closed = [self._close_room(live.request, live.dp_rank, cause, reason) for live in mine]
            actions += [action for each in closed for action in each]
        return actions

    @recorded
    def emitted(self, requests: Sequence[RequestId], now: Nanos) -> Sequence[int]:
        """A token has come for each of these. Returns the positions of those who still wait for one."""
        give_up_at = Nanos(now + self.stall_ns + SILENCE_GRACE_NS)
        found: list[int] = []
        for position, request in enumerate(requests):
            live = self._live.get(request)
            if live is None:
                continue
            live.num_tokens += 1
            live.spoke_at = now
            self.ranks[live.dp_rank].num_tokens += 1
            if not live.is_told:
                live.give_up_at = give_up_at
            found.append(position)
        if found and (self.wake_at is None or give_up_at < self.wake_at):
            self.wake_at = give_up_at
        return found

    @recorded
    def ended(self, terminal: FinishRequest | FailRequest, now: Nanos) -> list[Action]:
        """Its node has said its last word."""
        live = self._live.get(terminal.request)
        if live is None:
            return []
        if isinstance(terminal, FinishRequest) and not live.is_canary:
            self.succeeded = (terminal.path, now)
        return self._end(live, terminal)

    @recorded
    def stop(self, request: RequestId, now: Nanos) -> list[Action]:
        """Its text is complete: a stop string was found. Its `EndRequest` still comes."""
        live = self._live.get(request)
        if live is None or live.is_told:
            return []
        self._hurry(live, now)
        return [TellNode(live.dp_rank, StopMatched(request))]

    @recorded
    def abort(self, request: RequestId, now: Nanos, cause: Cause = Cause.ABORTED) -> list[Action]:
        """Nobody wants it any more. Its `EndRequest` still comes. Empty if it was told to end before."""
        live = self._live.get(request)
        if live is None or live.is_told:
            return []
        self._hurry(live, now)
        return [TellNode(live.dp_rank, AbortRequested(request, cause))]

    @recorded
    def abort_named(self, name: str, now: Nanos) -> list[Action]:
        """By exact rid."""
        return [action for request in list(self._named.get(name, ())) for action in self.abort(request, now)]

    @recorded
    def abort_all(self, now: Nanos, cause: Cause = Cause.ABORTED) -> list[Action]:
        return [action for request in list(self._live) for action in self.abort(request, now, cause)]

    # clients

    @recorded
    def leave(self, client: ClientId, now: Nanos) -> list[Action]:
        """It has left, or its answer is over: nobody wants what still runs for it."""
        self._blocked.pop(client, None)
        mine = list(self._clients.get(client, ()))
        return [action for request in mine for action in self.abort(request, now)]

    @recorded
    def blocked(self, client: ClientId, now: Nanos) -> None:
        """It is being written to. Until `reads` nothing is known to have been taken."""
        self._blocked[client] = now
        cut_at = Nanos(now + self.stall_ns)
        if self.wake_at is None or cut_at < self.wake_at:
            self.wake_at = cut_at

    @recorded
    def reads(self, client: ClientId) -> None:
        """It has taken what was written."""
        self._blocked.pop(client, None)

    # time

    @recorded
    def wake(self, now: Nanos) -> list[Action]:
        """Ends those on whom their node keeps silent, and cuts those off who take nothing."""
        if self.wake_at is None or now < self.wake_at:
            return []  # it looked earlier than it had to
        actions: list[Action] = []
        for client in [client for client, since in self._blocked.items() if since + self.stall_ns <= now]:
            actions += [CloseConnection(client), *self.leave(client, now)]
        for live in [live for live in self._live.values() if live.give_up_at <= now]:
            request, cause = live.request.id, Cause.DEADLINE_EXCEEDED
            actions.append(TellNode(live.dp_rank, AbortRequested(request, cause)))
            waited_ns = Nanos(now - live.spoke_at)
            actions += self._end(live, FailRequest(request, cause, "node", "the node kept silent", waited_ns=waited_ns))
        self.wake_at = self._next_look(now)
        return actions

    def _next_look(self, now: Nanos) -> Nanos | None:
        times = [live.give_up_at for live in self._live.values()]
        times += [Nanos(since + self.stall_ns) for since in self._blocked.values()]
        return Nanos(max(min(times), now + SWEEP_NS)) if times else None

    # inside

    def _begin(self, arrival: IncomingRequest, dp_rank: int, client: ClientId, now: Nanos, *, is_canary: bool) -> None:
        request = arrival.request
        give_up_at = Nanos(now + request.timeout_ns + SILENCE_GRACE_NS)
        live = LiveRequest(
            request, dp_rank, arrival.names, arrival.request_id, client, now, give_up_at, is_canary, arrival.may_move
        )
        self._live[request.id] = live
        self._clients.setdefault(client, {})[request.id] = None
        for name in live.names:
            self._named.setdefault(name, []).append(request.id)
        if request.room is not None:
            self._in_rooms.setdefault(request.room, []).append(request.id)
        rank = self.ranks[dp_rank]
        rank.num_requests += 1
        rank.num_tokens += request.prompt_len
        if self.wake_at is None or give_up_at < self.wake_at:
            self.wake_at = give_up_at

    def _is_to_move(self, live: LiveRequest, now: Nanos) -> bool:
        return live.may_move and live.num_tokens > 0 and not live.is_told and live.spoke_at + QUIET_NS <= now

    def _hurry(self, live: LiveRequest, now: Nanos) -> None:
        live.is_told = True
        live.give_up_at = Nanos(min(live.give_up_at, now + self.stall_ns))
        if self.wake_at is None or live.give_up_at < self.wake_at:
            self.wake_at = live.give_up_at

    def _end(self, live: LiveRequest, terminal: FinishRequest | FailRequest) -> list[Action]:
        self._forget(live)
        return [EndRequest(terminal)]

    def _forget(self, live: LiveRequest) -> None:
        del self._live[live.request.id]
        mine = self._clients[live.client]
        del mine[live.request.id]
        if not mine:
            del self._clients[live.client]
        rank = self.ranks[live.dp_rank]
        rank.num_requests -= 1
        rank.num_tokens -= live.request.prompt_len + live.num_tokens
        for name in live.names:
            drop(self._named, name, live.request.id)
        if live.request.room is not None:
            drop(self._in_rooms, live.request.room, live.request.id)

    def _name_in_use(self, arrivals: Sequence[IncomingRequest]) -> Failure | None:
        """Not by one that has been told to end, or is about to be (`_tried_before`)."""
        for arrival in arrivals:
            tried_before = {live.request.id for live in self._tried_before(arrival)}
            for name in arrival.names:
                others = [self._live[request] for request in self._named.get(name, ())]
                if any(not other.is_told and other.request.id not in tried_before for other in others):
                    reason = f"rid {name!r} is in use by a request that is still running"
                    return Failure(Problem.DUPLICATE_RID, reason, "rid")
        return None

    def _tried_before(self, arrival: IncomingRequest) -> list[LiveRequest]:
        """A router tries it again, and we do not know yet that it has given up: its connection broke without a word."""
        named = {request: None for name in arrival.names for request in self._named.get(name, ())}
        return [live for live in map(self._live.__getitem__, named) if arrival.request_id == live.request_id != ""]

    def _room_in_use(self, arrivals: Sequence[IncomingRequest], ranks: Sequence[int]) -> Failure | None:
        """On another rank; its own one sees for itself. Decode must not be led from a request that runs to this one."""
        for arrival, dp_rank in zip(arrivals, ranks, strict=True):
            there = self._in_rooms.get(arrival.request.room, ()) if arrival.request.room is not None else ()
            if any(self._live[request].dp_rank != dp_rank for request in there):
                return Failure(Cause.DUPLICATE_ROOM, f"room {arrival.request.room} is in use", "bootstrap_room")
        return None

    def _ranks_for(self, arrivals: Sequence[IncomingRequest], *, is_canary: bool) -> list[int] | Failure:
        """A failure changes nothing."""
        # Where in every rank something hangs, each still gets its own: it may go on.
        is_any_active = self.is_any_active
        now = [
            DispatchLoad(rank.num_requests, rank.num_tokens, self._is_usable(rank, is_any_active))
            for rank in self.ranks
        ]
        loads = Loads(tuple(now), self._next_rank)
        method = LoadBalanceMethod.TOTAL_REQUESTS if is_canary else self.method
        found: list[int] = []
        for arrival in arrivals:
            newcomer = Newcomer(arrival.request.prompt_len, arrival.request.room, arrival.routed)
            chosen, loads = dispatch(newcomer, loads, method, moves=self.rooms_move)
            if isinstance(chosen, Refused):
                return self._refusal_of(chosen, arrival)
            found.append(chosen.rank)
        self._next_rank = loads.next_rank
        return found

    def _refusal_of(self, chosen: Refused, arrival: IncomingRequest) -> Failure:
        """A rank that never will be is the user's mistake; one that is not there now is ours."""
        if chosen.reason == NO_ROOM:
            return Failure(Problem.INVALID_VALUE, f"bootstrap_room: {chosen.reason}", "bootstrap_room")
        if arrival.routed is not None and not 0 <= arrival.routed < self.num_ranks:
            return Failure(Problem.INVALID_VALUE, chosen.reason, "routed_dp_rank")
        return Failure(Problem.NOT_READY, chosen.reason)

    def _is_usable(self, rank: LiveRank, is_any_active: bool) -> bool:
        return rank.is_active if is_any_active else rank.is_there

    def _ranks_that_would_have(self, arrivals: Sequence[IncomingRequest]) -> list[int]:
        """Where the other half of each looks for it. Takes no turn of the round robin."""
        turn = self._next_rank
        found = [self._ranks_for([arrival], is_canary=False) for arrival in arrivals]
        self._next_rank = turn
        anybody = next(number for number, rank in enumerate(self.ranks) if rank.is_there)
        return [anybody if isinstance(ranks, Failure) else ranks[0] for ranks in found]

    def _declined(self, arrivals: Sequence[IncomingRequest], failure: Failure) -> Declined:
        return Declined(failure, tuple(self.decline(arrivals, declined_as(failure), failure.message)))

    def _close_room(self, request: Request, dp_rank: int, cause: Cause, reason: str) -> list[Action]:
        """Whoever asks for the room of this request is told by this rank that there is nothing; unless one that runs
        has the same room."""
        if request.room is None or any(other != request.id for other in self._in_rooms.get(request.room, ())):
            return []
        bare = structs.replace(request, page_hashes=())  # it has no page, and may be of any length
        told: list[Action] = [TellNode(dp_rank, RequestRefused(bare, cause, reason))]
        prefill = self.ranks[dp_rank].prefill
        if request.peer is None and prefill is not None and dp_rank < prefill.dp_size > 1:
            facts = RequestFacts(request.room, request.dp_rank_hint)
            found = settle(facts, prefill, actual=dp_rank, force_query=self.force_query)
            if not isinstance(found, Quiet):
                told.append(AnnounceDpRank(request.room, dp_rank, found.sought))
        return told


def drop(table: dict[Name, list[RequestId]], name: Name, request: RequestId) -> None:
    """One of those of this name; the name with the last of them."""
    table[name].remove(request)
    if not table[name]:
        del table[name]


def declined_as(failure: Failure) -> Cause:
    """What the other half hears."""
    return failure.code if isinstance(failure.code, Cause) else Cause.PEER_ABORTED
