"""Thoughts, and several calls in one answer, through prefill and decode: as on one engine, in three dialects.

The model says what is written here (`scripted_model.py`), as no small one was trained to think. Every token of it is
computed: the first by prefill, the others by decode, which needs KV of the prompt to know how the answer goes on.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any  # the SDKs' parameters

import anthropic
import openai
import pytest
from cluster import Server, cluster
from scripted_model import END, FORK, Scripts, make_scripted

# Marks are tokens, as models have them, and pieces of several; one character is of two tokens. What a grammar leaves no
# choice of is a token of its own: llguidance has no other there.
THINKS = ["Let me", " see", ":", " 4 times ", "π", " is", " too", " much", ".\n"]
CALLS = [
    *("I look", ".", "<tool_call>", '\n{"name": "', "add", '", "arguments": {', '"a"', ": 4", ', "b": 3', "}}\n"),
    *(
        "</tool_call>",
        "\n<tool_",
        'call>\n{"na',
        'me": "sub", "argu',
        'ments": {"a": 9, ',
        '"b": 2',
        "}}\n</tool",
        "_call>",
    ),
]
IN_BRACKETS = [
    *("[TOOL_CALLS]", '[{"name": "sub"', ', "arguments": {"a": 8,', ' "b": 5', "}}, {", '"name": "add", "ar'),
    *('guments": {"a": 6, "b"', ": 1}", "}]"),
]
TELLS = ["Seven", " and", " seven", "!"]
SCRIPTS = Scripts(
    ["<think>", "\n", *THINKS, "</think>", FORK],
    {"both": [*CALLS, END], "brackets": [*IN_BRACKETS, END], "total": [*TELLS, END]},
    special=["[TOOL_CALLS]"],
)
THOUGHT, TEXT = "".join(THINKS).strip(), "I look."
MARKED = f"<think>\n{THOUGHT}\n</think>\n\n"
WANTED = (("add", {"a": 4, "b": 3}), ("sub", {"a": 9, "b": 2}))
NUMBERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ASKED: list[Any] = [{"role": "user", "content": "Find both."}]


@dataclass(frozen=True)
class Said:
    """One answer, in whatever dialect it came. reason: as a chat has it. thought_tokens: as `usage` counts them."""

    thought: str
    text: str
    calls: tuple[tuple[str, object], ...] = ()  # names, and arguments as JSON, or as text where they are none
    reason: str = "tool_calls"
    thought_tokens: int | None = None  # None: the dialect tells nothing of them


class Front:
    """A server as the SDKs see it, and the paths that its answers say they took."""

    def __init__(self, server: Server) -> None:
        self.paths: list[str] = []
        hooks: Any = {"response": [lambda response: self.paths.append(response.headers["x-tandem-path"])]}
        common: Any = {"api_key": "none", "max_retries": 0, "timeout": 30}
        self.openai = openai.OpenAI(
            base_url=f"{server.url}/v1", http_client=openai.DefaultHttpxClient(event_hooks=hooks), **common
        )
        self.anthropic = anthropic.Anthropic(
            base_url=server.url, http_client=anthropic.DefaultHttpxClient(event_hooks=hooks), **common
        )


def arguments_of(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


# --- the dialects: what is asked, and what was said, whole and put together from a stream


def chat_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """`strict` and `budget` mean the same in every dialect; the rest is the dialect's own."""
    strict, budget = fields.pop("strict", False), fields.pop("budget", 200)
    functions = [{"name": name, "parameters": NUMBERS, "strict": strict} for name in ("add", "sub")]
    tools = [{"type": "function", "function": function} for function in functions]
    asked = {"model": "scripted", "messages": ASKED, "temperature": 0, "max_tokens": budget, "tools": tools}
    return asked | fields


def of_chat(message: Any, reason: str, usage: Any) -> Said:
    calls = message.tool_calls or []
    assert len({call.id for call in calls}) == len(calls)
    return Said(
        getattr(message, "reasoning_content", None) or "",
        message.content or "",
        tuple((call.function.name, arguments_of(call.function.arguments)) for call in calls),
        reason,
        usage.completion_tokens_details.reasoning_tokens,
    )


def chat(front: Front, **fields: Any) -> Said:
    answer = front.openai.chat.completions.create(**chat_fields(fields))
    return of_chat(answer.choices[0].message, answer.choices[0].finish_reason, answer.usage)


def chat_deltas(front: Front, **fields: Any) -> tuple[list[Any], Any]:
    """What a stream tells piece by piece, and its chunks."""
    chunks = list(
        front.openai.chat.completions.create(**chat_fields(fields), stream=True, stream_options={"include_usage": True})
    )
    return [chunk.choices[0].delta for chunk in chunks if chunk.choices], chunks


def chat_streamed(front: Front, **fields: Any) -> Said:
    """As a program does that keeps calls by their index."""
    deltas, chunks = chat_deltas(front, **fields)
    thought, text = "", ""
    calls: dict[int, list[Any]] = {}  # id, name, arguments
    for delta in deltas:
        more = getattr(delta, "reasoning_content", None)
        assert more is None or (not text and not calls), "thoughts come first"
        thought, text = thought + (more or ""), text + (delta.content or "")
        for part in delta.tool_calls or ():
            if part.index not in calls:
                assert (part.index, part.type) == (len(calls), "function")
                calls[part.index] = [part.id, part.function.name, ""]
            else:
                assert part.id is None
            assert part.index == len(calls) - 1, "one call after the other"
            calls[part.index][2] += part.function.arguments
    assert len({id for id, _, _ in calls.values()}) == len(calls)
    told = tuple((name, arguments_of(arguments)) for _, name, arguments in calls.values())
    reason = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1]
    return Said(thought, text, told, reason, chunks[-1].usage.completion_tokens_details.reasoning_tokens)


def messages_fields(fields: dict[str, Any]) -> dict[str, Any]:
    strict, budget = fields.pop("strict", False), fields.pop("budget", 200)
    tools = [{"name": name, "input_schema": NUMBERS, "strict": strict} for name in ("add", "sub")]
    asked = {"model": "scripted", "messages": ASKED, "max_tokens": budget, "tools": tools}
    return asked | {"extra_body": {"temperature": 0}} | fields


def of_message(message: anthropic.types.Message) -> Said:
    """A thought is the first block, then text, then calls: any other order is another answer."""
    thoughts, texts, calls = [], [], []
    for block in message.content:
        if block.type == "thinking":
            assert not texts
            assert not calls
            thoughts.append(block.thinking)
        elif block.type == "text":
            assert not calls
            texts.append(block.text)
        else:
            assert block.type == "tool_use"
            calls.append(block)
    assert len(thoughts) <= 1
    assert len(texts) <= 1
    assert len({call.id for call in calls}) == len(calls)
    reason = {"tool_use": "tool_calls", "end_turn": "stop", "max_tokens": "length"}[message.stop_reason or ""]
    return Said("".join(thoughts), "".join(texts), tuple((call.name, call.input) for call in calls), reason)


def messages(front: Front, **fields: Any) -> Said:
    return of_message(front.anthropic.messages.create(**messages_fields(fields)))


def messages_streamed(front: Front, **fields: Any) -> Said:
    with front.anthropic.messages.stream(**messages_fields(fields)) as stream:
        return of_message(stream.get_final_message())


def responses_fields(fields: dict[str, Any]) -> dict[str, Any]:
    strict, budget = fields.pop("strict", False), fields.pop("budget", 200)
    tools = [{"type": "function", "name": name, "parameters": NUMBERS, "strict": strict} for name in ("add", "sub")]
    asked = {"model": "scripted", "input": ASKED, "temperature": 0, "max_output_tokens": budget, "tools": tools}
    return asked | fields


def of_response(response: Any) -> Said:
    order = ["reasoning", "message", "function_call"]
    kinds = [item.type for item in response.output]
    assert kinds == sorted(kinds, key=order.index)
    calls = [item for item in response.output if item.type == "function_call"]
    assert len({call.call_id for call in calls}) == len(calls)
    reason = ("tool_calls" if calls else "stop") if response.status == "completed" else "length"
    thoughts = [item.content[0].text for item in response.output if item.type == "reasoning"]
    assert len(thoughts) <= 1
    return Said(
        "".join(thoughts),
        response.output_text,
        tuple((call.name, arguments_of(call.arguments)) for call in calls),
        reason,
        response.usage.output_tokens_details.reasoning_tokens,
    )


def responses(front: Front, **fields: Any) -> Said:
    return of_response(front.openai.responses.create(**responses_fields(fields)))


def responses_streamed(front: Front, **fields: Any) -> Said:
    """What was told in pieces is what the last event has."""
    thought, arguments = "", dict[int, str]()
    with front.openai.responses.stream(**responses_fields(fields)) as stream:
        for event in stream:
            if event.type == "response.reasoning_text.delta":
                thought += event.delta
            elif event.type == "response.function_call_arguments.delta":
                arguments[event.output_index] = arguments.get(event.output_index, "") + event.delta
    said = of_response(event.response)
    assert thought == said.thought
    assert tuple(map(arguments_of, arguments.values())) == tuple(told for _, told in said.calls)
    return said


Ask = Callable[..., Said]
CHATS, RESPONSES, MESSAGES = (chat, chat_streamed), (responses, responses_streamed), (messages, messages_streamed)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    where = tmp_path_factory.mktemp("scripted")
    make_scripted(where, SCRIPTS)
    return str(where)


@contextmanager
def fronts_of(model: str, *flags: str) -> Iterator[list[Front]]:
    """A router in front of a pair, and one engine."""
    flags = ("--served-model-name", "scripted", "--max-total-tokens", "8192", *flags)
    with cluster(prefills=1, decodes=1, unified=True, model=model, flags=flags) as it:
        assert it.router is not None
        assert it.unified is not None
        pair, alone = Front(it.router), Front(it.unified)
        yield [pair, alone]


@pytest.fixture(scope="module")
def fronts(model: str) -> Iterator[list[Front]]:
    """With no word of how the model writes thoughts and calls: its template says so."""
    with fronts_of(model) as found:
        yield found


@pytest.fixture(scope="module")
def fronts_of_others(model: str) -> Iterator[list[Front]]:
    """For a model that opens no thought, and writes calls as a list."""
    with fronts_of(model, "--reasoning-parser", "deepseek-r1", "--tool-call-parser", "mistral") as found:
        yield found


def same(fronts: list[Front], ask: Ask, **fields: Any) -> Said:
    """What both say; the pair from KV that has travelled."""
    for front in fronts:
        front.paths.clear()
    pair, alone = (ask(front, **fields) for front in fronts)
    assert pair == alone
    assert [set(front.paths) for front in fronts] == [{"remote"}, {"unified"}]
    return pair


def counted(ask: Ask, num_tokens: int) -> int | None:
    """Tokens of a thought as the dialect tells them."""
    return None if ask in MESSAGES else num_tokens


def tokens_in(pieces: Sequence[str]) -> int:
    return sum(len(piece.encode()) if len(piece) == 1 else 1 for piece in pieces)


THOUGHT_TOKENS = tokens_in(SCRIPTS.beginning[:-1])  # with the marks


@pytest.mark.parametrize("strict", [False, True], ids=["free", "strict"])
@pytest.mark.parametrize("ask", [*CHATS, *MESSAGES, *RESPONSES])
def test_a_thought_and_two_calls_are_told_apart_by_pair_and_engine(fronts: list[Front], ask: Ask, strict: bool) -> None:
    said = same(fronts, ask, strict=strict)
    assert said == Said(THOUGHT, TEXT, WANTED, thought_tokens=counted(ask, THOUGHT_TOKENS))


@pytest.mark.parametrize("ask", [*CHATS, *MESSAGES, *RESPONSES])
def test_a_thought_that_is_cut_off_is_all_there_is(fronts: list[Front], ask: Ask) -> None:
    said = same(fronts, ask, budget=6)
    assert said == Said("Let me see: 4 times ", "", (), "length", counted(ask, 6))


@pytest.mark.parametrize("ask", [*CHATS, *RESPONSES])
def test_a_second_call_that_is_cut_off_is_there_as_far_as_it_came(fronts: list[Front], ask: Ask) -> None:
    told = [*SCRIPTS.beginning, *CALLS[: CALLS.index('"b": 2')]]
    said = same(fronts, ask, budget=tokens_in(told))
    assert said.calls == (WANTED[0], ("sub", '{"a": 9, '))
    assert (said.thought, said.text, said.reason) == (THOUGHT, TEXT, "length")


SILENT = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
ONE = {"parallel_tool_calls": False}
ONE_OF_MESSAGES = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
BOTH, FIRST = Said(THOUGHT, TEXT, WANTED), Said(THOUGHT, TEXT, WANTED[:1])
NOTHING_THOUGHT, NOTHING_CALLED = Said("", TEXT, WANTED), Said(THOUGHT, "".join(CALLS), (), "stop")
SHOWN = {
    "chat that thinks nothing": (CHATS, SILENT, NOTHING_THOUGHT),
    "response that thinks nothing": (RESPONSES, SILENT, NOTHING_THOUGHT),
    "message that thinks nothing": (MESSAGES, {"thinking": {"type": "disabled"}}, NOTHING_THOUGHT),
    "chat with marks": (CHATS, {"extra_body": {"separate_reasoning": False}}, Said("", MARKED + TEXT, WANTED)),
    "chat without thoughts": (CHATS, {"extra_body": {"include_reasoning": False}}, NOTHING_THOUGHT),
    "chat with a thought as a whole": (CHATS, {"extra_body": {"stream_reasoning": False}}, BOTH),
    "chat with one call": (CHATS, ONE, FIRST),
    "response with one call": (RESPONSES, ONE, FIRST),
    "message with one call": (MESSAGES, ONE_OF_MESSAGES, FIRST),
    "chat without calls": (CHATS, {"tool_choice": "none"}, NOTHING_CALLED),
    "response without calls": (RESPONSES, {"tool_choice": "none"}, NOTHING_CALLED),
    "message without calls": (MESSAGES, {"tool_choice": {"type": "none"}}, NOTHING_CALLED),
}


@pytest.mark.parametrize("asks_fields_said", SHOWN.values(), ids=SHOWN)
def test_what_is_shown_of_a_thought_and_of_calls_is_as_asked(
    fronts: list[Front], asks_fields_said: tuple[tuple[Ask, Ask], dict[str, Any], Said]
) -> None:
    asks, fields, said = asks_fields_said
    for ask in asks:
        found = same(fronts, ask, **fields)
        assert found == replace(said, thought_tokens=found.thought_tokens)


def test_a_thought_that_is_not_to_be_streamed_comes_as_one(fronts: list[Front]) -> None:
    for front in fronts:
        deltas, _ = chat_deltas(front, extra_body={"stream_reasoning": False})
        thoughts = [delta.reasoning_content for delta in deltas if getattr(delta, "reasoning_content", None)]
        assert thoughts == [THOUGHT]


# --- the conversation goes on: the results of both calls go back


def after_chat(front: Front) -> Said:
    first = front.openai.chat.completions.create(**chat_fields({})).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "total 7"} for call in first.tool_calls]
    return chat(front, messages=[*ASKED, first.model_dump(exclude_none=True), *results])


def after_messages(front: Front) -> Said:
    first = front.anthropic.messages.create(**messages_fields({})).content
    results = [
        {"type": "tool_result", "tool_use_id": it.id, "content": "total 7"} for it in first if it.type == "tool_use"
    ]
    turns = [{"role": "assistant", "content": [it.model_dump() for it in first]}, {"role": "user", "content": results}]
    return messages(front, messages=[*ASKED, *turns])


def after_responses(front: Front) -> Said:
    """Whoever answers knows what was said."""
    first = front.openai.responses.create(**responses_fields({}))
    results = [
        {"type": "function_call_output", "call_id": it.call_id, "output": "total 7"}
        for it in first.output
        if it.type == "function_call"
    ]
    return responses(front, input=results, previous_response_id=first.id)


@pytest.mark.parametrize("ask", [after_chat, after_messages, after_responses])
def test_the_results_of_two_calls_lead_to_an_answer(fronts: list[Front], ask: Ask) -> None:
    said = same(fronts, ask)
    assert said == replace(Said(THOUGHT, "".join(TELLS), (), "stop"), thought_tokens=said.thought_tokens)


# --- models of other makers


@pytest.mark.slow
@pytest.mark.parametrize("ask", [*CHATS, *RESPONSES])
def test_a_thought_without_a_mark_before_it_and_calls_in_a_list(fronts_of_others: list[Front], ask: Ask) -> None:
    asked: list[Any] = [{"role": "user", "content": "Find brackets."}]
    place = {"messages": asked} if ask in CHATS else {"input": asked}
    said = same(fronts_of_others, ask, extra_body={"chat_template_kwargs": {"opening": "\n"}}, **place)
    calls = (("sub", {"a": 8, "b": 5}), ("add", {"a": 6, "b": 1}))
    assert said == Said(THOUGHT, "", calls, thought_tokens=THOUGHT_TOKENS - 2)
