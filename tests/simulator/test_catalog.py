"""The table of invariants and faults says what is there: every row, and its place."""

import inspect
import sys
from pathlib import Path

import pytest

from tandem.simulator.catalog import FAULTS, INVARIANTS, Row, page
from tandem.simulator.faults.names import NAMES
from tandem.simulator.faults.options import CLASSES

PAGE = Path(__file__).parents[2] / "docs" / "invariants.md"


def test_all_invariants_and_faults_have_a_row() -> None:
    safety, liveness = [f"S{number}" for number in range(1, 39)], [f"L{number}" for number in range(1, 13)]
    assert [row.id for row in INVARIANTS] == [*safety, *liveness, "W1", "W2", "W3", "W4", "W5"]
    assert [row.id for row in FAULTS] == [f"F{number}" for number in range(1, 26)]


@pytest.mark.parametrize("row", INVARIANTS, ids=lambda row: row.id)
def test_the_place_of_an_invariant_raises_its_id(row: Row) -> None:
    checker = row.find()
    assert inspect.isclass(checker)
    own_id = getattr(checker, "id", None)
    assert own_id == row.id or f'"{row.id}"' in inspect.getsource(sys.modules[checker.__module__])


@pytest.mark.parametrize("row", FAULTS, ids=lambda row: row.id)
def test_a_fault_is_drawn_and_has_its_place(row: Row) -> None:
    assert row.find() is not None
    assert row.id in CLASSES


def test_every_fault_that_is_drawn_has_its_row() -> None:
    assert {row.id for row in FAULTS} == set(CLASSES)


def test_every_class_of_faults_has_a_name_of_its_own_that_people_read() -> None:
    assert list(NAMES) == [row.id for row in FAULTS]
    assert len(set(NAMES.values())) == len(NAMES)


def test_the_page_is_the_table() -> None:
    assert PAGE.read_text() == page(), "python -m tandem.simulator.catalog > docs/invariants.md"
