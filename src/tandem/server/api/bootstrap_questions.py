"""What decode asks bootstrap servers, and when: who is there, which DP rank has a room. Also what a prefill registers.

A machine: it is told what its node wants to know and what calls bring, with the time in ns, and returns what is to be
done, in order: *calls* to make (`FetchReplica`, `FetchRanks`), calls to give up, and news for the node. It owns no
socket, task or clock, so the simulator drives the very object that serves.

    learn       one call per address at a time, about one rank; whoever asks the same meanwhile gets its answer
    ask_rank    the rooms that wait at one address go into one call, the first ones at the next `tick`, which is due at
                once, the next after an interval; a room that is not known there (yet) is answered with None

Every question is answered, a silent call after `answer_ns`, and no question is repeated here: asking again is the
node's business.

Clients name the addresses, and an address may keep silent. So no question waits for another address (`Lanes`): there
is room for many, and where there is none the oldest silent one is given up, or else the newcomer refused at once.
What an address answers is said of that address and remembered for none.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice

import msgspec
from msgspec import Struct

from tandem.core.bootstrap_registry import Registration
from tandem.core.disagg import layout_check
from tandem.core.events import DpRankAnswered, PeerLearned, PeerUnknown
from tandem.core.settings import PrefillInfo
from tandem.core.values import MILLISECOND, SECOND, ZERO_NS, Address, Nanos, Room
from tandem.logtext import visible
from tandem.server.api.question_lanes import LaneRefused, Lanes
from tandem.server.wire import Connect, ReplicaInfo

ANSWER_NS = Nanos(2 * SECOND)
RANK_INTERVAL_NS = Nanos(100 * MILLISECOND)  # between two queries for rooms at one address
MAX_RANKS_WAITING = 64  # questions about DP ranks of one address
MAX_ROOMS_WAITING = 65_536  # at one address
MAX_ROOM_ADDRESSES = 4096  # where rooms are asked for
MAX_ROOMS_PER_QUERY = 4096
MAX_TROUBLE_CHARS = 800  # a host, and what is wrong there
MAX_DIFFERENCE_CHARS = 200


class FetchReplica(Struct, frozen=True):
    """Call `found` with what is there, or `failed`. dp_rank None: any rank."""

    number: int
    address: Address
    dp_rank: int | None


class FetchRanks(Struct, frozen=True):
    """Call `told` with the rooms that are known there and what the prefill says of itself, or `failed`."""

    number: int
    address: Address
    rooms: tuple[Room, ...]


class GiveUp(Struct, frozen=True):
    """Nobody waits for this call any more. What it still brings is ignored."""

    number: int


Call = FetchReplica | FetchRanks
News = Connect | PeerLearned | PeerUnknown | DpRankAnswered  # for the node
Actions = list[Call | GiveUp | News]


@dataclass(slots=True)
class UnderWay:
    call: Call
    expires_at: Nanos


@dataclass(slots=True)
class BootstrapQuestions:
    own: Callable[[], ReplicaInfo | None]  # of this decode, whose layout is compared
    interval_ns: Nanos = RANK_INTERVAL_NS
    answer_ns: Nanos = ANSWER_NS
    lanes: Lanes = field(default_factory=Lanes)
    _calls: dict[int, UnderWay] = field(default_factory=dict[int, UnderWay])  # the first expires first
    _num_calls: int = 0
    _ranks: dict[Address, deque[int | None]] = field(default_factory=dict[Address, deque[int | None]])  # first: asked
    _rooms: dict[Address, dict[Room, None]] = field(
        default_factory=dict[Address, dict[Room, None]]
    )  # for the next call
    _fresh: dict[Address, None] = field(default_factory=dict[Address, None])  # rooms that nobody has asked for yet
    _pauses: dict[Address, Nanos] = field(default_factory=dict[Address, Nanos])  # until when; the first ends first

    # --- what the node wants to know ---------------------------------------------------------------------------------

    def learn(self, address: Address, dp_rank: int | None, now: Nanos) -> Actions:
        waiting = self._ranks.get(address)
        if waiting is None:
            self._ranks[address] = deque([dp_rank])
            return self._ask_replica(address, now)
        if dp_rank in waiting:
            return []  # the answer that is awaited is the answer to this one too
        if len(waiting) >= MAX_RANKS_WAITING:
            refused = f"{MAX_RANKS_WAITING} questions wait for an answer from there"
            return [PeerUnknown(address, trouble_at(address, refused), dp_rank)]
        waiting.append(dp_rank)
        return []

    def ask_rank(self, address: Address, room: Room) -> Actions:
        rooms = self._rooms.get(address)
        if len(rooms or ()) >= MAX_ROOMS_WAITING or (rooms is None and len(self._rooms) >= MAX_ROOM_ADDRESSES):
            return [DpRankAnswered(address, room, None)]
        if rooms is None:
            rooms = self._rooms[address] = {}
            self._fresh[address] = None
        rooms[room] = None
        return []

    # --- what calls bring --------------------------------------------------------------------------------------------

    def found(self, number: int, replica: ReplicaInfo, now: Nanos) -> Actions:
        call = self._end(number, has_answered=True)
        if call is None:
            return []
        assert isinstance(call, FetchReplica)
        if call.dp_rank not in (None, replica.dp_rank):
            mistaken = f"dp_rank: asked for {call.dp_rank}, told of {replica.dp_rank}"
            return self._learned_nothing(call, mistaken, now, is_silent=False)
        learned = PeerLearned(
            call.address,
            replica.incarnation,
            replica.layout,
            self._differences(replica),
            replica.dp_rank,
            replica.prefill,
        )
        return [Connect(call.address, replica), learned, *self._next_replica(call.address, now)]

    def told(
        self,
        number: int,
        ranks: Mapping[Room, int],
        prefill: PrefillInfo | None,
        now: Nanos,
        *,
        age_ns: Nanos | None = None,
    ) -> Actions:
        call = self._end(number, has_answered=True)
        if call is None:
            return []
        assert isinstance(call, FetchRanks)
        return self._answer_rooms(call, ranks, prefill, now, age_ns)

    def failed(self, number: int, trouble: str, now: Nanos, *, is_silent: bool) -> Actions:
        """`is_silent`: nobody answered at all, so nobody else need wait for an answer from there."""
        call = self._end(number, has_answered=not is_silent)
        return [] if call is None else self._answered_nothing(call, trouble, now, is_silent=is_silent)

    # --- time --------------------------------------------------------------------------------------------------------

    def next_deadline(self) -> Nanos | None:
        """When `tick` has something to do; it may have passed."""
        if self._fresh:
            return ZERO_NS
        calls, pauses = next(iter(self._calls.values()), None), next(iter(self._pauses.values()), None)
        deadlines = [pauses, None if calls is None else calls.expires_at]
        return min((at for at in deadlines if at is not None), default=None)

    def tick(self, now: Nanos) -> Actions:
        actions: Actions = []
        while self._calls and next(iter(self._calls.values())).expires_at <= now:
            silence = f"no answer within {self.answer_ns / SECOND:g} s"
            actions += self._give_up(next(iter(self._calls)), silence, now)
        due = list(self._fresh)
        self._fresh.clear()
        while self._pauses and next(iter(self._pauses.values())) <= now:
            due.append(next(iter(self._pauses)))
            del self._pauses[due[-1]]
        for address in due:
            actions += self._ask_ranks(address, now)
        return actions

    # --- who is there ------------------------------------------------------------------------------------------------

    def _ask_replica(self, address: Address, now: Nanos) -> Actions:
        return self._call(FetchReplica(self._new_number(), address, self._ranks[address][0]), now)

    def _next_replica(self, address: Address, now: Nanos) -> Actions:
        """The first rank that was waited for has its answer."""
        waiting = self._ranks[address]
        waiting.popleft()
        if waiting:
            return self._ask_replica(address, now)
        del self._ranks[address]
        return []

    def _learned_nothing(self, call: FetchReplica, trouble: str, now: Nanos, *, is_silent: bool) -> Actions:
        text = trouble_at(call.address, trouble)
        if not is_silent:
            unknown = PeerUnknown(call.address, text, call.dp_rank)
            return [unknown, *self._next_replica(call.address, now)]
        return [PeerUnknown(call.address, text, dp_rank) for dp_rank in self._ranks.pop(call.address)]

    def _differences(self, replica: ReplicaInfo) -> str:
        """What a user has to change before KV can travel, in words; empty where the layouts are equal."""
        own = self.own()
        if own is None or own.layout == replica.layout:
            return ""
        found = layout_check.differences(replica.layout_fields, own.layout_fields, them="prefill", us="decode")
        return visible(found, most=MAX_DIFFERENCE_CHARS)

    # --- which rank has a room ---------------------------------------------------------------------------------------

    def _ask_ranks(self, address: Address, now: Nanos) -> Actions:
        """Rooms that are asked for while a call is under way go into the next one."""
        rooms = self._rooms[address]
        if not rooms:
            del self._rooms[address]
            return []
        asked = tuple(islice(rooms, MAX_ROOMS_PER_QUERY))
        for room in asked:
            del rooms[room]
        return self._call(FetchRanks(self._new_number(), address, asked), now)

    def _answer_rooms(
        self,
        call: FetchRanks,
        ranks: Mapping[Room, int],
        prefill: PrefillInfo | None,
        now: Nanos,
        age_ns: Nanos | None = None,
    ) -> Actions:
        self._pauses[call.address] = Nanos(now + self.interval_ns)
        return [DpRankAnswered(call.address, room, ranks.get(room), prefill, age_ns) for room in call.rooms]

    # --- calls -------------------------------------------------------------------------------------------------------

    def _new_number(self) -> int:
        self._num_calls += 1
        return self._num_calls

    def _call(self, call: Call, now: Nanos) -> Actions:
        """Make it, unless too many are silent; the oldest of those may have to go."""
        try:
            oldest = self.lanes.enter(call.number, call.address, now)
        except LaneRefused as refused:
            return self._answered_nothing(call, str(refused), now, is_silent=True)
        actions: Actions = []
        if oldest is not None:
            actions = self._give_up(oldest, "it kept silent while others had to be asked", now)
        self._calls[call.number] = UnderWay(call, Nanos(now + self.answer_ns))
        return [*actions, call]

    def _give_up(self, number: int, silence: str, now: Nanos) -> Actions:
        return [GiveUp(number), *self.failed(number, silence, now, is_silent=True)]

    def _end(self, number: int, *, has_answered: bool) -> Call | None:
        """None: it was given up."""
        under_way = self._calls.pop(number, None)
        if under_way is None:
            return None
        self.lanes.leave(number, under_way.call.address, has_answered=has_answered)
        return under_way.call

    def _answered_nothing(self, call: Call, trouble: str, now: Nanos, *, is_silent: bool) -> Actions:
        if isinstance(call, FetchReplica):
            return self._learned_nothing(call, trouble, now, is_silent=is_silent)
        unknown = PeerUnknown(call.address, trouble_at(call.address, trouble))
        return [unknown, *self._answer_rooms(call, {}, None, now)]


def trouble_at(address: Address, text: str) -> str:
    """One line for the client."""
    return visible(f"bootstrap server {address.host}:{address.port}: {text}", most=MAX_TROUBLE_CHARS)


def registration(replica: ReplicaInfo) -> Registration:
    """What a rank of a prefill puts into the registry that its bootstrap server answers from."""
    return Registration(
        who=replica.incarnation,
        dp_rank=replica.dp_rank,
        prefill=replica.prefill,
        layout_fields=replica.layout_fields,
        document=msgspec.json.encode(replica),
    )
