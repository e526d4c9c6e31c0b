"""Random lives of two nodes: a script is a list of (action, number), so Hypothesis can shorten it.

Everything a script does is something that peers, users, devices or time may do. After it, `heal` stops all faults and
lets time pass; then every request must have ended.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
from hypothesis import strategies as st

from core_driver import Replica, World, expected_tokens
from tandem.core.commands import FinishRequest
from tandem.core.disagg.messages import Abort, Offer, Ready, Release
from tandem.core.events import (
    BatchFailed,
    BatchReturned,
    FlushRequested,
    PageRead,
    PagesDigested,
    PagesLanded,
    PeerLearned,
    PeerLost,
    PeerSaid,
    PromptRendered,
    ReadsDrained,
    RequestArrived,
    StopMatched,
    TransferDrained,
    TransferFailed,
)
from tandem.core.scheduler.request_state import State
from tandem.core.values import MILLISECOND, SECOND, Cause, Incarnation, Room, ShardId

TIMEOUT_NS = 40 * SECOND
STRANGER = Incarnation("stranger", "1")
LENGTHS = (1, 15, 16, 17, 40, 64, 100, 130)
KINDS = (
    BatchReturned, RequestArrived, PromptRendered, PagesLanded, PagesDigested, ReadsDrained, TransferDrained, PageRead,
    PeerLearned, Ready, Offer, Release, Abort,
)  # fmt: skip
LOSABLE = (Ready, Offer, Release, Abort, PageRead)


@dataclass
class Asked:
    replica: Replica
    request: int
    prompt_len: int
    max_new_tokens: int
    seed: int
    eos_after: int | None
    is_prefill_half: bool
    rendered_at: int = 0  # of decode, if any


@dataclass
class Life:
    """One script being run."""

    settings: dict
    world: World = field(default_factory=World)
    asked: list[Asked] = field(default_factory=list)
    rooms: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prefill = self.world.prefill(stall_timeout_ns=TIMEOUT_NS, **self.settings)
        self.decode = self.world.decode(stall_timeout_ns=TIMEOUT_NS, **self.settings)

    @property
    def both(self) -> list[Replica]:
        return [self.prefill, self.decode]

    def ask(self, replica: Replica, number: int, *, answered_at: int = 0, **where: object) -> None:
        shape = {
            "prompt_len": LENGTHS[number % 8],
            "max_new_tokens": 1 + number // 8 % 24,
            "seed": number // 64 % 3,
            "eos_after": 1 + number // 8 % 5 if number % 7 == 0 else None,
        }
        request = self.world.submit(replica, timeout_ns=TIMEOUT_NS, **shape, **where)
        is_prefill_half = "room" in where and "peer" not in where
        self.asked.append(Asked(replica, request, is_prefill_half=is_prefill_half, rendered_at=answered_at, **shape))

    # --- actions -------------------------------------------------------------------------------------------------

    def pair(self, number: int) -> None:
        room = self.world.room()
        self.rooms.append(room)
        self.ask(self.prefill, number, room=room)
        self.ask(self.decode, number, room=room, peer=self.prefill.address)

    def pair_of_two_times(self, number: int) -> None:
        """Now and then the halves agree on the time by chance."""
        room = self.world.room()
        self.rooms.append(room)
        here, there = 1 + number % 5, 1 + number // 5 % 5
        self.ask(self.prefill, number, room=room, rendered_at=here, answered_at=there)
        self.ask(self.decode, number, room=room, peer=self.prefill.address, rendered_at=there, answered_at=there)

    def prefill_half(self, number: int) -> None:
        self.rooms.append(self.world.room())
        self.ask(self.prefill, number, room=self.rooms[-1])

    def decode_half(self, number: int) -> None:
        room = self.rooms[number % len(self.rooms)] if self.rooms else self.world.room()
        self.ask(self.decode, number, room=room, peer=self.prefill.address)

    def local(self, number: int) -> None:
        self.ask(self.both[number % 2], number)

    def turn(self, number: int) -> None:
        for _ in range(1 + number // 2 % 4):
            self.world.turn(self.both[number % 2])

    def turn_both(self, number: int) -> None:
        for _ in range(1 + number % 12):
            for replica in self.both:
                self.world.turn(replica)

    def wait(self, number: int) -> None:
        self.world.now += (number % 1000) * (MILLISECOND if number % 3 else 3 * MILLISECOND)

    def hold(self, number: int) -> None:
        self.both[number % 2].holds.add(KINDS[number // 2 % len(KINDS)])

    def release(self, number: int) -> None:
        self.both[number % 2].release()

    def lose(self, number: int) -> None:
        self.both[number % 2].drops.add(LOSABLE[number // 2 % len(LOSABLE)])

    def find(self, number: int) -> None:
        self.both[number % 2].drops.clear()

    def double(self, number: int) -> None:
        # not RequestArrived and PromptRendered: they come once, over a pipe from the node's own edge
        self.both[number % 2].twice.add(KINDS[3 + number // 2 % (len(KINDS) - 3)])

    def abort(self, number: int) -> None:
        if self.asked:
            asked = self.asked[number % len(self.asked)]
            self.world.abort(asked.replica, asked.request)

    def stop_string(self, number: int) -> None:
        if self.asked:
            asked = self.asked[number % len(self.asked)]
            self.world.send(asked.replica, StopMatched(asked.request))

    def break_connection(self, number: int) -> None:
        here, there = self.both[number % 2], self.both[1 - number % 2]
        self.world.send(here, PeerLost(there.name))

    def break_transfer(self, number: int) -> None:
        arriving = list(self.decode.state.queues[State.ARRIVING])
        if arriving:
            request = arriving[number % len(arriving)]
            self.world.send(self.decode, TransferFailed(request, 1, ShardId(0), Cause.TRANSFER_FAILED, "injected"))

    def break_batch(self, number: int) -> None:
        replica = self.both[number % 2]
        plan = replica.break_off()
        if plan is not None:
            self.world.step(replica, [BatchFailed(plan.id, Cause.WORKER_LOST, "injected")])

    def flush(self, number: int) -> None:
        self.world.send(self.both[number % 2], FlushRequested())

    def restart_prefill(self, number: int) -> None:
        if number % 4:
            return
        life = int(self.prefill.name.id) + 1
        self.world.kill(self.prefill)
        self.prefill = self.world.prefill(life=life, stall_timeout_ns=TIMEOUT_NS, **self.settings)

    def stray(self, number: int) -> None:
        here = self.both[number % 2]
        room = Room(self.rooms[number // 8 % len(self.rooms)] if self.rooms and number % 3 else 77)
        message = (
            Ready(room, number % 3, STRANGER, here.name, "", LENGTHS[number % 8], held_pages=number % 5 - 1),
            Offer(room, 1, self.prefill.name, number % 3 - 1, (1, 2), (0, 0), (b"0" * 16,), (b"secret",), SECOND, 7),
            Release(room, STRANGER, ("done", "aborted", "not_needed")[number % 3]),
            Abort(room, self.prefill.name, Cause.ABORTED),
        )[number // 2 % 4]
        self.world.send(here, PeerSaid(STRANGER, message))

    # --- the end -------------------------------------------------------------------------------------------------

    def run(self, script: list[tuple[str, int]]) -> None:
        for action, number in script:
            ACTIONS[action](self, number)

    def heal(self) -> None:
        for replica in self.both:
            replica.drops.clear()
            replica.twice.clear()
            replica.release()
        self.world.advance(3 * TIMEOUT_NS)

    def assert_tokens(self) -> None:
        for asked in self.asked:
            replica, request = asked.replica, asked.request
            tokens = replica.tokens.get(request, [])
            shape = {"seed": asked.seed, "rendered_at": asked.rendered_at, "eos_after": asked.eos_after}
            expected = expected_tokens(asked.prompt_len, asked.max_new_tokens, **shape)
            assert tokens == expected[: len(tokens)]
            end = replica.ended.get(request)
            if not isinstance(end, FinishRequest) or asked.is_prefill_half:
                continue
            if end.reason == "length":
                assert len(tokens) == asked.max_new_tokens
            self.assert_ledger(asked, end)

    def assert_ledger(self, asked: Asked, end: FinishRequest) -> None:
        """Stages partition [arrival, first token] exactly."""
        replica, request = asked.replica, asked.request
        until_first_token = replica.started_at[request] - replica.arrived_at[request]
        assert sum(duration for _, duration in end.ledger.stages) == until_first_token
        assert all(duration > 0 for _, duration in end.ledger.stages)
        assert end.ledger == replica.started[request].ledger


ACTIONS: dict[str, Callable[[Life, int], None]] = {
    name: getattr(Life, name)
    for name in (
        "pair", "pair_of_two_times", "prefill_half", "decode_half", "local", "turn", "turn_both", "wait", "hold",
        "release", "lose", "find", "double", "abort", "stop_string", "break_connection", "break_transfer",
        "break_batch", "flush", "restart_prefill", "stray",
    )
}  # fmt: skip
CALM = ("pair", "local", "turn", "turn_both", "wait")
USUAL = ["pair", "pair", "pair_of_two_times", "local", "turn", "turn_both", "turn_both", "wait"]


def scripts(actions: list[str], max_size: int = 60) -> st.SearchStrategy[list[tuple[str, int]]]:
    return st.lists(st.tuples(st.sampled_from(actions), st.integers(0, 4095)), min_size=5, max_size=max_size)


lives = st.fixed_dictionaries(
    {
        "num_pages": st.sampled_from([10, 14, 24, 64]),
        "block_tokens": st.sampled_from([1, 1, 2, 4, 16]),
        "max_running": st.sampled_from([1, 2, 4, 32]),
        "chunk_tokens": st.sampled_from([16, 48, 64]),
        "window_depth": st.sampled_from([1, 2, 3]),
        "num_micro_batches": st.sampled_from([1, 2, 3]),
        "min_micro_batch": st.sampled_from([1, 2]),
        "mixed_chunk": st.booleans(),
        "prefill_stall": st.sampled_from([None, {"max_ns": SECOND // 100, "min_tokens": 1}]),
        "prefix_cache": st.booleans(),
        "conservativeness": st.sampled_from([0.0, 0.3]),
        "result_slots": st.sampled_from([1, 2, 64]),
        "optimistic": st.sampled_from(["off", "retry", "park"]),
        "force_retry_prob": st.sampled_from([0.0, 0.5]),
        "load_failure": st.sampled_from(["recompute", "fail"]),
        "lease_ns": st.sampled_from([5 * SECOND, 30 * SECOND]),
    }
)


def encoded(effects: list) -> list[bytes]:
    return [msgspec.msgpack.encode(one) for one in effects]
