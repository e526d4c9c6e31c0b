"""`tandem replay FILE|DIR`: what is in a record is decided again, and every decision is compared.

Flight records are a node's; what a fault has left may also be that of a server's edge or of a router, as its head says.

Each segment is done again from its own snapshot, and a record of several once more as a whole, through its rotations.
With `--at N` the node is resumed at the nearest snapshot before step N, goes there silently, and is shown from there.
"""

import argparse
import contextlib
import json
import resource
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tandem.cli.failure import CommandFailed
from tandem.cli.flags import natural
from tandem.core.scheduler import inspect
from tandem.core.scheduler.node import EngineNode
from tandem.logtext import visible
from tandem.server.node.flight import Output, ReplayedStep
from tandem.server.node.record import NoSuchStep, Record, records_at, replay_through, steps_from
from tandem.server.record_file import (
    BrokenRecord,
    Difference,
    NothingWritten,
    Replay,
    StepRaised,
    same_bytes,
)
from tandem.server.replays import AnyMachine, machine_of, replay_alone
from tandem.simulator.report import trace_step

MAX_MEMORY_BYTES = 4 << 30
MAX_SHOWN_CHARS = 1 << 16  # of one line
CUT = ", then it is cut: the process was killed while it wrote"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "record",
        metavar="FILE|DIR",
        type=Path,
        help="what --flight-record or a fault has written; a file stands for its record",
    )
    parser.add_argument(
        "--at", metavar="N", type=natural, help="show step N, the state of the node after it, and the steps that follow"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Whatever is in the files, of whoever: a line says what is wrong with them, and memory is bounded."""
    with bounded_memory(MAX_MEMORY_BYTES):
        return replayed(args)


@contextlib.contextmanager
def bounded_memory(most: int) -> Iterator[None]:
    """Beyond `most` bytes more than now, MemoryError: a record may claim a node of any size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    wanted = pages * resource.getpagesize() + most
    resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def replayed(args: argparse.Namespace) -> int:
    records = records_at(args.record)
    if not records:
        raise CommandFailed(
            f"no record at {args.record}; a server writes one with --flight-record DIR, and after a fault"
        )
    try:
        if args.at is not None:
            return show(the_only(records), args.at, as_json=args.json)
        return compare(records, as_json=args.json)
    except StepRaised as error:
        raise CommandFailed(f"{error}; `--at` shows the step before") from error
    except NoSuchStep as error:
        raise CommandFailed(f"{error}; without --at it is compared as a whole") from error
    except (BrokenRecord, PermissionError) as error:
        raise CommandFailed(f"{error}; record again with this version") from error
    except (CommandFailed, OSError):
        raise
    except Exception as error:  # whatever a state that no node of ours was ever in leads to
        raise CommandFailed(f"{args.record} cannot be replayed: {type(error).__name__} {error}") from error


def the_only(records: list[Record]) -> Record:
    if len(records) > 1:
        names = ", ".join(record.name for record in records)
        raise CommandFailed(f"{len(records)} records are here ({names}); name a file of the one that has the step")
    return records[0]


# --- all of it -------------------------------------------------------------------------------------------------------


def compare(records: list[Record], *, as_json: bool) -> int:
    segments: list[dict[str, object]] = []
    wholes: list[dict[str, object]] = []
    for record in records:
        try:
            results = list(each_alone(record))
        except (BrokenRecord, StepRaised) as error:
            if len(records) == 1:
                raise
            is_empty = isinstance(error, NothingWritten)  # its process was killed first: nothing in it could differ
            wholes.append(
                {"name": record.name, "segments": len(record.segments), "error": str(error), "identical": is_empty}
            )
            say(f"{record.name}: {error}", as_json=as_json)
            continue
        for path, result in results:
            segments.append({"file": str(path), **_told(result)})
            say(f"{path}: {_text(result)}", as_json=as_json)
        whole = replay_through(record, EngineNode) if machine_of(record.segments[0]) is None else results[0][1]
        wholes.append({"name": record.name, "segments": len(record.segments), **_told(whole)})
        if len(record.segments) > 1:
            say(f"{record.name}, {len(record.segments)} segments as one: {_text(whole)}", as_json=as_json)
    is_identical = all(report["identical"] for report in (*segments, *wholes))
    if as_json:
        print(json.dumps({"identical": is_identical, "segments": segments, "records": wholes}))
    return 0 if is_identical else 1


def each_alone(record: Record) -> Iterator[tuple[Path, Replay]]:
    for path in record.segments:
        try:
            yield path, replay_alone(path)
        except NothingWritten:
            if len(record.segments) == 1:
                raise
            yield path, Replay(0, 0, None, is_cut=True)


def say(text: str, *, as_json: bool) -> None:
    if not as_json:
        print("\n".join(visible(line, most=MAX_SHOWN_CHARS) for line in text.split("\n")))


def _text(result: Replay) -> str:
    how = "identical" if result.difference is None else difference_text(result.difference)
    return f"{result.steps} steps, {result.events} events: {how}{CUT if result.is_cut else ''}"


def _told(result: Replay) -> dict[str, object]:
    found: dict[str, object] = {"steps": result.steps, "events": result.events, "cut": result.is_cut}
    difference = result.difference
    if difference is None:
        return {**found, "identical": True}
    sides = {"expected": shown_frame(difference.expected), "got": shown_frame(difference.got)}
    return {**found, "identical": False, "step": difference.step, **sides}


def difference_text(difference: Difference) -> str:
    """The first command that differs, as it was and as it is now."""
    expected, got = difference.expected, difference.got
    if not isinstance(expected, Output) or not isinstance(got, Output):
        sides = f"    expected {shown_frame(expected)}\n    got      {shown_frame(got)}"
        return f"DIFFERENT at step {difference.step}\n{sides}"
    lines = [f"DIFFERENT at step {difference.step}"]
    for index in range(max(len(expected.commands), len(got.commands))):
        left = expected.commands[index] if index < len(expected.commands) else None
        right = got.commands[index] if index < len(got.commands) else None
        if left != right:
            lines += [f"  command {index}", f"    expected {left}", f"    got      {right}"]
            break
    if expected.wake_at != got.wake_at:
        lines.append(f"  wake at: expected {expected.wake_at}, got {got.wake_at}")
    return "\n".join(lines)


# --- from one step on ------------------------------------------------------------------------------------------------


def show(record: Record, index: int, *, as_json: bool) -> int:
    """As JSON the one step; otherwise its trace, the state where a debugger would begin, and the trace of the rest."""
    is_identical = True
    machine = machine_of(record.segments[0])
    if machine is not None:
        return show_calls(machine, record, index, as_json=as_json)
    for step in steps_from(record, index, EngineNode):
        is_identical = is_identical and step.is_as_recorded
        if as_json:
            print(json.dumps(step_document(step)))
            break
        for line in trace_lines(step):
            print(visible(line, most=MAX_SHOWN_CHARS))
        if step.index == index:
            print(f"state after step {index}:\n{json.dumps(inspect.state(engine_node(step)), indent=2)}")
    return 0 if is_identical else 1


def show_calls(machine: AnyMachine, record: Record, index: int, *, as_json: bool) -> int:
    """Of a machine that is no node: what it was given and what it gives, one line each. Raises NoSuchStep."""
    last, is_identical = -1, True
    for step in machine.steps(record.segments[0]):
        last = step.index
        if last < index:
            continue
        is_same = step.expected is None or same_bytes(step.expected, step.got)
        is_identical = is_identical and is_same
        shown = {
            "step": last,
            "given": shown_frame(step.given),
            "gave": shown_frame(step.got),
            "is_as_recorded": is_same,
        }
        print(visible(json.dumps(shown), most=MAX_SHOWN_CHARS))
        if as_json:
            break
    if last < index:
        raise NoSuchStep(f"{record.name} has no step {index}: it ends at {last}")
    return 0 if is_identical else 1


def shown_frame(frame: msgspec.Struct) -> object:
    """As JSON knows it, whatever was encoded within it, too."""
    return readable(msgspec.msgpack.decode(msgspec.msgpack.encode(frame)))


def trace_lines(step: ReplayedStep) -> Iterator[str]:
    incarnation = engine_node(step).state.settings.incarnation
    name = f"{incarnation.name}.{incarnation.id} step {step.index}"
    yield from list(trace_step(step.input.now, name, step.input.happened, step.got.commands)) or [f"{name} is silent"]
    if step.expected is not None and not step.is_as_recorded:
        yield from difference_text(Difference(step.index, step.expected, step.got)).split("\n")


def step_document(step: ReplayedStep) -> dict[str, object]:
    return {
        "step": step.index,
        "now": step.input.now,
        "events": readable(step.input.happened),
        "commands": readable(step.got.commands),
        "is_as_recorded": step.is_as_recorded,
        "state": inspect.state(engine_node(step)),
    }


def engine_node(step: ReplayedStep) -> EngineNode:
    assert isinstance(step.node, EngineNode)
    return step.node


def readable(thing: object) -> object:
    """As JSON knows it; bytes in base64."""
    return msgspec.to_builtins(thing, builtin_types=())
