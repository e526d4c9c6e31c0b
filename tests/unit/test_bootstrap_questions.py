"""What is asked of bootstrap servers and when, and that every question is answered once: the machine, without I/O."""

import msgspec
import pytest

from tandem.core.events import DpRankAnswered, PeerLearned, PeerUnknown
from tandem.core.settings import PrefillInfo
from tandem.core.values import SECOND, ZERO_NS, Address, Incarnation, Nanos, Room
from tandem.server.api import bootstrap_questions
from tandem.server.api.bootstrap_questions import (
    Actions,
    BootstrapQuestions,
    FetchRanks,
    FetchReplica,
    GiveUp,
)
from tandem.server.api.question_lanes import LaneRefused, Lanes
from tandem.server.wire import Connect, DataEndpoint, ReplicaInfo

OWN = ReplicaInfo(Incarnation("d", "4" * 32), "decode", "abc", {"page_size": "16"}, "127.0.0.1", 5, ())
FOUND = ReplicaInfo(
    Incarnation("p", "3" * 32),
    "prefill",
    "abc",
    {"page_size": "16"},
    "127.0.0.1",
    5,
    (DataEndpoint("127.0.0.1", 6),),
    prefill=PrefillInfo(dp_size=4),
)
HERE, THERE, ELSEWHERE = (Address(host, 8998) for host in ("10.0.0.1", "10.0.0.2", "10.0.0.3"))
NOW = Nanos(7 * SECOND)


def questions(*, max_unknown: int = 512, patience_ns: Nanos = ZERO_NS) -> BootstrapQuestions:
    return BootstrapQuestions(lambda: OWN, lanes=Lanes(max_unknown, patience_ns=patience_ns))


def rank(dp_rank: int) -> ReplicaInfo:
    return msgspec.structs.replace(FOUND, dp_rank=dp_rank)


def unknown(actions: Actions) -> list[tuple[Address, int | None, str]]:
    """Who is said to be unknown, and why."""
    found = [action for action in actions if isinstance(action, PeerUnknown)]
    return [(one.address, one.dp_rank, one.detail.partition(":8998: ")[2]) for one in found]


def test_the_way_to_a_peer_is_said_before_the_peer() -> None:
    it = questions()
    assert it.learn(HERE, None, NOW) == [FetchReplica(1, HERE, None)]
    connect, learned = it.found(1, FOUND, NOW)
    assert connect == Connect(HERE, FOUND)
    assert isinstance(learned, PeerLearned)
    assert (learned.address, learned.peer, learned.prefill) == (HERE, FOUND.incarnation, FOUND.prefill)
    assert it.next_deadline() is None


def test_one_call_at_a_time_goes_to_an_address_and_answers_all_who_ask_the_same() -> None:
    it = questions()
    calls = [action for dp_rank in (None, 1, 1, None) for action in it.learn(HERE, dp_rank, NOW)]
    assert calls == [FetchReplica(1, HERE, None)]
    assert it.found(1, FOUND, NOW)[2:] == [FetchReplica(2, HERE, 1)]
    assert len(it.found(2, rank(1), NOW)) == 2
    assert it.learn(HERE, None, NOW) == [FetchReplica(3, HERE, None)]


def test_silence_answers_all_who_wait_and_another_failure_only_the_one_that_was_asked() -> None:
    it = questions()
    for dp_rank in (None, 1):
        it.learn(HERE, dp_rank, NOW)
        it.learn(THERE, dp_rank, NOW)
    refused = it.failed(1, "connection refused", NOW, is_silent=True)
    assert unknown(refused) == [(HERE, None, "connection refused"), (HERE, 1, "connection refused")]
    answered = it.failed(2, "GET /route answered 503", NOW, is_silent=False)
    assert unknown(answered) == [(THERE, None, "GET /route answered 503")]
    assert answered[1:] == [FetchReplica(3, THERE, 1)]


def test_a_call_that_brings_nothing_in_time_is_given_up_and_what_it_brings_later_is_ignored() -> None:
    it = questions()
    it.learn(HERE, None, NOW)
    deadline = it.next_deadline()
    assert deadline == NOW + it.answer_ns
    assert it.tick(Nanos(deadline - 1)) == []
    gone, *told = it.tick(deadline)
    assert gone == GiveUp(1)
    assert unknown(told) == [(HERE, None, "no answer within 2 s")]
    assert it.found(1, FOUND, deadline) == it.failed(1, "late", deadline, is_silent=True) == []
    assert it.next_deadline() is None


def test_a_rank_that_was_not_asked_for_is_not_taken() -> None:
    it = questions()
    it.learn(HERE, 1, NOW)
    assert unknown(it.found(1, rank(2), NOW)) == [(HERE, 1, "dp_rank: asked for 1, told of 2")]


def test_what_differs_between_the_layouts_is_said() -> None:
    it = questions()
    it.learn(HERE, None, NOW)
    other = msgspec.structs.replace(FOUND, layout="xyz", layout_fields={"page_size": "32"})
    (learned,) = [action for action in it.found(1, other, NOW) if isinstance(action, PeerLearned)]
    assert learned.differs == "page_size is 32 at prefill and 16 at decode"


def test_rooms_go_together_at_once_and_the_next_after_an_interval() -> None:
    it = questions()
    assert it.ask_rank(HERE, Room(7)) == it.ask_rank(HERE, Room(8)) == []
    assert it.next_deadline() == ZERO_NS
    assert it.tick(NOW) == [FetchRanks(1, HERE, (Room(7), Room(8)))]
    it.ask_rank(HERE, Room(9))
    assert it.tick(NOW) == []
    told = it.told(1, {Room(7): 1, Room(9): 0}, FOUND.prefill, NOW)
    assert told == [DpRankAnswered(HERE, Room(7), 1, FOUND.prefill), DpRankAnswered(HERE, Room(8), None, FOUND.prefill)]
    pause_ends = it.next_deadline()
    assert pause_ends == NOW + it.interval_ns
    assert it.tick(Nanos(pause_ends - 1)) == []
    assert it.tick(pause_ends) == [FetchRanks(2, HERE, (Room(9),))]


def test_rooms_are_answered_with_nothing_where_nobody_answers_and_the_address_is_unknown() -> None:
    it = questions()
    it.ask_rank(HERE, Room(7))
    it.tick(NOW)
    told = it.tick(Nanos(NOW + it.answer_ns))
    assert unknown(told) == [(HERE, None, "no answer within 2 s")]
    assert told[2:] == [DpRankAnswered(HERE, Room(7), None)]
    it.tick(Nanos(NOW + it.answer_ns + it.interval_ns))
    assert it.next_deadline() is None


def test_whatever_comes_first_is_the_next_deadline() -> None:
    it = questions()
    it.ask_rank(HERE, Room(7))
    it.tick(NOW)
    assert it.next_deadline() == NOW + it.answer_ns
    it.told(1, {Room(7): 1}, FOUND.prefill, NOW)
    it.learn(THERE, None, NOW)
    first, last = sorted((it.interval_ns, it.answer_ns))
    assert it.next_deadline() == NOW + first
    it.tick(Nanos(NOW + first))
    assert it.next_deadline() == NOW + last


def test_what_waits_at_an_address_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for bound in ("MAX_RANKS_WAITING", "MAX_ROOMS_WAITING", "MAX_ROOM_ADDRESSES"):
        monkeypatch.setattr(bootstrap_questions, bound, 2)
    it = questions()
    told = [action for dp_rank in range(4) for action in it.learn(HERE, dp_rank, NOW)]
    assert [one[1] for one in unknown(told)] == [2, 3]
    rooms = [action for room in range(1, 4) for action in it.ask_rank(HERE, Room(room))]
    assert rooms == [DpRankAnswered(HERE, Room(3), None)]
    it.ask_rank(THERE, Room(1))
    assert it.ask_rank(ELSEWHERE, Room(1)) == [DpRankAnswered(ELSEWHERE, Room(1), None)]


def test_the_oldest_silent_call_makes_room_once_it_had_time_to_answer() -> None:
    it = questions(max_unknown=2)
    it.learn(HERE, None, NOW)
    it.learn(THERE, None, NOW)
    gone, told, call = it.learn(ELSEWHERE, None, NOW)
    assert (gone, call) == (GiveUp(1), FetchReplica(3, ELSEWHERE, None))
    assert unknown([told]) == [(HERE, None, "it kept silent while others had to be asked")]
    assert len(it.found(2, FOUND, NOW)) == 2


def test_before_that_the_newcomer_is_refused_and_who_has_answered_before_is_asked() -> None:
    it = questions(max_unknown=1, patience_ns=Nanos(SECOND))
    it.learn(HERE, None, NOW)
    it.found(1, FOUND, NOW)
    it.learn(THERE, None, NOW)
    refusal = "1 other bootstrap servers are being asked; try again"
    assert unknown(it.learn(ELSEWHERE, None, NOW)) == [(ELSEWHERE, None, refusal)]
    assert isinstance(it.learn(HERE, None, NOW)[0], FetchReplica)
    it.ask_rank(ELSEWHERE, Room(7))
    told = it.tick(NOW)
    assert unknown(told) == [(ELSEWHERE, None, refusal)]
    assert told[1:] == [DpRankAnswered(ELSEWHERE, Room(7), None)]


def test_who_has_answered_about_rooms_is_asked_although_silent_others_take_all_lanes() -> None:
    it = questions(max_unknown=1, patience_ns=Nanos(SECOND))
    it.ask_rank(HERE, Room(7))
    it.tick(NOW)
    it.told(1, {Room(7): 1}, FOUND.prefill, NOW)
    it.learn(THERE, None, NOW)
    assert it.learn(HERE, None, NOW) == [FetchReplica(3, HERE, None)]


def test_an_address_that_fails_to_answer_has_no_lane_of_its_own_any_more() -> None:
    lanes = Lanes(max_unknown=1, patience_ns=Nanos(SECOND))
    lanes.enter(1, HERE, NOW)
    lanes.leave(1, HERE, has_answered=True)
    lanes.enter(2, THERE, NOW)
    assert lanes.enter(3, HERE, NOW) is None
    lanes.leave(3, HERE, has_answered=False)  # known, and silent this time
    with pytest.raises(LaneRefused):
        lanes.enter(4, HERE, NOW)
