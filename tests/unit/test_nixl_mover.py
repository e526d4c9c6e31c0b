"""Page files that NIXL moves: the same files as those of system calls, and faults of a device are errors in time."""

import os
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tandem.page_files import HEADER_BYTES, DiskFolder, PageFiles, namespace_of

nixl_mover = pytest.importorskip("tandem.server.nixl_mover", reason="NIXL is not installed", exc_type=ImportError)

A = b"a" * 16
PAGE_BYTES = 70_000
FILE_BYTES = HEADER_BYTES + PAGE_BYTES + 1
PAGE = os.urandom(PAGE_BYTES)


@pytest.fixture
def mover() -> Any:
    return nixl_mover.NixlMover(FILE_BYTES, timeout_seconds=5)


def pages(folder: Path, mover: Any = None) -> PageFiles:
    return PageFiles(DiskFolder(folder, mover), namespace_of({}), PAGE_BYTES, 1 << 30)


def test_both_kinds_of_servers_share_a_folder(tmp_path: Path, mover: Any) -> None:
    pages(tmp_path, mover).write(A, PAGE)
    assert pages(tmp_path).read(A) == PAGE
    b = b"b" * 16
    pages(tmp_path).write(b, PAGE[::-1])
    assert pages(tmp_path, mover).read(b) == PAGE[::-1]


@pytest.mark.parametrize("length", [0, 8, HEADER_BYTES, FILE_BYTES - 2, FILE_BYTES + 1])
def test_a_file_of_another_length_is_removed(tmp_path: Path, mover: Any, length: int) -> None:
    files = pages(tmp_path, mover)
    files.write(A, PAGE)
    path = tmp_path / files.name(A)
    path.write_bytes((path.read_bytes() + b"xyz")[:length])
    assert files.read(A) is None
    assert not path.exists()


def test_nothing_of_the_page_before_is_in_a_shorter_file(tmp_path: Path, mover: Any) -> None:
    folder = DiskFolder(tmp_path, mover)
    folder.write("long", [b"x" * 1000])
    folder.write("short", [b"ab", memoryview(b"cd")])
    assert (tmp_path / "short").read_bytes() == b"abcd"
    assert folder.read("long", 2000) == b"x" * 1000
    assert folder.read("short", 2000) == b"abcd"
    assert folder.read("short", 3) == b"abc"


def test_what_cannot_be_moved_is_an_error_and_the_next_one_is_moved(tmp_path: Path, mover: Any) -> None:
    folder = DiskFolder(tmp_path, mover)
    folder.write("page", [PAGE])
    write_only = os.open(tmp_path / "page", os.O_WRONLY)
    with pytest.raises(OSError, match="NIXL could not read"):
        mover.read(write_only, FILE_BYTES)
    os.close(write_only)
    assert folder.read("page", FILE_BYTES) == PAGE
    full = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(OSError, match="NIXL could not write"):
        mover.write(full, [PAGE])
    os.close(full)
    folder.write("again", [PAGE])
    assert folder.read("again", FILE_BYTES) == PAGE


def test_a_transfer_that_does_not_end_is_given_up_and_its_memory_is_not_used_again(
    tmp_path: Path, mover: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = DiskFolder(tmp_path, mover)
    (tmp_path / "page").write_bytes(PAGE)
    before = mover._reads.memory
    seconds = count(0, 6)
    with monkeypatch.context() as patched:
        patched.setattr(nixl_mover.nixl_agent, "transfer", lambda *_: "PROC")
        patched.setattr(nixl_mover.nixl_agent, "check_xfer_state", lambda *_: "PROC")
        patched.setattr(nixl_mover.time, "monotonic", lambda: next(seconds))
        with pytest.raises(TimeoutError, match="has not ended after 5 s"):
            folder.read("page", FILE_BYTES)
    assert mover._reads.memory is not before
    assert folder.read("page", FILE_BYTES) == PAGE


def test_faults_that_have_ended_keep_no_memory(mover: Any) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    for _ in range(12):
        with pytest.raises(OSError, match="NIXL could not write"):
            mover.write(full, [PAGE])
        assert len(mover._writes._abandoned) <= 1
    os.close(full)


def test_with_many_transfers_that_do_not_end_nothing_is_moved_until_they_have(
    tmp_path: Path, mover: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = DiskFolder(tmp_path, mover)
    (tmp_path / "page").write_bytes(PAGE)
    seconds = count(0, 6)
    with monkeypatch.context() as patched:
        patched.setattr(nixl_mover.nixl_agent, "check_xfer_state", lambda *_: "PROC")
        with monkeypatch.context() as never:
            never.setattr(nixl_mover.nixl_agent, "transfer", lambda *_: "PROC")
            never.setattr(nixl_mover.time, "monotonic", lambda: next(seconds))
            for _ in range(nixl_mover.MAX_ABANDONED):
                with pytest.raises(TimeoutError):
                    folder.read("page", FILE_BYTES)
        with pytest.raises(OSError, match="does not end 8 transfers"):
            folder.read("page", FILE_BYTES)
    assert folder.read("page", FILE_BYTES) == PAGE
    assert mover._reads._abandoned == []


def test_a_transfer_that_has_ended_leaves_nothing_registered(
    tmp_path: Path, mover: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, calls = DiskFolder(tmp_path, mover), Counter[str]()
    for name in ("register_memory", "deregister_memory", "initialize_xfer", "release_xfer_handle"):
        call = getattr(nixl_mover.nixl_agent, name)

        def counted(*given: Any, name: str = name, call: Any = call) -> Any:
            calls[name] += 1
            return call(*given)

        monkeypatch.setattr(nixl_mover.nixl_agent, name, counted)
    folder.write("page", [PAGE])
    assert folder.read("page", FILE_BYTES) == PAGE
    assert calls == dict.fromkeys(calls, 2)
    assert len(calls) == 4


def test_a_transfer_that_was_never_begun_is_not_waited_for(
    tmp_path: Path, mover: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = DiskFolder(tmp_path, mover)
    folder.write("page", [PAGE])

    def refuse(*_: Any) -> None:
        raise nixl_mover.NIXL_ERRORS[0]("it has no place for one more")

    with monkeypatch.context() as patched:
        patched.setattr(nixl_mover.nixl_agent, "initialize_xfer", refuse)
        with pytest.raises(OSError, match="NIXL could not read: it has no place for one more"):
            folder.read("page", FILE_BYTES)
    assert folder.read("page", FILE_BYTES) == PAGE
    assert mover._reads._abandoned == []
