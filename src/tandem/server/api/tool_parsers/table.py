"""The formats of tool calls by name, and which one a model speaks: its chat template says so."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from tandem.server.api.tool_parsers import hermes, llama3, mistral
from tandem.server.api.tool_parsers.base import ToolParser


@dataclass(frozen=True, slots=True)
class ToolFormat:
    name: str
    parser: Callable[[Collection[str] | None], ToolParser]  # of the functions that may be called; None: any
    calls: Callable[..., str]  # functions, literal, is_parallel, is_opened: calls as a Lark expression
    opener: str  # what calls begin with in the middle of text; empty: they are the whole answer
    marks: tuple[str, ...]  # which are special tokens of some models, and have to be seen
    id_length: int = 24  # of the ids of calls, which templates may insist on


HERMES = ToolFormat("hermes", hermes.HermesParser, hermes.calls, hermes.OPENER, (hermes.OPENER, hermes.CLOSER))
LLAMA3 = ToolFormat("llama3", llama3.Llama3Parser, llama3.calls, "", (llama3.MARK,))
MISTRAL = ToolFormat(
    "mistral",
    mistral.MistralParser,
    mistral.calls,
    mistral.OPENER,
    (mistral.OPENER, mistral.CALL_ID, mistral.ARGS),
    id_length=9,
)
FORMATS = {"hermes": HERMES, "qwen25": HERMES, "llama3": LLAMA3, "llama3_json": LLAMA3, "mistral": MISTRAL}


def format_for(name: str, templates: Sequence[str]) -> ToolFormat:
    """Of `--tool-call-parser`. `auto`: as the chat templates write calls, else Hermes', which most models know."""
    if name != "auto":
        return FORMATS[name]
    text = "\n".join(templates)
    if mistral.OPENER in text:
        return MISTRAL
    if llama3.MARK in text or ('"parameters": ' in text and hermes.OPENER not in text):
        return LLAMA3
    return HERMES
