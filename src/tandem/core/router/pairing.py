"""Pairs: the prefill and the decode of one attempt, and the rooms by which they find each other.

A room is a non-zero 63-bit number, one per prompt and attempt; the samples of a prompt share it. Rooms come from an
injected source of 64-bit numbers: random in the server, seeded in the simulator.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import cast

import msgspec
from msgspec import Struct

from tandem.core.router.worker_registry import RegisteredWorker
from tandem.core.settings import dp_rank_in
from tandem.core.values import Room

ROOM_MASK = (1 << 63) - 1
ROUTED_RANK = ("routed_dp_rank", "data_parallel_rank")  # the second is the deprecated name of the first
PREFILL_RANK = "disagg_prefill_dp_rank"
PROMPTS = {"/v1/completions": ("prompt",), "/generate": ("text", "input_ids")}  # where a path has several prompts
DRAWS_MAX = 64  # a source that is wrong that often in a row is broken, not unlucky


class WorkerPair(Struct, frozen=True):
    prefill: RegisteredWorker
    decode: RegisteredWorker
    rooms: tuple[Room, ...]  # one per prompt
    is_batch: bool  # the request has a list of prompts: the fields become lists, also for a list of one

    def fields(self) -> dict[str, object]:
        """What both halves find in their JSON body, the same in both (SGLang's names)."""
        host, port = self.prefill.host, self.prefill.bootstrap_port
        if not self.is_batch:
            return {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": self.rooms[0]}
        count = len(self.rooms)
        return {
            "bootstrap_host": [host] * count,
            "bootstrap_port": [port] * count,
            "bootstrap_room": list(self.rooms),
        }


class Rooms:
    """Makes rooms and remembers the live ones, so that no two live prompts share one."""

    def __init__(self, draw: Callable[[], int]) -> None:
        """`draw` gives 64-bit numbers; repetitions are tolerated."""
        self._draw = draw
        self._live: set[Room] = set()

    def open(self, count: int) -> tuple[Room, ...]:
        """`count` fresh rooms, live until `close`."""
        return tuple(self._open_one() for _ in range(count))

    def close(self, rooms: Iterable[Room]) -> None:
        self._live.difference_update(rooms)

    def snapshot(self) -> bytes:
        return msgspec.msgpack.encode(sorted(self._live))

    def restore(self, snapshot: bytes) -> None:
        self._live = msgspec.msgpack.decode(snapshot, type=set[Room])

    def num_live(self) -> int:
        return len(self._live)

    def _open_one(self) -> Room:
        for _ in range(DRAWS_MAX):
            room = Room(self._draw() & ROOM_MASK)
            if room and room not in self._live:
                self._live.add(room)
                return room
        raise AssertionError("the source of room numbers repeats itself")


def rank_fields(body: Mapping[str, object], header: str | None = None) -> dict[str, object]:
    """What both halves find besides: the DP rank of the prefill, where the client has chosen it.

    `routed_dp_rank` of a body names a rank of whoever gets it, so prefill's half goes there. Decode need not ask then,
    and a prefill that goes by rooms need not announce its rank, nor refuse a room that implies another.
    A client that says `disagg_prefill_dp_rank` itself knows better. One rank, or a list with one (or none) per prompt.
    header: X-Data-Parallel-Rank, which comes before the body's; what is none of a prefill, it refuses.
    """
    if body.get(PREFILL_RANK) is not None:
        return {}
    said = next((body[name] for name in ROUTED_RANK if body.get(name) is not None), None)
    routed = said if header is None else dp_rank_in(header)
    return {} if routed is None else {PREFILL_RANK: routed}


def num_prompts(path: str, body: Mapping[str, object]) -> int | None:
    """How many prompts a request body lists, None when it has one that is not in a list.

    A list is a batch when its elements are prompts (strings or token lists); a flat list of token ids is one prompt.
    Workers ignore the fields of other endpoints, so these count for nothing here either.
    """
    for key in PROMPTS.get(path, ()):
        if not isinstance(value := body.get(key), list):
            continue
        prompts = cast(list[object], value)
        if prompts and isinstance(prompts[0], (str, list)):
            return len(prompts)
    return None
