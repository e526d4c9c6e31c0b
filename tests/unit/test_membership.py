"""The secret of a cluster: made once, read with care, proven and never said."""

import errno
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.membership import (
    MAX_SECRET_BYTES,
    MIN_SECRET_BYTES,
    PROOF_BYTES,
    ClusterSecret,
    NoPlaceForSecret,
    SecretError,
    read_secret,
    user_secret,
    user_secret_path,
)

SECRET = ClusterSecret(b"a secret of the whole cluster")
PARTS = st.lists(st.binary(max_size=8), max_size=4)


@given(PARTS, PARTS, st.sampled_from(["door", "other door"]))
def test_a_proof_is_one_for_its_purpose_and_its_parts_only(parts: list[bytes], others: list[bytes], door: str) -> None:
    proof = SECRET.proof("door", *parts)
    assert len(proof) == PROOF_BYTES
    assert SECRET.is_proof(proof, door, *others) == (door == "door" and parts == others)


def test_who_has_another_secret_proves_nothing() -> None:
    other = ClusterSecret(b"a secret of another cluster")
    assert not SECRET.is_proof(other.proof("door", b"challenge"), "door", b"challenge")
    assert not SECRET.is_proof(b"", "door", b"challenge")


def test_a_secret_is_not_shown() -> None:
    assert "whole" not in f"{SECRET} {SECRET!r}"


def test_the_users_secret_is_made_once_for_him_alone_and_shared(tmp_path: Path) -> None:
    environment = {"XDG_STATE_HOME": str(tmp_path / "state")}
    with ThreadPoolExecutor(8) as threads:  # servers that start at once
        found = {secret.raw for secret in threads.map(lambda _: user_secret(environment), range(32))}
    path = user_secret_path(environment)
    assert found == {path.read_bytes().strip()}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert os.listdir(path.parent) == [path.name]


def test_another_user_has_another_secret(tmp_path: Path) -> None:
    first, second = (user_secret({"XDG_STATE_HOME": str(tmp_path / name)}) for name in "ab")
    assert first.raw != second.raw


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o666])
def test_a_secret_that_everybody_may_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    path.write_text("a secret of the whole cluster\n")
    path.chmod(mode)
    with pytest.raises(SecretError, match=r"everybody.*chmod 600"):
        read_secret(path)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640])
def test_a_secret_of_one_user_or_group_is_read_without_the_white_space_around_it(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    path.write_text("  a secret of the whole cluster\n")
    path.chmod(mode)
    assert read_secret(path).raw == SECRET.raw


@pytest.mark.parametrize("size", [0, MIN_SECRET_BYTES - 1, MAX_SECRET_BYTES + 1])
def test_a_secret_of_another_size_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"x" * size)
    path.chmod(0o600)
    with pytest.raises(SecretError, match=f"{MIN_SECRET_BYTES} to {MAX_SECRET_BYTES}"):
        read_secret(path)


def test_a_secret_that_is_not_there_or_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SecretError, match="cannot read the cluster secret"):
        read_secret(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(NoPlaceForSecret, match=r"cannot make .* give --cluster-secret-file"):
        user_secret({"XDG_STATE_HOME": str(tmp_path / "file")})


def test_a_secret_where_this_user_may_not_look_is_no_place_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: object, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "stat", refused)
    monkeypatch.setattr(os, "mkdir", refused)
    with pytest.raises(NoPlaceForSecret, match="Permission denied"):
        user_secret({"XDG_STATE_HOME": "/root/of/another"})
