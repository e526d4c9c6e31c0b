"""Bodies as values: a small one is decoded where it is, a large one off the event loop.

A thread alone would not be enough. The decoder is one call in C that keeps the interpreter's lock to its end, so the
loop stands still meanwhile whoever calls it. What it takes is the values that it makes (objects and arrays above all:
the garbage collector walks over them again and again while they become more), not the bytes. So those of a large body
are counted first, a slice at a time with the lock free in between, and too many are refused before one is made.
"""

from typing import NamedTuple, TypeVar

from msgspec import Struct

from tandem.server.api.body import decode_body
from tandem.server.api.bounds import LOOP_BYTES, MAX_CONTAINERS, MAX_VALUES
from tandem.server.api.errors import Problem, Refusal
from tandem.server.api.off_loop import off_loop

SLICE_BYTES = 1 << 16

First = TypeVar("First", bound=Struct)
Second = TypeVar("Second", bound=Struct)


class JsonCounts(NamedTuple):
    containers: int  # objects and arrays
    commas: int  # that divide values: each list or object has one less than members


async def decode_anywhere(raw: bytes, kind: type[First]) -> First:
    """`decode_body`, but no large body is decoded on the loop. Raises `Refusal` for one with too many values, too."""
    return await off_loop(len(raw), LOOP_BYTES, _decoded, raw, kind)


async def decode_both(raw: bytes, first: type[First], second: type[Second]) -> tuple[First, Second]:
    """Two readings of one body."""

    def both() -> tuple[First, Second]:
        return _decoded(raw, first), decode_body(raw, second)

    return await off_loop(len(raw), LOOP_BYTES, both)


def _decoded(raw: bytes, kind: type[First]) -> First:
    check_counts(raw)
    return decode_body(raw, kind)


def check_counts(raw: bytes) -> None:
    """Raises `Refusal`. A small body holds few values whatever it says."""
    if len(raw) <= LOOP_BYTES:
        return
    counts = counts_of(raw)
    if counts.containers > MAX_CONTAINERS:
        raise Refusal(Problem.INVALID_VALUE, f"the body has more than {MAX_CONTAINERS} objects and arrays")
    if counts.commas > MAX_VALUES:
        raise Refusal(Problem.INVALID_VALUE, f"the body has more than {MAX_VALUES} values")


def counts_of(raw: bytes) -> JsonCounts:
    """Of what stands outside of texts. Of what is not JSON, those before the place where it ceases to be."""
    containers = commas = 0
    inside, carried = 0, b""
    for start in range(0, len(raw), SLICE_BYTES):
        piece = carried + raw[start : start + SLICE_BYTES]
        num_open = (len(piece) - len(piece.rstrip(b"\\"))) % 2  # a backslash whose character is in the next slice
        carried = b"\\" * num_open
        parts = piece[: len(piece) - num_open].replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[inside::2])
        inside ^= (len(parts) - 1) % 2
        containers += outside.count(b"{") + outside.count(b"[")
        commas += outside.count(b",")
    return JsonCounts(containers, commas)
