"""Every story in this folder still happens as it is written down, word for word.

Together they abort a request in every state of every role: what a node held is shown before (`look`), and after it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from core_scenes import SCENES
from tandem.simulator.scenario.play import DIVIDER, BadScript, Scenario, play

STORIES = sorted(Path(__file__).parent.glob("*.txt"))
KNOWS_A_PEER = re.compile(r"READY of|offered to| arriving:")  # in a look at a node: somebody waits for its word


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


# --- aborts ----------------------------------------------------------------------------------------------------------


@dataclass
class Aborted:
    """An abort as its story tells it: the request's line in the looks at its node before and after."""

    story: str
    role: str
    before: str
    after: str  # empty: not held any more
    tells: bool  # somebody, in the step of the abort

    @property
    def state(self) -> str:
        return self.before.partition(":")[0].split()[-1]

    def __str__(self) -> str:
        return f"{self.story}-{self.role}-{self.state}"


def steps(trace: str) -> list[list[str]]:
    """Each begins with its time and node."""
    found: list[list[str]] = []
    for line in trace.strip().splitlines():
        if not line.startswith(" "):
            found.append([line])
        else:
            found[-1].append(line)
    return found


def looks(told: list[list[str]], node: str) -> list[list[str]]:
    return [step for step in told if step[0].split()[1:] == [node, "holds"]]


def held(step: list[str], request: str) -> str:
    return next((line.strip() for line in step[1:] if line.startswith(f"    = request {request} ")), "")


def aborts(path: Path) -> Iterator[Aborted]:
    script, _, trace = path.read_text().partition(DIVIDER)
    roles = dict(re.findall(r"^node (\S+) (\w+)", script, re.MULTILINE))
    told = steps(trace)
    for index, step in enumerate(told):
        node = step[0].split()[1]
        for request in re.findall(r"< request (\d+) abort", "\n".join(step)):
            before, after = looks(told[:index], node), looks(told[index:], node)
            assert before, f"{path.stem}: no look at {node} before the abort"
            assert after, f"{path.stem}: no look at {node} after the abort"
            role = roles[node.rpartition(".")[0]]
            tells = any(line.startswith("    > tell ") for line in step)
            yield Aborted(path.stem, role, held(before[-1], request), held(after[0], request), tells)


ABORTS = [aborted for path in STORIES if path.stem.startswith("abort") for aborted in aborts(path)]


def test_every_state_of_every_role_has_a_story_with_an_abort() -> None:
    assert {(role, str(state)) for role, state, _ in SCENES} <= {(told.role, told.state) for told in ABORTS}


@pytest.mark.parametrize("told", ABORTS, ids=str)
def test_after_an_abort_a_node_holds_nothing_but_what_is_being_drained(told: Aborted) -> None:
    assert told.before, "the story shows what it held"
    if told.after:
        assert re.search(r" draining: \d+ pages? in quarantine", told.after), told.after
        assert "row" not in told.after
        assert "a slot" not in told.after


@pytest.mark.parametrize("told", [told for told in ABORTS if KNOWS_A_PEER.search(told.before)], ids=str)
def test_a_peer_that_waits_hears_of_the_abort_in_the_same_step(told: Aborted) -> None:
    assert told.tells
