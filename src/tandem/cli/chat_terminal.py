"""`tandem chat` on a terminal: the line that is typed, the commands, what Ctrl+C means, and how fast an answer was.

prompt_toolkit edits the line, keeps the history and takes a paste of several lines as one. While an answer is printed
the terminal is the shell's own, so Ctrl+C is SIGINT there and a key in the prompt.
"""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from tandem.cli.client import ServerTrouble
from tandem.cli.conversation import Conversation, ReplyStats
from tandem.cli.main import hint
from tandem.cli.model_source import BUNDLED
from tandem.cli.plain_text import PlainText, plain

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
MAX_HISTORY_BYTES = 1 << 20
# Of the kinds that the bundled model has learned, which a test has it answer.
EXAMPLES = (
    "Tom has 3 apples and buys 4 more. How many?",
    "Emma brought 381 tickets to the fair, and Bella brought 90 fewer. How many tickets did they bring in all?",
    "Calculate 9 * 13 + 48. Answer as JSON.",
)
PATHS = {
    "remote": "its prompt was computed by a prefill server",
    "local": "its prompt was computed on the decode server, being short",
    "fallback": "its prompt was computed on the decode server, as the transfer failed",
    "unified": "one server did all of it",
}
HELP = """\
  /help           this list
  /clear          forget the conversation
  /system TEXT    tell the model who it is; without TEXT: show it; /system off: nobody
  /save [FILE]    write the conversation: .json as the API has it, else as text
  /exit           leave, as Ctrl+D does
  Enter sends, Alt+Enter begins a new line, a pasted text of several lines is one question.
  Arrow keys bring earlier questions back, Ctrl+R searches them.
  Ctrl+C stops an answer; twice leaves."""


def talk(conversation: Conversation, args: argparse.Namespace) -> int:
    return Terminal(conversation, args).run()


class Terminal:
    def __init__(self, conversation: Conversation, args: argparse.Namespace) -> None:
        self._conversation = conversation
        self._url: str = args.url
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda rest: _say(HELP),
            "/clear": self._clear,
            "/system": self._system,
            "/save": self._save,
            "/exit": lambda rest: None,  # asked for before it is looked up here
        }
        history, self._history_trouble = open_history(args.history)
        self._prompt: PromptSession[str] = PromptSession(
            history=history,
            multiline=True,
            key_bindings=keys(),
            prompt_continuation="  ",
            completer=WordCompleter(list(self._commands), sentence=True),
            complete_while_typing=Condition(lambda: self._prompt.default_buffer.text.startswith("/")),
            reserve_space_for_menu=len(self._commands),
        )

    def run(self) -> int:
        self._greet()
        may_leave = False  # the last that was pressed was Ctrl+C, and there is nothing that it could stop
        while True:
            try:
                text = self._prompt.prompt("> ").strip()
            except EOFError:
                return 0
            except KeyboardInterrupt:
                if may_leave:
                    return 0
                may_leave = True
                _say("Ctrl+C again leaves, and so does Ctrl+D")
                continue
            may_leave = False
            if text in ("/exit", "/quit"):
                return 0
            if text:
                # Between the prompt and the answer, and behind it, Ctrl+C has nothing to stop either.
                with contextlib.suppress(KeyboardInterrupt):
                    may_leave = True
                    may_leave = self._obey(text) if is_command(text) else self._answer(text)

    def _greet(self) -> None:
        _say(f"{plain(self._conversation.model)} at {self._url}. /help shows what can be typed, Ctrl+D leaves.")
        if self._history_trouble:
            _say(f"questions are forgotten at the end: {self._history_trouble}")
        if self._conversation.model == BUNDLED:
            _say("A very small model that has learned word problems, for example:")
            for example in EXAMPLES:
                print(f"  {example}")

    def _obey(self, text: str) -> bool:
        word, _, rest = text.partition(" ")
        command = self._commands.get(word)
        if command is None:
            _say(f"there is no {word}{hint(word, list(self._commands))}; /help shows what there is")
        else:
            command(rest.strip())
        return False

    def _answer(self, text: str) -> bool:
        """Whether it was stopped by Ctrl+C."""
        answer, thoughts = PlainText(), PlainText()
        try:
            reply = self._conversation.ask(
                text,
                lambda piece: _put(answer.feed(piece)),
                lambda piece: _put(f"{DIM}{thoughts.feed(piece)}{PLAIN}"),
            )
        except ServerTrouble as error:
            print(f"\n{plain(str(error))}", file=sys.stderr)
            return False
        print()
        _say(f"[{how_it_went(reply)}]")
        return reply.was_stopped

    def _clear(self, rest: str) -> None:
        self._conversation.clear()
        _say("forgotten")

    def _system(self, text: str) -> None:
        if text:
            self._conversation.set_system("" if text == "off" else text)
        _say(f"system message: {self._conversation.system or 'none'}")

    def _save(self, name: str) -> None:
        path = Path(name or f"tandem-chat-{datetime.now():%Y%m%d-%H%M%S}.md").expanduser()
        messages = self._conversation.messages
        document = json.dumps({"model": self._conversation.model, "messages": messages}, indent=1, ensure_ascii=False)
        text = "\n\n".join(f"**{message['role']}**: {plain(message['content'])}" for message in messages)
        try:
            with path.open("x", encoding="utf-8", errors="replace") as file:
                file.write((document if path.suffix == ".json" else text) + "\n")
        except OSError as error:
            _say(f"not saved: {path}: {error.strerror}")
        else:
            _say(f"saved {len(messages)} messages in {path}")


def is_command(text: str) -> bool:
    """`/etc/hosts: what is it?` is a question."""
    word = text.split(maxsplit=1)[0]
    return word.startswith("/") and word[1:].isalpha()


def how_it_went(reply: ReplyStats) -> str:
    """In words, for who waits for it."""
    if reply.first_s is None:
        return "stopped before it began; Ctrl+C again leaves" if reply.was_stopped else "an empty answer"
    tokens = reply.pieces if reply.tokens is None else reply.tokens
    about = "about " if reply.tokens is None else ""
    words = [f"first token after {reply.first_s:.2f} s"]
    if (seconds := reply.total_s - reply.first_s) > 0 and tokens > 1:
        words.append(f"then {about}{(tokens - 1) / seconds:.0f} tokens per second")
    words.append(f"{about}{tokens} token{'s' * (tokens != 1)} in all")
    if (place := PATHS.get(reply.path)) is not None:
        words.append(place)
    text = ", ".join(words)
    return f"stopped; {text}; Ctrl+C again leaves" if reply.was_stopped else text


def keys() -> KeyBindings:
    """Enter sends; a new line is Alt+Enter. Ctrl+C clears what is typed, and is the caller's where nothing is."""
    bindings = KeyBindings()

    @bindings.add("enter")
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @bindings.add("c-c")
    def clear(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    return bindings


def open_history(given: str | None) -> tuple[History, str]:
    """Questions are as private as a shell's history. With what kept them from being written, for the user."""
    if given == "off":
        return InMemoryHistory(), ""
    try:
        path = Path(given).expanduser() if given else default_history()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        if path.stat().st_size > MAX_HISTORY_BYTES:
            keep_newest_half(path)
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
        return InMemoryHistory(), str(error)
    return FileHistory(path), ""


def default_history() -> Path:
    state = os.environ.get("XDG_STATE_HOME", "")
    folder = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    return folder / "tandem" / "chat_history"


def keep_newest_half(path: Path) -> None:
    """From the first line of an entry on, which is a comment with its time. Raises OSError."""
    data = path.read_bytes()
    start = data.find(b"\n# ", len(data) // 2)
    new = path.with_name(f"{path.name}.{os.getpid()}")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data[start:] if start >= 0 else b"")
    new.replace(path)


def _put(text: str) -> None:
    print(text, end="", flush=True)


def _say(line: str) -> None:
    """A line of ours, to be told from the model's."""
    print(f"{DIM}{line}{PLAIN}")
