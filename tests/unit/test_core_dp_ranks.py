"""DP ranks of a prefill: decode finds the rank that has the request, prefill announces it or refuses what lies."""

import msgspec
import pytest
from msgspec.structs import replace

from core_driver import Replica, World, assert_nothing_is_held, expected_tokens
from tandem.core.commands import AnnounceDpRank, AskDpRank, FailRequest, FinishRequest, LearnPeer, Path, Tell
from tandem.core.disagg.messages import Message, Moved, Ready
from tandem.core.events import DpRankAnswered, PagesLanded, PeerLearned, PeerLost, PeerSaid, PeerUnknown, RoomElsewhere
from tandem.core.scheduler.request_state import State, WaitingFor
from tandem.core.settings import DpConflictPolicy, LoadBalanceMethod, PrefillInfo
from tandem.core.values import SECOND, Address, Cause, Incarnation, Nanos, RequestId, Room

FOLLOW_OR_FAIL = PrefillInfo(2, LoadBalanceMethod.FOLLOW_BOOTSTRAP_ROOM, DpConflictPolicy.FAIL)
RESOLVE = PrefillInfo(2, LoadBalanceMethod.ROUND_ROBIN, DpConflictPolicy.RESOLVE)
SERVER = Address("prefill.host", 8998)
ODD = 7
TOKENS = expected_tokens(40, 4, seed=1)


def two_ranks(info: PrefillInfo, **settings: object) -> tuple[World, list[Replica], Replica]:
    """One prefill server of two ranks behind one bootstrap address, and a decode."""
    world = World()
    plain = {"dp_size": info.dp_size, "method": info.method, "conflict": info.conflict}
    ranks = [world.prefill(f"rank-{rank}", dp_rank=rank, prefill_info=plain, **settings) for rank in range(2)]
    decode = world.decode(**settings)
    return world, ranks, decode


def answer_questions(world: World, ranks: list[Replica], decode: Replica, info: PrefillInfo) -> None:
    """What the server's bootstrap server does, until nobody asks any more."""
    answered = 0
    while True:
        world.run()
        questions = [c for c in decode.commands if isinstance(c, LearnPeer | AskDpRank)][answered:]
        if not questions:
            return
        answered += len(questions)
        for question in questions:
            if isinstance(question, LearnPeer):
                rank = question.dp_rank or 0
                world.send(decode, PeerLearned(SERVER, ranks[rank].name, "", "", rank, info))


def submit(world: World, rank: Replica, decode: Replica, **asked: object) -> tuple[RequestId, RequestId]:
    left = world.submit(rank, room=ODD, **asked)
    return left, world.submit(decode, room=ODD, peer=SERVER, **asked)


def path_of(decode: Replica, request: RequestId) -> Path:
    end = decode.ended[request]
    assert isinstance(end, FinishRequest), end
    return end.path


def test_a_room_that_tells_the_rank_needs_no_question() -> None:
    world, ranks, decode = two_ranks(FOLLOW_OR_FAIL)
    _left, right = submit(world, ranks[1], decode)
    answer_questions(world, ranks, decode, FOLLOW_OR_FAIL)
    assert (path_of(decode, right), decode.tokens[right]) == (Path.REMOTE, TOKENS)
    assert decode.said(AskDpRank) == []
    assert ranks[1].said(AnnounceDpRank) == []
    assert_nothing_is_held([*ranks, decode])


def test_an_external_route_that_contradicts_the_room_is_refused_in_the_words_of_the_report() -> None:
    world, ranks, decode = two_ranks(FOLLOW_OR_FAIL)
    left, _right = submit(world, ranks[0], decode)
    world.run()
    end = ranks[0].ended[left]
    assert isinstance(end, FailRequest)
    assert (end.cause, end.detail) == (
        Cause.ROUTE_CONFLICT,
        "follow_bootstrap_room conflict: dispatched to dp_rank 0 but bootstrap_room 7 implies dp_rank 1. "
        "Set SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK=1 to allow mixed routing.",
    )
    assert_nothing_is_held(ranks[0])


@pytest.mark.parametrize(("info", "settings"), [(RESOLVE, {}), (FOLLOW_OR_FAIL, {"force_query": True})])
def test_any_route_is_announced_and_asked_for_where_rooms_do_not_tell(
    info: PrefillInfo, settings: dict[str, object]
) -> None:
    world, ranks, decode = two_ranks(info, **settings)
    _left, right = submit(world, ranks[0], decode)
    answer_questions(world, ranks, decode, info)
    assert (path_of(decode, right), decode.tokens[right]) == (Path.REMOTE, TOKENS)
    assert ranks[0].said(AnnounceDpRank) == [AnnounceDpRank(Room(ODD), 0)]
    assert ranks[1].commands == []
    assert_nothing_is_held([*ranks, decode])


def test_a_rank_that_is_not_known_yet_is_asked_for_again() -> None:
    world, ranks, decode = two_ranks(RESOLVE, ask_rank_ns=SECOND)
    right = world.submit(decode, room=ODD, peer=SERVER)
    answer_questions(world, ranks, decode, RESOLVE)
    assert decode.progress(right).waiting_for is WaitingFor.DP_RANK
    world.submit(ranks[1], room=ODD)
    world.advance(2 * SECOND)
    answer_questions(world, ranks, decode, RESOLVE)
    assert path_of(decode, right) is Path.REMOTE
    assert len(decode.said(AskDpRank)) == 2


def test_an_answer_of_another_server_about_a_room_of_that_number_changes_nothing() -> None:
    world, ranks, decode = two_ranks(RESOLVE, ask_rank_ns=SECOND)
    right = world.submit(decode, room=ODD, peer=SERVER)
    answer_questions(world, ranks, decode, RESOLVE)
    world.send(decode, DpRankAnswered(Address("another.host", 8998), Room(ODD), 0, None))
    world.run()
    assert decode.progress(right).waiting_for is WaitingFor.DP_RANK
    world.submit(ranks[1], room=ODD)
    world.advance(2 * SECOND)
    answer_questions(world, ranks, decode, RESOLVE)
    assert path_of(decode, right) is Path.REMOTE
    assert {ready.target for ready in decode.said(Ready)} == {ranks[1].name}


def test_after_an_offer_no_answer_leads_to_another_rank() -> None:
    world, ranks, decode = two_ranks(FOLLOW_OR_FAIL)
    _left, right = submit(world, ranks[1], decode)
    decode.holds.add(PagesLanded)
    answer_questions(world, ranks, decode, FOLLOW_OR_FAIL)
    assert decode.state_of(right) is State.ARRIVING
    world.send(decode, DpRankAnswered(SERVER, Room(ODD), 0, None))
    answer_questions(world, ranks, decode, FOLLOW_OR_FAIL)
    decode.release()
    world.run()
    assert (path_of(decode, right), decode.tokens[right]) == (Path.REMOTE, TOKENS)
    assert {ready.target for ready in decode.said(Ready)} == {ranks[1].name}


def test_that_one_rank_is_not_there_says_nothing_of_another() -> None:
    world, ranks, decode = two_ranks(FOLLOW_OR_FAIL, learn_peer_ns=SECOND, learn_peer_tries=2)
    world.ranks[SERVER] = [PeerLearned(SERVER, rank.name, "", "", at, FOLLOW_OR_FAIL) for at, rank in enumerate(ranks)]
    world.submit(decode, room=ODD + 1, peer=SERVER)
    world.run()  # rank 0, and with it what the server is
    decode.holds.add(PeerLearned)
    _left, right = submit(world, ranks[1], decode)
    for _ in range(4):
        world.send(decode, PeerUnknown(SERVER, "rank 0 is down", 0))
        world.advance(SECOND)
    assert decode.state_of(right) is State.BOOTSTRAPPING
    decode.release()
    world.run()
    assert (path_of(decode, right), decode.tokens[right]) == (Path.REMOTE, TOKENS)


def test_a_room_that_no_rank_ever_gets_is_given_up_with_ever_fewer_questions() -> None:
    world, ranks, decode = two_ranks(RESOLVE, stash_ns=20 * SECOND)
    right = world.submit(decode, room=ODD, peer=SERVER)
    answer_questions(world, ranks, decode, RESOLVE)
    world.advance(19 * SECOND)
    assert decode.progress(right).waiting_for is WaitingFor.DP_RANK
    assert len(decode.said(AskDpRank)) < 16
    world.advance(5 * SECOND)
    assert (path_of(decode, right), decode.tokens[right]) == (Path.FALLBACK, TOKENS)


def test_a_rank_is_announced_again_until_ready_comes() -> None:
    world, ranks, decode = two_ranks(RESOLVE)
    left = world.submit(ranks[0], room=ODD)
    world.advance(3 * SECOND)
    announced = len(ranks[0].said(AnnounceDpRank))
    assert announced in (3, 4)
    world.submit(decode, room=ODD, peer=SERVER)
    answer_questions(world, ranks, decode, RESOLVE)
    world.advance(10 * SECOND)
    assert isinstance(ranks[0].ended[left], FinishRequest)
    assert len(ranks[0].said(AnnounceDpRank)) <= announced + 1


def test_a_rank_in_the_request_is_believed_and_checked_by_prefill() -> None:
    world, ranks, decode = two_ranks(RESOLVE)
    left, right = submit(world, ranks[1], decode, dp_rank_hint=1)
    answer_questions(world, ranks, decode, RESOLVE)
    assert path_of(decode, right) is Path.REMOTE
    assert decode.said(AskDpRank) == []
    assert isinstance(ranks[1].ended[left], FinishRequest)
    wrong = world.submit(ranks[0], room=9, dp_rank_hint=1)
    world.run()
    end = ranks[0].ended[wrong]
    assert isinstance(end, FailRequest)
    assert end.detail == "dispatched to dp_rank 0 but disagg_prefill_dp_rank is 1"


def test_a_rank_that_does_not_exist_ends_the_request_on_decode() -> None:
    world, ranks, decode = two_ranks(RESOLVE)
    right = world.submit(decode, room=ODD, peer=SERVER, dp_rank_hint=5)
    answer_questions(world, ranks, decode, RESOLVE)
    end = decode.ended[right]
    assert isinstance(end, FailRequest)
    assert end.cause is Cause.ROUTE_CONFLICT
    assert end.detail == "disagg_prefill_dp_rank 5 does not exist: prefill has 2 DP ranks"


def test_a_dead_rank_does_not_hide_the_others() -> None:
    world, ranks, decode = two_ranks(RESOLVE)
    world.send(decode, PeerLearned(SERVER, ranks[0].name, "", "", 0, RESOLVE))
    world.send(decode, PeerLearned(SERVER, ranks[1].name, "", "", 1, RESOLVE))
    world.send(decode, PeerLost(ranks[0].name))
    _left, right = submit(world, ranks[1], decode)
    world.run()
    assert path_of(decode, right) is Path.REMOTE
    assert decode.said(LearnPeer) == []


def test_a_bootstrap_server_that_goes_while_ranks_are_asked_for_is_given_up() -> None:
    world, ranks, decode = two_ranks(RESOLVE)
    right = world.submit(decode, room=ODD, peer=SERVER)
    answer_questions(world, ranks, decode, RESOLVE)
    for _ in range(decode.state.settings.learn_peer_tries):
        assert decode.state_of(right) is State.BOOTSTRAPPING
        world.send(decode, PeerUnknown(SERVER, "nobody answers"))
        world.advance(SECOND)
    end = decode.ended[right]
    assert isinstance(end, FinishRequest)
    assert (end.path, decode.tokens[right]) == (Path.FALLBACK, TOKENS)


def test_an_answer_for_a_request_that_has_ended_changes_nothing() -> None:
    world, ranks, decode = two_ranks(RESOLVE)
    right = world.submit(decode, room=ODD, peer=SERVER)
    answer_questions(world, ranks, decode, RESOLVE)
    world.abort(decode, right)
    world.send(decode, DpRankAnswered(SERVER, Room(ODD), 1))
    world.run()
    assert decode.state_of(right) is State.DONE
    assert_nothing_is_held(decode)


def test_a_prefill_that_restarts_with_fewer_ranks_is_found_again() -> None:
    world, ranks, decode = two_ranks(RESOLVE)
    world.send(decode, PeerLearned(SERVER, ranks[0].name, "", "", 0, RESOLVE))
    world.run()
    alone = world.prefill("alone")
    right = world.submit(decode, room=ODD, peer=SERVER)
    world.submit(alone, room=ODD)
    for _ in range(20):
        world.advance(SECOND // 4)
        if LearnPeer(SERVER) in decode.commands:
            world.send(decode, PeerLearned(SERVER, alone.name, "", "", 0, PrefillInfo()))
    assert path_of(decode, right) is Path.REMOTE


@pytest.mark.parametrize("dp_size", [0, -3])
def test_a_bootstrap_server_that_tells_nonsense_ends_the_request_only(dp_size: int) -> None:
    world, ranks, decode = two_ranks(RESOLVE)
    right = world.submit(decode, room=ODD, peer=SERVER)
    nonsense = PrefillInfo(dp_size, conflict=DpConflictPolicy.FAIL)
    world.send(decode, PeerLearned(SERVER, ranks[0].name, "", "", 0, nonsense))
    world.run()
    end = decode.ended[right]
    assert isinstance(end, FailRequest)
    assert end.cause is Cause.ROUTE_CONFLICT


@pytest.mark.parametrize(("age_s", "is_waited_for"), [(4, False), (60, True)])
def test_a_half_that_is_older_than_the_whole_prefill_has_no_rank(age_s: int, is_waited_for: bool) -> None:
    """It was sent to an earlier life of that server. To one that was there already its other half may be on its way."""
    world, ranks, decode = two_ranks(RESOLVE)
    serve(world, ranks, RESOLVE)
    right = world.submit(decode, room=ODD, peer=SERVER)
    world.advance(5 * SECOND)
    world.send(decode, DpRankAnswered(SERVER, Room(ODD), None, RESOLVE, Nanos(age_s * SECOND)))
    world.advance(8 * SECOND)
    assert (right not in decode.ended) is is_waited_for


def test_a_half_that_ends_while_its_rank_is_asked_for_is_told_to_prefill() -> None:
    world, ranks, decode = two_ranks(RESOLVE)
    for rank in (0, 1):
        world.send(decode, PeerLearned(SERVER, ranks[rank].name, "", "", rank, RESOLVE))
    right = world.submit(decode, room=ODD, peer=SERVER)
    world.run()
    left = world.submit(ranks[1], room=ODD)
    world.abort(decode, right)
    world.run()
    end = ranks[1].ended[left]
    assert isinstance(end, FailRequest)
    assert end.cause is Cause.PEER_ABORTED
    assert_nothing_is_held([*ranks, decode])


def test_addresses_that_never_answer_are_forgotten() -> None:
    world, _ranks, decode = two_ranks(RESOLVE)
    for port in range(1, 40):
        world.submit(decode, room=port, peer=Address("nowhere", port), timeout_ns=SECOND)
    world.advance(100 * SECOND)
    world.submit(decode, room=50, peer=Address("nowhere", 50))
    world.run()
    assert len(decode.state.asked) == 1


def test_prefills_are_remembered_in_bounded_number() -> None:
    world, ranks, decode = two_ranks(RESOLVE, max_prefills=3)
    for port in range(10):
        world.send(decode, PeerLearned(Address("host", port), ranks[0].name, "", "", 0, RESOLVE))
    world.run()
    assert list(decode.state.prefills) == ["host:7", "host:8", "host:9"]
    assert len(decode.state.peers) == 3


# --- rooms that tell the rank, and routes that contradict them -------------------------------------------------------

FOLLOW = PrefillInfo(2, LoadBalanceMethod.FOLLOW_BOOTSTRAP_ROOM, DpConflictPolicy.RESOLVE)


def learned(world: World, ranks: list[Replica], decode: Replica) -> None:
    for rank, replica in enumerate(ranks):
        world.send(decode, PeerLearned(SERVER, replica.name, "", "", rank, FOLLOW))
    world.run()


def test_a_room_that_is_where_it_belongs_costs_no_question_and_no_announcement() -> None:
    world, ranks, decode = two_ranks(FOLLOW)
    _left, right = submit(world, ranks[1], decode)
    answer_questions(world, ranks, decode, FOLLOW)
    assert (path_of(decode, right), decode.tokens[right]) == (Path.REMOTE, TOKENS)
    assert decode.said(AskDpRank) == ranks[1].said(AnnounceDpRank) == []


@pytest.mark.parametrize("ready_first", [True, False])
def test_ready_for_a_room_that_was_routed_elsewhere_is_sent_on(ready_first: bool) -> None:
    world, ranks, decode = two_ranks(FOLLOW)
    learned(world, ranks, decode)
    if ready_first:
        right = world.submit(decode, room=ODD, peer=SERVER)
        world.run()
        world.submit(ranks[0], room=ODD)
    else:
        world.submit(ranks[0], room=ODD)
        world.run()
        right = world.submit(decode, room=ODD, peer=SERVER)
    world.run()
    assert (path_of(decode, right), decode.tokens[right]) == (Path.REMOTE, TOKENS)
    assert ranks[0].said(AnnounceDpRank) == [AnnounceDpRank(Room(ODD), 0, sought=1)]
    assert decode.said(AskDpRank) == []
    assert_nothing_is_held([*ranks, decode])


def test_ready_is_sent_on_once_and_by_nobody_else_than_the_rank_that_was_asked() -> None:
    world, ranks, decode = two_ranks(FOLLOW)
    learned(world, ranks, decode)
    right = world.submit(decode, room=ODD, peer=SERVER)
    world.run()
    world.send(decode, PeerSaid(ranks[0].name, Moved(Room(ODD), ranks[0].name, 0)))
    world.run()
    assert told(decode, Ready) == [ranks[1].name], "a rank that was not asked has nothing to say"
    world.send(decode, PeerSaid(ranks[1].name, Moved(Room(ODD), ranks[1].name, 0)))
    world.send(decode, PeerSaid(ranks[0].name, Moved(Room(ODD), ranks[0].name, 1)))
    world.run()
    assert told(decode, Ready) == [ranks[1].name, ranks[0].name]
    assert decode.state_of(right) is State.ARRIVING


def test_who_has_the_room_is_asked_again_and_not_the_rank_that_has_sent_ready_on() -> None:
    """The answer to who that is may be lost."""
    world, ranks, decode = two_ranks(FOLLOW)
    world.send(decode, PeerLearned(SERVER, ranks[1].name, "", "", 1, FOLLOW))
    right = world.submit(decode, room=ODD, peer=SERVER)
    world.run()
    world.send(decode, PeerSaid(ranks[1].name, Moved(Room(ODD), ranks[1].name, 0)))
    world.run()
    world.advance(5 * SECOND)
    assert told(decode, Ready) == [ranks[1].name]
    assert decode.said(LearnPeer).count(LearnPeer(SERVER, 0)) >= 2
    world.send(decode, PeerLearned(SERVER, ranks[0].name, "", "", 0, FOLLOW))
    world.run()
    assert told(decode, Ready) == [ranks[1].name, ranks[0].name]
    assert decode.state_of(right) is State.ARRIVING


def test_where_the_implied_rank_is_down_another_one_is_asked_for() -> None:
    world, ranks, decode = two_ranks(FOLLOW)
    world.send(decode, PeerLearned(SERVER, ranks[0].name, "", "", 0, FOLLOW))
    _left, right = submit(world, ranks[0], decode)
    world.run()
    assert decode.said(LearnPeer) == [LearnPeer(SERVER, 1)]
    world.send(decode, PeerUnknown(SERVER, "there is no rank 1", 1))
    world.run()
    assert (path_of(decode, right), decode.tokens[right]) == (Path.REMOTE, TOKENS)
    assert decode.said(AskDpRank) == [AskDpRank(SERVER, Room(ODD))]


def test_a_prefill_that_came_back_with_fewer_ranks_is_asked_what_it_is() -> None:
    """What it said of itself before sends this request to a rank that is not there any more."""
    world, ranks, decode = two_ranks(FOLLOW_OR_FAIL)
    world.send(decode, PeerLearned(SERVER, ranks[0].name, "", "", 0, FOLLOW_OR_FAIL))
    fewer = replace(FOLLOW_OR_FAIL, dp_size=1)
    world.ranks[SERVER] = [PeerLearned(SERVER, ranks[0].name, "", "", 0, fewer)]
    world.submit(decode, room=ODD, peer=SERVER)
    world.run()
    assert told(decode, Ready) == [ranks[0].name]
    assert decode.said(LearnPeer) == [LearnPeer(SERVER, 1), LearnPeer(SERVER, None)]


def test_a_rank_that_says_nothing_is_doubted_ever_less_often() -> None:
    """The word that sends decode on was lost. Where the room is after all, its server knows of no other rank."""
    world, ranks, decode = two_ranks(FOLLOW)
    learned(world, ranks, decode)
    right = world.submit(decode, room=ODD, peer=SERVER, timeout_ns=100 * SECOND)
    world.advance(20 * SECOND)
    assert 3 <= len(decode.said(AskDpRank)) <= 6
    assert decode.state_of(right) is State.ARRIVING
    ranks[1].holds.add(RoomElsewhere)
    world.submit(ranks[0], room=ODD, timeout_ns=100 * SECOND)
    world.advance(20 * SECOND)
    assert path_of(decode, right) is Path.REMOTE


def test_the_loss_of_the_implied_rank_is_told_to_the_one_that_has_the_room() -> None:
    world, ranks, decode = two_ranks(FOLLOW)
    learned(world, ranks, decode)
    right = world.submit(decode, room=ODD, peer=SERVER)
    world.run()
    world.announced[Room(ODD)] = 0  # by rank 0, while the word to rank 1 is lost with it
    left = world.submit(ranks[0], room=ODD)
    world.send(decode, PeerLost(ranks[1].name))
    world.run()
    assert (path_of(decode, right), decode.tokens[right]) == (Path.FALLBACK, TOKENS)
    end = ranks[0].ended[left]
    assert isinstance(end, FailRequest)
    assert end.cause is Cause.PEER_ABORTED


def test_the_loss_of_a_rank_that_has_sent_ready_on_is_told_to_the_one_that_has_the_room() -> None:
    """Before it was known who that is. Else its half would keep its pages until its deadline."""
    world, ranks, decode = two_ranks(FOLLOW)
    decode.holds.add(PeerUnknown)
    world.send(decode, PeerLearned(SERVER, ranks[1].name, "", "", 1, FOLLOW))
    left = world.submit(ranks[0], room=ODD)
    world.run()
    right = world.submit(decode, room=ODD, peer=SERVER)
    world.run()
    assert decode.progress(right).side.arrival.moved_to == 0
    world.send(decode, PeerLost(ranks[1].name))
    world.run()
    assert (path_of(decode, right), decode.tokens[right]) == (Path.FALLBACK, TOKENS)
    world.send(decode, PeerLearned(SERVER, ranks[0].name, "", "", 0, FOLLOW))
    ends_in_time(world, ranks[0], left)
    assert decode.state.farewells == {}


@pytest.mark.parametrize("held", [0, 1], ids=["elsewhere", "where it belongs"])
def test_a_half_that_ends_before_it_knows_anybody_is_told_to_prefill(held: int) -> None:
    world, ranks, decode = two_ranks(FOLLOW)
    decode.holds.add(PeerUnknown)
    left, right = submit(world, ranks[held], decode)
    world.abort(decode, right)
    answer_questions(world, ranks, decode, FOLLOW)
    assert isinstance(decode.ended[right], FailRequest)
    end = ranks[held].ended[left]
    assert isinstance(end, FailRequest)
    assert end.cause is Cause.PEER_ABORTED
    assert decode.state.farewells == {}
    assert_nothing_is_held([*ranks, decode])


def test_a_refused_half_is_told_to_a_prefill_that_nobody_knows_yet() -> None:
    world, ranks, decode = two_ranks(FOLLOW, max_queued=0)
    ranks[1].state.settings = msgspec.structs.replace(ranks[1].state.settings, max_queued=8)
    decode.holds.add(PeerUnknown)
    left, right = submit(world, ranks[1], decode)
    answer_questions(world, ranks, decode, FOLLOW)
    refused, end = decode.ended[right], ranks[1].ended[left]
    assert isinstance(refused, FailRequest)
    assert isinstance(end, FailRequest)
    assert (refused.cause, end.cause) == (Cause.QUEUE_FULL, Cause.PEER_ABORTED)


def test_farewells_are_bounded_and_forgotten_when_nobody_is_there() -> None:
    world, _ranks, decode = two_ranks(FOLLOW, tombstones=3)
    decode.holds.add(PeerUnknown)
    for room in range(1, 9):
        world.abort(decode, world.submit(decode, room=room, peer=SERVER))
    world.run()
    assert list(decode.state.farewells) == [6, 7, 8]
    decode.holds.clear()
    world.send(decode, PeerUnknown(SERVER, "nobody answers"))
    world.run()
    assert decode.state.farewells == {}


def told(decode: Replica, kind: type[Message]) -> list[Incarnation]:
    return [said.peer for said in decode.said(Tell) if isinstance(said.message, kind)]


# --- a prefill that comes back with other ranks ----------------------------------------------------------------------

FOUR = PrefillInfo(4, LoadBalanceMethod.FOLLOW_BOOTSTRAP_ROOM, DpConflictPolicy.RESOLVE)
PLAIN_FOUR = {"dp_size": 4, "method": FOUR.method, "conflict": FOUR.conflict}


def once_had_four(**settings: object) -> tuple[World, list[Replica], Replica]:
    """A prefill of two ranks, of which decode still thinks that it has four. So far it has lost one of those."""
    world, ranks, decode = two_ranks(FOLLOW, **settings)
    for rank in range(4):
        world.send(decode, PeerLearned(SERVER, former(rank), "", "", rank, FOUR))
    world.send(decode, PeerLost(former(3)))
    world.run()
    serve(world, ranks, FOLLOW)
    return world, ranks, decode


def former(rank: int) -> Incarnation:
    return Incarnation(f"former-{rank}", "1")


def ends_in_time(world: World, rank: Replica, left: RequestId) -> None:
    """The prefill half hears that decode's is over, without its own deadline."""
    world.run()
    end = rank.ended[left]
    assert isinstance(end, FailRequest)
    assert end.cause is Cause.PEER_ABORTED
    assert_nothing_is_held(rank)


def serve(world: World, ranks: list[Replica], info: PrefillInfo) -> None:
    """At the prefill's address, from now on."""
    world.ranks[SERVER] = [PeerLearned(SERVER, one.name, "", "", rank, info) for rank, one in enumerate(ranks)]


def test_a_room_of_a_rank_that_is_no_more_is_found_on_the_one_that_it_implies_now() -> None:
    world, ranks, decode = once_had_four()
    _left, right = submit(world, ranks[1], decode)
    world.run()
    assert (path_of(decode, right), decode.tokens[right]) == (Path.REMOTE, TOKENS)
    assert decode.state.prefills == {"prefill.host:8998": FOLLOW}
    assert list(decode.state.peers) == ["prefill.host:8998/1"], "nothing is known of ranks of the former life"
    assert decode.said(AskDpRank) == [AskDpRank(SERVER, Room(ODD))]
    questions = len(decode.said(LearnPeer))
    _left, right = world.submit(ranks[1], room=11), world.submit(decode, room=11, peer=SERVER)
    world.run()
    assert path_of(decode, right) is Path.REMOTE
    assert len(decode.said(LearnPeer)) == questions, "it is known now"
    assert_nothing_is_held([*ranks, decode])


def test_an_answer_of_the_former_life_is_forgotten_with_it() -> None:
    """The bootstrap server had said rank 3; nothing of it goes on to be asked for."""
    world, ranks, decode = once_had_four(force_query=True)
    right = world.submit(decode, room=ODD, peer=SERVER)
    world.send(decode, DpRankAnswered(SERVER, Room(ODD), 3))
    world.run()
    world.send(decode, PeerLearned(SERVER, ranks[0].name, "", "", 0, FOLLOW))
    world.run()
    assert decode.progress(right).waiting_for is WaitingFor.DP_RANK
    world.submit(ranks[0], room=ODD)
    world.send(decode, DpRankAnswered(SERVER, Room(ODD), 0))
    world.run()
    assert path_of(decode, right) is Path.REMOTE


def test_a_rank_that_only_the_next_life_has_is_no_conflict() -> None:
    world, ranks, decode = two_ranks(FOLLOW)
    world.send(decode, PeerLearned(SERVER, ranks[0].name, "", "", 0, PrefillInfo(1)))
    serve(world, ranks, FOLLOW)
    world.submit(ranks[1], room=ODD, dp_rank_hint=1)
    right = world.submit(decode, room=ODD, peer=SERVER, dp_rank_hint=1)
    world.run()
    assert path_of(decode, right) is Path.REMOTE
    assert decode.said(LearnPeer) == [LearnPeer(SERVER), LearnPeer(SERVER, 1)]


def test_a_prefill_of_one_rank_that_had_several_is_found_by_the_first_question_for_a_room() -> None:
    """One rank alone announces nothing: no answer but this one would ever show where its rooms are."""
    world, _ranks, decode = two_ranks(RESOLVE)
    world.send(decode, PeerLearned(SERVER, former(0), "", "", 0, RESOLVE))
    world.run()
    alone = world.prefill("alone")
    serve(world, [alone], PrefillInfo())
    world.submit(alone, room=ODD)
    right = world.submit(decode, room=ODD, peer=SERVER)
    world.run()
    assert path_of(decode, right) is Path.REMOTE
    assert len(decode.said(AskDpRank)) == 1
    assert_nothing_is_held([alone, decode])


def test_what_is_waited_for_beside_a_room_that_is_asked_for_is_found_with_it() -> None:
    world, ranks, decode = two_ranks(RESOLVE)
    world.send(decode, PeerLearned(SERVER, former(0), "", "", 0, RESOLVE))
    rights = [world.submit(decode, room=room, peer=SERVER) for room in (ODD, 9)]
    world.run()
    serve(world, ranks, FOLLOW)
    for room in (ODD, 9):
        world.submit(ranks[1], room=room)
    world.send(decode, DpRankAnswered(SERVER, Room(ODD), None, FOLLOW))
    world.run()
    assert [path_of(decode, right) for right in rights] == [Path.REMOTE] * 2


def test_a_half_that_ends_early_is_told_to_the_rank_that_has_its_room_now() -> None:
    """The rank of the former life is not there any more."""
    world, ranks, decode = once_had_four()
    left, right = submit(world, ranks[1], decode)
    world.abort(decode, right)
    ends_in_time(world, ranks[1], left)
    assert decode.state.farewells == {}


def test_a_half_that_ends_while_its_room_is_asked_for_is_told_to_the_only_rank_there_is() -> None:
    world, _ranks, decode = two_ranks(RESOLVE)
    world.send(decode, PeerLearned(SERVER, former(0), "", "", 0, RESOLVE))
    world.run()
    alone = world.prefill("alone")
    serve(world, [alone], PrefillInfo())
    left, right = submit(world, alone, decode)
    world.abort(decode, right)
    ends_in_time(world, alone, left)


def test_a_half_that_ends_while_another_rank_is_learned_of_is_told_to_the_one_that_its_room_implies_now() -> None:
    """Room 11 was on the second of two ranks, and is on the fourth of four."""
    world, ranks, decode = two_ranks(FOLLOW)
    world.send(decode, PeerLearned(SERVER, former(0), "", "", 0, FOLLOW))
    world.run()
    ranks += [world.prefill(f"rank-{rank}", dp_rank=rank, prefill_info=PLAIN_FOUR) for rank in (2, 3)]
    serve(world, ranks, FOUR)
    left, right = world.submit(ranks[3], room=11), world.submit(decode, room=11, peer=SERVER)
    world.abort(decode, right)
    ends_in_time(world, ranks[3], left)


def test_a_half_whose_rank_in_the_request_was_none_before_is_told_there() -> None:
    world, ranks, decode = two_ranks(FOLLOW)
    world.send(decode, PeerLearned(SERVER, former(0), "", "", 0, PrefillInfo(1)))
    world.run()
    serve(world, ranks, FOLLOW)
    left = world.submit(ranks[1], room=ODD, dp_rank_hint=1)
    right = world.submit(decode, room=ODD, peer=SERVER, dp_rank_hint=1)
    world.abort(decode, right)
    ends_in_time(world, ranks[1], left)
    assert decode.state.farewells == {}


def test_a_half_that_had_said_ready_to_a_rank_of_the_former_life_is_told_where_its_room_is_now() -> None:
    world, ranks, decode = once_had_four()
    world.send(decode, PeerLearned(SERVER, former(3), "", "", 3, FOUR))
    left, right = submit(world, ranks[1], decode)
    world.run()
    assert decode.state_of(right) is State.ARRIVING
    world.send(decode, PeerLearned(SERVER, ranks[0].name, "", "", 0, FOLLOW))  # another request has asked
    world.send(decode, PeerLost(former(3)))
    ends_in_time(world, ranks[1], left)
    assert path_of(decode, right) is Path.FALLBACK


def test_a_rank_that_never_comes_is_asked_for_a_bounded_number_of_times() -> None:
    """The second of two ranks, which its server says it has."""
    world, _ranks, decode = once_had_four()
    del world.ranks[SERVER][1]
    right = world.submit(decode, room=ODD, peer=SERVER)
    world.abort(decode, right)
    world.advance(100 * SECOND)
    assert decode.said(LearnPeer) == [LearnPeer(SERVER, 3), LearnPeer(SERVER, 1)]
    assert decode.said(AskDpRank) == [AskDpRank(SERVER, Room(ODD))] * 2
