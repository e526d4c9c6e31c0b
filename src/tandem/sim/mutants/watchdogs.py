"""Seeded bugs of the watchdog: who hangs and is not found, and who is found and does not hang."""

from collections.abc import Iterator

from msgspec import structs

from tandem.core.fleet import standstill
from tandem.sim.mutants.base import mutant, replaced


@mutant(48, "L8")
def batch_may_take_for_ever_while_its_worker_answers() -> Iterator[None]:
    original = standstill.Progress.tick

    def tick(progress, pulse):
        original(progress, pulse)
        if not progress._worker_ticks:
            progress._batch_ticks = 0

    with replaced(standstill.Progress, "tick", tick):
        yield


@mutant(48, "L8")
def window_that_is_never_empty_counts_as_one_batch() -> Iterator[None]:
    original = standstill.Progress.tick

    def tick(progress, pulse):
        last = progress._last
        if pulse is not None and pulse.oldest is not None and last is not None and last.oldest is not None:
            progress._last = structs.replace(last, oldest=pulse.oldest)
        original(progress, pulse)

    with replaced(standstill.Progress, "tick", tick):
        yield


@mutant(16, "L8")
def server_is_healthy_until_it_ends() -> Iterator[None]:
    with replaced(standstill.Standstill, "is_sick", standstill.Standstill.is_final):
        yield
