"""Whole clusters that a router of vLLM's asks, prefill first and decode then (decision 042)."""

from pathlib import Path
from random import Random

import pytest

from tandem.simulator.whole import world
from tandem.simulator.whole.clients import Answer, ClientRequest, Keys
from tandem.simulator.whole.world import run_seed

PAIR, OLDER = 10_000, 0


@pytest.mark.parametrize(("seed", "paths"), [(PAIR, {"local", "remote"}), (OLDER, set[str]())])
def test_what_prefill_answers_leads_decode_to_its_pages(
    seed: int, paths: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefill says that its prompt is computed where it is asked."""
    monkeypatch.chdir(tmp_path)
    found: set[str] = set()
    ask_at = world.ask_at

    async def seen(host: str, port: int, ask: ClientRequest, random: Random, keys: Keys) -> Answer:
        answer = await ask_at(host, port, ask, random, keys)
        if "kv_transfer_params" in ask.routed:
            found.add(answer.headers["x-tandem-path"])
        return answer

    monkeypatch.setattr(world, "ask_at", seen)
    result = run_seed(seed)

    assert not result.invariant, f"{result.line}: {result.detail}"
    assert found == paths
