"""uvicorn in this process hears sooner that it is to end.

It looks every tenth of a second, and takes another one to end; tests start hundreds of servers, each in a loop of its
own, and would mostly wait for that. Servers that are processes are as they are, and so is virtual time.
"""

import asyncio
from types import ModuleType

import uvicorn.server

TICK_S = 0.005


async def sleep(seconds: float) -> None:
    on_real_time = type(asyncio.get_running_loop()).__module__.startswith(("asyncio", "uvloop"))
    await asyncio.sleep(min(seconds, TICK_S) if on_real_time else seconds)


class QuickAsyncio(ModuleType):
    """asyncio as `uvicorn.server` sees it."""

    sleep = staticmethod(sleep)

    def __getattr__(self, name: str) -> object:
        return getattr(asyncio, name)


def install() -> None:
    """For the life of this process."""
    uvicorn.server.asyncio = QuickAsyncio("asyncio")  # type: ignore[attr-defined]  # which it has imported
