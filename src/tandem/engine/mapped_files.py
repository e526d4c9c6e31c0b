"""Memory of mapped files that nobody reads any more."""

import ctypes
import mmap
from collections.abc import Collection, Iterable
from pathlib import Path

MAPS = Path("/proc/self/maps")


def forget(parts: Iterable[tuple[int, int]], files: Collection[Path]) -> None:
    """What of these parts of memory, address and length, is a private mapping of one of the files leaves this process.

    It is read from the file again if someone looks: so nothing else may be given back, memory that was written to
    would be lost. Where the system does not tell, or refuses, all stays.
    """
    mapped = _mapped(files)
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for address, length in parts:
        first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (address + length) // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last and any(begin <= first and last <= end for begin, end in mapped):
            libc.madvise(first, last - first, mmap.MADV_DONTNEED)


def _mapped(files: Collection[Path]) -> list[tuple[int, int]]:
    """Where the files are mapped as they are: begin and end."""
    names = {str(path.resolve()) for path in files}
    try:
        lines = MAPS.read_text().splitlines()
    except OSError:
        return []
    found: list[tuple[int, int]] = []
    for line in lines:
        place, _, *_, name = [*line.split(None, 5), ""][:6]
        if name in names:
            begin, end = place.split("-")
            found.append((int(begin, 16), int(end, 16)))
    return found
