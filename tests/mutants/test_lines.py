"""Under each break of one line the test that it names fails. `make hunt` tries all, `make test` a sample.

With TANDEM_ALL_LINES=1 all are tried.
"""

import ast
import os
import re
from collections import defaultdict
from collections.abc import Hashable, Mapping
from pathlib import Path

import pytest
from lines import BREAKS, OTHERS, PACKAGE, ROOT, Break, broken_text, run
from test_real_server import KILLS

SAMPLE = (
    "hit_rate_is_always_0",
    "result_slot_is_dropped_on_requeue",
    "queue_gate_is_removed",
    "line_takes_the_counter_of_the_node",
)
PARITY = (ROOT / "docs" / "sglang-parity.md").read_text()
TABLES = (PARITY, (ROOT / "docs" / "structured-output.md").read_text())
ALL = (*BREAKS, *OTHERS)
TRIED = [it for it in ALL if it.name in SAMPLE or os.environ.get("TANDEM_ALL_LINES")]


def test_every_break_is_one_line_that_is_there_and_names_a_test_that_is_there() -> None:
    for it in ALL:
        before, after = (PACKAGE / it.file).read_text().splitlines(), broken_text(it).splitlines()
        assert sum(old != new for old, new in zip(before, after, strict=True)) == 1, it.name
        ast.parse("\n".join(after))
        path, _, test = it.test.partition("::")
        assert f"def {test}(" in (ROOT / "tests" / path).read_text(), it.name
        is_named = any(f"`tests/{it.test}`" in table for table in TABLES)
        assert it in OTHERS or is_named, f"{it.name}: no row is shown by its test"
    assert len({it.name for it in ALL}) == len(ALL)
    assert set(SAMPLE) <= {it.name for it in ALL}


def test_every_row_that_processes_show_has_a_break_of_its_own() -> None:
    """Under which a test of the row fails. What makes the same file of it is one break, whichever tests it is for."""
    breaks: defaultdict[Hashable, set[str]] = defaultdict(set)
    for it in ALL:
        breaks[it.file, broken_text(it)].add(f"tests/{it.test}")
    for kill in KILLS:
        breaks[kill.mutant].add(os.path.normpath(f"tests/e2e_cpu/{kill.test}"))
    rows = [line for line in PARITY.splitlines() if "| processes |" in line]
    assert rows
    choices = {row: breaks_of(row, breaks) for row in rows}
    assert without_one(choices) == []


def breaks_of(row: str, breaks: Mapping[Hashable, set[str]]) -> list[Hashable]:
    shown_by = set(re.findall(r"`(tests/[^`]+::\w+)`", row))
    return [one for one, tests in breaks.items() if tests & shown_by]


def without_one(choices: Mapping[str, list[Hashable]]) -> list[str]:
    """Who gets nothing where as many as can be get one of their choices, and nobody that of another."""
    given: dict[Hashable, str] = {}

    def gets_one(who: str, tried: set[Hashable]) -> bool:
        """Perhaps one whose owner gets another one then."""
        for one in choices[who]:
            if one not in tried:
                tried.add(one)
                if one not in given or gets_one(given[one], tried):
                    given[one] = who
                    return True
        return False

    return [who for who in choices if not gets_one(who, set())]


def test_of_two_who_can_have_the_same_the_one_with_a_choice_gives_way() -> None:
    assert without_one({"a": [1, 2], "b": [1]}) == []
    assert without_one({"a": [1], "b": [1], "c": [2]}) == ["b"]


@pytest.mark.parametrize("it", TRIED, ids=lambda it: it.name)
def test_the_named_test_fails_under_the_break(it: Break, tmp_path: Path) -> None:
    found = run(it, tmp_path)
    assert found.code == pytest.ExitCode.TESTS_FAILED, found.output
    assert (found.failed, found.errors) == ({it.test.partition("::")[2]}, 0), found.output
