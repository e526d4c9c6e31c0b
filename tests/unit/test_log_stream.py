"""A reader of log lines that lags behind costs lines, and nobody waits for it."""

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tandem.log_stream import LogStream, log_stream
from tandem.metrics.log import RequestLog
from tandem.metrics.request_stats import RequestRecord

MANY = 5000  # lines of 100 bytes: more than a pipe or socket holds


@contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    os.set_blocking(ends[0], False)
    yield ends
    os.close(ends[0])


@contextmanager
def connection() -> Iterator[tuple[int, int]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours:
        yield ours.fileno(), theirs.detach()


def read_all(number: int) -> str:
    data = bytearray()
    while True:
        try:
            piece = os.read(number, 1 << 20)
        except BlockingIOError:
            piece = b""
        if not piece:
            return data.decode()
        data += piece


@pytest.mark.parametrize("ends", [pipe, connection])
def test_lines_that_nobody_reads_are_lost_and_counted(ends) -> None:
    with ends() as (reading, writing), os.fdopen(writing, "w") as file:
        handler = logging.StreamHandler(log_stream(file))
        record = logging.makeLogRecord({"msg": "x" * 99})
        for _ in range(MANY):
            handler.emit(record)
        first = read_all(reading)
        handler.emit(record)
        second = read_all(reading)
        assert os.get_blocking(writing), "others write there, too"
    kept, lines = (first + second).count("x" * 99 + "\n"), (first + second).splitlines()
    assert 0 < kept < MANY
    assert [line for line in lines if not line.startswith("x")] == [
        f"({MANY + 1 - kept} log lines are lost here: their reader lags behind)"
    ]


def test_a_line_of_which_a_part_is_written_is_written_to_its_end() -> None:
    sent = bytearray()
    room = 0

    def send(data: bytes) -> int:
        nonlocal room
        if not room:
            raise BlockingIOError
        size = min(room, len(data))
        room -= size
        sent.extend(data[:size])
        return size

    stream = LogStream(send)
    for room in (4, 2, 0, 1000):
        stream.write("first line\n" if room == 4 else f"{room}\n")
    assert sent == b"first line\n(2 log lines are lost here: their reader lags behind)\n1000\n"


def test_a_file_is_written_as_it_is(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:
        assert log_stream(file) is file


def test_the_lines_of_requests_are_lost_in_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    with pipe() as (reading, writing), os.fdopen(writing, "w") as file:
        monkeypatch.setattr("sys.stderr", file)
        log = RequestLog("json")
        for _ in range(MANY):
            log.write(RequestRecord("r", "id", "/generate", "stop", False, 1, 1, 5))
        assert 0 < read_all(reading).count("\n") < MANY
