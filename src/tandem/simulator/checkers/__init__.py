"""One small class per invariant. They look at the production node's own state after every step, and change nothing.

Ids are those of `simulator/catalog.py`, where every invariant has its row; the id is the first word of every violation.
What is cheap is checked after every step; a full recount from nothing happens every 256 events and at the end, when the
cluster is idle.
"""

from tandem.simulator.checkers.accounting import Gauges
from tandem.simulator.checkers.changes import OneQueue, Retries
from tandem.simulator.checkers.checker_set import Checkers
from tandem.simulator.checkers.liveness import Waits
from tandem.simulator.checkers.pages import PageAccounting, PageOwnership, PrefixTreePins
from tandem.simulator.checkers.result_slots import SlotOwners, SlotsOnce

__all__ = [
    "Checkers",
    "Gauges",
    "OneQueue",
    "PageAccounting",
    "PageOwnership",
    "PrefixTreePins",
    "Retries",
    "SlotOwners",
    "SlotsOnce",
    "Waits",
]
