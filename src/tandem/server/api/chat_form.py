"""The form of a chat's answer: thoughts, text and calls of tools, for one model, and for one request.

`ChatForm` is of the server: the flags, and what the chat template says of the model. `AnswerForm` is of one request:
which functions it may call, the grammar that sees to what it must, and the splitter that takes the answer apart.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any  # messages and schemas of tools are JSON

from tandem import grammar
from tandem.config import ServerConfig
from tandem.grammar import GrammarError
from tandem.logtext import shown
from tandem.server.api import reasoning
from tandem.server.api.body import ChatBody, unsupported
from tandem.server.api.bounds import LOOP_CHAT_BYTES
from tandem.server.api.errors import Problem, Refusal, contradiction, invalid
from tandem.server.api.off_loop import off_loop
from tandem.server.api.reasoning import ReasoningSplitter, Thinking
from tandem.server.api.resume import made_name
from tandem.server.api.structured_output import check_grammar, check_size, read_grammar
from tandem.server.api.tokenizer import Tokenizer
from tandem.server.api.tool_parsers.base import (
    CallArguments,
    CallStart,
    Function,
    Piece,
    Reasoning,
    Text,
    loaded,
)
from tandem.server.api.tool_parsers.rules import Rules
from tandem.server.api.tool_parsers.table import ToolFormat, format_for

MAX_NAME_CHARS = 128
NAME = r"^[^\x00-\x1f\x7f-\x9f]*$"  # of a function: no control characters
AUTO, REQUIRED, NONE = "auto", "required", "none"
TEXT_PARTS = ("text", "input_text", "output_text")  # whichever of OpenAI's APIs a part was written for, as vLLM has it


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    parameters: dict[str, Any]
    is_strict: bool


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What a `tool_choice` says."""

    mode: str  # `auto`, `required` or `none`
    allowed: frozenset[str] | None = None  # the names of what may be called; None: all
    is_one: bool = False  # a single call, of the function that is named

    def allows(self, name: str) -> bool:
        return self.allowed is None or name in self.allowed


@dataclass(frozen=True, slots=True)
class ChatForm:
    tools: ToolFormat
    reasoning: str  # of `--reasoning-parser`, without `auto`

    @classmethod
    def of(cls, config: ServerConfig, tokenizer: Tokenizer) -> "ChatForm":
        templates = list(tokenizer.templates.values())
        return cls(
            format_for(config.tool_call_parser, templates), reasoning.parser_for(config.reasoning_parser, templates)
        )

    def answer_to(self, body: ChatBody) -> "AnswerForm":
        """Raises `Refusal` for tools or a choice that cannot be."""
        tools = tools_of(body)
        choice = choice_of(body.tool_choice, [tool.name for tool in tools])
        if choice.mode == NONE:
            tools = []
        hides = body.include_reasoning is False
        separates = (hides or body.separate_reasoning is not False) and self.reasoning != NONE
        return AnswerForm(
            format=self.tools,
            reasoning=self.reasoning if separates else NONE,
            tools=tuple(tool for tool in tools if choice.allows(tool.name)),
            offered=tuple(body.tools or ()) if tools else (),
            must_call=choice.mode == REQUIRED,
            is_parallel=body.parallel_tool_calls is not False and not choice.is_one,
            streams_reasoning=body.stream_reasoning is not False,
            hides_reasoning=hides,
        )


@dataclass(frozen=True, slots=True)
class AnswerForm:
    format: ToolFormat
    reasoning: str
    tools: tuple[Tool, ...]  # that may be called
    offered: tuple[dict[str, Any], ...]  # as the template shows them
    must_call: bool
    is_parallel: bool
    streams_reasoning: bool
    hides_reasoning: bool

    @property
    def is_plain(self) -> bool:
        """The answer is text, whatever it holds."""
        return not self.tools and self.reasoning == NONE

    def shows_special_tokens(self, tokenizer: Tokenizer) -> bool:
        """Whether marks that have to be seen in the text are special tokens of this model."""
        marks = [*(self.format.marks if self.tools else ()), *self._thought_marks]
        return any(mark in tokenizer.special_names for mark in marks)

    @property
    def _thought_marks(self) -> tuple[str, ...]:
        return () if self.reasoning == NONE else (reasoning.OPENER, reasoning.CLOSER)

    def splitter(self, prompt: str, nonce: str) -> "AnswerSplitter":
        """nonce: of the request; the names of calls are made from it."""
        return AnswerSplitter(self, prompt, nonce)

    async def read_grammar(self, body: ChatBody, tokenizer: Tokenizer, prompt: str, size: int) -> str:
        """What the answer has to follow: the format that it shall have, or the calls that it must or may make, after
        what the model thinks first. size: bytes of the body. Raises `Refusal`."""
        answer = await read_grammar(body, tokenizer, size=size)
        is_bound = any(tool.is_strict for tool in self.tools) or len(self.tools) < len(self.offered)
        calls = self.must_call or is_bound or (bool(self.tools) and answer)
        if not calls and (not answer or not self.thinking(prompt)):
            return answer
        made = await off_loop(size, LOOP_CHAT_BYTES, self._grammar, tokenizer, prompt, answer, calls=bool(calls))
        await check_grammar(made, tokenizer, "tools" if calls else "response_format")
        return made

    def _grammar(self, tokenizer: Tokenizer, prompt: str, answer: str, *, calls: bool) -> str:
        rules = Rules(tokenizer.grammar_marks, {"answer": answer} if answer else {})
        try:
            body = self._body(rules, calls=calls, has_answer=bool(answer))
        except GrammarError as error:
            raise Refusal(Problem.INVALID_GRAMMAR, f"tools: {error}", param="tools") from None
        rules.lines.append(f"start: {self._thought(prompt, rules)} ({body})")
        return grammar.from_parts("\n".join(rules.lines), rules.parts)

    def _body(self, rules: Rules, *, calls: bool, has_answer: bool) -> str:
        """What comes after the thought, as a Lark expression."""
        if not calls:
            return "@answer"
        if not self.must_call and not has_answer:
            return self._text_and_calls(rules)
        made = self._calls(rules)
        return made if self.must_call else f"@answer | {made}"

    def _calls(self, rules: Rules, opened: str = "") -> str:
        functions = [Function(tool.name, tool.parameters, tool.is_strict, rules) for tool in self.tools]
        return self.format.calls(functions, rules.literal, is_parallel=self.is_parallel, opened=opened)

    def _text_and_calls(self, rules: Rules) -> str:
        """Calls keep to their schemas; everything else is free."""
        if not self.format.openers:
            rules.lines.append(rf"PLAIN: /([^{self.format.first}\s](.|\n)*)?/")
            return f"PLAIN | {self._calls(rules)}"
        ways = [f"{rules.up_to(opener)} {self._calls(rules, opener)}" for opener in self.format.openers]
        return f"({' | '.join(ways)}){'*' if self.is_parallel else '?'} TEXT"

    def thinking(self, prompt: str) -> Thinking:
        if self.reasoning == NONE or reasoning.is_over(prompt):
            return Thinking.NEVER
        return Thinking.INSIDE if reasoning.begins_inside(self.reasoning, prompt) else Thinking.MAYBE

    def _thought(self, prompt: str, rules: Rules) -> str:
        state = self.thinking(prompt)
        if not state:
            return ""
        rules.lines.append(r"SPACES: /[ \t\r\n]*/")
        thought = f"{rules.up_to(reasoning.CLOSER)} SPACES"
        return thought if state is Thinking.INSIDE else f"({rules.literal(reasoning.OPENER)} {thought})?"


class AnswerSplitter:
    """Takes one answer apart. What comes out is put together the same, whatever the pieces in which it comes."""

    def __init__(self, form: AnswerForm, prompt: str, nonce: str) -> None:
        self._nonce = nonce
        self._thoughts: ReasoningSplitter | None = None
        if thinking := form.thinking(prompt):
            self._thoughts = ReasoningSplitter(is_inside=thinking is Thinking.INSIDE)
        self._tools = form.format.parser({tool.name: tool.parameters for tool in form.tools}) if form.tools else None
        self._form = form
        self._held: list[str] = []  # of a thought that is shown as a whole
        self.num_calls = 0

    def feed(self, text: str) -> list[Piece]:
        if self._thoughts is not None:
            return self._shown(self._parsed(self._thoughts.feed(text)))
        return self._shown(self._parsed([Text(text)])) if text else []

    def finish(self) -> list[Piece]:
        """The rest, after the last text."""
        pieces = self._parsed(self._thoughts.finish() if self._thoughts is not None else [])
        if self._tools is not None:
            pieces += self._tools.finish()
        shown = self._shown(pieces)
        if self._held:
            shown.insert(0, Reasoning("".join(self._held)))
            self._held = []
        return shown

    def id_of(self, index: int) -> str:
        """Of a call, which the client names in the message with its result."""
        length = self._form.format.id_length
        made = made_name(self._nonce, "call", index)[:length]
        return made if length < 24 else f"call_{made}"

    def _parsed(self, pieces: list[Piece]) -> list[Piece]:
        if self._tools is None:
            return pieces
        return [
            found
            for piece in pieces
            for found in (self._tools.feed(piece.text) if isinstance(piece, Text) else [piece])
        ]

    def _shown(self, pieces: list[Piece]) -> list[Piece]:
        shown: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, CallStart | CallArguments):
                if piece.index > 0 and not self._form.is_parallel:
                    continue
                self.num_calls += isinstance(piece, CallStart)
            elif isinstance(piece, Reasoning) and self._form.hides_reasoning:
                continue
            elif isinstance(piece, Reasoning) and not self._form.streams_reasoning:
                self._held.append(piece.text)
                continue
            if self._held:
                shown.append(Reasoning("".join(self._held)))
                self._held = []
            shown.append(piece)
        return shown


# what a body says


def tools_of(body: ChatBody) -> list[Tool]:
    found: list[Tool] = []
    for index, tool in enumerate(body.tools or ()):
        function = tool.get("function")
        if tool.get("type", "function") != "function":
            raise unsupported("tools", f" with type {shown(tool.get('type'))}; only functions")
        if not isinstance(function, dict):
            raise invalid("tools", f"tools[{index}] needs a function")
        name = function.get("name")
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS or re.fullmatch(NAME, name) is None:
            raise invalid("tools", f"tools[{index}].function.name must have 1 to {MAX_NAME_CHARS} printable characters")
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            raise invalid("tools", f"tools[{index}].function.parameters must be an object")
        check_size("tools", tool)
        found.append(Tool(name, {"type": "object", **(parameters or {})}, function.get("strict") is True))
    if len({tool.name for tool in found}) < len(found):
        raise contradiction("tools", "two functions have the same name")
    return found


def choice_of(choice: str | dict[str, Any] | None, names: Sequence[str]) -> ToolChoice:
    match choice:
        case None:
            return ToolChoice(AUTO if names else NONE)
        case str():
            if choice not in (AUTO, REQUIRED, NONE):
                raise invalid("tool_choice", f"{choice[:40]!r} is none of auto, none, required")
            return ToolChoice(mode_of(choice, names))
        case {"function": {"name": str(name)}} if choice.get("type", "function") == "function":
            return ToolChoice(REQUIRED, named(name, names), is_one=True)
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [_, *_] as tools},
        }:
            return ToolChoice(mode_of(mode, names), frozenset().union(*(allowed(tool, names) for tool in tools)))
        case _:
            raise invalid(
                "tool_choice",
                'must be auto, none, required, {"type": "function", "function": {"name": ...}}, or '
                '{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}',
            )


def mode_of(mode: str, names: Sequence[str]) -> str:
    if mode == REQUIRED and not names:
        raise contradiction("tool_choice", "needs tools")
    return mode if names else NONE


def allowed(tool: Any, names: Sequence[str]) -> frozenset[str]:
    match tool:
        case {"function": {"name": str(name)}} if tool.get("type", "function") == "function":
            return named(name, names)
        case _:
            raise invalid("tool_choice", 'allowed_tools has other tools than {"type": "function", "function": {...}}')


def named(name: str, names: Sequence[str]) -> frozenset[str]:
    if name not in names:
        raise contradiction("tool_choice", f"there is no function {name[:40]!r} in tools")
    return frozenset((name,))


def flat_message(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is text: parts of text are joined, other parts refused."""
    if not isinstance(message.get("role"), str):
        raise invalid("messages", "every message needs a role")
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise invalid("messages", "tool_calls must be a list")
    if calls:
        message = {**message, "tool_calls": [with_arguments(call) for call in calls]}
    if message.get("reasoning_content") is None and isinstance(thought := message.get("reasoning"), str):
        message = {**message, "reasoning_content": thought}  # as vLLM calls it, and templates do not
    content = message.get("content")
    if content is None:
        return {**message, "content": text_of_refusal(message)}
    if isinstance(content, str):
        return message
    if not isinstance(content, list):
        raise invalid("messages", "content must be a string or a list of parts")
    return {**message, "content": "\n".join(map(text_of_part, content))}


def text_of_refusal(message: dict[str, Any]) -> str:
    """What an assistant said instead of an answer, as some servers tell it apart."""
    refusal = message.get("refusal")
    return refusal if isinstance(refusal, str) else ""


def text_of_part(part: Any) -> str:
    match part:
        case str(text) | {"type": "refusal", "refusal": str(text)}:
            return text
        case {"type": kind, "text": str(text)} if kind in TEXT_PARTS:
            return text
        case _:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise unsupported("messages", f" with content of type {shown(kind)}; only parts of type text")


def with_arguments(call: Any) -> Any:
    """A call as templates expect it: its arguments as an object, and not as the text that the API has."""
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise invalid("messages", "every call in tool_calls needs a function")
    function = call["function"]
    arguments = function.get("arguments")
    if not isinstance(function.get("name"), str) or not isinstance(arguments, str | dict | None):
        raise invalid("messages", "a function in tool_calls needs a name, and arguments as JSON text or an object")
    arguments = arguments_of(arguments) if isinstance(arguments, str) else arguments or {}
    return {**call, "function": {**function, "arguments": arguments}}


def arguments_of(text: str) -> dict[str, Any]:
    """As the object that they have to be. A text that was cut off, or is none, is not lost: its conversation goes on,
    and the model sees what it has said."""
    if text.strip() in ("", "null"):
        return {}
    found = loaded(text)
    return found if isinstance(found, dict) else {"invalid_json": text}
