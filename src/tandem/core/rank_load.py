"""What the DP ranks of a server tell each other before prompts are computed. What is decided of it is
`scheduler/delayer_policy.py`.
"""

from msgspec import Struct


class RankLoad(Struct, frozen=True):
    """What one rank tells all others in one pass."""

    is_prefillable: bool  # has admitted prompts: slots, pages and result slots are there
    is_under_watermark: bool = False  # prefillable, and few tokens of its pool are used
    num_running: int = 0  # decode rows
    num_free_slots: int = 0
    usual_batch: int = 0  # requests in a usual prompt batch
    num_waiting: int = 0  # requests whose prompt is not begun
    is_timed_out: bool = False  # it has been delaying for `max_delay_ns`, on its own clock


class DelayHistory(Struct, frozen=True):
    """What a rank keeps from one pass to the next; the same on every rank."""

    delayed_passes: int = 0  # in a row
    has_skipped_first: bool = False
