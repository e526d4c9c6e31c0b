"""Indexes and safetensors files that somebody else wrote: opened, or refused in one line; nothing beside is touched."""

import json
import os
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_files import change_tensors, refusal, write_model
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tandem.engine import devices, machine_memory
from tandem.engine.checkpoint import Checkpoint
from tandem.engine.documents import ModelError
from tandem.engine.parallel import Shard
from tandem.engine.weights import load

INDEX = "model.safetensors.index.json"
NAME = "model.norm.weight"


def shard(where: Path) -> Path:
    """The same checkpoint in two files and an index."""
    whole = where / "model.safetensors"
    tensors = load_file(whole)
    weight_map = {}
    for number, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, where / file)
        weight_map |= dict.fromkeys(names, file)
    whole.unlink()
    (where / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return where


def test_a_checkpoint_spread_over_two_files_has_the_same_layout(tmp_path: Path) -> None:
    whole, spread = write_model(tmp_path / "a"), shard(write_model(tmp_path / "b"))

    assert len(Checkpoint(spread).files) == 2
    assert load(spread).layout_fields == load(whole).layout_fields


# --- indexes ---------------------------------------------------------------------------------------------------------

FOREIGN_NAMES = (
    "../model.safetensors",
    "../../etc/passwd",
    "/etc/passwd",
    "/dev/zero",
    "sub/model.safetensors",
    "./model.safetensors",
    "..",
    "",
    "model.bin",
    "model.safetensors\0",
    7,
    None,
    ["model.safetensors"],
    {"file": "model.safetensors"},
)


@pytest.mark.parametrize("name", FOREIGN_NAMES, ids=repr)
def test_an_index_names_files_of_its_own_directory_only(tmp_path: Path, name: Any) -> None:
    (write_model(tmp_path / "model") / INDEX).write_text(json.dumps({"weight_map": {NAME: name}}))
    write_model(tmp_path)

    text = refusal(tmp_path / "model")

    assert INDEX in text
    assert "not one of its directory" in text


@pytest.mark.parametrize("document", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"a": 1, "a": 2}'])
def test_a_broken_index_is_refused(tmp_path: Path, document: str) -> None:
    (write_model(tmp_path) / INDEX).write_text(document)

    assert INDEX in refusal(tmp_path)


def test_an_index_that_names_more_files_than_anybody_has_is_refused(tmp_path: Path) -> None:
    weight_map = {str(number): f"{number}.safetensors" for number in range(5000)}
    (write_model(tmp_path) / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    assert "names 5000 files" in refusal(tmp_path)


def test_one_file_beside_an_index_of_others_is_refused(tmp_path: Path) -> None:
    single = (write_model(tmp_path) / "model.safetensors").read_bytes()
    (shard(tmp_path) / "model.safetensors").write_bytes(single)
    assert "remove what is not meant" in refusal(tmp_path)

    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {NAME: "model.safetensors"}}))
    assert load(tmp_path).layout_fields


def test_weights_that_the_machine_cannot_hold_are_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_memory, "total_bytes", lambda _: 4000)
    monkeypatch.setattr(Checkpoint, "tensor", lambda *_: pytest.fail("a tensor was read"))

    assert "choose a smaller checkpoint" in refusal(write_model(tmp_path))


def test_weights_that_several_devices_hold_together_are_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Reads(Exception):
        """It was not refused."""

    def read(*_: object) -> None:
        raise Reads

    half = load(write_model(tmp_path)).weight_bytes // 2 + 1
    monkeypatch.setattr(devices, "take", lambda device: device)
    monkeypatch.setattr(machine_memory, "total_bytes", lambda _: half)
    monkeypatch.setattr(Checkpoint, "tensor", read)

    shards: Any = SimpleNamespace(shard=Shard(0, 2), mlp=SimpleNamespace(shard=Shard(0, 2)), is_exact=False)
    ranks: Any = SimpleNamespace(shard=Shard(0, 1), mlp=SimpleNamespace(shard=Shard(0, 2)), is_exact=False)
    splits: list[dict[str, Any]] = [{"group": shards}, {"group": ranks}, {"stage": Shard(0, 2)}]
    for split in splits:
        with pytest.raises(Reads):
            load(tmp_path, device="meta", **split)
        assert "choose a smaller checkpoint" in refusal(tmp_path, **split), "on the CPU they share one memory"


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    (shard(write_model(tmp_path)) / "model-00001-of-00002.safetensors").unlink()

    assert "model-00001-of-00002.safetensors" in refusal(tmp_path)


def test_a_tensor_that_two_files_hold_is_refused(tmp_path: Path) -> None:
    first = shard(write_model(tmp_path)) / "model-00001-of-00002.safetensors"
    save_file(load_file(first) | {"model.embed_tokens.weight": torch.zeros(20, 8)}, first)

    assert "both hold" in refusal(tmp_path)


# --- weight files ----------------------------------------------------------------------------------------------------


def weight_file(header: Any, *, data: bytes = bytes(64), length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(start: int, stop: int, shape: list[Any], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


ONE = json.dumps(entry(0, 64, [16]))
BROKEN_FILES = {
    "empty": b"",
    "five bytes": b"\5\0\0\0\0",
    "no header": weight_file(b"", data=b""),
    "a header beyond the file": weight_file({}, length=1 << 20),
    "an endless header": weight_file({}, length=(1 << 64) - 1),
    "overlapping": weight_file({"a": entry(0, 64, [16]), "b": entry(32, 96, [16])}, data=bytes(96)),
    "the same bytes twice": weight_file({"a": entry(0, 64, [16]), "b": entry(0, 64, [16])}),
    "beyond the file": weight_file({"a": entry(0, 128, [32])}),
    "a hole": weight_file({"a": entry(0, 32, [8])}),
    "backwards": weight_file({"a": entry(64, 0, [16])}),
    "negative": weight_file({"a": entry(-64, 0, [16])}),
    "another size than the shape": weight_file({"a": entry(0, 64, [15])}),
    "a shape that overflows": weight_file({"a": entry(0, 64, [1 << 63, 1 << 63])}),
    "huge": weight_file({"a": entry(0, 64, [10**30])}),
    "no number": weight_file(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,64]}}'),
    "an unknown type": weight_file({"a": entry(0, 64, [16], "X9")}),
    "deep": weight_file(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "a list": weight_file([1, 2]),
    "no utf-8": weight_file(b'{"\xff": 1}'),
    "metadata of numbers": weight_file({"__metadata__": {"a": 1}, "a": entry(0, 64, [16])}),
    "a name twice": weight_file(f'{{"a": {ONE}, "a": {ONE}}}'.encode()),
}


@pytest.mark.parametrize("file", BROKEN_FILES)
def test_a_broken_weight_file_is_refused_by_name(tmp_path: Path, file: str) -> None:
    (write_model(tmp_path) / "model.safetensors").write_bytes(BROKEN_FILES[file])

    assert "model.safetensors cannot be read" in refusal(tmp_path)


ODD_FILES = {
    "nothing": weight_file({}, data=b""),
    "zero elements": weight_file({"model.embed_tokens.weight": entry(0, 0, [0, 8])}, data=b""),
    "no dimensions": weight_file({"model.embed_tokens.weight": entry(0, 4, [])}, data=bytes(4)),
    "five thousand dimensions": weight_file({"model.embed_tokens.weight": entry(0, 64, [1] * 5000 + [16])}),
    "four bits": weight_file({"model.embed_tokens.weight": entry(0, 64, [128], "F4")}),
    "a long name": weight_file({"a" * 1_000_000: entry(0, 64, [16])}),
    "a name of two lines": weight_file({"a\nb\u202e": entry(0, 64, [16])}),
}


@pytest.mark.parametrize("file", ODD_FILES)
def test_a_file_that_is_right_but_no_model_is_refused(tmp_path: Path, file: str) -> None:
    (write_model(tmp_path) / "model.safetensors").write_bytes(ODD_FILES[file])

    text = refusal(tmp_path)

    assert "model.embed_tokens.weight" in text or "stored as F4" in text


@pytest.mark.parametrize("name", ["a\nb", "x" * 1_000_000, "\u202e"], ids=len)
def test_a_name_that_is_no_name_makes_one_short_line(tmp_path: Path, name: str) -> None:
    text = refusal(change_tensors(write_model(tmp_path), **{name: torch.zeros(1)}))

    assert len(text) < 2100
    assert text.isprintable()


@pytest.mark.parametrize("size", [0, 5, 400])
def test_a_truncated_weight_file_is_refused(tmp_path: Path, size: int) -> None:
    path = write_model(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])

    assert "model.safetensors cannot be read" in refusal(tmp_path)


def test_a_weight_file_that_is_no_file_is_refused_and_nobody_waits(tmp_path: Path) -> None:
    path = write_model(tmp_path) / "model.safetensors"
    path.unlink()
    os.mkfifo(path)
    assert "not a regular file" in refusal(tmp_path)
    path.unlink()
    path.symlink_to("/dev/zero")
    assert "not a regular file" in refusal(tmp_path)
    path.unlink()
    path.mkdir()
    assert "not a regular file" in refusal(tmp_path)


@given(position=st.integers(0, 400), value=st.binary(min_size=1, max_size=4), cut=st.integers(0, 300))
def test_any_damage_to_a_header_is_taken_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, position: int, value: bytes, cut: int
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    path = write_model(folder) / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes((data[:position] + value + data[position + len(value) :])[: len(data) - cut * (cut % 3 == 0)])

    try:
        load(folder)
        line = ""
    except ModelError as error:
        line = str(error)

    assert line.isprintable()
