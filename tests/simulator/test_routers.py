"""Routers of random worlds, whichever policy and breaker a seed gives them: whom they choose, and when."""

from collections import Counter
from collections.abc import Sequence
from typing import Any  # what the simulator makes a router with

import pytest

from tandem.core.router.circuit_breaker import BreakerSettings, BreakerState
from tandem.core.router.messages import ClientAsked, DispatchPair, RouterEvent
from tandem.core.router.router import Router, RouterEffects
from tandem.core.router.routing import CACHE_AWARE
from tandem.core.values import Nanos, RequestId
from tandem.simulator.actors import gateway
from tandem.simulator.actors.model_names import SOMEWHERE
from tandem.simulator.faults.options import Options, draw_options
from tandem.simulator.hunt import run_seed

AFFINE = 4  # seeds of each kind
BREAKING = 6
CHANGING = 4


def seeds(kind: str, count: int) -> list[int]:
    """The first ones that draw such a router."""
    found: list[int] = []
    seed = 0
    while len(found) < count:
        found += [seed] if kinds_of(draw_options(seed))[kind] else []
        seed += 1
    return found


def kinds_of(options: Options) -> dict[str, bool]:
    settings = options.router
    policies = (settings.prefill_policy.name, settings.decode_policy.name)
    breaks = settings.breaker is not None and settings.breaker.failures < BreakerSettings().failures
    return {
        "affine": CACHE_AWARE in policies,
        "breaking": breaks,
        "turnover": options.turnover,
        "models": options.names_models,
    }


class Watched(Router):
    """Sees to it that whoever is chosen may be, and counts what it has seen of breakers."""

    seen: Counter[str] = Counter()

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self.models: dict[RequestId, str | None] = {}

    def step(self, events: Sequence[RouterEvent], now: Nanos) -> RouterEffects:
        self.models |= {event.request: event.model for event in events if isinstance(event, ClientAsked)}
        effects = super().step(events, now)
        self.seen["leaving under way"] += len(self.registry.leaving())
        for command in effects.commands:
            if isinstance(command, DispatchPair):
                model = self.models[command.request]
                for worker in (command.pair.prefill, command.pair.decode):
                    names = self.registry.models(worker.id)
                    assert model is None or names is None or model in names
                    self.seen["of few"] += model == SOMEWHERE
                    assert worker in self.registry.live(worker.role)
                    assert worker.id not in self.registry.leaving()
                    self.seen["dispatches"] += 1
                    self.seen["spread"] += len({it.id for it in self.registry.live(worker.role)}) > 1
        for worker in self.registry.workers():
            if (breaker := self.registry.breaker(worker.id)) is not None:
                self.seen[breaker.state] += 1
        return effects


@pytest.mark.parametrize(
    ("kind", "count"), [("affine", AFFINE), ("breaking", BREAKING), ("turnover", CHANGING), ("models", CHANGING)]
)
def test_nobody_is_sent_to_a_worker_that_is_dead(kind: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "Router", Watched)
    monkeypatch.setattr(Watched, "seen", Counter())
    for seed in seeds(kind, count):
        result = run_seed(seed)
        assert not result.invariant, result
    assert Watched.seen["spread"] > 20, "there was a choice"
    if kind == "models":
        assert Watched.seen["of few"] > 20
    if kind == "turnover":
        assert Watched.seen["leaving under way"] > 0
    if kind == "breaking":
        assert min(Watched.seen[state] for state in BreakerState) > 0
