"""`tandem chat`: talk to a server from the terminal.

Ctrl+C stops an answer, Ctrl+D ends the conversation. With piped input every line is a question, and nothing but the
answers is printed.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any  # messages as the API wants them

import httpx

from tandem.cli.api import (
    ServerTrouble,
    add_server_arguments,
    chunks_of,
    client_options,
    find_model,
    raise_for_status,
    trouble,
)
from tandem.cli.flags import count, finite

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Chat with a server. Ctrl+C stops an answer, Ctrl+D quits."
    add_server_arguments(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--max-tokens", type=count, default=512, metavar="N", help="longest answer (default: 512)")
    parser.add_argument("--temperature", type=finite, metavar="T", help="0: greedy (default: the server's)")


def run(args: argparse.Namespace) -> int:
    model = find_model(args)
    with httpx.Client(**client_options(args)) as client:
        conversation = Conversation(client, args, model)
        if sys.stdin.isatty() and sys.stdout.isatty():
            return talk(conversation, args.url)
        return answer_lines(conversation)


class Conversation:
    """The messages so far. An answer that was stopped stays in as far as it came."""

    def __init__(self, client: httpx.Client, args: argparse.Namespace, model: str) -> None:
        self._client = client
        self._args = args
        self.model = model
        self._messages: list[dict[str, str]] = [{"role": "system", "content": args.system}] if args.system else []
        self.path = ""  # of the last answer: where its prompt was computed

    def ask(self, question: str, show: Callable[[str], None]) -> int:
        """Stream the answer into `show`. Returns the number of pieces; KeyboardInterrupt ends it early."""
        self._messages.append({"role": "user", "content": question})
        pieces: list[str] = []
        try:
            for piece in self._pieces():
                pieces.append(piece)
                show(piece)
        except ServerTrouble:
            self._messages.pop()
            raise
        except KeyboardInterrupt:
            pass
        self._messages.append({"role": "assistant", "content": "".join(pieces)})
        return len(pieces)

    def _pieces(self) -> Iterator[str]:
        body: dict[str, Any] = {"model": self.model, "messages": self._messages, "stream": True}
        body["max_tokens"] = self._args.max_tokens
        if self._args.temperature is not None:
            body["temperature"] = self._args.temperature
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if not response.is_success:
                    raise_for_status(response.status_code, response.read())
                self.path = response.headers.get("x-tandem-path", "")
                for chunk in chunks_of(response.iter_lines()):
                    for choice in chunk.choices or []:
                        if choice.piece:
                            yield choice.piece
        except httpx.HTTPError as error:
            raise trouble(error, self._args.url) from None


def talk(conversation: Conversation, url: str) -> int:
    print(f"{DIM}{conversation.model} at {url}. Ctrl+C stops an answer, Ctrl+D quits.{PLAIN}")
    while True:
        try:
            question = input("> ").strip()
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print()
            continue
        if not question:
            continue
        began = time.monotonic()
        try:
            pieces = conversation.ask(question, lambda piece: print(piece, end="", flush=True))
        except ServerTrouble as error:
            print(f"\n{error}", file=sys.stderr)
            continue
        path = f"{conversation.path}, " if conversation.path else ""
        print(f"\n{DIM}[{path}{pieces} pieces, {time.monotonic() - began:.1f} s]{PLAIN}")


def answer_lines(conversation: Conversation) -> int:
    for line in sys.stdin:
        if question := line.strip():
            conversation.ask(question, lambda piece: print(piece, end="", flush=True))
            print(flush=True)
    return 0
