"""Whole clusters in which queues have another order, or priorities count (decision 040)."""

from collections import Counter
from pathlib import Path

import pytest

from tandem.core.scheduler import admission
from tandem.core.scheduler.request_state import Progress
from tandem.core.scheduler.reserve import Reserve
from tandem.core.scheduler.state import NodeState
from tandem.core.settings import SchedulePolicy
from tandem.simulator.whole.options import draw_options, draw_priority
from tandem.simulator.whole.world import run_seed

PAIR, UNIFIED = 10_003, 10_060


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("seed", [PAIR, UNIFIED])
def test_who_is_more_urgent_takes_a_place_and_every_request_ends_as_promised(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_preempted = 0
    preempt = admission.preempt

    def counted(node: NodeState, newcomer: Progress, reserve: Reserve) -> bool:
        nonlocal num_preempted
        found = preempt(node, newcomer, reserve)
        num_preempted += found
        return found

    monkeypatch.setattr(admission, "preempt", counted)
    result = run_seed(seed)
    assert not result.invariant, f"{result.line}: {result.detail}"
    assert result.num_finished > 0
    assert num_preempted > 0


def test_all_policies_and_priorities_are_drawn_and_older_seeds_have_none() -> None:
    found = Counter(draw_options(seed).flags.get("schedule_policy") for seed in range(10_000, 10_100))
    assert set(found) == {None, *map(str, SchedulePolicy)}
    assert not any("schedule_policy" in draw_options(seed).flags for seed in range(100))
    said = Counter(draw_priority(draw_options(PAIR), number) for number in range(40))
    assert set(said) == {None, 0, 1, 2}
    assert draw_priority(draw_options(0), 1) is None
