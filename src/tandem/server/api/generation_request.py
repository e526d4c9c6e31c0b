"""One request for tokens, vectors or scores, from its body to what the node is asked.

Its way: `read_body` - `decode_both` - the dialect's `read_*` (prompts and parameters) - `ask_all` (rooms, seeds,
deadlines) - `submission` - `TokenResponse`, which has the node run it (`NodeClient.running`). Everything before that
may refuse, and has reserved nothing; what a body makes long leaves the event loop.
"""

import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from msgspec import Struct, structs
from starlette.requests import Request

from tandem.core.values import SECOND, Cause, RequestId
from tandem.server.api.body import ChatBody, Routing, decode_body
from tandem.server.api.bounds import LOOP_BYTES, LOOP_IDS, LOOP_SAMPLES
from tandem.server.api.client import raise_if
from tandem.server.api.detokenizer import detokenizer
from tandem.server.api.edge import Edge
from tandem.server.api.endpoint_parts import Found, read_body, within
from tandem.server.api.errors import Failure, Refusal
from tandem.server.api.kv_transfer_params import (
    KvTransferParams,
    as_prefill_was_asked,
    follow,
    is_handed_over,
    prefill_answer,
    read_params,
)
from tandem.server.api.large_body import decode_both
from tandem.server.api.limits import ModelLimits, Task
from tandem.server.api.live_requests import IncomingRequest
from tandem.server.api.off_loop import off_loop
from tandem.server.api.ops import check_model
from tandem.server.api.rendering import Renderer
from tandem.server.api.resume import ASKS, Opening, Proofs, Resume, Resuming
from tandem.server.api.sample_requests import (
    SampleRequest,
    ask_all,
    check_timeout,
    follow_gateway,
    priority_of,
    submission,
    time_of,
)
from tandem.server.api.served_model import ServedModel
from tandem.server.api.stream import Prepared, Reply, TokenResponse
from tandem.server.api.telling import Resumed, Teller, can_tell, goes_on
from tandem.server.api.tenant import given_key, tenant_of
from tandem.server.api.text import TextStream
from tandem.server.api.validation import Asked, Prompt, beyond, check_task
from tandem.server.tracing import Span, ending_with_errors

Body = TypeVar("Body", bound=Struct)
# The last: bytes of the body, by which a reader knows what is too much for the loop.
Reader = Callable[[Body, Routing, ServedModel, int], Awaitable[Asked]]


@dataclass(frozen=True, slots=True)
class Answered(Generic[Body]):
    """What a reply is made from."""

    body: Body
    routing: Routing
    asks: Sequence[SampleRequest]
    made_at: int  # Unix seconds
    model: str  # as the client calls it

    def name(self, prefix: str) -> str:
        """Of the answer: the client's, or one of ours."""
        return self.routing.rid if isinstance(self.routing.rid, str) else prefix + self.asks[0].rid


@dataclass(slots=True)
class GenerationRequest(Generic[Body]):
    """Its answer does not keep it, nor the bytes of the body."""

    edge: Edge
    request: Request
    kind: type[Body]
    read: Reader[Body]
    reply: Callable[[Answered[Body]], Reply]
    checks_model: bool = True
    tasks: tuple[Task, ...] = (Task.TOKENS,)  # that it may be for
    raw: bytes = b""  # the body, once it is there
    transfer: KvTransferParams | None = None  # as the body has it

    @property
    def _limits(self) -> ModelLimits:
        return self.edge.served.limits

    async def answer(self) -> TokenResponse:
        """Nothing runs yet. Raises `Refusal`."""
        check_task(self._limits, *self.tasks)
        request = self.request
        span = self.edge.tracing.begin(f"POST {request.scope['path']}", request.headers, request.state.arrival_ns)
        with ending_with_errors(span):
            self.edge.client.check_there()
            self.raw = await within(self._seconds_left(), read_body(request), "the body did not come")
            self.transfer = await off_loop(len(self.raw), LOOP_BYTES, read_params, self.raw, self._limits)
            try:
                return await self._response(span)
            except Refusal as refusal:
                await self._release(refusal.failure.message)
                raise

    async def _response(self, span: Span) -> TokenResponse:
        edge, request, read, size = self.edge, self.request, self.read, len(self.raw)
        limits, headers = self._limits, request.headers
        seconds = self._seconds_left()
        routing, body = await within(seconds, decode_both(self.raw, Routing, self.kind), "the body was not read")
        hands_over = is_handed_over(self.transfer, body, routing, limits)
        is_half = follow(self.transfer, body, routing, limits)
        routing.rendered_at = time_of(routing)
        routing.priority = priority_of(routing, headers.get("x-override-priority"))
        follow_gateway(routing, headers.get("x-data-parallel-rank"))
        if self.checks_model:
            check_model(routing.model, edge.config)
        seconds = self._seconds_left(routing)
        reading = self._checked(read(body, routing, edge.served, size), routing)
        asked = await within(seconds, reading, "the prompt was not tokenized")
        resume = await self._resumed()
        if (failure := beyond(*asked, limits)) is not None:
            await self._decline(failure, routing, asked, resume)
            raise Refusal.of(failure)
        if not is_half:
            await self._release("decode computes this prompt itself, for another min_tokens")
        made_at = int(time.time()) if resume is None else resume.opening.made_at
        asks, resumed = await self._asks(routing, asked, resume)
        prepared = await self._prepared(asks)

        async def prompts_at(rendered_at: int) -> Sequence[Prompt]:
            there = structs.replace(routing, rendered_at=rendered_at)
            prompts, all_params = await read(body, there, edge.served, size)
            raise_if(beyond(prompts, all_params, limits))
            return prompts

        model, answer = routing.model or edge.config.model_name, None
        if hands_over:
            host, is_chat = request.scope["server"][0], isinstance(body, ChatBody)
            answer = prefill_answer(routing, asks, host, limits, model=model, is_chat=is_chat)
        may_differ = limits.role == "prefill" and any(ask.prompt.rendered_at for ask in asks)
        return TokenResponse(
            edge=edge,
            span=span,
            prepared=prepared,
            arrival_ns=request.state.arrival_ns,
            endpoint=request.scope["path"],
            request_id=request.state.request_id,
            model=model,
            is_streamed=bool(routing.stream),
            reply=await off_loop(size, LOOP_BYTES, self.reply, Answered(body, routing, asks, made_at, model)),
            renderer=Renderer(edge.client, limits, prompts_at) if may_differ else None,
            teller=self._teller(routing, prepared, made_at, resumed),
            said=() if resumed is None else resumed.pieces,
            hands_over=answer,
        )

    async def _release(self, why: str) -> None:
        """Tell prefill that its half of this pair ends, and why. Where a router says `kv_transfer_params` prefill has
        answered before this server saw the body, and would wait for a decode that never comes.
        """
        if self.transfer is None or self._limits.role != "decode":
            return
        with suppress(Refusal):
            size = len(self.raw)
            theirs = await off_loop(size, LOOP_BYTES, as_prefill_was_asked, self.raw, self.transfer)
            routing, body = await decode_both(theirs, Routing, self.kind)
            routing.rendered_at = time_of(routing)
            follow(self.transfer, body, routing, self._limits)
            asked = await self._checked(self.read(body, routing, self.edge.served, size), routing)
            await self._decline(Failure(Cause.PEER_ABORTED, why), routing, asked, None)

    async def _decline(self, failure: Failure, routing: Routing, asked: Asked, resume: Resume | None) -> None:
        """Another server may have taken the other half of what is too much for this one, and would wait for ours."""
        if routing.bootstrap_room is None:
            return
        with suppress(Refusal):  # what no server takes has no other half
            asks, _ = await self._asks(routing, asked, resume)
            wanted = [one for one in await self._prepared(asks) if not one.ask.has_ended]
            halves = [IncomingRequest(one.submit.request, routed=one.ask.dp_rank) for one in wanted]
            self.edge.client.decline(halves, failure)

    def _teller(
        self, routing: Routing, prepared: Sequence[Prepared], made_at: int, resumed: Resumed | None
    ) -> Teller | None:
        """For a router that asks for it."""
        client, asks = self.edge.client, [one.ask for one in prepared]
        is_cumulative = self.request.scope["path"] == "/generate"
        is_asked_for = ASKS in self.request.headers and bool(routing.stream)
        if not is_asked_for or not can_tell(asks, self._limits, is_cumulative=is_cumulative):
            return None

        def serves() -> bool:
            return client.is_any_active

        if resumed is not None:
            return Teller(resumed.proofs, None, asks, serves)
        opening = Opening(asks[0].nonce, made_at, tuple(ask.pair.room or 0 for ask in asks))
        digests = [one.submit.request.prompt_digest for one in prepared]
        return Teller(Proofs(self._limits.keys.digests, opening, digests), opening, asks, serves)

    async def _resumed(self) -> Resume | None:
        """What of a stream was said elsewhere; only who asks to be told of one can have it."""
        if ASKS not in self.request.headers or self._limits.role == "unified":
            return None
        return (await off_loop(len(self.raw), LOOP_BYTES, decode_body, self.raw, Resuming)).tandem_resume

    async def _asks(
        self, routing: Routing, asked: Asked, resume: Resume | None
    ) -> tuple[list[SampleRequest], Resumed | None]:
        prompts, all_params = asked
        asks = await off_loop(
            sum(params.n for params in all_params),
            LOOP_SAMPLES,
            ask_all,
            routing,
            prompts,
            all_params,
            self._limits,
            own_rid=uuid.uuid4().hex if resume is None else resume.opening.nonce,
            tenant=tenant_of(given_key(self.request.headers), routing.cache_salt, routing.extra_key),
            timeout_ns=self._timeout_ns(routing),
            seed_rooms=() if resume is None else resume.opening.rooms,
        )
        if resume is None:
            return asks, None
        size = len(resume.said) + sum(len(ask.prompt.tokens) for ask in asks)
        resumed = await off_loop(size, LOOP_IDS, goes_on, asks, resume, self._text, self.edge.served)
        return resumed.asks, resumed

    def _timeout_ns(self, routing: Routing | None) -> int:
        """As the head says, and the body where it is there."""
        given = None if routing is None else routing.timeout
        header = self.request.headers.get("x-request-timeout-ms")
        return check_timeout(given, header, self.edge.config.request_timeout)

    def _seconds_left(self, routing: Routing | None = None) -> float:
        left: float = (self.request.state.arrival_ns + self._timeout_ns(routing) - time.monotonic_ns()) / SECOND
        return left

    async def _checked(self, reading: Awaitable[Found], routing: Routing) -> Found:
        """With the host of the other half. Raises `Refusal`."""
        found = await reading
        if self._limits.role != "unified":  # which ignores the fields of a pair
            await self.edge.hosts.check(routing.bootstrap_host)
        return found

    async def _prepared(self, asks: Sequence[SampleRequest]) -> list[Prepared]:
        requests = [(ask, self.edge.client.next_request_id()) for ask in asks]
        size = sum(len(ask.prompt.tokens) + ask.num_said for ask in asks) + len(asks) * (LOOP_IDS // LOOP_SAMPLES)
        return await off_loop(size, LOOP_IDS, self._prepare, requests)

    def _prepare(self, requests: Sequence[tuple[SampleRequest, RequestId]]) -> list[Prepared]:
        """In any thread."""
        arrival_ns = self.request.state.arrival_ns
        return [
            Prepared(ask, submission(ask, number, arrival_ns, self._limits), self._text(ask))
            for ask, number in requests
        ]

    def _text(self, ask: SampleRequest) -> TextStream:
        eos = frozenset() if ask.sampling.ignore_eos else self._limits.eos_token_ids
        return TextStream(
            detokenizer(
                self.edge.served.tokenizer, skip_special_tokens=ask.params.skip_special_tokens, prompt=ask.prompt.tokens
            ),
            stops=ask.params.stop,
            stop_tokens=eos | frozenset(ask.sampling.stop_token_ids),
            keeps_stop=ask.params.keeps_stop,
            min_tokens=ask.sampling.min_tokens,
            thinking=ask.params.thinking,
        )
