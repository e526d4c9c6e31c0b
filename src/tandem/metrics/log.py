"""One line on stderr per finished request: the same record that the metrics add up."""

import sys
import time
from collections.abc import Iterable
from typing import TextIO

import msgspec

from tandem.core.values import MILLISECOND
from tandem.log_stream import log_stream
from tandem.logtext import visible
from tandem.metrics.request_stats import RequestRecord


class RequestLog:
    """`format` is `text` or `json`. A stream that is gone (closed pipe) is given up silently: serving goes on. Where a
    disk is full lines are lost until it has room again.
    """

    def __init__(self, format: str, stream: TextIO | None = None) -> None:
        self._line = json_line if format == "json" else text_line
        self._stream = stream or log_stream(sys.stderr)
        self._is_gone = False

    def write_all(self, records: Iterable[RequestRecord]) -> None:
        """In any thread."""
        for record in records:
            self.write(record)

    def write(self, record: RequestRecord) -> None:
        if self._is_gone:
            return
        try:
            self._stream.write(self._line(record) + "\n")
            self._stream.flush()
        except (BrokenPipeError, ValueError):
            self._is_gone = True
        except OSError:
            pass


def json_line(record: RequestRecord) -> str:
    fields = {
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "process": "api",
        "event": "request",
        **{
            name: visible(value) if isinstance(value, str) else value
            for name in record.__struct_fields__
            if (value := getattr(record, name)) not in (None, "")
        },
        "ledger": dict(record.ledger),
    }
    return msgspec.json.encode(fields).decode()


def text_line(record: RequestRecord) -> str:
    parts = [
        f"[{time.strftime('%H:%M:%S')} api] request {visible(record.rid)} {record.endpoint} {record.outcome}",
        f"prompt={record.prompt_tokens} cached={record.cached_tokens} output={record.completion_tokens}",
        f"e2e={record.e2e_ns / MILLISECOND:.1f}ms",
    ]
    if record.ttft_ns is not None:
        stages = " ".join(f"{stage}={ns / MILLISECOND:.1f}" for stage, ns in record.ledger)
        parts.append(f"ttft={record.ttft_ns / MILLISECOND:.1f}ms ({stages})")
    if record.path is not None:
        parts.append(f"path={record.path}")
    if record.room is not None:
        parts.append(f"room={record.room}")
    if record.dp_rank is not None:
        parts.append(f"dp_rank={record.dp_rank}")
    if record.retries:
        parts.append(f"retries={record.retries}")
    if record.stage is not None:
        parts.append(f"stage={record.stage} waited={record.waited_seconds or 0.0:.3f}s")
    if record.peer:
        parts.append(f"peer={visible(record.peer)}")
    if record.detail:
        parts.append(f"detail='{visible(record.detail)}'")
    return " ".join(parts)
