"""`/debug/faults`: the test hooks of a server, read and changed while it runs. Only with `--enable-fault-injection`.

Both begin as the environment says and then are what the last PUT said, on every DP rank that was there; one that is
started anew begins as the environment says. A hook that can do nothing on this server is refused, except to switch it
off.
"""

import logging
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tandem.config import ServerConfig
from tandem.server.api.body import unsupported
from tandem.server.api.client import NodeClient
from tandem.server.api.endpoint_parts import read_body
from tandem.server.api.errors import Problem, Refusal
from tandem.server.api.large_body import decode_anywhere

Probability = Annotated[float, Meta(ge=0, le=1)]

logger = logging.getLogger("tandem.faults")


class FaultsBody(Struct, forbid_unknown_fields=True):
    """What is left out stays as it is."""

    force_optimistic_prefill_retry_prob: Probability | None = None
    disagg_failure_prob: Probability | None = None


class FaultsPage:
    """One instance per application; the methods are its endpoints."""

    def __init__(self, config: ServerConfig, client: NodeClient) -> None:
        self._is_enabled = config.enable_fault_injection
        self._role = config.role
        self._client = client

    def routes(self) -> list[Route]:
        return [Route("/debug/faults", self.answer, methods=["GET", "PUT"])]

    async def answer(self, request: Request) -> Response:
        return await (self.change(request) if request.method == "PUT" else self.read(request))

    async def read(self, request: Request) -> Response:
        """The hooks as the node has them, or of several DP ranks each."""
        self._check_enabled()
        return Response(await self._in_force(), media_type="application/json")

    async def change(self, request: Request) -> Response:
        """The answer is what is in force from now on."""
        self._check_enabled()
        body = await decode_anywhere(await read_body(request), FaultsBody)
        self._check_possible(body)
        self._client.change_hooks(body.force_optimistic_prefill_retry_prob, body.disagg_failure_prob)
        answer = await self._in_force()
        logger.warning("the test hooks are now %s", answer.decode())
        return Response(answer, media_type="application/json")

    async def _in_force(self) -> bytes:
        """Of several ranks those that answer. Raises `Refusal` when none is there."""
        if len(self._client.ranks) == 1:
            return await self._client.query("faults")
        self._client.check_there()
        answers = await self._client.query_all("faults")
        ranks = [{"dp_rank": dp_rank, **msgspec.json.decode(answer)} for dp_rank, answer in answers.items()]
        return msgspec.json.encode({"dp_ranks": ranks})

    def _check_enabled(self) -> None:
        if not self._is_enabled:
            raise Refusal(Problem.FORBIDDEN, "faults are not injected here: start with --enable-fault-injection")

    def _check_possible(self, body: FaultsBody) -> None:
        if body.force_optimistic_prefill_retry_prob and self._role != "prefill":
            raise unsupported("force_optimistic_prefill_retry_prob", ": only a prefill server retries")
        if body.disagg_failure_prob and self._role == "unified":
            raise unsupported("disagg_failure_prob", ": nothing is transferred here")
