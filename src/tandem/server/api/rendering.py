"""Prefill renders a prompt again: decode has rendered it at another time, and its tokens are the answer.

Happens once per prompt at most, and only behind routers that stamp no time into both bodies
(`core/disagg/rendering.py`). The HTTP response that owns the request does it, so it ends as any other: an abort or a
deadline meanwhile is the node's, and whoever waits here hears of it afterwards.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from msgspec import structs

from tandem.core.values import SECOND, Cause
from tandem.server.api.client import Live, NodeClient
from tandem.server.api.errors import Refusal
from tandem.server.api.limits import ModelLimits
from tandem.server.api.sample_requests import SampleRequest, submission
from tandem.server.api.validation import Prompt


class Renderer:
    """Of one HTTP request. `prompts_at` gives its prompts at a time in Unix seconds, or raises `Refusal`."""

    def __init__(
        self, client: NodeClient, limits: ModelLimits, prompts_at: Callable[[int], Awaitable[Sequence[Prompt]]]
    ) -> None:
        self._client = client
        self._limits = limits
        self._prompts_at = prompts_at
        self._last: tuple[int, Sequence[Prompt]] | None = None  # samples of one prompt are asked for one by one

    async def render(self, ask: SampleRequest, live: Live, arrival_ns: int) -> SampleRequest:
        """Tell the node the prompt at `live.render_at`. Returns what is asked of it from here on."""
        assert live.render_at is not None
        rendered_at, live.render_at = live.render_at, None
        left_seconds = (arrival_ns + ask.timeout_ns - time.monotonic_ns()) / SECOND
        try:
            async with asyncio.timeout(left_seconds):
                prompts = await self._prompts(rendered_at)
            anew = structs.replace(ask, prompt=prompts[ask.prompt_index])
            self._client.rendered(live, submission(anew, live.request.id, arrival_ns, self._limits))
        except TimeoutError:
            return ask  # the node ends it in this moment
        except Refusal as refusal:
            code = refusal.failure.code
            self._client.abort(live, code if isinstance(code, Cause) else Cause.PROTOCOL)
            return ask
        return anew

    async def _prompts(self, rendered_at: int) -> Sequence[Prompt]:
        if self._last is None or self._last[0] != rendered_at:
            self._last = rendered_at, await self._prompts_at(rendered_at)
        return self._last[1]
