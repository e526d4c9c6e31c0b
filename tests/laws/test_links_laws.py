"""Laws of control links, whatever breaks when: order, at most once, and a peer that is there is found again."""

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from link_wires import DECODE, PREFILL, Node, Wires, ready, two_nodes
from tandem.core.disagg.messages import Release
from tandem.core.events import Event, PeerLost, PeerReturned, PeerSaid
from tandem.core.values import MILLISECOND, SECOND, Address, Incarnation, Nanos, Room
from tandem.server.node.links import HELLO_NS, RETURN_NS, DialFailure

STEPS = st.sampled_from(("ask", "answer", "carry", "cut", "close", "open", "connect", "pass", "wait"))


def take(step: str, number: int, wires: Wires, prefill: Node, decode: Node) -> None:
    match step:
        case "ask":
            decode.tell(PREFILL, ready(number))
        case "answer":
            prefill.tell(DECODE, Release(Room(number), PREFILL, "done"))
        case "carry":
            wires.carry()
        case "cut":
            for link in list(wires.ends)[:1]:
                wires.cut(link)
        case "close":
            wires.listener = None
        case "open":
            wires.listener = prefill
        case "connect":
            decode.connect()
        case "pass":
            wires.pass_time(50 * MILLISECOND, prefill, decode)
        case _:
            wires.pass_time(3 * SECOND, prefill, decode)


def rooms(events: Sequence[Event]) -> list[int]:
    return [event.message.room for event in events if isinstance(event, PeerSaid)]


def check_story(events: Sequence[Event]) -> None:
    """Nobody who is lost returns: who comes after that is met anew."""
    for before, after in pairwise(events):
        assert not (isinstance(before, PeerLost) and isinstance(after, PeerReturned)), events


@settings(max_examples=200, deadline=None)
@given(st.lists(STEPS, max_size=30))
def test_messages_come_in_order_and_at_most_once_and_in_the_end_the_two_find_each_other(steps: list[str]) -> None:
    wires, prefill, decode = two_nodes()
    for number, step in enumerate(steps, start=1):
        take(step, number, wires, prefill, decode)
        for node in (prefill, decode):
            heard = rooms(node.heard)
            assert heard == sorted(set(heard))
    check_story(prefill.heard)
    check_story(decode.heard)
    wires.listener = prefill
    decode.connect()
    decode.tell(PREFILL, ready(1000))
    wires.pass_time(SECOND, prefill, decode)
    if 1000 not in rooms(prefill.heard):  # it was dropped with a connection that had broken unnoticed: said again
        decode.connect()
        decode.tell(PREFILL, ready(1001))
        wires.carry()
        assert 1001 in rooms(prefill.heard)
    assert decode.is_connected
    assert prefill.links.peers[DECODE].lost_at is None


LIVES = (PREFILL, Incarnation("prefill", "11"))
VOUCHERS = tuple((Address("127.0.0.1", port), 0) for port in (8998, 8999))
SILENT, ALSO_SILENT, REFUSING = (("127.0.0.2", port) for port in (1, 2, 3))
CLAIMS = st.tuples(st.sampled_from(LIVES), st.sampled_from(VOUCHERS), st.sampled_from((SILENT, ALSO_SILENT, REFUSING)))


@settings(max_examples=400, deadline=None)
@given(st.lists(CLAIMS | st.sampled_from((HELLO_NS // 2, HELLO_NS)), min_size=3, max_size=8))
def test_whatever_bootstrap_servers_claim_of_whom_nobody_reaches_each_is_lost_in_the_end(
    steps: list[tuple[Incarnation, tuple[Address, int], tuple[str, int]] | int],
) -> None:
    answers = {REFUSING: DialFailure("refuses connections", is_final=True)}
    wires = Wires()
    wires.dial = lambda node, link, endpoint: answers.get(endpoint)  # type: ignore[method-assign]  # of this one only
    decode = Node(DECODE, wires)
    claimed: set[Incarnation] = set()
    for step in steps:
        if isinstance(step, int):
            wires.pass_time(step, decode)
        else:
            claimed.add(step[0])
            decode.links.connect(*step, wires.now)
    wires.pass_time(Nanos(HELLO_NS + RETURN_NS), decode)
    assert set(decode.lost) == claimed
    assert decode.links.next_deadline() is None
