"""A story in text: a small cluster, what happens to it, and the full trace of what every node was told and wanted.

    node prefill-0 prefill page_size=4        # a replica; settings of `NodeSettings` by name
    at 1ms prefill-0 request 8+3 room 7       # 8 prompt tokens, at most 3 new ones; the same room has the same prompt
    at 1ms decode-0 request 8+3 room 7 from prefill-0 timeout 2s
    at 5ms decode-0 abort 1                   # ids count from 1 on every replica
    at 5ms decode-0 stop 1                    # the edge saw a stop string
    at 5ms decode-0 pause 2s | crash | restart | drain | slow 20
    at 5ms cut prefill-0 decode-0 | heal prefill-0 decode-0
    at 5ms corrupt 1 pages | fail 1 batches
    until 1s

There is no randomness in it: steady latencies, no loss. The checkers look on as in any simulation.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from tandem.core.events import AbortRequested, DrainRequested, StopMatched
from tandem.core.settings import LoadFailurePolicy, NodeSettings, OptimisticPolicy, Role
from tandem.core.values import MILLISECOND, SECOND, Address, Incarnation, Nanos, RequestId, Room
from tandem.sim.clients import Exchange
from tandem.sim.faults import Options
from tandem.sim.links import LinkSettings
from tandem.sim.model import FIRST_TOKEN
from tandem.sim.oracle import Script
from tandem.sim.replica import Life, Replica
from tandem.sim.report import trace_step
from tandem.sim.router import BOOTSTRAP_PORT
from tandem.sim.workload import Ask, WorkloadSettings
from tandem.sim.world import STEADY, World

DIVIDER = "-" * 100
SMALL = NodeSettings(
    role=Role.UNIFIED,
    incarnation=Incarnation("", 0),
    num_pages=16,
    page_size=4,
    layout="layout",
    max_running=4,
    chunk_tokens=8,
    metadata_slots=4,
)


class BadScript(Exception):
    """A line that is not a scenario command."""


@dataclass(slots=True)
class Scenario:
    """A script and the trace that it gives."""

    lines: list[str] = field(default_factory=list)
    world: World = field(init=False)
    until_ns: int = SECOND
    asks: int = 0

    def __post_init__(self) -> None:
        self.world = World(quiet_options(), timing=STEADY, trace=self._record)

    def _record(self, now: int, life: Life, events, commands) -> None:  # type: ignore[no-untyped-def]
        name = f"{life.replica.name}.{life.incarnation.epoch}"
        self.lines.extend(trace_step(now, name, events, commands))

    def read(self, script: str) -> None:
        for number, line in enumerate(script.splitlines(), start=1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            try:
                self._command(words)
            except (ValueError, KeyError, IndexError) as error:
                raise BadScript(f"line {number}: {line.strip()}: {error}") from error

    def _command(self, words: list[str]) -> None:
        match words:
            case ["node", name, role, *settings]:
                template = msgspec.structs.replace(SMALL, **dict(map(_setting, settings)))
                replica = self.world.replicas[name] = Replica(name, Role(role), template)
                self.world.start(replica)
            case ["at", time, *action]:
                self.world.clock.at(parse_ns(time), self._action(action))
            case ["until", time]:
                self.until_ns = parse_ns(time)
            case _:
                raise ValueError("unknown command")

    def _action(self, words: list[str]) -> Callable[[], None]:
        world = self.world
        match words:
            case ["cut", source, target]:
                return lambda: world.network.cut(source, target)
            case ["heal", source, target]:
                return lambda: world.network.heal(source, target)
            case ["corrupt", count, "pages"]:
                return lambda: setattr(world.weather, "pages_to_corrupt", int(count))
            case ["fail", count, "batches"]:
                return lambda: setattr(world, "batches_to_fail", int(count))
            case [name, *what]:
                return self._on(world.replicas[name], what)
            case _:
                raise ValueError("nothing to do")

    def _on(self, replica: Replica, words: list[str]) -> Callable[[], None]:
        world, name = self.world, replica.name
        match words:
            case ["request", size, *rest]:
                return self._request(replica, size, dict(zip(rest[::2], rest[1::2], strict=True)))
            case ["abort", request]:
                return lambda: world.push(_life(replica), AbortRequested(RequestId(int(request))))
            case ["stop", request]:
                return lambda: self._stop(replica, RequestId(int(request)))
            case ["drain"]:
                return lambda: world.push(_life(replica), DrainRequested())
            case ["crash"]:
                return lambda: world.crash(name, down_ns=3600 * SECOND)
            case ["restart"]:
                return lambda: world.start(replica)
            case ["pause", duration]:
                return lambda: world.pause(name, duration_ns=parse_ns(duration))
            case ["slow", factor]:
                return lambda: world.slow_down(name, factor=float(factor), duration_ns=3600 * SECOND)
            case _:
                raise ValueError("unknown action")

    def _request(self, replica: Replica, size: str, options: dict[str, str]) -> Callable[[], None]:
        prompt_len, max_new_tokens = map(int, size.split("+"))
        self.asks += 1
        room = Room(int(options["room"])) if "room" in options else None
        peer = Address(options["from"], BOOTSTRAP_PORT) if "from" in options else None
        story = int(options.get("prompt", room if room is not None else self.asks))
        prompt = tuple(FIRST_TOKEN + 100 * story + index for index in range(prompt_len))
        timeout_ns = parse_ns(options.get("timeout", "600s"))
        script = Script(prompt, max_new_tokens, eos_one_in=0)
        ask = Ask(self.asks, 0, script, timeout_ns, 0, None, None, repeats_room=False)
        self.world.router.num_to_come += 1
        return lambda: self.world.router.submit(Exchange(ask, room), replica.name, room, peer)

    def _stop(self, replica: Replica, request: RequestId) -> None:
        life = _life(replica)
        life.halves[request].stop_sent = True
        self.world.push(life, StopMatched(request))

    def run(self) -> str:
        """The trace. Raises `Violation` if the story breaks an invariant."""
        self.world.run(self.until_ns)
        return "\n".join([*self.lines, ""])


def quiet_options() -> Options:
    """A cluster in which nothing goes wrong by itself."""
    return Options(
        seed=0,
        classes=(),
        num_prefills=0,
        num_decodes=0,
        num_unified=0,
        num_shards=1,
        workload=WorkloadSettings(num_requests=0),
        links=LinkSettings(base_ns=200_000, spread=0.0),
        prefill=SMALL,
        decode=SMALL,
        page_read_ns=(100_000, 100_001),
        corruption=0.0,
        linger_ns=0,
        batch_failure=0.0,
        event_copies=0.0,
        hostility=0.0,
    )


def play(text: str) -> str:
    """A whole scenario file, with the trace that its script gives now."""
    script = text.partition(DIVIDER)[0].rstrip()
    scenario = Scenario()
    scenario.read(script)
    return f"{script}\n{DIVIDER}\n{scenario.run()}"


def parse_ns(text: str) -> int:
    for unit, factor in (("ms", MILLISECOND), ("us", 1000), ("s", SECOND)):
        if text.endswith(unit):
            return int(float(text[: -len(unit)]) * factor)
    raise ValueError(f"{text!r} is not a time")


def _setting(word: str) -> tuple[str, object]:
    name, _, value = word.partition("=")
    converter = _CONVERTERS.get(name)
    if converter is not None:
        return name, converter(value)
    if name not in NodeSettings.__struct_fields__:
        raise ValueError(f"no setting {name}")
    return name, value == "on" if value in ("on", "off") else int(value)


def _life(replica: Replica) -> Life:
    if replica.life is None:
        raise ValueError(f"{replica.name} is down")
    return replica.life


_CONVERTERS: dict[str, Callable[[str], object]] = {
    "optimistic": OptimisticPolicy,
    "load_failure": LoadFailurePolicy,
    "force_retry_prob": float,
    "conservativeness": float,
    "layout": str,
    "lease_ns": lambda text: Nanos(parse_ns(text)),
    "resend_ns": lambda text: Nanos(parse_ns(text)),
    "stash_ns": lambda text: Nanos(parse_ns(text)),
    "stall_timeout_ns": lambda text: Nanos(parse_ns(text)),
    "learn_peer_ns": lambda text: Nanos(parse_ns(text)),
}
