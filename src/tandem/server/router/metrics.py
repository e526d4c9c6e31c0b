"""Numbers of one router for Prometheus: folds over its events and commands, gauges read from its state when scraped."""

import contextlib

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tandem.core.router.circuit_breaker import BreakerState
from tandem.core.router.messages import (
    DispatchPair,
    Fail,
    Forward,
    RouteCause,
    RouterCommand,
    Side,
)
from tandem.core.router.router import Router
from tandem.core.router.worker_registry import RegisteredWorker
from tandem.core.values import Cause
from tandem.server.api.errors import RULES, Failure, Problem

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
REFUSALS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5)

BREAKER_STATES = (BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN)


class RouterMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "requests that have ended, by status", ["path", "status"])
        self.retries = self._counter("retries", "attempts after the first")
        self.resumes = self._counter("resumes", "streams that another pair went on with")
        self.failures = self._counter("failures", "requests that ended with an error, by cause", ["cause"])
        self.client_errors = self._counter("client_errors", "requests refused for what the client sent", ["status"])
        self.duration = self._histogram("request_seconds", "from the request's head to the end of the answer", ["path"])
        self.first_byte = self._histogram("first_byte_seconds", "from the request's head to the first byte", ["path"])
        self.head = self._histogram(
            "worker_seconds", "from dispatch to the head of a worker's answer", ["worker", "role"]
        )
        self.refusal = self._histogram(
            "refusal_seconds",
            "from the last byte that came, or the connection, to its refusal at the door",
            [],
            REFUSALS,
        )
        self._exported: set[tuple[str, str]] = set()  # workers
        self._active = self._gauge("active_requests", "requests under way")
        self._live = self._gauge("worker_live", "1: gets requests", ["worker", "role"])
        self._breaker = self._gauge(
            "worker_cb_state", "circuit breaker: 0 closed, 1 open, 2 half open", ["worker", "role"]
        )
        self._worker_active = self._gauge("worker_active_prompts", "prompts under way at a worker", ["worker", "role"])

    def see(self, command: RouterCommand) -> None:
        match command:
            case DispatchPair(attempt=attempt) if attempt > 1:
                self.retries.inc()
            case Forward(resumes=True):
                self.resumes.inc()
            case Fail(cause=cause):
                self.failures.labels(cause.value).inc()
            case _:
                pass

    def see_rejection(self, half: Side, status: int) -> None:
        """A worker's refusal that goes to the client: of what the client sent, or of what the worker could not do.

        An end by name has the cause that it has where the router itself says it, between two attempts.
        """
        if status == RULES[Cause.ABORTED].status:
            self.failures.labels(RouteCause.ABORTED.value).inc()
        elif not self.see_refusal(status):
            self.failures.labels(f"{half.value}_rejected").inc()

    def see_refusal(self, status: int) -> bool:
        """Whether it is the client's own mistake, which is no failure."""
        if is_own := 400 <= status < 500:
            self.client_errors.labels(str(status)).inc()
        return is_own

    def see_refused_at_door(self, waited_seconds: float | None) -> None:
        """For want of room, before anything of it was read."""
        self.failures.labels(Problem.BUSY.value).inc()
        if waited_seconds is not None:
            self.refusal.observe(waited_seconds)

    def see_unasked(self, path: str, failure: Failure, seconds: float) -> None:
        """The router itself has refused a request, before any worker was asked."""
        if not self.see_refusal(failure.status):
            self.failures.labels(failure.code.value).inc()
        self.see_reply(path, failure.status, None, seconds)

    def see_reply(self, path: str, status: int, first_byte_seconds: float | None, seconds: float) -> None:
        """A request has ended; status 499 when its client has left."""
        self.requests.labels(path, str(status)).inc()
        self.duration.labels(path).observe(seconds)
        if first_byte_seconds is not None:
            self.first_byte.labels(path).observe(first_byte_seconds)

    def see_head(self, worker: RegisteredWorker, seconds: float) -> None:
        self.head.labels(worker.url, worker.role.value).observe(seconds)

    def export(self, router: Router) -> bytes:
        """Prometheus text."""
        self._active.set(router.num_active())
        self._forget_gone(router)
        live = {worker.id for worker in router.registry.workers() if router.is_live(worker.id)}
        for worker in router.registry.workers():  # of two with one URL the newer one comes later
            self._live.labels(worker.url, worker.role.value).set(worker.id in live)
            if (breaker := router.registry.breaker(worker.id)) is not None:
                self._breaker.labels(worker.url, worker.role.value).set(BREAKER_STATES.index(breaker.state))
            self._worker_active.labels(worker.url, worker.role.value).set(router.load(worker.id))
        return generate_latest(self.registry)

    def _forget_gone(self, router: Router) -> None:
        """Of a worker that has left nothing is said any more, but for what was counted."""
        there = {(worker.url, worker.role.value) for worker in router.registry.workers()}
        for labels in self._exported - there:
            for gauge in (self._live, self._worker_active, self._breaker):
                with contextlib.suppress(KeyError):
                    gauge.remove(*labels)
        self._exported = there

    def _counter(self, name: str, text: str, labels: list[str] | None = None) -> Counter:
        return Counter(f"tandem:router_{name}", text, labels or [], registry=self.registry)

    def _histogram(self, name: str, text: str, labels: list[str], buckets: tuple[float, ...] = SECONDS) -> Histogram:
        return Histogram(f"tandem:router_{name}", text, labels, buckets=buckets, registry=self.registry)

    def _gauge(self, name: str, text: str, labels: list[str] | None = None) -> Gauge:
        return Gauge(f"tandem:router_{name}", text, labels or [], registry=self.registry)
