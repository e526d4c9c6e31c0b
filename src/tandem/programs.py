"""How this program starts others of its own."""

import os
import sys


def module_command(module: str, *words: str) -> list[str]:
    """Of python, for a module of ours.

    With `-P`, as the installed command has it: a file in the current folder that has the name of a module, as
    `random.py`, is not imported in its place, and nobody's code runs for lying where a server was started.
    """
    return [sys.executable, "-Pm", module, *words]


def working_folder() -> str | None:
    """For a program that computes. None: the current one, which a release that was replaced may have taken with it;
    MKL then does not find its own libraries, and ends the process."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return "/"
    return None
