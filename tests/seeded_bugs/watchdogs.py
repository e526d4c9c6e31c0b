"""Seeded bugs of the watchdog: who hangs and is not found, and who is found and does not hang."""

from collections.abc import Iterator

from msgspec import structs

from seeded_bugs.base import mutant, replaced
from tandem.core import stall_detector


@mutant(48, "L8")
def batch_may_take_for_ever_while_its_worker_answers() -> Iterator[None]:
    original = stall_detector.Liveness.tick

    def tick(liveness, pulse):
        original(liveness, pulse)
        if not liveness._worker_ticks:
            liveness._batch_ticks = 0

    with replaced(stall_detector.Liveness, "tick", tick):
        yield


@mutant(48, "L8")
def window_that_is_never_empty_counts_as_one_batch() -> Iterator[None]:
    original = stall_detector.Liveness.tick

    def tick(liveness, pulse):
        last = liveness._last
        if pulse is not None and pulse.oldest is not None and last is not None and last.oldest is not None:
            liveness._last = structs.replace(last, oldest=pulse.oldest)
        original(liveness, pulse)

    with replaced(stall_detector.Liveness, "tick", tick):
        yield


@mutant(16, "L8")
def server_is_healthy_until_it_ends() -> Iterator[None]:
    with replaced(stall_detector.Stall, "is_sick", stall_detector.Stall.is_final):
        yield
