"""DP attention: what one rank has computed, by how many of the ranks had prompts in the same step.

Ranks that step together wait for each other, so decode rows of one are slow while another computes a prompt. These are
the counters that show it, with SGLang's names and labels (its `DPCooperationInfo`). A step in which a rank has no batch
is counted by the others only.
"""

from collections import Counter

from msgspec import UNSET

from tandem.core.batch import BatchKind, BatchOutcome
from tandem.core.values import SECOND

CATEGORIES = {BatchKind.PREFILL: "extend", BatchKind.DECODE: "decode", BatchKind.MIXED: "mixed"}  # as SGLang has them


class DpCooperation:
    """The running sums of one node. Empty where no ranks step together."""

    __slots__ = ("_nanos", "_tokens")

    def __init__(self) -> None:
        self._tokens: Counter[tuple[str, int]] = Counter()  # by mode, and by ranks with prompts
        self._nanos: Counter[tuple[str, int]] = Counter()  # by category, and the same

    def add(self, kind: BatchKind, outcome: BatchOutcome, **tokens: int) -> None:
        """Count a batch that has returned. tokens: of each mode."""
        ranks = outcome.prefill_ranks
        if ranks is UNSET:
            return
        self._nanos[CATEGORIES[kind], ranks] += outcome.duration_ns
        for mode, count in tokens.items():
            if count:
                self._tokens[mode, ranks] += count

    def numbers(self) -> dict[str, float]:
        """As `Exporter` takes what a node counts."""
        name, times = "dp_cooperation_realtime_tokens_total", "dp_cooperation_forward_execution_seconds_total"
        found: dict[str, float] = {
            f"{name}{{mode={mode},num_prefill_ranks={ranks}}}": count for (mode, ranks), count in self._tokens.items()
        }
        return found | {
            f"{times}{{category={category},num_prefill_ranks={ranks}}}": nanos / SECOND
            for (category, ranks), nanos in self._nanos.items()
        }
