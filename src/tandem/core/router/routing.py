"""Routing policies: which of the live workers of one role gets the next request.

A policy is a small object that remembers its own choices. It sees candidates, never the registry, and the candidates
may differ from call to call as workers come and go.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
from msgspec import Struct

from tandem.core.router.worker_registry import WorkerId


class Candidate(Struct, frozen=True):
    worker: WorkerId
    active: int  # prompts that this router has under way there


class Policy(Protocol):
    def choose(self, candidates: Sequence[Candidate]) -> WorkerId:
        """One of `candidates`, of which there is at least one."""
        ...

    def snapshot(self) -> bytes: ...

    def restore(self, snapshot: bytes) -> None: ...


class RoundRobin:
    """The next one in the order of ids after the one chosen last."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, candidates: Sequence[Candidate]) -> WorkerId:
        ids = sorted(candidate.worker for candidate in candidates)
        chosen = next((worker for worker in ids if worker > self._last), ids[0])
        self._last = chosen
        return chosen

    def snapshot(self) -> bytes:
        return msgspec.msgpack.encode(self._last)

    def restore(self, snapshot: bytes) -> None:
        self._last = msgspec.msgpack.decode(snapshot, type=int)


class LeastLoad:
    """The one with the fewest active prompts; among equals the one chosen longest ago."""

    def __init__(self) -> None:
        self._turns = 0
        self._chosen_at: dict[WorkerId, int] = {}

    def choose(self, candidates: Sequence[Candidate]) -> WorkerId:
        best = min(candidates, key=lambda c: (c.active, self._chosen_at.get(c.worker, -1), c.worker))
        self._turns += 1
        self._chosen_at[best.worker] = self._turns
        return best.worker

    def snapshot(self) -> bytes:
        return msgspec.msgpack.encode((self._turns, self._chosen_at))

    def restore(self, snapshot: bytes) -> None:
        self._turns, self._chosen_at = msgspec.msgpack.decode(snapshot, type=tuple[int, dict[WorkerId, int]])


POLICIES: dict[str, Callable[[], Policy]] = {"round_robin": RoundRobin, "least_load": LeastLoad}
