"""`Prefill batch` and `Decode batch` lines carry the number under which their batch was launched."""

import json
import logging

from tandem.core.batch import BatchKind, BatchOutcome, BatchPlan, Join, Row
from tandem.core.commands import Command, Effects, ForgetRequests, LaunchBatch
from tandem.core.events import BatchFailed, BatchReturned, Event
from tandem.core.values import SECOND, BatchId, Cause, Nanos, PageId, RequestId
from tandem.server.logs import BatchLog, JsonFormatter, Load, PrefillFigures, batch_number, decode_line, prefill_line

LOAD = Load(token_usage=0.25, used_tokens=400, running=3, queued=2)


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


def test_the_last_batch_before_idle_keeps_its_number() -> None:
    world = World()
    world.step(prefill(1))
    world.step(returned(1), prefill(2))
    world.step(returned(2))
    assert world.numbers() == ["[1]", "[2]"]


def test_a_batch_without_a_number_gets_that_of_the_node() -> None:
    assert batch_number(None, forward_count=8) == 8
    assert batch_number(7, forward_count=8) == 7


def test_the_number_is_frozen_in_the_plan_whatever_is_launched_meanwhile() -> None:
    world = World()
    world.step(prefill(17))
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


def test_a_json_line_is_one_document() -> None:
    record = logging.LogRecord("tandem", logging.INFO, "", 0, "line with %s", ("a\nbreak",), None)
    text = JsonFormatter("node").format(record)
    assert "\n" not in text
    document = json.loads(text)
    assert (document["process"], document["level"], document["message"]) == ("node", "info", "line with a\nbreak")
