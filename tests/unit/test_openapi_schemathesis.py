"""Bodies that schemathesis makes of `/openapi.json`: none is refused but for what a schema cannot say, none is a 500.

A fixed seed and a fixed number of them; the node is a fake one.
"""

from collections.abc import Iterator

import hypothesis
import pytest
import schemathesis
from api_fakes import says, world
from hypothesis import HealthCheck, Phase
from schemathesis import Case

from tandem.server.api.openapi import BEYOND_SCHEMAS

EXAMPLES = 15
ANSWERS = {"metrics": {}, "flush": {}, "state": {}, "waits": [], "faults": {}}


def offered() -> Iterator[schemathesis.BaseSchema]:
    yield schemathesis.openapi.from_asgi("/openapi.json", world(says("ok"), answers=ANSWERS).app)


SCHEMA = next(offered())
OPERATIONS = {f"{it.method.upper()} {it.path}": it for it in (found.ok() for found in SCHEMA.get_all_operations())}


@pytest.mark.parametrize("name", [name for name in OPERATIONS if "/debug/" not in name])
def test_nothing_that_fits_its_schema_is_refused(name: str) -> None:
    refused: list[str] = []

    @hypothesis.seed(20)
    @hypothesis.settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(case=OPERATIONS[name].as_strategy())
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

    ask()
    assert refused == []
