"""Whole clusters in one process: seeds that pass, the same hash everywhere, and what the virtual machine promises."""

import gc
import json
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

import tandem
from seeded_bugs import MUTANTS
from tandem.cli.main import main
from tandem.core.values import SECOND
from tandem.server.api.connections import ConnectionBounds
from tandem.simulator.hunt import run_each
from tandem.simulator.oracle import Violation
from tandem.simulator.report import SeedResult
from tandem.simulator.whole import engine, verdict
from tandem.simulator.whole.clients import Answer, ClientRequest, Conduct
from tandem.simulator.whole.kernel import START_NS, Deadlock, Kernel
from tandem.simulator.whole.network import Network
from tandem.simulator.whole.node_checks import LettingGo
from tandem.simulator.whole.options import draw_options
from tandem.simulator.whole.transfer_checks import CheckedTransfer
from tandem.simulator.whole.virtual_process import Programs, virtual_machine
from tandem.simulator.whole.world import World, run_seed
from tandem.transfer.sock import SockTransfer

CORPUS = [
    int(line.split()[0]) for line in Path(__file__).with_name("whole_corpus.txt").read_text().splitlines() if line
]
STEPS_SEED = 58
CROWDED_SEED = 10_121  # a router that has few requests under way at most, and no faults
HASH_SEEDS = (2, 74)  # one unified server; pairs behind a router, with operators


@pytest.fixture(scope="module")
def results() -> dict[int, SeedResult]:
    """Of the corpus, from processes that hash in another way than this one."""
    return {result.seed: result for result in run_each(CORPUS, run_seed, are_long=True)}


@pytest.mark.parametrize("seed", CORPUS)
def test_every_request_of_a_whole_cluster_ends_as_promised(results: dict[int, SeedResult], seed: int) -> None:
    result = results[seed]
    assert not result.invariant, f"{result.line}: {result.detail}"
    assert result.num_finished > 0


def test_the_same_seed_gives_the_same_bytes_whatever_the_hashes_of_this_process_and_wherever_the_code_is(
    results: dict[int, SeedResult], tmp_path: Path
) -> None:
    (tmp_path / "tandem").symlink_to(Path(tandem.__file__).parent)
    script = (
        f"from tandem.simulator.whole.world import run_seed\nprint(*(run_seed(seed).log_hash for seed in {HASH_SEEDS}))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    again = [results[seed].log_hash for seed in HASH_SEEDS]  # which ran in another order, behind other seeds
    assert run.stdout == " ".join(again) + "\n"
    assert len(set(again)) == len(HASH_SEEDS)


def test_the_command_prints_what_it_prints_without_whole(
    results: dict[int, SeedResult], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--whole", "--seed", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["violations"] == []
    assert document["log_hash"] == results[2].log_hash
    assert document["requests"] > 0


@pytest.mark.parametrize("other", ["--shrink", "--coverage", "--until"])
def test_what_whole_would_ignore_is_refused(other: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [other, "4s"] if other == "--until" else [other]
    assert main(["simulate", "--whole", "--seed", "2", *words]) == 2
    assert "--whole" in capsys.readouterr().err


def test_a_wrong_token_and_a_request_without_an_end_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    content = engine.kv_content
    seen: list[int] = []

    def wrong_once(*, sum_before: int, token: int, position: int) -> int:
        seen.append(position)
        return content(sum_before=sum_before, token=token, position=position) ^ (len(seen) == 40)

    monkeypatch.setattr(engine, "kv_content", wrong_once)
    assert run_seed(2).invariant == "S14"


@pytest.mark.parametrize(
    "name",
    [
        "count_of_pages_drifts",
        "result_slot_leaks_at_the_end",
        "batch_number_is_skipped",
        "sent_request_keeps_its_place",
    ],
)
def test_a_node_that_takes_a_wrong_step_is_noticed_by_the_checkers_of_steps(name: str) -> None:
    mutant = MUTANTS[name]
    with mutant.breaks():
        assert run_seed(STEPS_SEED).invariant == mutant.killed_by[0]


def test_a_router_that_is_full_refuses_and_one_that_stays_full_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_seed(CROWDED_SEED, watches=True)
    assert (result.invariant, result.occurred["code busy"] > 0) == ("", True), result.detail
    was_full = ConnectionBounds.is_full.fget
    assert was_full is not None
    monkeypatch.setattr(ConnectionBounds, "is_full", property(lambda it: bool(it.num_refused) or was_full(it)))
    assert run_seed(CROWDED_SEED).invariant == "liveness"


def test_who_ended_and_whose_pages_are_not_let_go_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SockTransfer, "_flush_later", lambda transfer: None)
    monkeypatch.setattr(
        CheckedTransfer, "_look_at_reports", lambda transfer: None
    )  # which would be the first to see it
    assert run_seed(STEPS_SEED).invariant == LettingGo.id


def test_an_answer_that_is_late_or_unknown_is_noticed() -> None:
    ask = ClientRequest(1, "/generate", (20, 21), "", 4, True, True, 3.0, Conduct.PATIENT)
    late = Answer(ask, 0, status=200, first_s=5.0, ended_s=5.1, is_whole=True)
    with pytest.raises(Violation, match="L1"):
        verdict._check_time(late, "late")
    with pytest.raises(Violation, match="no code"):
        verdict._check_error(late, {"code": "whatever"}, "unknown")


# --- the virtual machine ---------------------------------------------------------------------------------------------


def simulated(*programs: Callable[[], object], seed: int = 1, until_s: float = 100.0) -> Kernel:
    """Run these as processes of one machine, until all have ended."""
    kernel = Kernel(seed)
    with virtual_machine(kernel, Network(kernel, Random(seed)), Programs({})):
        started = [kernel.start(f"p{n}", run, host="127.0.0.1") for n, run in enumerate(programs)]  # type: ignore[arg-type]
        kernel.at(START_NS + int(until_s * SECOND) - 1, lambda: None)
        kernel.run(START_NS + int(until_s * SECOND))
        for process in started:
            if process.error is not None:
                raise process.error
    return kernel


def test_time_and_names_are_virtual_inside_and_real_again_outside() -> None:
    names = (time.monotonic, socket.socket, threading.Lock, os.urandom, subprocess.Popen, gc.freeze)
    seen: list[object] = []

    def program() -> None:
        before = time.monotonic()
        time.sleep(3600)
        seen.extend([round(time.monotonic() - before), time.gmtime(time.time()).tm_year, os.urandom(4), os.getppid()])

    real = time.monotonic()
    simulated(program, until_s=4000)
    simulated(program, until_s=4000)
    assert time.monotonic() - real < 60
    assert seen[:4] == seen[4:]
    assert seen[:2] == [3600, 2027]
    assert names == (time.monotonic, socket.socket, threading.Lock, os.urandom, subprocess.Popen, gc.freeze)


def test_bytes_arrive_in_order_however_they_are_cut_and_a_slow_reader_slows_the_writer() -> None:
    data = bytes(Random(5).randbytes(1 << 20))
    received = bytearray()
    written: list[float] = []

    def server() -> None:
        listener = socket.create_server(("127.0.0.1", 7000))
        sock, _ = listener.accept()
        while piece := sock.recv(30_000):
            received.extend(piece)
            time.sleep(0.1)

    def client() -> None:
        time.sleep(1)
        with socket.create_connection(("127.0.0.1", 7000)) as sock:
            began = time.monotonic()
            sock.sendall(data)
            written.append(time.monotonic() - began)

    simulated(server, client)
    assert received == data
    assert written[0] > 2.0  # 1 MB at 300 kB/s, less what fits on the way


def test_a_killed_process_resets_its_connections_and_a_frozen_one_keeps_them() -> None:
    heard: list[object] = []

    def server() -> None:
        listener = socket.create_server(("127.0.0.1", 7000))
        sock, _ = listener.accept()
        time.sleep(50)
        sock.recv(1)

    kernel = Kernel(3)

    def client() -> None:
        time.sleep(1)
        sock = socket.create_connection(("127.0.0.1", 7000))
        sock.sendall(b"x")
        kernel.freeze(kernel.processes[0])
        sock.settimeout(5)
        try:
            sock.recv(1)
        except TimeoutError:
            heard.append("silence")
        kernel.kill(kernel.processes[0])
        try:
            heard.append(sock.recv(1))
        except ConnectionResetError:
            heard.append("reset")

    with virtual_machine(kernel, Network(kernel, Random(3)), Programs({})):
        kernel.start("server", server, host="127.0.0.1")
        kernel.start("client", client, host="127.0.0.1")
        kernel.run(START_NS + 60 * SECOND)
    assert heard == ["silence", "reset"]


def test_two_threads_that_wait_for_each_others_lock_wait_for_ever() -> None:
    def program() -> None:
        locks = threading.Lock(), threading.Lock()

        def take(first: int) -> None:
            with locks[first]:
                time.sleep(1)
                locks[1 - first].acquire()

        other = threading.Thread(target=take, args=(1,))
        other.start()
        take(0)

    kernel = Kernel(1)
    with virtual_machine(kernel, Network(kernel, Random(1)), Programs({})):
        process = kernel.start("stuck", program, host="127.0.0.1")
        kernel.run(START_NS + 60 * SECOND)
        assert process.is_alive
        assert len(process.threads) == 2


def test_a_process_without_descriptors_cannot_open_any_more() -> None:
    found: list[int | None] = []

    def program() -> None:
        socks = [socket.socket() for _ in range(3)]
        try:
            socket.socket()
        except OSError as error:
            found.append(error.errno)
        socks.pop().close()
        socket.socket()

    kernel = Kernel(1)
    with virtual_machine(kernel, Network(kernel, Random(1)), Programs({})):
        process = kernel.start("poor", program, host="127.0.0.1", max_fds=3)
        kernel.run(START_NS + SECOND)
        assert process.error is None
    assert found == [24]


def test_a_selector_finds_what_is_registered_by_its_object_and_by_its_number() -> None:
    def program() -> None:
        selector = selectors.DefaultSelector()
        with socket.socket() as sock, socket.socket() as other:
            key = selector.register(sock, selectors.EVENT_READ)
            there = selector.get_map()
            assert [there.get(it) for it in (sock, sock.fileno(), other)] == [key, key, None]
            assert (list(there), len(there)) == ([sock.fileno()], 1)

    simulated(program)


def test_a_thread_that_goes_round_and_round_without_any_time_passing_is_noticed() -> None:
    kernel = Kernel(1)

    def program() -> None:
        while True:
            kernel.block(kernel.now)

    kernel.start("spins", program, host="127.0.0.1")
    with pytest.raises(Deadlock, match="spins"):
        kernel.run(START_NS + 10 * SECOND)


def test_who_gives_up_waiting_for_a_condition_takes_nobody_elses_place() -> None:
    heard: list[tuple[str, bool]] = []

    def program() -> None:
        condition = threading.Condition()

        def wait(name: str, timeout: float | None) -> None:
            with condition:
                heard.append((name, condition.wait(timeout)))

        for name, timeout in (("patient", None), ("hasty", 1.0)):
            threading.Thread(target=wait, args=(name, timeout)).start()
            time.sleep(0.1)
        time.sleep(5)
        with condition:
            condition.notify()
        time.sleep(1)

    simulated(program)
    assert heard == [("hasty", False), ("patient", True)]


def test_a_thread_finds_itself() -> None:
    found: list[bool] = []

    def program() -> None:
        def look() -> None:
            found.append(threading.current_thread() is thread)

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()

    simulated(program)
    assert found == [True]


def test_who_dials_hears_of_the_connection_before_its_first_byte() -> None:
    found: list[int] = []

    def server() -> None:
        listener = socket.create_server(("127.0.0.1", 7000))
        while True:
            sock, _ = listener.accept()
            sock.sendall(b"hello")

    def client() -> None:
        time.sleep(1)
        for _ in range(50):
            with socket.socket() as sock, selectors.DefaultSelector() as selector:
                sock.setblocking(False)
                sock.connect_ex(("127.0.0.1", 7000))
                selector.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE)
                selector.select()
                found.append(sock.send(b"x"))

    simulated(server, client)
    assert found == [1] * 50


@pytest.mark.parametrize("waits", [False, True])
def test_who_asks_without_waiting_for_ever_is_noticed(*, waits: bool) -> None:
    def program() -> None:
        ours, _theirs = socket.socketpair()
        ours.setblocking(waits)
        for _ in range(100_000):
            with suppress(BlockingIOError):
                ours.recv(1)

    kernel = Kernel(1)
    with virtual_machine(kernel, Network(kernel, Random(1)), Programs({})):
        kernel.start("asks", program, host="127.0.0.1")
        if waits:
            kernel.run(START_NS + SECOND)
        else:
            with pytest.raises(Deadlock, match="waits for nothing"):
                kernel.run(START_NS + SECOND)


def test_a_lock_is_released_by_who_holds_it_only() -> None:
    def program() -> None:
        threading.Lock().release()

    with pytest.raises(RuntimeError, match="unlocked"):
        simulated(program)


def test_a_socket_that_is_forgotten_and_not_closed_is_noted() -> None:
    kernel = Kernel(1)

    def program() -> None:
        kept = socket.socket()
        socket.socket().close()
        kernel.start_thread(kernel.current().process, "forgets", lambda: socket.socket().settimeout(1))
        time.sleep(1)
        kept.close()

    with virtual_machine(kernel, Network(kernel, Random(1)), Programs({})):
        kernel.start("forgetful", program, host="127.0.0.1")
        kernel.run(START_NS + 10 * SECOND)
    assert len(kernel.lost) == 1


def test_a_pull_that_is_late_for_no_reason_and_scores_that_are_not_those_of_the_tokens_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where its servers have their files
    world = World(draw_options(2))
    ask = ClientRequest(1, "/generate", (20, 21), "", 2, True, True, 20.0, Conduct.PATIENT, scores=1)
    error = {"code": "deadline_exceeded", "stage": verdict.LANDING}
    late = Answer(
        ask, 0, status=504, ended_s=20.0, body=bytearray(json.dumps({"error": error}).encode()), is_whole=True
    )
    with pytest.raises(Violation, match="held it up"):
        verdict.check(late, world.faults)
    said = {"output_ids": [20, 21], "meta_info": {"output_token_logprobs": [[-0.5, 20, None], [None, 21, None]]}}
    with pytest.raises(Violation, match="scores"):
        verdict._check_scores(said, [(20, -0.5), (21, -0.5)], "scores")
