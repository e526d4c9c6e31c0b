"""Raw bytes of HTTP clients into an application, through the very protocol class that servers use; no socket.

Whoever sends the bytes then leaves. No answer may be the server's own fault, and when the client has left nothing of it
may live on.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from engine import LOGGED_ERRORS
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from tandem.server.api.http1 import Http1, uvicorn_config

TURNS = 300  # of the event loop, for an answer
PATIENCE_S = 20.0  # for what was begun to end, once the client has left
OWN_FAULT = 500


class Broken(AssertionError):
    """What must hold does not."""


class Refused(Exception):
    """Nothing in an input was answered with success."""


def check_served(statuses: Sequence[int]) -> None:
    """Raises Refused, so that it can be seen how many inputs get how far."""
    if not statuses or min(statuses) >= 400:
        raise Refused(str(statuses))


class Transport(asyncio.Transport):
    """The server's end of a connection that nobody reads slowly."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 4711), "sockname": ("127.0.0.1", 30000)})
        self.written: list[bytes] = []
        self._is_closing = False

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """Whoever sends the rest of a refused request is heard until the connection is lost."""

    def close(self) -> None:
        self._is_closing = True

    abort = close

    def is_closing(self) -> bool:
        return self._is_closing

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0


class Served:
    """One application behind one protocol."""

    def __init__(self, app: ASGIApp, loop: asyncio.AbstractEventLoop, *, protocol: type[Http1] = Http1) -> None:
        self._loop, self._protocol = loop, protocol
        self._config = uvicorn_config(app, drain_seconds=1, http=protocol)
        self._config.load()
        self._state = ServerState()

    def answer(self, data: bytes, *, allowed: frozenset[int] = frozenset((504,))) -> list[int]:
        """The status of every answer to these bytes. Raises Broken for one that is the server's fault."""
        return self._loop.run_until_complete(self._answer(data, allowed))

    async def _answer(self, data: bytes, allowed: frozenset[int]) -> list[int]:
        transport = Transport()
        protocol = self._protocol(self._config, self._state, app_state={}, _loop=self._loop)
        protocol.connection_made(transport)
        middle = len(data) // 2 if len(data) % 4 == 0 else len(data)
        for piece in (data[:middle], data[middle:]):
            if piece and not transport.is_closing():
                protocol.data_received(piece)
                await self._turn()
        protocol.connection_lost(None)
        await self._end()
        statuses = [int(chunk[9:12]) for chunk in transport.written if chunk.startswith(b"HTTP/1.1 ")]
        LOGGED_ERRORS.raise_first()
        for status in statuses:
            if status >= OWN_FAULT and status not in allowed:
                raise Broken(f"answered {status}: {transport.written[-1][:300]!r}")
        return statuses

    async def _turn(self) -> None:
        for _ in range(TURNS):
            if not self._state.tasks:
                return
            await asyncio.sleep(0)

    async def _end(self) -> None:
        for _ in range(TURNS):
            if not self._state.tasks:
                return
            await asyncio.sleep(0)
        _, pending = await asyncio.wait(self._state.tasks, timeout=PATIENCE_S)
        if pending:
            raise Broken(f"the client has left and its request goes on: {next(iter(pending)).get_stack()}")


class AtOnce(ThreadPoolExecutor):
    """In place of threads, for which every input would have to wait."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(work(*args, **named))
        except Exception as error:
            done.set_exception(error)
        return done


def new_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    loop.set_default_executor(AtOnce())
    asyncio.set_event_loop(loop)
    return loop


async def until(condition: Callable[[], object], what: Callable[[], object]) -> None:
    """In a few turns of the loop, or soon."""
    for _ in range(TURNS):
        if condition():
            return
        await asyncio.sleep(0)
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    while not condition():
        if asyncio.get_running_loop().time() > deadline:
            raise Broken(f"left behind: {what()}")
        await asyncio.sleep(0.001)


def request(method: str, target: str, body: object = None, **headers: str) -> bytes:
    content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    named = {"host": "127.0.0.1", "content-type": "application/json", **headers, "content-length": str(len(content))}
    lines = [f"{method} {target} HTTP/1.1", *(f"{name.replace('_', '-')}: {value}" for name, value in named.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content
