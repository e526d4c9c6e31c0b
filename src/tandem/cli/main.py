"""`tandem COMMAND ...`: finds the command, reads its flags, runs it, and turns failures into one line.

Exit codes: 0 ok, 1 failure with a one-line cause on stderr, 2 wrong usage. Each command is a module with
`add_arguments(parser)` and `run(args) -> int`; only the one that is asked for is imported.
"""

import argparse
import contextlib
import difflib
import importlib
import os
import select
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NoReturn  # what argparse takes for a file is told to type checkers only

import tandem
from tandem.cli.failure import WRONG_USAGE, CommandFailed
from tandem.garbage import no_collector
from tandem.log_stream import log_stream
from tandem.logtext import MAX_LINE_CHARS, visible

COMMANDS = {
    "demo": "one prompt through prefill and decode workers, compared with one engine",
    "serve": "run one server: unified, prefill or decode",
    "up": "run router, prefill and decode servers together",
    "router": "run the router in front of prefill and decode servers",
    "chat": "talk to a server",
    "doctor": "look at this machine and have a pair answer on it",
    "top": "a live table of a server, or of a router and its servers",
    "eval": "measure the accuracy of a server",
    "bench": "measure the speed of a server",
    "simulate": "run the deterministic simulation with faults",
    "replay": "decide a flight record again and compare",
}

FLAGS_IN_USAGE = 16
LAST_WORD_S = 1.0


class Parser(argparse.ArgumentParser):
    """Wrong usage is one line: for each flag that is not known its name here, why there is none, or the nearest."""

    synonyms: Mapping[str, str] = MappingProxyType({})  # a flag elsewhere -> a flag of ours, or a sentence

    def error(self, message: str) -> NoReturn:
        if message.endswith("expected one argument"):
            message += " (one that begins with - is written behind =, as --flag=-x)"
        print(f"tandem: error: {message}; see `{self.prog} --help`", file=sys.stderr)
        sys.exit(WRONG_USAGE)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        args, unknown = self.parse_known_args(argv)
        if unknown:
            flags = [word for word in unknown if word.startswith("-") and not _is_number(word)]
            names = dict.fromkeys(word.partition("=")[0] for word in flags) or unknown[:1]
            self.error("; ".join(f"unknown argument {name}{self._hint(name)}" for name in names))
        return args

    def format_help(self) -> str:
        """Without the flags in the first line where there are too many to read."""
        if len(self._actions) > FLAGS_IN_USAGE:
            words = [str(action.metavar) for action in self._actions if not action.option_strings]
            self.usage = " ".join([self.prog, *words, "[flags]"])
        return super().format_help()

    def print_help(self, file: Any = None) -> None:
        """argparse's says nothing where the text cannot be written."""
        print(self.format_help(), end="", file=file)

    def action_of(self, word: str) -> argparse.Action | None:
        """Whose flag this is, with a value behind = or without; None: it is no flag."""
        return self._option_string_actions.get(word.partition("=")[0])

    def names(self) -> list[str]:
        """Of all flags."""
        return list(self._option_string_actions)

    def _hint(self, argument: str) -> str:
        if not argument.startswith("-"):
            return ""
        if (found := self.synonyms.get(argument)) is not None:
            return f": here it is {found}" if found.startswith("-") else f": {found}"
        return hint(argument, self.names())


def _is_number(word: str) -> bool:
    with contextlib.suppress(ValueError):
        float(word)
        return True
    return False


def hint(word: str, known: Sequence[str]) -> str:
    nearest = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = ["usage: tandem COMMAND ...", "", "commands:"]
    lines += [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    lines += ["", "`tandem COMMAND --help` shows the flags of a command. `tandem demo` is a good start."]
    return "\n".join(lines)


def open_closed_streams() -> None:
    """Whoever starts us without a standard stream (`>&-`, some daemons) has it lead nowhere.

    Else the first socket gets its number, and the children write their log to that.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            os.set_inheritable(opened, True)
            setattr(sys, name, os.fdopen(opened, "w" if number else "r", encoding="utf-8", errors="replace"))


def main(argv: Sequence[str] | None = None) -> int:
    open_closed_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        return ended(partial(_say, usage()))
    if words[0] == "--version":
        return ended(partial(_say, f"tandem {tandem.__version__}"))
    command = words[0]
    if command not in COMMANDS:
        print(
            f"tandem: error: unknown command {command}{hint(command, list(COMMANDS))}; see `tandem --help`",
            file=sys.stderr,
        )
        return WRONG_USAGE
    if not __debug__:  # asserts end a replica before it answers wrongly, and are what a simulation finds
        print("tandem: error: python runs without asserts; unset PYTHONOPTIMIZE, or leave -O out", file=sys.stderr)
        return WRONG_USAGE
    return run_command(command, words[1:])


def _say(text: str) -> int:
    print(text)
    return 0


def run_command(command: str, words: Sequence[str]) -> int:
    return ended(partial(_run_command, command, words))


def _run_command(command: str, words: Sequence[str]) -> int:
    # Why not at the top: `tandem chat` need not wait for what `tandem serve` imports.
    with no_collector():
        module = importlib.import_module(f"tandem.cli.{command}")
    parser = Parser(prog=f"tandem {command}", description=COMMANDS[command], allow_abbrev=False)
    module.add_arguments(parser)
    code: int = module.run(parser.parse(words))
    return code


def ended(run: Callable[[], int]) -> int:
    """The exit code of `run`, or of what went wrong in it, with the line that says what."""
    try:
        try:
            code = run()
        except SystemExit:  # the help was shown
            sys.stdout.flush()
            raise
        sys.stdout.flush()  # here, where what goes wrong with it has a line and an exit code
        return code
    except CommandFailed as failure:
        line = visible(" ".join(str(failure).split()), most=MAX_LINE_CHARS)  # one line, whatever it quotes
        complain(f"error: {line}")
        return failure.exit_code
    except KeyboardInterrupt:
        complain("interrupted")
        return 1
    except UnicodeError as error:  # of a file, a pipe, an argument, or a terminal that cannot show it
        complain(f"error: text that cannot be read or written ({visible(str(error), most=MAX_LINE_CHARS)})")
        return 1
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left to print goes nowhere
        if isinstance(error, BrokenPipeError):
            return 0  # whoever read our output has enough
        complain(f"error: {visible(str(error), most=MAX_LINE_CHARS)}")
        return 1


def complain(text: str) -> None:
    """On stderr, if that takes it soon: whoever waits for us to end, to start us again, may not read it."""
    with contextlib.suppress(OSError):
        select.select([], [sys.stderr], [], LAST_WORD_S)
    log_stream(sys.stderr).write(f"tandem: {text}\n")


if __name__ == "__main__":
    # Not this copy, which is called `__main__`, but the one that commands import: it has the Parser that they know.
    sys.exit(importlib.import_module("tandem.cli.main").main())
