"""How much memory there is for the KV pool: of the machine, or of the container or service where that has a limit."""

import os
from collections.abc import Iterator
from pathlib import Path

import torch

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


def total_bytes(device: str) -> int:
    """Of the device; for the CPU what this process may use of the machine."""
    if torch.device(device).type != "cpu":
        return torch.cuda.mem_get_info(device)[1]
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *cgroup_limits(CGROUPS, OWN_CGROUP)])


def bytes_left(device: str, *, weight_bytes: int) -> int:
    """Beside the weights, 0 where they take all. A device has them already; mapped ones only come to be there."""
    if torch.device(device).type != "cpu":
        return torch.cuda.mem_get_info(device)[0]
    return max(0, total_bytes(device) - weight_bytes)


def cgroup_limits(root: Path, own: Path) -> Iterator[int]:
    """Every limit on the way from the root to the group of this process; version 1 has one of its own."""
    folders = [root, root / "memory"]
    for line in _text(own).splitlines():
        group = root / line.partition("::")[2].strip("/")
        folders += [group, *(parent for parent in group.parents if root in parent.parents)]
    for folder in folders:
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _text(folder / name).strip()
            if text.isdigit():
                yield int(text)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
