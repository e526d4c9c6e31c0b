"""Seeded bugs of layers with a window: their KV given back too early, too late, or while somebody needs it."""

from collections.abc import Iterator

from seeded_bugs.base import mutant, replaced
from tandem.core.kv.windows import Windows
from tandem.core.scheduler import state, window_claims


@mutant(10_000, "S38")
def windows_pass_nothing() -> Iterator[None]:
    with replaced(window_claims, "pass_window", lambda node_state, progress: None):
        yield


@mutant(10_014, "S5")
def cached_prefixes_are_used_whatever_they_have_lost() -> Iterator[None]:
    def num_usable(windows, tree, pool, pages, below=()):
        return len(pages) + len(below)

    with replaced(Windows, "num_usable", num_usable):
        yield


@mutant(10_000, "S38")
def the_windows_of_who_sends_pass() -> Iterator[None]:
    original = window_claims.pass_window

    def pass_window(node_state, progress):
        original(node_state, progress)
        if node_state.windows.are_there and progress.state is state.State.COMPUTING:
            window_claims.give_up_parts(node_state, progress, node_state.windows.first_seen(progress.computed))

    with replaced(window_claims, "pass_window", pass_window):
        yield
