"""Production nodes as values: forked by their own `snapshot` and `restore`, never copied, subclassed or patched.

Two nodes are in the same *situation* when nothing that happens later can tell them apart. A situation is the snapshot
without what only metrics and ledgers read, with every moment written as the time from now, and with the uses of cached
pages as ranks. Whatever is not named here counts as a difference: a field that the core gains later can make this
module slow, never wrong.
"""

import hashlib
from dataclasses import dataclass, field
from typing import Any  # a snapshot as plain data

import msgspec

from tandem.core.scheduler.node import EngineNode
from tandem.core.settings import NodeSettings
from tandem.core.values import Nanos

# Nobody decides by these. `timers` says nothing that `timer_at` of each request does not say.
UNREAD = ("now", "began_at", "steps", "counters", "timers")
UNREAD_OF_REQUESTS = (
    "arrived_at",
    "entered_at",
    "computing_since",
    "stages",
    "computed_tokens",
    "kv_pages",
    "first_cause",
)
PARTS_OF_SIDES = ("reader", "search", "arrival")
ONCE_OR_NEVER = ("ready_at", "offered_at", "result_at", "computed_at")  # whether it was matters, when does not
MOMENTS = (
    "deadline",
    "timer_at",
    "lease_until",
    "resend_at",
    "announce_at",
    "ask_at",
    "expires_at",
)  # 0: not set; past: due


@dataclass(frozen=True, slots=True)
class Fork:
    snapshot: bytes
    now: Nanos
    wake_in: Nanos | None  # from `now`


@dataclass(slots=True)
class Forks:
    """One snapshot for every situation that was met; its index is its name."""

    settings: NodeSettings
    forks: list[Fork] = field(default_factory=list)
    indices: dict[bytes, int] = field(default_factory=dict)
    bench: EngineNode = field(init=False)

    def __post_init__(self) -> None:
        self.bench = EngineNode(self.settings)

    def node(self, index: int) -> EngineNode:
        """The node, to go on with until the next one is asked for; the settings of its life are in the snapshot."""
        self.bench.restore(self.forks[index].snapshot)
        return self.bench

    def keep(self, node: EngineNode, wake_at: Nanos | None) -> tuple[int, bool]:
        """The index of the situation that `node` is in now, and whether it is a new one."""
        snapshot, now = node.snapshot(), node.state.now
        key = world_state(snapshot, now)
        index = self.indices.setdefault(key, len(self.forks))
        is_new = index == len(self.forks)
        if is_new:
            self.forks.append(Fork(snapshot, now, Nanos(max(0, wake_at - now)) if wake_at is not None else None))
        return index, is_new


def world_state(snapshot: bytes, now: Nanos) -> bytes:
    """16 bytes, equal for nodes that cannot be told apart."""
    plain = msgspec.msgpack.decode(snapshot)
    for name in UNREAD:
        del plain[name]
    for progress in plain["requests"].values():
        for name in UNREAD_OF_REQUESTS:
            del progress[name]
        _count_from(now, progress)
        side = progress["side"]
        for record in (side, *filter(None, map(side.get, PARTS_OF_SIDES))):
            _count_from(now, record)
            record |= {name: bool(record[name]) for name in ONCE_OR_NEVER if name in record}
    for stashed in plain["stash"].values():
        _count_from(now, stashed)
    plain["asked"] = {address: at - now for address, at in plain["asked"].items()}
    _count_copies(now, plain["host"])
    _count_storage(now, plain["storage"])
    _rank_uses(plain["tree"])
    return hashlib.blake2b(msgspec.msgpack.encode(plain), digest_size=16).digest()


def _count_from(now: Nanos, record: dict[str, Any]) -> None:
    for name in MOMENTS:
        if record.get(name):
            record[name] = max(0, record[name] - now)


def _count_copies(now: Nanos, host: dict[str, Any]) -> None:
    """A copy is late or it is not."""
    del host["counters"]
    for copy in host["copies"].values():
        copy["begun_at"] = min(now - copy["begun_at"], host["settings"]["load_timeout_ns"])


def _count_storage(now: Nanos, storage: dict[str, Any]) -> None:
    """An answer is late or it is not; a request still waits for so long."""
    del storage["counters"]
    for operation in storage["operations"].values():
        operation["begun_at"] = min(now - operation["begun_at"], storage["settings"]["io_timeout_ns"])
    for prefetch in storage["prefetches"].values():
        for name in ("until", "waited_until"):
            if prefetch[name] is not None:
                prefetch[name] = max(0, prefetch[name] - now)


def _rank_uses(tree: dict[str, Any]) -> None:
    """Only the order of uses decides who is evicted, and whatever comes later is later than all of them."""
    del tree["step"]
    nodes, candidates = tree["nodes"].values(), tree["candidates"]
    ranks = {
        used_at: rank for rank, used_at in enumerate(sorted({n["used_at"] for n in nodes} | {c[0] for c in candidates}))
    }
    for node in nodes:
        node["used_at"] = ranks[node["used_at"]]
    tree["candidates"] = sorted([ranks[used_at], page_hash] for used_at, page_hash in candidates)
