"""Pieces of memory come to their places, compiled or in Python; and runs of pages, however either side has them."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.kv_parts import Runs
from tandem.transfer import copying
from tandem.transfer.copying import copy_pieces
from tandem.transfer.pages import Pages

SIZES = st.integers(1, 40)


@pytest.fixture(scope="module", params=["compiled", "in Python"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "in Python":
            patch.setattr(copying, "native_copy", lambda: None)
        elif copying.native_copy() is None:
            pytest.skip("no compiler was there when the package was installed")
        yield request.param


@given(size=SIZES, places=st.lists(st.integers(0, 30), max_size=20, unique=True), data=st.data())
def test_pieces_come_to_their_places_and_nothing_else_changes(
    way: str, size: int, places: list[int], data: st.DataObject
) -> None:
    source = bytes(data.draw(st.binary(min_size=31 * size, max_size=31 * size)))
    target = bytearray(b"\xee" * (31 * size))
    starts = data.draw(st.lists(st.integers(0, 30 * size), min_size=len(places), max_size=len(places)))
    expected = bytearray(target)
    for place, start in zip(places, starts, strict=True):
        expected[place * size : (place + 1) * size] = source[start : start + size]
    copy_pieces(memoryview(target), [place * size for place in places], memoryview(source), starts, size=size)
    assert target == expected


@given(
    count=st.integers(1, 5), size=SIZES, gaps=st.tuples(*[st.integers(0, 9)] * 4), pages=st.permutations(list(range(6)))
)
def test_runs_of_one_side_come_to_those_of_the_other(
    way: str, count: int, size: int, gaps: tuple[int, int, int, int], pages: list[int]
) -> None:
    """Each side has `count` pieces of `size` one behind the other, or apart."""
    first_there, apart_there, first_here, apart_here = gaps
    there, there_bytes = _laid_out(first_there, size, count, apart_there)
    here, here_bytes = _laid_out(first_here, size, count, apart_here)
    lent = memoryview(bytes(number % 251 for number in range(6 * there_bytes)))
    own = bytearray(6 * here_bytes)
    Pages(memoryview(own), here_bytes).copy_from(
        Pages(lent, there_bytes), pages=pages, runs=here, sources=pages[::-1], source_runs=there
    )
    expected = bytearray(6 * here_bytes)
    for page, source in zip(pages, pages[::-1], strict=True):
        for piece in range(count):
            start = source * there_bytes + first_there + piece * (size + apart_there)
            place = page * here_bytes + first_here + piece * (size + apart_here)
            expected[place : place + size] = lent[start : start + size]
    assert own == expected


def _laid_out(first: int, size: int, count: int, apart: int) -> tuple[Runs, int]:
    """And how large a page is then."""
    page_bytes = first + count * (size + apart)
    if apart == 0:
        return Runs(first, count * size, count * size, 1), page_bytes
    return Runs(first, size, size + apart, count), page_bytes
