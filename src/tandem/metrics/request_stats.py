"""What is counted about requests at the edge: plain numbers, added up as requests end.

`RequestStats.add` takes one `RequestRecord` per sample, exactly once. Tokens and the gaps between them are counted
before, as they come, so that the counters of a long answer move while it runs.
Own histograms because this runs per streamed token: one bisection and two additions, no locks, one thread.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from tandem.core.values import SECOND

TTFT_BOUNDS = (
    *(0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8, 1),
    *(2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400),
)
GAP_BOUNDS = (
    *(0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04),
    *(0.05, 0.075, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 8),
)
E2E_BOUNDS = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400, 600, 1200, 1800, 2400)
STAGE_BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TRANSFER_MS_BOUNDS = (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
TRANSFER_MB_BOUNDS = (0.01, 0.1, 0.5, 1, 5, 10, 50, 100, 500, 1000, 5000, 10000)
SPEED_BOUNDS = (0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 20, 50, 100, 200)
SENDING = "prefill_transfer_kv_cache"  # the stage in which prefill's pages are collected
WAITING = "_waiting"  # ends the name of a stage in a queue
MAX_RECENT = 100  # of those that have ended last
WINDOW_SECONDS = 5  # of the throughput


class RequestRecord(Struct, frozen=True):
    """One sample from arrival to end: what the log line, the metrics and `meta_info` say about it."""

    rid: str
    request_id: str  # of the HTTP request
    endpoint: str
    outcome: str  # stop, length, or the cause of the failure
    is_failed: bool
    prompt_tokens: int
    completion_tokens: int
    e2e_ns: int
    ttft_ns: int | None = None  # None: no token came
    path: str | None = None
    cached_tokens: int = 0
    host_tokens: int = 0  # of them, from host memory
    storage_tokens: int = 0  # of those, from storage
    computed_tokens: int = 0
    kv_pages: int = 0
    kv_bytes: int = 0  # of these pages
    retries: int = 0
    room: int | None = None
    dp_rank: int | None = None  # that it ran on; None: the server has one
    stage: str | None = None  # of a failure
    detail: str = ""
    peer: str = ""  # on whom it waited when it failed, if it knew one
    waited_seconds: float | None = None  # in that stage
    ledger: tuple[tuple[str, int], ...] = ()  # (stage, nanoseconds), sums to ttft_ns


class Histogram:
    """Cumulative when exported, plain counts inside. Values are in the unit of the bounds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last one holds what is above all bounds
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """As Prometheus wants them: (upper bound, observations up to it), ending with +Inf."""
        cumulative, running = [], 0
        for bound, count in zip([*map(repr, map(float, self.bounds)), "+Inf"], self.counts, strict=True):
            running += count
            cumulative.append((bound, float(running)))
        return cumulative


class Throughput:
    """Of tokens, over the last seconds."""

    __slots__ = ("_seconds",)

    def __init__(self) -> None:
        self._seconds: deque[list[int]] = deque(maxlen=WINDOW_SECONDS)  # [second, tokens], of those that had any

    def add(self, now_ns: int, tokens: int) -> None:
        second = now_ns // SECOND
        if self._seconds and self._seconds[-1][0] == second:
            self._seconds[-1][1] += tokens
        else:
            self._seconds.append([second, tokens])

    def per_second(self, now_ns: int) -> float:
        """Since the first of these seconds began; over one at least."""
        first = now_ns // SECOND - WINDOW_SECONDS + 1
        recent = [(second, tokens) for second, tokens in self._seconds if second >= first]
        if not recent:
            return 0.0
        return sum(tokens for _, tokens in recent) / max(1.0, now_ns / SECOND - recent[0][0])


@dataclass(slots=True)
class RequestStats:
    """The running sums."""

    ttft: Histogram = field(default_factory=lambda: Histogram(TTFT_BOUNDS))
    gap: Histogram = field(default_factory=lambda: Histogram(GAP_BOUNDS))
    e2e: Histogram = field(default_factory=lambda: Histogram(E2E_BOUNDS))
    per_token: Histogram = field(default_factory=lambda: Histogram(GAP_BOUNDS))
    stages: dict[str, Histogram] = field(default_factory=dict)
    queue: Histogram = field(default_factory=lambda: Histogram(STAGE_BOUNDS))
    transfer_ms: Histogram = field(default_factory=lambda: Histogram(TRANSFER_MS_BOUNDS))
    transfer_mb: Histogram = field(default_factory=lambda: Histogram(TRANSFER_MB_BOUNDS))
    transfer_speed: Histogram = field(default_factory=lambda: Histogram(SPEED_BOUNDS))
    kv_bytes: int = 0
    throughput: Throughput = field(default_factory=Throughput)
    running: int = 0  # samples under way at the edge
    recent: deque[tuple[float, RequestRecord]] = field(default_factory=lambda: deque(maxlen=MAX_RECENT))
    prompt_tokens: int = 0
    generation_tokens: int = 0
    cached_tokens: int = 0
    host_tokens: int = 0  # of them, from host memory
    storage_tokens: int = 0  # of those, from storage
    requests: int = 0
    aborted: int = 0
    paths: dict[str, int] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)  # cause or edge code -> requests

    def start(self, prompt_tokens: int, cached_tokens: int, host_tokens: int, storage_tokens: int) -> None:
        """Count the prompt of a request whose first token has come. host_tokens: of those cached; storage: of these."""
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens
        self.host_tokens += host_tokens
        self.storage_tokens += storage_tokens

    def emit(self, now_ns: int, tokens: int) -> None:
        """Count tokens of a request that goes on."""
        self.generation_tokens += tokens
        self.throughput.add(now_ns, tokens)

    def gen_throughput(self, now_ns: int) -> float:
        """Tokens per second; 0 while nothing runs."""
        return self.throughput.per_second(now_ns) if self.running else 0.0

    def add(self, record: RequestRecord) -> None:
        """Count one request that has ended."""
        self.requests += 1
        if record.ttft_ns is None:
            self.start(record.prompt_tokens, record.cached_tokens, record.host_tokens, record.storage_tokens)
        if record.kv_pages and not record.is_failed:
            self._add_transfer(record)
        if record.path is not None:
            self.paths[record.path] = self.paths.get(record.path, 0) + 1
        if record.is_failed:
            self.refuse(record.outcome)
        if record.outcome == "aborted":
            self.aborted += 1
        if not record.is_failed:
            self.e2e.observe(record.e2e_ns / SECOND)
        if record.ttft_ns is not None:
            self._add_first_token(record, record.ttft_ns)

    def refuse(self, code: str) -> None:
        """Count a request that the edge refused: it never became one of the node's."""
        self.failures[code] = self.failures.get(code, 0) + 1

    def _add_first_token(self, record: RequestRecord, ttft_ns: int) -> None:
        self.ttft.observe(ttft_ns / SECOND)
        if record.completion_tokens > 1 and not record.is_failed:
            self.per_token.observe((record.e2e_ns - ttft_ns) / (record.completion_tokens - 1) / SECOND)
        for stage, duration_ns in record.ledger:
            histogram = self.stages.get(stage)
            if histogram is None:
                histogram = self.stages[stage] = Histogram(STAGE_BOUNDS)
            histogram.observe(duration_ns / SECOND)
        waited_ns = sum(duration_ns for stage, duration_ns in record.ledger if stage.endswith(WAITING))
        self.queue.observe(waited_ns / SECOND)

    def _add_transfer(self, record: RequestRecord) -> None:
        self.kv_bytes += record.kv_bytes
        self.transfer_mb.observe(record.kv_bytes / 1e6)
        took_ns = dict(record.ledger).get(SENDING)
        if took_ns:
            self.transfer_ms.observe(took_ns / 1e6)
            self.transfer_speed.observe(record.kv_bytes / took_ns)  # bytes per nanosecond: GB/s
