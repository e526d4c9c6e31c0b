"""Storage on a real disk that is slow, stalls, fails or is full: it costs time and hits, never a token or a request.

Which requests wait, and for what, is told by states seen while the disk holds a call, not by clocks.
"""

import errno
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster import HttpError, Server, cluster, eventually
from disk_faults import CREATES, LOOK_UPS, READS, RENAMES, WRITES, DiskFaults, disk_faults
from reference import PAGE
from test_storage_tier import OUTPUT, ask, assert_right, from_storage, is_written, pages_of, prompts

from tandem.cli.failure import CommandFailed
from tandem.page_files import TEMPORARY
from tandem.server.worker_storage import TIMEOUT_SECONDS

ALL = 12 * PAGE  # tokens of each prompt that are whole pages
# Four answers, of which each fits into the quarter of the pool that is copied to host memory at a time
SMALL = ("--max-total-tokens", str(52 * PAGE), "--hicache-ratio", "1.5", "--max-running-requests", "1")
ERRORS = "tandem:worker_storage_errors_total"
LOST = "tandem:hicache_storage_lost_tokens_total"
SOON_S = 4.0
assert SOON_S < TIMEOUT_SECONDS
BOUNDED = 100  # times to ask until storage is believed in again
AHEAD = 500  # tokens of who has the only slot


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "pages"


@pytest.fixture
def disk(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DiskFaults]:
    made = disk_faults(folder, tmp_path, monkeypatch)
    yield made
    made.heal()


def flags(folder: Path, policy: str, **extra: float) -> list[str]:
    return [
        *("--enable-hierarchical-cache", "--hicache-storage-backend", "file", "--hicache-storage-dir", str(folder)),
        *("--hicache-storage-backend-extra-config", json.dumps({"prefetch_threshold": PAGE} | extra)),
        *("--hicache-storage-prefetch-policy", policy),
        *SMALL,
    ]


@contextmanager
def unified(folder: Path, policy: str, **extra: float) -> Iterator[Server]:
    with cluster(unified=True, flags=flags(folder, policy, **extra)) as running:
        assert running.unified is not None
        yield running.unified


def output_ids(answers: Sequence[dict]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


def ask_kept(server: Server, wanted: list[list[int]]) -> list[dict]:
    """One after the other, each when storage has been given what was computed: in small memory pages leave soon."""
    answers: list[dict] = []
    for prompt in wanted:
        answers += ask(server, [prompt])
        eventually(lambda: is_written(server), what=server.state)
    return answers


def ask_in_time(server: Server, wanted: list[list[int]]) -> list[dict]:
    """As by `ask`, and who waits for one answer of the disk as long as anybody may is too late for its deadline."""
    params = {"ignore_eos": True}
    return [server.generate(one, max_new_tokens=OUTPUT, sampling_params=params, timeout=SOON_S) for one in wanted]


def forget(*servers: Server) -> None:
    """Only storage has what was computed."""
    for server in servers:
        eventually(lambda server=server: server.is_idle() and is_written(server), what=server.state)
        with server.open("POST", "/flush_cache") as reply:
            assert reply.status == 200


def written(server: Server, salt: int) -> tuple[list[list[int]], list[dict]]:
    """Prompts and what is said to them, which only storage has now."""
    wanted = prompts(salt)
    first = ask_kept(server, wanted)
    assert from_storage(first) == [0] * len(wanted)
    assert_right(wanted, first)
    forget(server)
    return wanted, first


def until_hits(server: Server, prompt: list[int]) -> dict:
    """Asked again and again behind somebody else, who leaves when it waits: by `best_effort` nobody waits for storage
    alone, and by all policies a slow moment is held against storage for a while.
    """
    for _ in range(BOUNDED):
        forget(server)
        ahead = server.stream([3, 4], max_new_tokens=AHEAD, sampling_params={"ignore_eos": True})
        ahead.next()
        with asked(server, prompt) as answer:
            eventually(lambda answer=answer: answer.done() or (waits_for(server) and not num_prefetches(server)))
            ahead.close()
        if from_storage(answer.result()) == [ALL]:
            return answer.result()[0]
    raise AssertionError(f"no hit in {BOUNDED} times: {server.state()['costs']}")


def num_prefetches(server: Server) -> float:
    return server.metric("tandem:hicache_storage_prefetches")


def waits_for(server: Server) -> list[str]:
    """What requests wait for."""
    return [wait["waiting_for"] for wait in server.get("/debug/waits")]


def end_stall(disk: DiskFaults) -> None:
    """By an error: what has come after so long would be held against storage for many requests."""
    disk.fail(LOOK_UPS | READS)
    disk.stall(0)
    eventually(lambda: not disk.held)
    disk.heal()


def is_empty(server: Server) -> bool:
    """Nothing that only requests have, and nothing that copies have."""
    return server.is_idle() and is_written(server) and not server.state()["host_pages"]["owned"]


def no_temporary_files(folder: Path) -> bool:
    return not [path.name for path in folder.iterdir() if path.name.startswith(TEMPORARY)]


@contextmanager
def asked(server: Server, prompt: list[int]) -> Iterator["Future[list[dict]]"]:
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(ask, server, [prompt])


@pytest.mark.parametrize("policy", ["best_effort", pytest.param("timeout", marks=pytest.mark.slow)])
def test_a_disk_that_does_not_answer_holds_nobody_up_who_does_not_wait_for_it(
    folder: Path, disk: DiskFaults, policy: str
) -> None:
    with unified(folder, policy, prefetch_timeout_base=0.05) as server:
        wanted, first = written(server, 3)
        disk.stall(LOOK_UPS if policy == "best_effort" else READS)
        alone = ask_in_time(server, wanted[:1])
        eventually(lambda: disk.held)
        others = ask_in_time(server, wanted[1:])
        assert disk.held, "all have ended, and the disk has not answered yet"
        assert output_ids(alone + others) == output_ids(first)
        assert from_storage(alone + others) == [0] * 4
        eventually(lambda: num_prefetches(server) == 0)
        eventually(server.is_idle)
        end_stall(disk)
        disk.fail(LOOK_UPS | READS)
        forget(server)
        assert output_ids(ask(server, wanted)) == output_ids(first)
        eventually(lambda: server.metric(ERRORS) > 0)
        disk.heal()
        assert output_ids([until_hits(server, wanted[0])]) == output_ids(first[:1])
        eventually(lambda: is_empty(server), what=server.state)


@pytest.mark.slow
def test_who_waits_for_a_slow_disk_gets_its_pages_or_ends_by_deadline_or_leaves(folder: Path, disk: DiskFaults) -> None:
    with unified(folder, "wait_complete") as server:
        wanted, first = written(server, 4)
        disk.slow(0.001)
        assert output_ids(again := ask(server, wanted)) == output_ids(first)
        assert from_storage(again)[0] == ALL, "others may do without: to compute them has cost less"
        disk.heal()
        assert output_ids([until_hits(server, wanted[1])]) == output_ids(first[1:2])
        forget(server)

        disk.stall(READS)
        with pytest.raises(HttpError) as failed:
            server.generate(wanted[0], timeout=0.5)
        assert failed.value.error["code"] == "deadline_exceeded"
        assert failed.value.error["stage"] == "storage"
        assert disk.held
        eventually(server.is_idle)
        end_stall(disk)
        forget(server)

        disk.stall(READS)
        leaving = server.open_stream(wanted[1])
        eventually(lambda: disk.held and waits_for(server) == ["storage"], what=lambda: waits_for(server))
        leaving.close()
        eventually(server.is_idle)
        assert disk.held, "it has left before the disk has answered"
        assert num_prefetches(server) == 0
        end_stall(disk)
        forget(server)

        disk.stall(READS)
        with asked(server, wanted[2]) as answer:
            eventually(lambda: disk.held and waits_for(server) == ["storage"], what=lambda: waits_for(server))
            disk.heal()
            assert from_storage(answer.result()) == [ALL]
            assert output_ids(answer.result()) == output_ids(first[2:3])
        eventually(lambda: is_empty(server), what=server.state)


@pytest.mark.slow
def test_a_disk_that_never_answers_is_waited_for_once_and_not_by_who_ends(folder: Path, disk: DiskFaults) -> None:
    """Five seconds for one answer, by every policy; then nothing new is asked of it."""
    with unified(folder, "wait_complete") as server:
        wanted, first = written(server, 5)
        new = prompts(6)
        disk.stall(READS | WRITES)
        assert output_ids(late := ask(server, wanted[:1])) == output_ids(first[:1])
        assert disk.held
        assert output_ids(others := ask(server, wanted[1:])) == output_ids(first[1:])
        assert from_storage(late + others) == [0] * 4
        assert_right(new, ask(server, new))
        assert [act for act in server.state()["storage"].values() if act != "write"] == ["fetch"]
        eventually(server.is_idle)
        server.member.process.terminate()
        eventually(lambda: server.member.process.poll() is not None)
        assert server.member.process.returncode == 0
        assert disk.held


def test_a_full_disk_costs_hits_and_when_there_is_room_again_pages_are_written(folder: Path, disk: DiskFaults) -> None:
    with unified(folder, "wait_complete") as server:
        ask_kept(server, prompts(7)[:1])
        (page_bytes,) = {path.stat().st_size for path in pages_of(folder)}
        lost, num_pages = server.metric(LOST), len(pages_of(folder))
        disk.fill(room=2 * page_bytes + page_bytes // 2)
        wanted = prompts(8)
        first = ask_kept(server, wanted)
        assert_right(wanted, first)
        eventually(lambda: is_empty(server), what=server.state)
        assert server.metric(ERRORS) >= len(wanted)
        assert server.metric(LOST) - lost >= len(wanted) * ALL - 2 * PAGE
        assert len(pages_of(folder)) == num_pages + 2
        assert no_temporary_files(folder)
        assert "storage: OSError: No space left on device" in server.log
        disk.heal()
        for calls in (CREATES, RENAMES):  # no room for another name
            errors = server.metric(ERRORS)
            disk.fail(calls, errno.ENOSPC)
            forget(server)
            assert output_ids(ask_kept(server, wanted)) == output_ids(first)
            eventually(lambda: is_empty(server), what=server.state)
            assert server.metric(ERRORS) > errors
        assert len(pages_of(folder)) == num_pages + 2
        assert no_temporary_files(folder)
        disk.heal()
        forget(server)
        assert output_ids(ask_kept(server, wanted)) == output_ids(first)
        eventually(lambda: is_empty(server), what=server.state)
    with unified(folder, "wait_complete") as server:
        again = ask(server, wanted)
        assert from_storage(again) == [ALL] * 4
        assert output_ids(again) == output_ids(first)


@pytest.mark.slow
def test_a_server_whose_folder_is_new_and_on_a_full_disk_says_so_and_ends(folder: Path, disk: DiskFaults) -> None:
    disk.fill()
    with pytest.raises(CommandFailed) as failed, unified(folder, "timeout"):
        raise AssertionError("it has started")
    assert f"no storage of pages in {folder}: " in str(failed.value)
    assert "No space left on device" in str(failed.value)
    assert no_temporary_files(folder)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["best_effort", "timeout", "wait_complete"])
def test_a_pair_says_the_same_from_a_disk_that_stalls_and_one_that_is_full(
    folder: Path, disk: DiskFaults, policy: str
) -> None:
    with cluster(prefills=1, decodes=1, flags=flags(folder, policy, prefetch_timeout_base=0.05)) as running:
        router, servers = running.router, running.servers
        assert router is not None
        wanted, new = prompts(9), prompts(10)
        first = ask(router, wanted)
        assert_right(wanted, first)
        forget(*servers)

        disk.stall(READS)
        with asked(router, wanted[0]) as answer:
            if policy == "wait_complete":
                eventually(lambda: disk.held, what=lambda: [waits_for(server) for server in servers])
                assert not answer.done()
                end_stall(disk)
        assert output_ids(answer.result()) == output_ids(first[:1])
        end_stall(disk)
        forget(*servers)

        disk.fill()
        assert_right(new, ask(router, new))
        eventually(lambda: all(map(is_empty, servers)), what=lambda: [server.state() for server in servers])
        for server in servers:
            assert server.metric(LOST) >= ALL
            assert server.metric(ERRORS) > 0
        assert no_temporary_files(folder)
