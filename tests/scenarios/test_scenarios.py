"""Every story in this folder still happens as it is written down, word for word."""

from pathlib import Path

import pytest

from tandem.sim.scenario import DIVIDER, BadScript, Scenario, play

STORIES = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("path", STORIES, ids=[path.stem for path in STORIES])
def test_the_story_happens_as_it_is_written(path: Path, request: pytest.FixtureRequest) -> None:
    written = path.read_text()
    told = play(written)
    if request.config.getoption("--regenerate", default=False):
        path.write_text(told)
        return
    assert DIVIDER in written, "a script without a trace: run with --regenerate and review it"
    assert told == written


def test_a_line_that_is_no_command_is_named() -> None:
    with pytest.raises(BadScript, match="line 2: at 1ms prefill-0 dance"):
        Scenario().read("node prefill-0 prefill\nat 1ms prefill-0 dance\n")


def test_a_setting_that_does_not_exist_is_named() -> None:
    with pytest.raises(BadScript, match="no setting num_pagess"):
        Scenario().read("node prefill-0 prefill num_pagess=3\n")
