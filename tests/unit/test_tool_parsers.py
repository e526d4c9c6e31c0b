"""Calls and thoughts in answers: each format, whatever the pieces in which the text comes."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem import config
from tandem.config import ServerConfig
from tandem.server.api.reasoning import ReasoningSplitter
from tandem.server.api.tool_parsers.base import CallArguments, CallStart, Piece, Reasoning, Text
from tandem.server.api.tool_parsers.table import FORMATS, HERMES, LLAMA3, MISTRAL, ToolFormat, format_for

ADD = {"a": 1, "b": [2, {"c": 'q"}{'}]}
ADD_JSON = json.dumps(ADD)
Summary = tuple[str, list[tuple[str, str]]]
CASES: list[tuple[ToolFormat, str, Summary]] = [
    (HERMES, "plain", ("plain", [])),
    (HERMES, "a < b <tool", ("a < b <tool", [])),
    (HERMES, f'<tool_call>\n{{"name": "add", "arguments": {ADD_JSON}}}\n</tool_call>', ("", [("add", ADD_JSON)])),
    (HERMES, f'So: <tool_call>{{"arguments": {ADD_JSON}, "name": "add"}}</tool_call>', ("So:", [("add", ADD_JSON)])),
    (
        HERMES,
        '<tool_call>{"name":"f","arguments":{}}</tool_call>\n<tool_call>{"name":"g"}</tool_call>\n',
        ("", [("f", "{}"), ("g", "{}")]),
    ),
    (HERMES, '<tool_call>{"name":"f","arguments":{"a":1', ("", [("f", '{"a":1')])),
    (HERMES, "<tool_call>nothing</tool_call>", ("<tool_call>nothing</tool_call>", [])),
    (HERMES, '<tool_call>{"arguments": {}}</tool_call>', ('<tool_call>{"arguments": {}}</tool_call>', [])),
    (HERMES, '<tool_call>{"name": 5}</tool_call>', ('<tool_call>{"name": 5}</tool_call>', [])),
    (HERMES, '<tool_call>{"na', ('<tool_call>{"na', [])),
    (HERMES, '<tool_call>{"name":"f","arguments":"{\\"a\\": 1}"}</tool_call>', ("", [("f", '{"a": 1}')])),
    (HERMES, '<tool_call>{"id": 7, "name": "f", "x": null, "parameters": [1]}', ("", [("f", "[1]")])),
    (HERMES, '<tool_call>{"name":"f","arguments":{}}</tool_call> done', (" done", [("f", "{}")])),
    (HERMES, "a \n<tool_call>nothing", ("a \n<tool_call>nothing", [])),
    (HERMES, '<tool_call>\n<tool_call>\n{"name":"f"}', ("<tool_call>\n", [("f", "{}")])),
    (LLAMA3, "plain {", ("plain {", [])),
    (LLAMA3, f'{{"name": "add", "parameters": {ADD_JSON}}}', ("", [("add", ADD_JSON)])),
    (LLAMA3, f'<|python_tag|>{{"name": "add", "parameters": {ADD_JSON}}}', ("", [("add", ADD_JSON)])),
    (LLAMA3, '{"name": "f"}; {"name": "g", "parameters": {}}', ("", [("f", "{}"), ("g", "{}")])),
    (LLAMA3, '{"answer": 42}', ('{"answer": 42}', [])),
    (LLAMA3, "<|python", ("<|python", [])),
    (LLAMA3, "\n<|python_tag|>print(1)", ("\n<|python_tag|>print(1)", [])),
    (MISTRAL, "plain [TOOL", ("plain [TOOL", [])),
    (MISTRAL, "a [TOOL_CALLS] is a mark, {x}", ("a [TOOL_CALLS] is a mark, {x}", [])),
    (MISTRAL, '[TOOL_CALLS][{"na', ('[TOOL_CALLS][{"na', [])),
    (MISTRAL, "[TOOL_CALLS][1, 2]", ("[TOOL_CALLS][1, 2]", [])),
    (MISTRAL, "[TOOL_CALLS][TOOL_CALLS]f{}", ("[TOOL_CALLS]", [("f", "{}")])),
    (MISTRAL, f"[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{ADD_JSON}", ("", [("add", ADD_JSON)])),
    (MISTRAL, f'[TOOL_CALLS][{{"name": "add", "arguments": {ADD_JSON}}}]', ("", [("add", ADD_JSON)])),
    (MISTRAL, '[TOOL_CALLS] [{"name": "f"}, {"name": "g"}]', ("", [("f", "{}"), ("g", "{}")])),
    (MISTRAL, f"[TOOL_CALLS]add[ARGS]{ADD_JSON}", ("", [("add", ADD_JSON)])),
    (MISTRAL, '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g{}', ("", [("f", '{"a": 1}'), ("g", "{}")])),
    (MISTRAL, '[TOOL_CALLS]{"name": "f"}', ("", [("f", "{}")])),
    (MISTRAL, 'Well. [TOOL_CALLS][{"name": "f"}] ok', ("Well. ok", [("f", "{}")])),
]
THOUGHTS = [
    ("<think>\nI think.\n</think>\n\nYes.", False, "I think.", "Yes."),
    ("I think.\n</think>\n\nYes.", True, "I think.", "Yes."),
    ("<think>I think.</think>Yes.", True, "I think.", "Yes."),
    ("Yes. <think>no</think>", False, "", "Yes. <think>no</think>"),
    ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
    ("never < ends </thin", True, "never < ends </thin", ""),
    ("<thi", False, "", "<thi"),
    ("<", True, "<", ""),
]


def summary(pieces: list[Piece]) -> Summary:
    calls: dict[int, list[str]] = {}
    for piece in pieces:
        match piece:
            case CallStart(index, name):
                assert index == len(calls), "each begins once, in order"
                calls[index] = [name, ""]
            case CallArguments(index, text):
                calls[index][1] += text
            case _:
                pass
    text = "".join(piece.text for piece in pieces if isinstance(piece, Text))
    return text, [(name, arguments) for name, arguments in calls.values()]


def in_pieces(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:stop] for start, stop in pairwise(places)]


def parsed(format: ToolFormat, parts: list[str]) -> Summary:
    parser = format.parser()
    pieces = [piece for part in parts for piece in parser.feed(part)]
    return summary([*pieces, *parser.finish()])


@pytest.mark.parametrize(("format", "text", "expected"), CASES, ids=[text[:40] for _, text, _ in CASES])
def test_an_answer_is_taken_apart_at_once_and_character_by_character(
    format: ToolFormat, text: str, expected: Summary
) -> None:
    assert parsed(format, [text]) == expected
    assert parsed(format, list(text)) == expected


FRAGMENTS = (
    *(
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[CALL_ID]",
        "[ARGS]",
        "<|python_tag|>",
        "<think>",
        "</think>",
        "text",
        "\n ",
    ),
    *(
        '{"name": "f", "arguments": {"a": "}\\""}}',
        '{"name"',
        ':"g"',
        "{",
        "}",
        "[",
        "]",
        '"',
        ",",
        ";",
        "\\",
        "é",
        "1",
    ),
)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([HERMES, LLAMA3, MISTRAL]),
    st.lists(st.sampled_from(FRAGMENTS), max_size=12),
    st.lists(st.integers(0, 400), max_size=6),
)
def test_the_pieces_in_which_a_text_comes_change_nothing(
    format: ToolFormat, fragments: list[str], cuts: list[int]
) -> None:
    text = "".join(fragments)
    assert parsed(format, in_pieces(text, cuts)) == parsed(format, [text])


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([HERMES, LLAMA3, MISTRAL]), st.lists(st.sampled_from(FRAGMENTS), max_size=8))
def test_nothing_of_an_answer_without_calls_is_lost(format: ToolFormat, fragments: list[str]) -> None:
    answer = "".join(fragments)
    text, calls = parsed(format, [answer])
    assert calls or text == answer


def test_prose_behind_a_mark_does_not_wait_for_the_end() -> None:
    parser = MISTRAL.parser(["f"])
    assert summary(parser.feed("[TOOL_CALLS] means\nthat")) == ("[TOOL_CALLS] means\nthat", [])


def test_a_name_with_spaces_is_one_where_there_is_such_a_function() -> None:
    for names, found in ((["my f"], ("", [("my f", "{}")])), (["f"], ("[TOOL_CALLS]my f{}", []))):
        parser = MISTRAL.parser(names)
        assert summary([*parser.feed("[TOOL_CALLS]my f{}"), *parser.finish()]) == found


def test_arguments_go_out_as_they_come() -> None:
    parser = HERMES.parser()
    parser.feed('<tool_call>{"name": "f", "arguments": {"a": ')
    assert parser.feed("[1, ") == [CallArguments(0, "[1, ")]


def thought_and_text(parts: list[str], *, is_inside: bool) -> tuple[str, str]:
    splitter = ReasoningSplitter(is_inside=is_inside)
    pieces = [piece for part in parts for piece in splitter.feed(part)] + splitter.finish()
    thought = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    return thought, "".join(piece.text for piece in pieces if isinstance(piece, Text))


@pytest.mark.parametrize(("text", "is_inside", "thought", "rest"), THOUGHTS)
def test_a_thought_is_told_from_the_answer(text: str, is_inside: bool, thought: str, rest: str) -> None:
    assert thought_and_text([text], is_inside=is_inside) == (thought, rest)
    assert thought_and_text(list(text), is_inside=is_inside) == (thought, rest)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=8), st.lists(st.integers(0, 200), max_size=5), st.booleans())
def test_the_pieces_of_a_thought_change_nothing(fragments: list[str], cuts: list[int], is_inside: bool) -> None:
    text = "".join(fragments)
    whole = thought_and_text([text], is_inside=is_inside)
    assert thought_and_text(in_pieces(text, cuts), is_inside=is_inside) == whole


@pytest.mark.parametrize(
    ("template", "format"),
    [
        ("{{ messages }}", HERMES),
        ("{% if tools %}<tool_call>{% endif %}", HERMES),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", MISTRAL),
        ("<|python_tag|>", LLAMA3),
        ('{"name": function name, "parameters": dictionary}', LLAMA3),
    ],
)
def test_the_chat_template_says_how_calls_are_written(template: str, format: ToolFormat) -> None:
    assert format_for("auto", [template]) is format


def test_every_name_that_the_flag_takes_is_in_the_table() -> None:
    (field,) = [field for name, field in config.flags() if name == "--tool-call-parser"]
    assert set(field.metadata["choices"]) == {"auto", *FORMATS}
    assert ServerConfig(model="x").tool_call_parser == "auto"
