"""One prefill, one decode, a few requests, and everything that can happen next.

A `WorldState` is a tuple of numbers: which replica each side is, and what is on the way between them. `moves` lists
what can happen, `after` says where it leads. Some moves are faults, and each costs one of a kind from a budget, which
bounds the world; everything else is free, and is what a world without faults does.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from msgspec import Struct

from tandem.core.disagg.messages import Message
from tandem.core.request import Request
from tandem.core.settings import (
    AllocationPolicy,
    LoadFailurePolicy,
    NodeSettings,
    OptimisticPolicy,
    PrefetchPolicy,
    PrioritySettings,
    Role,
    StorageSettings,
    TierSettings,
)
from tandem.core.values import SECOND, Address, Incarnation, Nanos, RequestId, Room
from tandem.pagehash import prompt_digest, prompt_hashes, root_hash
from tandem.simulator.model_check.data_plane import Reading
from tandem.simulator.model_check.replica import Move, Outcome, Stage, Witness
from tandem.simulator.model_check.replica_value import Cast, Numbered, SmallReplica
from tandem.simulator.oracle import Script
from tandem.transfer.jobs import Trouble

PREFILL, DECODE = 0, 1
PAGE_SIZE = 4
ADDRESS = Address("prefill", 8998)
SECRET = b"small world"
FIRST_ROOM = 11


class Fault(IntEnum):
    """An index into a fault budget."""

    ABORT = 0  # a client leaves, or one half of its request never comes
    LOSS = 1  # a message between the replicas is lost
    COPY = 2  # ... or is heard twice
    FAILURE = 3  # a batch, a pull or a look-up fails
    RESTART = 4  # a replica dies and comes back empty
    HASTE = 5  # a timer fires before something that is on its way arrives


class Item(Struct, frozen=True):
    """On its way from one life to another: a message, or behind the last of them the news that this life has ended."""

    source: Incarnation
    target: Incarnation | None = None
    message: Message | None = None


FaultBudget = tuple[int, ...]  # per `Fault`: how many are left
WorldState = tuple[int, int, int, int]  # prefill, decode; what is on the way to prefill, and to decode
Way = tuple[int, ...]  # numbers of items; first come, first heard
Choices = tuple[tuple[Move, Fault | None], ...]
NOTHING: Way = ()


class Small(Struct, frozen=True):
    """One small world. Prompts are lengths in tokens; those of one number share their tokens as far as both go."""

    name: str
    depth: int
    prompts: tuple[int, ...] = (5, 4)
    same_prompt: bool = False
    stories: tuple[int, ...] = ()  # of each prompt; those of one story begin alike. Empty: each has its own
    in_turn: bool = False  # nothing of a request comes before those before it have ended on that side
    times: tuple[int, int] = (0, 0)  # that the prompts show on prefill and on decode, as an additional token
    max_new_tokens: int = 2
    block_tokens: int = 1
    eos_one_in: int = 0
    timeout_ns: Nanos = Nanos(20 * SECOND)
    faults: tuple[tuple[Fault, int], ...] = ()
    prefill_pages: int = 4
    decode_pages: int = 6
    host_pages: int = 0  # on each side; 0: there is no host memory
    prefetch: PrefetchPolicy | None = None  # below it, storage of each side; None: there is none
    priorities: tuple[int, ...] = ()  # of each request; one more pushes back. Empty: they do not count
    max_running: int = 2
    result_slots: int = 2
    window_depth: int = 1
    num_micro_batches: int = 1
    prefix_cache: bool = False
    optimistic: OptimisticPolicy = OptimisticPolicy.OFF
    optimistic_retries: int = 1
    park_max_tokens: int = 1 << 20
    load_failure: LoadFailurePolicy = LoadFailurePolicy.RECOMPUTE
    allocation: AllocationPolicy = AllocationPolicy.EARLY
    learn_peer_tries: int = 2
    lease_ns: Nanos = Nanos(3 * SECOND)

    def settings(self, role: Role) -> NodeSettings:
        return NodeSettings(
            role=role,
            incarnation=Incarnation(str(role), "1"),
            num_pages=self.prefill_pages if role is Role.PREFILL else self.decode_pages,
            page_size=PAGE_SIZE,
            max_running=self.max_running,
            chunk_tokens=PAGE_SIZE,
            window_depth=self.window_depth,
            num_micro_batches=self.num_micro_batches,
            min_micro_batch=1,
            prefix_cache=self.prefix_cache,
            reserved_decode_tokens=0,
            result_slots=self.result_slots,
            optimistic=self.optimistic,
            optimistic_retries=self.optimistic_retries,
            park_max_tokens=self.park_max_tokens,
            load_failure=self.load_failure,
            lease_ns=self.lease_ns,
            learn_peer_tries=self.learn_peer_tries,
            host_tier=self._host_tier(),
            block_tokens=self.block_tokens,
            allocation=self.allocation,
            priorities=PrioritySettings(preemption_threshold=0) if self.priorities else None,
        )

    def _host_tier(self) -> TierSettings | None:
        if not self.host_pages:
            return None
        storage = StorageSettings(self.prefetch, min_pages=1) if self.prefetch is not None else None
        return TierSettings(self.host_pages, storage=storage)

    def budget(self) -> FaultBudget:
        given = dict(self.faults)
        return tuple(given.get(fault, 0) for fault in Fault)


@dataclass(slots=True)
class SmallWorld:
    small: Small
    witness: Witness | None = None
    stages: tuple[Stage, Stage] = field(init=False)
    items: Numbered[Item] = field(default_factory=Numbered[Item])
    ways: Numbered[Way] = field(default_factory=Numbered[Way])
    own_moves: tuple[dict[int, Choices], dict[int, Choices]] = field(default_factory=lambda: ({}, {}))

    def __post_init__(self) -> None:
        root = root_hash(secret=SECRET, tenant="")
        numbers = [RequestId(number) for number in range(1, len(self.small.prompts) + 1)]

        def prompts(role: Role, time: int) -> dict[RequestId, tuple[Request, Script]]:
            scripts = {number: self._script(number, time) for number in numbers}
            return {
                number: (self._request(number, script, root, role, time), script) for number, script in scripts.items()
            }

        def stage(role: Role, time: int) -> Stage:
            own = prompts(role, time)
            requests = {number: request for number, (request, _) in own.items()}
            scripts = {number: script for number, (_, script) in own.items()}
            rendered = prompts(role, self.small.times[DECODE])
            return Stage(Cast(self.small.settings(role), requests, scripts, root, rendered), self.witness)

        self.stages = (stage(Role.PREFILL, self.small.times[PREFILL]), stage(Role.DECODE, self.small.times[DECODE]))

    def _script(self, number: int, time: int) -> Script:
        story = self.small.stories[number - 1] if self.small.stories else number
        first = 100 if self.small.same_prompt else 100 * story
        prompt = list(range(first, first + self.small.prompts[number - 1]))
        if time:
            prompt.insert(len(prompt) // 2, 1000 + time)
        return Script(tuple(prompt), self.small.max_new_tokens, self.small.eos_one_in)

    def _request(self, number: RequestId, script: Script, root: bytes, role: Role, time: int) -> Request:
        return Request(
            id=number,
            rid=f"rid-{number}",
            prompt_len=len(script.prompt),
            page_hashes=tuple(prompt_hashes(root, script.prompt, page_size=PAGE_SIZE)),
            max_new_tokens=script.max_new_tokens,
            timeout_ns=self.small.timeout_ns,
            room=Room(FIRST_ROOM * number),
            peer=ADDRESS if role is Role.DECODE else None,
            prompt_digest=prompt_digest(script.prompt, secret=SECRET),
            rendered_at=time,
            priority=self.small.priorities[number - 1] if self.small.priorities else 0,
        )

    def beginning(self) -> WorldState:
        to_come = tuple(RequestId(number) for number in range(1, len(self.small.prompts) + 1))
        prefill, decode = (stage.begin(number=1, to_come=to_come) for stage in self.stages)
        nothing = self.ways.number(NOTHING)
        return prefill, decode, nothing, nothing

    def replica(self, world_state: WorldState, side: int) -> SmallReplica:
        return self.stages[side].replica(world_state[side])

    # -- what can happen

    def moves(self, world_state: WorldState) -> Iterator[tuple[Move, Fault | None]]:
        """What can happen next; with its kind if it is a fault. Time is not among them: see `time_to_wake`."""
        for side in (PREFILL, DECODE):
            index = world_state[side]
            known = self.own_moves[side].get(index)
            if known is None:
                known = self.own_moves[side][index] = tuple(self._own_moves(side, self.stages[side].replica(index)))
            yield from known
            if way := self.ways.values[world_state[2 + side]]:
                yield ("hear", side), None
                if self.items.values[way[0]].message is not None:
                    yield ("lose", side), Fault.LOSS
                    yield ("copy", side), Fault.COPY

    def _own_moves(self, side: int, replica: SmallReplica) -> Iterator[tuple[Move, Fault | None]]:
        """Of one replica, whatever its peer does."""
        for request in self._coming(replica):
            yield ("own", side, "arrives", request), None
            yield ("own", side, "never comes", request), Fault.ABORT
            if side == DECODE:
                yield ("decline", request), Fault.ABORT
        if replica.inbox:
            yield ("own", side, "is told"), None
        for request in replica.to_render:
            yield ("own", side, "rendered", request), None
        for address in replica.lookups:
            yield ("find", side, address), None
            yield ("own", side, "finds nobody", address), Fault.FAILURE
        if replica.to_digest:
            yield ("own", side, "digested"), None
        for number, reading in enumerate(replica.reader.readings):
            if reading.is_asked:
                yield ("land", number), None
                yield ("break", number), None if reading.is_cut else Fault.FAILURE
                yield ("corrupt", number), Fault.FAILURE
            else:
                yield ("read", number), None
        if replica.copies:
            yield ("own", side, "pages are copied"), None
            yield ("own", side, "copy fails"), Fault.FAILURE
        if replica.asked:
            yield ("own", side, "storage answers"), None
            yield ("own", side, "storage fails"), Fault.FAILURE
        if replica.work:
            yield ("own", side, "batch returns"), None
            yield ("own", side, "batch fails"), Fault.FAILURE
        for half in replica.halves:
            if not half.end:
                yield ("own", side, "aborts", half.request), Fault.ABORT
        if replica.halves:
            yield ("restart", side), Fault.RESTART

    def _coming(self, replica: SmallReplica) -> tuple[RequestId, ...]:
        if not self.small.in_turn:
            return replica.to_come
        return () if any(not half.end for half in replica.halves) else replica.to_come[:1]

    def time_to_wake(self, world_state: WorldState) -> Nanos | None:
        wakes = [self.stages[side].wake_in(world_state[side]) for side in (PREFILL, DECODE)]
        return min((wake for wake in wakes if wake is not None), default=None)

    # -- where it leads

    def after(self, world_state: WorldState, move: Move) -> WorldState:
        """Raises `Violation` if an invariant breaks."""
        match move:
            case ("own", side, *own_move):
                return self._let(world_state, side, tuple(own_move))
            case ("hear", side):
                return self._hear(self._without_first(world_state, side), side, self._first(world_state, side))
            case ("copy", side):
                return self._hear(world_state, side, self._first(world_state, side))
            case ("lose", side):
                return self._without_first(world_state, side)
            case ("find", side, address):
                there = self.replica(world_state, PREFILL).life
                return self._let(
                    world_state, side, ("finds", address, there, self.stages[PREFILL].cast.settings.layout)
                )
            case ("decline", request):
                return self._let(
                    world_state, DECODE, ("is not needed", request, self.replica(world_state, PREFILL).life)
                )
            case ("read", number):
                return self._read(world_state, number)
            case ("land", number):
                return self._land(world_state, number)
            case ("break", number):
                return self._fail(world_state, number, Trouble.BROKEN)
            case ("corrupt", number):
                return self._fail(world_state, number, Trouble.CORRUPT)
            case ("restart", side):
                return self._restart(world_state, side)
            case ("time", _):
                return self._pass_time(world_state)
            case _:
                raise AssertionError(move)

    def _let(self, world_state: WorldState, side: int, move: Move) -> WorldState:
        """One replica moves, and what it tells is on its way."""
        outcome = self.stages[side].apply(world_state[side], move)
        prefill, decode, to_prefill, to_decode = world_state
        if side == PREFILL:
            return outcome.replica, decode, to_prefill, self._longer(world_state, to_decode, PREFILL, outcome)
        return prefill, outcome.replica, self._longer(world_state, to_prefill, DECODE, outcome), to_decode

    def _longer(self, world_state: WorldState, way: int, side: int, outcome: Outcome) -> int:
        """A way with what `side` has told; nobody hears what is told to a life that has ended."""
        if not outcome.told:
            return way
        source, target = self.replica(world_state, side).life, self.replica(world_state, 1 - side).life
        told = (self.items.number(Item(source, peer, said)) for peer, said in outcome.told if peer == target)
        return self.ways.number((*self.ways.values[way], *told))

    def _first(self, world_state: WorldState, side: int) -> Item:
        return self.items.values[self.ways.values[world_state[2 + side]][0]]

    def _without_first(self, world_state: WorldState, side: int) -> WorldState:
        prefill, decode, to_prefill, to_decode = world_state
        if side == PREFILL:
            return prefill, decode, self.ways.number(self.ways.values[to_prefill][1:]), to_decode
        return prefill, decode, to_prefill, self.ways.number(self.ways.values[to_decode][1:])

    def _hear(self, world_state: WorldState, side: int, item: Item) -> WorldState:
        if item.message is None:
            return self._let(world_state, side, ("loses peer", item.source))
        return self._let(world_state, side, ("hears", item.source, item.message))

    def _reading(self, world_state: WorldState, number: int) -> Reading:
        return self.replica(world_state, DECODE).reader.readings[number]

    def _is_there(self, world_state: WorldState, number: int) -> bool:
        """Whether the life that decode reads from has not ended."""
        return self._reading(world_state, number).peer == self.replica(world_state, PREFILL).life

    def _read(self, world_state: WorldState, number: int) -> WorldState:
        if not self._is_there(world_state, number):
            return self._let(world_state, DECODE, ("read fails", number, Trouble.BROKEN))
        world_state = self._let(world_state, DECODE, ("connects", number))
        reading = self._reading(world_state, number)
        asked = ("read begins", reading.link, reading.room, reading.secret, reading.sources, reading.generations)
        refusal = self.stages[PREFILL].apply(world_state[PREFILL], asked).answer
        if refusal is not None:
            return self._let(world_state, DECODE, ("read fails", number, Trouble.REFUSED, refusal))
        return self._let(self._let(world_state, PREFILL, asked), DECODE, ("asks", number))

    def _land(self, world_state: WorldState, number: int) -> WorldState:
        if not self._is_there(world_state, number):
            return self._let(world_state, DECODE, ("read fails", number, Trouble.BROKEN))
        reading = self._reading(world_state, number)
        is_last = len(reading.sources) == 1 or reading.is_cut
        sending = ("page is sent", reading.link, reading.sources[0], reading.generations[0], is_last)
        contents, is_last = self.stages[PREFILL].apply(world_state[PREFILL], sending).answer
        world_state = self._let(world_state, PREFILL, sending)
        return self._let(world_state, DECODE, ("page lands", number, contents, is_last))

    def _fail(self, world_state: WorldState, number: int, trouble: Trouble) -> WorldState:
        if self._is_there(world_state, number):
            breaking = ("link breaks", self._reading(world_state, number).link)
            world_state = self._let(world_state, PREFILL, breaking)
        return self._let(world_state, DECODE, ("read fails", number, trouble))

    def _restart(self, world_state: WorldState, side: int) -> WorldState:
        """What this life has said may still be heard, then that it has ended; what was said to it is lost."""
        old = self.replica(world_state, side)
        new = self.stages[side].begin(number=int(old.life.id) + 1, to_come=old.to_come, stored=old.stored)
        fatal_message = (*self.ways.values[world_state[3 - side]], self.items.number(Item(old.life)))
        to_other, nothing = self.ways.number(fatal_message), self.ways.number(NOTHING)
        if side == PREFILL:
            return new, world_state[1], nothing, to_other
        return self._let((world_state[0], new, to_other, nothing), PREFILL, ("readers die",))

    def _pass_time(self, world_state: WorldState) -> WorldState:
        """To the next moment at which a node wants to be woken; those whose moment it is are woken."""
        after_ns = self.time_to_wake(world_state)
        assert after_ns is not None
        for side in (PREFILL, DECODE):
            is_due = self.stages[side].wake_in(world_state[side]) == after_ns
            world_state = self._let(world_state, side, ("wakes" if is_due else "waits", after_ns))
        return world_state

    def check_idle(self, world_state: WorldState) -> None:
        for side in (PREFILL, DECODE):
            self.stages[side].check_idle(world_state[side])


def is_calm(spent: FaultBudget) -> bool:
    """Only messages were lost or copied: every request can still get its tokens."""
    return not any(spent[fault] for fault in (Fault.ABORT, Fault.FAILURE, Fault.RESTART, Fault.HASTE))


def spend(budget: FaultBudget, fault: Fault) -> FaultBudget | None:
    if not budget[fault]:
        return None
    return (*budget[:fault], budget[fault] - 1, *budget[fault + 1 :])


ENDS_OF_READS = {
    "read": "asks for pages",
    "land": "gets a page",
    "break": "loses its connection",
    "corrupt": "gets a page that differs from its digest",
}


def describe(move: Move) -> str:
    """One line of a counterexample."""
    sides = ("prefill", "decode")
    match move:
        case ("own", side, "is told"):
            return f"{sides[side]} hears from its data plane"
        case ("own", side, "digested"):
            return f"{sides[side]}: pages are digested"
        case ("own", side, what, *rest):
            return f"{sides[side]}: " + (f"request {rest[0]} {what}" if rest and isinstance(rest[0], int) else what)
        case ("hear", side):
            return f"{sides[side]} hears the next message"
        case ("copy", side):
            return f"{sides[side]} hears the next message, which will come again"
        case ("lose", side):
            return f"the next message to {sides[side]} is lost"
        case ("find", side, address):
            return f"{sides[side]} finds {address.host}"
        case ("decline", request):
            return f"decode serves request {request} alone, and says so"
        case ("read" | "land" | "break" | "corrupt", number):
            return f"decode {ENDS_OF_READS[move[0]]} in its read {number}"
        case ("restart", side):
            return f"{sides[side]} dies and comes back"
        case _:
            return "time passes until the next timer"
