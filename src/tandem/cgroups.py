"""What this process may use of the machine: all of it, or what its container or service is limited to.

A limit is a file in the folder of a control group, and each on the way from the root to the group of this process
counts. Version 1 has a tree for each kind of limit, version 2 one for all. In a container the root may be the
container's own group, whatever path the kernel tells then; where nothing is at a path there is no limit.
"""

import os
from collections.abc import Iterator
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")  # lines of id:kinds:path; version 2 names no kinds


def memory_bytes() -> int:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *memory_limits(GROUPS, OWN_GROUPS)])


def num_cores() -> int:
    """At least one, and whole ones only: the kernel stops all threads of a group that has used up its share, and those
    that wait for each other wait for it then."""
    allowed = len(os.sched_getaffinity(0))
    return max(1, int(min([allowed, *core_limits(GROUPS, OWN_GROUPS)])))


def memory_limits(root: Path, own: Path) -> Iterator[int]:
    for folder in _folders(root, own, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _text(folder / name).strip()
            if text.isdigit():
                yield int(text)


def core_limits(root: Path, own: Path) -> Iterator[float]:
    """As seconds of CPU per second: a quota and the period it is for."""
    for folder in _folders(root, own, "cpu"):
        first = [_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        for words in (first, _text(folder / "cpu.max").split()):
            if len(words) == 2 and all(word.isdigit() and int(word) for word in words):  # else `max`, or -1
                yield int(words[0]) / int(words[1])


def _folders(root: Path, own: Path, kind: str) -> Iterator[Path]:
    """From the roots of both versions to the groups of this process."""
    yield from (root, root / kind)
    for line in _text(own).splitlines():
        _, _, rest = line.partition(":")
        kinds, _, path = rest.partition(":")
        if kinds and kind not in kinds.split(","):
            continue
        top = root / kind if kinds else root
        group = top / path.strip("/")
        yield from (group, *(parent for parent in group.parents if top in parent.parents))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
