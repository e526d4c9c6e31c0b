"""Anthropic's dialect, `/v1/messages`: a conversation of blocks, in and out.

In: a body becomes the chat that it means, so that templates, tools and grammars are those of `/v1/chat/completions`.
Out: `MessagesReply` writes the pieces of an answer as blocks. What a prompt shares with earlier ones is cached anyway,
so `cache_control` says nothing; a budget of thinking is part of `max_tokens`, which bounds the whole answer.
"""
# pyright: reportIncompatibleVariableOverride=false
# As in `body.py`.

from collections.abc import Iterator, Sequence
from typing import Annotated, Any  # blocks and schemas of tools are JSON

import msgspec
from msgspec import Meta, Raw, Struct

from tandem.logtext import shown
from tandem.server.api.body import ChatBody, Messages, Routing, unsupported
from tandem.server.api.bounds import LOOP_BYTES, MAX_TOOLS, NewTokens, Stops, Temperature, TopK, TopP
from tandem.server.api.chat_form import AnswerForm, AnswerSplitter, arguments_of
from tandem.server.api.errors import contradiction, invalid
from tandem.server.api.foreign_fields import NOTHING, Foreign
from tandem.server.api.off_loop import off_loop
from tandem.server.api.openai import has_more_than_text, read_chat
from tandem.server.api.sample import Sample
from tandem.server.api.served_model import ServedModel
from tandem.server.api.stream import Reply
from tandem.server.api.tool_parsers.base import CallArguments, CallStart, Piece, Reasoning, Text
from tandem.server.api.validation import Asked

encode = msgspec.json.Encoder().encode


KEPT_THOUGHTS = "clear_thinking_20251015"  # the one edit that may ask for what happens anyway


class OutputConfig(Struct, kw_only=True):
    format: dict[str, Any] | None = None
    effort: str | None = None


class MessagesBody(Foreign, kw_only=True):
    max_tokens: NewTokens | None = None
    messages: Messages | None = None
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: Stops | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: OutputConfig | None = None
    context_management: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None  # about the client's own user: changes nothing
    container: Raw = NOTHING
    mcp_servers: Raw = NOTHING
    output_format: Raw = NOTHING


# in


async def read_messages(body: MessagesBody, routing: Routing, served: ServedModel, size: int) -> Asked:
    """The one prompt of a request. size: bytes of the body."""
    if body.max_tokens is None:
        raise invalid("max_tokens", "is missing")
    chat = await off_loop(size, LOOP_BYTES, chat_of, body)
    return await read_chat(chat, routing, served, size)


def chat_of(body: MessagesBody) -> ChatBody:
    """The same as a chat. Raises `Refusal`."""
    refuse_edits(body.context_management)
    messages = [{"role": "system", "content": text}] if (text := text_of(body.system, "system")) else []
    for index, message in enumerate(body.messages or ()):
        messages += turns(message, f"messages[{index}]")
    if body.messages and not messages:
        raise invalid("messages", "say nothing")
    goes_on = bool(messages) and messages[-1]["role"] == "assistant"
    if goes_on and has_more_than_text(messages[-1]):
        raise contradiction("messages", "the last one is the assistant's, which goes on: it must be text only")
    choice, is_parallel = choice_of(body.tool_choice)
    output = body.output_config or OutputConfig()
    return ChatBody(
        messages=messages,
        max_tokens=body.max_tokens,
        stop=body.stop_sequences,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        tools=[tool_of(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or ())],
        tool_choice=choice,
        parallel_tool_calls=is_parallel,
        response_format=format_of(output.format),
        reasoning_effort=output.effort,
        chat_template_kwargs=thinking_of(body.thinking),
        continue_final_message=goes_on,
    )


def turns(message: dict[str, Any], place: str) -> Iterator[dict[str, Any]]:
    """One message as those of a chat: results of tools have a role of their own there."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise invalid("messages", f"{place}.role must be user, assistant or system")
    for name, usual in (("clear_at", (None, "never")), ("output_config", (None, {}))):
        if message.get(name) not in usual:
            raise unsupported("messages", f" with {place}.{name}")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    if not isinstance(content, list):
        raise invalid("messages", f"{place}.content must be a string or a list of blocks")
    if role == "assistant":
        yield assistant_turn(content, place)
        return
    if role == "system" and content:
        yield {"role": role, "content": text_of(content, "messages")}
        return
    texts: list[str] = []
    for block in content:
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "tool_result", "tool_use_id": str(id)}:
                if texts:
                    yield {"role": "user", "content": "\n".join(texts)}
                    texts = []
                yield {"role": "tool", "tool_call_id": id, "content": text_of(block.get("content"), "messages")}
            case _:
                raise strange(block, place)
    if texts:
        yield {"role": "user", "content": "\n".join(texts)}


def refuse_edits(management: dict[str, Any] | None) -> None:
    """All but the one that keeps what there is: nothing of a conversation is left out here."""
    edits = (management or {}).get("edits")
    if not isinstance(edits, list | None):
        raise invalid("context_management", "edits must be a list")
    for edit in edits or ():
        if edit not in ({"type": KEPT_THOUGHTS, "keep": "all"}, {"type": KEPT_THOUGHTS, "keep": {"type": "all"}}):
            raise unsupported("context_management", " with an edit other than to keep all thoughts")


def assistant_turn(content: list[Any], place: str) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in content:
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "thinking", "thinking": str(text)}:
                thoughts.append(text)
            case {"type": "tool_use", "id": str(id), "name": str(name), "input": dict(arguments)}:
                calls.append({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
            case _:
                raise strange(block, place)
    turn: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        turn["reasoning_content"] = "\n".join(thoughts)
    return turn | {"tool_calls": calls} if calls else turn


def text_of(content: Any, param: str) -> str:
    """Of a text, or of blocks that are all text."""
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for block in content if isinstance(content, list) else [content]:
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case _:
                raise strange(block, param)
    return "\n".join(texts)


def strange(block: Any, place: str) -> Exception:
    kind = block.get("type") if isinstance(block, dict) else None
    param = place.partition("[")[0]
    if kind in ("text", "tool_result", "tool_use", "thinking"):
        return invalid(param, f"{place} has a block of type {kind!r} that is not one, or is not in its place")
    return unsupported(param, f" with a block of type {shown(kind)}; only text, thoughts and tools")


def tool_of(tool: dict[str, Any], place: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise unsupported("tools", f" with type {shown(tool['type'])}; only the client's own")
    if not isinstance(tool.get("input_schema"), dict):
        raise invalid("tools", f"{place}.input_schema must be an object")
    function = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


def choice_of(choice: dict[str, Any] | None) -> tuple[str | dict[str, Any] | None, bool]:
    """As a chat says it, and whether there may be several calls at once."""
    if choice is None:
        return None, True
    is_parallel = choice.get("disable_parallel_tool_use") is not True
    match choice:
        case {"type": "auto"}:
            return "auto", is_parallel
        case {"type": "any"}:
            return "required", is_parallel
        case {"type": "none"}:
            return "none", is_parallel
        case {"type": "tool", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}, is_parallel
        case _:
            raise invalid("tool_choice", 'must be of type auto, any, none, or {"type": "tool", "name": ...}')


def format_of(given: dict[str, Any] | None) -> dict[str, Any] | None:
    match given:
        case None:
            return None
        case {"type": "json_schema", "schema": dict(schema)}:
            return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
        case _:
            raise invalid("output_config", 'format must be {"type": "json_schema", "schema": {...}}')


def thinking_of(thinking: dict[str, Any] | None) -> dict[str, Any] | None:
    """The variable that templates of models which can do both look at."""
    match thinking:
        case None:
            return None
        case {"type": "enabled" | "adaptive"}:
            return {"enable_thinking": True}
        case {"type": "disabled"}:
            return {"enable_thinking": False}
        case _:
            raise invalid("thinking", "type must be enabled, adaptive or disabled")


# out


class MessagesReply(Reply):
    """One sample as blocks. `id` and `model` are what the answer says of itself."""

    def __init__(self, *, id: str, model: str, form: AnswerForm) -> None:
        self.shows_prompts = False
        self._id, self._model, self._form = id, model, form
        self._splitter: AnswerSplitter | None = None
        self._num_blocks = 0
        self._open: type[Piece] | None = None  # what the block that is being written consists of

    def begin(self, sample: Sample) -> bytes:
        message = self._message([], None, None, sample) | {"usage": usage_of(sample) | {"output_tokens": 0}}
        return event("message_start", {"message": message})

    def delta(self, sample: Sample, text: str, start: int) -> bytes:
        return b"".join(map(self._piece, self._split(sample).feed(text)))

    def end(self, sample: Sample, text: str, start: int) -> bytes:
        splitter = self._split(sample)
        pieces = [*splitter.feed(text), *splitter.finish()]
        said = b"".join(map(self._piece, pieces)) + self._stop_block()
        reason, sequence = self._stop_of(sample)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return said + event("message_delta", {"delta": delta, "usage": usage_of(sample)})

    def close(self, samples: Sequence[Sample]) -> bytes:
        return event("message_stop", {})

    def whole(self, samples: Sequence[Sample]) -> bytes:
        (sample,) = samples
        splitter = self._split(sample)
        blocks = self._blocks([*splitter.feed("".join(sample.parts)), *splitter.finish()])
        return encode(self._message(blocks, *self._stop_of(sample), sample))

    def _split(self, sample: Sample) -> AnswerSplitter:
        if self._splitter is None:
            self._splitter = self._form.splitter(sample.ask.prompt.text or "", sample.ask.nonce)
        return self._splitter

    def _message(
        self, blocks: list[dict[str, Any]], reason: str | None, sequence: str | None, sample: Sample
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": blocks,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": usage_of(sample),
        }

    def _stop_of(self, sample: Sample) -> tuple[str, str | None]:
        """(reason, the stop sequence that was met)"""
        if isinstance(sample.text.matched, str):
            return "stop_sequence", sample.text.matched
        if sample.finish_reason != "stop":
            return "max_tokens", None
        has_called = self._splitter is not None and self._splitter.num_calls
        return ("tool_use" if has_called else "end_turn"), None

    def _piece(self, piece: Piece) -> bytes:
        match piece:
            case Text(text):
                return self._opened(Text, {"type": "text", "text": ""}) + self._more("text_delta", "text", text)
            case Reasoning(text):
                block = {"type": "thinking", "thinking": "", "signature": ""}
                return self._opened(Reasoning, block) + self._more("thinking_delta", "thinking", text)
            case CallStart():
                stopped = self._stop_block()
                return stopped + self._opened(CallStart, self._call(piece))
            case CallArguments(_, text):
                return self._more("input_json_delta", "partial_json", text)

    def _opened(self, kind: type[Piece], block: dict[str, Any]) -> bytes:
        """The begin of a block, unless the last one goes on."""
        if self._open is kind:
            return b""
        stopped = self._stop_block()
        self._open, self._num_blocks = kind, self._num_blocks + 1
        return stopped + event("content_block_start", {"index": self._num_blocks - 1, "content_block": block})

    def _stop_block(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return event("content_block_stop", {"index": self._num_blocks - 1})

    def _more(self, kind: str, name: str, text: str) -> bytes:
        delta = {"type": kind, name: text}
        return event("content_block_delta", {"index": self._num_blocks - 1, "delta": delta})

    def _call(self, start: CallStart) -> dict[str, Any]:
        assert self._splitter is not None
        return {"type": "tool_use", "id": self._splitter.id_of(start.index), "name": start.name, "input": {}}

    def _blocks(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        blocks: list[dict[str, Any]] = []
        arguments: dict[int, str] = {}  # by place in `blocks`
        for piece in pieces:
            last = blocks[-1]["type"] if blocks else None
            match piece:
                case Text(text) if last == "text":
                    blocks[-1]["text"] += text
                case Text(text):
                    blocks.append({"type": "text", "text": text})
                case Reasoning(text) if last == "thinking":
                    blocks[-1]["thinking"] += text
                case Reasoning(text):
                    blocks.append({"type": "thinking", "thinking": text, "signature": ""})
                case CallStart():
                    blocks.append(self._call(piece))
                case CallArguments(_, text):
                    place = len(blocks) - 1
                    arguments[place] = arguments.get(place, "") + text
        for place, text in arguments.items():
            blocks[place]["input"] = arguments_of(text)
        return blocks


def usage_of(sample: Sample) -> dict[str, int]:
    """What was cached is not counted as input there."""
    cached = sample.cached_tokens
    return {
        "input_tokens": len(sample.ask.prompt.tokens) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": sample.text.num_tokens,
    }


def event(kind: str, data: dict[str, Any]) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + encode({"type": kind, **data}) + b"\n\n"
