"""Makes the calls to bootstrap servers that `BootstrapQuestions` asks for, and reports to decode's node what it says.

One task per call: it looks the host up, connects to what the body's host may name, and reads the answer through the
door of `documents.py`. Whatever goes wrong is said in one line and ends with that call.
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from tandem.core import events
from tandem.core.settings import PrefillInfo
from tandem.core.values import SECOND, Address, Nanos, Room
from tandem.server import wire
from tandem.server.api.allowed_hosts import AllowedHosts, HostRefused
from tandem.server.api.bootstrap_questions import (
    ANSWER_NS,
    RANK_INTERVAL_NS,
    Actions,
    BootstrapQuestions,
    Call,
    FetchRanks,
    FetchReplica,
    GiveUp,
)
from tandem.server.api.http_exchange import ExchangeError, HttpResponse, exchange
from tandem.server.api.question_lanes import Lanes
from tandem.server.documents import (
    AGE_HEADER,
    PREFILL_HEADER,
    BadDocument,
    read_age,
    read_prefill,
    read_ranks,
    read_replica,
)

SILENCE = (HostRefused, OSError)  # no answer at all
Report = Callable[[wire.Connect | events.PeerLearned | events.PeerUnknown | events.DpRankAnswered], None]


@dataclass(slots=True)
class BootstrapClient:
    """Everything here runs on the event loop."""

    hosts: AllowedHosts
    own: Callable[[], wire.ReplicaInfo | None]  # of this decode, whose layout is compared
    report: Report
    interval_s: float = RANK_INTERVAL_NS / SECOND
    answer_s: float = ANSWER_NS / SECOND
    lanes: Lanes = field(default_factory=Lanes)
    _questions: BootstrapQuestions = field(init=False)
    _tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)  # by the number of their call
    _timer: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        interval_ns, answer_ns = Nanos(int(self.interval_s * SECOND)), Nanos(int(self.answer_s * SECOND))
        self._questions = BootstrapQuestions(self.own, interval_ns, answer_ns, self.lanes)

    def learn(self, address: Address, dp_rank: int | None) -> None:
        self._do(self._questions.learn(address, dp_rank, now()))

    def ask_rank(self, address: Address, room: Room) -> None:
        self._do(self._questions.ask_rank(address, room))

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _do(self, actions: Actions) -> None:
        for action in actions:
            match action:
                case FetchReplica() | FetchRanks():
                    self._begin(action)
                case GiveUp(number):
                    if number in self._tasks:
                        self._tasks[number].cancel()
                case _:
                    self.report(action)
        self._plan()

    def _plan(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        deadline = self._questions.next_deadline()
        if deadline is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(deadline / SECOND, self._tick, deadline)

    def _tick(self, deadline: Nanos) -> None:
        """Called at `deadline`, to which a clock that counts in floats may not have come yet."""
        self._timer = None
        self._do(self._questions.tick(max(deadline, now())))

    # --- one call ----------------------------------------------------------------------------------------------------

    def _begin(self, call: Call) -> None:
        task = asyncio.get_running_loop().create_task(self._make(call))
        self._tasks[call.number] = task
        task.add_done_callback(lambda _: self._tasks.pop(call.number, None))

    async def _make(self, call: Call) -> None:
        try:
            match call:
                case FetchReplica(number, address, dp_rank):
                    replica = await self._fetch_replica(address, dp_rank)
                    end = partial(self._questions.found, number, replica)
                case FetchRanks(number, address, rooms):
                    ranks, prefill, age_ns = await self._query_ranks(address, rooms)
                    end = partial(self._questions.told, number, ranks, prefill, age_ns=age_ns)
        except Exception as error:  # whatever it is, it has to do with this address and ends there
            is_silent = isinstance(error, SILENCE)
            end = partial(self._questions.failed, call.number, self._trouble(error), is_silent=is_silent)
        self._do(end(now()))

    async def _fetch_replica(self, address: Address, dp_rank: int | None) -> wire.ReplicaInfo:
        path = "/route" if dp_rank is None else f"/route?prefill_dp_rank={dp_rank}"
        answer, host = await self._call(address, "GET", path)
        return self._reachable(read_replica(answer.body), host)

    def _reachable(self, replica: wire.ReplicaInfo, found_at: str) -> wire.ReplicaInfo:
        """A server that listens everywhere cannot name an address of itself: it is the one where it was found."""

        def checked(named: str, field: str) -> str:
            if named in wire.EVERY_HOST:
                return found_at
            self.hosts.check_peer(named, found_at=found_at, field=field)
            return named

        shards = tuple(
            msgspec.structs.replace(shard, host=checked(shard.host, f"shards[{index}].host"))
            for index, shard in enumerate(replica.shards)
        )
        control_host = checked(replica.control_host, "control_host")
        return msgspec.structs.replace(replica, control_host=control_host, shards=shards)

    async def _query_ranks(
        self, address: Address, rooms: Sequence[Room]
    ) -> tuple[dict[Room, int], PrefillInfo | None, Nanos | None]:
        body = msgspec.json.encode({"bootstrap_rooms": rooms})
        answer, _ = await self._call(address, "POST", "/query_dp_ranks", body)
        prefill, age_ns = (answer.headers.get(name.encode()) for name in (PREFILL_HEADER, AGE_HEADER))
        return read_ranks(answer.body, rooms), read_prefill(prefill), read_age(age_ns)

    # --- HTTP --------------------------------------------------------------------------------------------------------

    async def _call(
        self, address: Address, method: str, path: str, body: bytes | None = None
    ) -> tuple[HttpResponse, str]:
        """The answer, and the address where it came from. Raises what `_trouble` can put in words."""
        candidates = await self.hosts.addresses(address.host)
        for host in candidates[:-1]:
            try:
                return await self._call_at(host, address.port, method, path, body, share=len(candidates)), host
            except OSError:
                pass  # a name may have addresses of both families, and the server listen on one
        host = candidates[-1]
        return await self._call_at(host, address.port, method, path, body), host

    async def _call_at(
        self, host: str, port: int, method: str, path: str, body: bytes | None, share: int = 1
    ) -> HttpResponse:
        connect_s = self.answer_s / share
        answer = await exchange(host, port, method, path, body=body, timeout_s=self.answer_s, connect_s=connect_s)
        if answer.status != 200:
            raise ExchangeError(f"{method} {path} answered {answer.status}")
        return answer

    def _trouble(self, error: BaseException) -> str:
        match error:
            case TimeoutError():
                return f"no answer within {self.answer_s:g} s"
            case OSError(errno=int(number)):
                return os.strerror(number)
            case HostRefused() | OSError() | ExchangeError() | BadDocument():
                return str(error)
            case _:
                return f"its answer cannot be read ({type(error).__name__})"


def now() -> Nanos:
    """On the clock of the running loop."""
    return Nanos(int(asyncio.get_running_loop().time() * SECOND))
