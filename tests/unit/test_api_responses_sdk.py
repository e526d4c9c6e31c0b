"""`/v1/responses` as OpenAI's own client uses it: what becomes of items, what the answer becomes, what is kept."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any  # bodies

import openai
import pytest
from api_fakes import Script, World, ids, prompt_of, says, world
from openai.types.responses import Response
from test_api_tools import CALL, OTHER, THINKS, tokenizer

from raw_http import serving
from tandem.core.values import Cause

ADD = {
    "type": "function",
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "strict": True,
}
SUB = {"type": "function", "name": "sub", "parameters": {"type": "object"}, "strict": False}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}


@contextmanager
def client_of(w: World, **settings: Any) -> Iterator[openai.OpenAI]:
    with serving(w.app) as port:
        yield openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", **{"api_key": "none", "max_retries": 0, "timeout": 10} | settings
        )


def asked(client: openai.OpenAI, **fields: Any) -> Response:
    return client.responses.create(**{"model": "toy", "input": "hi"} | fields)


def streamed(client: openai.OpenAI, **fields: Any) -> Response:
    """The same, put together from a stream by the client; its own snapshot has to be what the last event says."""
    with client.responses.stream(**{"model": "toy", "input": "hi"} | fields) as stream:
        for event in stream:
            last = event
    assert last.type in ("response.completed", "response.incomplete")
    return last.response


@pytest.fixture(params=[asked, streamed], ids=["whole", "streamed"])
def ask(request: pytest.FixtureRequest) -> Any:
    return request.param


def answer(w: World, ask: Any, **fields: Any) -> Response:
    with client_of(w) as client:
        return ask(client, **fields)


def items(response: Response) -> list[dict[str, Any]]:
    """Without their ids."""
    shown = [item.model_dump(exclude_none=True) for item in response.output]
    return [
        {key: value for key, value in item.items() if key not in ("id", "call_id", "parsed_arguments")}
        for item in shown
    ]


def text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def message(text: str, status: str = "completed") -> dict[str, Any]:
    return {"type": "message", "status": status, "role": "assistant", "content": [text_part(text)]}


# --- answers ---------------------------------------------------------------------------------------------------------


def test_text_and_what_it_took(ask: Any) -> None:
    w = world(says("Hello wörld 😀"))
    response = answer(w, ask, metadata={"job": "7"}, temperature=0.5)
    assert response.output_text == "Hello wörld 😀"
    assert [{k: v for k, v in one.items() if k != "parsed"} for one in items(response)[0]["content"]] == [
        text_part("Hello wörld 😀")
    ]
    assert (response.status, response.object, response.model, response.error) == ("completed", "response", "toy", None)
    assert response.id.startswith("resp_")
    assert (response.metadata, response.temperature, response.top_p) == ({"job": "7"}, 0.5, 1.0)
    assert response.usage is not None
    assert response.usage.input_tokens == len(prompt_of(w.node.submits[-1]))
    assert response.usage.output_tokens == len(ids("Hello wörld 😀")) + 1
    assert response.usage.input_tokens_details.cached_tokens == 3


def test_a_response_says_what_was_asked_of_it(ask: Any) -> None:
    """All fields that OpenAI's own have: clients of the Open Responses specification refuse one without."""
    w = world(says("{}"), tokenizer=tokenizer())
    said = {"safety_identifier": "someone", "prompt_cache_key": "a key", "user": "me"}
    tool = {name: ADD[name] for name in ("type", "name")}
    format = {"type": "json_schema", "name": "a", "schema": SCHEMA}
    penalties = {"presence_penalty": 0.5, "frequency_penalty": -0.25}
    response = answer(w, ask, tools=[tool], text={"format": format}, extra_body=penalties, **said).to_dict()
    assert response | said | penalties == response
    assert response["tools"] == [tool | {"description": None, "parameters": None, "strict": False}]
    assert response["text"]["format"] == format | {"description": None, "strict": False}
    plain = answer(w, ask).to_dict()
    assert plain | dict.fromkeys(said) | {"presence_penalty": 0.0, "frequency_penalty": 0.0} == plain


def test_an_answer_that_is_cut_off_says_so(ask: Any) -> None:
    response = answer(world(says("Hello wörld")), ask, max_output_tokens=3)
    assert (response.status, response.output_text) == ("incomplete", "Hel")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert items(response)[0]["status"] == "incomplete"


def test_nothing_is_an_answer_without_items(ask: Any) -> None:
    assert items(answer(world(says("")), ask)) == []


def test_calls_are_items_with_their_arguments(ask: Any) -> None:
    response = answer(world(says(f"I add.{CALL}{OTHER}"), tokenizer=tokenizer()), ask, tools=[ADD, SUB])
    assert [item["type"] for item in items(response)] == ["message", "function_call", "function_call"]
    assert items(response)[1:] == [
        {"type": "function_call", "name": "add", "arguments": '{"a": 1}', "status": "completed"},
        {"type": "function_call", "name": "sub", "arguments": "{}", "status": "completed"},
    ]
    calls = [item for item in response.output if item.type == "function_call"]
    assert len({call.call_id for call in calls} | {call.id for call in calls}) == 4


def test_one_call_at_most_where_the_client_wants_no_more(ask: Any) -> None:
    w = world(says(f"{CALL}{OTHER}"), tokenizer=tokenizer())
    response = answer(w, ask, tools=[ADD, SUB], parallel_tool_calls=False)
    assert [item["name"] for item in items(response)] == ["add"]


def test_thoughts_are_items_of_their_own(ask: Any) -> None:
    w = world(says("<think>\n2 + 2\n</think>\nFour."), tokenizer=tokenizer(THINKS), reasoning_parser="qwen3")
    response = answer(w, ask)
    thought, text = items(response)
    assert thought["type"] == "reasoning"
    assert "2 + 2" in thought["content"][0]["text"]
    assert text["content"][0]["text"].strip() == "Four."
    assert response.usage.output_tokens_details.reasoning_tokens == len(ids("<think>\n2 + 2\n</think>"))


def test_the_events_of_a_stream_are_all_there_in_their_order() -> None:
    w = world(says(f"I add.{CALL}"), tokenizer=tokenizer())
    with client_of(w) as client:
        events = list(client.responses.create(model="toy", input="hi", tools=[ADD], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert [kind for at, kind in enumerate(kinds) if not (kind.endswith("delta") and kinds[at - 1] == kind)] == [
        "created",
        "in_progress",
        *("output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.done", "content_part.done", "output_item.done"),
        "output_item.added",
        *("function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    arguments = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    done = {event.type: event for event in events}
    assert (said, arguments) == ("I add.", '{"a": 1}')
    assert done["response.output_text.done"].text == said
    assert done["response.function_call_arguments.done"].arguments == arguments
    assert [event.output_index for event in events if event.type == "response.output_item.done"] == [0, 1]
    added = [event.item for event in events if event.type == "response.output_item.added"]
    assert [item.status for item in added] == ["in_progress", "in_progress"]
    assert [item.id for item in added] == [item.id for item in done["response.completed"].response.output]
    assert {event.item_id for event in events if hasattr(event, "item_id")} == {item.id for item in added}


def test_thoughts_are_streamed_as_reasoning() -> None:
    w = world(says("<think>\n2 + 2\n</think>\nFour."), tokenizer=tokenizer(THINKS), reasoning_parser="qwen3")
    with client_of(w) as client:
        events = list(client.responses.create(model="toy", input="hi", stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert "2 + 2" in "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    order = ["reasoning_text.done", "content_part.done", "output_item.done", "output_item.added"]
    at = kinds.index("reasoning_text.done")
    assert kinds[at : at + 4] == order


# --- failures --------------------------------------------------------------------------------------------------------


def test_failures_are_the_clients_own_errors() -> None:
    def script(request: Any, payload: Any) -> Script:
        return Script(failure=Cause.QUEUE_FULL)

    with client_of(world(script)) as client:
        with pytest.raises(openai.InternalServerError) as refused:
            asked(client)
        assert (refused.value.status_code, refused.value.code) == (503, "queue_full")
        with pytest.raises(openai.NotFoundError):
            asked(client, model="other")


def test_a_stream_that_fails_ends_with_the_failed_response_and_the_error() -> None:
    w = world(lambda request, payload: Script(ids("begin"), failure=Cause.PEER_LOST))
    seen: list[Any] = []
    with client_of(w) as client:
        stream = client.responses.create(model="toy", input="hi", stream=True)
        with pytest.raises(openai.APIError, match="peer lost"):
            read_into(seen, stream)
        assert seen[-1].type == "response.failed"
        assert seen[-1].response.status == "failed"
        assert "peer lost" in seen[-1].response.error.message
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(seen[-1].response.id)


def read_into(seen: list[Any], stream: Any) -> None:
    """What comes before an error, too."""
    for event in stream:
        seen.append(event)


# --- what is asked ---------------------------------------------------------------------------------------------------


def test_items_become_the_messages_of_the_same_chat() -> None:
    function = {key: ADD[key] for key in ("name", "parameters", "strict")}
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 7}'}}
    chat = [
        {"role": "system", "content": "Be brief.\n\nBe kind."},
        {"role": "user", "content": "Add 7.\nNow."},
        {"role": "assistant", "content": "I add.", "reasoning_content": "seven", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "8"},
        {"role": "user", "content": "And?"},
    ]
    given = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "Add 7."}, {"type": "input_text", "text": "Now."}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "seven"}]},
        {"type": "message", "role": "assistant", "id": "m", "content": [text_part("I add.")], "status": "completed"},
        {"type": "function_call", "call_id": "1", "name": "add", "arguments": '{"a": 7}'},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "8"}]},
        {"role": "user", "content": "And?"},
    ]
    ours, theirs = (world(says("x"), tokenizer=tokenizer(THINKS)) for _ in range(2))
    answer(ours, asked, input=given, instructions="Be brief.", tools=[ADD])
    with theirs.http() as http:
        body = {"messages": chat, "tools": [{"type": "function", "function": function}]}
        assert http.post("/v1/chat/completions", json=body).status_code == 200
    assert prompt_of(ours.node.submits[0]) == prompt_of(theirs.node.submits[0])


def test_parameters_are_those_of_the_same_chat() -> None:
    w = world(says("{}"))
    format = {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}
    extra = {"top_k": 5, "seed": 11, "stop": ["x"], "repetition_penalty": 1.5}
    answer(w, asked, temperature=0.25, top_p=0.5, max_output_tokens=9, text={"format": format}, extra_body=extra)
    with w.http() as http:
        chat_format = {"type": "json_schema", "json_schema": {key: format[key] for key in ("name", "schema", "strict")}}
        rest = {"temperature": 0.25, "top_p": 0.5, "max_completion_tokens": 9, "response_format": chat_format}
        body = {"messages": [{"role": "user", "content": "hi"}], **rest, **extra}
        assert http.post("/v1/chat/completions", json=body).status_code == 200
    ours, theirs = w.node.submits
    assert ours.payload.sampling == theirs.payload.sampling
    assert ours.payload.sampling.grammar
    assert ours.request.max_new_tokens == theirs.request.max_new_tokens == 9


def test_a_thought_comes_back_as_it_was_told() -> None:
    """Programs that keep no responses send back nothing of a thought but its `encrypted_content`."""
    w = world(says("<think>\n2 + 2 ö\n</think>\nFour."), tokenizer=tokenizer(THINKS), reasoning_parser="qwen3")
    reasoning, include = {"summary": "auto"}, ["reasoning.encrypted_content"]
    told = answer(w, asked, store=False, reasoning=reasoning, include=include).output[0].model_dump()
    assert told["summary"] == []
    assert told["content"][0]["text"].strip() == "2 + 2 ö"
    call = {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"}
    kept = [{**told, "content": None}, {**told, "encrypted_content": None}]
    for item in kept:
        answer(w, asked, input=[{"role": "user", "content": "hi"}, item, call], tools=[ADD])
    sealed, plain = (prompt_of(submit) for submit in w.node.submits[1:])
    assert sealed == plain
    assert answer(w, asked).output[0].encrypted_content is None


ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]}


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "name": "add"}, ALLOWED])
def test_choices_of_tools_are_those_of_the_same_chat(choice: Any) -> None:
    w = world(says("x"), tokenizer=tokenizer())
    answer(w, asked, tools=[ADD, SUB], tool_choice=choice)
    flat = [{"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for tool in (ADD, SUB)]
    add = {"type": "function", "function": {"name": "add"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [add]}}
    named = choice if isinstance(choice, str) else allowed if choice is ALLOWED else add
    with w.http() as http:
        body = {"messages": [{"role": "user", "content": "hi"}], "tools": flat, "tool_choice": named}
        assert http.post("/v1/chat/completions", json=body).status_code == 200
    ours, theirs = w.node.submits
    assert ours.payload.sampling.grammar == theirs.payload.sampling.grammar


def test_a_function_of_a_namespace_is_called_by_both_names(ask: Any) -> None:
    """The model knows one name, the client two; so does a call that comes back."""
    space = {"type": "namespace", "name": "math", "description": "Sums.", "tools": [{**ADD, "description": "Adds."}]}
    call = CALL.replace('"add"', '"math__add"')
    w = world(says(call), tokenizer=tokenizer())
    told = answer(w, ask, tools=[space, SUB]).output[0]
    assert (told.type, told.name, told.namespace) == ("function_call", "add", "math")
    flat = [{**ADD, "name": "math__add", "description": "Sums.\nAdds."}, SUB]
    for tools, name in ((flat, {"name": "math__add"}), ([space, SUB], {"name": "add", "namespace": "math"})):
        again = {"type": "function_call", "call_id": "1", "arguments": '{"a": 7}', **name}
        answer(w, asked, tools=tools, input=[{"role": "user", "content": "hi"}, again])
    as_flat, as_space = w.node.submits[1:]
    assert prompt_of(as_flat) == prompt_of(as_space)
    assert as_flat.payload.sampling.grammar == as_space.payload.sampling.grammar


FORMAT = {"type": "json_schema", "name": "a", "schema": {"type": "nonsense"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input"),
        ({"input": [{"role": "user"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "input"),
        ({"input": [{"type": "item_reference"}]}, "input"),
        ({"input": [{"type": {}, "role": "user", "content": "x"}]}, "input"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "tandem:?"}]}, "input"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input"),
        ({"input": "x" * 9000, "timeout": 60}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        (
            {"input": [{"type": "function_call", "call_id": "1", "name": "x", "arguments": "{}", "namespace": 7}]},
            "input",
        ),
        ({"tools": [{"type": "namespace", "name": "x"}]}, "tools"),
        ({"tools": [{"type": "namespace", "name": "x" * 64, "tools": []}]}, "tools"),
        ({"tools": [{"type": "namespace", "name": "x", "description": 7, "tools": []}]}, "tools"),
        ({"tools": [{"type": "namespace", "name": "x", "tools": [7]}]}, "tools"),
        ({"tools": [{"type": "namespace", "name": "x", "tools": [{"type": "custom", "name": "y"}]}]}, "tools"),
        ({"tools": [{"type": "namespace", "name": "x", "tools": [ADD] * 2}]}, "tools"),
        ({"tools": [{"type": "namespace", "name": "x", "tools": [ADD] * 1025}]}, "tools"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [7]}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"format": FORMAT}}, "text.format"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"truncation": "auto"}, "truncation"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"n": 2}, "n"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"max_tool_calls": 3}, "max_tool_calls"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"stream_options": {"include_obfuscation": True}, "stream": True}, "stream_options.include_obfuscation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 5, "min_tokens": 6}, "min_tokens"),
        ({"metadata": {"x": "y" * 513}}, "metadata"),
        ({"safety_identifier": "y" * 513}, "safety_identifier"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "x"}]}, "messages"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"kept_items": []}, "kept_items"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    with world(says("x")).http() as http:
        response = http.post("/v1/responses", json={"model": "toy", "input": "hi"} | fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert param in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"top_logprobs": 0, "truncation": "disabled", "service_tier": "auto", "background": False, "include": []},
        {"prompt_cache_retention": "24h", "prompt_cache_key": "x", "safety_identifier": "x", "user": "x"},
    ],
    ids=["defaults", "hints"],
)
def test_what_changes_no_answer_is_accepted(fields: dict[str, Any]) -> None:
    with world(says("x")).http() as http:
        response = http.post("/v1/responses", json={"model": "toy", "input": "hi"} | fields)
    assert response.status_code == 200, response.text


# --- what is kept ----------------------------------------------------------------------------------------------------


def test_a_conversation_goes_on_from_a_response_that_is_kept(ask: Any) -> None:
    w = world(says("four"))
    with client_of(w) as client:
        first = ask(client, input="2 + 2?", instructions="Be brief.")
        assert first.store is True
        second = ask(client, input="and 1?", previous_response_id=first.id)
        third = ask(client, input="and 2?", previous_response_id=second.id, instructions="Be kind.")
        assert (second.previous_response_id, third.previous_response_id) == (first.id, second.id)
        said = [
            {"role": "user", "content": "2 + 2?"},
            {"role": "assistant", "content": "four"},
            {"role": "user", "content": "and 1?"},
            {"role": "assistant", "content": "four"},
            {"role": "user", "content": "and 2?"},
        ]
        client.chat.completions.create(model="toy", messages=[{"role": "system", "content": "Be kind."}, *said])
    *_, ours, theirs = w.node.submits
    assert prompt_of(ours) == prompt_of(theirs), "instructions are of one response only"


def test_a_call_and_its_result_go_on_from_a_response_that_is_kept() -> None:
    w = world(says(f"I add.{CALL}"), tokenizer=tokenizer())
    with client_of(w) as client:
        first = asked(client, tools=[ADD])
        (call,) = [item for item in first.output if item.type == "function_call"]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "8"}
        asked(client, input=[result], previous_response_id=first.id, tools=[ADD])
        asked(client, input=[{"role": "user", "content": "hi"}, *first.output, result], tools=[ADD])
    _, kept, sent = w.node.submits
    assert prompt_of(kept) == prompt_of(sent)


@pytest.mark.parametrize("nothing", [[], "", None])
def test_a_kept_response_is_gone_on_from_with_nothing_more(ask: Any, nothing: Any) -> None:
    """As agents of langchain do for an answer in a form: all is said, only the form is new."""
    w = world(says("four"))
    with client_of(w) as client:
        first = ask(client, input="2 + 2?")
        last = ask(client, input=nothing, previous_response_id=first.id)
        ask(client, input=[{"role": "user", "content": "2 + 2?"}, *first.output])
        said = client.responses.input_items.list(last.id, order="asc").data
    assert [item.content[0].text for item in said] == ["2 + 2?", "four"]
    _, ours, theirs = w.node.submits
    assert prompt_of(ours) == prompt_of(theirs)


def test_an_item_of_a_kept_response_may_be_named_instead_of_sent(ask: Any) -> None:
    """As Vercel's AI SDK does with what the assistant has said, unless its user says `store: false`."""
    w = world(says(f"I add.{CALL}"), tokenizer=tokenizer())
    with client_of(w) as client:
        first = ask(client, input="Add 7.", tools=[ADD])
        text, call = first.output
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "8"}
        named = [{"type": "item_reference", "id": item.id} for item in (text, call)]
        user = {"role": "user", "content": "Add 7."}
        ask(client, input=[user, *named, result], tools=[ADD])
        last = ask(client, input=[user, text, call, result], tools=[ADD])
        with pytest.raises(openai.NotFoundError) as gone:
            ask(client, input=[{"type": "item_reference", "id": last.id}])
        assert (gone.value.code, gone.value.param) == ("response_not_found", "input")
    _, ours, theirs = w.node.submits
    assert prompt_of(ours) == prompt_of(theirs)


def test_tokens_are_counted_as_they_are_computed() -> None:
    w = world(says("four"), tokenizer=tokenizer())
    with client_of(w) as client:
        first = asked(client, input="2 + 2?", tools=[ADD])
        fields = {"input": "and 1?", "previous_response_id": first.id, "instructions": "Be kind.", "tools": [ADD]}
        counted = client.responses.input_tokens.count(model="toy", **fields)
        last = asked(client, **fields)
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.input_tokens.count(model="toy", input=[{"role": "user", "content": [{"type": "x"}]}])
        assert refused.value.param == "input"
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == len(prompt_of(w.node.submits[-1])) == last.usage.input_tokens
    with world(says("x"), disaggregation_mode="decode").http() as http:
        path = "/v1/responses/input_tokens"
        assert http.post(path, json={"input": "x"}).json()["input_tokens"] > 0
        assert http.post(path, json={"input": "x", "previous_response_id": "y"}).status_code == 400


def test_a_response_is_read_and_deleted_as_the_sdk_does(ask: Any) -> None:
    with client_of(world(says("four"))) as client:
        first = ask(client, input="2 + 2?")
        second = ask(client, previous_response_id=first.id, input=[{"role": "user", "content": "and 1?"}])
        found = client.responses.retrieve(first.id)
        assert (found.id, found.output_text, found.status) == (first.id, "four", "completed")
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError) as gone:
            client.responses.retrieve(first.id)
        assert (gone.value.code, gone.value.type) == ("response_not_found", "not_found_error")
        with pytest.raises(openai.NotFoundError):
            client.responses.delete(first.id)
        assert client.responses.retrieve(second.id).previous_response_id == first.id
        said = client.responses.input_items.list(second.id, order="asc").data
        assert [item.content[0].text for item in said] == ["2 + 2?", "four", "and 1?"], "those that followed are whole"


def test_items_are_listed_in_pages() -> None:
    given = [{"role": "user", "content": str(index)} for index in range(7)]
    with client_of(world(says("x"))) as client:
        made = asked(client, input=given)
        page = client.responses.input_items.list(made.id, limit=3)
        assert ([item.content[0].text for item in page.data], page.has_more) == (["6", "5", "4"], True)
        listed = [item.content[0].text for item in client.responses.input_items.list(made.id, limit=3, order="asc")]
        assert listed == [str(index) for index in range(7)]
        for wrong in ({"limit": 0}, {"limit": 101}, {"after": "no such"}, {"order": "up"}, {"include": ["x"]}):
            with pytest.raises(openai.BadRequestError) as refused:
                client.responses.input_items.list(made.id, **wrong)  # type: ignore[arg-type]  # what the SDK has no types for
            assert refused.value.param == next(iter(wrong))


def test_what_is_not_to_be_stored_is_not(ask: Any) -> None:
    with client_of(world(says("four"))) as client:
        made = ask(client, store=False)
        assert made.store is False
        for use in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                use(made.id)
        with pytest.raises(openai.BadRequestError) as refused:
            ask(client, previous_response_id=made.id)
        assert (refused.value.param, refused.value.code) == ("previous_response_id", "previous_response_not_found")


def test_a_stream_of_a_response_that_has_ended_is_refused_by_name() -> None:
    with client_of(world(says("four"))) as client:
        made = asked(client)
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.retrieve(made.id, stream=True)
        assert refused.value.param == "stream"


def test_a_key_sees_no_response_of_another() -> None:
    with client_of(world(says("four")), api_key="one") as client:
        made = asked(client)
        other = client.with_options(api_key="two")
        for use in (other.responses.retrieve, other.responses.delete, other.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                use(made.id)
        with pytest.raises(openai.BadRequestError):
            asked(other, previous_response_id=made.id)
        assert client.responses.retrieve(made.id).id == made.id


@pytest.mark.parametrize("settings", [{"max_stored_responses": 0}, {"disaggregation_mode": "decode"}], ids=str)
def test_a_server_that_keeps_nothing_says_so(settings: dict[str, Any]) -> None:
    with world(says("x"), **settings).http() as http:
        body = {"model": "toy", "input": "hi"}
        assert http.post("/v1/responses", json=body).json()["store"] is False
        named = {"input": [{"type": "item_reference", "id": "msg_1"}]}
        for fields in ({"store": True}, {"previous_response_id": "resp_1"}, named):
            refused = http.post("/v1/responses", json=body | fields)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(fields)))
        assert http.get("/v1/responses/resp_1").status_code == 404
