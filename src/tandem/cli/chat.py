"""`tandem chat`: talk to a server from the terminal.

On a terminal this is `chat_terminal.py`. With piped input every line is a question, and nothing but the answers is
printed.
"""

import argparse
import sys

import httpx

from tandem.cli.client import add_server_arguments, client_options, served_model
from tandem.cli.conversation import Conversation
from tandem.cli.flags import count, finite
from tandem.cli.plain_text import PlainText


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Chat with a server. Ctrl+C stops an answer and twice leaves; /help shows the commands."
    add_server_arguments(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--max-tokens", type=count, default=512, metavar="N", help="longest answer (default: 512)")
    parser.add_argument("--temperature", type=finite, metavar="T", help="0: greedy (default: the server's)")
    parser.add_argument(
        "--history",
        metavar="FILE|off",
        help="keeps questions for the arrow keys (default: tandem/chat_history in this user's state directory)",
    )


def run(args: argparse.Namespace) -> int:
    model = served_model(args)
    with httpx.Client(**client_options(args)) as client:
        conversation = Conversation(client, args, model)
        if sys.stdin.isatty() and sys.stdout.isatty():
            # Why not at the top: a pipe need not wait for what only a terminal needs.
            from tandem.cli.chat_terminal import talk

            return talk(conversation, args)
        return answer_lines(conversation)


def answer_lines(conversation: Conversation) -> int:
    """A file gets what the model said, a terminal what it may show. Ctrl+C leaves: nobody asks what comes next."""
    for line in sys.stdin:
        if question := line.strip():
            shown = PlainText().feed if sys.stdout.isatty() else str
            reply = conversation.ask(question, lambda piece, shown=shown: print(shown(piece), end="", flush=True))
            print(flush=True)
            if reply.was_stopped:
                raise KeyboardInterrupt
    return 0
