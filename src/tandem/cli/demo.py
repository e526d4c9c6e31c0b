"""`tandem demo`: one prompt through router, prefill and decode as separate processes, and through one engine alone.

Shows the answer as it comes, where the prompt's KV came from, how much of it moved, where the time to the first token
went, and whether the one engine gave the same tokens.
"""

import argparse
import http.client
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any  # JSON documents

from tandem.cli.failure import CommandFailed
from tandem.cli.fleet import Member, serve_words, start_pd, temporary_fleet
from tandem.cli.ports import free_ports
from tandem.server.keys import authorization, key_text

MODEL = "tandem/mini"
PROMPT = (  # of a kind that the bundled model has learned, and answers rightly
    "A ferry carries 245 people. At the first stop 38 get off and 17 get on. At the next stop 56 get off. "
    "How many people are on the ferry now?"
)
MAX_NEW_TOKENS = 160
READY_S = 60.0  # of the bundled model
ANSWER_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", metavar="TEXT", default=PROMPT, help="what to ask (default: a word problem)")
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")


@dataclass(slots=True)
class TimedAnswer:
    """What one server said. Times in milliseconds."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)
    ttft_ms: float = 0.0  # at this client's socket


def run(args: argparse.Namespace) -> int:
    screen = Screen(is_quiet=args.json)
    document = _run(args.prompt, screen)
    if args.json:
        print(json.dumps(document))
    return 0 if document["identical"] else 1


class Screen:
    """Where the human reads along; silent with --json."""

    def __init__(self, *, is_quiet: bool) -> None:
        self._is_quiet = is_quiet

    def say(self, text: str = "", *, end: str = "\n") -> None:
        if not self._is_quiet:
            print(text, end=end, flush=True)


def _run(prompt: str, screen: Screen) -> dict[str, Any]:
    screen.say("starting router, prefill, decode and one unified engine, as separate processes ...")
    router_port, unified_port = free_ports(2)
    with temporary_fleet("demo", engines=3) as fleet:
        router = start_pd(fleet, MODEL, prefills=1, decodes=1, router_port=router_port)
        unified = fleet.start("unified", serve_words(MODEL, unified_port), port=unified_port)
        fleet.wait_ready(timeout_s=READY_S, tell=lambda member: screen.say(f"  {member.name:<10} {member.url}"))
        return compare(router, unified, prompt, screen)


def compare(router: Member, unified: Member, prompt: str, screen: Screen) -> dict[str, Any]:
    """The document of `--json`; the screen shows it as it comes about."""
    body = chat_prompt(unified, prompt)
    screen.say(f"\n{prompt}\n")
    first = ask(router, body, screen)
    screen.say()
    second = ask(unified, body, Screen(is_quiet=True))
    document = report(first, second)
    screen.say("\n" + page(document))
    return document


def chat_prompt(server: Member, prompt: str) -> list[int]:
    """The token ids of the conversation: both ways get exactly the same."""
    reply = post(server, "/tokenize", {"messages": [{"role": "user", "content": prompt}]})
    tokens: list[int] = json.loads(reply.read())["tokens"]
    return tokens


def ask(server: Member, tokens: list[int], screen: Screen) -> TimedAnswer:
    """Stream one greedy answer. Raises CommandFailed."""
    began = time.monotonic()
    answer = TimedAnswer()
    body = {
        "input_ids": tokens,
        "stream": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": MAX_NEW_TOKENS},
    }
    for event in generated(server, body):
        if not answer.tokens:
            answer.ttft_ms = (time.monotonic() - began) * 1000
        if "error" in event:
            raise CommandFailed(f"{server.name}: {event['error'].get('message', event['error'])}")
        screen.say(event["text"][len(answer.text) :], end="")
        answer.text, answer.tokens, answer.meta = event["text"], event["output_ids"], event["meta_info"]
    screen.say()
    if "path" not in answer.meta:
        raise CommandFailed(f"{server.name}: the stream broke off")
    return answer


def post(server: Member, path: str, body: dict[str, Any]) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=ANSWER_S)
    try:
        # Where the environment holds keys, the servers have them too.
        key = authorization(key_text("--api-key", None, None, os.environ))
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", **key})
        reply = connection.getresponse()
        if reply.status != 200:
            raise CommandFailed(
                f"{server.name}: {path} answered {reply.status}: {reply.read(500).decode(errors='replace')}"
            )
    except (OSError, http.client.HTTPException) as error:
        raise CommandFailed(f"{server.name} does not answer: {error}") from error
    return reply


def generated(server: Member, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of an answer. Raises CommandFailed, also where the server goes away in the middle of it."""
    reply = post(server, "/generate", body)
    try:
        yield from events(reply)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise CommandFailed(
            f"{server.name} does not answer to the end: {str(error) or type(error).__name__}"
        ) from error


def events(reply: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The documents of a server-sent event stream."""
    for line in reply:
        data = line.strip().removeprefix(b"data: ")
        if data and data != b"[DONE]":
            yield json.loads(data)


def report(first: TimedAnswer, second: TimedAnswer) -> dict[str, Any]:
    return {
        "path": first.meta["path"],
        "kv_bytes": first.meta["kv_bytes"],
        "tokens": first.tokens,
        "unified_tokens": second.tokens,
        "identical": first.tokens == second.tokens,
        "ttft_ms": round(first.ttft_ms, 3),
        "ttft_ledger": {stage: round(seconds * 1000, 3) for stage, seconds in first.meta["ttft_ledger"].items()},
    }


def page(document: dict[str, Any]) -> str:
    """The same for a human."""
    ledger = dict(document["ttft_ledger"])
    ledger["router and network"] = document["ttft_ms"] - sum(ledger.values())
    width = max(map(len, ledger))
    kv = f"{document['kv_bytes'] / 1024:.0f} KiB of KV moved from prefill to decode"
    lines = [f"path     {document['path']}: {kv}", f"ttft     {document['ttft_ms']:.1f} ms at the client:"]
    lines += [f"         {stage:<{width}}  {ms:7.2f} ms" for stage, ms in ledger.items()]
    verdict = f"the same {len(document['tokens'])} tokens" if document["identical"] else "DIFFERENT tokens"
    lines.append(f"unified  one engine alone gives {verdict}")
    return "\n".join(lines)
