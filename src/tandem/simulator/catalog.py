"""Every invariant and every fault class, and for each what looks after it.

An invariant is checked by a class (or function) that raises a violation with its id, and a mutant shows that it does.
A fault class is drawn by `draw_options` and lives in a place.

docs/invariants.md is this table: `python -m tandem.simulator.catalog > docs/invariants.md`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pkgutil import resolve_name

from tandem.simulator.faults.names import name_of

TITLE = """# Invariants and faults of the simulation

Generated from `src/tandem/simulator/catalog.py`. S is safety, checked after every event; L is liveness, checked with
deadlines in virtual time; W is what we added. Every invariant is the first to notice at least one mutant of
`tests/seeded_bugs/`.

What never occurs is never checked: every event and command of the core and of the router, every message, transfer state
and status of the data plane and every code of `docs/errors.md` has to occur in random worlds, or has its reason in
`tests/simulator/test_known_seeds.py` (`simulator/occurrences.py`; `tandem simulate --coverage` counts them).
"""


@dataclass(frozen=True, slots=True)
class Row:
    """`place` is where it is checked, or where the fault comes from."""

    id: str
    says: str
    place: str  # `module:name`, below `tandem.simulator`

    @property
    def full_place(self) -> str:
        return f"tandem.simulator.{self.place}"

    def find(self) -> object:
        return resolve_name(self.full_place)


INVARIANTS: tuple[Row, ...] = (
    Row("S1", "pages: free + owned + cached + quarantined = total", "checkers.pages:PageAccounting"),
    Row("S2", "a page has one owner, who alone writes it", "checkers.pages:PageOwnership"),
    Row("S3", "a page is read only under the generation of its grant, with its secret", "checkers.pages:StaleReads"),
    Row("S4", "nothing lands in or is read from a page that was given back", "checkers.pages:FreedPages"),
    Row("S5", "no read beyond, or other than, what was computed", "checkers.pages:SentPages"),
    Row("S6", "pins of the prefix tree are those of live requests", "checkers.pages:PrefixTreePins"),
    Row("S7", "a page from another tier carries hash and layout", "checkers.tiers:TierPages"),
    Row("S8", "a result slot has one live owner", "checkers.result_slots:SlotOwners"),
    Row("S9", "a result slot is read only for its own room", "checkers.result_slots:SlotContents"),
    Row("S10", "a result slot is given back exactly once", "checkers.result_slots:SlotsOnce"),
    Row("S11", "who lacks a result slot blocks nobody behind it", "checkers.result_slots:SlotsNeverBlock"),
    Row("S12", "exactly one terminal event, and nothing after it", "checkers.stream:OneEnd"),
    Row("S13", "state changes follow the tables; a step never raises", "checkers.changes:StateChanges"),
    Row("S14", "tokens equal the oracle's", "checkers.stream:Tokens"),
    Row("S15", "no token is skipped or told twice", "checkers.stream:StreamsInOrder"),
    Row("S16", "a request is in exactly one queue", "checkers.changes:OneQueue"),
    Row("S17", "after its end nothing of a request is left", "checkers.liveness:NothingLeft"),
    Row("S18", "a refused request holds nothing, and its other half hears of it", "checkers.intake:Refusals"),
    Row("S19", "nothing is decoded before its KV is whole", "actors.executor:Executor"),
    Row("S20", "every shard is told one sequence without a gap", "checkers.agreement:OneSequence"),
    Row("S21", "at one place of the sequence all have the same batch", "checkers.agreement:SameSet"),
    Row("S22", "what one shard reports is the node's decision, told to all", "checkers.agreement:OneVerdict"),
    Row("S23", "the DP rank that has the KV is the one that is asked", "checkers.agreement:RightRank"),
    Row("S24", "iterations rise", "actors.executor:Executor"),
    Row("S25", "retries stay within their budget", "checkers.changes:Retries"),
    Row("S26", "prompt = hit + computed the first time", "checkers.accounting:HitRate"),
    Row("S27", "no retry resets the clock of the first token", "checkers.accounting:FirstTokenClock"),
    Row("S28", "a veto of the delayer has a reason", "checkers.agreement:DelayerVetoes"),
    Row("S29", "one live dispatch per attempt, a new room per retry", "checkers.outside:OneDispatch"),
    Row("S30", "gauges equal a recount", "checkers.accounting:Gauges"),
    Row("S31", "what is malformed becomes no pull and no peer", "checkers.outside:WellFormed"),
    Row("S32", "pages are shared only within a tenant", "checkers.pages:TenantsApart"),
    Row("S33", "a restored node decides the same", "checkers.outside:SameAfterRestore"),
    Row("S34", "a node knows no clock but its own", "checkers.outside:OwnClock"),
    Row("S35", "what an operator orders is done: caches flushed, hooks changed", "checkers.orders:Orders"),
    Row("S36", "a connection that is back ends nothing, and READY is said again", "checkers.orders:Returns"),
    Row("S37", "what is announced of the cache is what the prefix tree holds", "checkers.pages:AnnouncedPages"),
    Row("S38", "layers with a window have the KV that is seen or sent, and no more", "checkers.pages:WindowParts"),
    Row("L1", "every request ends by its deadline + 1 s", "checkers.liveness:Deadlines"),
    Row("L2", "after its end a request's resources come back", "checkers.liveness:Releases"),
    Row("L3", "the delayer holds nobody beyond its bounds", "checkers.agreement:DelayIsBounded"),
    Row("L4", "nobody is overtaken, and nobody waits for an idle node", "checkers.changes:QueueOrder"),
    Row("L5", "after healing every pair works again", "checkers.liveness:WorksWhenHealed"),
    Row("L6", "nobody fails for pages that come back", "checkers.liveness:PagesComeBack"),
    Row("L7", "who was pushed back makes a token before the next time", "checkers.changes:PingPong"),
    Row(
        "L8",
        "a shard that stalls ends its group in time, which is unhealthy before",
        "checkers.stalls:StallChecker",
    ),
    Row("L9", "who drains accepts nobody", "checkers.intake:NoNewWork"),
    Row("L10", "overload is refused at once, and queues stay bounded", "checkers.intake:Bounds"),
    Row("L11", "quarantined pages have somebody who waits for them", "checkers.pages:Quarantine"),
    Row("L12", "an error of another tier fails no request", "checkers.tiers:TierErrors"),
    Row("W1", "every wait has a name and a deadline", "checkers.liveness:Waits"),
    Row("W2", "no node wakes up for nothing for ever", "checkers.liveness:IdleSteps"),
    Row("W3", "nobody asks the same in a circle", "checkers.liveness:Questions"),
    Row(
        "W4",
        "an edge ends a request once: by its node, its loss, its silence, or its standing still",
        "checkers.edges:EdgeEnds",
    ),
    Row("W5", "no client waits beyond its deadline + 1 s, whatever a node does", "checkers.edges:EdgeDeadlines"),
)

FAULTS: tuple[Row, ...] = (
    Row("F1", "message loss", "network.links:Network"),
    Row("F2", "delays and clogged links", "network.links:Network"),
    Row("F3", "duplicates of messages and events", "world:World.push"),
    Row("F4", "duplicates from old connections", "network.links:Network"),
    Row("F5", "partitions", "faults.fault_injector:FaultInjector.partition"),
    Row("F6", "crash and restart of servers, bootstraps and routers", "faults.fault_injector:FaultInjector.crash"),
    Row("F7", "one shard or DP rank dies", "faults.fault_injector:FaultInjector.lose_shard"),
    Row("F8", "pauses of a node", "faults.fault_injector:FaultInjector.pause"),
    Row(
        "F9",
        "slow executors and shards, processes and batches that hang",
        "faults.fault_injector:FaultInjector.slow_down",
    ),
    Row("F10", "clocks that began elsewhere, and drift", "clock:LocalClock"),
    Row("F11", "few result slots", "faults.options:draw_options"),
    Row("F12", "few pages", "faults.options:draw_options"),
    Row("F13", "aborts at random moments", "actors.gateway:Gateway.leave"),
    Row("F14", "corrupted transfers", "network.data_plane_faults:DataPlaneFaults.corrupts"),
    Row("F15", "transfers that end late after a cancel", "network.data_plane_faults:DataPlaneFaults.linger_ns"),
    Row("F16", "tiers that are full, slow, short, stale or corrupted", "actors.host_tier:TierFaults"),
    Row(
        "F17",
        "repeated rooms, lost halves, wrong ranks, hostile and malformed messages",
        "faults.hostile:made_up_message",
    ),
    Row("F18", "bursts of clients that leave", "faults.fault_injector:FaultInjector.disconnect"),
    Row("F19", "prefill and decode with different layouts", "world:World"),
    Row("F20", "what devices and sockets refuse; logits that are not finite", "world:World"),
    Row(
        "F21",
        "servers that come late, are drained, return or not, or with other DP ranks",
        "faults.fault_injector:FaultInjector.drain",
    ),
    Row("F22", "nodes replaced by their own snapshot", "faults.fault_injector:FaultInjector.swap_for_snapshot"),
    Row(
        "F23",
        "connections that break and come back within their time or not, or go silent",
        "faults.fault_injector:FaultInjector.flicker",
    ),
    Row(
        "F24",
        "operators: caches flushed, hooks changed, restarts at once; an edge that refuses by itself",
        "faults.fault_injector:FaultInjector.change_hooks",
    ),
    Row("F25", "requests that do not fit, short timeouts of the rendezvous", "workload:enlarge"),
)


def page() -> str:
    return "\n".join([TITLE, *table("invariant", INVARIANTS), "", *table("fault", FAULTS), ""])


def table(kind: str, rows: tuple[Row, ...]) -> Iterator[str]:
    """Markdown."""
    yield f"| {kind} | says | looked after by |"
    yield "|---|---|---|"
    yield from (f"| {name_of(row.id)} | {row.says} | `{row.place.replace(':', '.')}` |" for row in rows)


if __name__ == "__main__":
    print(page(), end="")
