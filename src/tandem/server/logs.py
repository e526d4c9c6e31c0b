"""Log lines of a server: how they look, and the two that SGLang's users read: `Prefill batch`, `Decode batch`.

Every process logs through one of two formatters, so that a record is one line whatever it quotes (`logtext.py`). The
trace of an exception follows its line, each line of it marked as such; as JSON it is a part of the one line.

A batch is reported when it has returned, with the number it was launched under: with overlap the next batch is on its
way by then, and the node's own counter already tells of that one. The lines are pure functions; `BatchLog` observes the
node and keeps what they need.
"""

import json
import logging
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Number
from types import TracebackType

from msgspec import UNSET, UnsetType

from tandem.core.batch import BatchOutcome, BatchPlan
from tandem.core.commands import Effects, ForgetRequests, LaunchBatch
from tandem.core.events import BatchFailed, BatchReturned, Event
from tandem.core.scheduler.numbers import NodeNumbers
from tandem.core.values import SECOND, BatchId, Nanos, RequestId
from tandem.logtext import MAX_LINE_CHARS, visible
from tandem.metrics.dp_cooperation import DpCooperation

NEVER = Nanos(0)
TRACE_MARK = "  | "  # before each line of a trace: no line of ours begins so
MAX_TRACE_LINES = 100  # of each end
DECODE_INTERVAL = 40  # decode batches per line


class LineFormatter(logging.Formatter):
    """One record, one line; what it quotes is visible and bounded."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        clock = self.formatTime(record, "%H:%M:%S")
        lines = [f"[{clock} {self._process}] {message_of(record)}", *self.trace(record)]
        return f"\n{TRACE_MARK}".join(lines)

    def trace(self, record: logging.LogRecord) -> list[str]:
        """Line by line. Its end says what went wrong, so of a long one the middle is left out."""
        if not record.exc_info:
            return []
        lines = self.formatException(record.exc_info).split("\n")
        if len(lines) > 2 * MAX_TRACE_LINES:
            lines[MAX_TRACE_LINES:-MAX_TRACE_LINES] = ["..."]
        return [visible(line, most=MAX_LINE_CHARS) for line in lines]


class JsonFormatter(LineFormatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "process": self._process,
            "message": message_of(record),
        }
        if trace := self.trace(record):
            line["exception"] = "\n".join(trace)
        return json.dumps(line)


def message_of(record: logging.LogRecord) -> str:
    """The text of a record, with each value that it is made of and the whole within bounds. Never raises."""
    args = record.args
    if isinstance(args, tuple):
        bounded = tuple(arg if isinstance(arg, Number) else _Bounded(arg) for arg in args)
        record = logging.makeLogRecord(record.__dict__ | {"args": bounded})
    try:
        return visible(record.getMessage(), most=MAX_LINE_CHARS)
    except Exception as error:  # a mistake in a log call costs the text and nothing else
        return visible(f"{record.msg} ({type(error).__name__} while it was written)", most=MAX_LINE_CHARS)


class _Bounded:
    """A value as `%s` and `%r` show it."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __str__(self) -> str:
        return visible(str(self._value))

    def __repr__(self) -> str:
        return visible(repr(self._value))


def set_up(log_format: str, *, process: str) -> None:
    """Lines of this process go to stderr, as text or as JSON; also what no one has caught."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if log_format == "json" else LineFormatter(process))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for name in ("asyncio", "uvicorn", "httpx"):
        logging.getLogger(name).setLevel(logging.WARNING)
    sys.excepthook = log_uncaught
    threading.excepthook = lambda args: log_uncaught(
        args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback
    )


def log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        logging.getLogger("tandem").critical("not caught", exc_info=(kind, error, trace))


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
        self._generated += len(outcome.tokens) // 4
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
