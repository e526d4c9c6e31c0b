"""ASGI middleware that counts requests and answers; what nobody was answered counts as `CLIENT_LEFT`."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.metrics.http_counts import HttpCounts
from tandem.server.api.endpoint_parts import CLIENT_LEFT


class CountingMiddleware:
    def __init__(self, app: ASGIApp, *, counts: HttpCounts) -> None:
        self._app = app
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = CLIENT_LEFT

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        asked = self._counts.begin(scope["path"], scope["method"])
        try:
            await self._app(scope, receive, noted)
        finally:
            self._counts.end(asked, status)
