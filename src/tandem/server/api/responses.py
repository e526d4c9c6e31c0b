"""OpenAI's Responses dialect, `/v1/responses`: a list of items, in and out.

In: a body becomes the chat that it means, so that templates, tools and grammars are those of `/v1/chat/completions`.
Out: `responses_reply.py`. The items of earlier responses come with the body as `kept_items`, put there by whoever keeps
responses (`response_store.py`): this server where it is unified, the router in front of a pair. So both halves of a
pair read the same conversation, whichever pair served it so far.
"""
# pyright: reportIncompatibleVariableOverride=false
# As in `body.py`.

from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any  # items and schemas of tools are JSON

from msgspec import Meta, Raw, Struct, structs

from tandem.logtext import shown
from tandem.server.api.body import ChatBody, Messages, Routing, SamplingFields, unsupported
from tandem.server.api.bounds import (
    LOOP_BYTES,
    MAX_TOOLS,
    ClientText,
    Int,
    Metadata,
    MinTokens,
    NewTokens,
    ResponseId,
)
from tandem.server.api.chat_form import MAX_NAME_CHARS, TEXT_PARTS
from tandem.server.api.errors import Refusal, contradiction, invalid
from tandem.server.api.foreign_fields import NOTHING, handled
from tandem.server.api.off_loop import off_loop
from tandem.server.api.openai import count_tokens, read_chat
from tandem.server.api.served_model import ServedModel
from tandem.server.api.validation import Asked

ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
NAMES = {"messages": "input", "response_format": "text.format", "max_completion_tokens": "max_output_tokens"}
SEALED_THOUGHTS = "reasoning.encrypted_content"
SEAL = "tandem:"
BETWEEN = "__"  # a namespace and the name of a function of it
MAX_PART_CHARS = (MAX_NAME_CHARS - len(BETWEEN)) // 2  # of either


class TextConfig(Struct, kw_only=True):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ReasoningConfig(Struct, kw_only=True):
    effort: str | None = None
    summary: str | None = None
    generate_summary: Raw = NOTHING


class ResponseStreamOptions(Struct, kw_only=True):
    include_obfuscation: Raw = NOTHING


class ResponsesBody(SamplingFields, kw_only=True):
    input: str | Messages | None = None
    kept_items: Messages | None = None  # of earlier responses; None: nobody keeps any
    previous_response_id: ResponseId | None = None
    store: bool | None = None
    instructions: str | None = None
    include: list[str] | None = None
    max_output_tokens: NewTokens | None = None
    min_tokens: MinTokens | None = None
    seed: Int | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    # about the client's own business: comes back as it is
    metadata: Metadata | None = None
    prompt_cache_key: ClientText | None = None
    safety_identifier: ClientText | None = None
    user: ClientText | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    truncation: str | None = None
    service_tier: str | None = None
    stream_options: ResponseStreamOptions | None = None
    access_programs: Raw = NOTHING
    background: Raw = NOTHING
    background_options: Raw = NOTHING
    context_management: Raw = NOTHING
    conversation: Raw = NOTHING
    image: Raw = NOTHING
    max_tool_calls: Raw = NOTHING
    moderation: Raw = NOTHING
    prompt: Raw = NOTHING
    prompt_cache_options: Raw = NOTHING
    top_logprobs: Raw = NOTHING
    logprobs: Raw = NOTHING
    messages: Raw = NOTHING
    function_call: Raw = NOTHING


SHARED = tuple(sorted(handled(SamplingFields) - {"n"}))  # with chats, name by name


async def read_responses(body: ResponsesBody, routing: Routing, served: ServedModel, size: int) -> Asked:
    """The one prompt of a request. size: bytes of the body and of `kept_items`."""
    refuse_unkept(body)
    chat = await off_loop(size, LOOP_BYTES, chat_of, body)
    try:
        return await read_chat(chat, routing, served, size, param="input")
    except Refusal as refusal:
        raise renamed(refusal) from None


async def count_input(body: ResponsesBody, routing: Routing, served: ServedModel, size: int) -> int:
    """How many tokens that prompt has."""
    refuse_unkept(body)
    try:
        return await count_tokens(partial(chat_of, body), routing, served, size, param="input")
    except Refusal as refusal:
        raise renamed(refusal) from None


def refuse_unkept(body: ResponsesBody) -> None:
    if body.kept_items is None and (body.previous_response_id is not None or body.store):
        param = "store" if body.previous_response_id is None else "previous_response_id"
        raise unsupported(param, ": it keeps no responses; ask the router in front of it, or send all items")


def renamed(refusal: Refusal) -> Refusal:
    """The same of the field as it is called here."""
    failure = refusal.failure
    name = NAMES.get(failure.param or "")
    if name is None:
        return refusal
    message = failure.message.removeprefix(f"{failure.param}: ")
    return Refusal(failure.code, f"{name}: {message}", param=name, stage=failure.stage)


def chat_of(body: ResponsesBody) -> ChatBody:
    """The same as a chat. Raises `Refusal`."""
    refuse_values(body)
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    kept = body.kept_items or []
    items = kept if kept and not body.input else [*kept, *items_of(body.input)]
    return structs.replace(without_items(body), messages=[*joined([*system, *turns(items)])])


def without_items(body: ResponsesBody) -> ChatBody:
    """All that is asked of the answer."""
    return ChatBody(
        max_completion_tokens=body.max_output_tokens,
        min_tokens=body.min_tokens,
        seed=body.seed,
        tools=tools_of(body.tools or ()),
        tool_choice=choice_of(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=format_of(body.text.format if body.text is not None else None),
        reasoning_effort=body.reasoning.effort if body.reasoning is not None else None,
        chat_template_kwargs=body.chat_template_kwargs,
        **{name: getattr(body, name) for name in SHARED},
    )


def refuse_values(body: ResponsesBody) -> None:
    """Fields of which one value is what happens anyway."""
    verbosity = None if body.text is None else body.text.verbosity
    for param, value, usual in (
        ("n", body.n, (None, 1)),
        ("text.verbosity", verbosity, (None, "medium")),
        ("truncation", body.truncation, (None, "disabled")),
        ("reasoning.summary", None if body.reasoning is None else body.reasoning.summary, (None, "auto")),
        ("service_tier", body.service_tier, (None, "auto", "default")),
    ):
        if value not in usual:
            raise unsupported(param, f" with {shown(value)}")
    for name in body.include or ():
        if name != SEALED_THOUGHTS:
            raise unsupported("include", f" with {shown(name)}")


# items


def items_of(given: str | Sequence[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """`input` as items. Raises `Refusal` where there are none."""
    if not given:
        raise invalid("input", "is missing or empty")
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    return list(given)


def turns(items: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Messages of a chat. What the assistant thought, said and called one after the other is one message there."""
    turn: dict[str, Any] | None = None
    for index, item in enumerate(items):
        place = f"item {index} of the conversation"
        if not is_of_assistant(item):
            if turn is not None:
                yield turn
                turn = None
            yield other_turn(item, place)
            continue
        more = assistant_part(item, place)
        if turn is None or not may_follow(turn, more):
            if turn is not None:
                yield turn
            turn = {"role": "assistant", "content": ""}
        calls = [*turn.get("tool_calls", ()), *more.pop("tool_calls", ())]
        turn |= more | ({"tool_calls": calls} if calls else {})
    if turn is not None:
        yield turn


def is_of_assistant(item: dict[str, Any]) -> bool:
    kind = item.get("type", "message")
    return kind in ("reasoning", "function_call") or (kind == "message" and item.get("role") == "assistant")


def may_follow(turn: dict[str, Any], more: dict[str, Any]) -> bool:
    """Whether it is still in the order thoughts, text, calls, the one in which templates write them."""
    if "tool_calls" in more:
        return True
    has_more = bool(turn["content"]) or "tool_calls" in turn
    return not has_more and ("content" in more or "reasoning_content" not in turn)


def assistant_part(item: dict[str, Any], place: str) -> dict[str, Any]:
    match item:
        case {"type": "function_call", "call_id": str(id), "name": str(name), "arguments": str(arguments)} if (
            isinstance(item.get("namespace"), str | None)
        ):
            name = full_name(item.get("namespace"), name)
            return {"tool_calls": [{"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}]}
        case {"type": "function_call"}:
            raise invalid("input", f"{place} is a function_call, which needs call_id, name and arguments as text")
        case {"type": "reasoning"}:
            return thought_of(item, place)
        case _:
            return {"content": text_of(item.get("content"), place)}


def thought_of(item: dict[str, Any], place: str) -> dict[str, Any]:
    given = item.get("encrypted_content")
    thought = opened(given) if given else ""
    if thought is None:
        raise unsupported("input", f": {place} has encrypted_content that is of another server")
    texts: list[str] = []
    content = item.get("content") or []
    if not isinstance(content, list):
        raise invalid("input", f"{place} has content that is no list")
    for part in content:
        match part:
            case {"type": "reasoning_text", "text": str(text)}:
                texts.append(text)
            case _:
                raise invalid("input", f"{place} has content that is no reasoning_text")
    thought = "\n".join(texts) or thought
    return {"reasoning_content": thought} if thought else {}


def sealed(thought: str) -> str:
    """For clients that send back nothing else of a thought. It is shown anyway: nothing about this is secret."""
    return SEAL + b64encode(thought.encode()).decode()


def opened(given: Any) -> str | None:
    """None: it was not sealed here."""
    if not isinstance(given, str) or not given.startswith(SEAL):
        return None
    try:
        return b64decode(given.removeprefix(SEAL), validate=True).decode()
    except ValueError:
        return None


def other_turn(item: dict[str, Any], place: str) -> dict[str, Any]:
    """Of whoever is not the assistant."""
    match item:
        case {"type": "function_call_output", "call_id": str(id), "output": output}:
            return {"role": "tool", "tool_call_id": id, "content": text_of(output, place)}
        case {"type": "function_call_output"}:
            raise invalid("input", f"{place} is a function_call_output that lacks call_id or output")
        case {"type": kind} if kind != "message":
            raise unsupported("input", f" with items of type {shown(kind)}; only messages, reasoning and functions")
        case {"role": str(role), "content": content} if role in ROLES:
            return {"role": ROLES[role], "content": text_of(content, place)}
        case _:
            raise invalid("input", f"{place} needs content, and a role: one of {', '.join(ROLES)}")


def text_of(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid("input", f"{place} needs content: a text or a list of parts")
    texts: list[str] = []
    for part in content:
        match part:
            case {"type": str(kind), "text": str(text)} if kind in TEXT_PARTS:
                texts.append(text)
            case {"type": "refusal", "refusal": str(text)}:
                texts.append(text)
            case {"type": str(kind)} if kind not in (*TEXT_PARTS, "refusal"):
                raise unsupported("input", f" with content of type {kind[:40]!r}; only {', '.join(TEXT_PARTS)}")
            case _:
                raise invalid("input", f"{place} has content that is no part with a type and a text")
    return "\n".join(texts)


def joined(messages: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """What the system says in several messages one after the other is one: many templates know one at the start."""
    last: dict[str, Any] | None = None
    for message in messages:
        if last is not None and last["role"] == message["role"] == "system":
            last = {"role": "system", "content": f"{last['content']}\n\n{message['content']}"}
            continue
        if last is not None:
            yield last
        last = message
    if last is not None:
        yield last


# tools and formats


def tools_of(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for index, tool in enumerate(tools):
        if tool.get("type") == "namespace":
            found += functions_of(tool, f"tools[{index}]")
        else:
            found.append(tool_of(tool, f"tools[{index}]"))
    if len(found) > MAX_TOOLS:
        raise contradiction("tools", f"{len(found)} functions in all; at most {MAX_TOOLS} are accepted")
    return found


def functions_of(space: dict[str, Any], place: str) -> Iterator[dict[str, Any]]:
    """Those of a namespace, as a model sees them: under their full names, with what is said of all of them."""
    name, about, tools = space.get("name"), space.get("description"), space.get("tools")
    if not is_part_of_name(name) or not isinstance(about, str | None) or not isinstance(tools, list):
        raise invalid("tools", f"{place} is a namespace, which needs a short name and a list of tools")
    for index, tool in enumerate(tools):
        inner = f"{place}.tools[{index}]"
        if not isinstance(tool, dict) or not is_part_of_name(tool.get("name")):
            raise invalid("tools", f"{inner} needs a short name")
        function = tool_of(tool, inner)["function"]
        said = {"description": "\n".join(filter(None, (about, function.get("description"))))} if about else {}
        yield {"type": "function", "function": function | said | {"name": full_name(name, function["name"])}}


def is_part_of_name(name: Any) -> bool:
    return isinstance(name, str) and 0 < len(name) <= MAX_PART_CHARS


def full_name(namespace: str | None, name: str) -> str:
    return f"{namespace}{BETWEEN}{name}" if namespace else name


def names_by_full_name(tools: Sequence[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """How a call of a function that is in a namespace names it."""
    return {
        full_name(space["name"], tool["name"]): {"name": tool["name"], "namespace": space["name"]}
        for space in tools
        if space.get("type") == "namespace"
        for tool in space["tools"]
    }


def tool_of(tool: dict[str, Any], place: str) -> dict[str, Any]:
    """A function, which is flat here."""
    if tool.get("type") != "function":
        raise unsupported("tools", f" with type {shown(tool.get('type'))}; only functions")
    if not isinstance(tool.get("name"), str):
        raise invalid("tools", f"{place}.name must be a text")
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def choice_of(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """As a chat has it, where the names are a level deeper."""
    match choice:
        case {"type": "function", "name": str()}:
            return deeper(choice)
        case {"type": "allowed_tools", "mode": mode, "tools": list(tools)}:
            of_chat = [deeper(tool) if isinstance(tool, dict) else tool for tool in tools]
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": of_chat}}
        case {"type": str(kind)} if kind not in ("function", "allowed_tools"):
            raise unsupported("tool_choice", f" with type {kind[:40]!r}; only a function, or allowed_tools")
        case dict():
            raise invalid(
                "tool_choice",
                'must be auto, none, required, {"type": "function", "name": ...}, or '
                '{"type": "allowed_tools", "mode": ..., "tools": [...]}',
            )
        case _:
            return choice


def deeper(function: dict[str, Any]) -> dict[str, Any]:
    return {"type": function.get("type"), "function": {"name": function.get("name")}}


def format_of(given: dict[str, Any] | None) -> dict[str, Any] | None:
    match given:
        case None | {"type": "text" | "json_object"}:
            return given
        case {"type": "json_schema", "name": str(), "schema": dict()}:
            named = {name: given[name] for name in ("name", "schema", "strict") if given.get(name) is not None}
            return {"type": "json_schema", "json_schema": named}
        case _:
            raise invalid("text.format", "must be text, json_object, or a json_schema with name and schema")
