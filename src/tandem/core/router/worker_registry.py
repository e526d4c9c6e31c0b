"""Who may get requests: the health of every worker, from probes and from what dispatches met.

    JOINING   never seen alive: not used, probed often
    LIVE      used, probed every interval
    SUSPECT   missed one probe: still used, probed again soon
    DEAD      missed `misses` probes, said itself that it takes no requests or stands still, or refused a connection;
              probed often

One good probe makes a worker LIVE from any state, unless it began before the worker was found dead: it says nothing
about the time after. A worker that starts later than the router thus joins by itself.

Of those that are alive, one whose requests fail is left alone by its circuit breaker (`circuit_breaker.py`), as long as
another one of its role is left: a breaker chooses among workers, it never takes the last one away.

Workers come and go: one that leaves gets no more requests, and is known, and asked how it is, until it has answered
those that it has.

Workers may serve different models, whose names come with their probes. Of whom they are not known, any is believed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from tandem.core.router.circuit_breaker import BreakerSettings, CircuitBreaker
from tandem.core.settings import Role
from tandem.core.values import MILLISECOND, SECOND, Nanos

WorkerId = NewType("WorkerId", int)  # in the order in which the router was told of them; never used again


class RegisteredWorker(Struct, frozen=True):
    """One server as the router was told of it, or as it says itself."""

    id: WorkerId
    role: Role
    url: str  # no slash at the end
    host: str  # of the URL, IPv6 in brackets: what decode is told as `bootstrap_host`
    bootstrap_port: int | None = None  # prefill only; None: it has not said it, and decode uses its own default


class Health(StrEnum):
    JOINING = "joining"
    LIVE = "live"
    SUSPECT = "suspect"
    DEAD = "dead"


class ProbeResult(StrEnum):
    OK = "ok"
    MISSED = "missed"  # no answer, or not the answer of a healthy server
    DECLINED = "declined"  # 503: the worker itself says that it takes no requests (starting, draining)
    STALLED = "stalled"  # 503: it says that its node, or a worker of it, stands still


HTTP_UNAVAILABLE = 503


def probe_result(status: int | None) -> ProbeResult:
    """Of a question for /health; None: it was not answered."""
    if status == HTTP_UNAVAILABLE:
        return ProbeResult.DECLINED
    return ProbeResult.OK if status is not None and 200 <= status < 300 else ProbeResult.MISSED


class HealthSettings(Struct, frozen=True):
    interval_ns: Nanos = Nanos(5 * SECOND)  # between two probes of a live worker
    fast_interval_ns: Nanos = Nanos(500 * MILLISECOND)  # of any other
    probe_timeout_ns: Nanos = Nanos(3 * SECOND)  # an unanswered probe is a miss
    misses: int = 2  # in a row, until dead


@dataclass(slots=True)
class _Entry:
    worker: RegisteredWorker
    next_probe: Nanos
    health: Health = Health.JOINING
    misses: int = 0
    probing_since: Nanos | None = None
    dead_since: Nanos | None = None
    silent_since: Nanos | None = None
    breaker: CircuitBreaker | None = None
    is_leaving: bool = False
    models: tuple[str, ...] | None = None  # names that it answers to; None: not known
    says_port: bool = False  # of its bootstrap server: the router was told none

    def serves(self, model: str | None) -> bool:
        return model is None or self.models is None or model in self.models


class WorkerRegistry:
    """Owns the health of all workers. Time comes in with each call and never goes back.

    Every step of the router asks who is silent, who leaves and when the next probe is due, and hardly a step changes
    it: that is looked up in all entries when one of them has changed.
    """

    def __init__(
        self,
        workers: Sequence[RegisteredWorker],
        settings: HealthSettings,
        now: Nanos,
        breaker: BreakerSettings | None = None,
    ) -> None:
        """breaker: None: workers have none."""
        self._settings = settings
        self._breaker = breaker
        self._entries: dict[WorkerId, _Entry] = {}
        self._next_id = WorkerId(0)
        self._silent: dict[WorkerId, Nanos] = {}
        self._leaving: list[WorkerId] = []
        self._wake_at: Nanos | None = None
        for worker in workers:
            self.add(worker, now)

    def snapshot(self) -> bytes:
        return msgspec.msgpack.encode((self._next_id, self._entries))

    def restore(self, snapshot: bytes) -> None:
        found = msgspec.msgpack.decode(snapshot, type=tuple[WorkerId, dict[WorkerId, _Entry]])
        self._next_id, self._entries = found
        self._look()

    def _look(self) -> None:
        """An entry has changed."""
        entries, limit = self._entries.values(), self._settings.probe_timeout_ns
        self._silent = {
            entry.worker.id: entry.silent_since
            for entry in entries
            if entry.silent_since is not None and entry.health is Health.DEAD
        }
        self._leaving = [entry.worker.id for entry in entries if entry.is_leaving]
        self._wake_at = min(
            [e.next_probe if e.probing_since is None else Nanos(e.probing_since + limit) for e in entries], default=None
        )

    @property
    def next_id(self) -> WorkerId:
        """Of the next worker that is told of."""
        return self._next_id

    def add(self, worker: RegisteredWorker, now: Nanos) -> None:
        assert worker.id not in self._entries, "worker ids must be distinct"
        self._entries[worker.id] = self._entry(worker, now)
        self._next_id = max(self._next_id, WorkerId(worker.id + 1))
        self._look()

    def leave(self, worker: WorkerId) -> None:
        """It gets no more requests. Without effect where it is unknown."""
        if (entry := self._entries.get(worker)) is not None:
            entry.is_leaving = True
            self._look()

    def leaving(self) -> list[WorkerId]:
        return self._leaving

    def drop(self, worker: WorkerId) -> None:
        """It has left."""
        del self._entries[worker]
        self._look()

    def workers(self) -> list[RegisteredWorker]:
        return [entry.worker for entry in self._entries.values()]

    def worker(self, worker: WorkerId) -> RegisteredWorker:
        return self._entries[worker].worker

    def health(self, worker: WorkerId) -> Health | None:
        """None: it has left."""
        return None if (entry := self._entries.get(worker)) is None else entry.health

    def silent(self) -> dict[WorkerId, Nanos]:
        """Dead workers that answer nothing, and since when: one that declines still serves what it has."""
        return self._silent

    def live(self, role: Role, model: str | None = None) -> list[RegisteredWorker]:
        """Workers that may get requests, in order of their ids. model: None: whichever they serve."""
        entries = self._entries.values()
        return [e.worker for e in entries if e.worker.role is role and _is_live(e) and e.serves(model)]

    def answering(self) -> list[RegisteredWorker]:
        """Whoever may have requests and hears us: those that drain or are to leave, too."""
        return [
            e.worker
            for e in self._entries.values()
            if e.worker.id not in self._silent and e.health is not Health.JOINING
        ]

    def models(self, worker: WorkerId) -> tuple[str, ...] | None:
        return None if (entry := self._entries.get(worker)) is None else entry.models

    def paired_models(self) -> list[str]:
        """That a live prefill and a live decode serve, in the order of decodes."""
        live = [entry for entry in self._entries.values() if _is_live(entry)]
        prefills = [entry for entry in live if entry.worker.role is Role.PREFILL]
        decodes = [entry for entry in live if entry.worker.role is Role.DECODE]
        names = dict.fromkeys(name for entry in decodes for name in entry.models or ())
        return [name for name in names if any(entry.serves(name) for entry in prefills)]

    def is_model(self, model: str) -> bool | None:
        """Whether somebody serves it, alive or not. None: nobody known does, but not everybody's models are known."""
        known = [entry.models for entry in self._entries.values() if not entry.is_leaving]
        if any(names is not None and model in names for names in known):
            return True
        return None if None in known or not known else False

    def usable(self, role: Role, now: Nanos, model: str | None = None) -> list[RegisteredWorker]:
        """Those of `live` whose breakers allow it; where no breaker does, all of them."""
        live = self.live(role, model)
        breakers = {worker.id: self._entries[worker.id].breaker for worker in live}
        allowed = [worker for worker in live if (one := breakers[worker.id]) is None or one.allows(now)]
        return allowed or live

    def breaker(self, worker: WorkerId) -> CircuitBreaker | None:
        return None if (entry := self._entries.get(worker)) is None else entry.breaker

    def chosen(self, worker: WorkerId, now: Nanos) -> None:
        """It gets a request."""
        if (breaker := self.breaker(worker)) is not None:
            breaker.chosen(now)

    def answered(self, worker: WorkerId, now: Nanos, *, well: bool) -> None:
        """It has done what a request asked of it, or has failed to."""
        if (breaker := self.breaker(worker)) is not None:
            breaker.succeeded(now) if well else breaker.failed(now)

    @property
    def has_asked_all(self) -> bool:
        """Whether each has been probed once, and has answered or was given up."""
        return all(entry.health is not Health.JOINING or entry.misses for entry in self._entries.values())

    def due(self, now: Nanos) -> list[WorkerId]:
        """Workers to probe now; each is answered by `probed`. At most one probe of a worker is under way."""
        if not self._is_due(now):
            return []
        due = [e for e in self._entries.values() if e.probing_since is None and e.next_probe <= now]
        for entry in due:
            entry.probing_since = now
        self._look()
        return [entry.worker.id for entry in due]

    def overdue(self, now: Nanos) -> list[WorkerId]:
        """Workers whose probe has not been answered in time: the caller counts it as missed."""
        if not self._is_due(now):
            return []
        limit = self._settings.probe_timeout_ns
        return [
            e.worker.id
            for e in self._entries.values()
            if e.probing_since is not None and e.probing_since + limit <= now
        ]

    def probed(
        self,
        worker: WorkerId,
        result: ProbeResult,
        now: Nanos,
        models: tuple[str, ...] | None = None,
        bootstrap_port: int | None = None,
    ) -> None:
        """Take in the answer to a probe.

        models, bootstrap_port: that it has told of, too; None: of none, so what was known stays.
        """
        entry = self._entries.get(worker)
        if entry is None or (began := entry.probing_since) is None:
            return  # it has left; or answered twice, or counted as missed before
        entry.probing_since = None
        if models is not None:
            entry.models = models
        if bootstrap_port is not None and entry.says_port:
            entry.worker = replace(entry.worker, bootstrap_port=bootstrap_port)
        if result is not ProbeResult.MISSED:
            entry.silent_since = None
        elif entry.silent_since is None:
            entry.silent_since = now
        if result is not ProbeResult.OK:
            self._miss(entry, result, now)
        elif entry.dead_since is None or began >= entry.dead_since:
            if entry.dead_since is not None and entry.breaker is not None:
                entry.breaker.came_back(now)
            entry.health, entry.misses, entry.dead_since = Health.LIVE, 0, None
        settled = entry.health is Health.LIVE
        interval = self._settings.interval_ns if settled else self._settings.fast_interval_ns
        entry.next_probe = Nanos(now + interval)
        self._look()

    def refused(self, worker: WorkerId, now: Nanos) -> None:
        """A dispatch could not connect: nobody listens there."""
        if (entry := self._entries.get(worker)) is None:
            return
        if entry.health is not Health.DEAD:
            entry.health, entry.dead_since = Health.DEAD, now
        if entry.silent_since is None:
            entry.silent_since = now
        entry.next_probe = min(entry.next_probe, Nanos(now + self._settings.fast_interval_ns))
        self._look()

    def _is_due(self, now: Nanos) -> bool:
        """Whether a probe is to be sent or given up."""
        return self._wake_at is not None and self._wake_at <= now

    def wake_at(self) -> Nanos | None:
        """When the next probe is to be sent or given up; None without workers."""
        return self._wake_at

    def _entry(self, worker: RegisteredWorker, now: Nanos) -> _Entry:
        breaker = None if self._breaker is None else CircuitBreaker(self._breaker)
        return _Entry(worker, next_probe=now, breaker=breaker, says_port=worker.bootstrap_port is None)

    def _miss(self, entry: _Entry, result: ProbeResult, now: Nanos) -> None:
        entry.misses += 1
        if entry.health in (Health.JOINING, Health.DEAD):
            return
        if result is not ProbeResult.MISSED or entry.misses >= self._settings.misses:
            entry.health, entry.dead_since = Health.DEAD, now
        else:
            entry.health = Health.SUSPECT


def _is_live(entry: _Entry) -> bool:
    return entry.health in (Health.LIVE, Health.SUSPECT) and not entry.is_leaving
