"""Whole clusters whose model finds the tokens of a block together (decision 031)."""

from collections import Counter
from pathlib import Path

import pytest

from tandem.core.disagg import decode_side
from tandem.simulator.whole.engine import PlainEngine, Row
from tandem.simulator.whole.options import draw_options
from tandem.simulator.whole.world import run_seed

SEEDS = (27, 43)  # a pair, and a unified server under faults


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_request_ends_as_promised_and_its_tokens_come_by_the_block(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: Counter[int] = Counter()
    said = PlainEngine._said

    def counted(engine: PlainEngine, row: Row, tokens: list[int]) -> list[int]:
        found[len(tokens)] += 1
        return said(engine, row, tokens)

    monkeypatch.setattr(PlainEngine, "_said", counted)
    result = run_seed(seed)
    assert not result.invariant, f"{result.line}: {result.detail}"
    assert result.num_finished > 0
    assert max(found) == draw_options(seed).block_tokens > 1
    assert len(found) > 1, "prompts end within blocks, too"


def test_the_same_seed_gives_the_same_bytes() -> None:
    assert run_seed(SEEDS[0]).log_hash == run_seed(SEEDS[0]).log_hash


def test_a_decode_that_expects_one_token_of_a_prefill_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_side, "num_sampled", lambda length, block_tokens: 1)
    assert run_seed(SEEDS[0]).invariant
