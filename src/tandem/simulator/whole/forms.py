"""Requests whose answers have a form: schemas, grammars, calls of tools, thoughts, Anthropic's blocks, responses,
and completions that tell of their prompts.

What has to come is known: one engine alone follows the grammar (`clients.Answers`), and the text that its tokens spell
is taken apart in one piece. What a cluster says has to be the same, whatever pieces it came in and through whichever
half.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from random import Random
from typing import Any, ClassVar  # JSON documents

import msgspec
from msgspec import structs

from tandem.config import ServerConfig
from tandem.sampling import SamplingParams
from tandem.server.api.body import ChatBody, CompletionBody, NativeSampling
from tandem.server.api.chat_form import NONE, ChatForm, arguments_of
from tandem.server.api.messages import MessagesBody, chat_of
from tandem.server.api.openai import chat_text
from tandem.server.api.responses import ResponsesBody
from tandem.server.api.responses import chat_of as chat_of_items
from tandem.server.api.structured_output import read_grammar
from tandem.server.api.tokenizer import Tokenizer
from tandem.server.api.tool_parsers.base import CallArguments, CallStart, Piece, Reasoning, Text
from tandem.simulator.oracle import Violation
from tandem.simulator.whole.clients import Answer, ClientRequest, text_behind
from tandem.simulator.whole.cluster import MODEL
from tandem.simulator.whole.templates import tokenizer

CHAT, COMPLETIONS, GENERATE, MESSAGES = "/v1/chat/completions", "/v1/completions", "/generate", "/v1/messages"
RESPONSES = "/v1/responses"
SMALL = 0  # bytes of a body: nothing of it leaves the loop
MAX_NEW = 90  # tokens: a call of a tool takes about 50
PLACES = ["Rome", "Oslo"]
STAY = {
    "type": "object",
    "properties": {"city": {"enum": PLACES}, "days": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"name": "weather", "parameters": STAY, "strict": True}
REST = {"name": "rest", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
FUNCTIONS = [{"type": "function", "function": function} for function in (WEATHER, REST)]
TOOLS = [{"name": function["name"], "input_schema": function["parameters"]} for function in (WEATHER, REST)]
FLAT_FUNCTIONS = [{"type": "function", **function} for function in (WEATHER, REST)]
STAY_FORMAT = {"type": "json_schema", "json_schema": {"name": "stay", "schema": STAY, "strict": True}}
TAGS = {
    "type": "structural_tag",
    "structures": [{"begin": "<stay>", "schema": STAY, "end": "</stay>"}],
    "triggers": ["<stay>"],
}
LAST_TURNS = [
    {"role": "user", "content": [{"type": "text", "text": "Where?"}, {"type": "text", "text": "And when?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "In Rome."}]},
]

FORMS: dict[str, tuple[dict[str, Any], ...]] = {
    CHAT: (
        {"response_format": STAY_FORMAT},
        {"response_format": TAGS},
        {"tools": FUNCTIONS, "tool_choice": "required"},
        {"tools": FUNCTIONS, "tool_choice": "required", "parallel_tool_calls": False},
        {"tools": FUNCTIONS, "tool_choice": {"type": "function", "function": {"name": "weather"}}},
        {"tools": FUNCTIONS},
        {"tools": FUNCTIONS[1:], "tool_choice": "auto", "response_format": STAY_FORMAT},
    ),
    COMPLETIONS: (
        {"guided_regex": "(yes|no)( [0-9]{1,4})?"},
        {"guided_choice": PLACES},
        {"structured_outputs": {"json": STAY}},
        {"echo": True, "logprobs": 2},
        {"echo": True, "logprobs": 0, "max_tokens": 0},
    ),
    GENERATE: ({"regex": "[0-9]{3,20}"}, {"ebnf": 'root ::= "a" [b-e]* "f"'}, {"json_schema": STAY}),
    MESSAGES: (
        {"system": "Be brief.", "stop_sequences": ["\u2603"]},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"output_config": {"format": {"type": "json_schema", "schema": STAY}}},
        {"tools": TOOLS, "tool_choice": {"type": "any"}},
        {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}},
        {"tools": TOOLS},
    ),
    RESPONSES: (
        {"instructions": "Be brief."},
        {"text": {"format": {"type": "json_schema", "name": "stay", "schema": STAY, "strict": True}}},
        {"tools": FLAT_FUNCTIONS, "tool_choice": "required", "store": False},
        {"tools": FLAT_FUNCTIONS, "tool_choice": {"type": "function", "name": "weather"}, "parallel_tool_calls": False},
        {"tools": FLAT_FUNCTIONS},
    ),
}  # by page: what a body says besides


@dataclass(frozen=True, slots=True)
class Said:
    """An answer, put together. Arguments of calls as JSON where they are JSON."""

    text: str = ""
    thought: str = ""
    calls: tuple[tuple[str, Any], ...] = ()
    scores: tuple[float | None, ...] = ()  # log-probabilities of the prompt, where its text comes back with them
    is_bound: bool = field(default=True, compare=False)  # by a grammar; else a model may call what nobody offers


@dataclass(frozen=True, slots=True)
class FormedAsk(ClientRequest):
    form: int = 0  # of its page

    @classmethod
    def of(cls, ask: ClientRequest, random: Random) -> "FormedAsk":
        path = random.choice(list(FORMS))
        same = {field.name: getattr(ask, field.name) for field in fields(ClientRequest)}
        same |= {
            "path": path,
            "prompt": (),
            "text": ask.text or f"How long is stay {ask.number}?",
            "ignore_eos": False,
            "max_new": random.choice((12, MAX_NEW)),
            "scores": 0,
            "num_samples": 1,
        }
        return cls(**same, form=random.randrange(len(FORMS[path])))

    def params(self, sample: int) -> SamplingParams:
        """These two pages are asked greedily."""
        asked = self if self.path not in (MESSAGES, RESPONSES) else replace(self, sampling={})
        return ClientRequest.params(asked, sample)

    def body(self) -> dict[str, Any]:
        more = FORMS[self.path][self.form]
        if self.path == MESSAGES:
            messages = [*(LAST_TURNS if self.number % 2 else ()), {"role": "user", "content": self.text}]
            rest = {"max_tokens": self.max_new, "stream": self.is_streamed, "rid": self.rid, "temperature": 0}
            return {"messages": messages, **rest, **more}
        if self.path == RESPONSES:
            asked = [{"role": "user", "content": [{"type": "input_text", "text": self.text}]}]
            rest = {"max_output_tokens": self.max_new, "stream": self.is_streamed, "rid": self.rid, "temperature": 0}
            return {"input": asked, **rest, **more}
        body = ClientRequest.body(self)
        if self.path == GENERATE:
            return {**body, "sampling_params": {**body["sampling_params"], **more}}
        return {**body, **more}


class Forms:
    """What the servers of one cluster make of such requests, by their flags."""

    FLAGS: ClassVar = ("tool_call_parser", "reasoning_parser")

    def __init__(self, flags: dict[str, Any]) -> None:
        config = ServerConfig(model="tandem/mini", **{name: flags[name] for name in self.FLAGS if name in flags})
        self._tokenizer = Tokenizer(MODEL)
        self._form = ChatForm.of(config, self._tokenizer)

    def matters_for(self, ask: ClientRequest) -> bool:
        """Whether its answer is more, or other, than the text that the engine says."""
        return isinstance(ask, FormedAsk) or (ask.path == CHAT and self._form.reasoning != NONE)

    async def rights(self, ask: ClientRequest) -> tuple[Said, ...]:
        """What has to be said in each sample."""
        return tuple([await self._right(ask, sample) for sample in range(ask.num_samples)])

    async def _right(self, ask: ClientRequest, sample: int) -> Said:
        document = ask.body()
        match ask.path:
            case "/generate":
                sampling = msgspec.convert(document["sampling_params"], NativeSampling)
                grammar = await read_grammar(sampling, self._tokenizer, size=SMALL)
                return Said(self._spelled(ask, sample, ask.text, grammar))
            case "/v1/completions":
                if document.get("echo"):
                    return self._echoed(ask, sample, is_all=document["max_tokens"] == 0)
                grammar = await read_grammar(msgspec.convert(document, CompletionBody), self._tokenizer, size=SMALL)
                return Said(self._spelled(ask, sample, ask.text, grammar))
            case "/v1/messages":
                body = chat_of(msgspec.convert(document, MessagesBody))
            case "/v1/responses":
                body = chat_of_items(msgspec.convert(document, ResponsesBody))
            case _:
                body = msgspec.convert(document, ChatBody)
        form = self._form.answer_to(body)
        prompt = chat_text(body, self._tokenizer, 0, form.offered).text
        grammar = await form.read_grammar(body, self._tokenizer, prompt, SMALL)
        splitter = form.splitter(prompt, "")
        text = self._spelled(ask, sample, prompt, grammar, is_chat=True)
        return replace(put_together([*splitter.feed(text), *splitter.finish()]), is_bound=bool(grammar))

    def _echoed(self, ask: ClientRequest, sample: int, *, is_all: bool) -> Said:
        scores = ask.answers.of_prompt(self._tokenizer.encode(ask.text))
        return Said(ask.text + ("" if is_all else self._spelled(ask, sample, ask.text, "")), scores=(None, *scores))

    def _spelled(self, ask: ClientRequest, sample: int, prompt: str, grammar: str, *, is_chat: bool = False) -> str:
        ids = self._tokenizer.encode(prompt, add_special_tokens=not is_chat)
        scored = ask.answers(ids, ask.max_new, structs.replace(ask.params(sample), grammar=grammar))
        return text_behind(ids, [token for token, _ in scored])


def check_form(answer: Answer, rights: Sequence[Said]) -> None:
    """Raises Violation."""
    ask = answer.ask
    dialects = {CHAT: said_in_chat, MESSAGES: said_in_blocks, RESPONSES: said_in_items}
    said = dialects.get(ask.path, said_in_text)(answer)
    what = f"{ask.path} {ask.rid} {ask.body()}"
    if said != [*rights]:
        raise Violation("S14", f"{what}: {said!r}, not {[*rights]!r}")
    for name, arguments in chain.from_iterable(right.calls for right in rights if right.is_bound):
        if isinstance(arguments, dict) and not is_in_order(name, arguments):
            raise Violation("S14", f"{what}: a call of {name} with {arguments}, against its schema")


def is_in_order(name: str, arguments: dict[str, Any]) -> bool:
    if not arguments or "invalid_json" in arguments:  # it was cut off
        return True
    return name == "weather" and arguments.get("city") in PLACES and arguments.get("days") in range(100)


# one dialect each


def put_together(pieces: list[Piece]) -> Said:
    text, thought = "", ""
    calls: list[list[str]] = []
    for piece in pieces:
        match piece:
            case Text(more):
                text += more
            case Reasoning(more):
                thought += more
            case CallStart(_, name):
                calls.append([name, ""])
            case CallArguments(index, more):
                calls[index][1] += more
    return Said(text, thought, tuple((name, arguments_of(arguments)) for name, arguments in calls))


def said_in_text(answer: Answer) -> list[Said]:
    events = answer.events()
    if answer.ask.path == GENERATE:
        return [Said(events[-1]["text"])]
    choices = [choice for event in events for choice in event["choices"]]
    text = "".join(choice["text"] for choice in choices)
    if not answer.ask.body().get("echo"):
        return [Said(text)]
    scores = [score for choice in choices if choice["logprobs"] for score in choice["logprobs"]["token_logprobs"]]
    return [Said(text, scores=tuple(scores[: len(tokenizer().encode(answer.ask.text))]))]


def said_in_chat(answer: Answer) -> list[Said]:
    pieces: list[list[Piece]] = [[] for _ in range(answer.ask.num_samples)]
    for event in answer.events():
        for choice in event["choices"]:
            pieces[choice["index"]] += pieces_of(choice["delta"] if "delta" in choice else choice["message"])
    return [put_together(sample) for sample in pieces]


def pieces_of(message: dict[str, Any]) -> Iterator[Piece]:
    if thought := message.get("reasoning_content"):
        yield Reasoning(thought)
    if text := message.get("content"):
        yield Text(text)
    for place, call in enumerate(message.get("tool_calls") or ()):
        index = call.get("index", place)
        if name := call["function"].get("name"):
            yield CallStart(index, name)
        if arguments := call["function"].get("arguments"):
            yield CallArguments(index, arguments)


def said_in_blocks(answer: Answer) -> list[Said]:
    if not answer.ask.is_streamed:
        (message,) = answer.events()
        said = Said(
            "".join(block["text"] for block in message["content"] if block["type"] == "text"),
            "".join(block["thinking"] for block in message["content"] if block["type"] == "thinking"),
            tuple((block["name"], block["input"]) for block in message["content"] if block["type"] == "tool_use"),
        )
        return [said]
    pieces: list[Piece] = []
    num_calls = 0
    for event in answer.events():
        match event:
            case {"type": "content_block_start", "content_block": {"type": "tool_use", "name": str(name)}}:
                pieces.append(CallStart(num_calls, name))
                num_calls += 1
            case {"type": "content_block_delta", "delta": {"type": "text_delta", "text": str(text)}}:
                pieces.append(Text(text))
            case {"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": str(text)}}:
                pieces.append(Reasoning(text))
            case {"type": "content_block_delta", "delta": {"partial_json": str(text)}}:
                pieces.append(CallArguments(num_calls - 1, text))
            case _:
                pass
    return [put_together(pieces)]


def said_in_items(answer: Answer) -> list[Said]:
    """Of a stream by its deltas, which the last event has to repeat."""
    *events, last = answer.events()
    if not answer.ask.is_streamed:
        return [said_in_output(last["output"])]
    pieces: list[Piece] = []
    num_calls = 0
    for event in events:
        match event:
            case {"type": "response.output_item.added", "item": {"type": "function_call", "name": str(name)}}:
                pieces.append(CallStart(num_calls, name))
                num_calls += 1
            case {"type": "response.output_text.delta", "delta": str(text)}:
                pieces.append(Text(text))
            case {"type": "response.reasoning_text.delta", "delta": str(text)}:
                pieces.append(Reasoning(text))
            case {"type": "response.function_call_arguments.delta", "delta": str(text)}:
                pieces.append(CallArguments(num_calls - 1, text))
            case _:
                pass
    said = put_together(pieces)
    repeated = said_in_output(last["response"]["output"])
    return [said] if repeated == said else [said, repeated]


def said_in_output(items: list[dict[str, Any]]) -> Said:
    parts = [part for item in items if item["type"] != "function_call" for part in item["content"]]
    calls = [(item["name"], item["arguments"]) for item in items if item["type"] == "function_call"]
    return Said(
        "".join(part["text"] for part in parts if part["type"] == "output_text"),
        "".join(part["text"] for part in parts if part["type"] == "reasoning_text"),
        tuple((name, arguments_of(arguments)) for name, arguments in calls),
    )
