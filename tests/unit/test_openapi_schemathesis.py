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

EXAMPLES = 15
ANSWERS = {"metrics": {}, "flush": {}, "state": {}, "waits": [], "faults": {}}
# What only the model, the settings or another field of the same body decide.
OF_THE_MODEL = ("is not a token id", "is not served here", "leave no room for output", "the prompt has no tokens")
OF_PROMPTS = ("a list of ", "samples in one request", "prompt tokens")  # as many as there are prompts, and no more
OF_OTHER_FIELDS = {
    "best_of": "n",
    "min_tokens": "max_tokens",
    "min_new_tokens": "max_new_tokens",
    "stream_options": "stream",
    "prompt_logprobs": "stream",
    "top_logprobs": "logprobs",
    "tool_choice": "tools",
    "continue_final_message": "messages",
    "rid": "messages",  # as many, and printable
    **dict.fromkeys(("data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank"), "prompt"),
}
# Their text is in a language of its own.
GRAMMARS = (
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "response_format",
    "text.format",
    "tools",
    "output_config",
)


def is_beyond_a_schema(param: str, message: str) -> bool:
    last = param.removeprefix("sampling_params.")
    return (
        any(words in message for words in (*OF_THE_MODEL, *OF_PROMPTS))
        or last in OF_OTHER_FIELDS
        or last.startswith((*GRAMMARS, "guided_", "structured_outputs"))
    )


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
            is_ours = response.status_code not in (400, 404) or not is_beyond_a_schema(
                error["param"] or "", error["message"]
            )
            if is_ours:
                refused.append(f"{response.status_code} {error['message'][:200]} {str(case.body)[:300]}")

    ask()
    assert refused == []
