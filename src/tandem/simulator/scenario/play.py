"""A story in text: a small cluster, what happens to it, and the full trace of what every node was told and wanted.

    node prefill-0 prefill page_size=4        # a replica; settings of `NodeSettings` by name
    at 1ms prefill-0 request 8+3 room 7       # 8 prompt tokens, at most 3 new ones; the same room has the same prompt
    at 1ms decode-0 request 8+3 room 7 from prefill-0 timeout 2s
    at 1ms decode-0 request 8+3 prompt 1:4/2 priority 1 eos 8   # `prompts.py`; one token in 8 ends it
    at 1ms decode-0 request 8+3 room 7 from prefill-0 rank 1 tenant another   # DP rank of the prefill; whose cache
    at 1ms decode-0 request 8+3 room 7 from prefill-0 rendered 12   # its prompt shows the time, in Unix seconds
    at 5ms decode-0 abort 1 | stop 1          # ids count from 1 on every replica; the edge saw a stop string
    at 5ms decode-0 abort prompt 2            # whoever has this story, if it is there
    at 5ms decode-0 pause 2s | crash [2s] | restart | drain | slow 20 [2s] | swap   # for its own snapshot
    at 5ms decode-0 hang node [2s] | hang worker [2s] | hang batch [2s]   # till its watchdog fires
    at 5ms prefill-0 crash 2s ranks 1         # comes back with so many DP ranks
    at 5ms prefill-0 drain 2s | bootstrap crash [2s] | shard crash [2s] | shard 1 slow 20 [2s]
    at 5ms decode-0 told {"type":"..."}       # any event of the core, without blanks
    at 5ms decode-0 look                      # what its node holds, as lines of the trace
    at 5ms cut prefill-0 decode-0 [2s] | heal prefill-0 decode-0 | break prefill-0 decode-0 1s   # back after 1 s
    at 5ms silence prefill-0 decode-0         # their connection: nothing arrives, and nobody is told
    at 5ms heal                               # everything; when all is quiet, every pair has to answer once more
    at 5ms corrupt 1 pages | fail 1 batches
    recount every 256 events                  # without this line after every one
    until 1s | idle                           # nothing is left to happen, or an hour is over

There is no randomness in it: steady latencies, no loss. The checkers look on as in any simulation. Only a
story that begins with its chances is left to chance, and to the same chance every time:

    chances seed=39 jitter=on loss=0.1        # fields of `Options` and `LinkSettings` by name
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from tandem.core.events import AbortRequested, DrainRequested, Event, StopMatched
from tandem.core.settings import Role
from tandem.core.values import SECOND, Address, Cut, RequestId, Room
from tandem.simulator.actors.clients import Half, RoutedRequest
from tandem.simulator.actors.edge import BOOTSTRAP_PORT
from tandem.simulator.actors.linking import introduce
from tandem.simulator.actors.replica import Life, Replica
from tandem.simulator.actors.servers import rank_number, server_of
from tandem.simulator.actors.vitals import Hang
from tandem.simulator.faults.options import coarsest_grid
from tandem.simulator.renderings import ShownTime
from tandem.simulator.report import trace_step
from tandem.simulator.scenario.dump import holdings
from tandem.simulator.scenario.parse import FOR_GOOD_NS, SMALL, parse_chances, parse_ns, parse_setting, quiet_options
from tandem.simulator.scenario.prompts import Stories
from tandem.simulator.workload import WorkloadRequest
from tandem.simulator.world import STEADY, Timing, World

DIVIDER = "-" * 100


class BadScript(Exception):
    """A line that is not a scenario command."""


@dataclass(slots=True)
class Scenario:
    """A script and the trace that it gives."""

    lines: list[str] = field(default_factory=list)
    world: World = field(init=False)
    until_ns: int = SECOND
    stories: Stories = field(default_factory=Stories)
    asks: list[str] = field(default_factory=list)  # the own story of each
    dp_sizes: dict[str, int] = field(default_factory=dict)  # by the name of the server
    cuts: list[Cut] = field(default_factory=list)  # of all nodes

    def __post_init__(self) -> None:
        self.world = World(quiet_options(), timing=STEADY, trace=self._record, recount_every=1)

    def _record(self, now: int, life: Life, events, commands) -> None:  # type: ignore[no-untyped-def]
        name = f"{life.replica.name}.{life.incarnation.id}"
        self.lines.extend(trace_step(now, name, events, commands))

    def read(self, script: str) -> None:
        lines = [line.partition("#")[0].split() for line in script.splitlines()]
        for words in lines:
            match words:
                case ["node", name, _, *settings]:
                    self.dp_sizes[server_of(name)] = max(self.dp_sizes.get(server_of(name), 0), rank_number(name) + 1)
                    cuts = [parse_setting(word)[1] for word in settings if word.startswith("cut=")]
                    self.cuts += cuts or [SMALL.cut]
                case _:
                    pass
        for number, words in enumerate(lines, start=1):
            if not words:
                continue
            try:
                self._command(words)
            except (ValueError, KeyError, IndexError, msgspec.MsgspecError) as error:
                raise BadScript(f"line {number}: {' '.join(words)}: {error}") from error

    def _command(self, words: list[str]) -> None:
        match words:
            case ["chances", *settings] if not self.world.replicas:
                options, has_jitter = parse_chances(settings)
                timing = Timing() if has_jitter else STEADY
                self.world = World(options, timing=timing, trace=self._record, recount_every=1)
            case ["recount", "every", number, "events"]:
                self.world.recount_every = int(number)
            case ["node", name, role, *settings]:
                self.world.grid = self.world.options.grid or coarsest_grid(self.cuts)
                template = msgspec.structs.replace(SMALL, **dict(map(parse_setting, settings)))
                self.world.add_replica(name, Role(role), template, dp_size=self.dp_sizes[server_of(name)])
            case ["at", time, *action]:
                self.world.clock.at(parse_ns(time), self._action(action))
            case ["until", "idle"]:
                self.until_ns = FOR_GOOD_NS
            case ["until", time]:
                self.until_ns = parse_ns(time)
            case _:
                raise ValueError("unknown command")

    def _action(self, words: list[str]) -> Callable[[], None]:
        world = self.world
        match words:
            case ["cut", source, target, duration]:
                return lambda: world.injector.partition(source, target, duration_ns=parse_ns(duration))
            case ["cut", source, target]:
                return lambda: world.injector.cut(source, target)
            case ["break", source, target, duration]:
                return lambda: world.injector.flicker(source, target, down_ns=parse_ns(duration))
            case ["silence", source, target]:
                return lambda: world.injector.silence(source, target)
            case ["heal", source, target]:
                return lambda: world.injector.mend(source, target)
            case ["heal"]:
                world.num_planned += 1
                return world.injector.heal
            case ["corrupt", count, "pages"]:
                return lambda: setattr(world.page_faults, "pages_to_corrupt", int(count))
            case ["fail", count, "batches"]:
                return lambda: setattr(world, "batches_to_fail", int(count))
            case [name, *what] if name in world.replicas:
                return self._on(world.replicas[name], what)
            case [name, *what]:
                return self._harm(name, what)
            case _:
                raise ValueError("nothing to do")

    def _on(self, replica: Replica, words: list[str]) -> Callable[[], None]:
        world = self.world
        match words:
            case ["request", size, *rest]:
                return self._request(replica, size, dict(zip(rest[::2], rest[1::2], strict=True)))
            case ["abort", *which]:
                return self._with_half(replica, which, lambda life, half: self._abort(life, half.request))
            case ["stop", *which]:
                return self._with_half(replica, which, self._stop)
            case ["told", event]:
                told = msgspec.json.decode(event, type=Event)
                return lambda: world.push(_life(replica), told)
            case ["drain"]:
                return lambda: world.push(_life(replica), DrainRequested())
            case ["restart"]:
                return lambda: world.start(replica)
            case ["look"]:
                return lambda: self._look(_life(replica))
            case _:
                return self._harm(replica.name, words)

    def _harm(self, name: str, words: list[str]) -> Callable[[], None]:
        world = self.world
        match words:
            case ["crash", duration, "ranks", number]:
                return lambda: world.injector.crash(name, down_ns=parse_ns(duration), dp_size=int(number))
            case ["crash", *duration]:
                return lambda: world.injector.crash(name, down_ns=_duration_ns(duration))
            case ["drain", duration]:
                return lambda: world.injector.drain(name, down_ns=_duration_ns([duration]))
            case ["bootstrap", "crash", *duration]:
                return lambda: world.injector.lose_bootstrap(name, down_ns=_duration_ns(duration))
            case ["shard", "crash", *duration]:
                return lambda: world.injector.lose_shard(name, down_ns=_duration_ns(duration))
            case ["shard", shard, "slow", factor, *duration]:
                numbers = {"factor": float(factor), "duration_ns": _duration_ns(duration)}
                return lambda: world.injector.slow_shard(name, int(shard), **numbers)
            case ["pause", duration]:
                return lambda: world.injector.pause(name, duration_ns=parse_ns(duration))
            case ["hang", what, *duration]:
                return lambda: world.injector.hang(name, Hang(what), duration_ns=_duration_ns(duration))
            case ["slow", factor, *duration]:
                return lambda: world.injector.slow_down(name, factor=float(factor), duration_ns=_duration_ns(duration))
            case ["swap"]:
                return lambda: world.injector.swap_for_snapshot(name)
            case _:
                raise ValueError("unknown action")

    def _request(self, replica: Replica, size: str, options: dict[str, str]) -> Callable[[], None]:
        prompt_len, max_new_tokens = map(int, size.split("+"))
        room = Room(int(options["room"])) if "room" in options else None
        peer = Address(options["from"], BOOTSTRAP_PORT) if "from" in options else None
        prompt = options.get("prompt", options.get("room", str(len(self.asks) + 1)))
        self.asks.append(prompt.rpartition("/")[2])
        script = self.stories.script(
            prompt, prompt_len=prompt_len, max_new_tokens=max_new_tokens, eos_one_in=int(options.get("eos", "0"))
        )
        script.logprobs_from = int(options["logprobs"]) if "logprobs" in options else None
        timeout_ns, priority = parse_ns(options.get("timeout", "600s")), int(options.get("priority", "0"))
        ask = WorkloadRequest(len(self.asks), 0, script, timeout_ns, priority, None, None, repeats_room=False)
        ask.tenant = options.get("tenant", "")
        ask.wants_vector = "vector" in options
        ask.prefill_rank = int(options["rank"]) if "rank" in options else None
        rendered_at = int(options["rendered"]) if "rendered" in options else None
        ask.shown = ShownTime() if rendered_at is not None else None
        self.world.edge.num_to_come += 1
        return lambda: self._submit(RoutedRequest(ask, room, rendered_at), replica, peer)

    def _submit(self, exchange: RoutedRequest, replica: Replica, peer: Address | None) -> None:
        """Straight to its rank; refused where nobody listens."""
        edge = self.world.edge
        edge.num_to_come -= 1
        if replica.life is not None:
            server, number = self.world.servers[server_of(replica.name)], rank_number(replica.name)
            edge.submit(exchange, server, exchange.room, peer, listener=self.world.direct, routed=number)

    def _with_half(self, replica: Replica, which: list[str], act: Callable[[Life, Half], None]) -> Callable[[], None]:
        """By its id, which has to be there, or by its story, wherever that is."""

        def by_story() -> None:
            halves = replica.life.halves.values() if replica.life is not None else ()
            for half in [half for half in halves if self.asks[half.ask.index - 1] == which[1]]:
                act(_life(replica), half)

        match which:
            case ["prompt", _]:
                return by_story
            case [request]:
                return lambda: act(_life(replica), _life(replica).halves[RequestId(int(request))])
            case _:
                raise ValueError("of which request?")

    def _look(self, life: Life) -> None:
        self.lines.append(f"{self.world.clock.time / SECOND:.6f} {life.replica.name}.{life.incarnation.id} holds")
        self.lines.extend(holdings(life.node.state))

    def _abort(self, life: Life, request: RequestId) -> None:
        self.world.push(life, AbortRequested(request))

    def _stop(self, life: Life, half: Half) -> None:
        half.stop_sent = True
        self.world.push(life, StopMatched(half.request))

    def run(self) -> str:
        """The trace. Raises `Violation` if the story breaks an invariant."""
        introduce(self.world.replicas.values())
        self.world.run(self.until_ns)
        return "\n".join([*self.lines, ""])


def play(text: str) -> str:
    """A whole scenario file, with the trace that its script gives now."""
    script = text.partition(DIVIDER)[0].rstrip()
    scenario = Scenario()
    scenario.read(script)
    return f"{script}\n{DIVIDER}\n{scenario.run()}"


def _duration_ns(words: list[str]) -> int:
    return parse_ns(words[0]) if words else FOR_GOOD_NS


def _life(replica: Replica) -> Life:
    if replica.life is None:
        raise ValueError(f"{replica.name} is down")
    return replica.life
