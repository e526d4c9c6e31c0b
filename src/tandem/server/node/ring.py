"""The last steps of a node, kept in memory, as frames of a flight record."""

from collections.abc import Callable, Iterator, Sequence

import msgspec

from tandem.core.commands import Effects
from tandem.core.events import Event
from tandem.core.settings import NodeSettings
from tandem.core.values import Nanos
from tandem.server.node.flight import FORMAT, Frame, Head, given, recorded
from tandem.server.node.without_tokens import snapshot_without_tokens
from tandem.server.ring import PACK_EVERY, SEGMENT_BYTES, Ring

Given = tuple[Nanos, tuple[Event, ...]]

_decoder = msgspec.msgpack.Decoder(tuple[list[Given], list[Effects]])


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
        self.ring: Ring[Given, Effects] = Ring(snapshot, _decoder, segment_bytes=segment_bytes)

    def before(self, now: Nanos, happened: Sequence[Event]) -> None:
        self.ring.given.append((now, tuple(happened)))

    def after(self, now: Nanos, happened: Sequence[Event], effects: Effects) -> None:
        ring = self.ring
        ring.gave.append(effects)
        if len(ring.gave) >= PACK_EVERY:
            ring.pack()

    def frames(self) -> Iterator[Frame]:
        """A flight record of one segment."""
        oldest, steps = self.ring.kept()
        yield Head(FORMAT, oldest.first_step, self._settings, snapshot_without_tokens(oldest.snapshot))
        for (now, happened), effects in steps:
            yield given(now, happened)
            if effects is not None:
                yield recorded(effects)
