"""How many of the requests that have just come one turn of an event loop begins: no refusal stands behind hundreds.

Under a burst asyncio would parse and begin every request that is there in one turn. Who comes then, and is refused,
would hear of it when all of these have had their first steps. So a turn begins `REQUESTS_PER_TURN`, as it connects some
of those who come (`accept.py`); the others keep their order, unparsed.
"""

import asyncio
from typing import Protocol

REQUESTS_PER_TURN = 8


class Beginner(Protocol):
    def begin(self, data: bytes) -> None: ...


class Turns:
    """Of one port."""

    def __init__(self) -> None:
        self._begun = 0  # in this turn
        self._held: dict[Beginner, bytes] = {}
        self._is_counting = False  # the next turn will begin with `_turn`

    def __len__(self) -> int:
        """How many are held."""
        return len(self._held)

    def take(self) -> bool:
        """Whether one more may begin now."""
        self._count()
        if self._begun == REQUESTS_PER_TURN or self._held:
            return False
        self._begun += 1
        return True

    def hold(self, one: Beginner, data: bytes) -> None:
        """`one.begin(data)` when its turn has come, unless it is dropped before. It may be held once at a time."""
        assert one not in self._held
        self._held[one] = data

    def drop(self, one: Beginner) -> None:
        self._held.pop(one, None)

    def _count(self) -> None:
        if not self._is_counting:
            self._is_counting = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._is_counting = False
        self._begun = 0
        while self._held and self._begun < REQUESTS_PER_TURN:
            self._begun += 1
            one = next(iter(self._held))
            one.begin(self._held.pop(one))
        if self._begun:
            self._count()
