"""The two log lines that SGLang's users read: `Prefill batch`, `Decode batch`.

A batch is reported when it has returned, with the number it was launched under: with overlap the next batch is on its
way by then, and the node's own counter already tells of that one. The lines are pure functions; `BatchLog` observes the
node and keeps what they need.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType

from tandem.core.batch import TOKEN_BYTES, BatchOutcome, BatchPlan
from tandem.core.commands import Effects, ForgetRequests, LaunchBatch
from tandem.core.events import BatchFailed, BatchReturned, Event
from tandem.core.scheduler.numbers import NodeNumbers
from tandem.core.values import SECOND, BatchId, Nanos, RequestId
from tandem.metrics.dp_cooperation import DpCooperation

NEVER = Nanos(0)
DECODE_INTERVAL = 40  # decode batches per line


def batch_number(iteration: int | None, *, forward_count: int) -> int:
    """The number under which the batch was launched; the node's counter where a batch has none."""
    return forward_count if iteration is None else iteration


@dataclass(frozen=True, slots=True)
class PrefillFigures:
    """Of one launched plan with prompt rows."""

    num_seqs: int
    new_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """The node when the batch returned."""

    token_usage: float
    used_tokens: int
    running: int
    queued: int


def prefill_line(number: int | None, figures: PrefillFigures, load: LoadFigures) -> str:
    return (
        f"Prefill batch{_label(number)}, #new-seq: {figures.num_seqs}, #new-token: {figures.new_tokens}, "
        f"#cached-token: {figures.cached_tokens}, token usage: {load.token_usage:.2f}, "
        f"#running-req: {load.running}, #queue-req: {load.queued}"
    )


def decode_line(
    number: int | None,
    *,
    running: int,
    tokens_per_second: float,
    load: LoadFigures,
    cuda_graph: bool | UnsetType = UNSET,
) -> str:
    """cuda_graph: whether the batch was launched as one, on a device where that can be."""
    graph = "" if cuda_graph is UNSET else f"cuda graph: {cuda_graph}, "
    return (
        f"Decode batch{_label(number)}, #running-req: {running}, #token: {load.used_tokens}, "
        f"token usage: {load.token_usage:.2f}, {graph}gen throughput (token/s): {tokens_per_second:.2f}, "
        f"#queue-req: {load.queued}"
    )


def _label(number: int | None) -> str:
    return "" if number is None else f" [{number}]"


@dataclass(slots=True)
class _Launched:
    plan: BatchPlan
    figures: PrefillFigures
    num_decode_rows: int


@dataclass(slots=True)
class BatchLog:
    """Observes launches and returns, writes the lines, and has batches of ranks that step together counted. `load` is
    asked once per line.
    """

    write: Callable[[str], None]
    load: Callable[[], LoadFigures]
    shows_numbers: bool
    decode_interval: int = DECODE_INTERVAL
    cooperation: DpCooperation = field(default_factory=DpCooperation)
    _forward_count: int = 0
    _launched: dict[BatchId, _Launched] = field(default_factory=dict)
    _decode_sets: defaultdict[int, set[RequestId]] = field(default_factory=lambda: defaultdict(set))  # by micro-batch
    _known: dict[RequestId, int] = field(default_factory=dict)  # where the KV written so far by rows ends
    _num_decodes: int = 0
    _generated: int = 0  # tokens since the last decode line ...
    _busy_ns: int = 0  # ... and the time in which batches were under way
    _busy_since: Nanos = NEVER

    def before(self, now: Nanos, happened: Sequence[Event]) -> None:
        pass

    def after(self, now: Nanos, happened: Sequence[Event], effects: Effects) -> None:
        for event in happened:
            match event:
                case BatchReturned(outcome):
                    self._returned(outcome, now)
                case BatchFailed(batch):
                    self._launched.pop(batch, None)
                case _:
                    pass
        for command in effects.commands:
            match command:
                case LaunchBatch(plan):
                    self._launch(plan, now)
                case ForgetRequests(requests):
                    for decode_set in self._decode_sets.values():
                        decode_set.difference_update(requests)
                    for request in requests:
                        self._known.pop(request, None)
                case _:
                    pass

    def _launch(self, plan: BatchPlan, now: Nanos) -> None:
        if not self._launched:
            self._busy_since = now
        self._forward_count = plan.iteration
        decode_set = self._decode_sets[plan.micro_batch]
        decode_set.difference_update(plan.leave)
        decode_set.update(join.request for join in plan.join)
        cached = 0
        for row in plan.rows:
            cached += max(0, row.start - self._known.get(row.request, 0))  # KV that no row of ours has written
            self._known[row.request] = row.stop
        figures = PrefillFigures(
            num_seqs=len(plan.rows),
            new_tokens=sum(row.stop - row.start for row in plan.rows),
            cached_tokens=cached,
        )
        self._launched[plan.id] = _Launched(plan, figures, len(decode_set) if plan.decodes else 0)

    def _returned(self, outcome: BatchOutcome, now: Nanos) -> None:
        launched = self._launched.pop(outcome.batch, None)
        if launched is None:
            return  # launched before this observer began
        self._generated += len(outcome.tokens) // TOKEN_BYTES
        self._busy_ns += now - self._busy_since
        self._busy_since = now
        self.cooperation.add(
            launched.plan.kind,
            outcome,
            prefill_compute=launched.figures.new_tokens,
            prefill_cache=launched.figures.cached_tokens,
            decode=launched.num_decode_rows,
        )
        number = (
            batch_number(launched.plan.iteration, forward_count=self._forward_count) if self.shows_numbers else None
        )
        if launched.plan.rows:
            self.write(prefill_line(number, launched.figures, self.load()))
        if launched.num_decode_rows:
            self._num_decodes += 1
            if self._num_decodes % self.decode_interval == 0:
                rate = self._generated * SECOND / max(1, self._busy_ns)
                rows, graph = launched.num_decode_rows, outcome.cuda_graph
                self.write(
                    decode_line(number, running=rows, tokens_per_second=rate, load=self.load(), cuda_graph=graph)
                )
                self._generated = self._busy_ns = 0


def load_of(numbers: NodeNumbers) -> LoadFigures:
    return LoadFigures(
        token_usage=numbers.token_usage,
        used_tokens=numbers.used_tokens,
        running=numbers.running,
        queued=numbers.queued,
    )
