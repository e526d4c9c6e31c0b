"""`/v1/messages` as Anthropic's own client uses it: what becomes of a conversation, and what the answer becomes."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any  # bodies

import anthropic
import pytest
from api_fakes import Script, World, ids, prompt_of, says, world
from test_api_tools import ADD, CALL, OTHER, THINKS, tokenizer

from raw_http import serving
from tandem.core.values import Cause
from tandem.server.api.body import ChatBody
from tandem.server.api.errors import Refusal
from tandem.server.api.messages import MessagesBody, chat_of

USER = [{"role": "user", "content": "hi"}]
TOOLS = [
    {"name": "add", "description": "Adds.", "input_schema": ADD["function"]["parameters"]},
    {"name": "sub", "input_schema": {"type": "object"}},
]


@contextmanager
def client_of(w: World, **settings: Any) -> Iterator[anthropic.Anthropic]:
    with serving(w.app) as port:
        yield anthropic.Anthropic(
            base_url=f"http://127.0.0.1:{port}", **{"api_key": "none", "max_retries": 0, "timeout": 10} | settings
        )


def asked(w: World, **fields: Any) -> anthropic.types.Message:
    with client_of(w) as client:
        return client.messages.create(**{"model": "toy", "max_tokens": 400, "messages": USER} | fields)


def streamed(w: World, **fields: Any) -> anthropic.types.Message:
    """The same, put together from a stream by the client."""
    with (
        client_of(w) as client,
        client.messages.stream(**{"model": "toy", "max_tokens": 400, "messages": USER} | fields) as stream,
    ):
        return stream.get_final_message()


@pytest.fixture(params=[asked, streamed], ids=["whole", "streamed"])
def ask(request: pytest.FixtureRequest) -> Any:
    return request.param


def blocks(message: anthropic.types.Message) -> list[dict[str, Any]]:
    """Without the ids of calls."""
    shown = [block.model_dump(exclude_none=True) for block in message.content]
    return [{name: value for name, value in block.items() if name not in ("id", "signature")} for block in shown]


# --- answers ---------------------------------------------------------------------------------------------------------


def test_text_and_what_it_took(ask: Any) -> None:
    message = ask(world(says("Hello wörld 😀")))
    assert blocks(message) == [{"type": "text", "text": "Hello wörld 😀"}]
    assert (message.role, message.model, message.stop_reason, message.stop_sequence) == (
        "assistant",
        "toy",
        "end_turn",
        None,
    )
    assert message.usage.cache_read_input_tokens == 3
    assert message.usage.output_tokens == len(ids("Hello wörld 😀")) + 1
    assert message.id.startswith("msg_")


def test_the_client_knows_which_request_it_was() -> None:
    assert asked(world(says("x")))._request_id


def test_models_have_a_name_to_show_and_a_time() -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    with client_of(world()) as client:
        (model,) = client.models.list()
        assert client.models.retrieve("toy") == model
    assert (model.id, model.type, model.display_name) == ("toy", "model", "toy")
    assert before <= model.created_at <= datetime.now(UTC)


def test_prompt_tokens_that_were_cached_are_not_input(ask: Any) -> None:
    w = world(says("x"))
    message = ask(w)
    assert message.usage.input_tokens + 3 == len(prompt_of(w.node.submits[-1]))


def test_an_answer_that_is_cut_off_and_one_that_meets_a_sequence(ask: Any) -> None:
    assert ask(world(says("Hello wörld")), max_tokens=3).stop_reason == "max_tokens"
    message = ask(world(says("Hello wörld")), stop_sequences=["wör", "x"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "wör")
    assert blocks(message) == [{"type": "text", "text": "Hello "}]


def test_nothing_is_an_answer_without_blocks(ask: Any) -> None:
    assert blocks(ask(world(says("")))) == []


def test_calls_are_blocks_with_their_arguments(ask: Any) -> None:
    message = ask(world(says(f"I add.{CALL}{OTHER}"), tokenizer=tokenizer()), tools=TOOLS)
    assert blocks(message) == [
        {"type": "text", "text": "I add."},
        {"type": "tool_use", "name": "add", "input": {"a": 1}},
        {"type": "tool_use", "name": "sub", "input": {}},
    ]
    assert message.stop_reason == "tool_use"
    assert len({block.id for block in message.content if block.type == "tool_use"}) == 2


def test_arguments_with_half_a_pair_of_utf16_are_shown_as_they_are() -> None:
    half = '{"a": "\\ud83d"}'
    answer = CALL.replace('{"a": 1}', half)
    message = asked(world(says(answer), tokenizer=tokenizer()), tools=TOOLS)
    assert blocks(message) == [{"type": "tool_use", "name": "add", "input": {"invalid_json": half}}]


def test_one_call_at_most_where_the_client_wants_no_more(ask: Any) -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    message = ask(world(says(f"{CALL}{OTHER}"), tokenizer=tokenizer()), tools=TOOLS, tool_choice=choice)
    assert [block["name"] for block in blocks(message)] == ["add"]


def test_thoughts_are_blocks_of_their_own(ask: Any) -> None:
    message = ask(world(says("<think>\n2 + 2\n</think>\nFour."), tokenizer=tokenizer(THINKS), reasoning_parser="qwen3"))
    assert [block["type"] for block in blocks(message)] == ["thinking", "text"]
    assert blocks(message)[1]["text"].strip() == "Four."
    assert "2 + 2" in blocks(message)[0]["thinking"]


# --- failures --------------------------------------------------------------------------------------------------------


def test_failures_are_the_clients_own_errors() -> None:
    with client_of(world(lambda request, payload: Script(failure=Cause.QUEUE_FULL))) as client:
        with pytest.raises(anthropic.APIStatusError) as refused:
            client.messages.create(model="toy", max_tokens=5, messages=USER)
        assert refused.value.status_code == 503
        with pytest.raises(anthropic.NotFoundError) as unknown:
            client.messages.create(model="other", max_tokens=5, messages=USER)
        assert unknown.value.request_id
        with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
            client.post("/v1/messages", body={"model": "toy", "messages": USER}, cast_to=object)


def test_a_stream_that_breaks_ends_with_an_error_event() -> None:
    w = world(lambda request, payload: Script(ids("begin"), failure=Cause.DEADLINE_EXCEEDED))
    with pytest.raises(anthropic.APIStatusError, match="deadline_exceeded"):
        streamed(w)


def test_the_clients_key_is_one() -> None:
    w = world(says("Hi"), api_key="secret")
    with client_of(w, api_key="secret") as client:
        assert client.messages.create(model="toy", max_tokens=5, messages=USER).content
    with client_of(w, api_key="wrong") as client, pytest.raises(anthropic.AuthenticationError):
        client.messages.create(model="toy", max_tokens=5, messages=USER)


# --- what a conversation becomes -------------------------------------------------------------------------------------


def chat(**fields: Any) -> ChatBody:
    return chat_of(MessagesBody(**{"max_tokens": 5, "messages": USER} | fields))


def test_the_prompt_is_that_of_the_same_chat() -> None:
    function = {"name": "add", "description": "Adds.", "parameters": ADD["function"]["parameters"]}
    tools = [{"type": "function", "function": function}]
    calls = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 7}'}}]
    openai = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Add 7."},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "8"},
        {"role": "user", "content": "And?"},
    ]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Add 7.", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "add", "input": {"a": 7}}]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "1", "content": "8"}, {"type": "text", "text": "And?"}],
        },
    ]
    ours, theirs = (world(says("x"), tokenizer=tokenizer()) for _ in range(2))
    asked(ours, messages=messages, system=[{"type": "text", "text": "Be brief."}], tools=TOOLS[:1])
    with theirs.http() as http:
        http.post("/v1/chat/completions", json={"messages": openai, "tools": tools})
    assert prompt_of(ours.node.submits[0]) == prompt_of(theirs.node.submits[0])


def test_what_the_system_says_later_on_stays_where_it_is() -> None:
    system = {"role": "system", "content": [{"type": "text", "text": "Be kind."}], "clear_at": "never"}
    assert chat(messages=[*USER, system], system="Be brief.").messages == [
        {"role": "system", "content": "Be brief."},
        *USER,
        {"role": "system", "content": "Be kind."},
    ]


@pytest.mark.parametrize("keep", ["all", {"type": "all"}])
def test_to_keep_all_thoughts_asks_for_nothing(keep: Any) -> None:
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": keep}]}
    assert asked(world(says("x")), extra_body={"context_management": edits}).content


def test_tokens_are_counted_as_they_are_computed() -> None:
    w = world(says("x"), tokenizer=tokenizer())
    with client_of(w) as client:
        count = client.messages.count_tokens(model="toy", messages=USER, system="Be brief.", tools=TOOLS)
        client.messages.create(model="toy", max_tokens=5, messages=USER, system="Be brief.", tools=TOOLS)
    assert count.input_tokens == len(prompt_of(w.node.submits[-1]))


def test_an_answer_that_was_begun_goes_on() -> None:
    begun = [*USER, {"role": "assistant", "content": "The answer is"}]
    assert chat(messages=begun).continue_final_message
    assert not chat().continue_final_message


@pytest.mark.parametrize(
    "block",
    [
        {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {}},
        {"type": "thinking", "thinking": "Let me see.", "signature": ""},
    ],
)
def test_an_answer_that_was_begun_with_more_than_text_is_refused(block: dict[str, object]) -> None:
    """Only its text would be in the prompt."""
    begun = [*USER, {"role": "assistant", "content": [{"type": "text", "text": "I see"}, block]}]
    with pytest.raises(Refusal, match="must be text only"):
        chat(messages=begun)


@pytest.mark.parametrize(
    ("choice", "meant"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "add"}, {"type": "function", "function": {"name": "add"}}),
    ],
)
def test_choices_of_tools(choice: dict[str, Any], meant: object) -> None:
    assert chat(tools=TOOLS, tool_choice=choice).tool_choice == meant


@pytest.mark.parametrize(("kind", "thinks"), [("enabled", True), ("adaptive", True), ("disabled", False)])
def test_thinking_is_a_variable_of_the_template(kind: str, thinks: bool) -> None:
    assert chat(thinking={"type": kind, "budget_tokens": 1024}).chat_template_kwargs == {"enable_thinking": thinks}


def test_the_form_of_an_answer() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    w = world(says("{}"))
    asked(w, extra_body={"output_config": {"format": {"type": "json_schema", "schema": schema}}})
    assert w.node.submits[-1].payload.sampling.grammar


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "system", "content": []}]}, "messages"),
        ({"messages": [{"role": "system", "content": "x", "clear_at": "next_user_message"}]}, "messages"),
        ({"messages": [{"role": "system", "content": "x", "output_config": {"effort": "low"}}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}, "context_management"),
        ({"context_management": {"edits": {"x": 1}}}, "context_management"),
        ({"context_management": {"edits": ""}}, "context_management"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": []}]}, "messages"),
        ({"system": [{"type": "image"}]}, "system"),
        ({"tools": [{"name": "x"}]}, "tools"),
        ({"tools": [{"type": "web_search_20250305", "name": "x"}]}, "tools"),
        ({"tool_choice": {"type": "some"}}, "tool_choice"),
        ({"thinking": {"type": "much"}}, "thinking"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config"),
        ({"container": "x"}, "container"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"max_tokens": None}, "max_tokens"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    with world(says("x")).http() as http:
        response = http.post("/v1/messages", json={"model": "toy", "max_tokens": 5, "messages": USER} | fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert response.json()["type"] == "error"
