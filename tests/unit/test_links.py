"""The machine of control links without sockets: two or more of them, over wires in this process."""

import msgspec
from msgspec import structs

from link_wires import DECODE, ENDPOINT, PREFILL, Node, Wires, link_of, ready, two_nodes
from tandem.core.disagg.messages import Release
from tandem.core.events import PeerLost, PeerReturned
from tandem.core.values import MILLISECOND, SECOND, Address, Incarnation, Nanos, Room
from tandem.server.frames import HEAD_BYTES
from tandem.server.node.links import HELLO_NS, RETURN_NS, Limits


def test_a_connection_that_can_be_made_again_shortly_before_it_is_given_up_is_made() -> None:
    wires, prefill, decode = two_nodes()
    wires.listener = None
    wires.cut(link_of(decode, PREFILL))
    wires.pass_time(RETURN_NS - 300 * MILLISECOND, prefill, decode)
    wires.listener = prefill
    wires.pass_time(SECOND, prefill, decode)
    assert [type(event) for event in (*prefill.heard, *decode.heard)] == [PeerReturned, PeerReturned]


def test_an_end_that_is_told_while_the_connection_is_away_is_heard_when_it_is_back() -> None:
    """Nobody says it again, as who waits does with READY."""
    wires, prefill, decode = two_nodes()
    wires.listener = None
    wires.cut(link_of(decode, PREFILL))
    wires.pass_time(100 * MILLISECOND, prefill, decode)
    end = Release(Room(5), DECODE, "not_needed")
    decode.tell(PREFILL, ready(4))
    decode.tell(PREFILL, end)
    wires.listener = prefill
    wires.pass_time(SECOND, prefill, decode)
    assert prefill.said == [end]


def test_what_waits_for_a_peer_that_is_away_is_bounded() -> None:
    wires, prefill, decode = two_nodes()
    decode.links.limits = Limits(waiting=2)
    wires.listener = None
    wires.cut(link_of(decode, PREFILL))
    wires.pass_time(100 * MILLISECOND, prefill, decode)
    ends = [Release(Room(room), DECODE, "not_needed") for room in range(1, 9)]
    for end in ends:
        decode.tell(PREFILL, end)
    wires.listener = prefill
    wires.pass_time(SECOND, prefill, decode)
    assert prefill.said == ends[:2]


def test_redials_grow_apart_and_end() -> None:
    wires, prefill, decode = two_nodes()
    wires.listener = None
    wires.cut(link_of(decode, PREFILL))
    wires.num_dials = 0
    wires.pass_time(10 * SECOND, prefill, decode)
    assert 8 <= wires.num_dials <= 20
    assert (prefill.lost, decode.lost) == ([DECODE], [PREFILL])
    assert decode.links.next_deadline() is None


def test_a_peer_that_does_not_read_is_dropped_at_the_limit_and_returns() -> None:
    wires, prefill, decode = two_nodes()
    decode.links.limits = Limits(pending_bytes=1000)
    for room in range(1, 100):
        decode.tell(PREFILL, ready(room))
    assert "bytes wait for a reader that does not read" in decode.notes[0]
    wires.pass_time(SECOND, prefill, decode)
    assert (PeerReturned(PREFILL) in decode.heard, PeerReturned(DECODE) in prefill.heard) == (True, True)
    decode.tell(PREFILL, ready(100))
    wires.carry()
    assert prefill.said == [ready(100)], "what was pending went with the connection"


def test_members_that_greet_and_say_nothing_do_not_shut_out_a_decode_that_comes_back() -> None:
    wires = Wires()
    prefill = wires.listener = Node(PREFILL, wires, Limits(peers=8))
    speaker = Node(Incarnation("speaker", "1"), wires)
    speaker.connect()
    wires.carry()
    speaker.tell(PREFILL, ready(4, source=speaker.me))
    strangers = [Node(Incarnation("non_member", str(number)), wires) for number in range(100, 120)]
    for non_member in strangers:
        non_member.connect()
        wires.carry()
    decode = Node(DECODE, wires)
    decode.connect()
    decode.tell(PREFILL, ready())
    wires.carry()
    assert prefill.said == [ready(4, source=speaker.me), ready()]
    assert len(prefill.links.peers) == 8
    assert prefill.lost == [non_member.me for non_member in strangers[: len(prefill.lost)]], "the oldest first"
    assert {speaker.me, DECODE} <= set(prefill.links.peers)


def test_who_has_been_silent_longest_gives_way_where_all_have_spoken() -> None:
    wires = Wires()
    prefill = wires.listener = Node(PREFILL, wires, Limits(peers=3))
    first, second, third, fourth = (Node(Incarnation("decode", str(number)), wires) for number in range(1, 5))
    for node in (first, second, third):
        node.connect()
        wires.carry()
        wires.now = Nanos(wires.now + MILLISECOND)
        node.tell(PREFILL, ready(1, source=node.me))
        wires.carry()
    wires.now = Nanos(wires.now + MILLISECOND)
    first.tell(PREFILL, ready(2, source=first.me))
    wires.carry()
    fourth.connect()
    wires.carry()
    assert prefill.lost == [second.me]


def test_a_prefill_that_is_dialled_never_gives_way_to_one_more() -> None:
    wires, _, decode = two_nodes()
    decode.links.limits = Limits(peers=1)
    decode.links.connect(Incarnation("another", "11"), (Address("127.0.0.2", 8998), 0), ENDPOINT, wires.now)
    assert decode.lost == [Incarnation("another", "11")]
    assert PREFILL in decode.links.peers


def test_a_dial_that_nobody_answers_is_given_up_in_time() -> None:
    wires = Wires()
    decode = Node(DECODE, wires)
    wires.dial = lambda node, link, endpoint: None  # type: ignore[method-assign]  # of this one only
    decode.connect()
    wires.pass_time(HELLO_NS - 1, decode)
    assert decode.lost == []
    wires.pass_time(1, decode)
    assert decode.lost == [PREFILL]


def test_a_node_sleeps_until_there_is_something_to_do() -> None:
    """No longer, for nobody else wakes it, and no shorter, for it would go round and round."""
    wires, prefill, decode = two_nodes()
    wires.listener = None
    wires.cut(link_of(decode, PREFILL))
    assert prefill.links.next_deadline() == RETURN_NS, "then it gives up decode, which does not come back"
    dialling = Node(DECODE, wires)
    wires.dial = lambda node, link, endpoint: None  # type: ignore[method-assign]  # of this one only
    dialling.connect()
    assert dialling.links.next_deadline() == HELLO_NS
    asked = Node(PREFILL, wires)
    non_member = asked.links.accepted(wires.now)
    assert asked.links.next_deadline() == HELLO_NS
    asked.links.tick(Nanos(HELLO_NS - 1))
    assert non_member.is_open
    asked.links.tick(Nanos(HELLO_NS))
    assert not non_member.is_open
    assert asked.links.next_deadline() is None


def test_a_wrong_claim_does_not_count_against_a_right_one_that_comes_late() -> None:
    wires = Wires()
    prefill, decode = Node(PREFILL, wires), Node(DECODE, wires)
    wires.listener = prefill
    decode.connect(("127.0.0.2", 5))
    wires.pass_time(RETURN_NS - 1, decode)
    decode.links.connect(PREFILL, (Address("127.0.0.2", 8998), 0), ENDPOINT, wires.now)
    wires.now = Nanos(wires.now + 1)
    decode.links.tick(wires.now)
    wires.carry()
    assert decode.lost == []
    assert decode.is_connected


def test_dials_that_nobody_answers_end_together_where_the_last_is_nobodys_claim_any_more() -> None:
    """The peer is lost with the first of them, and the other one is not missed."""
    wires = Wires()
    decode = Node(DECODE, wires)
    wires.dial = lambda node, link, endpoint: None  # type: ignore[method-assign]  # of this one only
    decode.connect()
    other, elsewhere = (Address("127.0.0.2", 8998), 0), ("127.0.0.2", 5)
    decode.links.connect(PREFILL, other, elsewhere, wires.now)
    decode.links.connect(Incarnation("another", "11"), other, elsewhere, wires.now)
    wires.pass_time(HELLO_NS, decode)
    assert decode.lost == [PREFILL, Incarnation("another", "11")]


def test_bytes_that_never_become_a_message_are_silence() -> None:
    """The length of a frame has changed on its way: all that follows is taken for the rest of that frame."""
    wires, prefill, decode = two_nodes()
    link_of(decode, PREFILL).session.outgoing += (1 << 19).to_bytes(HEAD_BYTES)
    wires.carry()
    silence_ns = link_of(prefill, DECODE).silence_ns
    wires.pass_time(silence_ns - 1, prefill, decode)
    assert prefill.lost == []
    wires.pass_time(1, prefill, decode)
    assert prefill.lost == [DECODE]


def test_a_second_connection_of_one_peer_takes_the_place_of_the_first() -> None:
    """Its end noticed the break before ours did: nothing is lost, nobody returns."""
    wires, prefill, decode = two_nodes()
    again = Node(DECODE, wires)
    old = link_of(prefill, DECODE)
    again.connect()
    wires.carry()
    assert not old.is_open
    assert link_of(prefill, DECODE).is_open
    assert prefill.heard == []
    assert PeerReturned(PREFILL) not in decode.heard


def test_what_is_told_to_nobody_is_dropped_but_a_ready_hears_so() -> None:
    decode = Node(DECODE, Wires())
    decode.tell(PREFILL, Release(Room(5), DECODE, "aborted"))
    assert decode.heard == []
    decode.tell(PREFILL, ready())
    assert decode.heard == [PeerLost(PREFILL)]


def test_a_ready_to_one_that_is_just_lost_hears_why() -> None:
    """The node had not yet heard of the loss when it said READY: its request ends by this one."""
    wires, _prefill, decode = two_nodes()
    wires.listener = None
    wires.cut(link_of(decode, PREFILL))
    wires.pass_time(10 * SECOND, decode)
    (why,) = [event for event in decode.heard if isinstance(event, PeerLost)]
    assert why.detail
    decode.tell(PREFILL, ready())
    assert decode.heard[-2:] == [why, why]


def test_a_ready_of_megabytes_leaves_a_line_and_not_megabytes() -> None:
    wires, prefill, decode = two_nodes()
    for room in range(1, 6):
        decode.tell(PREFILL, structs.replace(ready(room), layout="x" * (4 << 20)))
        wires.carry()
    kept = [msgspec.msgpack.encode(said) for said in prefill.said]
    assert len(kept) == 5
    assert max(map(len, kept)) < 1000
