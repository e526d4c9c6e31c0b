"""Whole clusters whose model finds the tokens of a block together (decision 031)."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tandem.core.disagg import decode_side
from tandem.engine.drafts import Draft
from tandem.simulator.whole.cuts import CUTS, UNCUT, draw_context, draw_cut, draw_cuts, draw_together
from tandem.simulator.whole.engine import PlainEngine, Row
from tandem.simulator.whole.options import draw_blocks, draw_options
from tandem.simulator.whole.world import run_seed

SEEDS = (27, 43)  # a pair, and a unified server under faults
STAGES, SHARDS = 10_257, 10_423
CUT = (STAGES, SHARDS, 10_144, 10_393, 10_429)  # three pairs of all kinds of cuts, the last two under faults


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("seed", [*SEEDS, *CUT])
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


def test_replicas_of_several_workers_find_blocks_in_every_kind_of_cut() -> None:
    """From the first seed on that was not on record when they came to it."""
    drawn = {seed: draw_blocks(seed) for seed in range(10_000, 12_000)}
    found = [seed for seed, size in drawn.items() if size > 1]
    cuts = [tuple(draw_cut(seed).values()) for seed in found if draw_cut(seed)]
    assert set(cuts) == set(CUTS)
    assert any(draw_cuts(seed)[0] != draw_cuts(seed)[1] for seed in found)
    assert not any(draw_context(seed) != UNCUT or draw_together(seed)[0] for seed in found), "refused with blocks"
    assert [draw_cut(seed) for seed in (STAGES, SHARDS)] == [{"tp_size": 1, "pp_size": 2}, {"tp_size": 2, "pp_size": 1}]
    kinds = {(*left.sizes, *right.sizes) for left, right, _ in map(draw_cuts, CUT)}
    assert len(kinds) > 2


@pytest.mark.parametrize("seed", [STAGES, SHARDS])
def test_a_worker_that_does_not_take_what_a_pass_has_found_is_noticed(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hear = Draft[Row].hear

    def forget(draft: Draft[Row], told: np.ndarray) -> None:
        hear(draft, told)
        draft.tokens[draft.first :][~draft.is_mask[draft.first :]] = 16

    monkeypatch.setattr(Draft, "hear", forget)
    assert run_seed(seed).invariant


def test_a_decode_that_expects_one_token_of_a_prefill_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_side, "num_sampled", lambda length, block_tokens: 1)
    assert run_seed(SEEDS[0]).invariant
