"""One sample as a response: items of reasoning, text and calls, whole or as events in their order.

    response.created  response.in_progress
    for each item     response.output_item.added
      with parts      response.content_part.added  ..text.delta  ..text.done  response.content_part.done
      or a call       response.function_call_arguments.delta  ...done
                      response.output_item.done
    response.completed, .incomplete or .failed

An answer that is not streamed is put together by the same code, whose events nobody reads.
"""

import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any  # JSON

import msgspec

from tandem.server.api.chat_form import AnswerForm, AnswerSplitter
from tandem.server.api.errors import Failure
from tandem.server.api.responses import SEALED_THOUGHTS, ResponsesBody, names_by_full_name, sealed
from tandem.server.api.resume import made_name
from tandem.server.api.sample import Sample
from tandem.server.api.stream import Reply
from tandem.server.api.tool_parsers.base import CallArguments, CallStart, Piece, Reasoning, Text

encode = msgspec.json.Encoder().encode
MESSAGE: dict[str, Any] = {"type": "message", "role": "assistant", "content": []}
REASONING: dict[str, Any] = {"type": "reasoning", "summary": [], "content": []}
CALL: dict[str, Any] = {"type": "function_call"}
PREFIXES: dict[type[Piece], str] = {Text: "msg", Reasoning: "rs", CallArguments: "fc"}
Keep = Callable[[bytes], None]


@dataclass(slots=True)
class OpenItem:
    """The item that is being written. `kind` is of the pieces that go on with it; a call's are its arguments."""

    kind: type[Piece]
    item: dict[str, Any]
    texts: list[str] = field(default_factory=list[str])


class ResponsesReply(Reply):
    """keep: whoever wants the document of a response that has ended well, before the client has its last byte."""

    def __init__(
        self, body: ResponsesBody, *, model: str, nonce: str, made_at: int, form: AnswerForm, keep: Keep | None
    ) -> None:
        self.shows_prompts = True  # instructions and tools come back
        self._nonce = nonce
        self._id = "resp_" + made_name(nonce, "response")
        self._created_at = made_at
        self._body, self._model, self._form, self._keep = body, model, form, keep
        self._names = names_by_full_name(body.tools or ())
        self._splitter: AnswerSplitter | None = None
        self._items: list[dict[str, Any]] = []
        self._open: OpenItem | None = None
        self._num_events = 0

    def begin(self, sample: Sample) -> bytes:
        response = self._document("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def delta(self, sample: Sample, text: str, start: int) -> bytes:
        return b"".join(map(self._piece, self._split(sample).feed(text)))

    def end(self, sample: Sample, text: str, start: int) -> bytes:
        said, document = self._ended(sample, text)
        kind = b"response." + document["status"].encode()
        raw = self._kept(document)
        # Written as it is kept: the document is encoded once.
        head = encode({"type": kind.decode(), "sequence_number": self._num_events})
        return said + b"event: " + kind + b"\ndata: " + head[:-1] + b',"response":' + raw + b"}\n\n"

    def failed(self, failure: Failure) -> bytes:
        if not self._num_events:
            return b""
        error = {"code": "server_error", "message": failure.message}
        said = self._close_item("incomplete")
        return said + self._event("response.failed", response=self._document("failed") | {"error": error})

    def whole(self, samples: Sequence[Sample]) -> bytes:
        (sample,) = samples
        _, document = self._ended(sample, "".join(sample.parts))
        return self._kept(document)

    def _kept(self, document: dict[str, Any]) -> bytes:
        raw = encode(document)
        if self._keep is not None:
            self._keep(raw)
        return raw

    def _ended(self, sample: Sample, text: str) -> tuple[bytes, dict[str, Any]]:
        """(events of the last text, the document of what is complete now)"""
        splitter = self._split(sample)
        said = b"".join(map(self._piece, [*splitter.feed(text), *splitter.finish()]))
        status = "completed" if sample.finish_reason == "stop" else "incomplete"
        said += self._close_item(status)
        document = self._document(status) | {"usage": usage_of(sample)}
        if status == "incomplete":
            return said, document | {"incomplete_details": {"reason": "max_output_tokens"}}
        return said, document | {"completed_at": int(time.time())}

    def _split(self, sample: Sample) -> AnswerSplitter:
        if self._splitter is None:
            self._splitter = self._form.splitter(sample.ask.prompt.text or "", self._nonce)
        return self._splitter

    def _document(self, status: str) -> dict[str, Any]:
        """What the request asked for, as it was understood, and what there is of the answer."""
        body = self._body
        reasoning, text = body.reasoning, body.text
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_at,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "frequency_penalty": body.frequency_penalty or 0.0,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": self._items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "presence_penalty": body.presence_penalty or 0.0,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {
                "effort": None if reasoning is None else reasoning.effort,
                "summary": None if reasoning is None else reasoning.summary,
            },
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": body.kept_items is not None and body.store is not False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": whole_format(None if text is None else text.format)},
            "tool_choice": body.tool_choice or "auto",
            "tools": [whole_tool(tool) for tool in body.tools or ()],
            "top_logprobs": 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = encode({"type": kind, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

    # items

    def _piece(self, piece: Piece) -> bytes:
        match piece:
            case Text(text):
                return self._opened(Text, MESSAGE) + self._more("response.output_text.delta", text)
            case Reasoning(text):
                return self._opened(Reasoning, REASONING) + self._more("response.reasoning_text.delta", text)
            case CallStart(index, name):
                assert self._splitter is not None
                names = self._names.get(name, {"name": name})
                call = {**CALL, "call_id": self._splitter.id_of(index), **names, "arguments": ""}
                return self._close_item("completed") + self._opened(CallArguments, call)
            case CallArguments(_, text):
                return self._more("response.function_call_arguments.delta", text)

    def _opened(self, kind: type[Piece], made: dict[str, Any]) -> bytes:
        """The begin of an item, unless the last one goes on."""
        if self._open is not None and self._open.kind is kind:
            return b""
        said = self._close_item("completed")
        name = f"{PREFIXES[kind]}_{made_name(self._nonce, 'item', len(self._items))}"
        self._open = OpenItem(kind, {"type": made["type"], "id": name, "status": "in_progress"} | deepcopy(made))
        self._items.append(self._open.item)
        said += self._event("response.output_item.added", output_index=len(self._items) - 1, item=self._open.item)
        if kind is CallArguments:
            return said
        return said + self._event("response.content_part.added", **self._place(), part=part_of(kind, ""))

    def _place(self) -> dict[str, Any]:
        """Where the open item is, and its part if it has one."""
        assert self._open is not None
        place = {"item_id": self._open.item["id"], "output_index": len(self._items) - 1}
        return place if self._open.kind is CallArguments else place | {"content_index": 0}

    def _more(self, event: str, text: str) -> bytes:
        assert self._open is not None
        self._open.texts.append(text)
        scores: dict[str, Any] = {"logprobs": []} if self._open.kind is Text else {}
        return self._event(event, **self._place(), delta=text, **scores)

    def _close_item(self, status: str) -> bytes:
        if self._open is None:
            return b""
        kind, item, text = self._open.kind, self._open.item, "".join(self._open.texts)
        item["status"] = status
        if kind is CallArguments:
            item["arguments"] = text
            place = self._place()
            said = self._event("response.function_call_arguments.done", **place, name=item["name"], arguments=text)
        else:
            part = part_of(kind, text)
            item["content"] = [part]
            if kind is Reasoning and SEALED_THOUGHTS in (self._body.include or ()):
                item["encrypted_content"] = sealed(text)
            done, scores = ("output_text", {"logprobs": []}) if kind is Text else ("reasoning_text", {})
            said = self._event(f"response.{done}.done", **self._place(), text=text, **scores)
            said += self._event("response.content_part.done", **self._place(), part=part)
        self._open = None
        return said + self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)


def whole_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """With what OpenAI's clients want of a function to be there."""
    if tool["type"] == "namespace":
        return tool
    return {"description": None, "parameters": None, "strict": False} | tool


def whole_format(given: dict[str, Any] | None) -> dict[str, Any]:
    """The same of what the answer has to follow."""
    if given is None or given["type"] != "json_schema":
        return given or {"type": "text"}
    return {"description": None, "strict": False} | given


def part_of(kind: type[Piece], text: str) -> dict[str, Any]:
    if kind is Text:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": text}


def usage_of(sample: Sample) -> dict[str, Any]:
    num_input, num_output = len(sample.ask.prompt.tokens), sample.text.num_tokens
    return {
        "input_tokens": num_input,
        "input_tokens_details": {"cached_tokens": sample.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": sample.text.num_thought_tokens},
        "total_tokens": num_input + num_output,
    }
