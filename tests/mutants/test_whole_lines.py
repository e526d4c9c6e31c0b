"""Whole clusters notice the seeded bugs of `whole_lines.py` and `group_lines.py`.

`make hunt` tries all that they have noticed, `make test` a sample.

Each runs in a process of its own, on a copy of the sources with that bug. With TANDEM_ALL_LINES=1 all are tried.
"""

import ast
import difflib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from group_lines import GROUP_BREAKS, GROUP_KILLED_BY
from lines import HUNG_S, PACKAGE, broken_copy, broken_text
from whole_lines import KILLED_BY, SURVIVORS, WHOLE_BREAKS, WholeBreak

MOST_LINES = 3
PATIENCE = 12  # seeds from the recorded one: a change of the product may move the moment at which a bug shows
ENOUGH = 50
SAMPLE = ("pull_calls_nobody", "scores_are_one_token_late", "other_workers_drop_their_revocation")
ALL_BREAKS, NOTICED_BY = (*WHOLE_BREAKS, *GROUP_BREAKS), KILLED_BY | GROUP_KILLED_BY
SCRIPT = """
import sys
from tandem.simulator.whole.world import run_seed
for seed in range(int(sys.argv[1]), int(sys.argv[1]) + int(sys.argv[2])):
    if found := run_seed(seed).invariant:
        print("noticed", seed, found)
        break
"""
IS_ALL = bool(os.environ.get("TANDEM_ALL_LINES"))
TRIED = [it for it in ALL_BREAKS if it.name in (NOTICED_BY if IS_ALL else SAMPLE)]


def test_every_break_is_a_few_lines_that_are_there() -> None:
    for it in ALL_BREAKS:
        before, after = (PACKAGE / it.file).read_text().splitlines(), broken_text(it).splitlines()
        ast.parse("\n".join(after))
        changed = [line for line in difflib.ndiff(before, after) if line.startswith(("+ ", "- "))]
        assert 0 < max(sum(line[0] == sign for line in changed) for sign in "+-") <= MOST_LINES, it.name
    assert len({it.name for it in ALL_BREAKS}) == len(ALL_BREAKS)
    assert set(SAMPLE) <= set(NOTICED_BY) <= {it.name for it in ALL_BREAKS}


def test_every_break_is_noticed_or_has_a_reason_why_not() -> None:
    assert set(KILLED_BY) | set(SURVIVORS) == {it.name for it in WHOLE_BREAKS}
    assert not set(KILLED_BY) & set(SURVIVORS)
    assert len(KILLED_BY) >= ENOUGH


@pytest.mark.parametrize("it", TRIED, ids=lambda it: it.name)
def test_a_whole_cluster_notices_the_break(it: WholeBreak, tmp_path: Path) -> None:
    done = noticed(tmp_path, NOTICED_BY[it.name], PATIENCE, broken_copy(it, tmp_path / "broken"))
    assert "noticed" in done.stdout, done.stderr[-2000:]


def test_the_seeds_of_the_sample_are_clean_without_a_break(tmp_path: Path) -> None:
    for seed in sorted({NOTICED_BY[it.name] for it in TRIED}):
        done = noticed(tmp_path, seed, 1, PACKAGE.parent)
        assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr[-2000:]


def noticed(folder: Path, seed: int, count: int, sources: Path) -> "subprocess.CompletedProcess[str]":
    """Raises TimeoutExpired when it hangs."""
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(seed), str(count)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(sources)},
        capture_output=True,
        text=True,
        timeout=HUNG_S,
        check=False,
    )
