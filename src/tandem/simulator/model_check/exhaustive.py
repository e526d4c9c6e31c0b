"""Every interleaving of a small world, breadth first: `python -m tandem.simulator.model_check.exhaustive [--depth N]`.

From each situation everything that can happen is tried once. Three things are checked:

    always        whatever a node holds is conserved and has one owner, clients see the right tokens and one end, no
                  page is read or written by another request, nothing raises (`model_check.replica`)
    afterwards    from every situation at which the search stops, faults are switched off and the world runs on: every
                  request ends, and nothing is held by anybody. Of every situation before those, one move that is no
                  fault leads to another that was searched, so it ends as well.
    calm          where only messages were lost or copied, every request also gets its tokens

The search is complete up to its depth, and says so when nothing was left to try. What it tells of a violation is the
shortest way there, for breadth goes first, replayed from the start with everything that the nodes hear and want.
"""

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any  # machines of any state and trigger type

from tandem.cgroups import num_cores
from tandem.core.disagg.transfer_state import RECEIVER, SENDER
from tandem.core.machine import Machine
from tandem.core.scheduler.request_state import LIFECYCLE
from tandem.garbage import no_collector
from tandem.simulator.model_check.replica import Move
from tandem.simulator.model_check.world import (
    DECODE,
    PREFILL,
    Fault,
    FaultBudget,
    Small,
    SmallWorld,
    WorldState,
    describe,
    is_calm,
    spend,
)
from tandem.simulator.model_check.worlds import LARGE_WORLDS, SMALL_WORLDS
from tandem.simulator.oracle import Violation
from tandem.simulator.report import trace_step

MACHINES: tuple[Machine[Any, Any], ...] = (LIFECYCLE, SENDER, RECEIVER)
MAX_QUIET_MOVES = 2000  # without faults every world ends long before
TIME: Move = ("time", None)
Entry = tuple[str, str, str]  # machine, state, trigger


@dataclass(slots=True)
class Found:
    """What one search came to. Plain values: it travels between processes."""

    name: str
    states: int = 0  # situations; the fault budget is not counted
    transitions: int = 0
    nodes: int = 0  # situations of single nodes
    replicas: int = 0
    depth: int = 0
    is_whole: bool = False  # nothing was left to try
    endings: int = 0  # from so many situations the world was run to its end
    visited: set[Entry] = field(default_factory=set)
    seconds: float = 0.0
    violation: str = ""

    def line(self) -> str:
        extent = "all there is" if self.is_whole else "cut there"
        return (
            f"{self.name:<10} {self.states:>7} states {self.transitions:>8} transitions, depth {self.depth:>2} "
            f"({extent}), {self.nodes:>5} node states, run to the end from {self.endings}, {self.seconds:.1f} s"
        )


@dataclass(slots=True)
class Search:
    world: SmallWorld
    budgets: dict[WorldState, list[FaultBudget]] = field(
        default_factory=dict
    )  # with which it was reached; none beats another
    parents: list[tuple[int, Move]] = field(default_factory=list)
    ended: tuple[set[WorldState], set[WorldState]] = field(default_factory=lambda: (set(), set()))  # stormy, calm
    transitions: int = 0
    endings: int = 0
    depth: int = 0
    at: int = 0  # the number of the place whose moves are being tried
    trying: tuple[Move, ...] = ()

    def run(self, depth: int) -> bool:
        """True if nothing was left to try. Raises `Violation`; then `way` leads there."""
        full = self.world.small.budget()
        beginning = self.world.beginning()
        self.budgets[beginning] = [full]
        self.parents.append((0, ()))
        level: list[tuple[WorldState, FaultBudget, int]] = [(beginning, full, 0)]
        while level and self.depth < depth:
            level = [place for before in level for place in self._expand(*before, full)]
            self.depth += bool(level)
        for world_state, budget, number in level:
            self._end(world_state, number, spent(full, budget))
        return not level

    def _expand(
        self, world_state: WorldState, budget: FaultBudget, number: int, full: FaultBudget
    ) -> list[tuple[WorldState, FaultBudget, int]]:
        """All places that are one move away and new."""
        world, new = self.world, []
        self.at = number
        is_quiet = True
        choices: list[tuple[Move, Fault | None]] = list(world.moves(world_state))
        if world.time_to_wake(world_state) is not None:
            choices.append((TIME, Fault.HASTE))
        for move, fault in choices:
            is_quiet = is_quiet and fault is not None
            left = budget if fault is None else spend(budget, fault)
            if left is None:
                continue
            self.trying = (move,)
            after = world.after(world_state, move)
            self.transitions += 1
            if after != world_state and self._is_new(after, left):
                self.parents.append((number, move))
                new.append((after, left, len(self.parents) - 1))
        if is_quiet:
            self._end(world_state, number, spent(full, budget))
        return new

    def _is_new(self, world_state: WorldState, budget: FaultBudget) -> bool:
        """Not reached before with at least as much left to spend."""
        known = self.budgets.setdefault(world_state, [])
        if any(all(map(int.__ge__, other, budget)) for other in known):
            return False
        known.append(budget)
        return True

    def _end(self, world_state: WorldState, number: int, spent: FaultBudget) -> None:
        """Without faults from here on: does everything end? Time passes when nothing else can happen."""
        world, calm = self.world, is_calm(spent)
        ended, path = self.ended[calm], []
        self.at, self.trying = number, ()
        self.endings += 1
        while world_state not in ended:
            path.append(world_state)
            move = next((move for move, fault in world.moves(world_state) if fault is None), None)
            if move is None and world.time_to_wake(world_state) is not None:
                move = TIME
            if move is None:
                self._check_end(world_state, calm)
                break
            if len(path) > MAX_QUIET_MOVES:
                raise Violation("L1", f"no end after {MAX_QUIET_MOVES} moves without a fault")
            self.trying = (*self.trying, move)
            world_state = world.after(world_state, move)
        ended.update(path)

    def _check_end(self, world_state: WorldState, calm: bool) -> None:
        self.world.check_idle(world_state)
        for side in (PREFILL, DECODE) if calm else ():
            for half in self.world.replica(world_state, side).halves:
                if half.end != "finished":
                    raise Violation("L5", f"{('prefill', 'decode')[side]} request {half.request} ends with {half.end}")

    def way(self) -> list[Move]:
        """From the beginning to the moves that are being tried."""
        moves: list[Move] = []
        number = self.at
        while number:
            number, move = self.parents[number]
            moves.append(move)
        return [*reversed(moves), *self.trying]


def spent(full: FaultBudget, budget: FaultBudget) -> FaultBudget:
    return tuple(map(int.__sub__, full, budget))


# --- tables ----------------------------------------------------------------------------------------------------------


class NotedRules(dict[Any, Any]):
    """The rules of a machine, unchanged; notes which of them are followed."""

    def __init__(self, machine: Machine[Any, Any], visited: set[Entry]) -> None:
        super().__init__(machine.rules)
        self.machine, self.visited = machine.name, visited

    def get(self, key: tuple[Enum, Enum], default: Any = None) -> Any:
        if key in self:
            self.visited.add((self.machine, key[0].name, key[1].name))
        return super().get(key, default)


@contextmanager
def noted(visited: set[Entry]) -> Iterator[None]:
    """While this lasts, the entries of the tables that are followed are added to `visited`."""
    plain = [machine.rules for machine in MACHINES]
    try:
        for machine in MACHINES:
            object.__setattr__(machine, "rules", NotedRules(machine, visited))
        yield
    finally:
        for machine, rules in zip(MACHINES, plain, strict=True):
            object.__setattr__(machine, "rules", rules)


def entries() -> list[Entry]:
    return [(machine.name, state.name, trigger.name) for machine in MACHINES for state, trigger in machine.rules]


# --- runs ------------------------------------------------------------------------------------------------------------


def explore(small: Small, depth: int | None = None) -> Found:
    """One small world to its depth. A violation is told, with the way there."""
    found, search = Found(small.name), Search(SmallWorld(small))
    begun_at = time.perf_counter()
    with noted(found.visited), no_collector():
        try:
            found.is_whole = search.run(depth if depth is not None else small.depth)
        except Violation as violation:
            found.violation = tell_way(small, search.way(), violation)
    found.states, found.transitions, found.depth = len(search.budgets), search.transitions, search.depth
    found.nodes = sum(len(stage.forks.forks) for stage in search.world.stages)
    found.replicas = sum(len(stage.known.values) for stage in search.world.stages)
    found.endings, found.seconds = search.endings, time.perf_counter() - begun_at
    return found


def explore_all(smalls: Sequence[Small], depth: int | None = None) -> list[Found]:
    """All of them, in order, on as many processes as there are cores."""
    num_processes = min(num_cores(), len(smalls))
    if num_processes == 1:
        return [explore(small, depth) for small in smalls]
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        return list(pool.starmap(explore, [(small, depth) for small in smalls], chunksize=1))


def tell_way(small: Small, way: Sequence[Move], violation: Violation) -> str:
    """The shortest way to a violation as a script: every move, and what the nodes heard and wanted."""
    lines = [f"{small.name}: {violation}", f"after {len(way)} moves:"]
    world = SmallWorld(small, witness=lambda *step: lines.extend(f"      {line}" for line in trace_step(*step)))
    world_state = world.beginning()
    for number, move in enumerate(way, 1):
        lines.append(f"  {number:>2}. {describe(move)}")
        try:
            world_state = world.after(world_state, move)
        except Violation as again:
            lines.append(f"      {again}")
    return "\n".join(lines)


def report(founds: Sequence[Found]) -> str:
    visited = set[Entry]().union(*(found.visited for found in founds))
    every = entries()
    missing = [" ".join(entry) for entry in every if entry not in visited]
    lines = [found.line() for found in founds]
    lines += [found.violation for found in founds if found.violation]
    states, transitions = sum(found.states for found in founds), sum(found.transitions for found in founds)
    lines.append(
        f"{states} distinct states, {transitions} transitions, "
        f"{len(every) - len(missing)} of {len(every)} table entries visited"
    )
    lines += [f"never visited: {entry}" for entry in missing]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tandem.simulator.model_check.exhaustive", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--depth", type=int, metavar="N", help="moves from the beginning (default: each world's own)")
    worlds = {small.name: small for small in (*SMALL_WORLDS, *LARGE_WORLDS)}
    parser.add_argument("--world", choices=worlds, help="only this one (default: all that are small)")
    args = parser.parse_args(arguments)
    founds = explore_all(SMALL_WORLDS if args.world is None else [worlds[args.world]], args.depth)
    print(report(founds))
    return 1 if any(found.violation for found in founds) else 0


if __name__ == "__main__":
    sys.exit(main())
