"""Real disks that are slow, stall, fail or are full, by order of a test, while servers run: see `disk_faults.c`.

disk = disk_faults(folder, tmp_path, monkeypatch)     # before the servers start, which inherit it
disk.stall(READS)
eventually(lambda: disk.held)                         # a server has asked for a page and waits
disk.heal()
"""

import ctypes
import errno
import mmap
import os
import shutil
import subprocess
from pathlib import Path

import pytest

LOOK_UPS, READS, CREATES, WRITES, RENAMES = (1 << n for n in range(5))
SOURCE = Path(__file__).with_suffix(".c")
NO_COMPILER = "no C compiler, which a disk with faults is built by"


class Orders(ctypes.Structure):
    """As the preloaded code has it."""

    _fields_ = (
        ("slow_us", ctypes.c_int32),
        ("stalled", ctypes.c_int32),
        ("failing", ctypes.c_int32),
        ("error", ctypes.c_int32),
        ("room", ctypes.c_int64),
        ("held", ctypes.c_int32),
        ("slowed", ctypes.c_int32),
        ("refused", ctypes.c_int32),
    )


class DiskFaults:
    """Below one folder, in all processes that have it. Healthy at first."""

    def __init__(self, orders: Path) -> None:
        orders.write_bytes(bytes(ctypes.sizeof(Orders)))
        with orders.open("r+b") as file:
            self._orders = Orders.from_buffer(mmap.mmap(file.fileno(), ctypes.sizeof(Orders)))
        self.heal()

    @property
    def held(self) -> int:
        """Calls that are being held now."""
        return self._orders.held

    @property
    def slowed(self) -> int:
        """Sum of the calls that took longer, or were held."""
        return self._orders.slowed

    @property
    def refused(self) -> int:
        """Sum of the calls that failed, by order or for want of room."""
        return self._orders.refused

    def slow(self, seconds: float) -> None:
        """Every call takes so much longer."""
        self._orders.slow_us = int(seconds * 1e6)

    def stall(self, calls: int) -> None:
        """These are held until the disk is told otherwise."""
        self._orders.stalled = calls

    def fail(self, calls: int, error: int = errno.EIO) -> None:
        self._orders.error = error
        self._orders.failing = calls

    def fill(self, *, room: int = 0) -> None:
        """Writes end with the last byte there is room for."""
        self._orders.room = room

    def empty(self) -> None:
        """There is room again."""
        self._orders.room = -1

    def heal(self) -> None:
        self._orders.slow_us = self._orders.stalled = self._orders.failing = 0
        self.empty()


def compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc")


def disk_faults(folder: Path, work: Path, monkeypatch: pytest.MonkeyPatch) -> DiskFaults:
    """Of `folder`, for whatever process this one starts from now on. work: where what is built may lie."""
    if (builder := compiler()) is None:
        pytest.skip(NO_COMPILER)
    library = work / "disk_faults.so"
    subprocess.run(
        [builder, "-std=gnu11", "-Wall", "-Werror", "-O2", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"],
        check=True,
    )
    disk = DiskFaults(work / "disk_orders")
    monkeypatch.setenv("DISK_FAULTS_FOLDER", str(folder))
    monkeypatch.setenv("DISK_FAULTS_ORDERS", str(work / "disk_orders"))
    monkeypatch.setenv("LD_PRELOAD", " ".join(filter(None, (str(library), os.environ.get("LD_PRELOAD")))))
    return disk
