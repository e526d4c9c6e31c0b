"""The last steps of a node, kept in memory, as frames of a flight record."""

from collections.abc import Callable, Iterator, Sequence

import msgspec

from tandem.core.commands import Command, Effects, EmitTokens, LaunchBatch
from tandem.core.events import BatchReturned, Event
from tandem.core.settings import NodeSettings
from tandem.core.values import Nanos
from tandem.server.node.flight import FORMAT, Frame, Head, given, recorded
from tandem.server.node.without_tokens import snapshot_without_tokens
from tandem.server.ring import BYTES_PER_ENCODED, SEGMENT_BYTES, Ring

STEP_BYTES = 1000  # of what every step has

Given = tuple[Nanos, Sequence[Event]]


class NodeRing:
    """An observer of the loop."""

    def __init__(
        self,
        settings: NodeSettings,
        snapshot: Callable[[], bytes],
        *,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self._settings = settings
        self.ring: Ring[Given, Effects] = Ring(snapshot, weight, segment_bytes=segment_bytes)

    def before(self, now: Nanos, happened: Sequence[Event]) -> None:
        self.ring.given.append((now, tuple(happened)))

    def after(self, now: Nanos, happened: Sequence[Event], effects: Effects) -> None:
        ring = self.ring
        ring.gave.append(effects)
        ring.count()

    def frames(self) -> Iterator[Frame]:
        """A flight record of one segment."""
        oldest, steps = self.ring.kept()
        yield Head(FORMAT, oldest.first_step, self._settings, snapshot_without_tokens(oldest.snapshot))
        for (now, happened), effects in steps:
            yield given(now, happened)
            if effects is not None:
                yield recorded(effects)


def weight(inputs: Sequence[Given], outputs: Sequence[Effects]) -> int:
    """Of the steps that most are, the last one counts for all; what is rare may be large, and is weighed one by one."""
    total = _usual_weight(inputs[-1], outputs[-1]) * len(inputs)
    for _, happened in inputs:
        for event in happened:
            if type(event) is not BatchReturned or event.outcome.extras:
                total += _rare_weight(event)
    for effects in outputs:
        for command in effects.commands:
            if not (type(command) is EmitTokens or type(command) is LaunchBatch) or _is_large(command):
                total += _rare_weight(command)
    return total


def _usual_weight(given: Given, effects: Effects) -> int:
    rows = sum(len(event.outcome.flags) for event in given[1] if isinstance(event, BatchReturned))
    return STEP_BYTES + 34 * rows  # tokens twice, flags, the list of requests; a sixteenth of the rows gets a page


def _is_large(command: EmitTokens | LaunchBatch) -> bool:
    return bool(command.extras if isinstance(command, EmitTokens) else command.plan.rows or command.plan.join)


def _rare_weight(thing: Event | Command) -> int:
    return 200 + BYTES_PER_ENCODED * len(msgspec.msgpack.encode(thing))
