"""Prefill and decode talk: messages overtake each other, get lost, come twice, lie - and every request still ends."""

from typing import Any, Literal

import msgspec
import pytest
from msgspec import structs

from core_driver import ROOT, Replica, World, assert_nothing_is_held, expected_tokens, finished, prompt_tokens
from tandem.core.batch import TokenFlag
from tandem.core.commands import (
    CancelPull,
    FailRequest,
    FinishRequest,
    LearnPeer,
    Path,
    PullPages,
    RenderAgain,
    RevokePages,
)
from tandem.core.disagg import prefill_side
from tandem.core.disagg.messages import Abort, Offer, Ready, Release, ResultSlot
from tandem.core.disagg.transfer_state import TransferState
from tandem.core.events import (
    BatchReturned,
    DrainRequested,
    FlushRequested,
    PageRead,
    PagesDigested,
    PagesLanded,
    PeerLearned,
    PeerLost,
    PeerReturned,
    PeerSaid,
    PeerUnknown,
    PromptRendered,
    ReadsDrained,
    RequestArrived,
    RequestRefused,
    TransferDrained,
    TransferFailed,
)
from tandem.core.scheduler.leaving import record_closed_room
from tandem.core.scheduler.node import handle
from tandem.core.scheduler.request_state import State
from tandem.core.settings import LoadFailurePolicy
from tandem.core.values import SECOND, Address, Cause, Cut, Incarnation, Nanos, Room, ShardId
from tandem.pagehash import prompt_digest

TOKENS = expected_tokens(100, 4, seed=1)


def meet(**settings: object) -> tuple[World, object, object, int, int]:
    """A pair of nodes and one request of 100 prompt tokens on its way to both."""
    world = World()
    prefill, decode = world.prefill(chunk_tokens=48, **settings), world.decode(**settings)
    return world, prefill, decode, *world.pair(prefill, decode, prompt_len=100)


def meet_before_computing(**settings: object) -> tuple[World, object, object, int, int]:
    """As `meet`, and READY is there before the first chunk has returned: offers come chunk by chunk."""
    made = world, prefill, *_ = meet(**settings)
    prefill.holds.add(BatchReturned)
    world.run()
    prefill.release()
    return made


# --- when all goes well ----------------------------------------------------------------------------------------------


def test_pages_move_while_later_chunks_are_still_computed() -> None:
    world, prefill, decode, left, right = meet_before_computing()
    world.run_until(lambda: len(decode.said(PullPages)) == 1)
    assert prefill.state_of(left) is State.COMPUTING
    world.run()
    pulls = decode.said(PullPages)
    assert [(pull.first_wanted, len(pull.sources)) for pull in pulls] == [(0, 3), (3, 3), (6, 1)]
    assert decode.tokens[right] == TOKENS
    assert decode.ended[right].path == prefill.ended[left].path == "remote"
    assert decode.ended[right].computed_tokens == 0
    assert decode.ended[right].kv_pages == prefill.ended[left].kv_pages == 7
    assert_nothing_is_held([prefill, decode])


def test_only_the_last_offer_carries_the_result_slot() -> None:
    world, prefill, _, _, _ = meet_before_computing()
    world.run()
    assert [offer.result is not None for offer in prefill.said(Offer)] == [False, False, True]


def taken(replica: Replica) -> list:
    """What was kept back of it, from here on in the hands of the test."""
    events = [event for parcel in replica.held for event in parcel.make()]
    replica.held.clear()
    replica.holds.clear()
    return events


def say(world: World, replica: Replica, events: list) -> None:
    for event in events:
        world.send(replica, event)
    world.run()


@pytest.mark.parametrize("held_back", [False, True])
def test_an_offer_that_is_too_long_for_a_message_comes_in_several(
    held_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose frames are longer than a connection takes, which ends with each of them."""
    monkeypatch.setattr(prefill_side, "MAX_OFFER_BYTES", 60)  # two pages
    world = World()
    prefill, decode = world.prefill(chunk_tokens=512), world.decode(chunk_tokens=512)
    pairs = [world.pair(prefill, decode, prompt_len=100) for _ in range(1 + held_back)]
    world.run()
    world.advance(5 * SECOND)
    assert [decode.tokens[right] for _, right in pairs] == [TOKENS] * len(pairs)
    offers = [offer for offer in prefill.said(Offer) if offer.room == 101]
    assert [(offer.first_page, len(offer.pages)) for offer in offers] == [(0, 2), (2, 2), (4, 2), (6, 1)]
    assert [offer.result is not None for offer in offers] == [False, False, False, True]
    assert all(len(digests) == 8 * len(offer.pages) for offer in offers for digests in offer.digests)
    assert_nothing_is_held([prefill, decode])


def test_a_transfer_waits_for_its_slowest_shard() -> None:
    world, prefill, decode, _left, right = meet(cut=Cut(tp_size=3))
    decode.holds.add(PagesLanded)
    prefill.holds.add(PagesDigested)
    world.run()
    assert prefill.said(Offer) == []
    digested = taken(prefill)
    say(world, prefill, [event for event in digested if event.shard != 2])
    assert prefill.said(Offer) == [], "one shard has not made its digests"
    say(world, prefill, [event for event in digested if event.shard == 2])
    landed = taken(decode)
    say(world, decode, [event for event in landed if event.shard != 1])
    assert decode.state_of(right) is State.ARRIVING, "one shard has nothing yet"
    say(world, decode, [event for event in landed if event.shard == 1])
    assert decode.tokens[right] == TOKENS
    assert_nothing_is_held([prefill, decode])


def test_a_decode_that_holds_the_prefix_pulls_the_rest_only() -> None:
    world = World()
    prefill, decode = world.prefill(), world.decode()
    world.pair(prefill, decode, prompt_len=100)
    world.run()
    left, right = world.pair(prefill, decode, prompt_len=150)
    world.run()
    assert decode.tokens.get(right) == expected_tokens(150, 4, seed=1)
    assert decode.ended[right].kv_pages == prefill.ended[left].kv_pages == 10 - 6
    assert decode.ended[right].cached_tokens == 96
    assert_nothing_is_held([prefill, decode])


def test_a_decode_that_holds_the_whole_prompt_gets_the_first_token_and_no_page() -> None:
    world = World()
    prefill, decode = world.prefill(), world.decode()
    world.pair(prefill, decode, prompt_len=96)
    world.run()
    pulls = len(decode.said(PullPages))
    left, right = world.pair(prefill, decode, prompt_len=96)
    world.run()
    assert decode.tokens[right] == expected_tokens(96, 4, seed=1)
    assert len(decode.said(PullPages)) == pulls
    assert decode.ended[right].kv_pages == prefill.ended[left].kv_pages == 0
    assert_nothing_is_held([prefill, decode])


def test_one_token_is_enough_and_the_pages_are_given_back() -> None:
    world = World()
    prefill, decode = world.prefill(), world.decode()
    left, right = world.pair(prefill, decode, max_new_tokens=1)
    world.run()
    assert decode.tokens[right] == prefill.tokens[left] == expected_tokens(40, 1, seed=1)
    assert decode.plans() == []
    assert_nothing_is_held([prefill, decode])


def test_an_end_of_sequence_as_first_token_ends_decode_before_it_decodes() -> None:
    world = World()
    prefill, decode = world.prefill(), world.decode()
    _left, right = world.pair(prefill, decode, max_new_tokens=50, eos_after=1)
    world.run()
    end = decode.ended[right]
    assert isinstance(end, FinishRequest)
    assert end.reason == "stop"
    assert decode.plans() == []
    assert prefill.state.counters.transfer_failed == 0


def test_pages_stay_until_the_reads_are_drained() -> None:
    world, prefill, _decode, left, _right = meet(prefix_cache=False)
    prefill.holds.add(ReadsDrained)
    world.run()
    assert left in prefill.ended
    assert prefill.state_of(left) is State.DRAINING
    assert prefill.state.pool.num_free == 64 - 7
    prefill.release()
    world.run()
    assert_nothing_is_held(prefill)


def test_decode_asks_the_bootstrap_server_once_for_many_requests_and_remembers() -> None:
    world = World()
    prefill, decode = world.prefill(), world.decode()
    for seed in range(5):
        world.pair(prefill, decode, seed=seed)
    world.run()
    world.pair(prefill, decode, seed=9)
    world.run()
    assert len(decode.said(LearnPeer)) == 1
    assert len(decode.ended) == 6


def test_an_unknown_prefill_is_asked_for_again_until_it_is_there() -> None:
    world = World()
    prefill, decode = world.prefill(is_known=False), world.decode(learn_peer_ns=SECOND, learn_peer_tries=9)
    _left, right = world.pair(prefill, decode, prompt_len=100)
    world.advance(4 * SECOND)
    assert decode.state_of(right) is State.BOOTSTRAPPING
    assert 4 <= len(decode.said(LearnPeer)) <= 6
    world.directory[prefill.address] = (prefill.name, "")
    world.advance(2 * SECOND)
    assert decode.tokens[right] == TOKENS


@pytest.mark.parametrize("policy", list(LoadFailurePolicy))
def test_a_prefill_that_is_never_found_is_given_up_long_before_the_deadline(policy: LoadFailurePolicy) -> None:
    world = World()
    prefill, decode = world.prefill(is_known=False), world.decode(load_failure=policy, learn_peer_tries=3)
    _left, right = world.pair(prefill, decode, prompt_len=100)
    world.advance(1 * SECOND)
    assert decode.state_of(right) is State.BOOTSTRAPPING
    world.advance(2 * SECOND)
    assert len(decode.said(LearnPeer)) == 3
    end = decode.ended[right]
    if policy is LoadFailurePolicy.RECOMPUTE:
        assert isinstance(end, FinishRequest)
        assert (end.path, decode.tokens[right]) == (Path.FALLBACK, TOKENS)
    else:
        assert isinstance(end, FailRequest)
        assert (end.cause, end.stage) == (Cause.PEER_UNKNOWN, "peer")
    assert decode.state.counters.bootstrap_failed == 1


def test_that_one_prefill_is_not_there_says_nothing_of_another() -> None:
    world = World()
    gone, there = world.prefill("gone", is_known=False), world.prefill("there")
    decode = world.decode(learn_peer_ns=SECOND, learn_peer_tries=3)
    decode.holds.add(PeerLearned)  # the answer about the other one takes its time
    (_, left), (_, right) = (world.pair(prefill, decode, prompt_len=100) for prefill in (gone, there))
    world.advance(4 * SECOND)
    assert decode.ended[left].path is Path.FALLBACK
    assert decode.state_of(right) is State.BOOTSTRAPPING
    decode.release()
    world.run()
    assert (decode.ended[right].path, decode.tokens[right]) == (Path.REMOTE, TOKENS)


# --- messages overtake, get lost, come twice -------------------------------------------------------------------------


def test_a_ready_may_overtake_the_request_it_speaks_of() -> None:
    world, prefill, decode, _left, right = meet()
    prefill.holds.add(RequestArrived)
    world.run()
    assert len(prefill.state.stash) == 1
    prefill.release()
    world.run()
    assert prefill.state.stash == {}
    assert decode.tokens[right] == TOKENS
    assert_nothing_is_held([prefill, decode])


def test_what_a_decode_has_said_is_forgotten_when_it_is_lost() -> None:
    """Its next life says it anew; the room may belong to another one by then."""
    world, prefill, decode, _left, _right = meet()
    prefill.holds.add(RequestArrived)
    world.run()
    assert len(prefill.state.stash) == 1
    world.send(prefill, PeerLost(decode.name))
    world.run()
    assert prefill.state.stash == {}


def test_stashed_messages_are_bounded_and_expire() -> None:
    world = World()
    prefill, decode = world.prefill(stashed_messages=3, stash_ns=5 * SECOND), world.decode()
    for number in range(10):
        ready = Ready(Room(50 + number), 1, decode.name, prefill.name, "", 40)
        world.send(prefill, PeerSaid(decode.name, ready))
    world.run()
    assert list(prefill.state.stash) == [50, 51, 52], "who comes later does not push out who waits"
    world.send(prefill, PeerSaid(decode.name, Ready(Room(50), 2, decode.name, prefill.name, "", 40)))
    world.run()
    assert prefill.state.stash[50].message.attempt == 2, "what decode says last counts, however full it is"
    world.advance(6 * SECOND)
    request = world.submit(prefill, room=50)
    world.run()
    assert prefill.state_of(request) is State.PARKED, "a READY of long ago is not believed"


def test_a_ready_whose_request_never_comes_is_answered_in_the_end() -> None:
    world = World()
    prefill, decode = world.prefill(stash_ns=5 * SECOND), world.decode()
    request = world.submit(decode, room=7, peer=prefill.address, prompt_len=100)
    world.advance(4 * SECOND)
    assert decode.state_of(request) is State.ARRIVING
    world.advance(3 * SECOND)
    end = decode.ended[request]
    assert isinstance(end, FinishRequest)
    assert (end.path, decode.tokens[request]) == (Path.FALLBACK, TOKENS)
    assert_nothing_is_held([prefill, decode])


def test_a_prefill_half_that_comes_after_that_is_told_that_decode_has_given_up() -> None:
    world = World()
    prefill, decode = world.prefill(stash_ns=5 * SECOND), world.decode()
    world.submit(decode, room=7, peer=prefill.address, prompt_len=100)
    world.advance(8 * SECOND)
    late = world.submit(prefill, room=7, prompt_len=100)
    world.run()
    assert prefill.cause(late) is Cause.PEER_ABORTED
    assert_nothing_is_held([prefill, decode])


def test_a_half_of_an_earlier_life_of_prefill_is_not_waited_for() -> None:
    """Both halves were sent while prefill was away: nobody sends that half again."""
    world = World()
    decode = world.decode()
    request = world.submit(decode, room=7, peer=Address("prefill.host", 8998), prompt_len=100)
    world.advance(2 * SECOND)
    assert decode.state_of(request) is State.BOOTSTRAPPING
    prefill = world.prefill()
    world.advance(3 * SECOND)
    end = decode.ended[request]
    assert isinstance(end, FinishRequest)
    assert (end.path, decode.tokens[request]) == (Path.FALLBACK, TOKENS)
    assert_nothing_is_held([prefill, decode])


@pytest.mark.parametrize(
    ("dp_size", "life_s", "waited_s"),
    [
        pytest.param(1, 9, 8, id="this life is older"),
        pytest.param(2, 9, 10, id="another DP rank may be older"),
    ],
)
def test_a_half_that_may_be_on_its_way_is_waited_for(dp_size: int, life_s: int, waited_s: int) -> None:
    assert patience(dp_size, life_s, waited_s) > 29 * SECOND


@pytest.mark.parametrize("dp_size", [1, 2])
def test_a_half_that_went_to_an_earlier_life_of_the_whole_server_is_not_waited_for(dp_size: int) -> None:
    assert patience(dp_size, 1, 12) <= SECOND


def patience(dp_size: int, life_s: int, waited_s: int) -> int:
    """How long a DP rank waits for its half, of a server that was started ten seconds before the rank."""
    world = World()
    world.advance(10 * SECOND)
    told = {"prefill_info": {"dp_size": dp_size}, "server_began_at": 0, "stash_ns": 30 * SECOND}
    prefill, decode = world.prefill(**told), world.decode()
    world.advance(life_s * SECOND)
    ready = Ready(Room(7), 1, decode.name, prefill.name, "", 100, waited_ns=Nanos(waited_s * SECOND))
    world.send(prefill, PeerSaid(decode.name, ready))
    world.run()
    return prefill.state.stash[Room(7)].expires_at - world.now


def test_a_decode_that_begins_anew_in_a_room_is_not_left_waiting() -> None:
    world, prefill, decode, left, right = meet_before_computing()
    world.run_until(lambda: len(prefill.said(Offer)) == 1)
    prefill.drops.add(Release)
    room = Room(world.next_room)
    world.abort(decode, right)
    world.run_until(lambda: right in decode.ended)
    again = world.submit(decode, room=room, peer=prefill.address, prompt_len=100)
    world.run()
    assert prefill.cause(left) is Cause.PEER_ABORTED
    end = decode.ended[again]
    assert isinstance(end, FinishRequest)
    assert (end.path, decode.tokens[again]) == (Path.FALLBACK, TOKENS)


def test_expired_messages_give_their_place_in_the_stash_to_new_ones() -> None:
    world = World()
    prefill, decode = world.prefill(stashed_messages=2, stash_ns=5 * SECOND), world.decode()
    for number in (50, 51):
        world.send(prefill, PeerSaid(decode.name, Ready(Room(number), 1, decode.name, prefill.name, "", 40)))
    world.advance(6 * SECOND)
    world.send(prefill, PeerSaid(decode.name, Ready(Room(52), 1, decode.name, prefill.name, "", 40)))
    world.run()
    assert list(prefill.state.stash) == [51, 52]


def test_a_late_copy_of_done_does_not_end_the_next_request_of_the_room() -> None:
    world, prefill, decode, _left, _right = meet()
    world.run()
    (done,) = decode.said(Release)
    assert done.outcome == "done"
    again = world.submit(prefill, room=done.room)
    world.run()
    world.send(prefill, PeerSaid(decode.name, done))
    world.submit(decode, room=done.room, peer=prefill.address)
    world.send(prefill, PeerSaid(decode.name, done))
    world.run()
    assert isinstance(prefill.ended[again], FinishRequest)
    assert prefill.ended[again].path is Path.REMOTE


def test_what_a_broken_connection_lost_is_asked_for_as_soon_as_it_is_back() -> None:
    world, prefill, decode, _left, right = meet(resend_ns=SECOND)
    prefill.drops.add(Ready)
    world.run()
    prefill.drops.clear()
    world.send(decode, PeerReturned(prefill.name))
    world.run()
    assert world.now < SECOND, "no timer was waited for"
    assert decode.tokens[right] == TOKENS


def test_a_lost_ready_is_said_again() -> None:
    world, prefill, decode, left, right = meet(resend_ns=SECOND)
    prefill.drops.add(Ready)
    world.run()
    assert prefill.state_of(left) is State.PARKED
    prefill.drops.clear()
    world.advance(2 * SECOND)
    assert decode.tokens[right] == TOKENS
    assert_nothing_is_held([prefill, decode])


def test_lost_offers_are_asked_for_again_from_where_decode_has_come_to() -> None:
    world, prefill, decode, _left, right = meet_before_computing(resend_ns=SECOND)
    world.run_until(lambda: len(decode.said(PullPages)) == 1)
    decode.drops.add(Offer)
    world.run()
    assert decode.state_of(right) is State.ARRIVING
    decode.drops.clear()
    world.advance(2 * SECOND)
    assert decode.said(Ready)[-1].known_pages == 3
    assert decode.tokens[right] == TOKENS
    assert_nothing_is_held([prefill, decode])


def test_a_lost_offer_is_asked_for_again_while_later_chunks_are_computed() -> None:
    world, prefill, decode, left, right = meet_before_computing(resend_ns=SECOND)
    decode.drops.add(Offer)
    world.run_until(lambda: len(prefill.said(Offer)) == 1)
    prefill.holds.add(BatchReturned)
    world.run()
    decode.drops.clear()
    world.advance(2 * SECOND)
    assert prefill.state_of(left) is State.COMPUTING
    assert [len(pull.sources) for pull in decode.said(PullPages)] == [6]
    prefill.release()
    world.run()
    assert (decode.ended[right].path, decode.tokens[right]) == (Path.REMOTE, TOKENS)


def test_an_offer_twice_pulls_once() -> None:
    world, _prefill, decode, _left, right = meet()
    decode.holds.add(Offer)
    world.run()
    decode.held *= 2
    decode.release()
    world.run()
    assert sum(len(pull.sources) for pull in decode.said(PullPages)) == 7
    assert decode.tokens[right] == TOKENS


def test_an_offer_that_leaves_a_gap_changes_nothing() -> None:
    world, _prefill, decode, _left, right = meet_before_computing(resend_ns=SECOND)
    decode.holds.add(Offer)
    world.run()
    _lost, *kept = decode.held
    decode.held = kept
    decode.release()
    world.run()
    assert decode.said(PullPages) == []
    world.advance(2 * SECOND)
    assert decode.tokens[right] == TOKENS


def test_an_offer_of_somebody_else_than_the_prefill_changes_nothing() -> None:
    world, prefill, decode, _left, right = meet_before_computing()
    stranger = world.prefill("stranger")
    decode.holds.add(Offer)
    world.run()
    forged = msgspec.structs.replace(prefill.said(Offer)[0], source=stranger.name)
    handle(decode.state, PeerSaid(stranger.name, forged))
    assert not [command for command in decode.state.out if isinstance(command, PullPages)]
    decode.release()
    world.run()
    assert decode.tokens[right] == TOKENS


def test_an_abort_of_somebody_else_than_the_prefill_changes_nothing() -> None:
    world, _prefill, decode, _left, right = meet_before_computing()
    another = world.prefill("another")
    decode.holds.add(Offer)
    world.run()
    forged = Abort(Room(world.next_room), another.name, Cause.LAYOUT_MISMATCH, "")  # no fallback would follow
    say(world, decode, [PeerSaid(another.name, forged)])
    assert decode.state_of(right) is State.ARRIVING
    decode.release()
    world.run()
    assert (decode.ended[right].path, decode.tokens[right]) == (Path.REMOTE, TOKENS)


def test_of_an_offer_that_overlaps_an_earlier_one_only_the_new_pages_are_pulled() -> None:
    world, prefill, decode, _, right = meet_before_computing()
    world.run_until(lambda: len(decode.said(PullPages)) == 1)
    decode.holds.add(Offer)
    world.run()
    first, *_ = prefill.said(Offer)
    whole = msgspec.structs.replace(
        prefill.said(Offer)[-1],
        first_page=0,
        pages=sum((offer.pages for offer in prefill.said(Offer)), ()),
        generations=sum((offer.generations for offer in prefill.said(Offer)), ()),
        digests=(b"".join(offer.digests[0] for offer in prefill.said(Offer)),),
    )
    assert len(first.pages) == 3
    assert len(whole.pages) == 7
    decode.held.clear()
    decode.holds.clear()
    world.send(decode, PeerSaid(prefill.name, whole))
    world.run()
    assert [(pull.first_wanted, pull.sources) for pull in decode.said(PullPages)] == [
        (0, first.pages),
        (3, whole.pages[3:]),
    ]
    assert decode.tokens[right] == TOKENS
    assert decode.ended[right].path == "remote"


def test_every_duplicate_of_every_message_changes_nothing() -> None:
    world, prefill, decode, _left, right = meet()
    for replica in (prefill, decode):
        replica.twice = {Ready, Offer, Release, PagesLanded, PagesDigested, ReadsDrained, PageRead, PeerLearned}
    world.run()
    assert decode.tokens[right] == TOKENS
    assert sum(len(pull.sources) for pull in decode.said(PullPages)) == 7
    assert_nothing_is_held([prefill, decode])


def test_a_lost_release_is_answered_from_the_tombstone_when_the_last_offer_is_said_again() -> None:
    world, prefill, decode, left, right = meet(resend_ns=SECOND)
    prefill.drops.add(Release)
    world.run()
    assert decode.tokens[right] == TOKENS
    assert_nothing_is_held(decode)
    assert prefill.state_of(left) is State.SENDING
    prefill.drops.clear()
    world.advance(2 * SECOND)
    assert isinstance(prefill.ended[left], FinishRequest)
    assert_nothing_is_held(prefill)


def test_a_lost_release_is_answered_while_the_request_still_runs_on_decode() -> None:
    world, prefill, decode, left, right = meet(resend_ns=SECOND)
    decode.holds.add(BatchReturned)
    prefill.drops.add(Release)
    world.run()
    assert decode.state_of(right) is State.RUNNING
    prefill.drops.clear()
    world.advance(2 * SECOND)
    assert isinstance(prefill.ended[left], FinishRequest)


def test_a_lost_abort_of_prefill_is_answered_at_the_next_ready() -> None:
    world, prefill, decode, left, right = meet(resend_ns=SECOND)
    decode.holds.add(PagesLanded)
    decode.drops.add(Abort)
    world.run()
    world.abort(prefill, left)
    world.run()
    assert decode.state_of(right) is State.ARRIVING
    decode.drops.clear()
    world.advance(2 * SECOND)
    assert decode.cause(right) is Cause.PEER_ABORTED
    decode.release()
    world.run()
    assert_nothing_is_held([prefill, decode])


def test_a_lost_abort_of_decode_is_answered_at_the_next_offer() -> None:
    world, prefill, decode, left, right = meet(resend_ns=SECOND)
    decode.holds.add(PagesLanded)
    prefill.drops.add(Release)
    world.run()
    world.abort(decode, right)
    world.run()
    assert prefill.state_of(left) is State.SENDING
    prefill.drops.clear()
    world.advance(2 * SECOND)
    assert prefill.cause(left) is Cause.PEER_ABORTED


def test_halves_that_end_before_they_know_anybody_are_each_told_to_their_own_prefill() -> None:
    world, decode, halves = ends_before_it_knows_anybody("first", "second")
    decode.release()
    world.run()
    assert [prefill.cause(left) for prefill, left in halves] == [Cause.PEER_ABORTED] * 2
    assert decode.state.farewells == {}


def test_that_one_prefill_is_not_there_forgets_nobody_who_is_to_be_told_by_another() -> None:
    world, decode, halves = ends_before_it_knows_anybody("first", "second")
    first, second = halves
    world.send(decode, PeerUnknown(first[0].address, "nobody listens"))
    world.run()
    assert list(decode.state.farewells) == [second[0].progress(second[1]).request.room]
    decode.release()
    world.run()
    assert second[0].cause(second[1]) is Cause.PEER_ABORTED


def ends_before_it_knows_anybody(*names: str) -> tuple[World, Replica, list[tuple[Replica, int]]]:
    """A request for each of these prefills whose half on decode is aborted; who they are comes when it is released."""
    world = World()
    prefills, decode = [world.prefill(name) for name in names], world.decode()
    decode.holds.add(PeerLearned)
    pairs = [world.pair(prefill, decode, prompt_len=100) for prefill in prefills]
    world.run()
    for _, right in pairs:
        world.abort(decode, right)
    world.run()
    return world, decode, [(prefill, left) for prefill, (left, _) in zip(prefills, pairs, strict=True)]


def test_a_release_may_overtake_the_request_it_speaks_of() -> None:
    world, prefill, decode, left, right = meet()
    prefill.holds.add(RequestArrived)
    world.run()
    world.abort(decode, right)
    world.run()
    prefill.release()
    world.run()
    assert prefill.cause(left) is Cause.PEER_ABORTED
    assert prefill.plans() == [], "nothing is computed for a decode that has given up"
    assert_nothing_is_held([prefill, decode])


def test_tombstones_are_bounded_and_the_oldest_goes_first() -> None:
    world = World()
    prefill, decode = world.prefill(), world.decode(tombstones=2)
    rooms = []
    for seed in range(4):
        world.pair(prefill, decode, seed=seed)
        rooms.append(world.next_room)
        world.run()
    assert list(decode.state.tombstones) == rooms[2:]


def test_a_room_that_is_told_of_again_is_forgotten_later() -> None:
    world = World()
    decode = world.decode(tombstones=2)
    for room in (1, 2, 1, 3):
        record_closed_room(decode.state, Room(room), Abort(Room(room), decode.name, Cause.DEADLINE_EXCEEDED))
    assert list(decode.state.tombstones) == [1, 3]


# --- leases ----------------------------------------------------------------------------------------------------------


def test_a_decode_that_falls_silent_loses_its_lease() -> None:
    world, prefill, decode, left, right = meet(lease_ns=5 * SECOND, resend_ns=SECOND)
    decode.holds.add(PagesLanded)
    world.run()
    prefill.drops |= {Ready, PageRead, Release}
    world.advance(4 * SECOND)
    assert prefill.state_of(left) is State.SENDING
    world.advance(2 * SECOND)
    assert prefill.cause(left) is Cause.LEASE_EXPIRED
    assert decode.ended.get(right) is None or decode.tokens[right] == TOKENS
    decode.release()
    world.advance(5 * SECOND)
    assert decode.tokens[right] == TOKENS, "the late copy is refused and the prompt is computed here"
    assert decode.ended[right].path == "fallback"
    assert_nothing_is_held([prefill, decode])


@pytest.mark.parametrize("sign_of_life", [Ready, PageRead])
def test_a_word_or_a_read_renews_the_lease(sign_of_life: type) -> None:
    world, prefill, decode, left, _right = meet(lease_ns=5 * SECOND, resend_ns=SECOND)
    decode.holds.add(PagesLanded)
    world.run()
    prefill.drops |= {Ready, PageRead} - {sign_of_life}
    for _ in range(12):
        if sign_of_life is PageRead:
            world.send(prefill, PageRead(left, ShardId(0)))
        world.advance(SECOND)
    assert prefill.state_of(left) is State.SENDING
    assert prefill.progress(left).side.state >= TransferState.WAITING_FOR_INPUT


def test_saying_the_last_offer_again_does_not_renew_the_lease() -> None:
    world, prefill, decode, left, _right = meet(lease_ns=5 * SECOND, resend_ns=SECOND)
    decode.drops.add(Offer)
    prefill.drops |= {Ready}
    world.run()
    prefill.drops.clear()
    world.advance(SECOND)
    prefill.drops |= {Ready, PageRead}
    world.advance(7 * SECOND)
    assert len(prefill.said(Offer)) > 4
    assert prefill.cause(left) is Cause.LEASE_EXPIRED


# --- peers that restart, differ, or lie ------------------------------------------------------------------------------


def test_a_room_that_is_live_is_refused_to_the_newcomer_only() -> None:
    for half in ("prefill", "decode"):
        world, prefill, decode, _left, right = meet()
        world.run_until(lambda decode=decode, right=right: decode.state_of(right) is State.ARRIVING)
        here = prefill if half == "prefill" else decode
        peer = None if half == "prefill" else prefill.address
        newcomer = world.submit(here, prompt_len=100, room=world.next_room, peer=peer)
        world.run()
        assert here.cause(newcomer) is Cause.DUPLICATE_ROOM
        assert decode.tokens[right] == TOKENS
        assert_nothing_is_held([prefill, decode])


def test_layouts_that_differ_end_both_halves_with_that_cause() -> None:
    world = World()
    prefill, decode = world.prefill(layout="a"), world.decode(layout="b")
    left, right = world.pair(prefill, decode)
    world.run()
    assert decode.cause(right) is Cause.LAYOUT_MISMATCH
    assert prefill.cause(left) is Cause.LAYOUT_MISMATCH
    assert_nothing_is_held([prefill, decode])


def test_prefill_refuses_a_ready_with_another_layout() -> None:
    world = World()
    prefill, decode = world.prefill(layout="a"), world.decode(layout="b")
    world.directory[prefill.address] = (prefill.name, "b")
    left, right = world.pair(prefill, decode)
    world.run()
    assert prefill.cause(left) is Cause.LAYOUT_MISMATCH
    assert decode.cause(right) is Cause.LAYOUT_MISMATCH
    assert_nothing_is_held([prefill, decode])


@pytest.mark.parametrize("is_request_there", [True, False])
def test_a_ready_for_an_earlier_life_of_the_prefill_is_refused(is_request_there: bool) -> None:
    world = World()
    prefill, decode = world.prefill(life=2), world.decode()
    left = world.submit(prefill, prompt_len=100, room=7) if is_request_there else None
    world.run()
    ready = Ready(Room(7), 1, decode.name, Incarnation("prefill", "1"), "", 100)
    world.send(prefill, PeerSaid(decode.name, ready))
    world.run()
    (abort,) = prefill.said(Abort)
    assert (abort.room, abort.cause) == (7, Cause.PEER_LOST)
    assert left is None or prefill.state_of(left) is State.PARKED


def test_a_prefill_that_restarts_is_met_again_as_another_incarnation() -> None:
    world, prefill, decode, _left, right = meet()
    decode.holds.add(PagesLanded)
    world.run()
    world.kill(prefill)
    world.run()
    reborn = world.prefill(life=2)
    decode.release()
    _, again = world.pair(reborn, decode, prompt_len=100, seed=2)
    world.run()
    assert decode.tokens[right] == TOKENS
    assert decode.ended[right].path == "fallback"
    assert decode.tokens[again] == expected_tokens(100, 4, seed=2)
    assert decode.ended[again].path == "remote"
    assert_nothing_is_held([decode, reborn])


def test_the_next_life_of_a_lost_prefill_hears_of_the_end() -> None:
    """Decode has not noticed yet that the life which it knows is over, and says READY there."""
    world, prefill, decode, _left, _right = meet()
    world.run()
    decode.holds.add(PeerLost)
    world.kill(prefill)
    reborn = world.prefill(life=2)
    left, right = world.pair(reborn, decode, prompt_len=100, seed=2)
    world.run()
    assert decode.state_of(right) is State.ARRIVING
    assert reborn.state_of(left) is State.PARKED
    decode.release()
    world.run()
    assert decode.ended[right].path == "fallback"
    assert reborn.cause(left) is Cause.PEER_ABORTED
    assert_nothing_is_held([decode, reborn])


def test_a_second_decode_cannot_take_a_room_over() -> None:
    world = World()
    prefill, decode, thief = world.prefill(), world.decode(), world.decode("thief")
    _left, right = world.pair(prefill, decode, prompt_len=100)
    decode.holds.add(PagesLanded)
    world.run()
    stolen = world.submit(thief, prompt_len=100, room=world.next_room, peer=prefill.address)
    world.run()
    assert thief.ended[stolen].path == "fallback"
    decode.release()
    world.run()
    assert decode.ended[right].path == "remote"
    assert decode.tokens[right] == TOKENS


def test_a_second_decode_hears_that_it_is_one_though_it_has_begun_less_often() -> None:
    """Its attempt has a smaller number, as a late copy of what the first one said has."""
    world = World()
    prefill, decode, thief = world.prefill(), world.decode(), world.decode("thief")
    world.pair(prefill, decode, prompt_len=40, seed=2)
    world.run()
    world.pair(prefill, decode, prompt_len=100)
    decode.holds.add(PagesLanded)
    world.run()
    stolen = world.submit(thief, prompt_len=100, room=world.next_room, peer=prefill.address)
    world.run()
    assert thief.ended[stolen].path is Path.FALLBACK


def test_a_late_ready_for_an_earlier_life_ends_no_request_of_this_one() -> None:
    world = World()
    prefill, decode = world.prefill(life=2), world.decode()
    room = world.room()
    left = world.submit(prefill, prompt_len=100, room=room)
    digest = prompt_digest(prompt_tokens(100, 1), secret=ROOT)
    late = Ready(Room(room), 1, decode.name, Incarnation("prefill", "1"), "", 100, prompt_digest=digest)
    say(world, prefill, [PeerSaid(decode.name, late)])
    assert prefill.said(Abort)[-1].cause is Cause.PEER_LOST
    assert prefill.state_of(left) is State.PARKED
    right = world.submit(decode, prompt_len=100, room=room, peer=prefill.address)
    world.run()
    assert (decode.ended[right].path, decode.tokens[right]) == (Path.REMOTE, TOKENS)


def test_a_prompt_of_another_length_is_refused_by_prefill() -> None:
    world = World()
    prefill, decode = world.prefill(), world.decode()
    room = world.room()
    left = world.submit(prefill, prompt_len=100, room=room)
    right = world.submit(decode, prompt_len=101, room=room, peer=prefill.address)
    world.run()
    assert decode.cause(right) is Cause.PROTOCOL
    assert prefill.state_of(left) is State.PARKED  # its own decode may still come


def offered(world: World, decode: object) -> Offer:
    """Hold the last offer back and return it."""
    decode.holds.add(Offer)
    world.run()
    (event,) = decode.held[-1].make()
    assert isinstance(event, PeerSaid)
    decode.held.clear()
    decode.holds.clear()
    assert isinstance(event.message, Offer)
    return event.message


LIES = {
    "result slot of another room": lambda offer: {"result": msgspec.structs.replace(offer.result, room=Room(1))},
    "result slot without a token": lambda offer: {"result": msgspec.structs.replace(offer.result, token=b"")},
    "result slot with impossible flags": lambda offer: {"result": msgspec.structs.replace(offer.result, flags=-1)},
    "more cached tokens than the prompt has": lambda offer: {
        "result": msgspec.structs.replace(offer.result, cached_tokens=101)
    },
    "another number of pages": lambda offer: {"total_pages": 9},
    "more pages than the prompt has": lambda offer: {"pages": offer.pages * 2, "generations": offer.generations * 2},
    "fewer generations than pages": lambda offer: {"generations": ()},
    "short digests": lambda offer: {"digests": (b"1234567",)},
    "a negative first page": lambda offer: {"first_page": -1},
}


@pytest.mark.parametrize("lie", LIES)
def test_an_offer_that_cannot_be_true_ends_the_request_with_protocol(lie: str) -> None:
    world = World()
    prefill, decode = world.prefill(chunk_tokens=512), world.decode()
    left, right = world.pair(prefill, decode, prompt_len=100)
    offer = offered(world, decode)
    world.send(decode, PeerSaid(prefill.name, msgspec.structs.replace(offer, **LIES[lie](offer))))
    world.run()
    assert decode.cause(right) is Cause.PROTOCOL
    assert prefill.cause(left) is Cause.PEER_ABORTED
    assert_nothing_is_held([prefill, decode])


@pytest.mark.parametrize("change", [{"attempt": 2}, {"source": Incarnation("prefill", "9")}])
def test_an_offer_of_another_attempt_or_life_is_ignored(change: dict) -> None:
    world = World()
    prefill, decode = world.prefill(), world.decode()
    _left, right = world.pair(prefill, decode, prompt_len=100)
    offer = offered(world, decode)
    world.send(decode, PeerSaid(prefill.name, msgspec.structs.replace(offer, **change)))
    world.run()
    assert decode.state_of(right) is State.ARRIVING
    world.advance(2 * SECOND)
    assert decode.tokens[right] == TOKENS


@pytest.mark.parametrize("held_pages", [-1, 8])
def test_a_ready_with_an_impossible_count_ends_the_request_with_protocol(held_pages: int) -> None:
    world = World()
    prefill, decode = world.prefill(), world.decode()
    left = world.submit(prefill, prompt_len=100, room=7)
    digest = prompt_digest(prompt_tokens(100, 1), secret=ROOT)
    ready = Ready(Room(7), 1, decode.name, prefill.name, "", 100, held_pages=held_pages, prompt_digest=digest)
    world.send(prefill, PeerSaid(decode.name, ready))
    world.run()
    assert prefill.cause(left) is Cause.PROTOCOL
    assert_nothing_is_held(prefill)


def test_done_before_everything_was_offered_is_a_lie() -> None:
    world, prefill, decode, left, _right = meet_before_computing()
    world.run_until(lambda: len(prefill.said(Offer)) == 1)
    world.send(prefill, PeerSaid(decode.name, Release(Room(world.next_room), decode.name, "done", attempt=1)))
    world.run()
    assert prefill.cause(left) is Cause.PROTOCOL
    assert_nothing_is_held([prefill, decode])


@pytest.mark.parametrize("comes", ["before the request", "while it computes", "while READY waits for its prompt"])
@pytest.mark.parametrize("outcome", ["aborted", "not_needed", "done"])
@pytest.mark.parametrize("digest", [b"", b"of another prompt"])
def test_before_ready_a_member_who_knows_the_room_and_not_the_prompt_ends_nothing(
    comes: str, outcome: Literal["aborted", "not_needed", "done"], digest: bytes
) -> None:
    world = World()
    prefill, decode = world.prefill(chunk_tokens=48), world.decode()
    room = world.room()
    member = Incarnation("another decode", "9")
    release = PeerSaid(member, Release(Room(room), member, outcome, prompt_digest=digest))
    if comes == "before the request":
        world.send(prefill, release)
        world.run()
    times = (100, 200) if "READY" in comes else (0, 0)  # then prefill renders its prompt anew
    left = world.submit(prefill, prompt_len=100, room=room, rendered_at=times[0])
    right = world.submit(decode, prompt_len=100, room=room, peer=prefill.address, rendered_at=times[1])
    prefill.holds.add(PromptRendered)
    if "READY" in comes:
        world.run_until(lambda: prefill.said(RenderAgain))
    world.send(prefill, release)
    world.run()
    prefill.release(PromptRendered)
    world.run()
    ends = prefill.ended[left], decode.ended[right]
    assert [getattr(end, "path", end) for end in ends] == [Path.REMOTE, Path.REMOTE]
    assert_nothing_is_held([prefill, decode])


@pytest.mark.parametrize("comes", ["before the request", "while it computes", "when it is parked", "after READY"])
@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        ({"layout": "another"}, Cause.LAYOUT_MISMATCH),
        ({"prompt_len": 99}, Cause.PROTOCOL),
        ({"prompt_digest": b"of another prompt"}, Cause.PROTOCOL),
        ({"held_pages": 8}, Cause.PROTOCOL),
    ],
    ids=str,
)
def test_a_ready_that_does_not_fit_of_a_member_without_the_prompt_is_refused_to_it_and_ends_nothing(
    wrong: dict[str, Any], cause: Cause, comes: str
) -> None:
    world = World()
    prefill, decode = world.prefill(chunk_tokens=48), world.decode()
    room = world.room()
    member = Incarnation("another decode", "9")
    fitting = Ready(Room(room), 1, member, prefill.name, "", 100)
    says = PeerSaid(member, structs.replace(fitting, **wrong))
    if comes == "before the request":
        world.send(prefill, says)
        world.run()
    left = world.submit(prefill, prompt_len=100, room=room)
    if comes == "when it is parked":
        world.run()
    if comes == "after READY":
        right = world.submit(decode, prompt_len=100, room=room, peer=prefill.address)
        world.run_until(lambda: prefill.said(Offer))
    world.send(prefill, says)
    world.run_until(lambda: prefill.said(Abort))
    assert {(said.room, said.cause) for said in prefill.said(Abort)} == {(room, cause)}
    if comes != "after READY":
        right = world.submit(decode, prompt_len=100, room=room, peer=prefill.address)
    world.run()
    ends = prefill.ended[left], decode.ended[right]
    assert [getattr(end, "path", end) for end in ends] == [Path.REMOTE, Path.REMOTE]
    assert_nothing_is_held([prefill, decode])


def test_before_ready_the_other_half_of_a_request_may_end_it_though_its_prompt_shows_another_time() -> None:
    world = World()
    prefill, decode = world.prefill(), world.decode()
    left = world.submit(prefill, prompt_len=100, room=7, rendered_at=100)
    world.run()
    world.send(prefill, PeerSaid(decode.name, Release(Room(7), decode.name, "aborted", rendered_at=200)))
    world.run()
    assert prefill.cause(left) is Cause.PEER_ABORTED


def test_a_decode_that_needs_nothing_lets_prefill_end_well() -> None:
    world, prefill, decode, left, _right = meet()
    decode.holds.add(RequestArrived)
    digest = prompt_digest(prompt_tokens(100, 1), secret=ROOT)
    release = Release(Room(world.next_room), decode.name, "not_needed", prompt_digest=digest)
    world.send(prefill, PeerSaid(decode.name, release))
    world.run()
    end = prefill.ended[left]
    assert isinstance(end, FinishRequest)
    assert end.path == "local"
    assert_nothing_is_held(prefill)


# --- transfers that fail ---------------------------------------------------------------------------------------------


def test_a_failed_transfer_is_drained_before_its_pages_are_used_again() -> None:
    world, prefill, decode, left, right = meet(prefix_cache=False)
    decode.holds |= {PagesLanded, TransferDrained}
    world.run()
    world.send(decode, TransferFailed(right, 1, ShardId(0), Cause.CORRUPT_PAGES, "page 3"))
    world.run()
    assert decode.state_of(right) is State.RECOVERING
    assert len(decode.said(CancelPull)) == 1
    assert decode.state.pool.num_free == 64 - 7
    decode.release()
    world.run()
    assert decode.tokens[right] == TOKENS
    assert decode.ended[right].path == "fallback"
    assert decode.ended[right].computed_tokens == 100
    assert prefill.cause(left) is Cause.PEER_ABORTED
    assert_nothing_is_held([prefill, decode])


@pytest.mark.parametrize("landed_too_early", [True, False])
def test_news_of_an_earlier_attempt_is_ignored(landed_too_early: bool) -> None:
    world, _prefill, decode, _left, right = meet()
    decode.holds.add(PagesLanded)
    world.run()
    stale = PagesLanded(right, 0, ShardId(0), 7)
    world.send(decode, stale if landed_too_early else TransferFailed(right, 0, ShardId(0), Cause.CORRUPT_PAGES))
    decode.holds.clear()
    world.turn(decode)
    assert decode.state_of(right) is State.ARRIVING
    decode.parcels, decode.held = decode.held, []
    world.run()
    assert decode.ended[right].path == "remote"


def test_a_failed_transfer_ends_the_request_where_recomputing_is_not_allowed() -> None:
    world, prefill, decode, _left, right = meet(load_failure="fail")
    decode.holds.add(PagesLanded)
    world.run()
    world.send(decode, TransferFailed(right, 1, ShardId(0), Cause.CORRUPT_PAGES, "page 3"))
    world.run()
    assert decode.cause(right) is Cause.CORRUPT_PAGES
    assert_nothing_is_held(prefill)
    decode.release()
    world.run()
    assert_nothing_is_held(decode)


def test_a_page_that_was_given_to_somebody_else_is_told_by_its_generation() -> None:
    world, prefill, decode, left, right = meet(prefix_cache=False)
    decode.holds.add(PagesLanded)
    world.run()
    world.abort(prefill, left)
    decode.drops.add(Abort)
    world.run()
    world.submit(prefill, prompt_len=100, seed=5)
    world.run()
    decode.release()
    world.run()
    assert decode.ended[right].path == "fallback"
    assert decode.tokens[right] == TOKENS


def test_a_prefill_whose_result_is_invalid_ends_both_halves() -> None:
    world = World()
    prefill, decode = world.prefill(), world.decode()
    left, right = world.pair(prefill, decode, prompt_len=100, invalid_row=1)
    world.run()
    assert prefill.cause(left) is Cause.INVALID_LOGITS
    assert right in decode.ended
    assert_nothing_is_held([prefill, decode])


def test_a_refused_prefill_half_is_told_to_decode_when_it_says_ready() -> None:
    world = World()
    prefill, decode = world.prefill(num_pages=4), world.decode()
    left, right = world.pair(prefill, decode, prompt_len=100)
    world.run()
    assert prefill.cause(left) is Cause.CONTEXT_LENGTH_EXCEEDED
    assert decode.cause(right) is Cause.CONTEXT_LENGTH_EXCEEDED
    assert_nothing_is_held([prefill, decode])


def test_a_prefill_half_that_is_refused_after_decode_has_said_ready_is_told_to_it_at_once() -> None:
    world = World()
    prefill, decode = world.prefill(num_pages=4), world.decode()
    room = world.room()
    right = world.submit(decode, prompt_len=100, room=room, peer=prefill.address)
    world.run()
    world.submit(prefill, prompt_len=100, room=room)
    world.run()  # no timer: READY is not said again
    assert decode.cause(right) is Cause.CONTEXT_LENGTH_EXCEEDED
    assert_nothing_is_held([prefill, decode])


def test_a_refused_decode_half_is_told_to_the_prefill_it_knows() -> None:
    world = World()
    prefill, decode = world.prefill(), world.decode(num_pages=8)
    world.pair(prefill, decode, prompt_len=10)
    world.run()
    left, right = world.pair(prefill, decode, prompt_len=300)
    world.run()
    assert decode.cause(right) is Cause.CONTEXT_LENGTH_EXCEEDED
    assert prefill.cause(left) is Cause.PEER_ABORTED
    assert_nothing_is_held([prefill, decode])


def refuse_at_the_edge(world: World, replica: Replica, **asked: object) -> None:
    replica.executor.forget((world.submit(replica, **asked),))
    (arrived,) = replica.parcels.pop().make()
    assert isinstance(arrived, RequestArrived)
    world.send(replica, RequestRefused(arrived.request, Cause.DRAINING, "the server is shutting down"))


@pytest.mark.parametrize("comes_first", ["prefill", "decode"])
def test_a_half_that_the_edge_of_prefill_refuses_is_told_to_decode(comes_first: str) -> None:
    world = World()
    prefill, decode = world.prefill(), world.decode(load_failure=LoadFailurePolicy.FAIL)
    room = world.room()
    if comes_first == "prefill":
        refuse_at_the_edge(world, prefill, room=room)
        world.run()
    right = world.submit(decode, room=room, peer=prefill.address)
    world.run()
    if comes_first == "decode":
        refuse_at_the_edge(world, prefill, room=room)
        world.run()  # no timer: READY is not said again
    assert decode.cause(right) is Cause.DRAINING
    assert_nothing_is_held([prefill, decode])


def test_a_half_that_the_edge_of_decode_refuses_is_told_to_the_prefill_it_knows() -> None:
    world = World()
    prefill, decode = world.prefill(), world.decode()
    world.pair(prefill, decode, prompt_len=10)
    world.run()
    room = world.room()
    left = world.submit(prefill, prompt_len=100, room=room)
    refuse_at_the_edge(world, decode, prompt_len=100, room=room, peer=prefill.address)
    world.run()
    assert prefill.cause(left) is Cause.PEER_ABORTED
    assert_nothing_is_held([prefill, decode])


def test_what_the_edge_refuses_in_a_live_room_changes_nothing() -> None:
    world, prefill, decode, _left, right = meet()
    world.run_until(lambda: decode.state_of(right) is State.ARRIVING)
    refuse_at_the_edge(world, prefill, prompt_len=100, room=world.next_room)
    refuse_at_the_edge(world, decode, prompt_len=100, room=world.next_room, peer=prefill.address)
    world.run()
    assert decode.ended[right].path == "remote"
    assert decode.tokens[right] == TOKENS


def test_who_says_ready_to_a_prefill_that_drains_hears_so_at_once() -> None:
    """The request can come no more."""
    world = World()
    prefill, decode = world.prefill(), world.decode(load_failure=LoadFailurePolicy.FAIL)
    world.send(prefill, DrainRequested())
    right = world.submit(decode, room=world.room(), peer=prefill.address)
    world.run()
    assert decode.cause(right) is Cause.DRAINING


def test_the_loss_of_a_peer_nobody_talks_to_changes_nothing() -> None:
    world, prefill, decode, _left, right = meet()
    for replica in (prefill, decode):
        world.send(replica, PeerLost(Incarnation("stranger", "1")))
    world.run()
    assert decode.tokens[right] == TOKENS


def test_nothing_is_revoked_that_was_never_published() -> None:
    world = World()
    prefill = world.prefill()
    left = world.submit(prefill, prompt_len=100, room=7)
    world.run()
    world.abort(prefill, left)
    world.run()
    assert prefill.said(RevokePages) == []
    assert_nothing_is_held(prefill)


def test_published_pages_survive_a_flush() -> None:
    world, prefill, decode, _left, right = meet()
    decode.holds.add(PagesLanded)
    world.run()
    world.send(prefill, FlushRequested())
    world.run()
    decode.release()
    world.run()
    assert decode.ended[right].path == "remote"


def test_the_flags_of_the_first_token_travel_with_it() -> None:
    row = ResultSlot(Room(1), b"\1\0\0\0", TokenFlag.EOS, b"", 0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(row), type=ResultSlot) == row


def test_a_failure_of_an_earlier_attempt_ends_nothing_on_prefill() -> None:
    world = World()
    prefill, decode = world.prefill(), world.decode()
    decode.holds.add(PagesLanded)
    left, right = world.pair(prefill, decode)
    world.run_until(lambda: prefill.state_of(left) is State.SENDING)
    world.send(prefill, TransferFailed(left, 99, ShardId(0), Cause.TRANSFER_FAILED, "of another attempt"))
    world.run()
    decode.release()
    world.run()
    assert decode.tokens[right] == expected_tokens(40, 4, seed=1)
    assert finished(decode, right).path == finished(prefill, left).path == "remote"
