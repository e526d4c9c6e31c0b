"""What may come in any order comes in every order: both halves of a pair, a copy of READY, an abort of either half.

However it comes, each half has one end, tokens are right, nothing is kept, and the room is free for the next pair.
"""

from itertools import permutations
from typing import Any

import pytest

from core_driver import ROOT, Replica, World, assert_nothing_is_held, expected_tokens, prompt_tokens
from tandem.core.commands import AskDpRank, FailRequest, FinishRequest
from tandem.core.disagg.messages import Ready
from tandem.core.events import DpRankAnswered, PeerLearned, PeerSaid
from tandem.core.settings import DpConflictPolicy, LoadBalanceMethod, PrefillInfo
from tandem.core.values import MILLISECOND, SECOND, Address, Cause, RequestId, Room
from tandem.pagehash import prompt_digest

ROOM = 7
PROMPT_LEN = 40
ASKED: dict[str, Any] = {"prompt_len": PROMPT_LEN, "max_new_tokens": 3, "timeout_ns": 5 * SECOND}
TOKENS = expected_tokens(PROMPT_LEN, 3, seed=1)
ARRIVALS = ("prefill half", "decode half", "copy of ready", "abort on prefill", "abort on decode")


class Pair:
    """One room on a prefill and a decode, of which one thing after the other happens."""

    def __init__(self, optimistic: str) -> None:
        self.world = World()
        self.prefill = self.world.prefill(optimistic=optimistic)
        self.decode = self.world.decode()
        self.left: RequestId | None = None
        self.right: RequestId | None = None
        self.had_an_abort = False

    def happen(self, what: str) -> None:
        world = self.world
        match what:
            case "prefill half":
                self.left = world.submit(self.prefill, room=ROOM, **ASKED)
            case "decode half":
                self.right = world.submit(self.decode, room=ROOM, peer=self.prefill.address, **ASKED)
            case "copy of ready":
                world.send(self.prefill, PeerSaid(self.decode.name, self.ready()))
            case "abort on prefill":
                self.abort(self.prefill, self.left)
            case "abort on decode":
                self.abort(self.decode, self.right)

    def abort(self, replica: Replica, request: RequestId | None) -> None:
        """Of a request that is not there yet: nobody could name it."""
        if request is not None:
            self.had_an_abort = True
            self.world.abort(replica, request)

    def ready(self) -> Ready:
        digest = prompt_digest(prompt_tokens(PROMPT_LEN, 1), secret=ROOT)
        here, there = self.decode.name, self.prefill.name
        return Ready(Room(ROOM), 1, here, there, "", PROMPT_LEN, prompt_digest=digest)

    def assert_ends(self) -> None:
        """Well, if nobody left; a half of which nobody knew when the other was aborted finds out at its deadline."""
        for replica, request in ((self.prefill, self.left), (self.decode, self.right)):
            assert request is not None
            end = replica.ended[request]
            if isinstance(end, FailRequest):
                assert self.had_an_abort
                assert end.cause in (Cause.ABORTED, Cause.PEER_ABORTED, Cause.DEADLINE_EXCEEDED)
            elif replica is self.decode:
                assert replica.tokens[request] == TOKENS

    def assert_the_room_is_free(self) -> None:
        left = self.world.submit(self.prefill, room=ROOM, **ASKED)
        right = self.world.submit(self.decode, room=ROOM, peer=self.prefill.address, **ASKED)
        self.world.advance(10 * SECOND)
        assert isinstance(self.prefill.ended[left], FinishRequest)
        assert isinstance(self.decode.ended[right], FinishRequest)
        assert self.decode.tokens[right] == TOKENS


@pytest.mark.parametrize("pause_ns", [0, 50 * MILLISECOND], ids=["at once", "with pauses"])
@pytest.mark.parametrize("optimistic", ["off", "retry", "park"])
def test_every_order_ends_and_leaves_the_room_free(optimistic: str, pause_ns: int) -> None:
    for order in permutations(ARRIVALS):
        pair = Pair(optimistic)
        for what in order:
            pair.happen(what)
            if pause_ns:
                pair.world.advance(pause_ns)
            else:
                pair.world.turn_all()
        pair.world.advance(70 * SECOND)
        pair.assert_ends()
        assert_nothing_is_held([pair.prefill, pair.decode])
        pair.assert_the_room_is_free()


@pytest.mark.parametrize("page_size", [3, 4])
def test_a_push_back_every_few_tokens_changes_no_token(page_size: int) -> None:
    world = World()
    prefill = world.prefill(page_size=page_size)
    decode = world.decode(page_size=page_size, num_pages=48 // page_size, conservativeness=0.0)
    pairs = [world.pair(prefill, decode, prompt_len=9, max_new_tokens=30, seed=seed) for seed in range(6)]
    world.run()
    for seed, (_left, right) in enumerate(pairs):
        assert decode.tokens[right] == expected_tokens(9, 30, seed=seed)
    assert decode.state.counters.retractions >= 10
    assert_nothing_is_held([prefill, decode])


def test_a_room_whose_rank_nobody_knows_is_asked_for_at_a_bounded_rate() -> None:
    world = World()
    server = Address("server", 8998)
    info = PrefillInfo(2, LoadBalanceMethod.ROUND_ROBIN, DpConflictPolicy.RESOLVE)
    decode = world.decode(ask_rank_ns=100 * MILLISECOND)
    request = world.submit(decode, room=ROOM, peer=server, timeout_ns=SECOND)
    world.run()
    world.send(decode, PeerLearned(server, world.prefill("rank-0").name, "", "", 0, info))
    for _ in range(100):  # answers and other news come all the time
        world.send(decode, DpRankAnswered(server, Room(ROOM), None))
        world.advance(9 * MILLISECOND)
    world.advance(SECOND)
    assert len(decode.said(AskDpRank)) == 5, "after 0, 0.1, 0.3 and 0.7 s, and to tell of the end"
    assert decode.cause(request) is Cause.DEADLINE_EXCEEDED
    assert_nothing_is_held(decode)
