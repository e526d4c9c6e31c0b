"""`tandem replay FILE|DIR`: a node decides again what is in a flight record; every decision is compared."""

import argparse
import json
from pathlib import Path

import msgspec

from tandem.cli.failure import CommandFailed
from tandem.core.sched import inspect
from tandem.core.sched.node import EngineNode
from tandem.server.node.flight import BrokenRecord, Difference, Step, StepRaised, replay, replayed_steps, segments_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("record", metavar="FILE|DIR", type=Path, help="what --flight-record has written")
    parser.add_argument("--at", metavar="N", type=int, help="show step N, and the state of the node after it")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    segments = segments_of(args.record)
    if not segments:
        raise CommandFailed(f"no flight record at {args.record}; a server writes one with --flight-record DIR")
    try:
        return show_step(segments, args.at) if args.at is not None else compare(segments, as_json=args.json)
    except StepRaised as error:
        raise CommandFailed(f"{error}; `--at` shows the step before") from error
    except (BrokenRecord, PermissionError) as error:
        raise CommandFailed(f"{error}; record again with this version") from error


def compare(segments: list[Path], *, as_json: bool) -> int:
    is_identical = True
    reports: list[dict[str, object]] = []
    for path in segments:
        result = replay(path, EngineNode)
        is_identical = is_identical and result.difference is None
        reports.append({"file": str(path), "steps": result.steps, "events": result.events, **_told(result.difference)})
        if not as_json:
            print(f"{path}: {result.steps} steps, {result.events} events: ", end="")
            print("identical" if result.difference is None else difference_text(result.difference))
    if as_json:
        print(json.dumps({"identical": is_identical, "segments": reports}))
    return 0 if is_identical else 1


def _told(difference: Difference | None) -> dict[str, object]:
    if difference is None:
        return {"identical": True}
    return {"identical": False, "step": difference.step, **_sides(difference)}


def _sides(difference: Difference) -> dict[str, object]:
    return {"expected": readable(difference.expected), "got": readable(difference.got)}


def difference_text(difference: Difference) -> str:
    """The first command that differs, as it was and as it is now."""
    expected, got = difference.expected, difference.got
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


def show_step(segments: list[Path], index: int) -> int:
    """One step in full. The state after it is the node's, so it is where a debugger would begin."""
    for path in segments:
        for step in replayed_steps(path, EngineNode):
            if step.index == index:
                print(json.dumps(step_document(step), indent=2))
                return 0
    raise CommandFailed(f"the record has no step {index}; without --at it is compared as a whole")


def step_document(step: Step) -> dict[str, object]:
    assert isinstance(step.node, EngineNode)
    return {
        "step": step.index,
        "now": step.input.now,
        "events": readable(step.input.happened),
        "commands": readable(step.got.commands),
        "is_as_recorded": step.expected is None or step.expected == step.got,
        "state": inspect.state(step.node),
    }


def readable(thing: object) -> object:
    """As JSON knows it; bytes in base64."""
    return msgspec.to_builtins(thing, builtin_types=())
