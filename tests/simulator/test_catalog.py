"""The table of invariants and faults says what is there: every row, its place, its mutant, or what it waits for."""

import inspect
import sys
from pathlib import Path

import pytest

from tandem.simulator.catalog import CAPABILITIES, FAULTS, INVARIANTS, Row, page
from tandem.simulator.faults.names import NAMES
from tandem.simulator.faults.options import CLASSES

PAGE = Path(__file__).parents[2] / "docs" / "invariants.md"
ROWS = (*INVARIANTS, *FAULTS)


def test_all_invariants_and_faults_have_a_row() -> None:
    safety, liveness = [f"S{number}" for number in range(1, 39)], [f"L{number}" for number in range(1, 13)]
    assert [row.id for row in INVARIANTS] == [*safety, *liveness, "W1", "W2", "W3", "W4", "W5"]
    assert [row.id for row in FAULTS] == [f"F{number}" for number in range(1, 26)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_a_row_has_a_place_or_waits(row: Row) -> None:
    assert bool(row.place) != bool(row.waits_for)
    assert not row.waits_for or row.waits_for in CAPABILITIES


@pytest.mark.parametrize("row", [row for row in INVARIANTS if row.place], ids=lambda row: row.id)
def test_the_place_of_an_invariant_raises_its_id(row: Row) -> None:
    checker = row.find()
    assert inspect.isclass(checker)
    own_id = getattr(checker, "id", None)
    assert own_id == row.id or f'"{row.id}"' in inspect.getsource(sys.modules[checker.__module__])


@pytest.mark.parametrize("row", [row for row in FAULTS if row.place], ids=lambda row: row.id)
def test_a_fault_with_a_place_is_drawn(row: Row) -> None:
    assert row.find() is not None
    assert row.id in CLASSES


def test_every_fault_that_is_drawn_has_its_row() -> None:
    assert {row.id for row in FAULTS if row.place} == set(CLASSES)


def test_every_class_of_faults_has_a_name_of_its_own_that_people_read() -> None:
    assert list(NAMES) == [row.id for row in FAULTS]
    assert len(set(NAMES.values())) == len(NAMES)


@pytest.mark.parametrize("row", [row for row in ROWS if row.waits_for], ids=lambda row: row.id)
def test_nothing_waits_for_what_is_there(row: Row) -> None:
    assert not CAPABILITIES[row.waits_for](), f"{row.id} waits for {row.waits_for}, which is there"


def test_every_capability_is_waited_for() -> None:
    assert {row.waits_for for row in ROWS if row.waits_for} == set(CAPABILITIES)


def test_the_page_is_the_table() -> None:
    assert PAGE.read_text() == page(), "python -m tandem.simulator.catalog > docs/invariants.md"
