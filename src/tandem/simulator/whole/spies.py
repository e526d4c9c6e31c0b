"""What occurs in a whole cluster, by the names of `simulator/occurrences.py`: seen where it is said, unchanged."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any  # arguments of functions of which only one is looked at

from msgspec import Struct

from tandem.core.router.router import Router
from tandem.server import channel, wire
from tandem.server.node.process import Questions
from tandem.server.node.session import Session
from tandem.server.worker import Worker
from tandem.simulator.occurrences import LINK_ONLY, Occurrences
from tandem.simulator.whole.virtual_process import Replacement
from tandem.transfer import protocol
from tandem.transfer.protocol import Status

PACKED = ("Hello", "Welcome", "Read", "Frame")
ANSWERS = ((Questions, "_faults"), (Worker, "_numbers"))  # they travel as JSON inside of an `Answer`


def spies(seen: Occurrences) -> list[Replacement]:
    """For `virtual_machine`. What nodes are told and want is told by `CheckedNode`."""
    counts = seen.counts
    return [
        (channel, "append_frame", _before(channel.append_frame, lambda buffer, said: _said(counts, said))),
        (Session, "_seal", _before(Session._seal, lambda session, said: _sealed(counts, said))),
        (Router, "step", _step(Router.step, seen)),
        *((owner, name, _after(getattr(owner, name), lambda said: _said(counts, said))) for owner, name in ANSWERS),
        *(
            (
                protocol,
                f"pack_{name.lower()}",
                _before(getattr(protocol, f"pack_{name.lower()}"), _packed(counts, name)),
            )
            for name in PACKED
        ),
    ]


def _sealed(counts: Counter[str], said: object) -> None:
    """Messages of the rendezvous are events at the other end."""
    if type(said).__name__ in LINK_ONLY:
        _count(counts, "link", said)


def _before(real: Callable[..., Any], look: Callable[..., None]) -> Callable[..., Any]:
    def spied(*arguments: Any, **named: Any) -> Any:
        look(*arguments)
        return real(*arguments, **named)

    return spied


def _after(real: Callable[..., Any], look: Callable[[Any], None]) -> Callable[..., Any]:
    def spied(*arguments: Any, **named: Any) -> Any:
        result = real(*arguments, **named)
        look(result)
        return result

    return spied


def _step(real: Callable[..., Any], seen: Occurrences) -> Callable[..., Any]:
    def spied(router: Router, events: Sequence[Any], now: Any) -> Any:
        effects = real(router, events, now)
        seen.see_step(events, effects.commands)
        return effects

    return spied


def _count(counts: Counter[str], kind: str, said: object) -> None:
    counts[f"{kind} {type(said).__name__}"] += 1


def _said(counts: Counter[str], said: object) -> None:
    """Between processes of one server: events and commands of the core travel as they are, and are counted at nodes."""
    if isinstance(said, tuple):
        for each in said:
            _said(counts, each)
    elif isinstance(said, Struct) and type(said).__module__ == wire.__name__:
        _count(counts, "process", said)
        for name in said.__struct_fields__:
            _said(counts, getattr(said, name))


def _packed(counts: Counter[str], name: str) -> Callable[..., None]:
    def look(first: object, *_: object) -> None:
        counts[f"data plane {name}"] += 1
        if isinstance(first, Status):
            counts[f"Status {first.name}"] += 1

    return look
