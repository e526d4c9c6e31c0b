"""Seeded bugs: each breaks the production core in one place, and a checker has to notice.

An invariant that no bug can break is not checked; a simulator that stays silent is worth nothing. A mutant is a context
in which one function of the core is another one. It is found wherever it was imported to, so the core needs no hooks
and knows nothing of this. Every mutant names the checker that has to kill it, and a seed on which it does.
"""

from seeded_bugs import (
    accounts,
    agreement,
    batches,
    bookkeeping,
    edges,
    ends,
    orders,
    pages,
    queues,
    rendering,
    rendezvous,
    rows,
    tiers,
    watchdogs,
    windows,
)
from seeded_bugs.base import MUTANTS, Mutant

__all__ = [
    "MUTANTS",
    "Mutant",
    "accounts",
    "agreement",
    "batches",
    "bookkeeping",
    "edges",
    "ends",
    "orders",
    "pages",
    "queues",
    "rendering",
    "rendezvous",
    "rows",
    "tiers",
    "watchdogs",
    "windows",
]
