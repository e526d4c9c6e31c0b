"""How much of the product simulation executes: of the statements of `core`, `transfer` and `server`, which share.

    python bench/simulated_share.py [--worlds 30] [--whole 160] [--first-seed 20000] [--missing PART] [--output FILE]

Both kinds of simulation run with Python's own line tracing: `--worlds` seeds of the core under the simulator's actors,
`--whole` seeds of whole clusters. Seeds below 10,000 stay as they are on record, and draw less: from 0 on as many of
them execute two points less. Only statements inside of functions count: what an import executes shows nothing.
`--missing server/api` lists the lines of that part that no seed has reached. The last line is one JSON document.
"""

import argparse
import ast
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any  # what a tracer is given

from conditions import conditions

import tandem
from tandem.simulator.hunt import run_seed
from tandem.simulator.whole import world
from tandem.simulator.whole.kernel import Kernel

ROOT = Path(tandem.__file__).parent
PARTS = ("core", "transfer", "server")
NO_CODE = (ast.Global, ast.Nonlocal, ast.Pass)


@dataclass(slots=True)
class Source:
    """One file: the lines that show each statement, and the lines that ran."""

    statements: list[range]
    ran: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, path: Path) -> "Source":
        tree = ast.parse(path.read_text())
        found = [
            header(statement)
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
            for statement in inner(function)
        ]
        return cls(sorted(set(found), key=lambda lines: (lines.start, lines.stop)))

    def missing(self) -> list[range]:
        return [lines for lines in self.statements if not any(line in self.ran for line in lines)]


def inner(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.stmt]:
    """The statements of a function that make code, without those of functions in it."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.stmt) and makes_code(node):
            yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


def makes_code(node: ast.stmt) -> bool:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return False  # a docstring, or the dots of a protocol
    return not isinstance(node, NO_CODE) and not (isinstance(node, ast.AnnAssign) and node.value is None)


def header(node: ast.stmt) -> range:
    """The lines of a statement, without the statements inside of it."""
    inside = [child.lineno for child in ast.walk(node) if isinstance(child, ast.stmt) and child is not node]
    inside += [case.pattern.lineno for case in getattr(node, "cases", ())]
    last = node.end_lineno or node.lineno
    return range(node.lineno, max(node.lineno + 1, min(last + 1, *inside) if inside else last + 1))


class Tracer:
    """Line tracing of the files in `sources`, each code object for as long as it has lines that did not run."""

    def __init__(self, sources: dict[str, Source]) -> None:
        self._sources = sources
        self._left: dict[CodeType, set[int]] = {}

    def call(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        left = self._left.get(code)
        if left is None:
            source = self._sources.get(code.co_filename)
            lines = set() if source is None else {line for _, _, line in code.co_lines() if line is not None}
            left = self._left[code] = lines
        return self._line if left else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self._sources[frame.f_code.co_filename].ran.add(frame.f_lineno)
            self._left[frame.f_code].discard(frame.f_lineno)
        return self._line


def traced(sources: dict[str, Source], worlds: range, wholes: range) -> list[str]:
    """The lines that reproduce the violations that were found on the way."""
    tracer = Tracer(sources)
    sys.settrace(tracer.call)
    Kernel.tracer = staticmethod(tracer.call)
    try:
        results = [*map(run_seed, worlds), *map(world.run_seed, wholes)]
    finally:
        sys.settrace(None)
    return [f"{result.line}  # {result.invariant}" for result in results if result.invariant]


def share(sources: list[Source]) -> float:
    total = sum(len(source.statements) for source in sources)
    return round(1 - sum(len(source.missing()) for source in sources) / total, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, default=30)
    parser.add_argument("--whole", type=int, default=160)
    parser.add_argument("--first-seed", type=int, default=20_000)
    parser.add_argument("--missing", default="-")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    paths = [path for part in PARTS for path in sorted((ROOT / part).rglob("*.py"))]
    sources = {str(path): Source.of(path) for path in paths}
    first = args.first_seed
    for line in traced(sources, range(first, first + args.worlds), range(first, first + args.whole)):
        print(line)
    for name, source in sources.items():
        short = str(Path(name).relative_to(ROOT))
        if source.statements:
            print(f"{share([source]):7.1%} of {len(source.statements):4} {short}")
        if short.startswith(args.missing):
            print("        not:", " ".join(str(lines.start) for lines in source.missing()))
    by_part = {part: [source for name, source in sources.items() if f"/{part}/" in name] for part in PARTS}
    document = {
        "share": share(list(sources.values())),
        **{part: share(found) for part, found in by_part.items()},
        "statements": sum(len(source.statements) for source in sources.values()),
        "first_seed": first,
        "worlds": args.worlds,
        "whole": args.whole,
        **conditions(),
    }
    if args.output:
        args.output.write_text(json.dumps(document, indent=2) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
