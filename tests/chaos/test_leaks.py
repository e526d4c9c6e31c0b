"""Whoever looks for what is left sees every process, of several workers too."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

from leaks import NODE, SLACK_FDS, STORAGE_THREADS, WORKER, Place, descriptors, grown, slack_fds

from tandem.transfer.sock import MAX_TRANSFERS

WAITS = "import sys; sys.stdin.read()"
PARENT = f"""
import subprocess, sys
children = [subprocess.Popen([sys.executable, "-c", {WAITS!r}]) for _ in range(3)]
print(flush=True)
for child in children:
    child.wait()
"""
WORKERS, NODES, ROUTER = Place("decode-0", WORKER), Place("decode-0", NODE), Place("router", "api")


def told(before: list[int], after: list[int], slack: int = 2) -> bool:
    return bool(grown({WORKERS: before}, {WORKERS: after}, slack=lambda _: slack))


def test_any_of_several_workers_may_be_the_one_that_has_more() -> None:
    assert not told([10, 20], [12, 22])
    assert told([10, 20], [13, 20])
    assert told([10, 20], [10, 23])


def test_a_worker_that_is_gone_or_has_come_is_no_smaller_leak() -> None:
    assert told([10, 20], [10])
    assert told([10], [10, 10])
    assert grown({WORKERS: [10]}, {}, slack=lambda _: 2)


def test_connections_may_grow_with_the_workers_of_the_other_role() -> None:
    prefill = {Place("prefill-0", WORKER): [5, 5], Place("prefill-1", WORKER): [5, 5], Place("prefill-0", NODE): [5, 5]}
    slack = slack_fds({**prefill, WORKERS: [5], Place("decode-1", WORKER): [5], NODES: [5], ROUTER: [5]})
    assert slack(WORKERS) == 4 * (MAX_TRANSFERS + 1) + STORAGE_THREADS, "of four workers that it may pull from"
    assert slack(Place("prefill-1", WORKER)) == 2 * (MAX_TRANSFERS + 1) + STORAGE_THREADS
    assert slack(NODES) == SLACK_FDS + 2
    assert slack(ROUTER) == SLACK_FDS


def test_every_process_is_counted() -> None:
    """Of a server whose children run the same program."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        member: Any = SimpleNamespace(name="decode-0", process=process)
        arena: Any = SimpleNamespace(fleet=SimpleNamespace(members=[member]))
        found = descriptors(arena)
        process.stdin.close()
    assert {place: len(counts) for place, counts in found.items()} == {
        Place("decode-0", "api"): 1,
        Place("decode-0", "other"): 3,
    }
