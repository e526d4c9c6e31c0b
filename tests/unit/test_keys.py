"""API keys: from a flag, a file or the environment; never shown, and compared whole."""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from tandem.cli import main as cli
from tandem.config import ServerConfig, public_settings
from tandem.core.router.worker_registry import RegisteredWorker
from tandem.core.settings import Role
from tandem.server.exposure import open_to_others
from tandem.server.keys import ENVIRONMENT, MAX_FILE_BYTES, KeyProblem, KeyRing, forget_environment, with_keys
from tandem.server.processes import Launch, ServerFailure
from tandem.server.router.config import RouterConfig, make_worker

SECRET = "s3cret-that-nobody-sees"


def key_file(folder: Path, text: str | bytes, mode: int = 0o600) -> str:
    path = folder / "keys"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(mode)
    return str(path)


def keys_of(config: ServerConfig, environment: Mapping[str, str] | None = None) -> list[str]:
    return (with_keys(config, environment or {}).api_key or "").splitlines()


def test_debug_pages_are_opened_to_a_network_only_with_a_key(tmp_path: Path) -> None:
    config = ServerConfig(model="m", debug_host=("10.1.0.0/16",))
    with pytest.raises(KeyProblem, match="--debug-host needs an admin key"):
        with_keys(config, {})
    assert with_keys(config, {"TANDEM_ADMIN_API_KEY": "boss"}).debug_host


def test_a_file_has_one_key_per_line_and_comments(tmp_path: Path) -> None:
    path = key_file(tmp_path, "# of the web front\none\n\n   two \r\n#three\nfour#five\n")
    made = with_keys(ServerConfig(model="m", api_key_file=path, admin_api_key_file=path), {})
    assert made.api_key == made.admin_api_key == "one\ntwo\nfour#five"
    assert made.api_key_file is made.admin_api_key_file is None


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o606, 0o602, 0o666, 0o777])
def test_a_file_that_every_user_can_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = key_file(tmp_path, SECRET, mode)
    with pytest.raises(KeyProblem, match="chmod o=") as problem:
        keys_of(ServerConfig(model="m", api_key_file=path))
    assert SECRET not in str(problem.value)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o440, 0o640, 0o660])
def test_a_file_that_only_a_group_can_read_is_taken(tmp_path: Path, mode: int) -> None:
    assert keys_of(ServerConfig(model="m", api_key_file=key_file(tmp_path, "k", mode))) == ["k"]


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ("", "holds no key"),
        ("# nothing\n\n", "holds no key"),
        (f"{SECRET} {SECRET}", "no header can carry"),
        (f"{SECRET}\x01", "no header can carry"),
        (f"{SECRET}ü", "no header can carry"),
        (f"{SECRET}\xff".encode("latin-1"), "no header can carry"),
        ("k" * MAX_FILE_BYTES + "\nk", "more than"),
    ],
)
def test_a_file_that_holds_no_keys_is_refused_without_showing_it(
    tmp_path: Path, content: str | bytes, cause: str
) -> None:
    with pytest.raises(KeyProblem, match=cause) as problem:
        keys_of(ServerConfig(model="m", api_key_file=key_file(tmp_path, content)))
    assert SECRET not in str(problem.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(KeyProblem, match="cannot read the keys in"):
            keys_of(ServerConfig(model="m", admin_api_key_file=str(path)))


def test_a_flag_wins_over_the_environment_and_excludes_a_file(tmp_path: Path) -> None:
    path = key_file(tmp_path, "filed")
    environment = {"TANDEM_API_KEY": " around \nsecond", "TANDEM_ADMIN_API_KEY": ""}
    assert keys_of(ServerConfig(model="m"), environment) == ["around", "second"]
    assert keys_of(ServerConfig(model="m", api_key="given"), environment) == ["given"]
    assert keys_of(ServerConfig(model="m", api_key_file=path), environment) == ["filed"]
    assert with_keys(ServerConfig(model="m"), environment).admin_api_key is None
    with pytest.raises(KeyProblem, match="exclude each other"):
        keys_of(ServerConfig(model="m", api_key="given", api_key_file=path))


@pytest.mark.parametrize("key", ["", " ", "\n", "a b", "ü", "a\nb c"])
def test_a_key_that_opens_for_everybody_or_nobody_is_refused(key: str) -> None:
    with pytest.raises(KeyProblem):
        keys_of(ServerConfig(model="m", api_key=key))
    with pytest.raises(KeyProblem):
        with_keys(ServerConfig(model="m", admin_api_key=key), {})


def test_a_ring_holds_its_keys_whole_and_nothing_else() -> None:
    ring = KeyRing("one\ntwo")
    assert [ring.holds(key) for key in ("one", "two")] == [True, True]
    assert not any(ring.holds(key) for key in ("", "on", "onetwo", "one\ntwo", "ONE", "ö"))
    assert not KeyRing(None)
    assert not KeyRing(None).holds("")
    assert SECRET not in repr(KeyRing(SECRET)) + str(vars(KeyRing(SECRET)))


def test_a_configuration_shows_no_keys() -> None:
    for config in (
        ServerConfig(model="m", api_key=SECRET, admin_api_key=SECRET),
        RouterConfig(workers=(), api_key=SECRET, admin_api_key=SECRET),
    ):
        assert SECRET not in repr(config)
        assert SECRET not in str(public_settings(config))


def test_the_children_of_a_server_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bytes] = []

    def start(launch: Launch, _listeners: object) -> None:
        told.append(msgspec.json.encode(launch))
        raise ServerFailure("nothing is started here")

    monkeypatch.setattr("tandem.server.start.start_replicas", start)
    words = ["serve", "tandem/mini", "--port", "0", "--api-key", SECRET, "--admin-api-key", SECRET]
    assert cli.main(words) == 1
    (launch,) = told
    assert SECRET.encode() not in launch


def test_the_environment_is_forgotten_before_anything_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT.values():
        monkeypatch.setenv(name, SECRET)
    forget_environment()
    assert SECRET not in os.environ.values()


@pytest.mark.parametrize(
    ("settings", "is_said"),
    [
        ({}, False),
        ({"host": "0.0.0.0"}, True),
        ({"host": "::"}, True),
        ({"host": "10.0.0.1", "admin_api_key": "boss"}, True),
        ({"host": "0.0.0.0", "api_key": "user"}, False),
        ({"host": "::1"}, False),
    ],
)
def test_a_server_that_is_open_to_others_says_so(settings: dict[str, str], is_said: bool) -> None:
    for config in (ServerConfig(model="m", **settings), RouterConfig(workers=(), **settings)):
        line = open_to_others(config)
        assert (line is not None) is is_said
        assert line is None or (settings["host"] in line and "\n" not in line)


# --- on the command line ---------------------------------------------------------------------------------------------

SERVE = ["serve", "tandem/mini", "--port", "0"]
ROUTER = ["router", "--prefill", "127.0.0.1:1", "--decode", "127.0.0.1:2", "--port", "0"]


@pytest.mark.parametrize("words", [SERVE, ROUTER], ids=lambda words: words[0])
@pytest.mark.parametrize("flag", ["--api-key-file", "--admin-api-key-file"])
def test_keys_that_cannot_be_used_are_wrong_usage(
    words: list[str], flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*words, flag, key_file(tmp_path, SECRET, 0o644)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tandem: error: every user of this machine may read")
    assert error.count("\n") == 1
    assert SECRET not in error


def test_the_url_of_a_worker_holds_no_password() -> None:
    with pytest.raises(ValueError, match="a name or a password") as refused:
        make_worker(0, Role.DECODE, f"http://me:{SECRET}@10.0.0.1:30000")
    assert SECRET not in str(refused.value)
    assert isinstance(make_worker(0, Role.DECODE, "10.0.0.1:30000"), RegisteredWorker)
