"""How much of what has just come one turn of an event loop takes on: no refusal stands behind hundreds of others.

Under a burst asyncio would accept as many connections in one turn as the backlog is long, and begin every request that
is whole in the next. Who comes then, and is refused by the head alone, would hear of it when all of these have had
their first steps. So a turn accepts `ACCEPTS_PER_TURN` (`http1.py`) and begins `REQUESTS_PER_TURN`; the others keep
their order. What waits costs little: a connection in the kernel's queue, a task that has not begun. The first of these
bounds is asyncio's: uvloop, on which a router runs, accepts whoever waits.
"""

import asyncio
import socket
from collections import deque

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.server.api.access import PAGES

REQUESTS_PER_TURN = 8
LISTEN_BACKLOG = 2048


class TurnServer(uvicorn.Server):
    """Accepts `Config.backlog` connections in a turn, which asyncio takes for the length of the kernel's queue, too."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(LISTEN_BACKLOG)


class TurnMiddleware:
    """ASGI middleware: requests begin a few in a turn, in their order; probes and what operators ask for at once.

    A request whose client leaves while it waits begins all the same, and finds out then.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._begun = 0  # in this turn
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_counting = False  # the next turn will begin with `_turn`

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in PAGES:
            await self._its_turn()
        await self._app(scope, receive, send)

    async def _its_turn(self) -> None:
        if self._begun < REQUESTS_PER_TURN and not self._waiting:
            self._begun += 1
            self._count()
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._count()
        await turn

    def _count(self) -> None:
        if not self._is_counting:
            self._is_counting = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._is_counting = False
        self._begun = 0
        while self._waiting and self._begun < REQUESTS_PER_TURN:
            turn = self._waiting.popleft()
            if not turn.done():  # cancelled
                turn.set_result(None)
                self._begun += 1
        if self._begun or self._waiting:
            self._count()
