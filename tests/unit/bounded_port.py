"""A port with bounds as servers open them, on the event loop of a test."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from loop_waits import until
from tandem.server.api.accept import BoundedServer
from tandem.server.api.connections import ConnectionBounds

Opened = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Port:
    number: int
    bounds: ConnectionBounds
    server: BoundedServer
    task: asyncio.Task[None]

    async def open(self, data: bytes = b"") -> Opened:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.number)
        writer.write(data)
        return reader, writer


@contextlib.asynccontextmanager
async def opened(app: Any, bounds: ConnectionBounds, *, drain_seconds: int = 0) -> AsyncIterator[Port]:
    server = BoundedServer(app, bounds, drain_seconds=drain_seconds)
    listener = socket.create_server(("127.0.0.1", 0))
    task = asyncio.create_task(server.serve([listener]))
    try:
        await until(lambda: server.started)
        yield Port(listener.getsockname()[1], bounds, server, task)
    finally:
        server.should_exit = server.force_exit = True
        await task


async def is_cut(reader: asyncio.StreamReader) -> bool:
    """Whatever comes before."""
    async with asyncio.timeout(20):
        with contextlib.suppress(ConnectionError):
            while await reader.read(1 << 16):
                pass
    return True
