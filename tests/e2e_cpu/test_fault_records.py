"""A fault of ours leaves a record that nobody asked for, and `tandem replay` decides it again.

Every server here is started without a flag that has to do with records.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from cluster import HttpError, Server, child_named, children_of, cluster, eventually, is_running
from safetensors.numpy import load_file, save_file

import tandem
from tandem.cli.main import main

PROMPT = "Tom has 3 apples and buys 4 more. How many apples does he have?"
BUNDLED = Path(tandem.__file__).parent / "bundled" / "mini"
FLAGS = ["--max-total-tokens", "8192"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where servers that start from here on write what they did last."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "tandem" / "faults"


@contextmanager
def alone(*flags: str, model: str = "tandem/mini") -> Iterator[Server]:
    with cluster(unified=True, model=model, flags=[*FLAGS, *flags]) as it:
        assert it.unified is not None
        yield it.unified


def record_of(folder: Path, machine: str) -> Path:
    def found() -> list[Path]:
        return sorted(folder.glob(f"fault-{machine}-*.tandem"))

    eventually(found, what=lambda: list(folder.parent.rglob("*")))
    return found()[-1]


def check_replays(record: Path, server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    eventually(lambda: f"tandem replay {record}" in server.log, what=lambda: server.log)
    assert main(["replay", str(record)]) == 0
    said = capsys.readouterr().out
    assert "identical" in said
    assert not said.startswith(f"{record}: 0 steps")


def has_ended(server: Server) -> bool:
    return server.member.process.poll() is not None


@pytest.mark.slow
def test_a_node_that_loses_its_worker_leaves_a_record(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with alone() as server:
        server.generate(PROMPT)
        assert not folder.exists()
        os.kill(child_named(server.member.process.pid, "worker_process"), signal.SIGKILL)
        eventually(lambda: has_ended(server))
        for machine in ("node", "edge"):
            check_replays(record_of(folder, machine), server, capsys)


@pytest.mark.slow
def test_a_node_that_hangs_leaves_a_record(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with alone("--watchdog-timeout", "2") as server:
        server.generate(PROMPT)
        os.kill(child_named(server.member.process.pid, "node.process"), signal.SIGSTOP)
        eventually(lambda: has_ended(server), within_s=60)
        assert "the node process hangs" in server.log
        for machine in ("node", "edge"):
            check_replays(record_of(folder, machine), server, capsys)


HANGS_ON_SIGNAL = """
import signal, sys, time
if "serve" in sys.orig_argv:
    signal.signal(signal.SIGUSR2, lambda *_: time.sleep(3600))
"""


@pytest.mark.slow
def test_an_api_process_whose_loop_hangs_ends_with_the_cause_and_leaves_a_record(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Signals are handled in the thread of the loop, which then has no turn."""
    (tmp_path / "sitecustomize.py").write_text(HANGS_ON_SIGNAL)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with alone("--watchdog-timeout", "2") as server:
        server.generate(PROMPT)
        process = server.member.process
        children = children_of(process.pid)
        os.kill(process.pid, signal.SIGUSR2)
        eventually(lambda: has_ended(server), within_s=60)
        assert process.returncode == 1
        assert "the API process hangs: no turn of its event loop for 2 s" in server.log
        eventually(lambda: not any(map(is_running, children)))
        check_replays(record_of(folder, "edge"), server, capsys)


@pytest.fixture(scope="module")
def without_numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose logits are no numbers."""
    model = tmp_path_factory.mktemp("model") / "mini"
    shutil.copytree(BUNDLED, model)
    for path in model.glob("*.safetensors"):
        tensors = load_file(path)
        save_file({name: broken(name, tensor) for name, tensor in tensors.items()}, path)
    return model


def broken(name: str, tensor: np.ndarray) -> np.ndarray:
    return np.full_like(tensor, np.nan) if name == "model.norm.weight" else tensor


def test_a_request_that_ends_with_a_cause_of_ours_leaves_a_record_while_the_server_goes_on(
    folder: Path, without_numbers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with alone(model=str(without_numbers)) as server:
        with pytest.raises(HttpError) as failed:
            server.generate(PROMPT)
        assert failed.value.error["code"] == "invalid_logits"
        for machine in ("node", "edge"):
            check_replays(record_of(folder, machine), server, capsys)
        assert server.is_ready()


def test_a_request_that_ends_so_in_a_pair_is_on_record_with_its_router_too(
    folder: Path, without_numbers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with cluster(prefills=1, decodes=1, model=str(without_numbers), flags=FLAGS) as it:
        assert it.router is not None
        with pytest.raises(HttpError) as failed:
            it.router.generate(PROMPT)
        assert failed.value.status == 500
        check_replays(record_of(folder, "router"), it.router, capsys)
        assert main(["replay", str(folder)]) == 0  # and all others, of both halves
        assert PROMPT.encode() not in b"".join(path.read_bytes() for path in folder.iterdir())


@pytest.mark.slow
def test_servers_that_end_as_they_are_told_leave_nothing(folder: Path) -> None:
    with cluster(prefills=1, decodes=1, flags=FLAGS) as it:
        assert it.router is not None
        it.router.generate(PROMPT)
        with pytest.raises(HttpError) as refused:
            it.router.generate(PROMPT * 10_000)
        assert refused.value.status in (400, 413)
        assert it.fleet.stop()
    assert not folder.exists()


@pytest.mark.slow
def test_a_flag_that_does_not_fit_the_model_is_no_fault_of_ours(folder: Path) -> None:
    words = ["serve", "tandem/mini", "--port", "0", "--swa-full-tokens-ratio", "0.5"]
    done = subprocess.run([sys.executable, "-m", "tandem.cli.main", *words], capture_output=True, text=True, timeout=60)
    assert done.returncode in (1, 2)
    assert "--swa-full-tokens-ratio" in done.stderr
    assert not folder.exists()
