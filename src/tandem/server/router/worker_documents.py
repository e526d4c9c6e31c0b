"""What workers tell of themselves, as far as the router reads it.

A worker is another program, perhaps of another version: a document that does not have the shape that is read here is
none, and costs that worker its place in the answer.
"""

import math
from typing import Any, TypeVar  # what is passed on as it is

import httpx
import msgspec
from msgspec import Struct
from starlette.responses import JSONResponse

from tandem.server.api.body import NOT_JSON
from tandem.server.api.bounds import LOOP_BYTES, MAX_INT, MIN_INT
from tandem.server.api.errors import Problem, Refusal
from tandem.server.api.off_loop import off_loop

STAGE = "router"
LOAD_SUMS = ("num_running_reqs", "num_waiting_reqs", "num_total_reqs", "num_used_tokens")

Info = dict[str, Any]
LoadList = list[Any]
Document = TypeVar("Document")


class LoadsDocument(Struct):
    loads: list[dict[str, Any]] = []


class ModelCard(Struct):
    id: str


class ModelList(Struct):
    data: list[ModelCard]


class ModelDocuments(Struct):
    data: list[dict[str, Any]]


class Named(Struct):
    """A body that may say of which model it speaks."""

    model: str | None = None


class OpenApi(Struct):
    paths: dict[str, Any]


class Aborted(Struct):
    aborted: int = 0


async def document_of(answer: httpx.Response | str, kind: type[Document]) -> Document | None:
    """None when there is no answer (a text says why), it is an error, or not of this shape."""
    if isinstance(answer, str) or not answer.is_success:
        return None
    return await off_loop(len(answer.content), LOOP_BYTES, read_document, answer.content, kind)


def read_document(raw: bytes, kind: type[Document]) -> Document | None:
    try:
        return msgspec.json.decode(raw, type=kind)
    except NOT_JSON:
        return None


def internal_states(info: Info) -> list[Any]:
    states = info.get("internal_states")
    return states if isinstance(states, list) else []


def sum_of_loads(loads: list[dict[str, Any]]) -> dict[str, float]:
    return {name: sum(number_of(load.get(name)) for load in loads) for name in LOAD_SUMS}


def number_of(value: object) -> float:
    """0 for what counts nothing. An integer of hundreds of digits has no sum with a fraction."""
    if isinstance(value, float):
        return value if math.isfinite(value) else 0
    return value if isinstance(value, int) and MIN_INT <= value <= MAX_INT else 0


def passed_on(document: object) -> JSONResponse:
    """An answer made of workers' documents. Raises Refusal where they are nested beyond what can be written."""
    try:
        return JSONResponse(document)
    except (RecursionError, ValueError) as error:
        detail = f"what a worker has answered cannot be passed on: {error}"
        raise Refusal(Problem.CONNECTION_LOST, detail, stage=STAGE) from None
