"""Makes a failing seed small: from a cluster under faults to a few lines that break the same invariant.

The seed is run with a recorder, which gives a scenario. Lines are then left out and simplified, and after every change
the scenario is run again, as a whole, on the production nodes: a change stays only if the same invariant breaks. So
nothing impossible can be told, and whatever comes out reproduces by itself, without the seed.

Leaving out a line moves the chance of everything after it. A change that loses the violation therefore gets some more
tries with other dice, as long as anything is left to chance.
"""

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from tandem.core.values import MILLISECOND, SECOND
from tandem.simulator.faults.options import draw_options
from tandem.simulator.oracle import Violation
from tandem.simulator.scenario.parse import ns_text
from tandem.simulator.scenario.play import DIVIDER, BadScript, Scenario
from tandem.simulator.scenario.record import Recorder
from tandem.simulator.scenario.script import NodeLine, RequestLine, ScheduledLine, Script
from tandem.simulator.world import RECOUNT_EVERY, World

MAX_EVENTS = 1_500_000  # simulated while shrinking; about half a minute
FIRST_DICE, MORE_DICE = 40, 4
FAULTS_OF_CHANCE = ("F1", "F2", "F3", "F4", "F14", "F15", "F20")  # of chance; they count as events
COARSE_NS = (10 * MILLISECOND, MILLISECOND, MILLISECOND // 10)
MAY_NOT_MATTER = ("priority", "timeout_ns", "eos_one_in", "tenant", "rank", "rendered_at", "prompt")  # of a request
EVENTS_PER_RECOUNT = 30  # what one takes, in a full cluster
SLACK_NS = 5 * SECOND  # how much later than in the seed it may come


@dataclass(frozen=True, slots=True)
class Found:
    """A script, and how it breaks."""

    script: Script
    violation: Violation
    trace: tuple[str, ...]
    ended_at: int
    num_by_chance: int  # faults that chance brought

    @property
    def num_events(self) -> int:
        return len(self.script.scheduled) + self.num_by_chance

    def text(self) -> str:
        """A scenario file: the script, and what the nodes do up to the violation."""
        broken = f"# {self.violation}"
        return "\n".join([self.script.text(), DIVIDER, *self.trace, broken, ""])


def shrink_seed(seed: int) -> Found | None:
    """None if the seed breaks nothing, or nothing that can be told again."""
    world = World(draw_options(seed))
    recorder = Recorder(world)
    try:
        world.schedule_all()
        world.run()
    except Violation as violation:
        return Shrinker(violation.invariant).shrink(recorder.script(), world.clock.time)
    return None


def attempt(script: Script) -> tuple[Found | None, int]:
    """Tell a script. (how it breaks, if it does; what that took, in events)"""
    scenario, found = Scenario(), None
    try:
        scenario.read(script.text())
        scenario.run()
    except Violation as violation:
        world = scenario.world
        num_by_chance = sum(world.faults[name] for name in FAULTS_OF_CHANCE)
        found = Found(script, violation, tuple(scenario.lines), world.clock.time, num_by_chance)
    except (BadScript, ValueError, LookupError):
        pass  # it cannot be told: a replica is down, a request never came
    return found, scenario.world.num_events * (1 + EVENTS_PER_RECOUNT // script.recount_every)


@dataclass(slots=True)
class Shrinker:
    invariant: str
    events_left: int = MAX_EVENTS
    best: Found | None = None

    def shrink(self, script: Script, ended_at: int) -> Found | None:
        if not any(self._keep(first) for first in _beginnings(script, ended_at)):
            return None
        while self.events_left > 0:
            before = self._best
            for change in (
                self._look_closer,
                self._drop_groups,
                self._calm_down,
                self._drop_lines,
                self._drop_nodes,
                self._simplify,
            ):
                change()
            if self._best.script == before.script:
                break
        self._stop_early()
        return self._best

    @property
    def _best(self) -> Found:
        assert self.best is not None
        return self.best

    @property
    def _script(self) -> Script:
        return self._best.script

    def _keep(self, script: Script) -> bool:
        """Whether it still breaks, with one of a few dice. What is not worse than the best is the best from now on."""
        for candidate in _tries(script):
            if self.events_left <= 0:
                return False
            found, num_events = attempt(candidate)
            self.events_left -= num_events
            if found is not None and found.violation.invariant == self.invariant:
                self.best = found
                return True
        return False

    def _look_closer(self) -> None:
        """Where a recount has found it: before so little is left that none comes in time."""
        for every in (64, 16, 4, 1):
            if every < self._script.recount_every and _is_of_a_recount(self._best.violation):
                self._keep(replace(self._script, recount_every=every))

    # -- leaving out

    def _drop_groups(self) -> None:
        self._drop(lambda script: script.groups())

    def _drop_lines(self) -> None:
        self._drop(lambda script: [frozenset({index}) for index in range(len(script.scheduled))])

    def _drop(self, units: Callable[[Script], list[frozenset[int]]]) -> None:
        """Many at once as long as that works, then fewer; the latest first, for they depend on the others."""
        size = max(1, len(units(self._script)) // 2)
        while size:
            stop = len(units(self._script))
            while stop > 0:
                chosen = units(self._script)[max(0, stop - size) : stop]
                self._keep(self._script.without(frozenset().union(*chosen)))
                stop -= size
            size //= 2

    def _drop_nodes(self) -> None:
        for node in self._script.nodes:
            if not any(_names(line, node.name) for line in self._script.scheduled):
                self._keep(replace(self._script, nodes=tuple(kept for kept in self._script.nodes if kept != node)))

    # -- simplifying

    def _calm_down(self) -> None:
        """Everything at once, then one thing after another."""
        if self._script.chances and not self._keep(replace(self._script, chances=())):
            for word in self._script.chances[1:]:
                self._keep(replace(self._script, chances=tuple(kept for kept in self._script.chances if kept != word)))

    def _simplify(self) -> None:
        for node in self._script.nodes:
            for setting in node.settings:
                self._keep(_without_setting(self._script, node.name, setting))
        for index in range(len(self._script.scheduled)):
            for simpler in _simpler(self._script.scheduled[index]):
                if self._keep(self._script.changed(index, simpler)):
                    break
        for story in {line.story for line in self._script.scheduled if isinstance(line, RequestLine)}:
            self._make_smaller(story)

    def _make_smaller(self, story: int) -> None:
        """Fewer tokens, in all halves of one request."""
        for field in ("prompt_len", "max_new_tokens"):
            while self._keep_smaller(story, field, lambda size: size // 2):
                pass
            while self._keep_smaller(story, field, lambda size: size - 1):
                pass

    def _keep_smaller(self, story: int, field: str, smaller: Callable[[int], int]) -> bool:
        lines = self._script.scheduled
        new = tuple(
            replace(line, **{field: max(1, smaller(getattr(line, field)))})
            if isinstance(line, RequestLine) and line.story == story
            else line
            for line in lines
        )
        return new != lines and self._keep(replace(self._script, scheduled=new))

    def _stop_early(self) -> None:
        self._keep(replace(self._script, until=ns_text(_milliseconds(self._best.ended_at))))


def _is_of_a_recount(violation: Violation) -> bool:
    return any(frame.name == "recount" for frame in traceback.extract_tb(violation.__traceback__))


def _beginnings(script: Script, ended_at: int) -> Iterator[Script]:
    """The recorded scenario: calm and as it was, to the moment of the violation or until nothing is left to do."""
    for until in (ns_text(_milliseconds(ended_at + SLACK_NS)), "idle"):
        to_tell = replace(script, recount_every=RECOUNT_EVERY, until=until)
        yield replace(to_tell, chances=())
        yield from (_with_other_dice(to_tell, number) for number in range(0, FIRST_DICE, MORE_DICE))


def _with_other_dice(script: Script, number: int) -> Script:
    """The seed of chance is its first word."""
    seed = int(script.chances[0].removeprefix("seed="))
    return replace(script, chances=(f"seed={seed + number}", *script.chances[1:]))


def _milliseconds(time_ns: int) -> int:
    """The next whole one, in ns."""
    return (time_ns // MILLISECOND + 1) * MILLISECOND


def _tries(script: Script) -> list[Script]:
    return [_with_other_dice(script, number) for number in range(MORE_DICE)] if script.chances else [script]


def _names(line: ScheduledLine, name: str) -> bool:
    return name in (line.replica, line.peer) if isinstance(line, RequestLine) else name in line.words


def _without_setting(script: Script, name: str, setting: str) -> Script:
    def without(node: NodeLine) -> NodeLine:
        if node.name != name:
            return node
        return replace(node, settings=tuple(kept for kept in node.settings if kept != setting))

    return replace(script, nodes=tuple(map(without, script.nodes)))


def _simpler(line: ScheduledLine) -> Iterator[ScheduledLine]:
    """The same at a rounder time, and without what may not matter."""
    yield from (replace(line, at=line.at // coarse * coarse) for coarse in COARSE_NS if line.at % coarse)
    if isinstance(line, RequestLine):
        plain = RequestLine(line.at, line.replica, 1, 1, line.story, str(line.story))
        changes = {name: getattr(plain, name) for name in MAY_NOT_MATTER}
        yield from (replace(line, **{name: value}) for name, value in changes.items() if getattr(line, name) != value)
