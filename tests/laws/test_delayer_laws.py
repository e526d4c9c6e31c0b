"""Laws of a node with the prefill delayer: it changes when prompts begin, nothing else, and holds nobody for ever."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core_driver import Replica, assert_nothing_is_held
from core_scripts import ACTIONS, USUAL, Life, lives, scripts
from tandem.core.commands import FinishRequest, PromptsLetIn
from tandem.core.scheduler.delayer_policy import Reason
from tandem.core.values import MILLISECOND, SECOND

FAULTS = [name for name in ACTIONS if name not in USUAL]
delayers = st.fixed_dictionaries(
    {
        "max_delay_passes": st.sampled_from([2, 5, 30]),
        "low_watermark": st.sampled_from([None, 0.2]),
        "queue_min_ratio": st.sampled_from([None, 0.3, 1.0]),
        "tunes_itself": st.booleans(),
        "max_delay_ns": st.sampled_from([10_000, 5 * MILLISECOND, 5 * SECOND]),
        "prompt_batch_max": st.sampled_from([None, 8]),
        "window": st.sampled_from([1, 16]),
    }
)

CROWD = [(name, 37 * index) for index in range(14) for name in ("local", "local", "turn")]  # some decode, others come


def make_batches_dear(life: Life) -> None:
    """So that a gate that tunes itself waits."""
    for replica in life.both:
        replica.cost.base_ns, replica.cost.prompt_token_ns = 100 * MILLISECOND, 10


def delayed_in_a_row(replica: Replica) -> int:
    """The longest run of passes in which a prompt was held."""
    return max((it.waited_passes for it in replica.commands if isinstance(it, PromptsLetIn)), default=0)


@given(chosen=lives, delayer=delayers, script=scripts([*USUAL, *USUAL, *FAULTS]))
def test_whatever_happens_every_request_ends_with_the_right_tokens_and_nothing_is_kept(
    chosen: dict, delayer: dict, script: list[tuple[str, int]]
) -> None:
    life = Life({**chosen, "delayer": delayer})
    make_batches_dear(life)
    life.run([*CROWD, *script])
    life.heal()
    assert_nothing_is_held(life.both)
    life.assert_tokens()
    for asked in life.asked:
        assert asked.replica.is_dead or asked.request in asked.replica.ended
    for replica in life.both:
        delays = replica.state.delayer
        assert delayed_in_a_row(replica) < delayer["max_delay_passes"]
        assert delays.since is None
        executed = sum(count for (*_, was_executed), count in delays.outcomes.items() if was_executed)
        assert executed == sum(bool(plan.rows) for plan in replica.plans())


@given(chosen=lives, delayer=delayers, script=scripts(USUAL, max_size=40))
def test_without_faults_every_request_finishes_and_its_ledger_adds_up(
    chosen: dict, delayer: dict, script: list[tuple[str, int]]
) -> None:
    life = Life({**chosen, "num_pages": 64, "max_queued": 10_000, "delayer": delayer})
    make_batches_dear(life)
    life.run([*CROWD, *script])
    life.world.advance(30 * SECOND)
    life.assert_tokens()
    for asked in life.asked:
        assert isinstance(asked.replica.ended[asked.request], FinishRequest)


@pytest.mark.parametrize("gate", [{"queue_min_ratio": 1.0, "prompt_batch_max": 8}, {"tunes_itself": True}])
def test_the_crowd_of_each_script_does_hold_prompts(gate: dict) -> None:
    """So that the laws above are about something."""
    life = Life({"num_pages": 64, "delayer": {**gate, "low_watermark": None}})
    make_batches_dear(life)
    life.run(CROWD)
    life.heal()
    denied = [reason for replica in life.both for _, _, reason, _ in replica.state.delayer.outcomes]
    assert Reason.DELAY in denied
