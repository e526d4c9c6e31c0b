"""What a worker says while a large model loads."""

import logging

import pytest

from tandem.engine.progress import EVERY_S, LoggedProgress


def test_progress_is_said_every_few_seconds_and_not_of_what_takes_less(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    time = 100.0
    progress = LoggedProgress("loading: tensors", 40, now=lambda: time)
    for done in range(20):
        progress.at(done)
    assert caplog.messages == []
    time += EVERY_S
    progress.at(20)
    progress.at(21)
    time += EVERY_S
    progress.at(41)
    assert caplog.messages == ["loading: tensors: 20 of 40", "loading: tensors: 40 of 40"]
