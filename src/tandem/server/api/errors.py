"""What a client is told when it does not get its tokens: one table from code to HTTP status and advice.

The codes are a closed list: the causes of the core, and the few problems that only the HTTP edge or the router can
see. The status is a signal to gateways: 4xx means "this request, never again", 5xx means "another pair may do better".
So a user's mistake is never a 5xx and a passing trouble is never a 4xx. `retryable` is in every error body, and our
router goes by it. `docs/errors.md` is made of the table.
"""

from enum import StrEnum

import msgspec
from msgspec import Struct

from tandem.core.commands import FailRequest
from tandem.core.values import SECOND, Cause
from tandem.logtext import visible

EDGE_STAGE = "edge"  # the request never reached the node


class Problem(StrEnum):
    """What the edge refuses by itself, before the node hears of it."""

    INVALID_JSON = "invalid_json"
    INVALID_VALUE = "invalid_value"
    INVALID_COMBINATION = "invalid_combination"
    INVALID_GRAMMAR = "invalid_grammar"
    REFUSED_BY_TEMPLATE = "refused_by_template"
    UNSUPPORTED = "unsupported"
    NO_CHAT_TEMPLATE = "no_chat_template"
    MODEL_NOT_FOUND = "model_not_found"
    WRONG_TASK = "wrong_task"
    NOT_FOUND = "not_found"
    RESPONSE_NOT_FOUND = "response_not_found"
    PREVIOUS_RESPONSE_NOT_FOUND = "previous_response_not_found"
    HOST_NOT_ALLOWED = "host_not_allowed"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    UNAUTHORIZED = "unauthorized"
    UNSIGNED = "unsigned"
    FORBIDDEN = "forbidden"
    MALFORMED_REQUEST = "malformed_request"
    UNKNOWN_HOST = "unknown_host"
    CROSS_SITE = "cross_site"
    HEAD_TOO_LARGE = "head_too_large"
    BODY_TOO_LARGE = "body_too_large"
    DUPLICATE_RID = "duplicate_rid"
    NOT_READY = "not_ready"
    BUSY = "busy"
    NODE_SILENT = "node_silent"
    NO_LIVE_PAIR = "no_live_pair"
    WORKER_UNREACHABLE = "worker_unreachable"
    CONNECTION_LOST = "connection_lost"
    INTERNAL = "internal_error"


Code = Problem | Cause


class ErrorRule(Struct, frozen=True):
    """One row of the table."""

    status: int
    retryable: bool  # the same request may succeed elsewhere or a little later
    said_by: str
    remedy: str  # what the reader should do


RULES: dict[Code, ErrorRule] = {
    Problem.INVALID_JSON: ErrorRule(400, False, "edge or router", "send a JSON object; the message names the position"),
    Problem.INVALID_VALUE: ErrorRule(400, False, "edge or router", "correct the field named in `param`"),
    Problem.INVALID_COMBINATION: ErrorRule(
        400, False, "edge", "change one of the fields that `message` names: each is right by itself"
    ),
    Problem.INVALID_GRAMMAR: ErrorRule(
        400,
        False,
        "edge",
        "correct the schema, expression or grammar in `param`; `message` says what is wrong and where",
    ),
    Problem.REFUSED_BY_TEMPLATE: ErrorRule(
        400, False, "edge", "`message` is what the model's chat template says of these messages"
    ),
    Problem.UNSUPPORTED: ErrorRule(
        400, False, "edge or router", "leave out the field named in `param`; this server cannot do it"
    ),
    Problem.NO_CHAT_TEMPLATE: ErrorRule(
        400, False, "edge", "use /v1/completions, or start the server with --chat-template"
    ),
    Problem.MODEL_NOT_FOUND: ErrorRule(404, False, "edge or router", "GET /v1/models lists the served model"),
    Problem.WRONG_TASK: ErrorRule(
        400, False, "edge or router", "send it to a server whose model is for that; `message` says what this one does"
    ),
    Problem.NOT_FOUND: ErrorRule(404, False, "edge or router", "GET /openapi.json lists the paths"),
    Problem.RESPONSE_NOT_FOUND: ErrorRule(
        404,
        False,
        "edge or router",
        "it was not stored, was deleted, made with another key, or had to go (--max-stored-responses)",
    ),
    Problem.PREVIOUS_RESPONSE_NOT_FOUND: ErrorRule(
        400, False, "edge or router", "as `response_not_found`: send all items instead of `previous_response_id`"
    ),
    Problem.HOST_NOT_ALLOWED: ErrorRule(
        400, False, "edge", "name a prefill on this machine, or in a network of --disaggregation-allow"
    ),
    Problem.METHOD_NOT_ALLOWED: ErrorRule(
        405, False, "edge or router", "GET /openapi.json lists the methods of each path"
    ),
    Problem.UNAUTHORIZED: ErrorRule(
        401, False, "edge or router", "send `Authorization: Bearer KEY`, or `x-api-key: KEY`"
    ),
    Problem.UNSIGNED: ErrorRule(401, False, "bootstrap", "sign writes with the cluster secret (--cluster-secret-file)"),
    Problem.FORBIDDEN: ErrorRule(
        403,
        False,
        "edge or router",
        "debug endpoints answer on the server's own machine only; /debug/faults needs --enable-fault-injection",
    ),
    Problem.MALFORMED_REQUEST: ErrorRule(
        400, False, "edge or router", "send a plain path and one well-formed Host; see `message`"
    ),
    Problem.UNKNOWN_HOST: ErrorRule(
        403,
        False,
        "edge or router",
        "ask for localhost or a number, name the host with --allowed-host, or set --api-key",
    ),
    Problem.CROSS_SITE: ErrorRule(
        403, False, "edge or router", "set --api-key, or name the page's origin with --allowed-origins"
    ),
    Problem.HEAD_TOO_LARGE: ErrorRule(
        431, False, "edge or router", "send fewer or shorter headers, and a shorter path"
    ),
    Problem.BODY_TOO_LARGE: ErrorRule(413, False, "edge or router", "send a smaller body"),
    Problem.DUPLICATE_RID: ErrorRule(409, False, "edge", "use another `rid`, or wait until the first one has ended"),
    Problem.NOT_READY: ErrorRule(503, True, "edge or router", "wait until /ready answers 200"),
    Problem.BUSY: ErrorRule(503, True, "edge or router", "wait as long as `Retry-After` says, or use another server"),
    Problem.NODE_SILENT: ErrorRule(503, True, "edge", "a process of the server does not answer; see its log"),
    Problem.NO_LIVE_PAIR: ErrorRule(503, True, "router", "start the missing worker: the router finds it by itself"),
    Problem.WORKER_UNREACHABLE: ErrorRule(
        502, True, "router", "`message` names a server that does not listen: is it running?"
    ),
    Problem.CONNECTION_LOST: ErrorRule(502, True, "router", "`message` names a server that went away: see its log"),
    Problem.INTERNAL: ErrorRule(
        500, True, "edge or router", "a bug: report it with the request id and the server's log"
    ),
    Cause.ABORTED: ErrorRule(499, False, "node", "nothing: the client left, or an operator ended the request"),
    Cause.DEADLINE_EXCEEDED: ErrorRule(
        504, True, "node", "`stage` says what it waited for; allow more time by `timeout`"
    ),
    Cause.CONTEXT_LENGTH_EXCEEDED: ErrorRule(400, False, "edge or node", "shorten the prompt"),
    Cause.QUEUE_FULL: ErrorRule(503, True, "node", "try again later or on another server (--max-queued-requests)"),
    Cause.DUPLICATE_ROOM: ErrorRule(409, False, "node", "draw a new `bootstrap_room` for every prompt and attempt"),
    Cause.DRAINING: ErrorRule(503, True, "edge or node", "the server is shutting down: use another one"),
    Cause.OUT_OF_PAGES: ErrorRule(
        413, False, "node", "shorten prompt or output, or raise --max-total-tokens: the KV pool is too small for it"
    ),
    Cause.PEER_LOST: ErrorRule(502, True, "node", "try again: the other half went away"),
    Cause.PEER_UNKNOWN: ErrorRule(
        502, True, "node", "check `bootstrap_host` and `bootstrap_port`: no prefill answers there"
    ),
    Cause.PEER_ABORTED: ErrorRule(502, True, "node", "try again: the other half gave up, `message` says why"),
    Cause.ROUTE_CONFLICT: ErrorRule(
        400, False, "node", "route the request to the DP rank that it names, or that its room implies; see `message`"
    ),
    Cause.BOOTSTRAP_TIMEOUT: ErrorRule(
        504, True, "node", "decode is overloaded or gone; add decode servers, or try again"
    ),
    Cause.WAITING_TIMEOUT: ErrorRule(
        504, True, "node", "prefill is overloaded or stuck; add prefill servers, or try again"
    ),
    Cause.LAYOUT_MISMATCH: ErrorRule(
        502,
        True,
        "node",
        "run both halves with the same model, dtype and page size, and with --deterministic also with the same "
        "--attention-backend on the same kind of processor; `message` names the difference",
    ),
    Cause.LEASE_EXPIRED: ErrorRule(502, True, "node", "try again: the pages were given back before they were read"),
    Cause.CORRUPT_PAGES: ErrorRule(
        502, True, "node", "try again; if it returns, suspect memory or network of the two hosts"
    ),
    Cause.TRANSFER_FAILED: ErrorRule(502, True, "node", "try again; `message` names the worker"),
    Cause.PROTOCOL: ErrorRule(502, True, "node", "run the same version on both halves"),
    Cause.INVALID_LOGITS: ErrorRule(
        500,
        False,
        "worker",
        "no finite numbers: check weights and dtype",
    ),
    Cause.GRAMMAR_TOO_COMPLEX: ErrorRule(
        400,
        False,
        "worker",
        "simplify the schema or grammar: fewer optional properties and fewer alternatives that begin alike",
    ),
    Cause.WORKER_LOST: ErrorRule(503, True, "node", "the engine process ended; see the server's log"),
    Cause.ENGINE_FAILED: ErrorRule(500, True, "node", "the forward pass of its batch raised; see the server's log"),
}

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    431: "invalid_request_error",
    499: "aborted_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


NAMED_EVENTS = frozenset(
    {"/v1/messages", "/v1/responses"}
)  # pages whose clients know the events of a stream by their names


class Failure(Struct, frozen=True):
    """One refusal or failed request, as the client will read it."""

    code: Code
    message: str
    param: str | None = None
    stage: str = EDGE_STAGE
    peer: str = ""  # the server with the other half, if it was known
    waited_seconds: float = 0.0  # in that stage

    def __post_init__(self) -> None:
        """Whatever a client, a peer or a library has put into the texts."""
        for name in ("message", "param", "stage", "peer"):
            text = getattr(self, name)
            if text is not None and (line := visible(text)) != text:
                msgspec.structs.force_setattr(self, name, line)

    @property
    def status(self) -> int:
        return RULES[self.code].status


class Refusal(Exception):
    """Raised while a request is being checked; the outermost handler answers with the failure."""

    def __init__(
        self,
        code: Code,
        message: str,
        *,
        param: str | None = None,
        stage: str = EDGE_STAGE,
        waited_seconds: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.failure = Failure(code, message, param, stage, waited_seconds=waited_seconds)

    @classmethod
    def of(cls, failure: Failure) -> "Refusal":
        refusal = cls(failure.code, failure.message)
        refusal.failure = failure
        return refusal


def invalid(param: str, message: str) -> Refusal:
    return Refusal(Problem.INVALID_VALUE, f"{param}: {message}", param=param)


def contradiction(param: str, message: str) -> Refusal:
    """Of fields that are right each by itself, in a way that no schema can say."""
    return Refusal(Problem.INVALID_COMBINATION, f"{param}: {message}", param=param)


def failure_of(command: FailRequest) -> Failure:
    """What the node said, in words for a client."""
    message = in_words(command.cause, command.detail)
    return Failure(command.cause, message, None, command.stage, command.peer, command.waited_ns / SECOND)


def in_words(cause: StrEnum, detail: str) -> str:
    words = cause.value.replace("_", " ")
    return f"{words}: {detail}" if detail else words


def error_json(failure: Failure, request_id: str) -> bytes:
    """The error envelope of every endpoint: OpenAI's shape with a few more fields, and Anthropic's `type`."""
    rule = RULES[failure.code]
    return msgspec.json.encode(
        {
            "type": "error",
            "error": {
                "message": failure.message,
                "type": TYPES.get(rule.status, "server_error"),
                "param": failure.param,
                "code": failure.code,
                "retryable": rule.retryable,
                "stage": failure.stage,
                "waited_seconds": round(failure.waited_seconds, 3),
                "peer": failure.peer or None,
                "remedy": rule.remedy,
                "request_id": request_id,
            },
        }
    )


def error_event(path: str, error: bytes) -> bytes:
    """The last event of a stream that has failed; `error` is its `error_json`."""
    name = b"event: error\n" if path in NAMED_EVENTS else b""
    return name + b"data: " + error + b"\n\n"


def error_headers(failure: Failure) -> dict[str, str]:
    headers = {"content-type": "application/json"}
    if failure.status == 503:
        headers["retry-after"] = "1"
    if failure.code is Problem.UNAUTHORIZED:
        headers["www-authenticate"] = "Bearer"
    return headers
