"""How commands end whatever they are given, and however the other end goes: a line and a code, no traceback."""

import argparse
import errno
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raw_http import Handler, handling
from tandem.cli import chat, demo, doctor, serve
from tandem.cli import main as cli
from tandem.cli.failure import CommandFailed
from tandem.cli.fleet import secret_flags, temporary_fleet
from tandem.cli.gguf_source import directory_of
from tandem.membership import read_secret

TANDEM = [sys.executable, "-m", "tandem.cli.main"]


@contextmanager
def breaks_off(said: bytes) -> Iterator[Any]:
    """A server that says this of a body in chunks, and goes away. It keeps the heads of requests."""
    heads: list[Message] = []

    class BreaksOff(Handler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            heads.append(self.headers)
            self.read_body()
            self.send_response(200)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            self.wfile.write(said)
            self.close_connection = True

    with handling(BreaksOff) as port:
        yield SimpleNamespace(name="decode-0", port=port, heads=heads)


@pytest.mark.parametrize("said", [b"", b"5\r\nda", b"8\r\ndata: {\n\r\n0\r\n\r\n", b"0\r\n\r\n"])
def test_an_answer_that_breaks_off_is_told_with_who_it_was(said: bytes) -> None:
    with breaks_off(said) as server, pytest.raises(CommandFailed, match="decode-0"):
        demo.ask(server, [1], demo.Screen(is_quiet=True))


def test_a_pair_whose_key_is_in_the_environment_is_told_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_API_KEY", "first\nsecond\n")
    with breaks_off(b"0\r\n\r\n") as server:
        demo.post(server, "/generate", {}).read()
        assert server.heads[-1]["authorization"] == "Bearer first"
        monkeypatch.delenv("TANDEM_API_KEY")
        demo.post(server, "/generate", {}).read()
        assert "authorization" not in server.heads[-1]


def test_what_the_system_refuses_a_pair_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(doctor, "temporary_fleet", full)
    found = doctor.pair("tandem/mini")
    assert (found.level, "No space left" in found.text) == (doctor.BAD, True)


def test_where_no_file_can_be_written_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(**_: object) -> str:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with (
        pytest.raises(CommandFailed, match=r"\(Read-only file system\); have TMPDIR name"),
        temporary_fleet("x", engines=1),
    ):
        pass
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(CommandFailed, match="Not a directory; have XDG_CACHE_HOME name"):
        directory_of(tmp_path / "file")


def test_where_loopback_is_down_nothing_is_started_and_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))

    monkeypatch.setattr(socket, "create_connection", unreachable)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with (
        pytest.raises(CommandFailed, match=r"127.0.0.1 cannot be reached \(Network is unreachable\)"),
        temporary_fleet("x", engines=1),
    ):
        pass
    assert not list(tmp_path.iterdir()), "no folder without logs is left"


@pytest.mark.parametrize("stream", ["stdin", "stdout", "stderr"])
def test_a_command_without_a_standard_stream_does_its_work(stream: str) -> None:
    close = {"stdin": "<&-", "stdout": ">&-", "stderr": "2>&-"}[stream]
    line = f'exec "$@" {close}'
    words = ["simulate", "--seed", "1", "--seeds", "1", "--until", "0.01s"]
    done = subprocess.run(["sh", "-c", line, "sh", *TANDEM, *words], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0
    assert b"Traceback" not in done.stderr


def test_without_asserts_no_command_runs() -> None:
    """A simulation would find nothing then, and a server go on where it must not."""
    words = [*TANDEM, "simulate", "--seed", "1", "--seeds", "1", "--until", "0.01s"]
    environment = {**os.environ, "PYTHONOPTIMIZE": "1"}
    done = subprocess.run(words, capture_output=True, timeout=60, check=False, env=environment)
    assert done.returncode == 2
    assert b"PYTHONOPTIMIZE" in done.stderr


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_is_none_is_wrong_usage_of_up(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["up", "--port", str(port)]) == 2
    assert capsys.readouterr().err == "tandem: error: --port takes 0 to 65535\n"


@pytest.mark.parametrize(
    "words", ["serve tandem/mini --port 0", "router --port 0 --prefill http://127.0.0.1:1 --decode http://127.0.0.1:2"]
)
def test_a_folder_of_fault_records_that_takes_no_file_is_told_at_the_start(words: str, tmp_path: Path) -> None:
    (folder := tmp_path / "file").write_text("")
    command = [*TANDEM, *words.split(), "--fault-records", str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"tandem: error: --fault-records {folder} takes no file: Not a directory")


def test_text_that_is_none_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(chat, "run", lambda args: "\ud800".encode())
    assert cli.run_command("chat", []) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tandem: error: text that cannot be read or written (")


def test_control_c_leaves_a_chat_whose_questions_come_from_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def ask(question: str, show: object) -> object:
        asked.append(question)
        return argparse.Namespace(was_stopped=True)

    monkeypatch.setattr(sys, "stdin", ["one\n", "two\n"])
    with pytest.raises(KeyboardInterrupt):
        chat.answer_lines(SimpleNamespace(ask=ask))  # type: ignore[arg-type]  # it has what is asked of it
    assert asked == ["one"]


def test_a_signal_at_the_start_ends_a_server_whose_log_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended(BaseException):
        pass

    def ended(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(os, "_exit", ended)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        with pytest.raises(Ended, match="1"):
            serve.end_at_once(signal.SIGTERM, None)


def test_a_pair_of_a_user_who_has_no_place_for_a_secret_has_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert secret_flags(tmp_path) == ["--cluster-secret-file", str(tmp_path / "cluster-secret")]
    read_secret(tmp_path / "cluster-secret")


def test_a_pair_has_the_secret_of_its_user_where_there_is_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert secret_flags(tmp_path) == []
    (tmp_path / "state" / "tandem" / "cluster-secret").write_text("too short")
    assert secret_flags(tmp_path) == []  # and a server says what is wrong with it


@pytest.mark.parametrize("words", [["--version"], ["--help"], [], ["serve", "--help"]])
def test_a_text_that_cannot_be_written_is_told_in_a_line(words: list[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*TANDEM, *words], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False, env=environment
        )
    assert (done.returncode, done.stderr) == (1, "tandem: error: [Errno 28] No space left on device\n")


def test_a_command_ends_whose_error_nobody_reads() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with open(reading), open(writing, "wb", buffering=0) as full:
        while full.write(bytes(1 << 16)):
            pass
        os.set_blocking(writing, True)
        words = [*TANDEM, "bench", "--num-prompts", "1", "--url", "http://127.0.0.1:1"]
        assert subprocess.run(words, stderr=full, timeout=60, check=False).returncode == 1
