"""Bodies that schemathesis makes of `/openapi.json`: one that fits is refused only for what a schema cannot say, one
that does not fit is refused, none is a 500.

A fixed seed and a fixed number of them; the node is a fake one.
"""

from collections.abc import Callable
from typing import Any

import hypothesis
import msgspec
import pytest
import schemathesis
from api_fakes import says, world
from hypothesis import HealthCheck, Phase
from msgspec import Raw, Struct
from schemathesis import Case, GenerationMode
from schemathesis.schemas import APIOperation

from tandem.server.api.body import ChatBody, CompletionBody
from tandem.server.api.foreign_fields import is_asked_for
from tandem.server.api.messages import MessagesBody
from tandem.server.api.openapi import BEYOND_SCHEMAS, COUNTS, openapi_document, refused_fields, schema_of
from tandem.server.api.openapi_bodies import GENERATION
from tandem.server.api.responses import ResponsesBody

EXAMPLES = {GenerationMode.POSITIVE: 10, GenerationMode.NEGATIVE: 5}  # the latter take longer to be made
ANSWERS = {"metrics": {}, "flush": {}, "state": {}, "waits": [], "faults": {}}
ROLES = {"unified": "null", "prefill": "prefill", "decode": "decode"}


def operations_of(mode: str) -> dict[str, APIOperation]:
    app = world(says("ok"), answers=ANSWERS, disaggregation_mode=mode).app
    found = [it.ok() for it in schemathesis.openapi.from_asgi("/openapi.json", app).get_all_operations()]
    return {f"{it.method.upper()} {it.path}": it for it in found}


OPERATIONS = {role: operations_of(mode) for role, mode in ROLES.items()}
FITTING: list[Any] = [("unified", name) for name in OPERATIONS["unified"] if "/debug/" not in name]
FITTING += [("decode", f"POST {path}") for path in GENERATION]
FITTING += [pytest.param("prefill", f"POST {path}", marks=pytest.mark.slow) for path in GENERATION]
UNFIT = [name for name, it in OPERATIONS["unified"].items() if name.startswith("POST") and it.body]


def each(operation: APIOperation, mode: GenerationMode, ask: Callable[[Case], None]) -> None:
    """Ask what schemathesis makes of it."""

    @hypothesis.seed(20)
    @hypothesis.settings(
        max_examples=EXAMPLES[mode],
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def run(case: Case) -> None:
        ask(case)

    run()


@pytest.mark.parametrize(("role", "name"), FITTING)
def test_nothing_that_fits_its_schema_is_refused(role: str, name: str) -> None:
    refused: list[str] = []

    def ask(case: Case) -> None:
        if isinstance(case.body, dict):
            case.body.pop("timeout", None)  # some are too short to be kept
        response = case.call()
        if response.status_code == 404 and "{id}" in name:
            return
        if response.status_code != 200:
            error = response.json()["error"]
            if error["code"] not in BEYOND_SCHEMAS:
                refused.append(f"{response.status_code} {error['message'][:200]} {str(case.body)[:300]}")

    each(OPERATIONS[role][name], GenerationMode.POSITIVE, ask)
    assert refused == []


@pytest.mark.parametrize("name", UNFIT)
def test_nothing_that_does_not_fit_its_schema_is_taken(name: str) -> None:
    taken: list[str] = []

    def ask(case: Case) -> None:
        response = case.call()
        if not 400 <= response.status_code < 500:
            taken.append(f"{response.status_code} {str(case.body)[:300]}")

    each(OPERATIONS["unified"][name], GenerationMode.NEGATIVE, ask)
    assert taken == []


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody, ResponsesBody, MessagesBody])
def test_a_field_that_is_refused_may_hold_what_asks_for_nothing(kind: type[Struct]) -> None:
    for name, schema in refused_fields(kind)["properties"].items():
        listed = {repr(value) for value in schema.get("enum", ())}
        for value in (None, False, True, -1, 0, 1, 2, "", "medium", "other", [], {}, [1]):
            is_idle = not is_asked_for(name, Raw(msgspec.json.encode(value)))
            assert (repr(value) in listed) == is_idle, f"{name}: {value!r}"


@pytest.mark.parametrize("path", COUNTS)
def test_all_that_is_read_of_a_body_that_is_counted_is_in_the_document(path: str) -> None:
    """By chance a body that is made up has a field of a name that is read, and whatever in it."""
    parts = schema_of(openapi_document("unified")["paths"][path]["post"])["allOf"]
    named = {name for part in parts for name in part.get("properties", {})}
    assert {"model", "bootstrap_host", "bootstrap_room", "routed_dp_rank", "rendered_at", "timeout"} <= named
