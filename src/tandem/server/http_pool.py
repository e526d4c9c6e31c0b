"""Connections for `httpx.AsyncClient`, kept per server and used again, the last used first.

Names are looked up in threads of their own (`Resolver`), not in those of asyncio's executor, of which there are few: a
name for which nobody answers would hold them all, request by request, and hold up those who ask for another.

Why not httpx's own pool: it looks at every connection for every request, 4 ms each at 128 connections, seconds at
thousands. Here taking and giving back cost the same whatever is open. How many connections there are is bounded by
whoever makes the requests; how many idle ones are kept, here.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence
from ipaddress import ip_address
from types import TracebackType
from typing import cast

import httpcore
import httpx

from tandem.server.api.resolver import NoThread, Resolver

KEEPALIVE_SECONDS = 2.0  # shorter than a server's, so that no request enters a connection that is about to close
IDLE_MAX = 256  # per server


class PooledTransport(httpx.AsyncBaseTransport):
    """Belongs to one client and one event loop."""

    def __init__(self) -> None:
        self._network = NamedHosts()
        self._idle: dict[str, list[httpcore.AsyncHTTPConnection]] = {}  # by server; the first has idled longest
        self._sweeper: asyncio.Task[None] | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        assert isinstance(request.stream, httpx.AsyncByteStream)
        to = request.url
        url = httpcore.URL(scheme=to.raw_scheme, host=to.raw_host, port=to.port, target=to.raw_path)
        raw = httpcore.Request(
            request.method, url, headers=request.headers.raw, content=request.stream, extensions=request.extensions
        )
        connection = await self._take(url.origin)
        try:
            answer = await connection.handle_async_request(raw)
        except BaseException as error:  # also when cancelled: nobody else knows of this connection
            await connection.aclose()
            raise _translated(error, request) from error
        body = _Body(self, connection, url.origin, answer, request)
        return httpx.Response(answer.status, headers=answer.headers, stream=body, extensions=answer.extensions)

    async def aclose(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connections in self._idle.values():
            for connection in connections:
                await connection.aclose()
        self._idle.clear()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        await self.aclose()

    async def give_back(self, connection: httpcore.AsyncHTTPConnection, origin: httpcore.Origin) -> None:
        """After the body: keep it if it can serve another request."""
        idle = self._idle.setdefault(str(origin), [])
        if connection.is_idle() and _has_more(connection):
            await connection.aclose()
        elif connection.is_idle() and len(idle) < IDLE_MAX:
            idle.append(connection)
            if self._sweeper is None:
                self._sweeper = asyncio.create_task(self._sweep())
        else:
            await connection.aclose()

    async def _sweep(self) -> None:
        """Until none is idle any more: `_take` does not get down to what a busy hour has left while there is traffic,
        and nobody looks at all when there is none."""
        while any(self._idle.values()):
            await asyncio.sleep(KEEPALIVE_SECONDS)
            for idle in list(self._idle.values()):
                while idle and idle[0].has_expired():
                    await idle.pop(0).aclose()
        self._sweeper = None

    async def _take(self, origin: httpcore.Origin) -> httpcore.AsyncHTTPConnection:
        """One that is still good, or a new one. When the last used one is too old, all the others are."""
        idle = self._idle.get(str(origin), [])
        while idle:
            connection = idle.pop()
            if not connection.has_expired():
                return connection
            await connection.aclose()
        return httpcore.AsyncHTTPConnection(origin, keepalive_expiry=KEEPALIVE_SECONDS, network_backend=self._network)


class NamedHosts(httpcore.AsyncNetworkBackend):
    """Connects to the addresses of a name, one after the other until one takes it; each has its share of the time."""

    def __init__(self) -> None:
        self._sockets = cast(httpcore.AsyncNetworkBackend, httpcore.AnyIOBackend())
        self._look_up = Resolver()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        try:
            async with asyncio.timeout(timeout):
                addresses = await self._addresses(host)
                share = None if timeout is None else timeout / len(addresses)
                for address in addresses[:-1]:
                    with contextlib.suppress(httpcore.ConnectError, httpcore.ConnectTimeout):  # of another family, say
                        return await self._sockets.connect_tcp(address, port, share, local_address, socket_options)
                return await self._sockets.connect_tcp(addresses[-1], port, timeout, local_address, socket_options)
        except TimeoutError as error:
            raise httpcore.ConnectTimeout(f"no connection to {host} in time") from error
        except (OSError, UnicodeError, NoThread) as error:
            raise httpcore.ConnectError(str(error)) from error

    async def _addresses(self, host: str) -> Sequence[str]:
        try:
            ip_address(host)
        except ValueError:
            return await self._look_up(host)
        return [host]


class _Body(httpx.AsyncByteStream):
    """The answer's body; closing it early closes the connection."""

    def __init__(
        self,
        pool: PooledTransport,
        connection: httpcore.AsyncHTTPConnection,
        origin: httpcore.Origin,
        answer: httpcore.Response,
        request: httpx.Request,
    ) -> None:
        self._pool = pool
        self._connection = connection
        self._answer = answer
        self._request = request
        self._origin = origin
        self._is_closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for piece in self._answer.aiter_stream():
                yield piece
        except Exception as error:
            raise _translated(error, self._request) from error

    async def aclose(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        await self._answer.aclose()
        await self._pool.give_back(self._connection, self._origin)


def _has_more(connection: httpcore.AsyncHTTPConnection) -> bool:
    """Whether bytes came behind the answer: the next request would take them for its own. The library does not look."""
    state = getattr(getattr(connection, "_connection", None), "_h11_state", None)
    return state is None or bool(state.trailing_data[0])


def _translated(error: BaseException, request: httpx.Request) -> BaseException:
    """httpx has an exception of the same name for each of httpcore's. What else is raised below comes from a connection
    that has died under the library's hands, and is the connection's fault.
    """
    if not isinstance(error, Exception):
        return error
    if not type(error).__module__.startswith("httpcore"):
        return httpx.TransportError(f"{type(error).__name__} {error}", request=request)
    kind = getattr(httpx, type(error).__name__, httpx.TransportError)
    return kind(str(error), request=request) if issubclass(kind, httpx.RequestError) else error
