"""The JSON documents of a checkpoint directory: read with bounds, every field checked for its type and range.

Whoever wrote the files may mean harm, or a download may have ended half-way. Whatever is wrong ends in a `ModelError`
of one line; nothing here hangs, recurses or takes memory without limit.
"""

import json
import math
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any  # values of JSON documents

from tandem.logtext import shown

CONFIG_BYTES = 4 << 20
MOST_MESSAGE_CHARS = 2000
# What any of them may say of a model.
MOST_FEATURES = 1 << 20
MOST_HEADS = 1 << 14
UNREADABLE = (OSError, ValueError, RecursionError, MemoryError)  # what reading and parsing foreign bytes may raise


class ModelError(Exception):
    """This directory cannot be served: one line with the cause and what to do, whatever the files put into it."""

    def __init__(self, text: str) -> None:
        line = "".join(char if char.isprintable() else "?" for char in text)
        super().__init__(line if len(line) <= MOST_MESSAGE_CHARS else line[:MOST_MESSAGE_CHARS] + "...")


def read_json(path: Path, *, optional: bool = False, most_bytes: int = CONFIG_BYTES) -> dict[str, Any]:
    """A JSON object; `{}` when it is optional and absent."""
    try:
        document = parse_json(read_regular(path, most_bytes=most_bytes))
    except FileNotFoundError:
        if optional:
            return {}
        raise ModelError(f"{path} is missing; give a complete Hugging Face checkpoint directory") from None
    except UNREADABLE as error:
        raise ModelError(f"{path} cannot be read ({describe(error)}); download the checkpoint again") from None
    if not isinstance(document, dict):
        raise ModelError(f"{path} holds no JSON object; download the checkpoint again")
    return document


def parse_json(data: bytes) -> Any:
    """Without what JSON does not have or mean: NaN, infinities, numbers beyond fp64, keys that occur twice.

    Raises ValueError, RecursionError, MemoryError.
    """
    return json.loads(
        data.decode("utf-8"), object_pairs_hook=_object, parse_float=_finite, parse_constant=_refuse_constant
    )


def read_regular(path: Path, *, most_bytes: int) -> bytes:
    """All bytes of a regular file: a pipe would never end, a device never stop. Raises OSError, ValueError."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        if status.st_size > most_bytes:
            raise ValueError(f"it has {status.st_size} bytes, more than {most_bytes}")
        return file.read(most_bytes)


def describe(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)[:200] or type(error).__name__


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return found


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:30]} is beyond every floating-point number")
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number in JSON")


@dataclass(frozen=True, slots=True)
class Fields:
    """One object of a document. A field that is null is absent; one of another type or out of range is a ModelError."""

    where: str
    values: dict[str, Any]

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def integer(self, name: str, *, least: int = 1, most: int, default: int | None = None) -> int:
        value = self._given(name, default)
        if type(value) is not int or not least <= value <= most:
            raise self.wrong(name, f"a whole number from {least} to {most} is needed")
        return value

    def number(self, name: str, *, least: float, most: float, default: float | None = None) -> float:
        value = self._given(name, default)
        if type(value) not in (int, float) or not least <= value <= most:
            raise self.wrong(name, f"a number from {least:g} to {most:g} is needed")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._given(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false is needed")
        return value

    def text(self, name: str, *, default: str) -> str:
        value = self._given(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, "a text is needed")
        return value

    def section(self, name: str) -> "Fields | None":
        if not self.has(name):
            return None
        if not isinstance(self.values[name], dict):
            raise self.wrong(name, "an object is needed")
        return Fields(f"{self.where}: {name}", self.values[name])

    def wrong(self, name: str, needed: str) -> ModelError:
        return ModelError(
            f"{self.where}: {name} is {shown(self.values.get(name))}, {needed}; correct it, or download it again"
        )

    def _given(self, name: str, default: object) -> Any:
        value = self.values.get(name)
        return default if value is None else value
