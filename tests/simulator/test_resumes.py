"""Streams whose decode dies in random worlds: who goes on with them says what the oracle says, each token once."""

from collections import Counter
from typing import Any  # what the product gives

import pytest

from tandem.core.router.messages import DispatchPair, Forward, RouterCommand
from tandem.server.api import generation_request, telling
from tandem.server.router.metrics import RouterMetrics
from tandem.simulator.actors import gateway, upstream_calls
from tandem.simulator.hunt import run_seed
from tandem.simulator.whole import world

SEEDS = (3, 5, 46)  # in which streams are resumed
WHOLE_SEEDS = (22, 31)
SEVERAL_SEED = 31  # a stream of two samples


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    found: Counter[str] = Counter()
    begin, end = gateway.Gateway._begin, upstream_calls.Caller.end

    def watched(self: gateway.Gateway, command: RouterCommand) -> None:
        found["asked"] += isinstance(command, DispatchPair) and command.resumes
        found["went on"] += isinstance(command, Forward) and command.resumes
        begin(self, command)

    def ended(self: upstream_calls.Caller, outcome: str) -> None:
        end(self, outcome)
        found["finished"] += self.num_resumes > 0 and outcome == "finished"

    monkeypatch.setattr(gateway.Gateway, "_begin", watched)
    monkeypatch.setattr(upstream_calls.Caller, "end", ended)
    return found


def test_streams_go_on_and_finish_with_the_tokens_of_the_oracle(seen: Counter[str]) -> None:
    for seed in SEEDS:
        found = run_seed(seed)
        assert (found.invariant, found.detail) == ("", "")
    assert seen["asked"] >= seen["went on"] >= seen["finished"] >= len(SEEDS)


@pytest.mark.parametrize("wrong_by", [-1, 1])
def test_a_stream_that_goes_on_at_another_token_is_noticed(
    seen: Counter[str], wrong_by: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatch = gateway.Gateway._dispatch

    def wrong(self: gateway.Gateway, caller: upstream_calls.Caller, sent: DispatchPair) -> None:
        caller.num_tokens += wrong_by if sent.resumes else 0
        dispatch(self, caller, sent)
        caller.num_tokens -= wrong_by if sent.resumes else 0

    monkeypatch.setattr(gateway.Gateway, "_dispatch", wrong)
    assert {run_seed(seed).invariant for seed in SEEDS} & {"S14", "S15"}


def test_bytes_of_whole_clusters_go_on_with_the_right_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    resumed = 0
    num_choices: dict[int, set[int]] = {seed: set() for seed in WHOLE_SEEDS}
    see, goes_on = RouterMetrics.see, generation_request.goes_on

    def counted(self: RouterMetrics, command: RouterCommand) -> None:
        nonlocal resumed
        resumed += isinstance(command, Forward) and command.resumes
        see(self, command)

    def asked(*args: Any) -> telling.Resumed:
        found = goes_on(*args)
        num_choices[seed].add(len(found.asks))
        return found

    monkeypatch.setattr(RouterMetrics, "see", counted)
    monkeypatch.setattr(generation_request, "goes_on", asked)
    for seed in WHOLE_SEEDS:
        found = world.run_seed(seed)
        assert (found.invariant, found.detail) == ("", "")
    assert resumed >= len(WHOLE_SEEDS)
    assert 2 in num_choices[SEVERAL_SEED]
