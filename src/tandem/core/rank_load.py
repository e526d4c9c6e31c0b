"""What the DP ranks of a server tell each other before prompts are computed. What is decided of it is
`scheduler/delayer_policy.py`.
"""

from msgspec import Struct

from tandem.core.values import ZERO_NS, Nanos


class RankLoad(Struct, frozen=True):
    """What one rank tells all others in one pass."""

    is_prefillable: bool  # has admitted prompts: slots, pages and result slots are there
    is_under_watermark: bool = False  # prefillable, and few tokens of its pool are used
    num_running: int = 0  # decode rows
    num_free_slots: int = 0
    usual_batch: int = 0  # requests in a usual prompt batch
    num_waiting: int = 0  # requests whose prompt is not begun
    is_timed_out: bool = False  # it has been delaying for `max_delay_ns`, on its own clock
    # What a gate that tunes itself goes by (`scheduler/prompt_costs.py`):
    waited_ns: Nanos = ZERO_NS  # all together who could begin
    batch_ns: Nanos = ZERO_NS  # what a prompt batch costs however small it is; 0: not known
    next_prompt_ns: Nanos = ZERO_NS  # in how long one more is expected; 0: none is
    gets_no_larger: bool = False  # the next prompt batch: it is full, or comes anyway


class DelayHistory(Struct, frozen=True):
    """What a rank keeps from one pass to the next; the same on every rank."""

    delayed_passes: int = 0  # in a row
    has_skipped_first: bool = False
