"""Asks the bootstrap servers of prefills what decode's node wants to know: who is there, which DP rank has a room.

    learn       one question per address and rank at a time: whoever asks meanwhile gets the same answer
    ask_rank    the rooms that wait at one address are asked for in one body, the first at once, the next after an
                interval; a room that is not known there (yet) is answered with None

Every question is answered by an event, and no question is repeated here: asking again is the node's business.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import httpx
import msgspec

from tandem.core import events
from tandem.core.pd import layout_check
from tandem.core.values import Address, Room
from tandem.server import wire
from tandem.server.api.bootstrap import MAX_ROOMS_PER_QUERY
from tandem.server.api.hosts import EVERY_HOST, HostRefused, Hosts

ANSWER_SECONDS = 2.0
RANK_INTERVAL_SECONDS = 0.1  # between two queries for rooms at one address
MAX_QUESTIONS = 16  # to bootstrap servers at a time ...
MAX_ADDRESSES = 1024  # ... and waiting or running
MAX_ANSWER_BYTES = 1 << 20

TROUBLE = (httpx.HTTPError, httpx.InvalidURL, HostRefused, TimeoutError, msgspec.MsgspecError, ValueError, OSError)
Question = tuple[Address, int | None]


@dataclass(slots=True)
class BootstrapClient:
    """Everything here runs on the event loop."""

    hosts: Hosts
    own: Callable[[], wire.ReplicaInfo | None]  # of this decode, whose layout is compared
    report: Callable[[wire.Connect | events.PeerLearned | events.PeerUnknown | events.DpRankAnswered], None]
    interval_s: float = RANK_INTERVAL_SECONDS
    _learning: dict[Question, asyncio.Task[None]] = field(default_factory=dict)
    _asking: dict[Address, asyncio.Task[None]] = field(default_factory=dict)
    _rooms: dict[Address, dict[Room, None]] = field(default_factory=dict)  # that wait for the next query
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_QUESTIONS))
    _http: httpx.AsyncClient | None = None

    def learn(self, address: Address, dp_rank: int | None) -> None:
        question = (address, dp_rank)
        if question in self._learning:
            return  # the question under way is the answer to this one too
        if len(self._learning) >= MAX_ADDRESSES:
            self.report(events.PeerUnknown(address, f"{MAX_ADDRESSES} other bootstrap servers are being asked"))
            return
        self._learning[question] = asyncio.get_running_loop().create_task(self._learn(address, dp_rank))

    def ask_rank(self, address: Address, room: Room) -> None:
        if address not in self._asking:
            if len(self._asking) >= MAX_ADDRESSES:
                self.report(events.DpRankAnswered(address, room, None))
                return
            self._rooms[address] = {}
            self._asking[address] = asyncio.get_running_loop().create_task(self._ask_ranks(address))
        self._rooms[address][room] = None

    async def close(self) -> None:
        tasks = [*self._learning.values(), *self._asking.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._http is not None:
            await self._http.aclose()
            self._http = None

    # --- who is there ------------------------------------------------------------------------------------------------

    async def _learn(self, address: Address, dp_rank: int | None) -> None:
        try:
            replica = await self._fetch_replica(address, dp_rank)
        except TROUBLE as error:
            self.report(events.PeerUnknown(address, trouble_at(address, error), dp_rank))
        else:
            self.report(wire.Connect(address, replica))
            self.report(
                events.PeerLearned(
                    address,
                    replica.incarnation,
                    replica.layout,
                    self._differences(replica),
                    replica.dp_rank,
                    replica.prefill,
                )
            )
        finally:
            del self._learning[address, dp_rank]

    def _differences(self, replica: wire.ReplicaInfo) -> str:
        """What a user has to change before KV can travel, in words; empty where the layouts are equal."""
        own = self.own()
        if own is None or own.layout == replica.layout:
            return ""
        return layout_check.differences(replica.layout_fields, own.layout_fields, them="prefill", us="decode")

    async def _fetch_replica(self, address: Address, dp_rank: int | None) -> wire.ReplicaInfo:
        path = "/route" if dp_rank is None else f"/route?prefill_dp_rank={dp_rank}"
        body, host = await self._call(address, "GET", path)
        replica = msgspec.json.decode(body, type=wire.ReplicaInfo)
        if replica.role != "prefill":
            raise ValueError(f"the server there has the role {replica.role}, not prefill")
        if dp_rank not in (None, replica.dp_rank):
            raise ValueError(f"asked for DP rank {dp_rank}, told of {replica.dp_rank}")
        return reachable(replica, host)

    # --- which rank has a room ---------------------------------------------------------------------------------------

    async def _ask_ranks(self, address: Address) -> None:
        """Until no room waits. Rooms that are asked for while a query is under way go into the next one."""
        rooms = self._rooms[address]
        try:
            while rooms:
                asked = list(islice(rooms, MAX_ROOMS_PER_QUERY))
                for room in asked:
                    del rooms[room]
                try:
                    found = await self._query_ranks(address, asked)
                except TROUBLE as error:
                    self.report(events.PeerUnknown(address, trouble_at(address, error)))
                    found = {}
                for room in asked:
                    self.report(events.DpRankAnswered(address, room, found.get(room)))
                await asyncio.sleep(self.interval_s)
        finally:
            del self._rooms[address], self._asking[address]

    async def _query_ranks(self, address: Address, rooms: Sequence[Room]) -> dict[Room, int]:
        body = msgspec.json.encode({"bootstrap_rooms": rooms})
        answer, _ = await self._call(address, "POST", "/query_dp_ranks", body)
        found = msgspec.json.decode(answer, type=dict[str, int])
        if any(rank < 0 for rank in found.values()):
            raise ValueError("told of a negative DP rank")
        return {Room(int(room)): rank for room, rank in found.items()}

    # --- HTTP --------------------------------------------------------------------------------------------------------

    async def _call(self, address: Address, method: str, path: str, body: bytes | None = None) -> tuple[bytes, str]:
        """The answer, and the address where it came from. Raises one of TROUBLE."""
        async with self._slots, asyncio.timeout(ANSWER_SECONDS):
            candidates = await self.hosts.addresses(address.host)
            for host in candidates[:-1]:
                try:
                    return await self._call_at(host, address.port, method, path, body, share=len(candidates)), host
                except (httpx.ConnectError, httpx.ConnectTimeout):
                    pass  # a name may have addresses of both families, and the server listen on one
            return await self._call_at(candidates[-1], address.port, method, path, body), candidates[-1]

    async def _call_at(self, host: str, port: int, method: str, path: str, body: bytes | None, share: int = 1) -> bytes:
        if self._http is None:
            # trust_env=False: a proxy meant for the outside must not see, or break, traffic between the two halves
            # verify=False: there is no TLS here, and reading the CA store would cost the first request 30 ms
            self._http = httpx.AsyncClient(trust_env=False, follow_redirects=False, verify=False)
        url = f"http://[{host}]:{port}{path}" if ":" in host else f"http://{host}:{port}{path}"
        timeout = httpx.Timeout(ANSWER_SECONDS, connect=ANSWER_SECONDS / share)
        async with self._http.stream(method, url, content=body, timeout=timeout) as response:
            answer = b""
            async for chunk in response.aiter_bytes():
                answer += chunk
                if len(answer) > MAX_ANSWER_BYTES:
                    raise ValueError(f"the answer is longer than {MAX_ANSWER_BYTES} bytes")
        if response.status_code != 200:
            raise ValueError(f"{method} {path} answered {response.status_code}")
        return answer


def reachable(replica: wire.ReplicaInfo, host: str) -> wire.ReplicaInfo:
    """A server that listens everywhere cannot name an address of itself: it is the one where it was found."""

    def named(own: str) -> str:
        return host if own in EVERY_HOST else own

    shards = tuple(msgspec.structs.replace(shard, host=named(shard.host)) for shard in replica.shards)
    return msgspec.structs.replace(replica, control_host=named(replica.control_host), shards=shards)


def trouble_at(address: Address, error: BaseException) -> str:
    """One line for the client; some exceptions of the network have no text of their own."""
    return f"bootstrap server {address.host}:{address.port}: {str(error) or type(error).__name__}"
