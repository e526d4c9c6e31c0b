"""Load a page from host memory, or compute it again? By what both have cost here so far.

Both are measured by the node: the time from asking for a load to its landing, per page, here; what a prompt token
costs, in `scheduler/chunk_budget.py`. A mean in which the newest weighs an eighth, in whole ns, so that replays agree.
Until both are known a load is worth it. Each time that it is not, the cost of a load is believed a little less, so that
a slow moment is not held against it for ever.
"""

from dataclasses import dataclass

from tandem.core.values import ZERO_NS, Nanos

WEIGHT = 8
DOUBT = 16


@dataclass(slots=True)
class BreakEven:
    page_load_ns: Nanos = ZERO_NS

    def loaded(self, num_pages: int, duration_ns: Nanos) -> None:
        self.page_load_ns = mean(self.page_load_ns, duration_ns // num_pages)

    def is_worth(self, num_pages: int, num_tokens: int, token_ns: Nanos) -> bool:
        if self.page_load_ns * num_pages <= token_ns * num_tokens or not token_ns:
            return True
        self.page_load_ns = Nanos(self.page_load_ns - self.page_load_ns // DOUBT)
        return False


def mean(known: Nanos, newest: int) -> Nanos:
    return Nanos(newest if not known else known + (newest - known) // WEIGHT)
