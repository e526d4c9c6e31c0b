"""Lines for what happens thousands of times: how often they come, and what they say."""

import logging

import pytest

from tandem.server.repeated_lines import RepeatedLine, RepeatedLines

logger = logging.getLogger("tandem.test")
FULL = "storage: OSError: No space left on device"


def test_a_line_says_once_a_second_how_often(caplog: pytest.LogCaptureFixture) -> None:
    times = iter([0.0, 0.2, 0.9, 1.1, 1.2, 5.0])
    line = RepeatedLine(logger, every_s=1.0, now=lambda: next(times))
    for _ in range(6):
        line.note("a thing happened")
    assert caplog.messages == ["a thing happened", "a thing happened (3 times)", "a thing happened (2 times)"]


def test_a_line_of_one_kind_hides_none_of_another_kind(caplog: pytest.LogCaptureFixture) -> None:
    lines = RepeatedLines(logger, every_s=1.0, now=lambda: 0.0)
    other = "storage: page 7 of host memory: it has another hash"
    for text in (FULL, other, other.replace("7", "12"), FULL):
        lines.note(text)
    assert caplog.messages == [FULL, other]
