"""Files of pages, which other servers have written, or nobody: what is read is the page, or nothing."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

from engine import Run, Target
from mutators import mutate_bytes

from tandem.page_files import DiskFolder, PageFiles, namespace_of

HASH = b"h" * 16
PAGE = bytes(range(256))


def opened(folder: str) -> PageFiles:
    return PageFiles(DiskFolder(Path(folder)), namespace_of({"model": "m"}), len(PAGE), 1 << 20)


def seeds() -> Mapping[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        files = opened(folder)
        files.write(HASH, PAGE)
        (path,) = Path(folder).iterdir()
        return {"page": path.read_bytes()}


def page_file() -> Run:
    files = opened(tempfile.mkdtemp())
    name = files.name(HASH)

    def run(data: bytes) -> None:
        files.files.write(name, [data])
        assert files.read(HASH) in (None, PAGE), "a page that nobody has written"

    return run


TARGETS = (Target("page_file", page_file, mutate_bytes, 30_000, seeds=seeds),)
