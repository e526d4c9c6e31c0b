"""`/debug/pd`: requests on their way through bootstrap, prefill, transfer and decode, as one static page.

The page is the same for everybody, so it is open; what it shows comes from `/debug/pd/data`, which is for the server's
own machine, and with an admin key for who has it. It also opens flight records and traces of the simulator, in the
browser: then no server is asked.
"""

import base64
import hashlib
import re
from pathlib import Path
from typing import Any  # JSON

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from tandem.core.values import SECOND
from tandem.metrics.request_stats import RequestRecord, RequestStats
from tandem.server.api.client import NodeClient

PAGE = (Path(__file__).parent / "pd.html").read_text()
_script = re.search(r"<script>(.*)</script>", PAGE, re.DOTALL)
assert _script is not None
_digest = base64.b64encode(hashlib.sha256(_script.group(1).encode()).digest()).decode()
# No other script runs, whatever a client calls its requests, and nothing comes from elsewhere.
POLICY = (
    f"default-src 'none'; script-src 'sha256-{_digest}'; style-src 'unsafe-inline'; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


async def show_page(request: Request) -> Response:
    return HTMLResponse(PAGE, headers={"content-security-policy": POLICY, "x-content-type-options": "nosniff"})


class DebugPage:
    """Of one server."""

    def __init__(self, client: NodeClient, stats: RequestStats, *, role: str, name: str) -> None:
        self._client = client
        self._stats = stats
        self._role = role
        self._name = name

    def routes(self) -> list[Route]:
        return [
            Route("/debug/pd", show_page, methods=["GET"]),
            Route("/debug/pd/data", self.data, methods=["GET"]),
        ]

    async def data(self, request: Request) -> Response:
        """Who is where now, on all DP ranks that answer, and who has ended last."""
        answers = await self._client.query_all("flow")
        flow = [one for body in answers.values() for one in msgspec.json.decode(body, type=list[dict[str, Any]])]
        node = self._client.node
        document = {
            "role": self._role,
            "name": self._name if node is None else node.replica.incarnation.name,
            "flow": flow,
            "recent": [told_of(ended_at, record) for ended_at, record in self._stats.recent],
        }
        return Response(msgspec.json.encode(document), media_type="application/json")


def told_of(ended_at: float, record: RequestRecord) -> dict[str, Any]:
    return {
        "ended_at": ended_at,
        "rid": record.rid,
        "room": None if record.room is None else str(record.room),
        "path": record.path,
        "outcome": record.outcome,
        "is_failed": record.is_failed,
        "detail": record.detail,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "completion_tokens": record.completion_tokens,
        "ttft_seconds": None if record.ttft_ns is None else record.ttft_ns / SECOND,
        "e2e_seconds": record.e2e_ns / SECOND,
        "stages": [(stage, duration_ns / SECOND) for stage, duration_ns in record.ledger],
    }
