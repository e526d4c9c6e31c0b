"""Frames of pages that lie elsewhere: their slots of host memory are bounded and come back, and what is copied is what
was asked for; nothing lands that did not come to its end."""

import contextlib
import threading
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.kv_parts import Runs
from tandem.engine.device_pages import DevicePages
from tandem.engine.kv_memory import KvMemory, KvShape, StateShape
from tandem.transfer.link import LinkFrozen
from tandem.transfer.pages import Pages
from tandem.transfer.protocol import FRAME_BYTES, Malformed
from tandem.transfer.staged_pages import StagedPages

PAGE_BYTES, NUM_PAGES, MAX_SLOTS = 96, 8, 3
WHOLE = Runs(0, PAGE_BYTES, PAGE_BYTES, 1)
PAGES = st.lists(st.integers(0, NUM_PAGES - 1), min_size=1, unique=True)
RUNS = st.sampled_from([WHOLE, Runs(8, 16, 16, 1), Runs(0, 16, 32, 3), Runs(24, 8, 24, 3)])


class Copies(DevicePages):
    """Of bytes on the CPU, which `content` is."""

    def __init__(self, page_bytes: int = PAGE_BYTES) -> None:
        self.tensor = torch.arange(NUM_PAGES * page_bytes, dtype=torch.int64).to(torch.uint8)
        super().__init__(self.tensor, page_bytes)
        self.num_made = 0
        self.has_memory = True

    def host_memory(self, num_bytes: int) -> memoryview:
        if not self.has_memory:
            raise MemoryError("no pinned memory")
        self.num_made += 1
        return super().host_memory(num_bytes)

    @property
    def content(self) -> bytes:
        return self.tensor.numpy().tobytes()


def staged(copies: Copies, *, timeout_s: float = 0.0, page_bytes: int = PAGE_BYTES) -> StagedPages:
    return StagedPages(copies, num_pages=NUM_PAGES, page_bytes=page_bytes, max_slots=MAX_SLOTS, timeout_s=timeout_s)


def put(content: bytes, pages: Sequence[int], runs: Runs, bytes_of: bytes) -> bytes:
    """`content` with these runs changed."""
    changed = bytearray(content)
    at = 0
    for piece in Pages(memoryview(changed), PAGE_BYTES).pieces(pages, runs):
        piece[:] = bytes_of[at : at + len(piece)]
        at += len(piece)
    return bytes(changed)


@given(pages=PAGES, runs=RUNS)
def test_what_is_read_is_what_mapped_pages_hold(pages: list[int], runs: Runs) -> None:
    copies = Copies()
    mapped, elsewhere = Pages(memoryview(bytearray(copies.content)), PAGE_BYTES), staged(copies)
    with elsewhere.reading(pages, runs) as there:
        assert b"".join(there.pages.pieces(there.numbers, there.runs)) == b"".join(mapped.pieces(pages, runs))


@given(pages=PAGES, runs=RUNS, few=st.integers(1, NUM_PAGES))
def test_digests_are_those_of_mapped_pages_however_many_slots_they_take(pages: list[int], runs: Runs, few: int) -> None:
    copies = Copies()
    mapped, elsewhere = Pages(memoryview(bytearray(copies.content)), PAGE_BYTES), staged(copies)
    elsewhere._slot_bytes = few * runs.num_bytes
    names = {"room": 7, "sources": pages, "generations": [page + 5 for page in pages]}
    assert elsewhere.digests(pages, runs, **names) == mapped.digests(pages, runs, **names)


@given(pages=PAGES, runs=RUNS, is_whole=st.booleans())
def test_what_lands_is_in_the_pages_at_the_end_and_nothing_is_that_did_not_come_to_one(
    pages: list[int], runs: Runs, is_whole: bool
) -> None:
    copies = Copies()
    before, elsewhere = copies.content, staged(copies)
    came = bytes(255 - at % 251 for at in range(len(pages) * runs.num_bytes))
    with contextlib.suppress(LinkFrozen), elsewhere.landing(pages, runs) as here:
        here.pages.buffer[:] = came
        assert copies.content == before
        if not is_whole:
            raise LinkFrozen("in the middle of a frame")
    assert copies.content == (put(before, pages, runs, came) if is_whole else before)


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, MAX_SLOTS - 1)), max_size=40))
def test_no_more_slots_are_made_than_frames_move_at_once_and_never_more_than_the_bound(
    steps: list[tuple[bool, bool, int]],
) -> None:
    """Frames begin and end in any order, well or not. Who finds no slot in time hears of it, and holds none."""
    copies = Copies()
    elsewhere, most = staged(copies), 0
    moving: list[contextlib.ExitStack] = []
    for begins, reads, which in steps:
        if begins:
            stack = contextlib.ExitStack()
            begin = elsewhere.reading if reads else elsewhere.landing
            if len(moving) == MAX_SLOTS:
                with pytest.raises(LinkFrozen, match="no staging memory"):
                    stack.enter_context(begin([0], WHOLE))
                continue
            stack.enter_context(begin([0], WHOLE))
            moving.append(stack)
            most = max(most, len(moving))
        elif which < len(moving):
            ended = moving.pop(which)
            if reads:
                ended.close()
            else:
                error = LinkFrozen("in the middle of a frame")
                ended.__exit__(LinkFrozen, error, None)
        assert copies.num_made == most
        assert len(elsewhere._free) + len(moving) == elsewhere._num_slots == most


def test_a_frame_waits_for_a_slot_that_another_one_gives_back() -> None:
    elsewhere, has_begun = staged(Copies(), timeout_s=60.0), threading.Event()

    def last() -> None:
        with elsewhere.reading([0], WHOLE):
            has_begun.set()

    with contextlib.ExitStack() as first:
        for _ in range(MAX_SLOTS):
            first.enter_context(elsewhere.reading([0], WHOLE))
        thread = threading.Thread(target=last)
        thread.start()
        assert not has_begun.is_set()
    thread.join(60.0)
    assert has_begun.is_set()


def test_where_there_is_no_memory_the_frame_fails_and_the_bound_is_as_it_was() -> None:
    copies = Copies()
    elsewhere, copies.has_memory = staged(copies), False
    for _ in range(MAX_SLOTS + 1):
        with pytest.raises(MemoryError), elsewhere.reading([0], WHOLE):
            pass
    copies.has_memory = True
    with elsewhere.reading([0], WHOLE):
        pass


@pytest.mark.parametrize("page_bytes", [FRAME_BYTES // 2, FRAME_BYTES + 32])
def test_a_slot_has_room_for_a_frame_or_a_page_and_a_frame_that_is_larger_is_nonsense(page_bytes: int) -> None:
    elsewhere = staged(Copies(page_bytes), page_bytes=page_bytes)
    few, whole = max(1, FRAME_BYTES // page_bytes), Runs(0, page_bytes, page_bytes, 1)
    with elsewhere.landing(range(few), whole):
        pass
    with pytest.raises(Malformed, match="a frame of"), elsewhere.landing(range(few + 1), whole):
        pass


SHAPES = {
    "plain": KvShape(num_layers=2, num_kv_heads=2, head_dim=8),
    "int8": KvShape(num_layers=2, num_kv_heads=2, head_dim=8, is_int8=True),
    "with a state": KvShape(
        2, 2, 8, state=StateShape(1, num_heads=2, head_dim=4, state_size=4, conv_width=4, group_features=8)
    ),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_pages_of_kv_that_is_not_mapped_are_the_bytes_of_kv_that_is(shape: KvShape) -> None:
    def memory(*, is_mapped: bool) -> KvMemory:
        return KvMemory(shape, page_size=4, num_pages=5, dtype=torch.bfloat16, is_mapped=is_mapped)

    mapped, plain = memory(is_mapped=True), memory(is_mapped=False)
    assert (mapped.copies, plain.buffer, plain.fd) == (None, None, None)
    assert plain.copies is not None
    whole = Runs(0, plain.page_bytes, plain.page_bytes, 1)
    for number, rows in enumerate((plain.page_rows, mapped.page_rows)):
        rows.copy_(torch.arange(rows.numel()).view(rows.shape) % 101 + number)
    content = plain.copies.host_memory(2 * plain.page_bytes)
    plain.copies.read([4, 1], whole, content)
    for at, page in enumerate((0, 3)):
        mapped.page(page)[:] = content[at * plain.page_bytes : (at + 1) * plain.page_bytes]
    assert torch.equal(mapped.tensor[[0, 3]], plain.tensor[[4, 1]])
    plain.copies.write([2, 0], whole, content)
    assert torch.equal(plain.tensor[[2, 0]], plain.tensor[[4, 1]])
    mapped.close()
