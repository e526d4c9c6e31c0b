"""Asks the bootstrap servers of prefills what decode's node wants to know: who is there, which DP rank has a room.

    learn       one question per address at a time, about one rank; whoever asks the same meanwhile gets its answer
    ask_rank    the rooms that wait at one address are asked for in one body, the first at once, the next after an
                interval; a room that is not known there (yet) is answered with None

Every question is answered by an event, and no question is repeated here: asking again is the node's business.

Clients name the addresses, and an address may keep silent. So no question waits for another address (`Lanes`): there
is room for many, and where there is none the oldest silent one is given up, or else the newcomer refused at once.
What an address answers is said of that address and remembered for none.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from tandem.core import events
from tandem.core.disagg import layout_check
from tandem.core.values import Address, Room
from tandem.logtext import visible
from tandem.server import wire
from tandem.server.api.bootstrap import MAX_ROOMS_PER_QUERY
from tandem.server.api.hosts import EVERY_HOST, HostRefused, Hosts
from tandem.server.api.http_exchange import ExchangeError, exchange
from tandem.server.api.question_lanes import LaneRefused, Lanes
from tandem.server.documents import BadDocument, one_line, read_ranks, read_replica

ANSWER_SECONDS = 2.0
RANK_INTERVAL_SECONDS = 0.1  # between two queries for rooms at one address
MAX_RANKS_WAITING = 64  # questions about DP ranks of one address
MAX_ROOMS_WAITING = 65_536  # at one address
MAX_ROOM_ADDRESSES = 4096  # where rooms are asked for
MAX_TROUBLE_CHARS = 800  # a host, and what is wrong there

SILENCE = (LaneRefused, HostRefused, OSError)  # no answer at all
Report = Callable[[wire.Connect | events.PeerLearned | events.PeerUnknown | events.DpRankAnswered], None]
Question = tuple[Address, int | None]


@dataclass(slots=True)
class BootstrapClient:
    """Everything here runs on the event loop."""

    hosts: Hosts
    own: Callable[[], wire.ReplicaInfo | None]  # of this decode, whose layout is compared
    report: Report
    interval_s: float = RANK_INTERVAL_SECONDS
    answer_s: float = ANSWER_SECONDS
    lanes: Lanes = field(default_factory=Lanes)
    _waiting: dict[Address, deque[int | None]] = field(default_factory=dict)  # the first of each is being asked
    _rooms: dict[Address, dict[Room, None]] = field(default_factory=dict)  # that wait for the next query
    _tasks: dict[asyncio.Task[None], None] = field(default_factory=dict)

    def learn(self, address: Address, dp_rank: int | None) -> None:
        waiting = self._waiting.get(address)
        if waiting is None:
            self._waiting[address] = deque([dp_rank])
            self._begin(self._learn_all(address))
        elif dp_rank in waiting:
            return  # the answer that is awaited is the answer to this one too
        elif len(waiting) >= MAX_RANKS_WAITING:
            refused = LaneRefused(f"{MAX_RANKS_WAITING} questions wait for an answer from there")
            self.report(events.PeerUnknown(address, trouble_at(address, refused), dp_rank))
        else:
            waiting.append(dp_rank)

    def ask_rank(self, address: Address, room: Room) -> None:
        rooms = self._rooms.get(address)
        if len(rooms or ()) >= MAX_ROOMS_WAITING or (rooms is None and len(self._rooms) >= MAX_ROOM_ADDRESSES):
            self.report(events.DpRankAnswered(address, room, None))
            return
        if rooms is None:
            rooms = self._rooms[address] = {}
            self._begin(self._ask_ranks(address, rooms))
        rooms[room] = None

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    # --- who is there ------------------------------------------------------------------------------------------------

    async def _learn_all(self, address: Address) -> None:
        waiting = self._waiting[address]
        try:
            while waiting:
                silence = await self._learn(address, waiting[0])
                waiting.popleft()
                while silence and waiting:  # who asks for another rank there need not wait for the same
                    self.report(events.PeerUnknown(address, silence, waiting.popleft()))
        finally:
            del self._waiting[address]

    async def _learn(self, address: Address, dp_rank: int | None) -> str:
        """Why nobody can be asked there, or nothing."""
        try:
            replica = await self._fetch_replica(address, dp_rank)
            learned = events.PeerLearned(
                address,
                replica.incarnation,
                replica.layout,
                self._differences(replica),
                replica.dp_rank,
                replica.prefill,
            )
        except Exception as error:  # whatever it is, it has to do with this address and ends there
            trouble = trouble_at(address, error)
            self.report(events.PeerUnknown(address, trouble, dp_rank))
            return trouble if isinstance(error, SILENCE) else ""
        self.report(wire.Connect(address, replica))
        self.report(learned)
        return ""

    def _differences(self, replica: wire.ReplicaInfo) -> str:
        """What a user has to change before KV can travel, in words; empty where the layouts are equal."""
        own = self.own()
        if own is None or own.layout == replica.layout:
            return ""
        found = layout_check.differences(replica.layout_fields, own.layout_fields, them="prefill", us="decode")
        return one_line(found)

    async def _fetch_replica(self, address: Address, dp_rank: int | None) -> wire.ReplicaInfo:
        path = "/route" if dp_rank is None else f"/route?prefill_dp_rank={dp_rank}"
        body, host = await self._call(address, "GET", path)
        replica = read_replica(body)
        if dp_rank not in (None, replica.dp_rank):
            raise BadDocument(f"asked for {dp_rank}, told of {replica.dp_rank}", "dp_rank")
        return self._reachable(replica, host)

    def _reachable(self, replica: wire.ReplicaInfo, found_at: str) -> wire.ReplicaInfo:
        """A server that listens everywhere cannot name an address of itself: it is the one where it was found."""

        def checked(named: str, field: str) -> str:
            if named in EVERY_HOST:
                return found_at
            self.hosts.check_peer(named, found_at=found_at, field=field)
            return named

        shards = tuple(
            msgspec.structs.replace(shard, host=checked(shard.host, f"shards[{index}].host"))
            for index, shard in enumerate(replica.shards)
        )
        control_host = checked(replica.control_host, "control_host")
        return msgspec.structs.replace(replica, control_host=control_host, shards=shards)

    # --- which rank has a room ---------------------------------------------------------------------------------------

    async def _ask_ranks(self, address: Address, rooms: dict[Room, None]) -> None:
        """Until no room waits. Rooms that are asked for while a query is under way go into the next one."""
        try:
            while rooms:
                asked = list(islice(rooms, MAX_ROOMS_PER_QUERY))
                for room in asked:
                    del rooms[room]
                try:
                    found = await self._query_ranks(address, asked)
                except Exception as error:  # as above
                    self.report(events.PeerUnknown(address, trouble_at(address, error)))
                    found = {}
                for room in asked:
                    self.report(events.DpRankAnswered(address, room, found.get(room)))
                await asyncio.sleep(self.interval_s)
        finally:
            del self._rooms[address]

    async def _query_ranks(self, address: Address, rooms: Sequence[Room]) -> dict[Room, int]:
        body = msgspec.json.encode({"bootstrap_rooms": rooms})
        answer, _ = await self._call(address, "POST", "/query_dp_ranks", body)
        return read_ranks(answer, rooms)

    # --- HTTP --------------------------------------------------------------------------------------------------------

    async def _call(self, address: Address, method: str, path: str, body: bytes | None = None) -> tuple[bytes, str]:
        """The answer, and the address where it came from. Raises what `trouble_at` can put in words."""
        async with self.lanes.lane(address) as lane, asyncio.timeout(self.answer_s):
            candidates = await self.hosts.addresses(address.host)
            for host in candidates[:-1]:
                try:
                    answer = await self._call_at(host, address.port, method, path, body, share=len(candidates))
                    break
                except OSError:
                    pass  # a name may have addresses of both families, and the server listen on one
            else:
                host = candidates[-1]
                answer = await self._call_at(host, address.port, method, path, body)
            lane.has_answered = True
            return answer, host

    async def _call_at(self, host: str, port: int, method: str, path: str, body: bytes | None, share: int = 1) -> bytes:
        connect_s = self.answer_s / share
        answer = await exchange(host, port, method, path, body=body, timeout_s=self.answer_s, connect_s=connect_s)
        if answer.status != 200:
            raise ExchangeError(f"{method} {path} answered {answer.status}")
        return answer.body


def trouble_at(address: Address, error: BaseException) -> str:
    """One line for the client."""
    match error:
        case TimeoutError():
            text = f"no answer within {ANSWER_SECONDS:g} s"
        case LaneRefused() | HostRefused() | OSError() | ExchangeError() | BadDocument():
            text = str(error)
        case _:
            text = f"its answer cannot be read ({type(error).__name__})"
    return visible(f"bootstrap server {address.host}:{address.port}: {text}", most=MAX_TROUBLE_CHARS)
