"""What every checker needs: the world as it sees it, and the words in which it names a place."""

from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from tandem.core.commands import FailRequest, FinishRequest
from tandem.core.kv.pool import NOBODY, PagePool, PageState
from tandem.core.values import SECOND, Cut, Incarnation, PageHash, PageId, RequestId
from tandem.simulator.actors.replica import Life, Replica
from tandem.simulator.actors.servers import Server
from tandem.simulator.clock import Clock

GRACE_NS = SECOND  # "never hangs" = ended by deadline + 1 s

End = FinishRequest | FailRequest


class Watched(Protocol):
    """What the checkers see of a `World`."""

    clock: Clock
    replicas: dict[str, Replica]
    servers: dict[str, Server]

    def find(self, incarnation: Incarnation) -> Life | None: ...

    def cut_of(self, who: Incarnation) -> Cut | None: ...


def tally(parents: Iterable[PageHash | None]) -> dict[PageHash | None, int]:
    """How often each node of a prefix tree is named; None, which is the root, is not counted."""
    counts = Counter(parents)
    del counts[None]  # of a Counter, where it need not be there
    return dict(counts)


def where(life: Life, request: RequestId | None = None) -> str:
    name = f"{life.replica.name}.{life.incarnation.id}"
    return name if request is None else f"{name} request {request}"


def owner_of(pool: PagePool, page: PageId) -> str:
    owner, state = pool.owners[page], PageState(pool.states[page]).name.lower()
    return f"{state} by request {owner}" if owner != NOBODY else state
