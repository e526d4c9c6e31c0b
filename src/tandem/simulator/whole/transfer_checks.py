"""The checkers of a data plane, in every worker process of a whole cluster: its threads, its queues, its reports.

Looked at between the turns of threads, at every report and now and then. Nothing here decides or changes anything.

    places    a pull that lives waits for its turn, pauses or is somebody's job, and is in one of these places only;
              who was cancelled waits for nothing, and is remembered while a job still receives for it only
    turns     nobody waits who may begin, while no thread is on its way to him
    reports   what has happened is told to the node at once
    drained   told once for each time it was asked for, when nothing moves any more, and nothing is told after it
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any  # what is handed on to a `SockTransfer`

from tandem.core.commands import CancelPull, PublishPages, RevokePages
from tandem.core.events import Event, PagesLanded, ReadsDrained, TransferDrained, TransferFailed
from tandem.core.kv_parts import KvShard
from tandem.core.values import MILLISECOND, SECOND
from tandem.simulator.oracle import Violation
from tandem.simulator.whole.kernel import Kernel, Process
from tandem.simulator.whole.memory import Memories
from tandem.transfer.jobs import Key, Receive
from tandem.transfer.lender import Grant
from tandem.transfer.owner import ReaderLink
from tandem.transfer.pages import PageAccess
from tandem.transfer.sock import SockTransfer

LOOK_NS = 20 * MILLISECOND
ON_ITS_WAY_NS = 2 * MILLISECOND  # a thread that was called has begun by then
TOLD_NS = 100 * MILLISECOND  # who tells it writes a few bytes to a process that reads
SETTLED_NS = SECOND  # after a process was kept from running


@dataclass(frozen=True, slots=True)
class TransferWatch:
    """Of all workers of a cluster. is_held_up: whether the process's server was kept from running since then."""

    kernel: Kernel
    report: Callable[[Violation], None]
    is_held_up: Callable[[Process, int], bool]
    memories: Memories


class CheckedTransfer(SockTransfer):
    """A data plane that is looked at from outside."""

    def __init__(
        self,
        pages: PageAccess,
        kv: KvShard,
        *,
        report: Callable[[Event], None],
        watch: TransferWatch,
        **others: Any,
    ) -> None:
        self._watch = watch
        self._process = watch.kernel.current().process
        self._grants: defaultdict[Key, list[Grant[ReaderLink]]] = defaultdict(list)
        self._num_asked: Counter[tuple[type[Event], Key]] = Counter()  # ends that may still be told
        self._has_drained: set[Key] = set()
        self._first_event: tuple[Event | None, int] = (None, 0)  # that waits to be told, and since when

        def hear(event: Event) -> None:
            self._hear(event)
            report(event)

        super().__init__(pages, kv, report=hear, **others)
        watch.kernel.after(LOOK_NS, self._look)

    def publish(self, command: PublishPages) -> None:
        super().publish(command)
        key = (command.request, command.attempt)
        self._grants[key] = [grant for grant in self._owner._lender.grants() if (grant.request, grant.attempt) == key]

    def revoke(self, command: RevokePages) -> None:
        self._num_asked[ReadsDrained, (command.request, command.attempt)] += 1
        super().revoke(command)

    def cancel(self, command: CancelPull) -> None:
        self._num_asked[TransferDrained, (command.request, command.attempt)] += 1
        super().cancel(command)

    # --- reports -----------------------------------------------------------------------------------------------------

    def _hear(self, event: Event) -> None:
        match event:
            case ReadsDrained(request, attempt) | TransferDrained(request, attempt):
                key = (request, attempt)
                self._num_asked[type(event), key] -= 1
                if self._num_asked[type(event), key] < 0:
                    self._wrong("S22", f"{type(event).__name__} of {key} is told, and nobody has asked for it any more")
                if isinstance(event, TransferDrained):
                    self._has_drained.add(key)
                if self._still_moves(event, key):
                    self._wrong("S4", f"{type(event).__name__} of {key} is told while its bytes move")
            case PagesLanded(request, attempt) | TransferFailed(request, attempt):
                if (request, attempt) in self._has_drained:
                    self._wrong("S4", f"{type(event).__name__} of {(request, attempt)} is told after its end")
            case _:
                pass

    def _still_moves(self, event: Event, key: Key) -> bool:
        if isinstance(event, ReadsDrained):
            revoked = [grant for grant in self._grants[key] if grant.is_revoked]
            return any(grant.readers for grant in revoked) or any(map(self._is_copied, revoked))
        return key in self._receiving()

    def _is_copied(self, revoked: Grant[ReaderLink]) -> bool:
        """A page of it, which nobody reads by another grant."""
        buffer = self._pages.buffer
        assert buffer is not None
        read = {page for grant in self._owner._lender.grants() if grant.readers for page in grant.generations}
        return self._watch.memories.is_copied(buffer, revoked.generations.keys() - read, self._pages.page_bytes)

    def _receiving(self) -> set[Key]:
        return {job.pull.attempt.key for job in self._reader._puller._jobs if isinstance(job, Receive)}

    # --- now and then ------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        if self._is_closed or not self._process.is_alive:
            return
        self._watch.kernel.after(LOOK_NS, self._look)
        if self._is_held_up():
            self._first_event = (None, 0)
            return
        self._look_at_reports()
        if not self._reader._lock.locked():
            self._look_at_places()
            self._look_at_turns()

    def _is_held_up(self) -> bool:
        process = self._process
        return process.is_frozen or self._watch.is_held_up(process, self._watch.kernel.now - SETTLED_NS)

    def _look_at_reports(self) -> None:
        now, events = self._watch.kernel.now, self._outbox._events
        first = events[0] if events else None
        if first is not self._first_event[0]:
            self._first_event = (first, now)
        elif first is not None and now - self._first_event[1] > TOLD_NS:
            self._wrong("liveness", f"{first} has happened, and nobody tells it")

    def _look_at_places(self) -> None:
        puller = self._reader._puller
        waiting = [pull for lane in puller._lanes.values() for pull in lane.waiting]
        places = Counter(waiting)
        places.update(job.pull for job in puller._jobs if not job.pull.attempt.is_over)
        places.update(pull for _, pull in puller._paused if not pull.attempt.is_over)
        for key, attempt in puller._attempts.items():
            for pull in attempt.pulls:
                if places[pull] != bool(pull.commands):
                    self._wrong("S16", f"the pull {key} waits, pauses or is a job in {places[pull]} places")
        for pull in waiting:
            if puller._attempts.get(pull.attempt.key) is not pull.attempt:
                self._wrong("S17", f"the pull {pull.attempt.key} has ended, and waits for its turn")
        for key in puller._leaving.keys() - self._receiving():
            self._wrong("S17", f"the pull {key} is over, no job receives for it, and it is still remembered")

    def _look_at_turns(self) -> None:
        found = self._who_may_begin()
        if found is not None:
            self._watch.kernel.after(ON_ITS_WAY_NS, lambda: self._look_again(found))

    def _look_again(self, before: tuple[Key, list[int]]) -> None:
        is_free = self._process.is_alive and not self._is_closed and not self._reader._lock.locked()
        if is_free and not self._is_held_up() and self._who_may_begin() == before:
            self._wrong("liveness", f"the pull {before[0]} may begin, and no thread is on its way")

    def _who_may_begin(self) -> tuple[Key, list[int]] | None:
        """The first pull that is due, and the jobs that are out."""
        puller, now = self._reader._puller, self._watch.kernel.now
        jobs = [id(job) for job in puller._jobs]
        if puller._paused and puller._paused[0][0] <= now:
            return puller._paused[0][1].attempt.key, jobs
        for turn in puller._turns if not puller._is_full(now) else ():
            lane = puller._lanes[turn]
            if puller._may_begin(turn, now):
                return next(iter(lane.waiting)).attempt.key, jobs
        return None

    def _wrong(self, invariant: str, detail: str) -> None:
        self._watch.report(Violation(invariant, f"{self._process.name}: {detail}"))
