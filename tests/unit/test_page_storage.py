"""What a worker does with storage: as far as it goes, and an answer to everything."""

import sys
from pathlib import Path

import pytest

from tandem.core.commands import FetchPages, LookUpPages, WritePages
from tandem.core.events import PagesCopied, PagesFound
from tandem.core.values import PageId, ShardId
from tandem.host_memory import HostMemory
from tandem.page_files import DiskFolder, PageFiles, namespace_of
from tandem.page_storage import MAX_WAITING, StorageAnswer, StorageLane, perform

A, B, C = (bytes([letter]) * 16 for letter in b"abc")
PAGES = tuple(map(PageId, range(3)))
SHARD = ShardId(0)


def memory(*hashes: bytes) -> HostMemory:
    """With a page of its own bytes for each hash."""
    made = HostMemory(3, 8)
    for page, page_hash in enumerate(hashes):
        made.store(PageId(page), page_hash, memoryview(page_hash[:8]))
    return made


def folder(path: Path) -> PageFiles:
    return PageFiles(DiskFolder(path), namespace_of({}), 8, 1 << 20)


def written(path: Path) -> PageFiles:
    files = folder(path)
    assert perform(WritePages(1, (A, B, C), PAGES), files, memory(A, B, C), SHARD) == PagesCopied(1, SHARD, 3)
    return files


def test_what_was_written_is_found_and_fetched(tmp_path: Path) -> None:
    files, host = written(tmp_path), memory()
    assert perform(LookUpPages(2, (A, B, C)), files, host, SHARD) == PagesFound(2, SHARD, 3)
    assert perform(FetchPages(3, (A, B, C), PAGES), files, host, SHARD) == PagesCopied(3, SHARD, 3)
    place = bytearray(8)
    assert host.load(PAGES[1], B, memoryview(place)) == ""
    assert bytes(place) == B[:8]


def test_only_the_leading_pages_count(tmp_path: Path) -> None:
    files = written(tmp_path)
    files.files.remove(files.name(B))
    assert perform(LookUpPages(2, (A, B, C)), files, memory(), SHARD) == PagesFound(2, SHARD, 1)


def test_a_file_that_vanishes_after_the_look_up_is_a_miss(tmp_path: Path) -> None:
    files = written(tmp_path)
    files.files.remove(files.name(B))
    copied = perform(FetchPages(3, (A, B, C), PAGES), files, memory(), SHARD)
    assert isinstance(copied, PagesCopied)
    assert copied.num_pages == 1
    assert "not there" in copied.detail


def test_a_page_that_has_left_host_memory_is_not_written(tmp_path: Path) -> None:
    files = folder(tmp_path)
    copied = perform(WritePages(1, (A, B, C), PAGES), files, memory(A, C, C), SHARD)
    assert isinstance(copied, PagesCopied)
    assert copied.num_pages == 1
    assert not files.has(B)


class Broken(DiskFolder):
    def read(self, name: str, most: int) -> bytes:
        raise OSError(5, "Input/output error")

    def has(self, name: str) -> bool:
        raise OSError(5, "Input/output error")


@pytest.mark.parametrize(
    "command", [LookUpPages(7, (A,)), FetchPages(7, (A,), PAGES[:1]), WritePages(7, (A,), PAGES[:1])]
)
def test_a_device_that_fails_is_an_answer(tmp_path: Path, command: LookUpPages | FetchPages | WritePages) -> None:
    files = PageFiles(Broken(tmp_path), namespace_of({}), 8, 1 << 20)
    answer = perform(command, files, memory(A), SHARD)
    assert answer.num_pages == 0
    assert "Input/output error" in answer.detail
    assert files.counters.errors == 1


def test_no_memory_for_a_page_on_its_way_to_storage_is_an_answer_too(tmp_path: Path) -> None:
    """It is the thread of all writes: what it does not answer, and all that follows, would be waited for."""
    files, host = folder(tmp_path), memory(A, B, C)
    host.page_bytes = sys.maxsize
    assert perform(WritePages(1, (A, B, C), PAGES), files, host, SHARD) == PagesCopied(
        1, SHARD, 0, "storage: MemoryError: "
    )
    assert files.counters.errors == 1


def test_what_has_waited_too_long_or_finds_no_room_is_answered_with_nothing() -> None:
    answers: list[StorageAnswer] = []
    time = [0.0]

    def act(command: LookUpPages | FetchPages | WritePages) -> StorageAnswer:
        assert isinstance(command, LookUpPages)
        return PagesFound(command.number, SHARD, 1)

    lane = StorageLane(act, answers.append, shard=SHARD, timeout_seconds=5, now=lambda: time[0])
    for number in range(MAX_WAITING + 1):
        lane.put(LookUpPages(number, (A,)))
    assert answers == [PagesFound(MAX_WAITING, SHARD, 0, "storage: too much is waiting")]
    lane.run_one()
    time[0] = 6.0
    lane.run_one()
    assert answers[1:] == [PagesFound(0, SHARD, 1), PagesFound(1, SHARD, 0, "storage: too late")]
