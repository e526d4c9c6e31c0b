"""The formats of tool calls by name, and which one a model speaks: its chat template says so."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tandem.server.api.tool_parsers import hermes, json_list, llama3, mistral, pythonic, qwen3_coder
from tandem.server.api.tool_parsers.base import ToolParser


@dataclass(frozen=True, slots=True)
class ToolFormat:
    name: str
    parser: Callable[..., ToolParser]  # takes the functions that may be called (`Tools`); None: any
    calls: Callable[..., str]  # functions, literal, is_parallel, opened: calls as a Lark expression
    openers: tuple[str, ...]  # what calls begin with in the middle of text; empty: they are the whole answer
    marks: tuple[str, ...]  # which are special tokens of some models, and have to be seen
    first: str = "{"  # character of calls that nothing opens, in a class of a pattern
    id_length: int = 24  # of the ids of calls, which templates may insist on


HERMES = ToolFormat("hermes", hermes.HermesParser, hermes.calls, (hermes.OPENER,), (hermes.OPENER, hermes.CLOSER))
LLAMA3 = ToolFormat("llama3", llama3.Llama3Parser, llama3.calls, (), (llama3.MARK,))
MISTRAL = ToolFormat(
    "mistral",
    mistral.MistralParser,
    mistral.calls,
    (mistral.OPENER,),
    (mistral.OPENER, mistral.CALL_ID, mistral.ARGS),
    id_length=9,
)
QWEN3_CODER = ToolFormat(
    "qwen3_coder",
    qwen3_coder.Qwen3CoderParser,
    qwen3_coder.calls,
    (hermes.OPENER, qwen3_coder.FUNCTION),
    (hermes.OPENER, hermes.CLOSER),
)
PHI4_MINI, PHI4_MINI_JSON, GRANITE = (
    ToolFormat(
        name,
        json_list.JsonListParser,
        partial(json_list.calls, mark=mark, closer=closer),
        json_list.OPENERS,
        (json_list.MARK, json_list.CLOSER),
    )
    for name, mark, closer in (
        ("phi4_mini", json_list.MARK, json_list.CLOSER),
        ("phi4_mini_json", json_list.FUNCTOOLS, ""),
        ("granite", json_list.MARK, ""),
    )
)
PYTHONIC = ToolFormat("pythonic", pythonic.PythonicParser, pythonic.calls, (), (), first=r"\[")
OLMO3 = ToolFormat(
    "olmo3",
    pythonic.Olmo3Parser,
    pythonic.olmo3_calls,
    (pythonic.OPENER,),
    (pythonic.OPENER, pythonic.CLOSER),
)
FORMATS = {
    format.name: format
    for format in (HERMES, LLAMA3, MISTRAL, QWEN3_CODER, PHI4_MINI, PHI4_MINI_JSON, GRANITE, PYTHONIC, OLMO3)
} | {"qwen25": HERMES, "llama3_json": LLAMA3, "qwen3_xml": QWEN3_CODER}
# What only a template of that format says, in this order: some say what others do, too.
SIGNS = (
    (mistral.OPENER, MISTRAL),
    (qwen3_coder.PARAMETER, QWEN3_CODER),
    (pythonic.OPENER, OLMO3),
    (json_list.FUNCTOOLS, PHI4_MINI_JSON),
    ("<|/tool", PHI4_MINI),  # `<|/tool|>` behind the functions, or `<|/tool_call|>`
    (json_list.MARK, GRANITE),
    ("[func_name1(", PYTHONIC),  # as Meta writes it
    (llama3.MARK, LLAMA3),
)


def format_for(name: str, templates: Sequence[str]) -> ToolFormat:
    """Of `--tool-call-parser`. `auto`: as the chat templates write calls, else Hermes', which most models know."""
    if name != "auto":
        return FORMATS[name]
    text = "\n".join(templates)
    found = next((format for sign, format in SIGNS if sign in text), None)
    return found or (LLAMA3 if '"parameters": ' in text and hermes.OPENER not in text else HERMES)
