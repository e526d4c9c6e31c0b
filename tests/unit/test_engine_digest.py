"""Digests of tensors, and the cache of what was read before: never trusted when the file may be another one."""

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_files import write_model
from safetensors.torch import load_file, save_file

from tandem.engine import weights_digest
from tandem.engine.checkpoint import Checkpoint
from tandem.engine.digest_cache import DigestCache, default_path
from tandem.engine.weights import load
from tandem.engine.weights_digest import tensor_digests

A_MINUTE_NS = 60_000_000_000
NAME = "model.layers.1.mlp.up_proj.weight"


def later() -> int:
    return time.time_ns() + A_MINUTE_NS


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
def cache_path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "tandem" / "weights"


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tensors that were read."""
    names: list[str] = []
    original = weights_digest._hash
    monkeypatch.setattr(weights_digest, "_hash", lambda c, wanted: names.extend(wanted) or original(c, wanted))
    return names


def digests(model_dir: Path, cache_path: Path | None, *, now_ns: Callable[[], int] = later) -> dict[str, str]:
    checkpoint = Checkpoint(model_dir)
    return tensor_digests(checkpoint, checkpoint.names(), DigestCache(cache_path, now_ns=now_ns))


# --- digests ---------------------------------------------------------------------------------------------------------


def test_every_tensor_has_its_own(model_dir: Path) -> None:
    found = digests(model_dir, None)

    assert found.keys() == load_file(model_dir / "model.safetensors").keys()
    norms = {digest for name, digest in found.items() if "norm" in name}
    assert len(norms) == 5
    assert len(set(found.values())) == len(found)


@pytest.mark.parametrize("position", [0, 1, 7, 8, 15])
def test_any_element_changes_it_however_it_is_cut_into_pieces(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, position: int
) -> None:
    monkeypatch.setattr(weights_digest, "PIECE_BYTES", 32)
    before = digests(model_dir, None)
    tensors = load_file(model_dir / "model.safetensors")
    tensors[NAME].view(-1)[position] += 1
    save_file(tensors, model_dir / "model.safetensors")

    after = digests(model_dir, None)

    assert [name for name in before if before[name] != after[name]] == [NAME]


def test_the_same_bytes_of_another_type_or_shape_are_another_tensor(tmp_path: Path) -> None:
    tensors = [torch.zeros(4, 4), torch.zeros(2, 8), torch.zeros(0), torch.tensor(0.0)]
    tensors.append(torch.zeros(16, 2, dtype=torch.bfloat16))
    found = set()
    for number, tensor in enumerate(tensors):
        folder = tmp_path / str(number)
        folder.mkdir()
        save_file({"a": tensor}, folder / "model.safetensors")
        found.add(digests(folder, None)["a"])

    assert len(found) == 5


# --- the cache -------------------------------------------------------------------------------------------------------


def test_what_was_read_once_is_not_read_again(model_dir: Path, cache_path: Path, hashed: list[str]) -> None:
    first = digests(model_dir, cache_path)
    num_read = len(hashed)

    assert digests(model_dir, cache_path) == first
    assert len(hashed) == num_read == len(first)
    assert cache_path.stat().st_mode & 0o777 == 0o600
    assert cache_path.parent.stat().st_mode & 0o777 == 0o700
    assert os.listdir(cache_path.parent) == [cache_path.name]


def test_loading_uses_it(model_dir: Path, cache_path: Path, hashed: list[str]) -> None:
    load(model_dir, cache=DigestCache(cache_path, now_ns=later))
    hashed.clear()

    load(model_dir, cache=DigestCache(cache_path, now_ns=later))

    assert hashed == []


def change_in_place(path: Path) -> None:
    """Size and time of the content stay as they were."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(before.st_size - 100)
        file.write(bytes(4))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def put_another_in_place(path: Path) -> None:
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[-100:-96] = bytes(4)
    other = path.with_suffix(".other")
    other.write_bytes(data)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(other, path)


def touch(path: Path) -> None:
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


@pytest.mark.parametrize("change", [change_in_place, put_another_in_place, touch])
def test_a_file_that_may_have_changed_is_read_again(
    model_dir: Path, cache_path: Path, hashed: list[str], change: Callable[[Path], None]
) -> None:
    digests(model_dir, cache_path)
    hashed.clear()

    change(model_dir / "model.safetensors")

    assert digests(model_dir, cache_path) == digests(model_dir, None)
    assert hashed


@pytest.mark.parametrize("place", range(5), ids=["device", "inode", "size", "mtime", "ctime"])
def test_no_part_of_a_files_state_may_differ(model_dir: Path, cache_path: Path, place: int) -> None:
    cache = DigestCache(cache_path, now_ns=later)
    file, stamp = model_dir / "model.safetensors", (1, 2, 3, 4, 5)
    cache.keep(file, stamp, {"a": "b"})

    assert cache.find(file, stamp) == {"a": "b"}
    assert cache.find(file, (*stamp[:place], 9, *stamp[place + 1 :])) == {}
    assert cache.find(model_dir / "other.safetensors", stamp) == {}


def test_what_was_written_a_moment_ago_is_not_kept(model_dir: Path, cache_path: Path) -> None:
    digests(model_dir, cache_path, now_ns=time.time_ns)

    assert not cache_path.exists()


def test_a_file_that_changes_while_it_is_read_is_not_kept(
    model_dir: Path, cache_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model_dir / "model.safetensors"
    original = weights_digest._hash

    def hash_and_change(checkpoint: Checkpoint, names: list[str]) -> dict[str, str]:
        found = original(checkpoint, names)
        touch(path)
        return found

    monkeypatch.setattr(weights_digest, "_hash", hash_and_change)
    digests(model_dir, cache_path)

    assert not cache_path.exists()


def without_its_end(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def with_another_digest(path: Path) -> None:
    text = path.read_text()
    at = text.index('"lm_head.weight":"') + len('"lm_head.weight":"')
    path.write_text(text[:at] + ("0" if text[at] != "0" else "1") + text[at + 1 :])


def with_a_sum_of_its_own(path: Path) -> None:
    body = json.dumps({"version": 1, "files": {"a": {"stamp": "none", "digests": []}}})
    path.write_text(hashlib.sha256(body.encode()).hexdigest() + "\n" + body)


def as_a_link(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


def as_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def as_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


HARM: tuple[Callable[[Path], object], ...] = (
    without_its_end,
    with_another_digest,
    with_a_sum_of_its_own,
    as_a_link,
    as_a_folder,
    as_a_pipe,
    lambda path: path.write_bytes(b""),
    lambda path: path.write_bytes(os.urandom(1000)),
    lambda path: path.write_bytes(b"[" * 100_000),
    lambda path: path.chmod(0o666),
    lambda path: path.unlink(),
)


@pytest.mark.parametrize("harm", HARM)
def test_a_cache_that_is_not_as_it_was_left_is_none_and_no_error(
    model_dir: Path, cache_path: Path, hashed: list[str], harm: Callable[[Path], object]
) -> None:
    expected = digests(model_dir, cache_path)
    hashed.clear()
    harm(cache_path)

    assert digests(model_dir, cache_path) == expected
    assert len(hashed) == len(expected)


def test_a_folder_that_cannot_be_written_is_no_error(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    assert digests(model_dir, tmp_path / "file" / "tandem" / "weights")
    assert digests(model_dir, None)


def test_two_that_write_keep_each_others_entries(tmp_path: Path, cache_path: Path, hashed: list[str]) -> None:
    one, two = write_model(tmp_path / "one"), write_model(tmp_path / "two")
    early, late = DigestCache(cache_path, now_ns=later), DigestCache(cache_path, now_ns=later)
    for folder, cache in ((one, early), (two, late)):
        tensor_digests(Checkpoint(folder), Checkpoint(folder).names(), cache)
    hashed.clear()

    digests(one, cache_path)
    digests(two, cache_path)

    assert hashed == []


def test_it_is_bounded_and_the_newest_stay(cache_path: Path) -> None:
    cache = DigestCache(cache_path, now_ns=later)
    for number in range(1100):
        cache.keep(Path(f"/models/{number}"), (number,) * 5, {"a": "b"})
    cache.write()

    again = DigestCache(cache_path)
    kept = [number for number in range(1100) if again.find(Path(f"/models/{number}"), (number,) * 5)]
    assert kept == list(range(76, 1100))


def test_it_lies_in_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "tandem" / "weights"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_path() == tmp_path / ".cache" / "tandem" / "weights"


def test_a_path_that_is_no_text_is_a_path_too(cache_path: Path) -> None:
    file = Path(os.fsdecode(b"/models/\xff\n"))
    cache = DigestCache(cache_path, now_ns=later)
    cache.keep(file, (1, 2, 3, 4, 5), {"a": "b"})
    cache.write()

    assert DigestCache(cache_path).find(file, (1, 2, 3, 4, 5)) == {"a": "b"}
