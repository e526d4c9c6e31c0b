"""Tools and thoughts in chats: what the template is told, what the answer becomes, what a choice forces."""

import json
from functools import cache
from random import Random
from typing import Any  # bodies

import pytest
from api_fakes import World, ids, load_tokenizer, prompt_of, says, sse, world

from tandem.server.api.chat_form import arguments_of
from tandem.server.api.tokenizer import Tokenizer
from tandem.server.api.tool_parsers.base import CallArguments, CallStart, Text, begun
from tandem.server.api.tool_parsers.table import FORMATS

TEMPLATE = (
    "{% if tools %}<s>tools <tool_call>:{{ tools | tojson }}</s>{% endif %}"
    "{% for m in messages %}<s>{{ m['role'] }}:{{ m['content'] }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments.a }}]{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
THINKS = TEMPLATE + "{% if false %}</think>{% endif %}{% if opens %}<think>\n{% endif %}"
USER = [{"role": "user", "content": "hi"}]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}
SUB = {"type": "function", "function": {"name": "sub"}}
STRICT = {"type": "function", "function": {**ADD["function"], "strict": True}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "sub", "arguments": {}}\n</tool_call>'
HALF = '{"a": "\\ud83d"}'  # of a pair of UTF-16: no text has it
END = 1


@cache
def tokenizer(template: str = TEMPLATE, added: tuple[str, ...] = ()) -> Tokenizer:
    return load_tokenizer(template, added)


def tool_world(answer: str, template: str = TEMPLATE, **settings: Any) -> World:
    return world(says(answer), tokenizer=tokenizer(template), **settings)


def asked(w: World, **fields: Any) -> dict[str, Any]:
    """The choice of the answer."""
    with w.http() as http:
        response = http.post("/v1/chat/completions", json={"messages": USER, "tools": [ADD, SUB]} | fields)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def streamed(w: World, **fields: Any) -> dict[str, Any]:
    """The same, put together from a stream as the SDK does."""
    with w.http() as http:
        body = {"messages": USER, "tools": [ADD, SUB], "stream": True} | fields
        events = sse(http.post("/v1/chat/completions", json=body).text)
    message: dict[str, Any] = {"role": "", "content": "", "reasoning_content": "", "tool_calls": []}
    for event in events:
        delta = event["choices"][0]["delta"]
        for key in ("role", "content", "reasoning_content"):
            message[key] += delta.get(key) or ""
        for part in delta.get("tool_calls", ()):
            if part["index"] == len(message["tool_calls"]):
                message["tool_calls"].append({key: part[key] for key in ("id", "type", "function")})
            else:
                message["tool_calls"][part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    choice = {"message": {key: value or None for key, value in message.items()}}
    return {**choice, "finish_reason": events[-1]["choices"][0]["finish_reason"]}


def calls_of(choice: dict[str, Any]) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in choice["message"]["tool_calls"] or ()]


def grammar_of(w: World) -> str:
    return w.node.submits[0].payload.sampling.grammar


def accepts(w: World, text: str, template: str = TEMPLATE, added: tuple[str, ...] = ()) -> bool:
    its = tokenizer(template, added)
    matcher = its.open_vocabulary().matcher(grammar_of(w), eos_ids=[END])
    for token in [*its.encode(text), END]:
        if matcher.is_finished:
            return token == END
        if not matcher.allowed()[token >> 3] >> (token & 7) & 1:
            return False
        matcher.accept(token)
    return matcher.is_finished


# what comes out


@pytest.mark.parametrize("get", [asked, streamed])
def test_calls_in_an_answer_are_told_from_its_text(get: Any) -> None:
    choice = get(tool_world(f"I add.\n{CALL}\n{OTHER}"))
    assert choice["message"]["content"] == "I add."
    assert calls_of(choice) == [("add", '{"a": 1}'), ("sub", "{}")]
    assert choice["finish_reason"] == "tool_calls"
    names = [call["id"] for call in choice["message"]["tool_calls"]]
    assert all(name.startswith("call_") for name in names)
    assert len(set(names)) == 2
    assert {call["type"] for call in choice["message"]["tool_calls"]} == {"function"}


@pytest.mark.parametrize("get", [asked, streamed])
def test_an_answer_without_calls_is_text(get: Any) -> None:
    choice = get(tool_world("No < call"))
    assert (choice["message"]["content"], choice["finish_reason"]) == ("No < call", "stop")
    assert not choice["message"]["tool_calls"]


@pytest.mark.parametrize("get", [asked, streamed])
def test_an_answer_in_json_is_a_call_only_of_a_function_that_there_is(get: Any) -> None:
    """Where nothing marks a call."""
    ada = '{"name": "Ada", "age": 36}'
    choice = get(tool_world(ada, tool_call_parser="llama3"))
    assert (choice["message"]["content"], calls_of(choice), choice["finish_reason"]) == (ada, [], "stop")
    choice = get(tool_world('{"name": "add", "parameters": {"a": 1}}', tool_call_parser="llama3"))
    assert (calls_of(choice), choice["finish_reason"]) == ([("add", '{"a": 1}')], "tool_calls")


@pytest.mark.parametrize("get", [asked, streamed])
def test_only_one_call_where_they_must_not_be_parallel(get: Any) -> None:
    choice = get(tool_world(f"{CALL}\n{OTHER}"), parallel_tool_calls=False)
    assert calls_of(choice) == [("add", '{"a": 1}')]


@pytest.mark.parametrize("get", [asked, streamed])
def test_who_may_call_nothing_is_shown_what_the_model_says(get: Any) -> None:
    choice = get(tool_world(CALL), tool_choice="none")
    assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")


@pytest.mark.parametrize("get", [asked, streamed])
def test_a_call_that_is_cut_off_is_one_but_ends_for_its_length(get: Any) -> None:
    choice = get(tool_world(CALL), max_tokens=44)
    assert calls_of(choice) == [("add", '{"a')]
    assert choice["finish_reason"] == "length"


def test_logprobs_of_a_stream_are_complete() -> None:
    with tool_world(f"I.\n{CALL}").http() as http:
        body = {"messages": USER, "tools": [ADD], "stream": True, "logprobs": True, "return_token_ids": True}
        events = sse(http.post("/v1/chat/completions", json=body).text)
    choices = [event["choices"][0] for event in events]
    tokens = [entry["token"] for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]]
    assert "".join(tokens) == f"I.\n{CALL}</s>"
    assert [id for choice in choices for id in choice.get("token_ids", [])] == [*ids(f"I.\n{CALL}"), END]
    assert all("content" in choice["delta"] or "tool_calls" in choice["delta"] for choice in choices[:-1])


def test_every_delta_has_its_thought_be_it_null() -> None:
    """As SGLang's and DeepSeek's have: clients written for those ask each one for it, which fails where none is."""
    with tool_world(f"<think>\nHm.\n</think>\n\n{CALL}", THINKS).http() as http:
        events = sse(http.post("/v1/chat/completions", json={"messages": USER, "tools": [ADD], "stream": True}).text)
    with world(says("plain")).http() as http:
        events += sse(http.post("/v1/chat/completions", json={"messages": USER, "stream": True}).text)
    thoughts = [event["choices"][0]["delta"]["reasoning_content"] for event in events]
    assert "".join(filter(None, thoughts)) == "Hm."


@pytest.mark.parametrize("get", [asked, streamed])
def test_thoughts_are_told_from_the_answer(get: Any) -> None:
    choice = get(tool_world(f"<think>\nHm.\n</think>\n\n{CALL}", THINKS))
    assert choice["message"]["reasoning_content"] == "Hm."
    assert calls_of(choice) == [("add", '{"a": 1}')]
    opened = get(tool_world("Hm.</think>Yes.", THINKS), chat_template_kwargs={"opens": True})
    assert (opened["message"]["reasoning_content"], opened["message"]["content"]) == ("Hm.", "Yes.")
    kept = get(tool_world("<think>Hm.</think>Yes.", THINKS), separate_reasoning=False)
    assert kept["message"]["content"] == "<think>Hm.</think>Yes."
    hidden = get(tool_world("<think>Hm.</think>Yes.", THINKS), include_reasoning=False)
    assert (hidden["message"].get("reasoning_content"), hidden["message"]["content"]) == (None, "Yes.")
    late = get(tool_world("<think>Hm.</think>Yes.", THINKS), stream_reasoning=False)
    assert (late["message"]["reasoning_content"], late["message"]["content"]) == ("Hm.", "Yes.")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("answer", "thought", "fields"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", "<think>\nHm.\n</think>", {}),
        ("Hm.</think>Yes.", "Hm.</think>", {"chat_template_kwargs": {"opens": True}}),
        (" <think>Hm", " <think>Hm", {"max_tokens": 10}),
        ("Yes, <think> is a mark and </think> too.", "", {}),
        ("<think>Hm.</think>Yes.", "", {"separate_reasoning": False}),
        ("<think>Hm.</think>Yes.", "<think>Hm.</think>", {"stop": ["k>Y", "s."]}),
    ],
)
def test_usage_tells_the_tokens_of_thoughts(answer: str, thought: str, fields: dict[str, Any], stream: bool) -> None:
    body = {"messages": USER, "stream": stream, "stream_options": {"include_usage": True} if stream else None} | fields
    with tool_world(answer, THINKS).http() as http:
        response = http.post("/v1/chat/completions", json=body)
    usage = sse(response.text)[-1]["usage"] if stream else response.json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len(ids(thought))}


def test_the_flags_win_over_the_template() -> None:
    choice = asked(tool_world('{"name": "add", "parameters": {"a": 2}}', tool_call_parser="llama3"))
    assert calls_of(choice) == [("add", '{"a": 2}')]
    choice = asked(tool_world("Hm.</think>Yes.", reasoning_parser="deepseek-r1"))
    assert choice["message"]["reasoning_content"] == "Hm."
    choice = asked(tool_world("<think>Hm.</think>Yes.", THINKS, reasoning_parser="none"))
    assert choice["message"]["content"] == "<think>Hm.</think>Yes."


# what goes in


def test_the_template_is_told_the_tools_and_the_calls_before() -> None:
    w = tool_world("ok")
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 17}'}}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "18"},
    ]
    asked(w, messages=messages)
    text = tokenizer().decode(prompt_of(w.node.submits[0]), skip_special_tokens=False)
    assert json.dumps([ADD, SUB]) in text
    assert "assistant:[add 17]" in text
    assert "tool:18" in text
    asked(w, tool_choice="none")
    assert "tools" not in tokenizer().decode(prompt_of(w.node.submits[1]))


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"a": 1}', {"a": 1}),
        ('{"a', {"invalid_json": '{"a'}),
        ("[" * 100_000, {"invalid_json": "[" * 100_000}),
        ("7", {"invalid_json": "7"}),
        (HALF, {"invalid_json": HALF}),
        ("null", {}),
        ("", {}),
    ],
    ids=["object", "cut off", "nested", "number", "half a pair", "null", "empty"],
)
def test_arguments_that_are_no_object_are_not_lost(text: str, arguments: dict) -> None:
    assert arguments_of(text) == arguments


@pytest.mark.parametrize(("role", "said"), [("system", "Be brief."), ("developer", "Be brief."), ("user", "")])
def test_a_template_that_reads_functions_of_the_system_message_is_told_there(role: str, said: str) -> None:
    """Phi-4-mini's."""
    template = "{% for m in messages %}{% set message = m %}[{{ m.role }}]{{ m.content }}"
    template += "{% if 'tools' in message %}<|tool|>{{ message['tools'] }}<|/tool|>{% endif %}{% endfor %}"
    w = tool_world(WRITTEN["phi4_mini"], template)
    choice = asked(w, messages=[{"role": role, "content": said}, *USER] if said else USER)
    asked(w, messages=USER, tools=None)
    shown, plain = (tokenizer(template).decode(prompt_of(submit)) for submit in w.node.submits)
    functions = json.dumps([ADD["function"], SUB["function"]])
    assert (shown, plain) == (f"[system]{said}<|tool|>{functions}<|/tool|>[user]hi", "[user]hi")
    assert calls_of(choice) == [("add", '{"a": 1}')]


def test_a_conversation_goes_on_after_a_call_that_was_cut_off() -> None:
    template = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
    template += "{{ m['role'] }}:{{ m['content'] }}{% endfor %}{% if tools %}{% endif %}"
    w = tool_world(CALL, template)
    cut = asked(w, max_tokens=44)["message"]
    (call,) = cut["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "that is no JSON"}
    asked(w, messages=[*USER, cut, result])
    text = tokenizer(template).decode(prompt_of(w.node.submits[1]))
    assert json.dumps({"invalid_json": call["function"]["arguments"]}) in text
    assert "that is no JSON" in text


@pytest.mark.parametrize("get", [asked, streamed])
def test_half_a_pair_of_utf16_is_a_mistake_of_the_model_and_not_of_the_server(get: Any) -> None:
    call = CALL.replace('{"a": 1}', HALF)
    assert calls_of(get(tool_world(call))) == [("add", HALF)]
    as_text = CALL.replace('{"a": 1}', json.dumps(HALF))
    assert calls_of(get(tool_world(as_text))) == [("add", HALF)]
    within = CALL.replace('{"a": 1}', '"\\ud83d"')
    assert calls_of(get(tool_world(within))) == [("add", '"\\ud83d"')]
    named = CALL.replace('"add"', '"\\ud83d"')
    assert get(tool_world(named))["message"]["content"] == named


def test_a_conversation_goes_on_after_half_a_pair_of_utf16() -> None:
    template = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
    w = tool_world("ok", template + "{% endfor %}{% if tools %}{% endif %}")
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": HALF}}
    asked(w, messages=[*USER, {"role": "assistant", "tool_calls": [call]}])
    assert tokenizer().decode(prompt_of(w.node.submits[0])) == json.dumps({"invalid_json": HALF})


def test_what_may_be_called_does_not_change_the_prompt() -> None:
    w = tool_world("x")
    asked(w)
    asked(w, **allowing("auto", SUB))
    assert prompt_of(w.node.submits[0]) == prompt_of(w.node.submits[1])


@pytest.mark.parametrize(
    "said",
    [
        {"content": [{"type": "refusal", "refusal": "I will not."}]},
        {"content": None, "refusal": "I will not."},
    ],
    ids=["part", "field"],
)
def test_a_refusal_of_before_is_what_the_assistant_said(said: dict) -> None:
    w = tool_world("x")
    for message in (said, {"content": "I will not."}):
        asked(w, messages=[*USER, {"role": "assistant", **message}, *USER])
    assert prompt_of(w.node.submits[0]) == prompt_of(w.node.submits[1])


def allowing(mode: str, *tools: dict) -> dict:
    named = [{"type": "function", "function": {"name": tool["function"]["name"]}} for tool in tools]
    return {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}}


FORCED = [
    ({"tool_choice": "required"}, [CALL, OTHER, f"{CALL}\n{OTHER}"], ["no", f"so {CALL}", CALL.replace("1", '"x"')]),
    ({"tool_choice": "required", "parallel_tool_calls": False}, [CALL], [f"{CALL}\n{OTHER}"]),
    ({"tool_choice": {"type": "function", "function": {"name": "sub"}}}, [OTHER], [CALL, "no"]),
    ({"tool_choice": {"function": {"name": "sub"}}}, [OTHER], [CALL, "no"]),
    (allowing("required", ADD), [CALL, f"{CALL}\n{CALL}"], [OTHER, f"{CALL}\n{OTHER}", "no"]),
    (allowing("auto", SUB), ["no", OTHER, f"so {OTHER}"], [CALL, f"so {CALL}", f"{OTHER}\n{CALL}"]),
    (allowing("auto", ADD, SUB), [], []),
    (
        {"tools": [STRICT]},
        ["no", f"so {CALL}", f"{CALL} and more", f"{CALL} and {CALL} again"],
        [CALL.replace("1", '"x"'), OTHER, f"{CALL} and {OTHER}"],
    ),
    ({"response_format": {"type": "json_object"}}, ["{}", CALL], ["no"]),
]


@pytest.mark.parametrize(("fields", "yes", "no"), FORCED, ids=lambda value: str(value)[:50])
def test_a_choice_is_forced_by_a_grammar(fields: dict, yes: list[str], no: list[str]) -> None:
    asked(w := tool_world("x"), **fields)
    assert [text for text in yes if not accepts(w, text)] == []
    assert [text for text in no if accepts(w, text)] == []


CODER = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
WRITTEN = {
    "llama3": '{"name": "add", "parameters": {"a": 1}}',
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]',
    "qwen3_coder": CODER,
    "phi4_mini": '<|tool_call|>[{"name": "add", "arguments": {"a": 1}}]<|/tool_call|>',
    "phi4_mini_json": 'functools[{"name": "add", "arguments": {"a": 1}}]',
    "granite": '<|tool_call|>[{"name": "add", "arguments": {"a": 1}}]',
    "pythonic": "[add(a=1)]",
    "olmo3": "<function_calls>add(a=1)</function_calls>",
}
TWICE = {
    "llama3": "{0}; {0}",
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {"a": 1}}]',
    "qwen3_coder": f"{CODER}\n{CODER}",
    "phi4_mini_json": 'functools[{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {"a": 1}}]',
    "pythonic": "[add(a=1), add(a=1)]",
    "olmo3": "<function_calls>add(a=1)\nadd(a=1)</function_calls>",
}


@pytest.mark.parametrize(("parser", "text"), WRITTEN.items())
def test_what_is_forced_is_what_the_parser_reads(parser: str, text: str) -> None:
    w = tool_world(text, tool_call_parser=parser)
    assert calls_of(asked(w, tool_choice="required")) == [("add", '{"a": 1}')]
    assert accepts(w, text)
    assert not accepts(w, CALL)
    strict = tool_world(text, tool_call_parser=parser)
    asked(strict, tools=[STRICT])
    assert accepts(strict, text)
    assert accepts(strict, "plain text")
    assert not accepts(strict, text.replace("1", '"x"'))


@pytest.mark.parametrize(("parser", "text"), TWICE.items())
def test_calls_that_are_forced_may_be_several(parser: str, text: str) -> None:
    text = text.format(WRITTEN[parser]) if parser == "llama3" else text
    w = tool_world(text, tool_call_parser=parser)
    assert calls_of(asked(w, tool_choice="required")) == [("add", '{"a": 1}')] * 2
    assert accepts(w, text)
    one = tool_world(text, tool_call_parser=parser)
    assert calls_of(asked(one, tool_choice="required", parallel_tool_calls=False)) == [("add", '{"a": 1}')]
    assert not accepts(one, text)
    assert accepts(one, WRITTEN[parser])


def test_what_is_read_as_a_call_keeps_to_its_schema_however_it_begins() -> None:
    """Where the format has several beginnings, a function that is strict is bound behind each."""
    asked(coder := tool_world("x", tool_call_parser="qwen3_coder"), tools=[STRICT])
    asked(phi := tool_world("x", tool_call_parser="phi4_mini"), tools=[STRICT])
    for w, text in ((coder, CODER.removeprefix("<tool_call>\n")), (phi, WRITTEN["phi4_mini_json"])):
        assert accepts(w, f"so {text} and {text}")
        assert not accepts(w, f"so {text} and {text.replace('1', 'x')}")


PAINT = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "size": {"type": "integer"},
        "colour": {"anyOf": [{"$ref": "#/$defs/Colour"}, {"type": "null"}]},
        "points": {"type": "array", "items": {"type": "number"}},
    },
    "required": ["text"],
    "$defs": {"Colour": {"enum": ["red", "green"]}},
}
AS_TAGS = {
    "text": "<parameter=text>\na <b>\n{\n</parameter>\n",
    "size": "<parameter=size>\n5\n</parameter>\n",
    "red": "<parameter=colour>\nred\n</parameter>\n",
    "null": "<parameter=colour>\nnull\n</parameter>\n",
    "blue": "<parameter=colour>\nblue\n</parameter>\n",
    "points": "<parameter=points>\n[1, 2.5]\n</parameter>\n",
    "wrong": '<parameter=points>\n["a"]\n</parameter>\n',
    "other": "<parameter=other>\n5\n</parameter>\n",
}
AS_PYTHON = {
    "text": 'text="a <b>\\n{"',
    "size": "size=5",
    "red": 'colour="red"',
    "null": "colour=null",
    "blue": 'colour="blue"',
    "points": "points=[1, 2.5]",
    "wrong": 'points=["a"]',
    "other": "other=5",
}
SAID = [
    ("text", True),
    ("text size red points", True),
    ("text null", True),
    ("text size", True),
    ("size", False),
    ("", False),
    ("text blue", False),
    ("text wrong", False),
    ("text other", False),
    ("size text", False),
]


@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize("parser", ["qwen3_coder", "pythonic", "olmo3"])
def test_arguments_one_by_one_keep_to_their_schema(parser: str, is_strict: bool) -> None:
    tool = {"type": "function", "function": {"name": "paint", "parameters": PAINT, "strict": is_strict}}
    asked(w := tool_world("x", tool_call_parser=parser), tools=[tool], tool_choice="required")
    value = {"text": "a <b>\n{", "size": 5, "points": [1, 2.5]}
    for names, is_right in SAID:
        parts = names.split()
        tags = "".join(AS_TAGS[part] for part in parts)
        python = f"paint({', '.join(AS_PYTHON[part] for part in parts)})"
        text = {
            "qwen3_coder": f"<tool_call>\n<function=paint>\n{tags}</function>\n</tool_call>",
            "pythonic": f"[{python}]",
            "olmo3": f"<function_calls>{python}</function_calls>",
        }[parser]
        assert accepts(w, text) is is_right, names
        if is_right:
            ((_, said),) = calls_of(asked(tool_world(text, tool_call_parser=parser), tools=[tool]))
            meant = {"red": ("colour", "red"), "null": ("colour", None)}
            assert json.loads(said) == dict(meant.get(part) or (part, value[part]) for part in parts)


CLOSER = "</parameter>"  # which nobody says by chance


def walked(w: World, random: Random, most: int = 300) -> str:
    """Something that its grammar allows, marks and closing ones above all; empty where it does not end in time."""
    its, said = tokenizer(), list[int]()
    matcher = its.open_vocabulary().matcher(grammar_of(w), eos_ids=[END])
    while not matcher.is_finished and len(said) < most:
        mask = matcher.allowed()
        allowed = [token for token in range(its.vocab_size) if mask[token >> 3] >> (token & 7) & 1]
        likely = [token for token in allowed if token == END or its.decode([token]) in "<>/\"\\\n{}[](),=: parmet10'"]
        if size := begun(its.decode(said), CLOSER):
            likely = [token for token in ids(CLOSER[size]) if token in allowed]
        token = random.choice(likely if likely and random.random() < 0.95 else allowed)
        if token == END:
            break
        matcher.accept(token)
        said.append(token)
    return its.decode(said) if len(said) < most else ""


@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder", "pythonic", "olmo3", "phi4_mini"])
def test_whatever_is_forced_is_read_as_calls_that_fit(parser: str) -> None:
    tool = {"type": "function", "function": {"name": "paint", "parameters": PAINT}}
    fits = {
        "text": lambda value: isinstance(value, str),
        "size": lambda value: type(value) is int,
        "colour": lambda value: value in ("red", "green", None),
        "points": lambda value: isinstance(value, list) and all(type(each) in (int, float) for each in value),
    }
    asked(w := tool_world("x", tool_call_parser=parser), tools=[tool, SUB], tool_choice="required")
    texts = [text for seed in range(25) if (text := walked(w, Random(seed)))]
    assert len(texts) > 9
    for text in texts:
        read = FORMATS[parser].parser({"paint": PAINT, "sub": {}})
        pieces = [*read.feed(text), *read.finish()]
        assert not any(isinstance(piece, Text) for piece in pieces), text
        names = [piece.name for piece in pieces if isinstance(piece, CallStart)]
        assert names, text
        for index, name in enumerate(names):
            parts = [piece.text for piece in pieces if isinstance(piece, CallArguments) and piece.index == index]
            arguments = json.loads("".join(parts))
            assert name == "sub" or ("text" in arguments and all(fits[key](arguments[key]) for key in arguments)), text


@pytest.mark.parametrize(("parser", "text"), [("qwen3_coder", "<parameter=z>\n5\n</parameter>\n"), ("pythonic", "z=5")])
def test_arguments_that_no_schema_names_may_be_any(parser: str, text: str) -> None:
    asked(w := tool_world("x", tool_call_parser=parser), tools=[SUB], tool_choice="required")
    whole = {"qwen3_coder": "<tool_call>\n<function=sub>\n{0}</function>\n</tool_call>", "pythonic": "[sub({0})]"}
    assert accepts(w, whole[parser].format(""))
    assert accepts(w, whole[parser].format(text))
    closed = {"type": "function", "function": {"name": "sub", "parameters": {"additionalProperties": False}}}
    asked(w := tool_world("x", tool_call_parser=parser), tools=[closed], tool_choice="required")
    assert accepts(w, whole[parser].format(""))
    assert not accepts(w, whole[parser].format(text))


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": {"type": "string", "pattern": "^a"}}},
        {"properties": {"a": {"type": ["string", "integer"]}}},
        {"properties": {"a": {"type": "string"}}, "minProperties": 1},
        {"properties": {"a>": {"type": "string"}}},
    ],
    ids=str,
)
def test_what_tags_cannot_bind_is_refused_of_a_strict_function(parameters: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": parameters}}
    with (w := tool_world("x", tool_call_parser="qwen3_coder")).http() as http:
        response = http.post("/v1/chat/completions", json={"messages": USER, "tools": [tool]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"
    assert "parameters of f: " in response.json()["error"]["message"]
    assert w.node.submits == []


def test_a_model_that_thinks_may_do_so_before_what_it_must_say() -> None:
    w = tool_world("x", THINKS)
    asked(w, tools=None, guided_choice=["yes"])
    assert accepts(w, "yes", THINKS)
    assert accepts(w, "<think>Hm.</think>\n\nyes", THINKS)
    assert not accepts(w, "<think>Hm.", THINKS)
    opened = tool_world("x", THINKS)
    asked(opened, tool_choice="required", chat_template_kwargs={"opens": True})
    assert accepts(opened, f"Hm.\n</think>\n\n{CALL}", THINKS)
    assert not accepts(opened, f"Hm. {CALL}", THINKS)


@pytest.mark.parametrize("fields", [{"tool_choice": "required"}, {"tools": [STRICT]}], ids=["required", "strict"])
def test_marks_that_are_tokens_are_followed_as_tokens(fields: dict[str, Any]) -> None:
    """As Qwen3 has them: one token each, and not special. It says them in no other way."""
    marks = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    w = world(says("x"), tokenizer=tokenizer(THINKS, marks))
    asked(w, **fields)
    assert accepts(w, f"<think>Hm.</think>\n\n{CALL}", THINKS, marks)
    assert accepts(w, f"{CALL}\n{CALL}", THINKS, marks)
    assert not accepts(w, f"<think>Hm.</think>\n\n{CALL.replace('1', 'x')}", THINKS, marks)
    assert not accepts(w, "<think>Hm.", THINKS, marks)


@pytest.mark.parametrize("fields", [{"tool_choice": "required"}, {"tools": [STRICT]}], ids=["required", "strict"])
def test_marks_of_qwen3_coder_are_followed_as_tokens(fields: dict[str, Any]) -> None:
    """Which has them as Qwen3 does. The first may be forgotten."""
    marks = ("<tool_call>", "</tool_call>")
    w = world(says("x"), tokenizer=tokenizer(TEMPLATE, marks), tool_call_parser="qwen3_coder")
    asked(w, **fields)
    assert accepts(w, f"{CODER}\n{CODER}", added=marks)
    assert not accepts(w, CODER.replace("1", "x"), added=marks)
    assert accepts(w, CODER.removeprefix("<tool_call>\n"), added=marks) is ("tools" in fields)


def test_auto_alone_forces_nothing() -> None:
    asked(w := tool_world("x"))
    assert grammar_of(w) == ""


REFUSED = [
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tools": [{"function": {"name": ""}}]}, "tools"),
    ({"tools": [{"function": {"name": "a\nb"}}]}, "tools"),
    ({"tools": [{"function": {"name": "f", "parameters": "x"}}]}, "tools"),
    ({"tools": [ADD, ADD]}, "tools"),
    ({"tools": [ADD] * 129}, "tools"),
    ({"tools": None, "tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tool_choice": {"type": "custom", "function": {"name": "add"}}}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "missing"}}}, "tool_choice"),
    (allowing("auto"), "tool_choice"),
    (allowing("none", ADD), "tool_choice"),
    (allowing("auto", SUB), "tool_choice"),
    (allowing("auto", ADD) | {"tools": None}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": ["add"]}}}, "tool_choice"),
    ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [5]}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}]}, "messages"),
    (
        {
            "tool_choice": "required",
            "tools": [{"function": {"name": "f", "strict": True, "parameters": {"type": "nope"}}}],
        },
        "tools",
    ),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=str)
def test_what_cannot_be_is_a_400_that_names_the_field(fields: dict, param: str) -> None:
    with (w := tool_world("x")).http() as http:
        response = http.post("/v1/chat/completions", json={"messages": USER, "tools": [ADD]} | fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert w.node.submits == []
