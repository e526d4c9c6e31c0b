"""Waiting on an event loop."""

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], object]) -> None:
    """Looks once per turn of the loop, for 20 s at most."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0)
