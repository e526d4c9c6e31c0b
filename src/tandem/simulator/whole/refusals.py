"""What everybody refuses: asked of servers once all is well, when there is one right answer.

Under faults a request may end with many a code. Here nothing goes wrong any more, so the code of each request that
nobody can answer is known, and so is the status for who is no reader of the data plane.
"""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from random import Random

import msgspec

from tandem.core.values import Incarnation
from tandem.membership import PROOF_BYTES, ClusterSecret
from tandem.server.api.errors import RULES, Problem
from tandem.server.wire import ReplicaInfo
from tandem.simulator.oracle import Violation
from tandem.simulator.whole.clients import Keys, answer_to, shown, simple
from tandem.transfer import protocol
from tandem.transfer.handshake import READER_PURPOSE, ReaderHandshake
from tandem.transfer.protocol import Status

GENERATE = "POST /generate"
CHAT = "POST /v1/chat/completions"
ELSEWHERE = "evil.example"
LIMIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Wrong:
    """A request, and the code that answers it. Headers may take the place of those that are right."""

    code: Problem
    line: str  # method and path
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)

    def sent(self, host: str, port: int, key: str) -> bytes:
        right = {"Host": f"{host}:{port}", "Content-Length": str(len(self.body)), "Connection": "close"}
        lines = "".join(f"{name}: {value}\r\n" for name, value in (right | dict(self.headers)).items())
        return f"{self.line} HTTP/1.1\r\n{lines}{shown(key)}\r\n".encode() + self.body


ALWAYS = (
    Wrong(Problem.HEAD_TOO_LARGE, "GET /v1/models", headers={"X-Long": "x" * (1 << 18)}),
    Wrong(Problem.RESPONSE_NOT_FOUND, "GET /v1/responses/resp_none"),
)
KEYLESS = Wrong(  # who is known by a key is asked nothing else
    Problem.CROSS_SITE, "GET /v1/models", headers={"Origin": f"http://{ELSEWHERE}", "Sec-Fetch-Site": "cross-site"}
)
ON_LOOPBACK = Wrong(Problem.UNKNOWN_HOST, "GET /v1/models", headers={"Host": ELSEWHERE})  # nor by which name, elsewhere
OF_VECTORS = Wrong(Problem.WRONG_TASK, GENERATE, b'{"text": "x"}')
OF_TOKENS = (
    Wrong(Problem.INVALID_JSON, GENERATE, b"{"),
    Wrong(Problem.BODY_TOO_LARGE, GENERATE, headers={"Content-Length": str(1 << 40)}),
    Wrong(
        Problem.REFUSED_BY_TEMPLATE,
        CHAT,
        b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"namespace": 1}}',
    ),
)
OF_FORMS = (
    Wrong(
        Problem.INVALID_COMBINATION,
        GENERATE,
        b'{"text": "x", "sampling_params": {"regex": "a", "json_schema": "{}"}}',
    ),
    Wrong(Problem.INVALID_GRAMMAR, GENERATE, b'{"text": "x", "sampling_params": {"regex": "("}}'),
)


def wrong_requests(*, has_keys: bool, is_on_loopback: bool, makes_vectors: bool, takes_forms: bool) -> Iterator[Wrong]:
    """What a server of that kind can be asked, to be refused."""
    yield from ALWAYS
    if not has_keys:
        yield KEYLESS
        if is_on_loopback:
            yield ON_LOOPBACK
    if makes_vectors:
        yield OF_VECTORS
        return
    yield from OF_TOKENS
    if takes_forms:
        yield from OF_FORMS


async def ask_wrongly(host: str, port: int, keys: Keys, wrong: Wrong) -> str:
    """Returns why there is no answer yet, of a server that is starting or ending. Raises Violation for a wrong one."""
    answer = await answer_to(host, port, wrong.line, wrong.sent(host, port, keys.user), timeout_s=LIMIT_S)
    if answer is None:
        return f"{port} {wrong.line}: no answer where {wrong.code} is one"
    error = answer.error or {}
    found, right = (answer.status, error.get("code")), (RULES[wrong.code].status, wrong.code)
    if found == right:
        return ""
    why = f"{port} {wrong.line}: {found} instead of {right}: {bytes(answer.body[:200])!r}"
    if error.get("retryable"):
        return why
    raise Violation("refusal", why)


async def greet_wrongly(host: str, bootstrap_port: int, secret: ClusterSecret, random: Random) -> str:
    """At the data plane of a prefill: as a stranger, with another version, and with pages of another size.

    Returns why it cannot be greeted yet. Raises Violation for any other status than the right one.
    """
    told = await simple(host, bootstrap_port, "GET", "/route?prefill_dp_rank=0")
    if told is None or told.status != 200:
        return f"its bootstrap server says {told}"
    replica = msgspec.json.decode(told.body, type=ReplicaInfo)
    port = random.choice(replica.shards).port
    for right in (Status.NOT_A_MEMBER, Status.WRONG_VERSION, Status.WRONG_PAGE_BYTES):
        try:
            async with asyncio.timeout(LIMIT_S):
                found = await _greet(host, port, replica.incarnation, secret, right)
        except (OSError, EOFError) as error:
            return f"the data plane at {port} says nothing: {error!r}"
        if found is not right:
            raise Violation("refusal", f"the data plane at {port} says {found!r} instead of {right!r}")
    return ""


async def _greet(host: str, port: int, peer: Incarnation, secret: ClusterSecret, wrong: Status) -> Status:
    reader, writer = await asyncio.open_connection(host, port)
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
