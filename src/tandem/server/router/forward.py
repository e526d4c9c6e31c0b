"""What the router asks of workers in a client's name: which pages, with which headers, and nothing else.

Paths and methods that reach a worker are those of the `WorkerRoute`s below, and not what the client wrote; the one part
that a client fills in, the name of a model, is quoted anew and cannot leave its place. The same for headers: those of
the lists below are passed on. A client's key is among them, as gateways for SGLang have it: workers may check keys
themselves, and tell clients apart by them. So where both have keys, the workers need every key that the router knows.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import quote

from starlette.datastructures import Headers

from tandem.server.api.errors import Problem, Refusal

CONTROL_HEADERS = ("authorization", "x-api-key")
GENERATION_HEADERS = (*CONTROL_HEADERS, "traceparent", "tracestate", "x-data-parallel-rank", "x-override-priority")

MAX_TARGET_CHARS = 32 << 10  # that workers read, and httpx sends


@dataclass(frozen=True, slots=True)
class WorkerRoute:
    """A worker's page. `{id}` in its path is the one part that may vary, slashes included."""

    method: str
    path: str

    def target(self, parameters: Mapping[str, str]) -> str:
        """parameters: of a path that was let in, and so has no dot segment. Raises Refusal for one that is too long."""
        target = quote(self.path.format_map(parameters), safe="/")  # three times as long, maybe
        if len(target) > MAX_TARGET_CHARS:
            raise Refusal(Problem.MALFORMED_REQUEST, "the path is too long to be passed on", stage="router")
        return target


MODELS = WorkerRoute("GET", "/v1/models")
ONE_MODEL = WorkerRoute("GET", "/v1/models/{id}")
MODEL_INFO = WorkerRoute("GET", "/model_info")
OPENAPI = WorkerRoute("GET", "/openapi.json")
TOKENIZE = WorkerRoute("POST", "/tokenize")
DETOKENIZE = WorkerRoute("POST", "/detokenize")
COUNT_TOKENS = WorkerRoute("POST", "/v1/messages/count_tokens")
COUNT_INPUT = WorkerRoute("POST", "/v1/responses/input_tokens")
SERVER_INFO = WorkerRoute("GET", "/server_info")
DEBUG_DATA = WorkerRoute("GET", "/debug/pd/data")
LOADS = WorkerRoute("GET", "/v1/loads")
GET_LOAD = WorkerRoute("GET", "/get_load")
HEALTH_GENERATE = WorkerRoute("GET", "/health_generate")
FLUSH_CACHE = WorkerRoute("POST", "/flush_cache")
ABORT_REQUEST = WorkerRoute("POST", "/abort_request")


def sent_headers(given: Headers, names: Iterable[str], *, request_id: str) -> dict[str, str]:
    """What goes to a worker: of `given` only `names` that say something, since `Bearer ` could not be sent on."""
    passed = {name: value for name in names if (value := given.get(name, "").strip())}
    return {"content-type": "application/json", "x-request-id": request_id} | passed
