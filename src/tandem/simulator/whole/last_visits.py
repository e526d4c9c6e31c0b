"""Who comes once all is well, when there is one right answer: operators, clients of stored responses, and whoever is
to be refused.

Under faults a request may end with many a code. Here nothing goes wrong any more, so the status of each page is known,
the code of each request that nobody can answer, and what the data plane says to who is no reader of it. Each visitor
is a process on the server's own machine, where debug pages answer.
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any  # JSON documents

import msgspec

from tandem.core.values import SECOND, Incarnation
from tandem.membership import PROOF_BYTES, ClusterSecret
from tandem.server.api.errors import RULES, Code, Problem
from tandem.server.wire import ReplicaInfo
from tandem.simulator.oracle import Violation
from tandem.simulator.whole import seldom
from tandem.simulator.whole.clients import Answer, answer_to, shown, simple
from tandem.simulator.whole.sockets import Machine
from tandem.transfer import protocol
from tandem.transfer.handshake import READER_PURPOSE, ReaderHandshake
from tandem.transfer.protocol import Status

GENERATE = "POST /generate"
CHAT = "POST /v1/chat/completions"
ELSEWHERE = "evil.example"
NOWHERE = "http://127.0.0.1:9"  # a worker that does not listen
LIMIT_S = 5.0
AGAIN_S, PAUSE_S = 60.0, 0.25  # of a server that is starting or ending
ROUTER = "router"


@dataclass(frozen=True, slots=True)
class Visit:
    """A request, and how it is answered. Headers may take the place of those that are right."""

    line: str  # method and path
    right: int | Code  # status, or the code of the refusal
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)

    def sent(self, port: int, key: str) -> bytes:
        right = {"Host": f"127.0.0.1:{port}", "Content-Length": str(len(self.body)), "Connection": "close"}
        lines = "".join(f"{name}: {value}\r\n" for name, value in (right | dict(self.headers)).items())
        return f"{self.line} HTTP/1.1\r\n{lines}{shown(key)}\r\n".encode() + self.body


PAGES = (
    *("/", "/docs", "/health", "/ready", "/version", "/metrics", "/v1/models", "/v1/models/tandem/mini", "/v1/loads"),
    *("/get_load", "/server_info", "/get_server_info", "/openapi.json", "/debug/pd", "/debug/pd/data"),
)
PAGES_OF_SERVERS = ("/model_info", "/get_model_info", "/debug/waits", "/debug/state")
PAGES_OF_ROUTERS = ("/workers", "/list_workers")
REFUSED = (
    Visit("GET /v1/models", Problem.HEAD_TOO_LARGE, headers={"X-Long": "x" * (1 << 18)}),
    Visit("GET /v1/responses/resp_none", Problem.RESPONSE_NOT_FOUND),
)
REFUSED_TO_BROWSERS = Visit(  # who is known by a key is asked nothing else
    "GET /v1/models", Problem.CROSS_SITE, headers={"Origin": f"http://{ELSEWHERE}", "Sec-Fetch-Site": "cross-site"}
)
REFUSED_ON_LOOPBACK = Visit("GET /v1/models", Problem.UNKNOWN_HOST, headers={"Host": ELSEWHERE})
REFUSED_BY_VECTORS = Visit(GENERATE, Problem.WRONG_TASK, b'{"text": "x"}')
REFUSED_BY_TOKENS = (
    Visit(GENERATE, Problem.INVALID_JSON, b"{"),
    Visit(GENERATE, Problem.BODY_TOO_LARGE, headers={"Content-Length": str(1 << 40)}),
)
REFUSED_BY_TEMPLATE = Visit(
    CHAT,
    Problem.REFUSED_BY_TEMPLATE,
    b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"namespace": 1}}',
)
REFUSED_WITHOUT_TEMPLATE = Visit(CHAT, Problem.NO_CHAT_TEMPLATE, b'{"messages": [{"role": "user", "content": "x"}]}')
REFUSED_BY_FORM = (
    Visit(
        GENERATE,
        Problem.INVALID_COMBINATION,
        b'{"text": "x", "sampling_params": {"regex": "a", "json_schema": "{}"}}',
    ),
    Visit(GENERATE, Problem.INVALID_GRAMMAR, b'{"text": "x", "sampling_params": {"regex": "("}}'),
)


@dataclass(frozen=True, slots=True)
class Visited:
    """A server, as its visitors have to know it."""

    name: str
    port: int
    key: str  # an operator's, which opens everything; empty where nobody needs one
    is_front: bool  # clients talk to it
    is_on_loopback: bool
    makes_vectors: bool
    takes_forms: bool
    has_priorities: bool
    takes_hooks: bool
    has_chats: bool  # its model has a chat template

    @property
    def is_router(self) -> bool:
        return self.name == ROUTER

    def visits(self) -> Iterator[Visit]:
        """In order."""
        for page in (*PAGES, *(PAGES_OF_ROUTERS if self.is_router else PAGES_OF_SERVERS)):
            yield Visit(f"GET {page}", 200)
        yield Visit("POST /flush_cache", 200)
        yield from REFUSED
        if not self.key:
            yield REFUSED_TO_BROWSERS
            if self.is_on_loopback:
                yield REFUSED_ON_LOOPBACK
        for path, body, right in self._seldom():
            yield Visit(f"POST {path}", right, msgspec.json.encode(body))
        if self.makes_vectors:
            yield REFUSED_BY_VECTORS
        else:
            yield from REFUSED_BY_TOKENS
            yield REFUSED_BY_TEMPLATE if self.has_chats else REFUSED_WITHOUT_TEMPLATE
            yield from REFUSED_BY_FORM if self.takes_forms else ()
        if self.is_router:
            yield from changes_of_workers()
        elif self.takes_hooks:
            hooks = b'{"force_optimistic_prefill_retry_prob": 0, "disagg_failure_prob": 0}'
            yield Visit("PUT /debug/faults", 200, hooks)  # to what they are
            yield Visit("GET /debug/faults", 200)

    def _seldom(self) -> Iterable[seldom.Seldom]:
        if self.makes_vectors:
            return seldom.OF_VECTORS
        if not self.is_front or not self.has_chats:
            return ()
        return seldom.of_tokens(takes_forms=self.takes_forms, has_priorities=self.has_priorities)

    async def visit(self, visit: Visit) -> Answer:
        """The answer, which is the right one. Asks again where the server is not there, or says that it is not ready.
        Raises Violation for a wrong answer."""
        until = Machine.kernel.now + AGAIN_S * SECOND
        code, status = (None, visit.right) if isinstance(visit.right, int) else (visit.right, RULES[visit.right].status)
        while True:
            sent = visit.sent(self.port, self.key)
            answer = await answer_to("127.0.0.1", self.port, visit.line, sent, timeout_s=LIMIT_S)
            error = (None if answer is None else answer.error) or {}
            if answer is not None and (answer.status, error.get("code")) == (status, code):
                return answer
            is_passing = answer is None or error.get("retryable")
            if not is_passing or Machine.kernel.now > until:
                found = "none" if answer is None else f"{answer.status} {bytes(answer.body[:300])!r}"
                raise Violation(
                    "last visit", f"{self.name} {visit.line}: the answer is not {visit.right!r} but {found}"
                )
            await asyncio.sleep(PAUSE_S)


def changes_of_workers() -> Iterator[Visit]:
    """One that nobody has heard of joins and leaves again, named by its address."""
    joining = msgspec.json.encode({"url": NOWHERE, "worker_type": "decode"})
    yield Visit("POST /workers", 202, joining)
    yield Visit("POST /workers", 202, joining)  # is known
    yield Visit("POST /workers", Problem.INVALID_VALUE, joining.replace(b"decode", b"prefill"))
    yield Visit("POST /workers", Problem.INVALID_VALUE, joining.replace(b"decode", b"router"))
    yield Visit("GET /workers", 200)
    yield Visit("GET /workers/none", Problem.NOT_FOUND)
    yield Visit(f"POST /remove_worker?url={NOWHERE}", 202)
    yield Visit(f"POST /remove_worker?url={NOWHERE}", Problem.NOT_FOUND)
    yield Visit(f"POST /add_worker?url={NOWHERE}&worker_type=decode", 202)
    yield Visit(f"POST /remove_worker?url={NOWHERE}", 202)


async def visit_all(server: Visited, codes: list[str]) -> None:
    """Raises Violation. codes: is told what was refused, as `code NAME`"""
    for visit in server.visits():
        await server.visit(visit)
        if not isinstance(visit.right, int):
            codes.append(f"code {visit.right}")
    if server.is_front and server.has_chats and not server.makes_vectors:
        await keep_a_conversation(server)


async def keep_a_conversation(server: Visited) -> None:
    """Three responses of which two go on from the first, by its id and by its items; then all are read, and deleted."""

    async def post(**fields: Any) -> Any:
        body = {"input": "How many?", "max_output_tokens": 4, "temperature": 0, **fields}
        answer = await server.visit(Visit("POST /v1/responses", 200, msgspec.json.encode(body)))
        return msgspec.json.decode(answer.body)

    first = await post()
    second = await post(previous_response_id=first["id"])
    user = {"role": "user", "content": "How many?"}
    third = await post(input=[user, *({"type": "item_reference", "id": it["id"]} for it in first["output"]), user])
    right = ["message", *(item["type"] for item in first["output"]), "message"]
    for id in (second["id"], third["id"]):
        listed = await server.visit(Visit(f"GET /v1/responses/{id}/input_items?order=asc", 200))
        kinds = [item["type"] for item in msgspec.json.decode(listed.body)["data"]]
        if kinds != right:
            raise Violation("last visit", f"what a response goes on from is {kinds} and not {right}")
    for id in (first["id"], second["id"], third["id"]):
        await server.visit(Visit(f"GET /v1/responses/{id}", 200))
        await server.visit(Visit(f"DELETE /v1/responses/{id}", 200))
        await server.visit(Visit(f"GET /v1/responses/{id}", Problem.RESPONSE_NOT_FOUND))


async def greet_wrongly(bootstrap_port: int, secret: ClusterSecret, random: Random) -> str:
    """At the data plane of a prefill: with another secret, another version, and pages of another size.

    Returns why it cannot be greeted yet. Raises Violation for any other status than the right one.
    """
    told = await simple("127.0.0.1", bootstrap_port, "GET", "/route?prefill_dp_rank=0")
    if told is None or told.status != 200:
        return f"its bootstrap server says {told}"
    replica = msgspec.json.decode(told.body, type=ReplicaInfo)
    port = random.choice(replica.shards).port
    for right in (Status.NOT_A_MEMBER, Status.WRONG_VERSION, Status.WRONG_PAGE_BYTES):
        try:
            async with asyncio.timeout(LIMIT_S):
                found = await _greet(port, replica.incarnation, secret, right)
        except (OSError, EOFError) as error:
            return f"the data plane at {port} says nothing: {error!r}"
        if found is not right:
            raise Violation("last visit", f"the data plane at {port} says {found!r} instead of {right!r}")
    return ""


async def _greet(port: int, peer: Incarnation, secret: ClusterSecret, wrong: Status) -> Status:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        challenge = await reader.readexactly(protocol.CHALLENGE_MESSAGE_BYTES)
        spoken = ClusterSecret(bytes(32)) if wrong is Status.NOT_A_MEMBER else secret
        handshake = ReaderHandshake(spoken, peer=peer, reader=bytes(protocol.DIGEST_BYTES), page_bytes=1)
        hello = handshake.hello(challenge)
        if wrong is Status.WRONG_VERSION:
            hello = _of_another_version(hello, protocol.unpack_challenge(challenge), secret)
        writer.write(hello)
        welcome = await reader.readexactly(protocol.WELCOME_BYTES)
        return protocol.unpack_welcome(welcome).status
    finally:
        writer.transport.abort()


def _of_another_version(hello: bytes, challenge: bytes, secret: ClusterSecret) -> bytes:
    """The same, from a member whose code is newer."""
    newer = msgspec.structs.replace(protocol.unpack_hello(hello), version=protocol.VERSION + 1)
    said = protocol.pack_hello(newer)[:-PROOF_BYTES]
    return said + secret.proof(READER_PURPOSE, challenge, said)
