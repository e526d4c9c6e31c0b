"""Under each break of one line the test that it names fails. `make hunt` tries all, `make test` a sample.

With TANDEM_ALL_LINES=1 all are tried.
"""

import ast
import os
from pathlib import Path

import pytest
from lines import BREAKS, OTHERS, PACKAGE, ROOT, Break, broken_text, run

SAMPLE = (
    "hit_rate_is_always_0",
    "result_slot_is_dropped_on_requeue",
    "queue_gate_is_removed",
    "line_takes_the_counter_of_the_node",
)
TABLES = [(ROOT / "docs" / name).read_text() for name in ("sglang-parity.md", "structured-output.md")]
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


@pytest.mark.parametrize("it", TRIED, ids=lambda it: it.name)
def test_the_named_test_fails_under_the_break(it: Break, tmp_path: Path) -> None:
    found = run(it, tmp_path)
    assert found.code == pytest.ExitCode.TESTS_FAILED, found.output
    assert (found.failed, found.errors) == ({it.test.partition("::")[2]}, 0), found.output
