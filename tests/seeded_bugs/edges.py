"""Seeded bugs of the API process: how requests end where their clients hear it."""

from collections.abc import Iterator

from seeded_bugs.base import mutant, replaced
from tandem.server.api.live_requests import LiveRequests


@mutant(166, "W5")
def edge_waits_for_a_silent_node_for_ever() -> Iterator[None]:
    """No stall timeout at the edge."""

    def wake(requests, now):
        requests.wake_at = None
        return []

    with replaced(LiveRequests, "wake", wake):
        yield


@mutant(0, "W4")
def edge_ends_a_request_twice() -> Iterator[None]:
    """Once for the silence of its node, and once more when that has spoken."""
    original = LiveRequests._end

    def end(requests, live, terminal):
        said = original(requests, live, terminal)
        return [*said, *said] if live.is_told else said

    with replaced(LiveRequests, "_end", end):
        yield


@mutant(32, "W5")
def request_of_a_lost_rank_waits_for_its_deadline() -> Iterator[None]:
    """Half of the story of a lost rank: it is gone, and its requests are still looked for in it."""
    original = LiveRequests.lose

    def lose(requests, reason, dp_rank=None):
        original(requests, reason, dp_rank)
        return []

    with replaced(LiveRequests, "lose", lose):
        yield


@mutant(942180131, "S23")
def refused_request_announces_the_room_of_one_that_runs() -> Iterator[None]:
    original = LiveRequests._close_room

    def close_room(requests, request, dp_rank, cause, reason):
        in_rooms, requests._in_rooms = requests._in_rooms, {}
        told = original(requests, request, dp_rank, cause, reason)
        requests._in_rooms = in_rooms
        return told

    with replaced(LiveRequests, "_close_room", close_room):
        yield
