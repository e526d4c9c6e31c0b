"""Records what happened to a simulated cluster from outside, as a script that can be told again.

Requests, and what clients, operators and liars did later, come from what the nodes were told. Faults that are moments
come from the same draws that the world makes. Everything else (batches, pages, messages) follows from these, so it is
not recorded: the production nodes bring it about again.
"""

from dataclasses import dataclass, field
from random import Random

from tandem.core.commands import Command
from tandem.core.events import (
    AbortRequested,
    Event,
    FlushRequested,
    HooksChanged,
    PeerSaid,
    RequestArrived,
    RequestRefused,
    StopMatched,
)
from tandem.core.request import Request
from tandem.core.values import RequestId
from tandem.simulator.actors.replica import Life
from tandem.simulator.actors.vitals import Hang
from tandem.simulator.clock import Clock
from tandem.simulator.faults.fault_schedule import FaultSchedule
from tandem.simulator.faults.options import Options
from tandem.simulator.scenario.parse import FOR_GOOD_NS, chance_words, json_word, ns_text, settings_words
from tandem.simulator.scenario.prompts import Namer
from tandem.simulator.scenario.script import NodeLine, OrderLine, RequestLine, ScheduledLine, Script
from tandem.simulator.world import World

MICROSECOND = 1000


@dataclass(slots=True)
class FaultPlan:
    """What the fault schedule of a seed does, and when. Its draws depend on nothing that happens in the world."""

    clock: Clock = field(default_factory=Clock)
    scheduled: list[ScheduledLine] = field(default_factory=list)

    def crash(self, name: str, *, down_ns: int) -> None:
        self._note(name, "crash", _short(down_ns))

    def lose_shard(self, name: str, *, down_ns: int) -> None:
        self._note(name, "shard", "crash", _short(down_ns))

    def lose_bootstrap(self, name: str, *, down_ns: int) -> None:
        self._note(name, "bootstrap", "crash", _short(down_ns))

    def lose_gateway(self, name: str, *, down_ns: int) -> None:
        """The nodes hear it as aborts."""

    def drain(self, name: str, *, down_ns: int) -> None:
        self._note(name, "drain", _short(down_ns))

    def scale_down(self, name: str) -> None:
        self._note(name, "drain", _short(FOR_GOOD_NS))

    def scale_up(self, name: str, *, after_ns: int) -> None:
        self._note(name, "crash", _short(after_ns))

    def pause(self, name: str, *, duration_ns: int) -> None:
        self._note(name, "pause", _short(duration_ns))

    def slow_down(self, name: str, *, factor: float, duration_ns: int) -> None:
        self._note(name, "slow", f"{factor:.1f}", _short(duration_ns))

    def slow_shard(self, name: str, shard: int, *, factor: float, duration_ns: int) -> None:
        self._note(name, "shard", str(shard), "slow", f"{factor:.1f}", _short(duration_ns))

    def hang(self, name: str, what: Hang, *, duration_ns: int) -> None:
        self._note(name, "hang", what, _short(duration_ns))

    def partition(self, source: str, target: str, *, duration_ns: int) -> None:
        if source != target and "router" not in f"{source} {target}":  # which scenarios do not have
            self._note("cut", source, target, _short(duration_ns))

    def disconnect(self, share: float) -> None:
        """The nodes hear it as aborts."""

    def flicker(self, source: str, target: str, *, down_ns: int) -> None:
        self._note("break", source, target, _short(down_ns))

    def silence(self, source: str, target: str) -> None:
        self._note("silence", source, target)

    def flush(self, name: str) -> None:
        """The nodes hear it."""

    def change_hooks(self, name: str, *, force_retry_prob: float) -> None:
        """The nodes hear it."""

    def swap_for_snapshot(self, name: str) -> None:
        self._note(name, "swap")

    def _note(self, *words: str) -> None:
        self.scheduled.append(OrderLine(_rounded(self.clock.time), words))


@dataclass(slots=True)
class Recorder:
    """Put in before the world runs."""

    world: World
    nodes: tuple[NodeLine, ...] = ()
    stories: dict[int, tuple[int, str]] = field(default_factory=dict)  # by the index of the ask
    namer: Namer = field(default_factory=Namer)
    scheduled: list[ScheduledLine] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.nodes = tuple(
            NodeLine(name, str(replica.role), tuple(settings_words(replica.template)))
            for name, replica in self.world.replicas.items()
        )
        self.world.trace = self.see

    def see(self, now: int, life: Life, events: tuple[Event, ...], commands: tuple[Command, ...]) -> None:
        for event in events:
            match event:
                case RequestArrived(request):
                    self._note_request(life, request)
                case AbortRequested(request):
                    self._note_client(now, life, "abort", request)
                case StopMatched(request):
                    self._note_client(now, life, "stop", request)
                case FlushRequested() | HooksChanged() | RequestRefused():
                    self._note_told(now, life, event)
                case PeerSaid(peer) if peer.name not in self.world.replicas:
                    self._note_told(now, life, event)
                case _:
                    pass

    def _note_request(self, life: Life, request: Request) -> None:
        half = life.halves.get(request.id)
        if half is None or half.must_finish:  # a probe: healing brings it
            return
        if half.ask.index not in self.stories:
            self.stories[half.ask.index] = self.namer.words(half.ask.script)
        story, prompt = self.stories[half.ask.index]
        line = RequestLine(
            _rounded(half.arrived_at),
            life.replica.name,
            len(half.ask.script.prompt),
            request.max_new_tokens,
            story,
            prompt,
            request.room,
            request.peer.host if request.peer is not None else None,
            _rounded(request.timeout_ns),
            request.priority,
            half.ask.script.eos_one_in,
            half.ask.tenant,
            request.dp_rank_hint,
            half.rendered_at // half.ask.shown.unit_s if half.ask.shown is not None else None,
            half.ask.script.logprobs_from,
            request.wants_vector,
        )
        if line not in self.scheduled:
            self.scheduled.append(line)

    def _note_client(self, now: int, life: Life, verb: str, request: RequestId) -> None:
        half = life.halves.get(request)
        if half is None or half.ask.index not in self.stories:
            return
        story = self.stories[half.ask.index][0]
        words = (life.replica.name, verb, "prompt", str(story))
        if not any(isinstance(line, OrderLine) and line.words == words for line in self.scheduled):
            self.scheduled.append(OrderLine(_rounded(now), words, story))

    def _note_told(self, now: int, life: Life, event: Event) -> None:
        self.scheduled.append(OrderLine(_rounded(now), (life.replica.name, "told", json_word(event))))

    def script(self) -> Script:
        """What has happened so far. What is left to chance is that of the seed."""
        world, options = self.world, self.world.options
        scheduled = [*self.scheduled, *planned(options, world.heals_at)]
        if "F19" not in options.classes:  # some halves never understand each other
            scheduled.append(OrderLine(_rounded(world.heals_at), ("heal",)))
        scheduled = [line for line in scheduled if line.at <= world.clock.time]
        chances = (f"seed={options.seed}", *chance_words(options))
        return Script(chances, self.nodes, tuple(sorted(scheduled, key=lambda line: line.at)))


def planned(options: Options, until_ns: int) -> list[ScheduledLine]:
    """The faults of a seed that are moments."""
    plan = FaultPlan()
    FaultSchedule(plan, Random(f"nemesis {options.seed}"), options).schedule(until_ns)
    while plan.clock.run_next():
        pass
    return plan.scheduled


def _rounded(time_ns: int) -> int:
    return time_ns // MICROSECOND * MICROSECOND


def _short(duration_ns: int) -> str:
    return ns_text(max(MICROSECOND, _rounded(duration_ns)))
