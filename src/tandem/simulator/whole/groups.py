"""The workers of each replica that has several: what they have in common.

S21     at one place of the sequence all have the same batch: the same rows, of the same tokens, in the same pages
blame   a worker that is named as the reason of an end is one to which something was done; and nobody ends without a
        reason, once all that goes wrong is over
"""

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any  # rows, as `engine.py` has them

from tandem.core.batch import BatchPlan
from tandem.core.values import SECOND
from tandem.engine.late_tokens import RunBatch
from tandem.ranks import Rank
from tandem.server.processes import Launch
from tandem.simulator.oracle import Violation
from tandem.simulator.whole.engine import SimulatedEngine
from tandem.simulator.whole.faults import ENDING_NS, Faults
from tandem.simulator.whole.kernel import Kernel, Process
from tandem.simulator.whole.starvation import server_of

AFTERWARDS_NS = 20 * SECOND  # until a server that hung has ended
ENDS = {"tandem.api": (" is lost: ",), "tandem.cluster": ("ends: ",)}  # what they log then
NAMED = re.compile(r"the (worker TP\d+(?: CP\d+)? PP\d+) process |(DP rank \d+: the worker) process ")


@dataclass(slots=True)
class Replica:
    """One life of it."""

    batches: list[bytes] = field(default_factory=list)  # digests, by whoever is furthest
    num_run: dict[Rank, int] = field(default_factory=dict)


@dataclass(slots=True)
class Groups:
    kernel: Kernel
    faults: Faults
    report: Callable[[Violation], None]
    replicas: dict[str, Replica] = field(default_factory=dict)  # by incarnation
    names: dict[str, list[Process]] = field(default_factory=dict)  # by the name of a rank
    blames: list[str] = field(default_factory=list)  # reasons that name a worker

    def join(self, launch: Launch, engine: SimulatedEngine) -> None:
        """A worker of a replica has loaded its engine."""
        process = self.kernel.current().process
        replica = self.replicas.setdefault(launch.incarnation.id, Replica())
        steps_together = launch.topology.attn_dp_size > 1
        name = f"DP rank {launch.dp_rank}: the worker" if steps_together else launch.rank.name
        self.names.setdefault(name, []).append(process)
        engine.runs = partial(self._run, replica, launch.rank)
        engine.ends = partial(self._fails, process)

    def _fails(self, process: Process) -> None:
        self.faults.struck.add(process)
        self.faults.disturb(server_of(process), ENDING_NS)

    def _run(self, replica: Replica, rank: Rank, plan: BatchPlan, batch: RunBatch[Any]) -> None:
        self.compare(replica, rank, digest_of(plan, batch))

    def compare(self, replica: Replica, rank: Rank, digest: bytes) -> None:
        """This worker runs its next batch."""
        number = replica.num_run.get(rank, 0)
        replica.num_run[rank] = number + 1
        if number == len(replica.batches):
            replica.batches.append(digest)
        elif replica.batches[number] != digest:
            why = f"{rank.name} runs its batch number {number + 1} over other rows than the other workers"
            self.report(Violation("S21", f"{self.kernel.current().process.name}: {why}"))

    def ends(self, why: str) -> None:
        """The server whose process logs this ends, or loses a replica."""
        server, now = self.kernel.current().process, self.kernel.now
        if self.faults.is_over and now > self.faults.over_ns + AFTERWARDS_NS:
            calm_s = (now - self.faults.over_ns) / SECOND
            self.report(
                Violation("blame", f"{server.name}: {why!r}, {calm_s:.0f} s after all that was done to anybody")
            )
        found = NAMED.search(why)
        if found is None:
            return
        self.blames.append(why)
        known = [process for process in self.names.get(found[1] or found[2], []) if is_of(process, server)]
        if known and not self.faults.struck.intersection(known) and not self.faults.may_cut_off(server_of(server)):
            self.report(Violation("blame", f"{server.name}: {why!r}, and nothing was done to it"))


def is_of(worker: Process, server: Process) -> bool:
    """Whether it is one of this life of the server, or on a further host of it, in whatever life."""
    return worker.parent is server or (".host" in worker.name and server_of(worker) == server_of(server))


def digest_of(plan: BatchPlan, batch: RunBatch[Any]) -> bytes:
    digest = blake2b(f"{plan.id} {plan.iteration} {plan.decodes} {plan.micro_batch}".encode(), digest_size=8)
    rows = [(span.sequence, span.start, span.stop) for span in batch.spans]
    members = batch.samplers[sum(span.samples for span in batch.spans) :]
    for row, start, stop in (*rows, *((member, 0, len(member.tokens)) for member in members)):
        digest.update(f"{row.request} {start} {stop} {row.pages} ".encode() + row.tokens[:stop].tobytes())
    return digest.digest()


class Reasons(logging.Handler):
    """Hears why servers and replicas end."""

    def __init__(self, groups: Groups) -> None:
        super().__init__(logging.INFO)
        self._groups = groups

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if record.name in ENDS and any(mark in message for mark in ENDS[record.name]):
            self._groups.ends(message)
