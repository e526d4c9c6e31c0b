"""The last steps of a router, kept in memory, and the record that is made of them.

A record is a head with the workers, the settings and a snapshot, then per step two frames: events and time, commands
and the numbers that were drawn for rooms. What a worker has said in words is left out of it: it may quote a client.
"""

from collections.abc import Callable, Iterator, Sequence

import msgspec
from msgspec import Struct, structs

from tandem.core.router.messages import Fail, ForwardRejection, HalfFailed, HalfRejected, RouterCommand, RouterEvent
from tandem.core.router.router import Router, RouterEffects, RouterSettings
from tandem.core.router.worker_registry import RegisteredWorker
from tandem.core.values import Nanos
from tandem.server.record_file import RecordedMachine, RecordHead
from tandem.server.ring import PACK_EVERY, SEGMENT_BYTES, Ring

FORMAT = 3
OURS_STATUS = 500  # of a worker's answer: internal_error, engine_failed, invalid_logits

Given = tuple[Nanos, tuple[RouterEvent, ...]]
Gave = tuple[RouterEffects, tuple[int, ...]]

_decoder = msgspec.msgpack.Decoder(tuple[list[Given], list[Gave]])


class RouterHead(RecordHead, frozen=True, tag=True):
    workers: tuple[RegisteredWorker, ...]
    settings: RouterSettings
    snapshot: bytes


class RouterInput(Struct, frozen=True, tag=True):
    now: Nanos
    events: tuple[RouterEvent, ...]


class RouterOutput(Struct, frozen=True, tag=True):
    commands: tuple[RouterCommand, ...]
    wake_at: Nanos
    drawn: tuple[int, ...]


class Draws:
    """A source of numbers that remembers what it gave in this step."""

    def __init__(self, draw: Callable[[], int]) -> None:
        self._draw = draw
        self._taken: list[int] = []

    def __call__(self) -> int:
        number = self._draw()
        self._taken.append(number)
        return number

    def take(self) -> tuple[int, ...]:
        taken, self._taken = tuple(self._taken), []
        return taken


class RouterRing:
    """`before` and `after` every step. draws: the source of the router's rooms."""

    def __init__(
        self,
        router: Router,
        draws: Draws,
        *,
        settings: RouterSettings,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self._draws = draws
        self._head = RouterHead(FORMAT, 0, tuple(router.registry.workers()), settings, b"")
        self.ring: Ring[Given, Gave] = Ring(router.snapshot, _decoder, segment_bytes=segment_bytes)

    def before(self, now: Nanos, events: Sequence[RouterEvent]) -> None:
        self.ring.given.append((now, tuple(events)))

    def after(self, effects: RouterEffects) -> None:
        ring = self.ring
        ring.gave.append((effects, self._draws.take()))
        if len(ring.gave) >= PACK_EVERY:
            ring.pack()

    def raised(self) -> None:
        """After the record is written, if it is: what follows is recorded anew."""
        self._draws.take()
        self.ring.begin_anew()

    def frames(self) -> Iterator[RouterHead | RouterInput | RouterOutput]:
        oldest, steps = self.ring.kept()
        yield structs.replace(self._head, first_step=oldest.first_step, snapshot=oldest.snapshot)
        for (now, events), gave in steps:
            yield RouterInput(now, tuple(map(event_without_words, events)))
            if gave is not None:
                yield output(*gave)


def fault_of(events: Sequence[RouterEvent], effects: RouterEffects) -> str:
    """Which request has ended with a cause that is ours, in words; empty: none."""
    ended = {command.request for command in effects.commands if isinstance(command, ForwardRejection)}
    for event in events:
        if isinstance(event, HalfRejected) and event.request in ended and event.status == OURS_STATUS:
            return f"request {event.request} has ended with what its {event.half} worker says of itself"
    return ""


def event_without_words(event: RouterEvent) -> RouterEvent:
    return structs.replace(event, detail="") if isinstance(event, HalfFailed) else event


def command_without_words(command: RouterCommand) -> RouterCommand:
    return structs.replace(command, detail="") if isinstance(command, Fail) else command


def output(effects: RouterEffects, drawn: tuple[int, ...]) -> RouterOutput:
    return RouterOutput(tuple(map(command_without_words, effects.commands)), effects.wake_at, drawn)


# --- doing it again --------------------------------------------------------------------------------------------------


class Redrawn:
    """Gives the numbers that were drawn, and none that were not."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def __call__(self) -> int:
        return self.numbers.pop(0)


def begin(head: RouterHead) -> Callable[[RouterInput, RouterOutput | None], RouterOutput]:
    if head.format != FORMAT:
        raise ValueError(f"format {head.format}, here it is {FORMAT}")
    draws = Redrawn()
    router = Router(head.workers, draw=draws, settings=head.settings, now=Nanos(0))
    router.restore(head.snapshot)

    def redo(given: RouterInput, expected: RouterOutput | None) -> RouterOutput:
        drawn = () if expected is None else expected.drawn
        draws.numbers = list(drawn)
        effects = router.step(given.events, given.now)
        return output(effects, drawn[: len(drawn) - len(draws.numbers)])

    return redo


ROUTER: RecordedMachine[RouterHead, RouterInput, RouterOutput] = RecordedMachine(
    "router", RouterHead, RouterInput, RouterOutput, begin
)
