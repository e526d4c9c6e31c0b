"""Control connections between nodes: who is who, what is dropped, and when a peer is lost. Real sockets, our clock."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from tandem.core.events import Event, PeerLost, PeerReturned, PeerSaid
from tandem.core.pd.messages import Ready, Release
from tandem.core.values import SECOND, Address, Incarnation, Nanos, Room
from tandem.server.channel import CheckedFrames, append_checked_frame, head_check
from tandem.server.node.driver import Poller
from tandem.server.node.peers import CONTROL_PROTOCOL, MAX_PING_NS, Frame, Heartbeat, Hello, Peers
from tandem.server.wire import ReplicaInfo

PREFILL = Incarnation("prefill", "10")
DECODE = Incarnation("decode", "20")
START = Nanos(0)
FOUND_AT = Address("127.0.0.1", 8998)
ELSEWHERE = Address("127.0.0.2", 8998)


@dataclass
class Side:
    """One node's end, pumped by hand."""

    me: Incarnation
    now: Nanos = START
    events: list[Event] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    poller: Poller = field(default_factory=Poller)
    heartbeat: Heartbeat = field(default_factory=Heartbeat)

    def __post_init__(self) -> None:
        self.peers = Peers(
            self.me,
            "layout",
            self.poller,
            self.events.append,
            clock=lambda: self.now,
            note=self.notes.append,
            heartbeat=self.heartbeat,
        )
        self.port = self.peers.listen("127.0.0.1")

    @property
    def replica(self) -> ReplicaInfo:
        return ReplicaInfo(self.me, "prefill", "layout", {}, "127.0.0.1", self.port, ())

    def pump(self) -> None:
        self.poller.poll(0.002)
        self.peers.tick()
        self.peers.flush()


def ready(*, source: Incarnation = DECODE) -> Ready:
    return Ready(Room(5), 1, source, PREFILL, "layout", 100)


def eventually(condition: Callable[[], object], *sides: Side) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        for side in sides:
            side.pump()
        assert time.monotonic() < deadline, [(side.me, side.events, side.notes) for side in sides]


@contextmanager
def two_sides(*rhythms: Heartbeat) -> Iterator[tuple[Side, Side]]:
    """Prefill and decode, with these rhythms or the usual one."""
    of_prefill, of_decode = rhythms or (Heartbeat(), Heartbeat())
    prefill, decode = Side(PREFILL, heartbeat=of_prefill), Side(DECODE, heartbeat=of_decode)
    try:
        decode.peers.connect(prefill.replica, FOUND_AT)
        yield prefill, decode
    finally:
        prefill.peers.close()
        decode.peers.close()


@contextmanager
def stranger(side: Side) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", side.port)) as sock:
        sock.settimeout(0.01)
        yield sock


def frames_of(*messages: Frame) -> bytes:
    """As one peer says them, first on its connection."""
    buffer, check = bytearray(), 0
    for message in messages:
        check = append_checked_frame(buffer, message, check)
    return bytes(buffer)


def is_closed(sock: socket.socket) -> bool:
    try:
        while sock.recv(65536):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return True


def test_what_is_told_while_the_dial_is_under_way_arrives() -> None:
    with two_sides() as (prefill, decode):
        decode.peers.tell(PREFILL, ready())
        eventually(lambda: prefill.events, prefill, decode)
        assert prefill.events == [PeerSaid(DECODE, ready())]


def test_the_one_that_was_dialled_answers_on_the_same_connection() -> None:
    answer = Release(Room(5), PREFILL, "done")
    with two_sides() as (prefill, decode):
        decode.peers.tell(PREFILL, ready())
        eventually(lambda: prefill.events, prefill, decode)
        prefill.peers.tell(DECODE, answer)
        eventually(lambda: decode.events, prefill, decode)
        assert decode.events == [PeerSaid(PREFILL, answer)]


def test_a_tell_without_a_connection_is_dropped() -> None:
    with two_sides() as (prefill, _):
        prefill.peers.tell(Incarnation("nobody", "1"), Release(Room(5), PREFILL, "done"))
        prefill.pump()
        assert prefill.events == []


def test_a_message_in_anothers_name_ends_the_connection_and_is_not_believed() -> None:
    with two_sides() as (prefill, decode), stranger(prefill) as sock:
        liar = Incarnation("liar", "1")
        sock.sendall(frames_of(Hello(CONTROL_PROTOCOL, liar, "layout"), ready(source=DECODE)))
        eventually(lambda: is_closed(sock), prefill, decode)
        assert not any(isinstance(event, PeerSaid) for event in prefill.events)


def test_a_peer_of_another_protocol_or_with_a_huge_first_frame_is_dropped() -> None:
    with two_sides() as (prefill, decode):
        for words in (
            frames_of(Hello(CONTROL_PROTOCOL + 1, DECODE, "layout")),
            (1 << 20).to_bytes(4) + head_check(1 << 20, 0).to_bytes(4),
            bytes(8),
            b"GET / HTTP/1.1\r\n\r\n",
            frames_of(ready()),
        ):
            with stranger(prefill) as sock:
                sock.sendall(words)
                eventually(lambda sock=sock: is_closed(sock), prefill, decode)
        assert prefill.events == []


def test_a_stranger_that_says_nothing_is_dropped() -> None:
    with two_sides() as (prefill, decode), stranger(prefill) as sock:
        eventually(lambda: prefill.peers._strangers, prefill)
        for _ in range(3):
            prefill.pump()
        prefill.now = decode.now = Nanos(6 * SECOND)
        eventually(lambda: is_closed(sock), prefill, decode)


def test_a_broken_connection_is_dialled_again_and_nobody_is_lost() -> None:
    with two_sides() as (prefill, decode):
        decode.peers.tell(PREFILL, ready())
        eventually(lambda: prefill.events, prefill, decode)
        wire = prefill.peers._peers[DECODE].wire
        assert wire is not None
        prefill.peers._drop(wire, "cut by the test")

        def has_returned() -> bool:
            decode.now = prefill.now = Nanos(decode.now + SECOND // 1000)
            wire = prefill.peers._peers[DECODE].wire
            return wire is not None and wire.greeted

        eventually(has_returned, prefill, decode)
        decode.peers.tell(PREFILL, ready())
        eventually(lambda: [type(event) for event in prefill.events].count(PeerSaid) == 2, prefill, decode)
        assert PeerReturned(DECODE) in prefill.events
        assert decode.events == [PeerReturned(PREFILL)]
        assert decode.notes == ["connection to prefill broke: closed by the other end"]


def test_a_peer_that_refuses_connections_is_lost_at_once() -> None:
    with two_sides() as (prefill, decode):
        decode.peers.tell(PREFILL, ready())
        eventually(lambda: prefill.events, prefill, decode)
        prefill.peers.close()

        def a_moment_later() -> list[Event]:
            decode.now = Nanos(decode.now + SECOND // 1000)
            return decode.events

        eventually(a_moment_later, decode)
        assert decode.events == [PeerLost(PREFILL)]
        assert decode.now < SECOND


def test_a_peer_that_does_not_return_is_lost() -> None:
    with two_sides() as (prefill, decode):
        decode.peers.tell(PREFILL, ready())
        eventually(lambda: prefill.events, prefill, decode)
        decode.peers.close()
        eventually(lambda: prefill.notes, prefill)
        prefill.now = Nanos(SECOND)
        prefill.pump()
        assert PeerLost(DECODE) not in prefill.events
        prefill.now = Nanos(3 * SECOND)
        eventually(lambda: PeerLost(DECODE) in prefill.events, prefill)


def test_who_is_replaced_at_its_address_is_lost_at_once() -> None:
    with two_sides() as (prefill, decode):
        decode.peers.tell(PREFILL, ready())
        eventually(lambda: prefill.events, prefill, decode)
        reborn = Incarnation("prefill", "11")
        decode.peers.connect(ReplicaInfo(reborn, "prefill", "layout", {}, "127.0.0.1", 5, ()), FOUND_AT)
        assert decode.events[0] == PeerLost(PREFILL)


def test_two_servers_of_one_name_and_port_on_two_addresses_are_two() -> None:
    with two_sides() as (prefill, decode):
        decode.peers.tell(PREFILL, ready())
        eventually(lambda: prefill.events, prefill, decode)
        other = Side(Incarnation(PREFILL.name, "11"))
        decode.peers.connect(other.replica, ELSEWHERE)
        decode.peers.tell(other.me, ready())
        eventually(lambda: other.events, prefill, decode, other)
        assert decode.events == []
        other.peers.close()


def test_another_server_on_the_dialled_port_is_not_the_peer() -> None:
    with two_sides() as (prefill, decode):
        former = Incarnation("prefill", "9")
        decode.peers.connect(ReplicaInfo(former, "prefill", "layout", {}, "127.0.0.1", prefill.port, ()), ELSEWHERE)
        eventually(lambda: decode.events, prefill, decode)
        assert decode.events == [PeerLost(former)]


def test_silence_is_filled_with_pings_and_too_much_of_it_is_a_loss() -> None:
    with two_sides() as (prefill, decode):
        decode.peers.tell(PREFILL, ready())
        eventually(lambda: prefill.events, prefill, decode)
        for _ in range(20):
            prefill.now = decode.now = Nanos(decode.now + SECOND)
            for _ in range(5):
                prefill.pump()
                decode.pump()
        assert decode.events == []
        assert len(prefill.events) == 1
        prefill.now = Nanos(prefill.now + 6 * SECOND)
        prefill.peers.tick()
        assert prefill.events[1:] == [PeerLost(DECODE)]


def test_the_rhythm_of_pings_and_the_patience_can_be_set_and_a_slower_peer_is_given_its_time() -> None:
    quick, slow = Heartbeat(Nanos(SECOND), 1), Heartbeat(Nanos(10 * SECOND), 1)
    with two_sides(quick, slow) as (prefill, decode):
        decode.peers.tell(PREFILL, ready())
        eventually(lambda: prefill.events, prefill, decode)
        prefill.now = Nanos(19 * SECOND)
        prefill.peers.tick()
        assert prefill.events == [PeerSaid(DECODE, ready())]
        prefill.now = Nanos(21 * SECOND)
        prefill.peers.tick()
        assert prefill.events[1:] == [PeerLost(DECODE)]


def test_a_rhythm_that_nobody_keeps_is_not_believed() -> None:
    assert Heartbeat(Nanos(SECOND), 2).silence_ns(Nanos(10**18)) == 3 * MAX_PING_NS
    assert Heartbeat(Nanos(SECOND), 2).silence_ns(Nanos(-1)) == 3 * SECOND


def test_a_connection_that_is_closed_needs_no_heartbeat_to_be_noticed() -> None:
    slow = Heartbeat(Nanos(60 * SECOND), 10)
    with two_sides(slow, slow) as (prefill, decode):
        decode.peers.tell(PREFILL, ready())
        eventually(lambda: prefill.events, prefill, decode)
        prefill.peers.close()

        def is_lost() -> bool:
            decode.now = Nanos(decode.now + SECOND // 1000)
            return decode.events == [PeerLost(PREFILL)]

        eventually(is_lost, decode)
        assert decode.now < SECOND


def test_nothing_to_do_means_no_deadline_in_the_past() -> None:
    with two_sides() as (prefill, decode):
        decode.peers.tell(PREFILL, ready())
        eventually(lambda: prefill.events, prefill, decode)
        for side in (prefill, decode):
            deadline = side.peers.next_deadline()
            assert deadline is not None
            assert deadline > side.now


def test_a_ready_for_a_peer_that_was_lost_before_it_was_known_says_so_again() -> None:
    with two_sides() as (_, decode):
        decode.peers.tell(Incarnation("gone", "1"), ready())
        assert decode.events == [PeerLost(Incarnation("gone", "1"))]
        decode.peers.tell(Incarnation("gone", "1"), Release(Room(5), DECODE, "aborted"))
        assert len(decode.events) == 1


def test_a_peer_that_gives_a_name_for_its_address_is_not_looked_up() -> None:
    with two_sides() as (_, decode):
        named = Incarnation("named", "1")
        decode.peers.connect(ReplicaInfo(named, "prefill", "layout", {}, "prefill.example", 5, ()), ELSEWHERE)
        assert decode.events == [PeerLost(named)]


def test_the_first_thing_an_accepted_stranger_hears_is_who_answers() -> None:
    with two_sides() as (prefill, decode), stranger(prefill) as sock:
        heard: list[Frame] = []
        frames: CheckedFrames[Frame] = CheckedFrames(Frame)

        def listen() -> list[Frame]:
            with suppress(TimeoutError):
                heard.extend(frames.feed(sock.recv(4096)))
            return heard

        eventually(listen, prefill, decode)
        assert heard[0] == Hello(CONTROL_PROTOCOL, PREFILL, "layout")
