"""Pages of another process from which a reader copies, whatever brings them within its reach.

Two implementations: memory of the same host, mapped (`shared_memory.py`), and reads by NIXL (`nixl_memory.py`). The
connection, its Reads, leases and answers are the same for both (`protocol.py`).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from tandem.core.kv_parts import Runs
from tandem.transfer.pages import Reached


class CopySource(Protocol):
    @property
    def way(self) -> str:
        """How the pages come, in a word."""
        ...

    @property
    def is_spent(self) -> bool:
        """A new connection serves better."""
        ...

    def reach(
        self, sources: Sequence[int], runs: Runs, *, has_news: Callable[[], bool]
    ) -> AbstractContextManager[Reached]:
        """These runs of the owner's pages, to be copied within the context and not after it.

        has_news: the connection has ended or was cut, so that nothing is worth waiting for

        Raises Malformed where there are no such pages, LinkBroken or LinkFrozen where they do not come. Nothing but
        memory of its own is ever written: when it has raised, nothing of the caller's can be.
        """
        ...
