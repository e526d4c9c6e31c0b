"""Routing policies: which of the live workers of one role gets the next request.

A policy is a small object that remembers its own choices. It sees candidates, never the registry, and the candidates
may differ from call to call as workers come and go.

    round_robin    the next one in order
    least_load     the one with the fewest prompts under way
    power_of_two   of two that are drawn, the one with fewer
    cache_aware    the one that got the longest prefix of the prompt, as long as load is balanced; else the least loaded
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
from msgspec import Struct

from tandem.core.router.sent_prefixes import Blocks, SentPrefixes
from tandem.core.router.worker_registry import WorkerId


class Candidate(Struct, frozen=True):
    worker: WorkerId
    active: int  # prompts that this router has under way there


class PolicySettings(Struct, frozen=True):
    """Of one role. All but the name is of `cache_aware`, as sglang-router spells it."""

    name: str = "round_robin"
    cache_threshold: float = 0.3  # share of a prompt that must have been there
    balance_abs_threshold: int = 64  # prompts; out of balance: max - min is more than this ...
    balance_rel_threshold: float = 1.5  # ... and max is more than so many times min
    max_blocks: int = 1 << 16  # that are remembered

    def is_balanced(self, candidates: Sequence[Candidate]) -> bool:
        counts = [candidate.active for candidate in candidates]
        least, most = min(counts), max(counts)
        return most - least <= self.balance_abs_threshold or most <= least * self.balance_rel_threshold


class Policy(Protocol):
    def choose(self, candidates: Sequence[Candidate], blocks: Blocks) -> WorkerId:
        """One of `candidates`, of which there is at least one. blocks: of the prompt; none where no policy looks."""
        ...

    def snapshot(self) -> bytes: ...

    def restore(self, snapshot: bytes) -> None: ...


class RoundRobin:
    """The next one in the order of ids after the one chosen last."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, candidates: Sequence[Candidate], blocks: Blocks) -> WorkerId:
        ids = sorted(candidate.worker for candidate in candidates)
        chosen = next((worker for worker in ids if worker > self._last), ids[0])
        self._last = chosen
        return chosen

    def snapshot(self) -> bytes:
        return msgspec.msgpack.encode(self._last)

    def restore(self, snapshot: bytes) -> None:
        self._last = msgspec.msgpack.decode(snapshot, type=int)


class LeastLoad:
    """The one with the fewest active prompts; among equals the one chosen longest ago, or so long ago that it was
    forgotten: workers come and go."""

    MOST_REMEMBERED = 4096

    def __init__(self) -> None:
        self._turns = 0
        self._chosen_at: dict[WorkerId, int] = {}

    def choose(self, candidates: Sequence[Candidate], blocks: Blocks) -> WorkerId:
        best = min(candidates, key=lambda c: (c.active, self._chosen_at.get(c.worker, -1), c.worker))
        self._turns += 1
        self._chosen_at.pop(best.worker, None)  # its place is the last one
        self._chosen_at[best.worker] = self._turns
        if len(self._chosen_at) > self.MOST_REMEMBERED:
            del self._chosen_at[next(iter(self._chosen_at))]
        return best.worker

    def snapshot(self) -> bytes:
        return msgspec.msgpack.encode((self._turns, self._chosen_at))

    def restore(self, snapshot: bytes) -> None:
        self._turns, self._chosen_at = msgspec.msgpack.decode(snapshot, type=tuple[int, dict[WorkerId, int]])


class PowerOfTwo:
    """Of two different ones that are drawn the one with fewer active prompts; among equals the first."""

    def __init__(self, draw: Callable[[], int]) -> None:
        """`draw` gives 64-bit numbers."""
        self._draw = draw

    def choose(self, candidates: Sequence[Candidate], blocks: Blocks) -> WorkerId:
        if len(candidates) == 1:
            return candidates[0].worker
        first, step = self._draw() % len(candidates), 1 + self._draw() % (len(candidates) - 1)
        one, other = candidates[first], candidates[(first + step) % len(candidates)]
        return min(one, other, key=lambda candidate: candidate.active).worker

    def snapshot(self) -> bytes:
        return b""

    def restore(self, snapshot: bytes) -> None:
        pass


class CacheAware:
    """Who got the longest prefix of this prompt last, where that is enough of it and load is balanced."""

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings
        self._by_load = LeastLoad()
        self._sent = SentPrefixes(settings.max_blocks)

    def choose(self, candidates: Sequence[Candidate], blocks: Blocks) -> WorkerId:
        chosen = self._who_has(candidates, blocks) if self._settings.is_balanced(candidates) else None
        if chosen is None:
            chosen = self._by_load.choose(candidates, blocks)
        self._sent.add(blocks, chosen)
        return chosen

    def _who_has(self, candidates: Sequence[Candidate], blocks: Blocks) -> WorkerId | None:
        count, worker = self._sent.longest(blocks, {candidate.worker for candidate in candidates})
        return worker if count > self._settings.cache_threshold * len(blocks) else None

    def snapshot(self) -> bytes:
        return msgspec.msgpack.encode((self._by_load.snapshot(), self._sent.snapshot()))

    def restore(self, snapshot: bytes) -> None:
        by_load, sent = msgspec.msgpack.decode(snapshot, type=tuple[bytes, bytes])
        self._by_load.restore(by_load)
        self._sent.restore(sent)


CACHE_AWARE = "cache_aware"
POLICIES: dict[str, Callable[[PolicySettings, Callable[[], int]], Policy]] = {
    "round_robin": lambda settings, draw: RoundRobin(),
    "least_load": lambda settings, draw: LeastLoad(),
    "power_of_two": lambda settings, draw: PowerOfTwo(draw),
    CACHE_AWARE: lambda settings, draw: CacheAware(settings),
}


def make_policy(settings: PolicySettings, draw: Callable[[], int]) -> Policy:
    """`draw` gives 64-bit numbers, to a policy that needs chance."""
    return POLICIES[settings.name](settings, draw)
