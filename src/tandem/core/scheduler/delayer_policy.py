"""May prompts be computed now, while decode rows run? The prefill delayer's decision, the same on every DP rank.

Requests that end one by one would each be replaced by a tiny prompt batch, and every such batch stalls all who decode.
The delayer waits until a prompt batch is worth the stall. A pass is one planned batch. In every pass each rank gathers
the `RankLoad`s of all ranks, its own included, and calls `agree`, which looks at nothing else: no clock, no local
state. So ranks with the same memory decide alike and keep the same memory.

Two gates can close. Either is enough, and what opens one does not open the other:

    slot gate     fewer free slots than a usual prompt batch has requests: wait until it fits whole
    queue gate    fewer requests wait than `queue_min_ratio` of those who run, but never more than a usual prompt batch:
                  wait for more. It gives up when some rank has waited for `max_delay_ns` (`RankLoad.is_timed_out`).
                  Or it tunes itself: more are worth waiting for (`company_pays`)

What lets prompts through a closed gate: a rank with prompts whose token usage is below the low watermark; nobody
running; `max_delay_passes`; and the first time ever that a gate would close.
Where only some ranks have prompts, those wait for the others, bounded by the passes.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from math import isqrt

from msgspec import Struct
from msgspec.structs import replace

from tandem.core.rank_load import DelayHistory, RankLoad
from tandem.core.settings import DelayerSettings
from tandem.core.values import SECOND, ceil_div


class Estimation(StrEnum):
    """Who has prompts."""

    ALL = "all"
    NONE = "none"
    MIXED = "mixed"


class Reason(StrEnum):
    NOTHING = ""  # nobody has prompts
    NO_WAIT = "no_wait"
    WAIT_SUCCESS = "wait_success"  # waited, and the gates opened
    WAIT_TIMEOUT = "wait_timeout"  # waited for as many passes as allowed
    TOKEN_WATERMARK = "token_watermark"
    DELAY = "delay"


class Decision(Struct, frozen=True):
    allows: bool
    reason: Reason
    estimation: Estimation
    lacks_slots: bool = False  # denied, and a usual prompt batch would not fit


Gate = Callable[[Sequence[RankLoad], DelayerSettings], bool]


def slot_gate_closes(ranks: Sequence[RankLoad], settings: DelayerSettings) -> bool:
    return min(rank.num_free_slots for rank in ranks) < usual_batch(ranks)


def queue_gate_closes(ranks: Sequence[RankLoad], settings: DelayerSettings) -> bool:
    if not settings.has_queue_gate or any(rank.is_timed_out for rank in ranks):
        return False
    if settings.queue_min_ratio is None:
        return company_pays(ranks)
    # Why the maximum over ranks and the running requests, not the minimum and the slots: that would delay far too much.
    wanted = int(max(rank.num_running for rank in ranks) * settings.queue_min_ratio)
    cap = usual_batch(ranks) if settings.prompt_batch_max is None else settings.prompt_batch_max
    return max(rank.num_waiting for rank in ranks) < min(wanted, cap)


def company_pays(ranks: Sequence[RankLoad]) -> bool:
    """Is it cheaper to wait for more prompts than to stall those who decode for those who wait already?

    Both are counted in time of slots. A prompt batch of k costs `stall_ns`, and before it those who wait for it are
    empty slots: where one comes every t, k(k-1)/2 of them. One more is worth it while k(k+1)t/2 is less. What they have
    waited already bounds what a wrong guess of t costs: half of what the batch costs them.
    """
    stall_ns = stalled_ns(ranks)
    if any(rank.gets_no_larger for rank in ranks) or 2 * sum(rank.waited_ns for rank in ranks) >= stall_ns:
        return False
    return sum(rank.num_waiting for rank in ranks) < worth_waiting_for(ranks)


def stalled_ns(ranks: Sequence[RankLoad]) -> int:
    """What a prompt batch costs all who decode, whoever of them is on which rank: one waits for all others."""
    return max(rank.batch_ns for rank in ranks) * sum(rank.num_running for rank in ranks)


def worth_waiting_for(ranks: Sequence[RankLoad]) -> int:
    """How many prompts the next batch should have; 0: as many as there are."""
    rate = sum(PATIENCE_NS // rank.next_prompt_ns for rank in ranks if rank.next_prompt_ns)
    # Why 3, not 2: they came while others were stalled, too, and in the time that counts they come faster.
    least = ceil_div(3 * stalled_ns(ranks) * rate, PATIENCE_NS)
    root = isqrt(least)
    return root + (root * (root + 1) < least)


PATIENCE_NS = 3600 * SECOND  # a unit of rates

GATES: tuple[Gate, ...] = (slot_gate_closes, queue_gate_closes)


def agree(ranks: Sequence[RankLoad], memory: DelayHistory, settings: DelayerSettings) -> tuple[Decision, DelayHistory]:
    """Decide for one pass. `ranks`: one load per DP rank, in any order."""
    assert ranks, "at least this rank's own load"
    estimation = estimate(ranks)
    if estimation is Estimation.NONE:
        return allow(Reason.NOTHING, estimation, memory)
    if any(rank.is_prefillable and rank.is_under_watermark for rank in ranks):
        return allow(Reason.TOKEN_WATERMARK, estimation, memory)
    if estimation is Estimation.MIXED:
        return delay(estimation, memory, settings)
    is_closed = any(rank.num_running for rank in ranks) and any(gate(ranks, settings) for gate in GATES)
    if is_closed and memory.has_skipped_first:
        decision, memory = delay(estimation, memory, settings)
        return replace(decision, lacks_slots=not decision.allows and slot_gate_closes(ranks, settings)), memory
    reason = Reason.WAIT_SUCCESS if memory.delayed_passes else Reason.NO_WAIT
    return allow(reason, estimation, DelayHistory(memory.delayed_passes, memory.has_skipped_first or is_closed))


def estimate(ranks: Sequence[RankLoad]) -> Estimation:
    who = {rank.is_prefillable for rank in ranks}
    if who == {True}:
        return Estimation.ALL
    return Estimation.MIXED if True in who else Estimation.NONE


def allow(reason: Reason, estimation: Estimation, memory: DelayHistory) -> tuple[Decision, DelayHistory]:
    return Decision(True, reason, estimation), DelayHistory(0, memory.has_skipped_first)


def delay(estimation: Estimation, memory: DelayHistory, settings: DelayerSettings) -> tuple[Decision, DelayHistory]:
    if memory.delayed_passes >= settings.max_delay_passes - 1:
        return allow(Reason.WAIT_TIMEOUT, estimation, memory)
    return (
        Decision(False, Reason.DELAY, estimation),
        DelayHistory(memory.delayed_passes + 1, memory.has_skipped_first),
    )


def usual_batch(ranks: Sequence[RankLoad]) -> int:
    return max(rank.usual_batch for rank in ranks)


# --- how large a prompt batch usually is -----------------------------------------------------------------------------


def remember_batch(sizes: tuple[int, ...], size: int, *, window: int) -> tuple[int, ...]:
    """The sizes of the last `window` prompt batches with one more. Passes without prompts do not age them."""
    if window < 1:
        raise ValueError("window_size must be positive")
    if size < 1:
        raise ValueError("only a non-empty attempt is remembered")
    return (*sizes, size)[-window:]


def expected_batch(*, num_waiting: int, num_running: int, max_running: int, most: int | None = None) -> int:
    """How many requests a prompt batch that found no slots would have had: so a peak of long ago is forgotten.

    Not one that the queue gate denied: while it waits for more it would get used to fewer, and let them through.
    most: requests that may share a batch; None: any number.
    """
    size = min(max(num_waiting, 1), max(max_running - num_running, 1))
    return size if most is None else min(size, most)
