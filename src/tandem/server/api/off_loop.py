"""Work that takes longer than others on the event loop may wait: it is done in a thread, and its loop goes on.

How much is too much is counted, not measured: the sizes in `bounds.py` take about 2 ms on a slow core. Most of it is
Python, which shares one lock with the loop, so threads make nothing faster; they only let the loop have its turn
every 5 ms. There are as many as asyncio's own executor has.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Item = TypeVar("Item")


async def off_loop(
    size: int,
    most: int,
    function: Callable[Parameters, Result],
    *arguments: Parameters.args,
    **named: Parameters.kwargs,
) -> Result:
    """`function(...)`, on the loop itself up to a size of `most`."""
    if size <= most:
        return function(*arguments, **named)
    return await asyncio.to_thread(function, *arguments, **named)


async def in_turns(items: Iterable[Item], most: int) -> AsyncIterator[Item]:
    """`items`, of which the event loop handles `most` in one turn: then others have theirs."""
    for number, item in enumerate(items):
        if number and number % most == 0:
            await asyncio.sleep(0)
        yield item
