"""What of a mapped file nobody reads any more leaves the process, and nothing else does."""

import mmap
from pathlib import Path

import torch

from tandem.engine.mapped_files import forget

PAGES = 8


def resident_pages(address: int) -> int:
    """Of the mapping that begins there."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    next(line for line in lines if line.startswith(f"{address:x}-"))
    return int(next(line for line in lines if line.startswith("Rss:")).split()[1]) * 1024 // mmap.PAGESIZE


def mapped(path: Path) -> torch.Tensor:
    path.write_bytes(bytes(range(256)) * (PAGES * mmap.PAGESIZE // 256))
    storage = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=PAGES * mmap.PAGESIZE)
    tensor = torch.tensor([], dtype=torch.uint8).set_(storage)
    assert tensor.any(), "it was read"
    return tensor


def test_whole_pages_of_the_file_leave_and_are_read_again(tmp_path: Path) -> None:
    tensor = mapped(tmp_path / "weights")
    before = tensor.clone()
    assert resident_pages(tensor.data_ptr()) == PAGES

    forget([(tensor.data_ptr() + 1, tensor.nbytes - mmap.PAGESIZE)], [tmp_path / "weights"])

    assert resident_pages(tensor.data_ptr()) == 2, "the first is needed in part, and the last was not named"
    assert torch.equal(tensor, before)


def test_other_memory_stays(tmp_path: Path) -> None:
    tensor, other = mapped(tmp_path / "weights"), torch.ones(4 * mmap.PAGESIZE, dtype=torch.uint8)

    forget([(other.data_ptr(), other.nbytes), (tensor.data_ptr(), tensor.nbytes)], [tmp_path / "another"])

    assert other.all()
    assert resident_pages(tensor.data_ptr()) == PAGES
