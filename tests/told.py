"""What tests tell whoever runs the suite, such as what they have counted: at its end, in whichever process they ran.

    def test_it(tell: Tell) -> None:
        tell("12 of 12")

Their seeds are drawn here, before there are other processes, and told even where the suite is interrupted.
"""

import os
from collections.abc import Callable
from secrets import randbelow

import pytest

SAID = "said"  # the property of a report
Tell = Callable[[str], None]  # lines
SEEDS = ("HUNT_SEED", "CHAOS_SEED")  # environment variables, which processes that run tests inherit


def draw_seeds() -> None:
    """Those that are not given."""
    for name in SEEDS:
        os.environ[name] = os.environ.get(name) or str(randbelow(1 << 31))


class WhatTestsTell:
    def __init__(self) -> None:
        self.texts: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.texts += [str(text) for name, text in report.user_properties if name == SAID]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("what tests tell", sep="-")
        for text in (" ".join(f"{name}={os.environ[name]}" for name in SEEDS), *self.texts):
            terminalreporter.write_line(text)
