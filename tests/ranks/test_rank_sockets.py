"""What the workers of a replica say to each other is for this machine only, whatever address the server listens at."""

import contextlib
from pathlib import Path

from cluster import cluster
from test_rank_failures import workers_of

LISTENS = "0A"
LOOPBACK = "0100007F"  # as the kernel writes it


def listening(process: int) -> set[str]:
    """Addresses at which this process takes TCP connections, as the kernel writes them."""
    inodes = set()
    for path in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(OSError):  # it was closed meanwhile
            inodes.add(path.readlink().name.removeprefix("socket:[").rstrip("]"))
    rows = [
        line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return {row[1].partition(":")[0] for row in rows if row[3] == LISTENS and row[9] in inodes}


def test_workers_find_each_other_on_loopback_though_the_server_is_open_to_others() -> None:
    flags = ("--tp", "2", "--host", "0.0.0.0", "--api-key", "k", "--max-total-tokens", "8192")
    with cluster(unified=True, flags=flags) as it:
        assert it.unified is not None
        assert listening(it.unified.member.process.pid) == {"00000000"}
        workers = workers_of(it.unified)
        assert len(workers) == 2
        assert [listening(worker) for worker in workers] == [{LOOPBACK}] * 2
