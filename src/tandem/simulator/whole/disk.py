"""Folders of pages that all servers of a cluster see, as on a file system of the network, and that outlive them.

In memory, in the place of `page_files.DiskFolder`. What is read and written takes virtual time, and goes wrong as
drawn: the faults are those of the folder of fast worlds.
"""

from collections.abc import Iterable
from pathlib import Path
from random import Random

from tandem.page_files import FileEntry
from tandem.simulator.actors.storage import StorageFaults, VirtualFolder
from tandem.simulator.whole.kernel import Kernel

SECRET = b"a secret of one folder".ljust(32, b".")
SLOW_S = 3.0  # at most, of one file on a slow disk


class Disk:
    """Of one world."""

    def __init__(self, kernel: Kernel, faults: StorageFaults, random: Random) -> None:
        self._kernel = kernel
        self._faults = faults
        self._random = random
        self._folders: dict[Path, VirtualFolder] = {}

    def open(self, path: Path, mover: object = None) -> "SharedFolder":
        """In the place of `DiskFolder(path, mover)`; what moves bytes of a real disk has nothing to do here."""
        folder = self._folders.get(path)
        if folder is None:
            folder = VirtualFolder(self._random, self._faults, self._strikes, lambda: self._kernel.now)
            self._folders[path] = folder
        return SharedFolder(folder, self)

    def access(self) -> None:
        """One file, by whoever runs now."""
        is_slow = self._strikes(self._faults.slow)
        self._kernel.sleep(self._random.uniform(0.5, SLOW_S) if is_slow else self._random.uniform(0, 0.002))

    def _strikes(self, share: float) -> bool:
        return share > 0 and self._random.random() < share


class SharedFolder:
    """`Files`, as one process has opened them."""

    def __init__(self, folder: VirtualFolder, disk: Disk) -> None:
        self._folder = folder
        self._disk = disk

    def secret(self) -> bytes:
        return SECRET

    def entries(self) -> Iterable[FileEntry]:
        return self._folder.entries()

    def has(self, name: str) -> bool:
        return self._folder.has(name)

    def read(self, name: str, most: int) -> bytes:
        self._disk.access()
        return self._folder.read(name, most)

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> None:
        whole = b"".join(map(bytes, parts))
        self._disk.access()
        self._folder.write(name, [whole])

    def remove(self, name: str) -> None:
        self._folder.remove(name)
