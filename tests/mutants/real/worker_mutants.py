"""Bugs of the data plane of one worker among several. The simulator has none of this code, so no seed kills them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from seeded_bugs.base import replaced
from tandem.core.commands import CancelPull, RevokePages
from tandem.core.events import ReadsDrained
from tandem.transfer.sock import SockTransfer


@contextmanager
def one_worker_ignores_a_revoke() -> Iterator[None]:
    original = SockTransfer.revoke

    def revoke(self: SockTransfer, command: RevokePages) -> None:
        if self._kv.shard == 0:
            original(self, command)

    with replaced(SockTransfer, "revoke", revoke):
        yield


@contextmanager
def one_worker_says_drained_and_keeps_its_grants() -> Iterator[None]:
    original = SockTransfer.revoke

    def revoke(self: SockTransfer, command: RevokePages) -> None:
        if self._kv.shard == 0:
            original(self, command)
        else:
            self._outbox.put(ReadsDrained(command.request, command.attempt, self._kv.shard))
            self._flush_later()

    with replaced(SockTransfer, "revoke", revoke):
        yield


@contextmanager
def one_worker_ignores_the_cancel_of_a_pull() -> Iterator[None]:
    original = SockTransfer.cancel

    def cancel(self: SockTransfer, command: CancelPull) -> None:
        if self._kv.shard == 0:
            original(self, command)

    with replaced(SockTransfer, "cancel", cancel):
        yield


WORKER_MUTANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    breaks.__name__: breaks
    for breaks in (
        one_worker_ignores_a_revoke,
        one_worker_says_drained_and_keeps_its_grants,
        one_worker_ignores_the_cancel_of_a_pull,
    )
}
