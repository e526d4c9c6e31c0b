"""Whole clusters notice the seeded bugs of `whole_lines.py` and `group_lines.py`.

`make hunt` tries all that they have noticed, `make test` a sample.

Each runs in a process of its own, on a copy of the sources with that bug. With TANDEM_ALL_LINES=1 all are tried.
What few drawn worlds show has a world of its own (`directed.py`).
"""

import ast
import difflib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from directed import WORLDS
from group_lines import GROUP_BREAKS, GROUP_KILLED_BY, GROUP_SURVIVORS
from lines import HUNG_S, PACKAGE, broken_copy, broken_text
from whole_lines import KILLED_BY, SURVIVORS, WHOLE_BREAKS, WholeBreak

from tandem.simulator.hunt import num_cores

MOST_LINES = 3
PATIENCE = 12  # seeds from the recorded one: a change of the product may move the moment at which a bug shows
ENOUGH = 50
SAMPLE = ("pull_calls_nobody", "scores_are_one_token_late", "other_workers_drop_their_revocation")
ALL_BREAKS, NOTICED_BY = (*WHOLE_BREAKS, *GROUP_BREAKS), KILLED_BY | GROUP_KILLED_BY
WORLD_SCRIPT = """
import sys
from directed import WORLDS
if found := WORLDS[sys.argv[1]]().invariant:
    print("noticed", sys.argv[1], found)
"""
SEED_SCRIPT = """
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
    for breaks, killed, survivors in (
        (WHOLE_BREAKS, KILLED_BY, SURVIVORS),
        (GROUP_BREAKS, GROUP_KILLED_BY, GROUP_SURVIVORS),
    ):
        assert set(killed) | set(survivors) == {it.name for it in breaks}
        assert not set(killed) & set(survivors)
    assert len(KILLED_BY) >= ENOUGH
    assert {by for by in NOTICED_BY.values() if isinstance(by, str)} == set(WORLDS)


@pytest.mark.parametrize("it", TRIED, ids=lambda it: it.name)
def test_a_whole_cluster_notices_the_break(it: WholeBreak, tmp_path: Path) -> None:
    done = noticed(tmp_path, NOTICED_BY[it.name], PATIENCE, broken_copy(it, tmp_path / "broken"))
    assert "noticed" in done.stdout, done.stderr[-2000:]


@pytest.mark.slow
def test_what_the_breaks_are_tried_on_is_clean_without_one(tmp_path: Path) -> None:
    seeds = {by for it in TRIED if isinstance(by := NOTICED_BY[it.name], int)}

    def run(by: int | str) -> "subprocess.CompletedProcess[str]":
        folder = tmp_path / str(by)
        folder.mkdir()
        return noticed(folder, by, 1, PACKAGE.parent)

    with ThreadPoolExecutor(num_cores()) as pool:
        runs = list(pool.map(run, (*sorted(seeds), *WORLDS)))
    for done in runs:
        assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr[-2000:]


def noticed(folder: Path, by: int | str, count: int, sources: Path) -> "subprocess.CompletedProcess[str]":
    """By so many seeds from this one, or by this world. Raises TimeoutExpired when it hangs."""
    words = [WORLD_SCRIPT, by] if isinstance(by, str) else [SEED_SCRIPT, str(by), str(count)]
    return subprocess.run(
        [sys.executable, "-c", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (sources, Path(__file__).parent)))},
        capture_output=True,
        text=True,
        timeout=HUNG_S,
        check=False,
    )
