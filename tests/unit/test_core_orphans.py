"""The orphan: one shard of several fails, or an abort comes, in any order: every shard drains and nobody is left.

Replicas of four shards each. What a shard has still to say is kept back and then said in every order.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core_driver import Replica, World, assert_nothing_is_held, expected_tokens
from tandem.core.commands import CancelPull, FinishRequest, RevokePages
from tandem.core.disagg.messages import Abort
from tandem.core.events import (
    AbortRequested,
    Event,
    PagesDigested,
    PagesLanded,
    PeerSaid,
    ReadsDrained,
    TransferDrained,
    TransferFailed,
)
from tandem.core.kv.pool import PageState
from tandem.core.scheduler.numbers import numbers
from tandem.core.scheduler.request_state import State
from tandem.core.values import Cause, Cut, ShardId
from tandem.metrics.node_numbers import named

CUT = Cut(tp_size=2, pp_size=2)
SHARDS = CUT.shards
PROMPT_LEN = 100
NUM_PAGES = 7
TOKENS = expected_tokens(PROMPT_LEN, 4, seed=1)
GAUGES = (
    "num_running_reqs",
    "num_queue_reqs",
    "num_retracted_reqs",
    "num_prefill_bootstrap_queue_reqs",
    "num_prefill_inflight_queue_reqs",
    "num_decode_prealloc_queue_reqs",
    "num_decode_transfer_queue_reqs",
    "num_used_tokens",
)


class Transfer:
    """A transfer of four shards under way: every shard has pulled everything, and the node has not heard of it."""

    def __init__(self, **settings: object) -> None:
        self.world = World()
        self.prefill = self.world.prefill(cut=CUT, **settings)
        self.decode = self.world.decode(cut=CUT, **settings)
        self.decode.holds |= {PagesLanded, TransferDrained}
        self.prefill.holds |= {ReadsDrained}
        self.left, self.right = self.world.pair(self.prefill, self.decode, prompt_len=PROMPT_LEN)
        self.world.run()
        assert self.decode.state_of(self.right) is State.ARRIVING
        self.landed = {event.shard: event for event in take(self.decode, PagesLanded)}
        assert set(self.landed) == set(SHARDS)
        self.attempt = self.decode.progress(self.right).side.attempt

    def tell(self, replica: Replica, event: Event) -> None:
        self.world.step(replica, [event])
        self.world.run()

    def fail(self, shard: ShardId, cause: Cause = Cause.CORRUPT_PAGES) -> None:
        self.tell(self.decode, TransferFailed(self.right, self.attempt, shard, cause, "digest differs"))

    def num_held(self, replica: Replica) -> int:
        """Pages that nobody else may use."""
        counts = replica.state.pool.counts
        return counts[PageState.OWNED] + counts[PageState.QUARANTINED]

    def assert_all_is_over(self) -> None:
        both = [self.prefill, self.decode]
        assert {request in replica.ended for replica, request in zip(both, (self.left, self.right), strict=True)} == {
            True
        }
        assert_nothing_is_held(both)
        for replica in both:
            gauges = named(numbers(replica.node))
            assert {name: gauges[name] for name in GAUGES if name != "num_used_tokens"} == dict.fromkeys(GAUGES[:-1], 0)
            assert gauges["num_used_tokens"] == 0, "cached pages are not used pages"


def take(replica: Replica, kind: type) -> list:
    """What is kept back of this kind, out of the driver's hands."""
    found = [event for parcel in replica.held if parcel.kind is kind for event in parcel.make()]
    replica.held = [parcel for parcel in replica.held if parcel.kind is not kind]
    return found


# --- one shard fails -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guilty", SHARDS)
def test_a_failure_on_any_shard_cancels_the_pull_and_waits_for_every_shard(guilty: ShardId) -> None:
    it = Transfer()
    for shard in SHARDS:
        if shard != guilty:
            it.tell(it.decode, it.landed[shard])
    assert it.decode.said(CancelPull) == []
    it.fail(guilty)
    assert len(it.decode.said(CancelPull)) == 1
    drained = take(it.decode, TransferDrained)
    assert {event.shard for event in drained} == set(SHARDS)
    for event in drained:
        assert it.decode.state_of(it.right) is State.RECOVERING
        assert it.num_held(it.decode) == NUM_PAGES, "a byte may still land on another shard"
        it.tell(it.decode, event)
    assert it.decode.tokens[it.right] == TOKENS
    assert it.decode.ended[it.right].path == "fallback"
    it.prefill.release()
    it.world.run()
    it.assert_all_is_over()


def test_a_failure_of_every_shard_is_one_failure() -> None:
    it = Transfer(load_failure="fail")
    for shard in reversed(SHARDS):
        it.fail(shard, Cause.TRANSFER_FAILED)
    assert len(it.decode.said(CancelPull)) == 1
    assert it.decode.cause(it.right) is Cause.TRANSFER_FAILED
    assert it.decode.ended[it.right].detail == "shard 3: digest differs"
    assert it.decode.state.counters.transfer_failed == 1
    for event in take(it.decode, TransferDrained):
        it.tell(it.decode, event)
    it.prefill.release()
    it.world.run()
    it.assert_all_is_over()


def test_a_shard_that_the_replica_does_not_have_changes_nothing() -> None:
    it = Transfer()
    before = it.decode.node.snapshot()
    it.fail(ShardId(9))
    it.tell(it.decode, PagesLanded(it.right, it.attempt, ShardId(9), NUM_PAGES))
    it.tell(it.decode, PagesLanded(it.right, it.attempt + 1, ShardId(0), NUM_PAGES))
    it.world.assert_same_but_for_the_step_number(before, it.decode)


def test_digests_of_pages_that_no_shard_was_given_change_nothing() -> None:
    it = Transfer()
    before = it.prefill.node.snapshot()
    reader = it.prefill.progress(it.left).side.reader
    digests = tuple(bytes(8) for _ in reader.digested_shards[ShardId(0)].parts)
    it.world.step(it.prefill, [PagesDigested(it.left, reader.attempt, ShardId(0), NUM_PAGES, 1, digests, b"")])
    it.world.assert_same_but_for_the_step_number(before, it.prefill)


# --- the opposite divergence -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", SHARDS)
def test_after_the_commit_a_late_failure_of_one_shard_changes_nothing(late: ShardId) -> None:
    it = Transfer()
    for shard in SHARDS:
        it.tell(it.decode, it.landed[shard])
    assert it.decode.ended[it.right].path == "remote"
    num_commands = len(it.decode.commands)
    it.fail(late)
    assert len(it.decode.commands) == num_commands
    assert it.decode.said(CancelPull) == []
    assert it.decode.tokens[it.right] == TOKENS
    it.prefill.release()
    it.world.run()
    it.assert_all_is_over()


def test_a_request_that_runs_is_not_stopped_by_the_late_failure_of_its_transfer() -> None:
    it = Transfer()
    *first, last = SHARDS
    for shard in first:
        it.tell(it.decode, it.landed[shard])
    it.world.step(it.decode, [it.landed[last], TransferFailed(it.right, it.attempt, last, Cause.PEER_LOST, "late")])
    assert it.decode.state_of(it.right) is State.RUNNING
    assert it.decode.said(CancelPull) == []
    it.world.run()
    assert it.decode.tokens[it.right] == TOKENS
    assert it.decode.ended[it.right].path == "remote"


# --- an abort, anywhere and in any order -----------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_abort_while_pages_move_waits_for_every_shard_on_both_sides(side: str) -> None:
    it = Transfer()
    if side == "prefill":
        it.world.abort(it.prefill, it.left)
    else:
        it.world.abort(it.decode, it.right)
    it.world.run()
    assert it.left in it.prefill.ended
    assert it.right in it.decode.ended
    assert len(it.prefill.said(RevokePages)) == len(it.decode.said(CancelPull)) == 1
    for replica, request, kind in (
        (it.prefill, it.left, ReadsDrained),
        (it.decode, it.right, TransferDrained),
    ):
        drained = take(replica, kind)
        assert {event.shard for event in drained} == set(SHARDS)
        for event in drained:
            assert replica.state_of(request) is State.DRAINING
            it.tell(replica, event)
        assert replica.state_of(request) is State.DONE
    it.assert_all_is_over()


@given(data=st.data())
def test_failures_aborts_and_drains_in_any_order_leave_nothing_behind(data: st.DataObject) -> None:
    it = Transfer(load_failure=data.draw(st.sampled_from(["recompute", "fail"])))
    said: list[tuple[Replica, Event]] = []
    for shard in SHARDS:
        failure = TransferFailed(it.right, it.attempt, shard, Cause.CORRUPT_PAGES, "digest differs")
        said += [(it.decode, event) for event in data.draw(st.permutations([it.landed[shard], failure]))[:1]]
    said += [(it.decode, AbortRequested(it.right))] * data.draw(st.integers(0, 2))
    said += [(it.prefill, AbortRequested(it.left))] * data.draw(st.integers(0, 1))
    peer_abort = Abort(it.world.next_room, it.prefill.name, Cause.PEER_ABORTED, "gave up")
    said += [(it.decode, PeerSaid(it.prefill.name, peer_abort))] * data.draw(st.integers(0, 1))
    waits: list[tuple[Replica, Event]] = []
    for replica, event in data.draw(st.permutations(said)):
        it.tell(replica, event)
        waits += kept_back(it)
        if waits and data.draw(st.booleans()):
            it.tell(*waits.pop(data.draw(st.integers(0, len(waits) - 1))))
    for wait in data.draw(st.permutations(waits + kept_back(it))):
        num_drains = sum(len(progress.drains) for progress in wait[0].state.requests.values())
        assert not num_drains or it.num_held(wait[0]) > 0
        it.tell(*wait)
    it.world.advance(10**9)
    for wait in kept_back(it):
        it.tell(*wait)
    end = it.decode.ended[it.right]
    if isinstance(end, FinishRequest):
        assert it.decode.tokens[it.right] == TOKENS
    it.assert_all_is_over()


def kept_back(it: Transfer) -> list[tuple[Replica, Event]]:
    return [(it.prefill, event) for event in take(it.prefill, ReadsDrained)] + [
        (it.decode, event) for event in take(it.decode, TransferDrained)
    ]


@given(order=st.permutations(SHARDS))
def test_an_abort_before_anything_was_pulled_has_nothing_to_drain(order: list[ShardId]) -> None:
    world = World()
    prefill, decode = world.prefill(cut=CUT, optimistic="off"), world.decode(cut=CUT)
    request = world.submit(prefill, prompt_len=PROMPT_LEN, room=world.room())
    world.run()
    assert prefill.state_of(request) is State.BOOTSTRAPPING
    assert named(numbers(prefill.node))["num_prefill_bootstrap_queue_reqs"] == 1
    world.abort(prefill, request)
    for shard in order:  # answers to a question of an earlier life of this id
        world.send(prefill, ReadsDrained(request, 1, shard))
    world.run()
    assert prefill.said(RevokePages) == []
    assert named(numbers(prefill.node))["num_prefill_bootstrap_queue_reqs"] == 0
    assert_nothing_is_held([prefill, decode])
