"""`Prefill batch` and `Decode batch` lines carry the number under which their batch was launched."""

import json
import logging
import os
import re
import sys
from io import StringIO
from pathlib import Path

import pytest

from tandem.cli import main as cli
from tandem.cli.failure import CommandFailed
from tandem.core.batch import BatchKind, BatchOutcome, BatchPlan, Join, Row
from tandem.core.commands import Command, Effects, ForgetRequests, LaunchBatch
from tandem.core.events import BatchFailed, BatchReturned, Event
from tandem.core.values import SECOND, BatchId, Cause, Nanos, PageId, RequestId
from tandem.logtext import MAX_LINE_CHARS, MAX_VALUE_CHARS
from tandem.metrics.log import RequestLog
from tandem.metrics.request_stats import RequestRecord
from tandem.server.logs import TRACE_MARK, JsonFormatter, LineFormatter, log_uncaught, say
from tandem.server.node.batch_log import BatchLog, LoadFigures, PrefillFigures, batch_number, decode_line, prefill_line

LOAD = LoadFigures(token_usage=0.25, used_tokens=400, running=3, queued=2)


class World:
    """A `BatchLog` and the lines it wrote."""

    def __init__(self, *, shows_numbers: bool = True, decode_interval: int = 40) -> None:
        self.lines: list[str] = []
        self.log = BatchLog(
            self.lines.append, lambda: LOAD, shows_numbers=shows_numbers, decode_interval=decode_interval
        )
        self.now = Nanos(0)

    def step(self, *things: Event | Command) -> None:
        self.now = Nanos(self.now + SECOND // 10)
        events = [thing for thing in things if isinstance(thing, BatchReturned | BatchFailed)]
        commands = tuple(thing for thing in things if isinstance(thing, LaunchBatch | ForgetRequests))
        self.log.after(self.now, events, Effects(commands, None))

    def numbers(self) -> list[str]:
        return [line[line.index("[") : line.index("]") + 1] if "[" in line else "" for line in self.lines]


def prefill(number: int, *, start: int = 0, stop: int = 16, request: int | None = None) -> LaunchBatch:
    row = Row(RequestId(request or number), start, stop, 0, (PageId(number),), True)
    return LaunchBatch(BatchPlan(BatchId(number), number, BatchKind.PREFILL, (row,)))


def decode(number: int, *joins: int) -> LaunchBatch:
    join = tuple(Join(RequestId(request), 0, ()) for request in joins)
    return LaunchBatch(BatchPlan(BatchId(number), number, BatchKind.DECODE, decodes=True, join=join))


def returned(number: int, *, tokens: int = 1) -> BatchReturned:
    return BatchReturned(BatchOutcome(BatchId(number), number, bytes(4 * tokens), bytes(tokens)))


def test_overlapped_prefills_carry_the_numbers_of_their_launch() -> None:
    world = World()
    world.step(prefill(1))
    world.step(prefill(2))
    world.step(returned(1), prefill(3))
    world.step(returned(2))
    world.step(returned(3))
    assert world.numbers() == ["[1]", "[2]", "[3]"]


def test_without_overlap_a_line_has_the_number_of_its_launch_too() -> None:
    world = World()
    for number in (1, 2, 3):
        world.step(prefill(number))
        world.step(returned(number))
    assert world.numbers() == ["[1]", "[2]", "[3]"]


def test_the_last_batch_before_idle_keeps_its_number() -> None:
    """Two are under way, and nothing comes after them: the node's counter is 2 when either returns."""
    world = World()
    world.step(prefill(1))
    world.step(prefill(2))
    world.step(returned(1))
    world.step(returned(2))
    assert world.numbers() == ["[1]", "[2]"]


def test_a_batch_without_a_number_gets_that_of_the_node() -> None:
    assert batch_number(None, forward_count=8) == 8
    assert batch_number(7, forward_count=8) == 7


def test_the_number_is_frozen_in_the_plan_whatever_is_launched_meanwhile() -> None:
    world, first = World(), prefill(17)
    world.step(first)
    with pytest.raises(AttributeError):
        first.plan.iteration = 18  # type: ignore[misc]  # that is what is tried
    for number in range(18, 30):
        world.step(prefill(number))
    world.step(returned(17))
    assert world.numbers() == ["[17]"]


def test_a_decode_line_uses_the_number_of_its_launch_too() -> None:
    world = World(decode_interval=2)
    world.step(decode(1, 7))
    world.step(decode(2))
    world.step(returned(1), decode(3))
    world.step(returned(2), decode(4))
    assert world.numbers() == ["[2]"]
    assert world.lines[0].startswith("Decode batch [2], #running-req: 1, #token: 400, token usage: 0.25, ")


def test_numbers_are_shown_only_when_they_are_asked_for() -> None:
    world = World(shows_numbers=False)
    world.step(prefill(1))
    world.step(returned(1))
    assert world.lines[0].startswith("Prefill batch, #new-seq: 1, ")


def test_a_line_of_decode_comes_every_forty_batches() -> None:
    world = World()
    world.step(decode(1, 7))
    for number in range(1, 121):
        world.step(returned(number), decode(number + 1))
    assert world.numbers() == ["[40]", "[80]", "[120]"]


def test_throughput_counts_the_time_in_which_batches_were_under_way() -> None:
    world = World(decode_interval=4)
    world.step(decode(1, 7, 8))
    for number in range(1, 5):
        world.step(returned(number, tokens=2), decode(number + 1))
    assert "gen throughput (token/s): 20.00" in world.lines[0]
    world.step(returned(5, tokens=2))
    world.now = Nanos(1000 * SECOND)  # idle
    world.step(decode(6))
    world.step(returned(6, tokens=2), decode(7))
    world.step(returned(7, tokens=2), decode(8))
    world.step(returned(8, tokens=2))
    assert "gen throughput (token/s): 20.00" in world.lines[1]


def test_cached_tokens_are_those_that_no_batch_of_ours_computed() -> None:
    world = World()
    world.step(prefill(1, request=5, start=32, stop=48))
    world.step(prefill(2, request=5, start=48, stop=60))
    world.step(returned(1), returned(2))
    assert "#new-token: 16, #cached-token: 32," in world.lines[0]
    assert "#new-token: 12, #cached-token: 0," in world.lines[1]


def test_requests_that_are_forgotten_or_left_run_no_more() -> None:
    world = World(decode_interval=1)
    world.step(decode(1, 5, 6, 7))
    leave = LaunchBatch(BatchPlan(BatchId(2), 2, BatchKind.DECODE, decodes=True, leave=(RequestId(5),)))
    world.step(returned(1), ForgetRequests((RequestId(7),)), leave)
    world.step(returned(2))
    assert ["#running-req: 3" in world.lines[0], "#running-req: 1" in world.lines[1]] == [True, True]


def test_a_failed_batch_writes_no_line() -> None:
    world = World()
    world.step(prefill(1))
    world.step(BatchFailed(BatchId(1), Cause.WORKER_LOST, "boom"))
    world.step(returned(1))
    assert world.lines == []


def test_the_lines_are_those_that_sglangs_users_parse() -> None:
    assert prefill_line(17, PrefillFigures(2, 300, 64), LOAD) == (
        "Prefill batch [17], #new-seq: 2, #new-token: 300, #cached-token: 64, token usage: 0.25, "
        "#running-req: 3, #queue-req: 2"
    )
    assert decode_line(None, running=8, tokens_per_second=123.456, load=LOAD) == (
        "Decode batch, #running-req: 8, #token: 400, token usage: 0.25, gen throughput (token/s): 123.46, #queue-req: 2"
    )


def test_a_decode_line_says_whether_it_was_a_cuda_graph_where_there_are_some() -> None:
    world = World(decode_interval=1)
    world.step(decode(1, 7), decode(2), decode(3))
    for number, graph in ((1, True), (2, False)):
        world.step(BatchReturned(BatchOutcome(BatchId(number), number, b"", b"", cuda_graph=graph)))
    world.step(returned(3))
    assert [line.partition("token usage: 0.25, ")[2].partition("gen ")[0] for line in world.lines] == [
        "cuda graph: True, ",
        "cuda graph: False, ",
        "",
    ]


def test_a_json_line_is_one_document() -> None:
    record = logging.LogRecord("tandem", logging.INFO, "", 0, "line with %s", ("a\nbreak",), None)
    text = JsonFormatter("node").format(record)
    assert "\n" not in text
    document = json.loads(text)
    assert (document["process"], document["level"], document["message"]) == ("node", "info", r"line with a\nbreak")


# --- what others have named ------------------------------------------------------------------------------------------

FORGED = "[12:00:00 api] all is well"
NAMES = [
    f"peer\n{FORGED}",
    f"peer\r\n{FORGED}",
    f"peer\x85{FORGED}",
    f"peer\u2028{FORGED}",
    f"peer\x0b{FORGED}",
    "\x1b[2J\x1b]0;title\x07",
    "\x9b31m",
    "\udcff\ud800",
    "\u202e reversed",
    'quote"}\n{"level": "info"',
    "100% %s %d %(name)s",
    "\0",
]


def logged(formatter: logging.Formatter, text: str, *args: object, error: Exception | None = None) -> str:
    trace = None if error is None else (type(error), error, error.__traceback__)
    return formatter.format(logging.LogRecord("tandem", logging.INFO, "", 0, text, args, trace))


def raised(text: str) -> Exception:
    try:
        raise ValueError(text)
    except ValueError as error:
        return error


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("formatter", [LineFormatter("api"), JsonFormatter("api")])
def test_a_name_begins_no_line_and_moves_no_cursor(formatter: logging.Formatter, name: str) -> None:
    for text in (
        logged(formatter, "peer %s", name),
        logged(formatter, "peer %r", name),
        logged(formatter, "%s", ValueError(name)),
        logged(formatter, f"peer {name}"),
    ):
        assert len(text.splitlines()) == 1
        assert text.isprintable()


@pytest.mark.parametrize("name", NAMES)
def test_the_trace_of_an_exception_is_told_from_lines_of_ours(name: str) -> None:
    lines = logged(LineFormatter("api"), "request %s", "r", error=raised(name)).split("\n")
    assert len(lines) > 2
    assert all(line.startswith(TRACE_MARK) for line in lines[1:])
    assert all(line.isprintable() for line in lines)
    document = json.loads(logged(JsonFormatter("api"), "request %s", "r", error=raised(name)))
    assert "ValueError" in document["exception"]


@pytest.mark.parametrize("formatter", [LineFormatter("api"), JsonFormatter("api")])
def test_a_megabyte_is_cut_and_its_end_is_shown(formatter: logging.Formatter) -> None:
    huge = "a" * (1 << 20) + "end"
    assert MAX_VALUE_CHARS < len(logged(formatter, "peer %s", huge)) < 2 * MAX_VALUE_CHARS
    assert len(logged(formatter, f"peer {huge}")) < 2 * MAX_LINE_CHARS
    assert len(logged(formatter, "x", error=raised(huge))) < 4 * MAX_LINE_CHARS
    assert "end" in logged(formatter, "peer %s", huge)


def test_a_mistake_in_a_log_call_costs_its_text_only() -> None:
    assert "TypeError" in logged(LineFormatter("api"), "%d of %s", "two", "three")


def test_numbers_are_written_as_they_are_asked_for() -> None:
    assert logged(LineFormatter("api"), "%d %g %.2f %s", 7, 0.5, 1, True).endswith("] 7 0.5 1.00 True")


def test_what_nobody_has_caught_is_a_line_too(caplog: pytest.LogCaptureFixture) -> None:
    error = raised(f"x\n{FORGED}")
    log_uncaught(type(error), error, error.__traceback__)
    (record,) = caplog.records
    assert len([line for line in LineFormatter("node").format(record).split("\n") if line.startswith("[")]) == 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["text", "json"])
def test_the_line_of_a_request_is_one_line_whatever_the_peer_is_called(kind: str, name: str) -> None:
    stream = StringIO()
    lost = RequestRecord(name, "id", "/generate", "peer_lost", True, 1, 0, 5, detail=name, peer=name, stage="transfer")
    RequestLog(kind, stream).write(lost)
    line = stream.getvalue().removesuffix("\n")
    assert line.isprintable()
    assert kind == "text" or json.loads(line)["outcome"] == "peer_lost"


@pytest.mark.parametrize(("dp_rank", "said"), [(None, ""), (0, " dp_rank=0"), (1, " dp_rank=1")])
def test_the_line_of_a_request_names_its_dp_rank_where_there_are_several(dp_rank: int | None, said: str) -> None:
    stream = StringIO()
    lost = RequestRecord(
        "x7", "id", "/generate", "transfer_failed", True, 1, 0, 5, room=7, dp_rank=dp_rank, peer="vm/dp1"
    )
    RequestLog("text", stream).write(lost)
    assert stream.getvalue().endswith(f" room=7{said} peer=vm/dp1\n")


@pytest.mark.parametrize("name", NAMES)
def test_the_error_line_of_a_command_is_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: str) -> None:
        raise CommandFailed(f"the server says {name}")

    monkeypatch.setattr("tandem.cli.main.importlib.import_module", fail)
    assert cli.main(["chat"]) == 1
    error = capsys.readouterr().err.removesuffix("\n")
    assert error.startswith("tandem: error: the server says")
    assert error.isprintable()


def test_every_process_logs_through_these_formatters() -> None:
    source = Path(__file__).parents[2] / "src" / "tandem"
    texts = {path.relative_to(source).as_posix(): path.read_text() for path in source.rglob("*.py")}
    makers = [name for name, text in texts.items() if re.search(r"basicConfig|StreamHandler\(", text)]
    assert makers == ["server/logs.py"]
    users = {name for name, text in texts.items() if "logs.set_up(" in text}
    assert users == {"cli/serve.py", "cli/router.py", "server/node/process.py", "server/worker_process.py"}


def test_batches_of_ranks_that_step_together_are_counted_by_what_they_were() -> None:
    world = World()
    row = Row(RequestId(2), 16, 20, 0, (PageId(2),), True)
    mixed = LaunchBatch(BatchPlan(BatchId(3), 3, BatchKind.MIXED, (row,), decodes=True))
    world.step(prefill(1), decode(2, 1), mixed)
    for number, prefill_ranks in ((1, 2), (2, 0), (3, 1)):
        took = Nanos(number * SECOND)
        world.step(
            BatchReturned(
                BatchOutcome(BatchId(number), number, b"", b"", (), duration_ns=took, prefill_ranks=prefill_ranks)
            )
        )
    tokens, seconds = "dp_cooperation_realtime_tokens_total", "dp_cooperation_forward_execution_seconds_total"
    assert world.log.cooperation.numbers() == {
        f"{tokens}{{mode=prefill_compute,num_prefill_ranks=2}}": 16,
        f"{tokens}{{mode=decode,num_prefill_ranks=0}}": 1,
        f"{tokens}{{mode=prefill_compute,num_prefill_ranks=1}}": 4,
        f"{tokens}{{mode=prefill_cache,num_prefill_ranks=1}}": 16,
        f"{tokens}{{mode=decode,num_prefill_ranks=1}}": 1,
        f"{seconds}{{category=extend,num_prefill_ranks=2}}": 1.0,
        f"{seconds}{{category=decode,num_prefill_ranks=0}}": 2.0,
        f"{seconds}{{category=mixed,num_prefill_ranks=1}}": 3.0,
    }


def test_of_a_rank_that_steps_alone_nothing_of_the_others_is_counted() -> None:
    world = World()
    world.step(prefill(1))
    world.step(returned(1))
    assert world.log.cooperation.numbers() == {}


def test_a_reader_of_standard_output_that_has_left_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        say("ready")
        assert os.read(reader, 100) == b"ready\n"
        os.close(reader)
        say("still here")
