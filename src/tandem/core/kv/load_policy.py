"""Load a page from host memory, or compute it again? By what both have cost here so far.

Both are measured by the node: the time from asking for a load to its landing, per page, here; what a prompt token
costs, in `scheduler/chunk_budget.py`. A mean in which the newest weighs an eighth, in whole ns, so that replays agree.
Until both are known a load is worth it. For each prompt for which it is not, the cost of a load is believed a little
less, from four times the cost of computing at most: a load that took seconds, of a disk that stood still or a process
that did, is tried again after two dozen prompts.
"""

from dataclasses import dataclass

from tandem.core.values import ZERO_NS, Nanos

WEIGHT = 8
DOUBT = 16
MOST_BELIEVED = 4  # costs of computing


@dataclass(slots=True)
class BreakEven:
    page_load_ns: Nanos = ZERO_NS

    def loaded(self, num_pages: int, duration_ns: Nanos) -> None:
        self.page_load_ns = mean(self.page_load_ns, duration_ns // num_pages)

    def is_worth(self, num_pages: int, num_tokens: int, token_ns: Nanos, *, is_new: bool = True) -> bool:
        """is_new: this prompt was not told before that it is not"""
        if self.page_load_ns * num_pages <= token_ns * num_tokens or not token_ns:
            return True
        if not is_new:
            return False
        believed = min(self.page_load_ns, MOST_BELIEVED * token_ns * num_tokens // num_pages)
        self.page_load_ns = Nanos(believed - believed // DOUBT)
        return False


def mean(known: Nanos, newest: int) -> Nanos:
    return Nanos(newest if not known else known + (newest - known) // WEIGHT)
