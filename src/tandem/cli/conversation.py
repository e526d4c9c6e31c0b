"""A conversation with a server: its messages, and one answer after the other as a stream."""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any  # messages as the API wants them

import httpx

from tandem.cli.client import ServerTrouble, StreamChunk, chunks_of, raise_for_status, trouble


@dataclass(slots=True)
class ReplyStats:
    """How an answer came. Times in seconds from the request on."""

    pieces: int = 0
    tokens: int | None = None  # as the server counted them; None: it did not say, or was not let finish
    first_s: float | None = None
    total_s: float = 0.0
    path: str = ""  # where its prompt was computed, of a Tandem server
    was_stopped: bool = False


class Conversation:
    """The messages so far. An answer that was stopped stays in as far as it came."""

    def __init__(self, client: httpx.Client, args: argparse.Namespace, model: str) -> None:
        self._client = client
        self._args = args
        self.model = model
        self.messages: list[dict[str, str]] = []
        self.set_system(args.system or "")

    @property
    def system(self) -> str:
        return self.messages[0]["content"] if self.messages and self.messages[0]["role"] == "system" else ""

    def set_system(self, text: str) -> None:
        """Empty: none."""
        rest = self.messages[1:] if self.system else self.messages
        self.messages = [{"role": "system", "content": text}, *rest] if text else rest

    def clear(self) -> None:
        """All but the system message."""
        self.messages = self.messages[:1] if self.system else []

    def ask(
        self, question: str, show: Callable[[str], None], show_thought: Callable[[str], None] = lambda piece: None
    ) -> ReplyStats:
        """Stream the answer into `show`, what the model thinks before it into `show_thought`.

        KeyboardInterrupt ends it early. Raises ServerTrouble; then the conversation is what it was.
        """
        self.messages.append({"role": "user", "content": question})
        reply, said, began = ReplyStats(), list[str](), time.monotonic()
        try:
            for chunk in self._chunks(reply):
                if chunk.usage is not None:
                    reply.tokens = chunk.usage.completion_tokens
                for choice in chunk.choices or []:
                    for piece, put in ((choice.thought, show_thought), (choice.piece, show)):
                        if piece:
                            reply.first_s = reply.first_s or time.monotonic() - began
                            reply.pieces += 1
                            put(piece)
                    said.append(choice.piece)
        except ServerTrouble:
            self.messages.pop()
            raise
        except KeyboardInterrupt:
            reply.was_stopped = True
        reply.total_s = time.monotonic() - began
        self.messages.append({"role": "assistant", "content": "".join(said)})
        return reply

    def _chunks(self, reply: ReplyStats) -> Iterator[StreamChunk]:
        body: dict[str, Any] = {"model": self.model, "messages": self.messages, "stream": True}
        body |= {"max_tokens": self._args.max_tokens, "stream_options": {"include_usage": True}}
        if self._args.temperature is not None:
            body["temperature"] = self._args.temperature
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if not response.is_success:
                    raise_for_status(response.status_code, response.read())
                reply.path = response.headers.get("x-tandem-path", "")
                yield from chunks_of(response.iter_lines())
        except httpx.HTTPError as error:
            raise trouble(error, self._args.url) from None
