"""The safetensors files of a directory, opened, and which tensor is in which.

The library maps the files and checks their headers: offsets that lie in the file, do not overlap and leave no holes,
known types, bounded depth. What it lets pass is checked here: which files an index may name, names that occur twice,
files that are no files. Raises ModelError, whatever the directory holds.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any  # safetensors ships no types for its handle

from safetensors import SafetensorError, safe_open
from torch import Tensor

from tandem.engine.documents import UNREADABLE, ModelError, describe, parse_json, read_json
from tandem.logtext import shown

INDEX_BYTES = 16 << 20
HEADER_BYTES = 16 << 20
LENGTH_BYTES = 8  # of a header, little-endian, before it
MOST_FILES = 4096


class Checkpoint:
    """Open from the start; `stamps` say which state of each file is mapped."""

    def __init__(self, model_dir: Path, *, prefix: str = "") -> None:
        """prefix: of the names of a model's layers. Where no name has it, as in a checkpoint that was saved without
        what stands on top of the layers, names are given with it all the same.
        """
        self.model_dir = model_dir
        self.files = _weight_files(model_dir)
        self.stamps = {path: _stamp(path) for path in self.files}
        self._opened = {path: _open(path) for path in self.files}
        self._file_of: dict[str, Path] = {}
        for path, opened in self._opened.items():
            for name in opened.keys():  # noqa: SIM118  # a handle, not a dict
                if name in self._file_of:
                    raise ModelError(f"{path} and {self._file_of[name]} both hold {shown(name)}; download them again")
                self._file_of[name] = path
        has_prefix = any(name.startswith(prefix) for name in self._file_of)
        self._added = "" if has_prefix else prefix
        self._file_of = {self._added + name: path for name, path in self._file_of.items()}

    def names(self) -> list[str]:
        return sorted(self._file_of)

    def has(self, name: str, dtypes: tuple[str, ...] | None = None) -> bool:
        """dtypes: those that are looked for."""
        return name in self._file_of and (dtypes is None or self.dtype_of(name) in dtypes)

    def names_in(self, path: Path) -> list[str]:
        return [name for name in self.names() if self._file_of[name] == path]

    def shape_of(self, name: str) -> tuple[int, ...]:
        with _reading(self._find(name)):
            return tuple(self._opened[self._find(name)].get_slice(self._stored(name)).get_shape())

    def dtype_of(self, name: str) -> str:
        """As safetensors spells it: F32, F16, BF16, ..."""
        with _reading(self._find(name)):
            return self._opened[self._find(name)].get_slice(self._stored(name)).get_dtype()

    def tensor(self, name: str) -> Tensor:
        """Mapped, not read."""
        with _reading(self._find(name)):
            return self._opened[self._find(name)].get_tensor(self._stored(name))

    def is_unchanged(self, path: Path) -> bool:
        """Whether the file still is what was mapped, as far as its status tells."""
        try:
            return _stamp(path) == self.stamps[path]
        except ModelError:
            return False

    def _stored(self, name: str) -> str:
        return name.removeprefix(self._added)

    def _find(self, name: str) -> Path:
        if name not in self._file_of:
            raise ModelError(
                f"the tensor {name} is missing from {self.model_dir} ({len(self.files)} weight files, "
                f"{len(self._file_of)} tensors); download the checkpoint again"
            )
        return self._file_of[name]


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (*UNREADABLE, SafetensorError, RuntimeError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} cannot be read ({describe(error)}); download the checkpoint again") from None


def _weight_files(model_dir: Path) -> list[Path]:
    """One file, or the shards that the index names; sorted."""
    index, single = model_dir / "model.safetensors.index.json", model_dir / "model.safetensors"
    if os.path.lexists(index):
        files = _indexed(index)
        if single.exists() and single not in files:  # transformers takes the one, others the other
            raise ModelError(
                f"{model_dir} holds model.safetensors and an index of other files; remove what is not meant"
            )
        return files
    if single.exists():
        return [single]
    raise ModelError(f"no model.safetensors (or its index) in {model_dir}; only safetensors checkpoints can be served")


def _indexed(index: Path) -> list[Path]:
    weight_map = read_json(index, most_bytes=INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map; download the checkpoint again")
    names: set[Any] = set()
    for name in weight_map.values():
        if not isinstance(name, str) or not _is_plain(name):
            raise ModelError(f"{index} names the file {shown(name)}, which is not one of its directory; do not use it")
        names.add(name)
    if len(names) > MOST_FILES:
        raise ModelError(f"{index} names {len(names)} files, more than {MOST_FILES}; download the checkpoint again")
    return sorted(index.parent / name for name in names)


def _is_plain(name: str) -> bool:
    return name.endswith(".safetensors") and name == os.path.basename(name) and "\0" not in name


def _open(path: Path) -> Any:
    with _reading(path):
        _refuse_repeated_names(path)
        return safe_open(path, framework="pt", device="cpu")


def _refuse_repeated_names(path: Path) -> None:
    """The library keeps the last of two entries; another program may take the first for the weights."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if length > min(HEADER_BYTES, os.fstat(file.fileno()).st_size):
            raise ValueError("its header does not fit")
        header = parse_json(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is no object")


def _stamp(path: Path) -> tuple[int, ...]:
    """What changes when the file does. The time of the last status change cannot be set by hand, the other one can."""
    with _reading(path):
        if not path.is_file():
            raise ValueError("it is not there or not a regular file")
        status = path.stat()
        return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
