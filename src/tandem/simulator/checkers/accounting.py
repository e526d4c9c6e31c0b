"""What is counted and shown is what happened: hit rate, time to the first token, gauges."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from tandem.core.commands import FinishReason, FinishRequest, Path, StartRequest
from tandem.core.disagg.sides import DecodeSide, PrefillSide
from tandem.core.scheduler.numbers import numbers
from tandem.core.scheduler.request_state import SLOT_STATES, Progress, State
from tandem.core.settings import Role
from tandem.core.values import Incarnation, RequestId
from tandem.simulator.actors.replica import Life
from tandem.simulator.checkers.base import End, where
from tandem.simulator.oracle import Violation

ADMITTED = frozenset(SLOT_STATES) - {State.LOADING}  # whose prefix may not come


@dataclass(slots=True)
class Prompts:
    """Of one life, every prompt once: at its first admission."""

    input_tokens: int = 0
    hit_tokens: int = 0
    counted: set[RequestId] = field(default_factory=set)
    loading: dict[RequestId, Progress] = field(default_factory=dict)  # may be counted and end in one step, unseen


class HitRate:
    """prompt = hit + computed the first time, for every request, however often it is computed again."""

    id = "S26"

    def __init__(self) -> None:
        self.prompts: defaultdict[Incarnation, Prompts] = defaultdict(Prompts)

    def moved(self, life: Life, progress: Progress, before: State | None) -> None:
        prompts = self.prompts[life.incarnation]
        if progress.state is State.LOADING:
            prompts.loading[progress.id] = progress
        if progress.state not in ADMITTED or progress.id in prompts.counted:
            return
        self._count(prompts, progress, progress.inserted * life.settings.page_size)

    def _count(self, prompts: Prompts, progress: Progress, hit_tokens: int) -> None:
        prompts.loading.pop(progress.id, None)
        prompts.counted.add(progress.id)
        prompts.input_tokens += progress.request.prompt_len
        prompts.hit_tokens += hit_tokens

    def ended(self, life: Life, command: End) -> None:
        if not isinstance(command, FinishRequest) or command.retries:
            return
        half = life.halves[command.request]
        is_computed_here = command.path is Path.UNIFIED or (half.role is Role.PREFILL and command.path is Path.REMOTE)
        found = command.cached_tokens + command.computed_tokens
        if is_computed_here and found != len(half.script.prompt):
            raise Violation(
                self.id,
                f"{where(life, half.request)}: {command.cached_tokens} cached and {command.computed_tokens} computed "
                f"are not its {len(half.script.prompt)} prompt tokens",
            )

    def recount(self, life: Life) -> None:
        counters, prompts = life.node.state.counters, self.prompts[life.incarnation]
        gone = [one for one in prompts.loading.values() if one.is_counted or one.id not in life.node.state.requests]
        for progress in gone:
            del prompts.loading[progress.id]
            if progress.is_counted and progress.id not in prompts.counted:
                # it has begun, and let go of its pages in the same step
                self._count(prompts, progress, progress.cached_tokens)
        counted, shown = (prompts.hit_tokens, prompts.input_tokens), (counters.hit_tokens, counters.input_tokens)
        if counted != shown:
            raise Violation(self.id, f"{where(life)} shows {shown[0]} of {shown[1]} tokens hit, they are {counted}")


class FirstTokenClock:
    """The time to the first token, or the vector, counts from the arrival, whatever was retried; its stages are the
    whole of it.
    """

    id = "S27"

    def __init__(self) -> None:
        self.arrived: defaultdict[Incarnation, dict[RequestId, int]] = defaultdict(dict)

    def moved(self, life: Life, progress: Progress, before: State | None) -> None:
        arrived = self.arrived[life.incarnation].setdefault(progress.id, progress.arrived_at)
        if progress.arrived_at != arrived:
            raise Violation(self.id, f"{where(life, progress.id)} arrived at {arrived}, not at {progress.arrived_at}")

    def began(self, life: Life, command: StartRequest) -> None:
        self._check_stages(life, command)

    def ended(self, life: Life, command: End) -> None:
        if isinstance(command, FinishRequest) and command.reason is FinishReason.PROMPT:
            self._check_stages(life, command)

    def _check_stages(self, life: Life, command: StartRequest | FinishRequest) -> None:
        arrived = self.arrived[life.incarnation].get(command.request)
        if arrived is None or life.halves[command.request].role is Role.PREFILL:
            return
        total, now = sum(duration for _, duration in command.ledger.stages), life.node.state.now
        if total != now - arrived:
            stages = dict(command.ledger.stages)
            raise Violation(
                self.id,
                f"{where(life, command.request)}: {now - arrived} ns to the first token, or vector, stages {stages}",
            )


ZERO_AT_IDLE = (
    *("running", "queued", "retracting", "bootstrapping", "early", "sending", "preallocating", "arriving"),
    "used_tokens",
)


class Gauges:
    id = "S30"

    def recount(self, life: Life) -> None:
        state = life.node.state
        shown = numbers(life.node)
        states = Counter(progress.state for progress in state.requests.values())
        early = Counter(
            progress.state
            for progress in state.requests.values()
            if isinstance(progress.side, PrefillSide)
            and progress.side.reader is None
            and progress.state is not State.DRAINING
        )
        counted = {
            "running": states[State.RUNNING] + states[State.COMPUTING],
            "queued": states[State.QUEUED] - early[State.QUEUED],
            "bootstrapping": early.total(),
            "early": early[State.COMPUTING],
            "sending": states[State.SENDING],
            "preallocating": sum(
                isinstance(progress.side, DecodeSide) and progress.state not in SLOT_STATES
                for progress in state.requests.values()
                if progress.state is not State.DRAINING
            ),
            "arriving": states[State.ARRIVING] + states[State.RECOVERING],
        }
        for name, value in counted.items():
            if (found := getattr(shown, name)) != value:
                raise Violation(self.id, f"{where(life)}: {name} shows {found}, is {value}")

    def at_idle(self, life: Life) -> None:
        shown = numbers(life.node)
        windows = shown.window.usage if shown.window is not None else 0
        for name, value in [*((name, getattr(shown, name)) for name in ZERO_AT_IDLE), ("window usage", windows)]:
            if value:
                raise Violation(self.id, f"{where(life)}: {name} shows {value} at idle")
