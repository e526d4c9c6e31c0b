"""What `tandem doctor` makes of a machine: a line each, with what to do, and the exit code."""

import json
import resource
import socket
import sys
from pathlib import Path

import pytest

import tandem.engine
from tandem.cli import doctor
from tandem.cli import main as cli
from tandem.cli.doctor import BAD, NOTE, OK, Finding
from tandem.engine.native import library


def test_what_only_could_be_better_is_a_note_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))
    monkeypatch.setenv(library.SWITCH, library.OFF)
    *_, kernels = doctor.engine()
    for found, remedy in (
        (doctor.processor(1, "avx2"), "1 core; avx2: prefill and decode share it"),
        (doctor.memory(1 << 30), "1.0 GiB for this process: little; give --max-total-tokens"),
        (doctor.open_files(), "ulimit -n 1024"),
        (kernels, "TANDEM_NATIVE=off in the environment"),
    ):
        assert found.level == NOTE
        assert remedy in found.text


@pytest.mark.parametrize(("named", "reason"), [("foo", "is unknown"), ("amx_bf16", "is not built, or not for this")])
def test_kernels_that_are_named_and_not_there_are_bad(monkeypatch: pytest.MonkeyPatch, named: str, reason: str) -> None:
    monkeypatch.setattr(library, "available", lambda: ("avx2",))
    monkeypatch.setenv(library.SWITCH, named)
    *_, kernels = doctor.engine()
    assert kernels.level == BAD
    assert kernels.text.startswith(f"TANDEM_NATIVE={named!r} in the environment {reason}")
    assert kernels.text.endswith("here there are avx2, off")


def test_a_port_that_is_taken_is_named_with_the_command_that_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        monkeypatch.setitem(doctor.PORTS, number, "tandem up")
        assert doctor.port(number) == Finding(
            NOTE, f"port {number}", "Address already in use: give tandem up another --port"
        )
    assert doctor.port(number).level == OK


def test_without_torch_or_with_a_bad_secret_no_pair_is_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "pair", lambda model: pytest.fail("it cannot work"))
    for name in ("tandem.engine.machine_report", "tandem.engine.machine_memory", "torch"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delattr(tandem.engine, "machine_report", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    (tmp_path / "tandem").mkdir()
    (tmp_path / "tandem" / "cluster-secret").touch(mode=0o600)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert cli.run_command("doctor", ["--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    bad = [found["name"] for found in document["findings"] if found["level"] == BAD]
    assert (document["ok"], bad) == (False, ["torch", "secret"])


def test_a_user_without_a_place_for_the_secret_is_told_who_needs_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    found = doctor.secret()
    assert found.level == NOTE
    assert "--cluster-secret-file" in found.text


def test_a_model_that_cannot_be_served_is_bad_and_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "pair", lambda model: pytest.fail("it cannot work"))
    assert cli.run_command("doctor", ["/does/not/exist"]) == 1
    *_, model, last = capsys.readouterr().out.splitlines()
    assert model.startswith("bad   model       model directory /does/not/exist does not exist; give")
    assert last == "1 to mend, see the lines that begin with bad"
