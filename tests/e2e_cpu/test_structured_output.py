"""Structured output with the bundled model: the OpenAI SDK's own helpers, and prefill + decode = one engine.

The model was never shown JSON: what holds here holds by the grammar.
"""

import json
import re
from itertools import product
from typing import Any  # JSON documents

import openai
import pydantic
import pytest
from cluster import MODEL, Cluster, HttpError, Server, eventually

QUESTION = [{"role": "user", "content": "Tom has 3 apples and buys 4 more. How many apples does he have?"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "apples": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["red", "green"]},
    },
    "required": ["name", "apples", "kind"],
    "additionalProperties": False,
}
CASES: list[dict[str, Any]] = [
    {"json_schema": json.dumps(SCHEMA)},
    {"json_schema": json.dumps(SCHEMA), "temperature": 1.2, "sampling_seed": 5, "frequency_penalty": 0.5},
    {"regex": "[a-z]{20,40}!"},
    {"regex": "[0-9]{3,90}", "ignore_eos": True, "max_new_tokens": 40},
    {"ebnf": 'root ::= "yes" | "no"', "min_new_tokens": 5},
    {"regex": "(ab){30}", "stop": ["abababab"]},
    {"json_schema": json.dumps(SCHEMA), "n": 3, "temperature": 0.9, "sampling_seed": 11},
]


class Basket(pydantic.BaseModel):
    apples: int
    note: str = pydantic.Field(max_length=10)


@pytest.fixture
def client(router: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=30)


def said(server: Server, params: dict[str, Any]) -> list[tuple[Any, ...]]:
    answer: Any = server.generate(QUESTION[0]["content"], max_new_tokens=200, sampling_params=params)
    answers = answer if isinstance(answer, list) else [answer]
    return [(one["text"], one["output_ids"], one["meta_info"]["finish_reason"]) for one in answers]


@pytest.mark.parametrize("params", CASES, ids=lambda params: str(params)[:40])
def test_prefill_and_decode_say_what_one_engine_says(router: Server, unified: Server, params: dict[str, Any]) -> None:
    alone = said(unified, params)
    assert said(router, params) == alone
    for text, _, _ in alone:
        if "json_schema" in params:
            assert set(json.loads(text)) == {"name", "apples", "kind"}
        elif "stop" not in params:
            assert re.fullmatch(params.get("regex", "yes|no"), text)


def test_an_answer_at_the_end_of_its_grammar_ends_with_stop(client: openai.OpenAI, common: Cluster) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, extra_body={"guided_choice": ["maybe"]}
    )
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("maybe", "stop")
    for server in common.servers:
        eventually(server.is_idle, what=server.state)


def test_the_sdk_parses_what_pydantic_asks_for(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=QUESTION, response_format=Basket, temperature=0)
    assert isinstance(answer.choices[0].message.parsed, Basket)


def test_a_stream_is_put_together_what_the_whole_answer_is(client: openai.OpenAI) -> None:
    format: Any = {"type": "json_schema", "json_schema": {"name": "basket", "schema": SCHEMA, "strict": True}}
    asked: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0, "response_format": format}
    whole = client.chat.completions.create(**asked, logprobs=True)
    text = whole.choices[0].message.content
    assert text is not None
    assert json.loads(text)["kind"] in ("red", "green")
    assert whole.choices[0].logprobs is not None
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == text
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_any_json_object_is_one_however_long_it_may_be(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=300, response_format={"type": "json_object"}
    )
    text = answer.choices[0].message.content or ""
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)
    else:
        assert text.startswith("{")


def test_a_grammar_that_grows_too_large_on_the_way_is_the_clients_fault(common: Cluster) -> None:
    """It compiles, and each of its texts begins with one of two letters; behind these are too many ways on."""
    assert common.router is not None
    wide = " | ".join(["x"] * 2100)
    grammars = (f'root ::= ("a" | "c") ({wide})\nx ::= "b"', f'root ::= {wide}\nx ::= "a" | "b"')
    for server, grammar in product((common.router, common.decodes[0]), grammars):
        with pytest.raises(HttpError) as refused:
            server.generate("x", sampling_params={"ebnf": grammar})
        error = refused.value.error
        assert (refused.value.status, error["code"], error["retryable"]) == (400, "grammar_too_complex", False)


def test_both_halves_refuse_what_does_not_compile_in_the_same_words(common: Cluster) -> None:
    assert common.router is not None
    messages = set()
    for server in (*common.servers, common.router):
        with pytest.raises(HttpError) as refused:
            server.generate("x", sampling_params={"regex": "(a"}, bootstrap_room=9, bootstrap_host="127.0.0.1")
        assert (refused.value.status, refused.value.error["param"]) == (400, "sampling_params.regex")
        messages.add(refused.value.error["message"])
    assert len(messages) == 1
