"""The last calls of the edge's machine (`live_requests.py`), kept in memory, and the record that is made of them.

A record is a head with a snapshot, then per call two frames: its name with its arguments, and what it gave. Nothing of
the edge holds text or tokens: of tokens it knows for whom they came, of a prompt its length and its pages' hashes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any, cast, get_type_hints  # Any: what a method takes, whichever it is

import msgspec
from msgspec import Raw, Struct

from tandem.core.commands import FailRequest
from tandem.server.api.live_requests import EndRequest, LiveRequests
from tandem.server.fault_records import OURS
from tandem.server.record_file import RecordedMachine, RecordHead
from tandem.server.ring import PACK_EVERY, SEGMENT_BYTES, Ring

FORMAT = 3
TOKENS, WAKE = "emitted", "wake"

Given = tuple[str, tuple[Raw, ...], dict[str, Raw]]

_decoder = msgspec.msgpack.Decoder(tuple[list[Given], list[Raw]])


class EdgeHead(RecordHead, frozen=True, tag=True):
    """A step is a call."""

    snapshot: bytes


class Call(Struct, frozen=True, tag=True):
    name: str
    args: tuple[Raw, ...]
    kwargs: dict[str, Raw]


class Returned(Struct, frozen=True, tag=True):
    value: Raw


class EdgeRing:
    """The recorder of a `LiveRequests`. failed: called when a request has ended with a cause of ours."""

    def __init__(
        self,
        requests: LiveRequests,
        *,
        failed: Callable[[str], object] = lambda why: None,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self.ring: Ring[Given, Raw] = Ring(lambda: snapshot(requests), _decoder, segment_bytes=segment_bytes)
        self._failed = failed
        self._is_inside = False
        self._call: tuple[str, tuple[object, ...]] = ("", ())  # the last one

    def given(self, name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
        if self._is_inside:
            return False
        self._is_inside = True
        self._call = (name, args)
        self.ring.given.append((name, args, kwargs))
        return True

    def gave(self, result: object) -> None:
        self._is_inside = False
        ring = self.ring
        name, args = self._call
        kept = frozen(name, args, result)
        ring.gave.append(kept)
        if len(ring.gave) >= PACK_EVERY:
            ring.pack()
        if kept and name != TOKENS and isinstance(kept, tuple):
            self._look_for_faults(name, cast("tuple[object, ...]", kept))

    def raised(self) -> None:
        self._is_inside = False
        self._failed("the edge met an error of ours")
        self.ring.begin_anew()

    def frames(self) -> Iterator[EdgeHead | Call | Returned]:
        oldest, calls = self.ring.kept()
        yield EdgeHead(FORMAT, oldest.first_step, oldest.snapshot)
        for (name, args, kwargs), result in calls:
            yield Call(name, args, kwargs)
            if result is not None:
                yield Returned(result)

    def _look_for_faults(self, name: str, actions: Sequence[object]) -> None:
        for action in actions:
            if isinstance(action, EndRequest) and isinstance(action.terminal, FailRequest):
                request, cause = action.terminal.request, action.terminal.cause
                if name == WAKE:
                    self._failed(f"the node kept silent of request {request}")
                elif cause in OURS:
                    self._failed(f"request {request} has ended with {cause}")


def frozen(name: str, args: tuple[object, ...], result: object) -> object:
    """What stays as it is, and is never None. For every token a place, in order, is what `emitted` usually gives."""
    if isinstance(result, list):
        places = cast("list[object]", result)
        if name == TOKENS and len(places) == len(cast("Sequence[object]", args[0])):
            return True
        return tuple(places)
    return () if result is None else result


def encoded(thing: object) -> Raw:
    return Raw(msgspec.msgpack.encode(thing))


# --- doing it again --------------------------------------------------------------------------------------------------


def snapshot(requests: LiveRequests) -> bytes:
    """Every field but the recorder, so nothing can be forgotten."""
    known = {each.name: getattr(requests, each.name) for each in fields(requests) if each.name != "recorder"}
    return msgspec.msgpack.encode(known)


def restored(snapshot: bytes) -> LiveRequests:
    """Raises an exception for what is none."""
    hints = get_type_hints(LiveRequests)
    found = msgspec.msgpack.decode(snapshot, type=dict[str, Raw])
    requests = LiveRequests(1, 0)
    for each in fields(requests):
        if each.name != "recorder":
            setattr(requests, each.name, msgspec.msgpack.decode(found[each.name], type=hints[each.name]))
    if requests.num_ranks != len(requests.ranks):
        raise ValueError(f"{len(requests.ranks)} of {requests.num_ranks} ranks")
    return requests


def begin(head: EdgeHead) -> Callable[[Call, Returned | None], Returned]:
    if head.format != FORMAT:
        raise ValueError(f"format {head.format}, here it is {FORMAT}")
    requests = restored(head.snapshot)
    return lambda call, _: Returned(encoded(again(requests, call)))


def again(requests: LiveRequests, call: Call) -> object:
    """Raises what the call raises, or for one that there is not."""
    method = METHODS[call.name]
    hints = {name: hint for name, hint in get_type_hints(method).items() if name not in ("self", "return")}
    args = [decoded(raw, hint) for raw, hint in zip(call.args, hints.values(), strict=False)]
    kwargs = {name: decoded(raw, hints[name]) for name, raw in call.kwargs.items()}
    return frozen(call.name, tuple(args), method(requests, *args, **kwargs))


def decoded(raw: Raw, hint: Any) -> Any:
    return msgspec.msgpack.decode(raw, type=hint)


METHODS: dict[str, Callable[..., object]] = {
    name: method for name, method in vars(LiveRequests).items() if hasattr(method, "__wrapped__")
}
EDGE: RecordedMachine[EdgeHead, Call, Returned] = RecordedMachine("edge", EdgeHead, Call, Returned, begin)
