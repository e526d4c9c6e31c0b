"""What clients ask for in one seed: prompts that share beginnings, lengths, deadlines, stop strings, departures."""

from dataclasses import dataclass, field
from random import Random

from tandem.core.settings import Role
from tandem.core.values import MILLISECOND, SECOND
from tandem.simulator.model import FIRST_TOKEN, VOCABULARY
from tandem.simulator.oracle import Script
from tandem.simulator.renderings import ShownTime, draw_shown_time

TENANTS = ("", "another")  # their prompts begin alike


@dataclass(slots=True)
class WorkloadSettings:
    num_requests: int = 40
    duration_ns: int = 60 * SECOND  # arrivals are spread over it
    burst: float = 0.2  # share of requests that come together with the one before
    num_prefixes: int = 4
    prompt_len_max: int = 96
    output_len_max: int = 32
    timeout_ns_range: tuple[int, int] = (20 * SECOND, 120 * SECOND)
    tight_deadlines: float = 0.0  # share with a deadline of 0.05 to 2 s
    aborts: float = 0.0  # share whose client leaves at a random moment
    stops: float = 0.05  # share that end by a stop string
    hostile_rooms: float = 0.0  # share that repeat the room of an earlier request
    lost_halves: float = 0.0  # share of those from other gateways of which one half is never sent


@dataclass(slots=True)
class WorkloadRequest:
    """One client request, before it is routed."""

    index: int
    arrives_at: int
    script: Script
    timeout_ns: int
    priority: int
    leaves_after_ns: int | None  # the client goes away
    stops_after: int | None  # tokens after which the edge sees a stop string
    repeats_room: bool
    must_finish: bool = False  # nothing is wrong any more: it has to get its tokens
    tenant: str = ""  # prefixes are shared only with requests of the same
    is_direct: bool = True  # comes through another gateway than ours
    loses_half: bool = False  # that gateway sends one of the two halves only
    routed_rank: int | None = None  # `routed_dp_rank`: for the server that gets it
    prefill_rank: int | None = None  # `disagg_prefill_dp_rank`: where decode is to look for it
    named_as: int | None = None  # its `rid` is that of this earlier request
    wants_vector: bool = False  # it ends with its prompt, where it is asked of a unified server
    shown: ShownTime | None = None  # its prompt shows the time, so `script` is what it would be without

    @property
    def rid(self) -> str:
        return f"rid-{self.index if self.named_as is None else self.named_as}"

    def script_at(self, rendered_at: int, role: Role) -> Script:
        """What it asks of a server of this role that renders it at this time."""
        return self.script if self.shown is None else self.shown.script(self.script, rendered_at, role)


@dataclass(slots=True)
class Workload:
    random: Random
    settings: WorkloadSettings
    prefixes: list[tuple[int, ...]] = field(default_factory=list)

    def draw(self) -> list[WorkloadRequest]:
        """All requests of the seed, in order of arrival."""
        settings, random = self.settings, self.random
        for _ in range(settings.num_prefixes):
            self.prefixes.append(self._tokens(random.randrange(1, max(2, settings.prompt_len_max * 3 // 4))))
        asks: list[WorkloadRequest] = []
        time = 0
        for index in range(settings.num_requests):
            if random.random() >= settings.burst:
                time += int(random.expovariate(1.0) * settings.duration_ns / settings.num_requests)
            prompt = self._prompt(asks)
            asks.append(self._ask(index, time, prompt))
        return asks

    def _prompt(self, asks: list[WorkloadRequest]) -> tuple[int, ...]:
        """A new prompt, one with a common beginning, or the next turn of an earlier conversation."""
        settings, random = self.settings, self.random
        draw = random.random()
        start: tuple[int, ...] = ()
        if draw < 0.5:
            start = random.choice(self.prefixes)
        elif draw < 0.7 and asks:
            script = random.choice(asks).script
            stop = len(script.prompt) + random.randrange(script.output_length() + 1)
            start = tuple(script.tokens[:stop][: settings.prompt_len_max - 1])
        return start + self._tokens(random.randrange(1, max(2, settings.prompt_len_max - len(start) + 1)))

    def _ask(self, index: int, time: int, prompt: tuple[int, ...]) -> WorkloadRequest:
        settings, random = self.settings, self.random
        max_new_tokens = random.randrange(1, settings.output_len_max + 1)
        eos_one_in = random.choice((0, 8, 30))
        timeout_ns = random.randrange(*settings.timeout_ns_range)
        if random.random() < settings.tight_deadlines:
            timeout_ns = random.randrange(50 * MILLISECOND, 2 * SECOND)
        leaves = int(random.lognormvariate(-1.5, 2.0) * SECOND) if random.random() < settings.aborts else None
        stops_after = random.randrange(1, max_new_tokens + 1) if random.random() < settings.stops else None
        return WorkloadRequest(
            index,
            time,
            Script(prompt, max_new_tokens, eos_one_in),
            timeout_ns,
            random.randrange(3) if random.random() < 0.2 else 0,
            leaves,
            stops_after,
            repeats_room=random.random() < settings.hostile_rooms,
            tenant=TENANTS[index % len(TENANTS)],
        )

    def _tokens(self, count: int) -> tuple[int, ...]:
        draw = self.random.random
        return tuple(FIRST_TOKEN + int(draw() * VOCABULARY) for _ in range(count))


def plain_ask(random: Random, index: int, time: int, prompt_len_max: int) -> WorkloadRequest:
    """A small request that a healthy pair has to answer."""
    prompt = tuple(FIRST_TOKEN + random.randrange(VOCABULARY) for _ in range(random.randrange(1, prompt_len_max + 1)))
    return WorkloadRequest(
        index, time, Script(prompt, 3, 0), 300 * SECOND, 0, None, None, repeats_room=False, must_finish=True
    )


def route_asks(
    asks: list[WorkloadRequest], random: Random, *, direct_share: float, dp_size: int, lost: float, hostility: float
) -> None:
    """How they come in, and which of the `dp_size` ranks of a prefill they name: mostly none, some not rightly."""
    for ask in asks:
        ask.is_direct = ask.repeats_room or random.random() < direct_share
        ask.loses_half = ask.is_direct and random.random() < lost
        draw, rank = random.random(), random.randrange(dp_size)
        if dp_size > 1 and draw < 0.25:
            ask.routed_rank = rank
        if dp_size > 1 and draw < 0.15:
            ask.prefill_rank = rank
        elif draw < 0.2 and (dp_size > 1 or hostility):
            ask.prefill_rank = random.randrange(dp_size + 1)
        if hostility and random.random() < 0.02:
            ask.routed_rank = random.choice((-1, dp_size))


def show_times(asks: list[WorkloadRequest], random: Random, *, share: float, hostility: float) -> None:
    """Which prompts show the time. A repeated room is there for its other prompt, so it shows none."""
    for ask in asks:
        if random.random() < share and not ask.repeats_room:
            ask.shown = draw_shown_time(random, hostility=hostility)


def want_logprobs(asks: list[WorkloadRequest], random: Random) -> None:
    """In one seed of six some clients want to know of their prompts, mostly from the beginning."""
    share = 0.3 if random.random() < 1 / 6 else 0.0
    for ask in asks:
        if random.random() < share:
            ask.script.logprobs_from = random.choice((0, 0, random.randrange(len(ask.script.prompt))))


def want_vectors(asks: list[WorkloadRequest], random: Random, *, is_encoder: bool) -> None:
    """In one seed of six some clients want vectors, and of an encoder all do."""
    share = 0.5 if random.random() < 1 / 6 else 0.0
    for ask in asks:
        ask.wants_vector = random.random() < share or is_encoder


def repeat_names(asks: list[WorkloadRequest], random: Random, *, share: float) -> None:
    """Clients that think of the same name as another one shortly before."""
    for ask in asks:
        if ask.index and random.random() < share:
            ask.named_as = random.randrange(max(0, ask.index - 3), ask.index)


def enlarge(asks: list[WorkloadRequest], random: Random, *, share: float, num_tokens: int) -> None:
    """Prompts that do not fit `num_tokens`, the KV of the largest server, and answers that outgrow it."""
    for ask in asks:
        if random.random() >= share or ask.repeats_room:
            continue
        prompt, size = ask.script.prompt, num_tokens + random.randrange(1, 1 + num_tokens)
        if random.random() < 0.5:
            ask.script = Script((prompt * size)[:size], ask.script.max_new_tokens, ask.script.eos_one_in)
        else:
            ask.script = Script(prompt, size, 0)
