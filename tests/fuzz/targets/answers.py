"""What clients ask of the form of an answer, and what models make of it: grammars, and the parsers of calls."""

import asyncio
from collections.abc import Mapping

import msgspec
from engine import Run, Target
from mutators import mutate_bytes, mutate_json

from tandem.cli.model_source import BUNDLED, find_model
from tandem.server.api.body import ChatBody, decode_body
from tandem.server.api.chat_form import ChatForm
from tandem.server.api.errors import Refusal
from tandem.server.api.tokenizer import Tokenizer
from tandem.server.api.tool_parsers.base import CallArguments, CallStart, Piece, Tools
from tandem.server.api.tool_parsers.table import FORMATS, HERMES, PYTHONIC, QWEN3_CODER, ToolFormat
from targets.http import new_loop

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0}, "b": {"items": {"enum": ["x", 1]}}},
    "required": ["a"],
}
TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}]
ASKED = {
    "format": {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": True}}},
    "tag": {"structural_tag": TAG},
    "tree": {"structural_tag": {"format": {"type": "sequence", "elements": [{"type": "const_string", "value": "x"}]}}},
    "guided": {"guided_choice": ["a", "b"]},
    "structured": {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}},
    "regex": {"regex": "(a|b{2,5})*[^x]"},
    "ebnf": {"ebnf": 'root ::= "a" item* [0-9]+\nitem ::= "b" | "c" root'},
    "tools": {"tools": TOOLS, "tool_choice": "required"},
    "auto": {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
}
CALL = '{"name": "f", "arguments": {"a": "x\\"}", "b": [1, {}]}}'


def structured_body() -> Run:
    """A grammar that compiles, none, or a refusal."""
    loop = new_loop()
    tokenizer = Tokenizer(find_model(BUNDLED))
    forms = [ChatForm(format, "qwen3") for format in (HERMES, QWEN3_CODER, PYTHONIC)]

    def run(data: bytes) -> None:
        body = decode_body(data, ChatBody)
        asyncio.set_event_loop(loop)
        for form in forms:
            loop.run_until_complete(form.answer_to(body).read_grammar(body, tokenizer, "a prompt", len(data)))

    return run


def chat_answer() -> Run:
    """The pieces in which a text comes change nothing."""

    def run(data: bytes) -> None:
        text = data.decode(errors="replace")
        for format in FORMATS.values():
            for tools in (None, {"f": SCHEMA}):
                whole = taken_apart(format, [text], tools)
                assert taken_apart(format, [text[: len(text) // 3], text[len(text) // 3 :]], tools) == whole

    return run


def taken_apart(format: ToolFormat, parts: list[str], tools: Tools | None) -> list[str]:
    parser = format.parser(tools)
    pieces: list[Piece] = [piece for part in parts for piece in parser.feed(part)]
    found: dict[int, list[str]] = {-1: []}
    for piece in [*pieces, *parser.finish()]:
        match piece:
            case CallStart(index, name):
                assert index not in found, "a call begins once"
                found[index] = [name, " "]
            case CallArguments(index, text):
                found[index].append(text)
            case _:
                found[-1].append(piece.text)
    return ["".join(texts) for texts in found.values()]


def bodies() -> Mapping[str, bytes]:
    return {name: msgspec.json.encode(asked) for name, asked in ASKED.items()}


def answers() -> Mapping[str, bytes]:
    texts = {
        "hermes": f"So: <tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>",
        "llama3": f"<|python_tag|>{CALL}; {CALL}".replace("arguments", "parameters"),
        "mistral": f"Well [TOOL_CALLS][{CALL}, {CALL}] and [TOOL_CALLS]f[ARGS]" + '{"a": 1}',
        "phi4_mini": f"Well <|tool_call|>[{CALL}, {CALL}]<|/tool_call|> functools[{CALL}]",
        "pythonic": '[f(a=-1.5, b=[\'x\\x41\', {\'c\': None}], c="""y"""), f()]',
        "olmo3": "Well <function_calls>\nf(a=True)\nf(b=[1, (2, 'x')])\n</function_calls>",
        "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=c>\nx\n</parameter>\n"
        "</function>\n</tool_call>\n<function=f>\n<parameter=b>\n['x']\n</function>\n</tool_call>",
    }
    return {name: text.encode() for name, text in texts.items()}


TARGETS = (
    Target("structured_body", structured_body, mutate_json, 400, answers=(Refusal,), seeds=bodies),
    Target("chat_answer", chat_answer, mutate_bytes, 4_000, seeds=answers),
)
