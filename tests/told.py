"""What tests tell whoever runs the suite, such as what they have counted: at its end, in whichever process they ran.

def test_it(tell: Tell) -> None:
    tell("12 of 12")
"""

from collections.abc import Callable

import pytest

SAID = "said"  # the property of a report
Tell = Callable[[str], None]  # lines


class WhatTestsTell:
    def __init__(self) -> None:
        self.texts: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.texts += [str(text) for name, text in report.user_properties if name == SAID]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.texts:
            terminalreporter.section("what tests tell", sep="-")
        for text in self.texts:
            terminalreporter.write_line(text)
