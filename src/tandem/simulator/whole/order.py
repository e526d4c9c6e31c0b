"""An order for what libraries keep in sets: by when it was made, and not by where it lies in memory.

At the end of a server its connections are closed and its tasks cancelled in the order in which a set yields them.
"""

import asyncio
from collections.abc import Iterator, MutableSet
from itertools import count
from typing import Any  # whatever is in a set

from uvicorn.server import ServerState


class InOrder(MutableSet[Any]):
    def __init__(self) -> None:
        self._members: dict[Any, None] = {}

    def __contains__(self, member: object) -> bool:
        return member in self._members

    def __iter__(self) -> Iterator[Any]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def add(self, value: Any) -> None:
        self._members[value] = None

    def discard(self, value: Any) -> None:
        self._members.pop(value, None)


class OrderedState(ServerState):
    def __init__(self) -> None:
        super().__init__()
        self.connections = InOrder()  # type: ignore[assignment]  # of what uvicorn does with a set, it can all


class Tasks:
    """Makes the tasks of one loop. A set of small numbers yields them in an order that these decide alone."""

    def __init__(self) -> None:
        self._numbers = count(1)

    def __call__(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **named: Any) -> "CountedTask":
        return CountedTask(coroutine, loop=loop, number=next(self._numbers), **named)


class CountedTask(asyncio.Task[Any]):
    def __init__(self, coroutine: Any, *, loop: asyncio.AbstractEventLoop, number: int, **named: Any) -> None:
        self._number = number  # before it is put into the set of all tasks
        super().__init__(coroutine, loop=loop, **named)

    def __hash__(self) -> int:
        return self._number
