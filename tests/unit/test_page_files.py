"""Pages as files: read back as they were written or not at all, whoever else uses, fills or spoils the folder."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.page_files import HEADER_BYTES, DiskFolder, FolderRefused, PageFiles, namespace_of

A, B, C = (bytes([letter]) * 16 for letter in b"abc")
PAGE_BYTES = 64
FILE_BYTES = HEADER_BYTES + PAGE_BYTES


def page(number: int) -> bytes:
    return bytes([number]) * PAGE_BYTES


def opened(folder: Path, *, part: str = "tp0", max_bytes: int = 1 << 20, **more: object) -> PageFiles:
    return PageFiles(DiskFolder(folder), namespace_of({"part": part}), PAGE_BYTES, max_bytes, **more)  # type: ignore[arg-type]  # any of its fields


def file_of(folder: Path, files: PageFiles, page_hash: bytes) -> Path:
    return folder / files.name(page_hash)


def test_another_process_reads_what_one_has_written(tmp_path: Path) -> None:
    opened(tmp_path).write(A, page(1))
    later = opened(tmp_path)
    assert later.has(A)
    assert later.read(A) == page(1)
    assert not later.has(B)
    assert later.read(B) is None
    assert (later.counters.read, later.counters.missing) == (1, 1)


def test_names_say_nothing_and_are_nobodys_choice(tmp_path: Path) -> None:
    opened(tmp_path).write(b"../../etc/passwd", page(1))
    (found,) = tmp_path.iterdir()
    assert len(found.name) == 64
    assert stat.S_IMODE(found.stat().st_mode) == 0o600


def test_another_part_or_model_finds_nothing(tmp_path: Path) -> None:
    opened(tmp_path, part="tp0").write(A, page(1))
    other = opened(tmp_path, part="tp1")
    assert other.read(A) is None
    other.write(A, page(2))
    assert opened(tmp_path, part="tp0").read(A) == page(1)


@pytest.mark.parametrize("at", [0, 10, 30, 42, 50, HEADER_BYTES + 5])
def test_a_file_that_has_changed_is_removed(tmp_path: Path, at: int) -> None:
    files = opened(tmp_path)
    files.write(A, page(1))
    path = file_of(tmp_path, files, A)
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    assert files.read(A) is None
    assert files.counters.removed_damaged == 1
    assert not path.exists()


@pytest.mark.parametrize("length", [0, 8, HEADER_BYTES, FILE_BYTES - 1, FILE_BYTES + 1])
def test_a_file_of_another_length_is_removed(tmp_path: Path, length: int) -> None:
    files = opened(tmp_path)
    files.write(A, page(1))
    path = file_of(tmp_path, files, A)
    path.write_bytes((path.read_bytes() + b"x")[:length])
    assert files.read(A) is None
    assert not path.exists()


def test_a_page_of_another_hash_is_none(tmp_path: Path) -> None:
    files = opened(tmp_path)
    files.write(A, page(1))
    os.rename(file_of(tmp_path, files, A), file_of(tmp_path, files, B))
    assert files.read(B) is None


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    files = opened(tmp_path / "pages")
    opened(tmp_path / "elsewhere").write(A, page(1))
    file_of(tmp_path / "pages", files, A).symlink_to(file_of(tmp_path / "elsewhere", files, A))
    with pytest.raises(OSError, match="symbolic links"):
        files.read(A)


def test_a_folder_that_others_can_write_into_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(FolderRefused, match="others can write"):
        opened(tmp_path)


def test_the_folder_keeps_to_its_bound_and_to_what_was_used_last(tmp_path: Path) -> None:
    files = opened(tmp_path, max_bytes=20 * FILE_BYTES)
    for number in range(18):
        files.write(bytes([number]) * 16, page(number))
    for age, number in enumerate(range(17, -1, -1)):  # 0 was used last
        os.utime(file_of(tmp_path, files, bytes([number]) * 16), (1000 + age, 1000 + age))
    assert files.read(bytes([17]) * 16) == page(17)  # and now the oldest was
    for number in range(18, 24):
        files.write(bytes([number]) * 16, page(number))
    total = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert total <= 20 * FILE_BYTES
    assert files.has(bytes([17]) * 16)
    assert files.has(bytes([0]) * 16)
    assert not files.has(bytes([16]) * 16)
    assert files.counters.evicted > 0


def test_what_others_have_left_counts(tmp_path: Path) -> None:
    before = opened(tmp_path, part="other", max_bytes=1 << 20)
    for number in range(40):
        before.write(bytes([number]) * 16, page(number))
    opened(tmp_path, max_bytes=20 * FILE_BYTES).write(A, page(1))
    assert len(list(tmp_path.iterdir())) <= 20


def test_what_a_killed_writer_has_left_goes_at_the_next_start(tmp_path: Path) -> None:
    for name, age in (("tmp-old", 100), ("tmp-new", 1)):
        (tmp_path / name).write_bytes(b"half a page")
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    (tmp_path / "not ours").write_bytes(b"")
    opened(tmp_path, now=lambda: 1000.0).clean()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["not ours", "tmp-new"]


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    folder = DiskFolder(tmp_path)

    def parts() -> Iterator[bytes]:
        yield b"begun"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        folder.write("a" * 64, parts())
    assert list(tmp_path.iterdir()) == []


def test_all_who_share_a_folder_have_one_secret(tmp_path: Path) -> None:
    first = DiskFolder(tmp_path).secret()
    assert DiskFolder(tmp_path).secret() == first
    assert len(first) == 32
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]
    (tmp_path / "secret").write_bytes(b"short")
    with pytest.raises(FolderRefused, match="5 bytes"):
        DiskFolder(tmp_path).secret()
