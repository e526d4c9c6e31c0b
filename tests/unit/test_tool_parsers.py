"""Calls and thoughts in answers: each format, whatever the pieces in which the text comes."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem import config
from tandem.config import ServerConfig
from tandem.server.api.reasoning import ReasoningSplitter
from tandem.server.api.tool_parsers.base import MOST_AT_ONCE, CallArguments, CallStart, Piece, Reasoning, Text, Tools
from tandem.server.api.tool_parsers.hermes import HermesParser
from tandem.server.api.tool_parsers.python_value import json_of_literal
from tandem.server.api.tool_parsers.table import (
    FORMATS,
    GRANITE,
    HERMES,
    LLAMA3,
    MISTRAL,
    OLMO3,
    PHI4_MINI,
    PHI4_MINI_JSON,
    PYTHONIC,
    QWEN3_CODER,
    ToolFormat,
    format_for,
)

ADD = {"a": 1, "b": [2, {"c": 'q"}{'}]}
ADD_JSON = json.dumps(ADD)
Summary = tuple[str, list[tuple[str, str]]]
F_AND_G: Summary = ("", [("f", '{"a": "]"}'), ("g", "{}")])
WIDE = [("f", '{"a": -10.50e3, "b": [null, true], "c": "", "d": "x\\"y"}'), ("g", "{}")]
ESCAPES = r"""{"a": "'Aé😀\ud83d\\q/\"", "b": {"c": 0.5}}"""


def coder(name: str, **arguments: str) -> str:
    """A call as Qwen3-Coder writes it."""
    said = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{said}</function>\n</tool_call>"


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
    (PHI4_MINI, "plain <|tool functools", ("plain <|tool functools", [])),
    (PHI4_MINI, f'<|tool_call|>[{{"name": "add", "arguments": {ADD_JSON}}}]<|/tool_call|>', ("", [("add", ADD_JSON)])),
    (PHI4_MINI, 'So\n<|tool_call|>{"name": "f"}<|/tool_call|> ok', ("So ok", [("f", "{}")])),
    (PHI4_MINI, '<|tool_call|> [{"name":"f"}, {"name":"g"}] <|/tool_call|>\n', ("", [("f", "{}"), ("g", "{}")])),
    (PHI4_MINI, "<|tool_call|>[nothing]<|/tool_call|>", ("<|tool_call|>[nothing]<|/tool_call|>", [])),
    (PHI4_MINI_JSON, 'functools[{"name": "f", "parameters": {"a": "]"}}, {"name": "g"}]', F_AND_G),
    (PHI4_MINI_JSON, "import functools\nfunctools[0]", ("import functools\nfunctools[0]", [])),
    (PHI4_MINI_JSON, "functools[]", ("functools[]", [])),
    (GRANITE, 'Well. <|tool_call|>[{"name": "f", "arguments": {"a": "]"}}, {"name": "g"}]\n', ("Well.", F_AND_G[1])),
    (PYTHONIC, "plain [f()]", ("plain [f()]", [])),
    (PYTHONIC, f"[add(a=1, b={ADD['b']!r})]", ("", [("add", ADD_JSON)])),
    (PYTHONIC, '\n[f(a="]"), g()]\n', F_AND_G),
    (PYTHONIC, '[f( a = -1_0.50e3 ,\n b=(None, True), c=\'\', d="""x"y""", ), g() ] ok', (" ok", WIDE)),
    (PYTHONIC, r"""[f(a='\'\x41\u00e9\U0001F600\ud83d\q\/"', b={'c': .5})]""", ("", [("f", ESCAPES)])),
    (PYTHONIC, "[see (a), then]", ("[see (a), then]", [])),
    (PYTHONIC, "[f(x)]", ("[f(x)]", [])),
    (PYTHONIC, "[f(a=g(1))]", ("[f(a=g(1))]", [])),
    (PYTHONIC, "[f(a=__import__('os').system('x'))]", ("[f(a=__import__('os').system('x'))]", [])),
    (PYTHONIC, "[]", ("[]", [])),
    (PYTHONIC, "[1, 2]", ("[1, 2]", [])),
    (PYTHONIC, "[f(a='b", ("", [("f", '{"a": "b')])),
    (PYTHONIC, "[f(a=1), 2]", (", 2]", [("f", '{"a": 1}')])),
    (OLMO3, "a <function", ("a <function", [])),
    (OLMO3, "So.\n<function_calls>\nf(a=']')\ng()\n</function_calls>\n", ("So.", F_AND_G[1])),
    (OLMO3, "<function_calls>f(a=true, b=null)</function_calls> ok", (" ok", [("f", '{"a": true, "b": null}')])),
    (OLMO3, "<function_calls>no</function_calls>", ("<function_calls>no</function_calls>", [])),
    (QWEN3_CODER, "a < b <tool <func", ("a < b <tool <func", [])),
    (QWEN3_CODER, f"So.\n\n{coder('f', a=']')}\n{coder('g')}", ("So.", F_AND_G[1])),
    (QWEN3_CODER, "<function=f>\n<parameter=a>\n]\n</parameter>\n</function>\n</tool_call>" + coder("g"), F_AND_G),
    (QWEN3_CODER, "<tool_call><function=f><parameter=a>]</parameter></function></tool_call>" + coder("g"), F_AND_G),
    (QWEN3_CODER, "<tool_call>\n<function=f>\n<parameter=a>\n]\n</function>\n</tool_call>" + coder("g"), F_AND_G),
    (QWEN3_CODER, "<tool_call>\n<function=f>\n<parameter=a>\n]\n</parameter>\n</tool_call>" + coder("g"), F_AND_G),
    (QWEN3_CODER, coder("f", a="\n</param\n\n"), ("", [("f", json.dumps({"a": "\n</param\n\n"}))])),
    (QWEN3_CODER, coder("f", a="", b='é"\\'), ("", [("f", '{"a": "", "b": "é\\"\\\\"}')])),
    (QWEN3_CODER, coder("f", a="x")[:-36], ("", [("f", '{"a": "x')])),
    (QWEN3_CODER, "<tool_call>\nnothing</tool_call>", ("<tool_call>\nnothing</tool_call>", [])),
    (QWEN3_CODER, "<tool_call>\n<function=a\nb>", ("<tool_call>\n<function=a\nb>", [])),
    (QWEN3_CODER, "<tool_call>" + coder("f"), ("<tool_call>", [("f", "{}")])),
    (QWEN3_CODER, "<tool_call>\n<function=f", ("<tool_call>\n<function=f", [])),
    (QWEN3_CODER, coder("f") + " done", (" done", [("f", "{}")])),
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


def parsed(format: ToolFormat, parts: list[str], tools: Tools | None = None) -> Summary:
    parser = format.parser(tools)
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
        "functools[",
        "<|tool_call|>",
        "<|/tool_call|>",
        "<function_calls>",
        "</function_calls>",
        "<function=f>",
        "</function>",
        "<parameter=a>",
        "</parameter>",
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
        "f(",
        "a=",
        ")",
        "'",
        "x4",
    ),
)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(list(FORMATS.values())),
    st.lists(st.sampled_from(FRAGMENTS), max_size=12),
    st.lists(st.integers(0, 400), max_size=6),
    st.sampled_from([None, {"f": {"properties": {"a": {"type": "array"}}}}]),
)
def test_the_pieces_in_which_a_text_comes_change_nothing(
    format: ToolFormat, fragments: list[str], cuts: list[int], tools: Tools | None
) -> None:
    text = "".join(fragments)
    assert parsed(format, in_pieces(text, cuts), tools) == parsed(format, [text], tools)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(list(FORMATS.values())), st.lists(st.sampled_from(FRAGMENTS), max_size=8))
def test_nothing_of_an_answer_without_calls_is_lost(format: ToolFormat, fragments: list[str]) -> None:
    answer = "".join(fragments)
    text, calls = parsed(format, [answer])
    assert calls or text == answer


def test_prose_behind_a_mark_does_not_wait_for_the_end() -> None:
    parser = MISTRAL.parser({"f": {}})
    assert summary(parser.feed("[TOOL_CALLS] means\nthat")) == ("[TOOL_CALLS] means\nthat", [])


def test_a_name_with_spaces_is_one_where_there_is_such_a_function() -> None:
    for names, found in (({"my f": {}}, ("", [("my f", "{}")])), ({"f": {}}, ("[TOOL_CALLS]my f{}", []))):
        parser = MISTRAL.parser(names)
        assert summary([*parser.feed("[TOOL_CALLS]my f{}"), *parser.finish()]) == found


def test_arguments_go_out_as_they_come() -> None:
    parser = HERMES.parser()
    parser.feed('<tool_call>{"name": "f", "arguments": {"a": ')
    assert parser.feed("[1, ") == [CallArguments(0, "[1, ")]


def test_arguments_of_the_other_formats_go_out_as_they_come() -> None:
    parser = QWEN3_CODER.parser()
    parser.feed("<tool_call>\n<function=f>\n<parameter=a>\nx")
    assert parser.feed("yz\n</par") == [CallArguments(0, "yz")]
    parser = PYTHONIC.parser()
    parser.feed('[f(a="x')
    assert parser.feed("yz\\") == [CallArguments(0, "yz")]


COLOUR = {"$ref": "#/$defs/Colour"}
SCHEMAS = {
    **{name: {"type": name} for name in ("string", "integer", "number", "boolean", "array", "object", "null")},
    "any": {},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "either": {"type": ["string", "integer"]},
    "list": {"oneOf": [{"items": {}}, {"type": "string"}]},
    "one": {"const": 1},
    "colour": COLOUR,
    "loop": {"$ref": "#/$defs/Loop"},
}
PAINT = {
    "type": "object",
    "properties": SCHEMAS,
    "$defs": {"Colour": {"enum": ["1", None]}, "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"properties": {}}]}},
    "additionalProperties": {"type": "integer"},
}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("string", "1", '"1"'),
        ("string", "null", '"null"'),
        ("integer", " 12345678901234567890 ", "12345678901234567890"),
        ("integer", "twelve", '"twelve"'),
        ("number", "1.50", "1.50"),
        ("number", "NaN", '"NaN"'),
        ("boolean", "True", "true"),
        ("boolean", "false", "false"),
        ("array", '[1,\n "a"]', '[1,\n "a"]'),
        ("array", "(1, 'a')", '[1, "a"]'),
        ("object", "{'a': None}", '{"a": null}'),
        ("object", '{"a": ', '"{\\"a\\": "'),
        ("null", "None", "null"),
        ("any", "1", '"1"'),
        ("maybe", "None", "null"),
        ("maybe", "null", "null"),
        ("maybe", '"a"', '"\\"a\\""'),
        ("either", "5", "5"),
        ("either", "5.5", '"5.5"'),
        ("list", "[5]", "[5]"),
        ("list", "5", '"5"'),
        ("one", "1", "1"),
        ("colour", "1", '"1"'),
        ("colour", "null", "null"),
        ("loop", '{"a": 1}', '{"a": 1}'),
        ("unknown", "7", "7"),
    ],
)
def test_a_text_becomes_what_the_schema_says(name: str, text: str, value: str) -> None:
    parser = QWEN3_CODER.parser({"paint": PAINT})
    pieces = [*parser.feed(coder("paint", **{name: text})), *parser.finish()]
    assert summary(pieces) == ("", [("paint", json.dumps({name: 0}).replace("0", value))])


def test_a_call_without_its_first_tag_is_one_of_a_function_that_there_is() -> None:
    text = coder("f").removeprefix("<tool_call>\n")
    for tools, found in (({"f": {}}, ("So", [("f", "{}")])), ({"g": {}}, ("So\n" + text, []))):
        parser = QWEN3_CODER.parser(tools)
        assert summary([*parser.feed("So\n" + text), *parser.finish()]) == found


@pytest.mark.parametrize("text", ["[f(x())]", "[f(a=1)]"])
def test_an_answer_in_brackets_is_a_call_only_of_a_function_that_there_is(text: str) -> None:
    parser = PYTHONIC.parser({"g": {}})
    assert summary([*parser.feed(text), *parser.finish()]) == (text, [])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(JSON)
def test_a_literal_of_python_or_of_json_is_read_as_what_it_is(value: object) -> None:
    for text in (repr(value), json.dumps(value), json.dumps(value, ensure_ascii=False)):
        assert json.loads(json_of_literal(text) or "") == value


@pytest.mark.parametrize(
    "text", ["f()", "1 + 1", "x", "[1", "{1: 2}", "{1}", "r'a'", "'a' 'b'", "[,]", "1__import__", ""]
)
def test_what_is_no_literal_is_none(text: str) -> None:
    assert json_of_literal(text) is None


def test_a_long_answer_is_taken_a_little_at_a_time() -> None:
    """Else what it takes would grow with the square of its length."""

    class Counting(HermesParser):
        longest = 0

        def _outside(self, is_last: bool) -> bool:
            self.longest = max(self.longest, len(self._text))
            return super()._outside(is_last)

    parser = Counting()
    calls = '<tool_call>{"name": "f"}</tool_call>' * 1000
    assert summary(parser.feed(calls)) == ("", [("f", "{}")] * 1000)
    assert parser.longest <= 2 * MOST_AT_ONCE


def test_what_is_nested_deeply_or_long_is_read_in_a_straight_line() -> None:
    depth = 100_000
    text = f"[f(a={'[' * depth}{']' * depth}, b='{'x' * depth}', c={'9' * depth})]"
    calls = parsed(PYTHONIC, [text])[1]
    assert len(calls[0][1]) == len(text) - len("[f(a=, b=, c=)]") + len('{"a": , "b": , "c": }')
    assert parsed(PYTHONIC, ["[f(a=" + "[" * depth]) == ("", [("f", '{"a": ' + "[" * depth)])
    deep = coder("f", a="[" * depth)
    parser = QWEN3_CODER.parser({"f": {"properties": {"a": {"type": "array"}}}})
    assert summary(parser.feed(deep)) == ("", [("f", json.dumps({"a": "[" * depth}))])


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
        ("<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>", QWEN3_CODER),
        ("with a pythonic function call wrapped in <function_calls></function_calls>", OLMO3),
        ("formatted as functools[{ <|tool|>", PHI4_MINI_JSON),
        ("'<|tool|>' + message['tools'] + '<|/tool|>'", PHI4_MINI),
        ("'<|tool_call|>' followed by a JSON list", GRANITE),
        ("in the format [func_name1(params_name1=params_value1, ...)]", PYTHONIC),
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
