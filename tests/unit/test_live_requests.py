"""The life of requests at the API process: who runs where, and that each ends exactly once, in time."""

from collections import Counter
from random import Random

import pytest
from msgspec import structs

from tandem.core.commands import AnnounceDpRank, FailRequest, FinishReason, FinishRequest, Path, StageTimings
from tandem.core.events import AbortRequested, RequestRefused, StopMatched
from tandem.core.request import Request
from tandem.core.settings import DpConflictPolicy, LoadBalanceMethod, PrefillInfo
from tandem.core.values import SECOND, Address, Cause, Nanos, RequestId, Room
from tandem.server.api.errors import Problem
from tandem.server.api.live_requests import (
    QUIET_NS,
    SILENCE_GRACE_NS,
    SWEEP_NS,
    Action,
    CloseConnection,
    Declined,
    EndRequest,
    IncomingRequest,
    LiveRequests,
    Placed,
    TellNode,
)

STALL_NS = 5 * SECOND
START = Nanos(7 * SECOND)


def server(num_ranks: int = 1, method: LoadBalanceMethod = LoadBalanceMethod.ROUND_ROBIN) -> LiveRequests:
    """With all of its ranks."""
    requests = LiveRequests(num_ranks, STALL_NS, method)
    for dp_rank in range(num_ranks):
        requests.ready(dp_rank, PrefillInfo(num_ranks, LoadBalanceMethod.ROUND_ROBIN))
    return requests


def arrival(
    requests: LiveRequests, *, seconds: float = 60, room: int | None = None, name: str = "", is_decode: bool = False
) -> IncomingRequest:
    peer = Address("p", 1) if is_decode else None
    timeout_ns = Nanos(int(seconds * SECOND))
    paired = None if room is None else Room(room)
    request = Request(requests.next_id(), name, 3, (), 8, timeout_ns, room=paired, peer=peer)
    return IncomingRequest(request, (name,) if name else ())


def submitted(requests: LiveRequests, *arrivals: IncomingRequest, now: int = START) -> Placed:
    placed = requests.submit(arrivals or [arrival(requests)], Nanos(now))
    assert isinstance(placed, Placed)
    return placed


def finished(number: int) -> FinishRequest:
    return FinishRequest(RequestId(number), FinishReason.STOP, Path.UNIFIED, 0, 3, 0, StageTimings(()))


def woken(requests: LiveRequests, until: int) -> tuple[list[Action], int]:
    """Wake it as often as it wants, up to this moment: the first that it does, and when."""
    while requests.wake_at is not None and requests.wake_at <= until:
        now = requests.wake_at
        actions = requests.wake(now)
        if actions:
            return actions, now
    return [], until


def ends(actions: list[Action]) -> list[FinishRequest | FailRequest]:
    return [action.terminal for action in actions if isinstance(action, EndRequest)]


def silent(number: int, waited_ns: int) -> list[Action]:
    cause, waited = Cause.DEADLINE_EXCEEDED, Nanos(waited_ns)
    failure = FailRequest(RequestId(number), cause, "node", "the node kept silent", waited_ns=waited)
    return [TellNode(0, AbortRequested(RequestId(number), Cause.DEADLINE_EXCEEDED)), EndRequest(failure)]


def test_a_node_that_says_nothing_has_until_the_deadline_and_half_a_second() -> None:
    requests = server()
    submitted(requests, arrival(requests, seconds=20))
    latest = START + 20 * SECOND + SILENCE_GRACE_NS
    assert requests.wake(Nanos(latest - 1)) == []
    actions, at = woken(requests, latest + SWEEP_NS)
    assert (actions, latest <= at) == (silent(1, at - START), True)
    assert requests.ended(finished(1), Nanos(at)) == [], "its word comes too late"
    assert (requests.num_live, requests.wake_at) == (0, None)


def test_each_token_gives_the_node_the_stall_timeout_again() -> None:
    requests = server()
    submitted(requests, arrival(requests, seconds=2))
    now = START
    for _ in range(10):
        assert list(requests.emitted([RequestId(1)], now)) == [0]
        assert woken(requests, now + STALL_NS)[0] == []
        now = Nanos(now + STALL_NS)
    actions, at = woken(requests, now + STALL_NS)
    assert actions == silent(1, at - (now - STALL_NS)), "since the last token"
    assert 0 <= at - (now + SILENCE_GRACE_NS) <= SWEEP_NS


def test_a_request_that_streams_is_not_looked_at_only_at_its_deadline() -> None:
    """The deadline is far away; the gap between two tokens is not."""
    requests = server()
    submitted(requests, arrival(requests, seconds=3600))
    requests.emitted([RequestId(1)], START)
    actions, at = woken(requests, START + 3600 * SECOND)
    waited = STALL_NS + SILENCE_GRACE_NS
    assert (actions, at) == (silent(1, waited), START + waited)


@pytest.mark.parametrize("seconds", [1.0, 600.0])
def test_whoever_was_told_to_end_has_the_stall_timeout_or_less_whatever_comes(seconds: float) -> None:
    requests = server()
    submitted(requests, arrival(requests, seconds=seconds))
    assert requests.abort(RequestId(1), START) == [TellNode(0, AbortRequested(RequestId(1)))]
    assert requests.abort(RequestId(1), START) == [], "once"
    assert requests.stop(RequestId(1), START) == []
    now = Nanos(START + SECOND // 2)
    assert list(requests.emitted([RequestId(1)], now)) == [0]
    actions, at = woken(requests, START + 10 * STALL_NS)
    assert actions == silent(1, at - now)
    assert at <= START + min(STALL_NS, int(seconds * SECOND) + SILENCE_GRACE_NS)


def test_a_stream_moves_from_a_rank_that_stands_still_while_others_work() -> None:
    """The others wait: who has no token yet or cannot go on elsewhere, and whoever runs on another rank."""
    requests = LiveRequests(2, 30 * SECOND)
    for dp_rank in range(2):
        requests.ready(dp_rank)
    who = [(0, True), (0, False), (1, True), (0, True), (0, True)]
    arrivals = [structs.replace(arrival(requests), routed=dp_rank, may_move=moves) for dp_rank, moves in who]
    submitted(requests, *arrivals)
    requests.emitted([RequestId(number) for number in (1, 2, 3, 5)], START)
    requests.stop(RequestId(5), START)
    assert requests.see_trouble(0, "the worker hangs", Nanos(START + QUIET_NS - 1)) == []
    requests.see_trouble(1, "the other one, too", START)
    assert requests.see_trouble(0, "the worker hangs", Nanos(START + QUIET_NS)) == [], "our health tells it"
    assert requests.see_trouble(1, "", Nanos(START + QUIET_NS)) == []
    failure = FailRequest(RequestId(1), Cause.WORKER_LOST, "node", "the worker still hangs")
    moved = requests.see_trouble(0, "the worker still hangs", Nanos(START + QUIET_NS))
    assert moved == [TellNode(0, AbortRequested(RequestId(1))), EndRequest(failure)]
    assert requests.see_trouble(0, "", Nanos(START + 3 * QUIET_NS)) == [], "it works again"


def test_a_client_that_takes_nothing_is_cut_off_and_its_requests_are_aborted() -> None:
    requests = server()
    placed = submitted(requests, arrival(requests), arrival(requests))
    requests.blocked(placed.client, START)
    actions, at = woken(requests, START + 2 * STALL_NS)
    aborts = [TellNode(0, AbortRequested(RequestId(number))) for number in (1, 2)]
    assert (actions, at) == ([CloseConnection(placed.client), *aborts], START + STALL_NS)
    assert requests.num_live == 2, "their nodes have the last word"


def test_a_client_that_reads_again_in_time_is_not_cut_off() -> None:
    requests = server()
    placed = submitted(requests)
    requests.blocked(placed.client, START)
    requests.reads(placed.client)
    assert woken(requests, START + 3 * STALL_NS)[0] == []


def test_a_lost_rank_ends_its_requests_and_another_one_speaks_for_their_rooms() -> None:
    requests = server(2)
    submitted(requests, arrival(requests, room=4), arrival(requests, room=5), arrival(requests))
    by_room = {live.request.room: live.request for live in requests._live.values()}
    actions = requests.lose("killed", 0)
    refused = RequestRefused(by_room[Room(4)], Cause.WORKER_LOST, "killed")
    assert actions[:2] == [TellNode(1, refused), AnnounceDpRank(Room(4), 1)]
    assert [(end.request, getattr(end, "cause", None)) for end in ends(actions)] == [
        (1, Cause.WORKER_LOST),
        (3, Cause.WORKER_LOST),
    ]
    assert [(rank.num_requests, rank.num_tokens) for rank in requests.ranks] == [(0, 0), (1, 3)]


def test_only_a_prefill_says_where_a_room_is() -> None:
    requests = server(2)
    submitted(requests, arrival(requests, room=4, is_decode=True))
    assert not any(isinstance(action, AnnounceDpRank) for action in requests.lose("killed", 0))


def test_who_is_declined_leaves_nobody_waiting_and_takes_no_turn() -> None:
    requests = server(2)
    requests.drain()
    outcome = requests.submit([arrival(requests, room=9)], START)
    assert isinstance(outcome, Declined)
    assert outcome.failure.code is Cause.DRAINING
    told, announced = outcome.actions
    assert isinstance(told, TellNode)
    assert isinstance(told.event, RequestRefused)
    assert told.event.cause is Cause.DRAINING
    assert announced == AnnounceDpRank(Room(9), told.dp_rank)
    assert (requests.num_live, requests._next_rank) == (0, 0)


@pytest.mark.parametrize(
    ("routed", "code"), [(2, Problem.INVALID_VALUE), (-1, Problem.INVALID_VALUE), (1, Problem.NOT_READY)]
)
def test_a_rank_that_never_will_be_is_the_user_s_mistake_and_one_that_is_gone_is_not(
    routed: int, code: Problem
) -> None:
    requests = server(2)
    requests.lose("killed", 1)
    outcome = requests.submit([IncomingRequest(arrival(requests).request, (), routed)], START)
    assert isinstance(outcome, Declined)
    assert outcome.failure.code is code


@pytest.mark.parametrize("force_query", [False, True])
def test_where_decode_asks_for_every_room_it_is_told_of_one_that_is_declined(force_query: bool) -> None:
    """Though the room tells its rank: whoever asks all the same would wait until its deadline."""
    by_room = LoadBalanceMethod.FOLLOW_BOOTSTRAP_ROOM
    requests = LiveRequests(2, STALL_NS, by_room, rooms_move=False, force_query=force_query)
    for dp_rank in range(2):
        requests.ready(dp_rank, PrefillInfo(2, by_room, DpConflictPolicy.FAIL))
    requests.drain()
    outcome = requests.submit([arrival(requests, room=9)], START)
    assert isinstance(outcome, Declined)
    assert list(outcome.actions[1:]) == ([AnnounceDpRank(Room(9), 1)] if force_query else [])


def test_a_name_is_in_use_until_its_request_has_ended() -> None:
    requests = server()
    submitted(requests, arrival(requests, name="mine"))
    outcome = requests.submit([arrival(requests, name="mine")], START)
    assert isinstance(outcome, Declined)
    assert outcome.failure.code is Problem.DUPLICATE_RID
    assert requests.abort_named("mine", START) == [TellNode(0, AbortRequested(RequestId(1)))]
    requests.ended(finished(1), START)
    submitted(requests, arrival(requests, name="mine"))


def test_what_one_node_cannot_take_is_taken_back_from_the_others() -> None:
    requests = server(2)
    placed = submitted(requests, arrival(requests, room=4), arrival(requests, room=5))
    actions = requests.withdraw(placed.client, [placed.ranks[0]], Cause.QUEUE_FULL, "full")
    assert actions[0] == TellNode(placed.ranks[0], AbortRequested(RequestId(1)))
    assert [action.room for action in actions if isinstance(action, AnnounceDpRank)] == [4, 5]
    assert (requests.num_live, ends(actions), requests._clients, requests._named) == (0, [], {}, {})


def test_a_stop_string_ends_a_request_once() -> None:
    requests = server()
    submitted(requests)
    assert requests.stop(RequestId(1), START) == [TellNode(0, StopMatched(RequestId(1)))]
    assert requests.abort(RequestId(1), START) == []
    assert ends(requests.ended(finished(1), START)) == [finished(1)]


class Story:
    """Random inputs for one server. What its requests have heard is counted."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.requests = server(self.random.choice((1, 2, 3)))
        self.now = START
        self.placed: list[Placed] = []
        self.known: set[int] = set()
        self.ended: Counter[int] = Counter()

    def step(self) -> None:
        self.now = Nanos(self.now + self.random.randrange(2 * SECOND))
        requests, random = self.requests, self.random
        number = RequestId(random.randrange(1, requests._last_id + 2))
        match random.randrange(10):
            case 0 | 1 | 2:
                self.submit()
            case 3 | 4:
                requests.emitted([number], self.now)
            case 5:
                self.take(requests.ended(finished(number), self.now))
            case 6:
                self.take(
                    requests.abort(number, self.now) if random.random() < 0.5 else requests.stop(number, self.now)
                )
            case 7 if self.placed:
                client = random.choice(self.placed).client
                requests.blocked(client, self.now) if random.random() < 0.5 else requests.reads(client)
            case 8 if self.placed and random.random() < 0.5:
                self.take(requests.leave(random.choice(self.placed).client, self.now))
            case 9 if random.random() < 0.3:
                dp_rank = random.randrange(requests.num_ranks)
                self.take(requests.lose("lost", dp_rank))
                requests.ready(dp_rank)
            case _:
                self.take(requests.wake(self.now))
        self.check()

    def submit(self) -> None:
        arrivals = [
            arrival(self.requests, seconds=self.random.uniform(0.1, 30)) for _ in range(self.random.randrange(1, 4))
        ]
        placed = submitted(self.requests, *arrivals, now=self.now)
        self.placed.append(placed)
        self.known |= {one.request.id for one in arrivals}

    def take(self, actions: list[Action]) -> None:
        self.ended.update(end.request for end in ends(actions))

    def check(self) -> None:
        requests = self.requests
        live = requests._live.values()
        assert set(self.ended.values()) <= {1}
        assert {one.request.id for one in live} == self.known - set(self.ended)
        assert sum(rank.num_requests for rank in requests.ranks) == len(live)
        assert sum(rank.num_tokens for rank in requests.ranks) == sum(3 + one.num_tokens for one in live)
        assert {request for mine in requests._clients.values() for request in mine} == {one.request.id for one in live}
        due = [one.give_up_at for one in live] + [since + STALL_NS for since in requests._blocked.values()]
        assert not due or (requests.wake_at is not None and requests.wake_at <= max(min(due), self.now + SWEEP_NS))


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_each_request_ends_once_and_nothing_is_left(seed: int) -> None:
    story = Story(seed)
    for _ in range(150):
        story.step()
    requests = story.requests
    while requests.num_live and requests.wake_at is not None:
        story.now = Nanos(max(story.now, requests.wake_at))
        story.take(requests.wake(story.now))
        story.check()
    assert set(story.ended) == story.known
    assert (requests._clients, requests._named) == ({}, {})
    assert [(rank.num_requests, rank.num_tokens) for rank in requests.ranks] == [(0, 0)] * requests.num_ranks


@pytest.mark.parametrize("routed", [0, -1])
def test_a_room_that_runs_on_another_rank_is_refused_and_its_other_half_is_not_led_astray(routed: int) -> None:
    requests = server(2)
    room = 3  # of rank 1
    submitted(requests, structs.replace(arrival(requests, room=room), routed=1))
    declined = requests.submit([structs.replace(arrival(requests, room=room), routed=routed)], START)
    assert isinstance(declined, Declined)
    assert declined.failure.code == (Cause.DUPLICATE_ROOM if routed == 0 else Problem.INVALID_VALUE)
    assert declined.actions == ()
    assert requests.ended(finished(1), START) != []
    assert isinstance(requests.submit([structs.replace(arrival(requests, room=room), routed=0)], START), Placed)


def test_a_router_that_tries_again_ends_what_it_has_tried_before_and_nobody_else_does() -> None:
    requests = server()
    submitted(requests, structs.replace(arrival(requests, name="mine"), request_id="a"))
    assert isinstance(
        requests.submit([structs.replace(arrival(requests, name="mine"), request_id="b")], START), Declined
    )
    again = submitted(requests, structs.replace(arrival(requests, name="mine"), request_id="a"))
    assert again.actions == (TellNode(0, AbortRequested(RequestId(1))),)
    assert requests.submit([arrival(requests, name="mine")], START) != again
    once_more = submitted(requests, structs.replace(arrival(requests, name="mine"), request_id="a"))
    assert once_more.actions == (TellNode(0, AbortRequested(RequestId(3))),)
