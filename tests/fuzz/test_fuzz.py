"""Every decoder under changed inputs: the corpus as it is, then a fixed amount of work, the same on every machine.

Longer, and with new inputs each time: `make fuzz`.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from breaks import BREAKS
from engine import Finding, Report, command_for
from targets import TARGETS

HERE = Path(__file__).parent
FINDINGS = HERE.parents[1] / "fuzz-findings"
HUNG_S = 300.0


def fuzz(*names: str) -> dict[str, Report]:
    """By target, of a run in a process of its own."""
    done = subprocess.run(
        [sys.executable, str(HERE), *names, "--json"],
        capture_output=True,
        text=True,
        timeout=HUNG_S,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr[-4000:]
    reports = [report_of(json.loads(line)) for line in done.stdout.splitlines()]
    return {report.target: report for report in reports}


def report_of(fields: dict[str, Any]) -> Report:
    return Report(**{**fields, "findings": [Finding(**found) for found in fields["findings"]]})


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, Report]:
    """By the targets of all tests that were asked for; two run at a time."""
    specs = [getattr(item, "callspec", None) for item in request.session.items if item.path == Path(__file__)]
    return fuzz(*(spec.params["name"] for spec in specs if spec is not None))


@pytest.mark.parametrize("name", list(TARGETS))
def test_every_input_gets_an_answer_that_is_documented(name: str, found: dict[str, Report]) -> None:
    report = found[name]
    assert report.findings == [], described(report.findings)
    assert 2 * report.seeds_answered <= report.seeds, "most of what it begins with is refused at once"


def test_the_corpus_is_the_same_each_time() -> None:
    """Or a run with the same seed would be another one."""
    for target in TARGETS.values():
        assert list(target.entries().items()) == list(target.entries().items()), target.name


def described(findings: Sequence[Finding]) -> str:
    """With the line that does it again."""
    lines = [f"{one.what}\n  {command_for(one.target, one.save(FINDINGS))}\n{one.detail}" for one in findings]
    return "\n".join(lines)


@pytest.mark.parametrize("name", list(BREAKS))
def test_a_guard_that_is_left_out_is_noticed_within_the_same_work(name: str, found: dict[str, Report]) -> None:
    assert any(BREAKS[name].says in finding.what for finding in found[name].findings), found[name]
