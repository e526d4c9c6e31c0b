"""The prefill delayer: how long prompt batches have waited, in two histograms with SGLang's names and bounds."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate

from tandem.core.commands import Effects, PromptsLetIn
from tandem.core.events import Event
from tandem.core.values import SECOND, Nanos

PASSES_BOUNDS = (5.0, 20.0, 50.0, 100.0, 200.0)
SECONDS_BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)


class DelayerWaits:
    """Observes the stream of one node whose delayer lets nobody wait for more than `max_passes`.

    Besides the bounds there is 0, and of the passes the most that anybody waits for.
    """

    def __init__(
        self, max_passes: int, *, passes_bounds: Sequence[float] = (), seconds_bounds: Sequence[float] = ()
    ) -> None:
        """Bounds ascend; without any they are SGLang's."""
        last = max_passes - 1
        self._passes_bounds = sorted({0, last, *(bound for bound in passes_bounds or PASSES_BOUNDS if bound < last)})
        self._seconds_bounds = (0.0, *(seconds_bounds or SECONDS_BOUNDS))
        self._passes: Counter[int] = Counter()
        self._seconds: Counter[int] = Counter()  # by bucket
        self._waited_ns = 0

    def before(self, now: Nanos, happened: Sequence[Event]) -> None:
        pass

    def after(self, now: Nanos, happened: Sequence[Event], effects: Effects) -> None:
        for command in effects.commands:
            if isinstance(command, PromptsLetIn):
                self._passes[command.waited_passes] += 1
                self._seconds[bisect_left(self._seconds_bounds, command.waited_ns / SECOND)] += 1
                self._waited_ns += command.waited_ns

    def numbers(self) -> dict[str, float]:
        """As `Exporter` takes what a node counts."""
        count = self._passes.total()
        up_to = (self._seconds[bucket] for bucket in range(len(self._seconds_bounds)))
        return histogram(
            "prefill_delayer_wait_forward_passes",
            {bound: sum(n for waited, n in self._passes.items() if waited <= bound) for bound in self._passes_bounds},
            count=count,
            total=sum(waited * n for waited, n in self._passes.items()),
        ) | histogram(
            "prefill_delayer_wait_seconds",
            dict(zip(self._seconds_bounds, accumulate(up_to), strict=True)),
            count=count,
            total=self._waited_ns / SECOND,
        )


def histogram(name: str, cumulative: Mapping[float, int], *, count: int, total: float) -> dict[str, float]:
    """As a scraper wants it: observations up to each bound, all of them, and their sum."""
    buckets = {f"{name}_bucket{{le={float(bound)}}}": float(up_to) for bound, up_to in cumulative.items()}
    return {**buckets, f"{name}_bucket{{le=+Inf}}": float(count), f"{name}_count": float(count), f"{name}_sum": total}
