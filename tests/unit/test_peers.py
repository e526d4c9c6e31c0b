"""Control connections between nodes: who is who, what is dropped, and when a peer is lost. Real sockets, our clock."""

import errno
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

import pytest

from attackers import OTHER_SECRET, SECRET, End, dialled, end_of, framed, hello_of, nested
from tandem.core.disagg.message_checks import Bounds
from tandem.core.disagg.messages import Abort, Offer, Ready, Release
from tandem.core.events import Event, PeerLost, PeerReturned, PeerSaid
from tandem.core.kv_parts import KvGrid
from tandem.core.values import MAX_SHARDS, SECOND, Address, Cause, Cut, Incarnation, Nanos, Room
from tandem.membership import ClusterSecret
from tandem.server.node import listener
from tandem.server.node.links import MAX_PING_NS, Heartbeat, Limits
from tandem.server.node.local_peer import SelectorPoller
from tandem.server.node.peers import Peers
from tandem.server.node.session import CONTROL_PROTOCOL, Session
from tandem.server.wire import DataEndpoint, ReplicaInfo

PREFILL = Incarnation("prefill", "10")
DECODE = Incarnation("decode", "20")
START = Nanos(0)
FOUND_AT = Address("127.0.0.1", 8998)
ELSEWHERE = Address("127.0.0.2", 8998)
LOCALHOST = Address("localhost", 8998)
DATA = DataEndpoint("127.0.0.1", 7001, "@pages")
UNCUT, GRID = Cut(), KvGrid(num_layers=2, num_kv_heads=2)


@dataclass
class Side:
    """One node's end, pumped by hand."""

    me: Incarnation
    now: Nanos = START
    events: list[Event] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    reached: list[tuple[Incarnation, Cut, tuple[DataEndpoint, ...]]] = field(default_factory=list)
    poller: SelectorPoller = field(default_factory=SelectorPoller)
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    secret: ClusterSecret = SECRET
    shards: tuple[DataEndpoint, ...] = (DATA,)
    cut: Cut = UNCUT

    def __post_init__(self) -> None:
        self.peers = Peers(
            self.me,
            "layout",
            self.secret,
            shards=self.shards,
            bounds=Bounds(512, lambda extra: True, lambda extra: True, GRID, self.cut),
            poller=self.poller,
            report=self.events.append,
            reach=lambda who, cut, shards: self.reached.append((who, cut, shards)),
            clock=lambda: self.now,
            note=self.notes.append,
            heartbeat=self.heartbeat,
        )
        self.port = self.peers.listen("127.0.0.1")

    @property
    def replica(self) -> ReplicaInfo:
        return ReplicaInfo(self.me, "prefill", "layout", {}, "127.0.0.1", self.port, ())

    @property
    def said(self) -> list[Event]:
        return [event for event in self.events if isinstance(event, PeerSaid)]

    @property
    def lost(self) -> list[Incarnation]:
        return [event.peer for event in self.events if isinstance(event, PeerLost)]

    @property
    def why(self) -> str:
        """Of the last loss."""
        return [event.detail for event in self.events if isinstance(event, PeerLost)][-1]

    def is_connected(self, who: Incarnation) -> bool:
        peer = self.peers.links.peers.get(who)
        return peer is not None and peer.link is not None

    def pump(self) -> None:
        self.poller.poll(0.002)
        self.peers.tick()
        self.peers.flush()


def ready(*, source: Incarnation = DECODE, room: int = 5) -> Ready:
    return Ready(Room(room), 1, source, PREFILL, "layout", 100)


def offer(*, pages: tuple[int, ...] = (1,), generations: tuple[int, ...] = (1,)) -> Offer:
    return Offer(Room(5), 1, PREFILL, 0, pages, generations, (b"8 bytes.",), (b"secret",), Nanos(SECOND), 1)


def eventually(condition: Callable[[], object], *sides: Side) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        for side in sides:
            side.pump()
        assert time.monotonic() < deadline, [(side.me, side.events, side.notes) for side in sides]


def pass_time(seconds: int, *sides: Side) -> None:
    """In steps in which everybody is heard."""
    for _ in range(seconds):
        for side in sides:
            side.now = Nanos(side.now + SECOND)
        for _ in range(5):
            for side in sides:
                side.pump()


def pumped(sides: tuple[Side, ...]) -> Callable[[], None]:
    def pump() -> None:
        for side in sides:
            side.pump()

    return pump


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
def joined(*rhythms: Heartbeat) -> Iterator[tuple[Side, Side]]:
    """The same, and decode's first word has come over."""
    with two_sides(*rhythms) as (prefill, decode):
        decode.peers.tell(PREFILL, ready())
        eventually(lambda: prefill.events, prefill, decode)
        yield prefill, decode


@contextmanager
def plain(side: Side) -> Iterator[socket.socket]:
    """A connection of somebody who says nothing by itself."""
    with socket.create_connection(("127.0.0.1", side.port)) as sock:
        sock.settimeout(0.01)
        yield sock


@contextmanager
def impostor(*, secret: ClusterSecret = OTHER_SECRET, source: Incarnation = PREFILL) -> Iterator["Impostor"]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        sock.settimeout(0.01)
        it = Impostor(sock, secret, source)
        try:
            yield it
        finally:
            for end in it.ends:
                end.sock.close()


@dataclass
class Impostor:
    """Listens where a bootstrap server of its own says that a peer is."""

    listener: socket.socket
    secret: ClusterSecret
    source: Incarnation
    ends: list[End] = field(default_factory=list)

    def replica(self, who: Incarnation = PREFILL) -> ReplicaInfo:
        return ReplicaInfo(who, "prefill", "layout", {}, "127.0.0.1", self.listener.getsockname()[1], (DATA,))

    def answer(self) -> bool:
        """Whether somebody has come. Whoever does hears a hello and a greeting, as well as they can be made here."""
        with suppress(TimeoutError):
            sock, _ = self.listener.accept()
            self.ends.append(end_of(sock, self.secret, self.source, is_dialler=False))
        for end in self.ends:
            if not end.is_closed:
                end.read()
        return bool(self.ends)


def is_closed(sock: socket.socket) -> bool:
    try:
        while sock.recv(65536):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return True


# --- messages --------------------------------------------------------------------------------------------------------


def test_what_is_told_while_the_dial_is_under_way_arrives() -> None:
    with two_sides() as (prefill, decode):
        decode.peers.tell(PREFILL, ready())
        eventually(lambda: prefill.events, prefill, decode)
        assert prefill.events == [PeerSaid(DECODE, ready())]


def test_the_one_that_was_dialled_answers_on_the_same_connection() -> None:
    answer = Release(Room(5), PREFILL, "done")
    with joined() as (prefill, decode):
        prefill.peers.tell(DECODE, answer)
        eventually(lambda: decode.events, prefill, decode)
        assert decode.events == [PeerSaid(PREFILL, answer)]


def test_a_tell_without_a_connection_is_dropped() -> None:
    with two_sides() as (prefill, _):
        prefill.peers.tell(Incarnation("nobody", "1"), Release(Room(5), PREFILL, "done"))
        prefill.pump()
        assert prefill.events == []


def test_a_member_that_speaks_in_anothers_name_loses_its_connection_and_is_not_believed() -> None:
    liar = Incarnation("liar", "1")
    with joined() as (prefill, decode), dialled(prefill.port, SECRET, liar) as end:
        end.join(pumped((prefill, decode)))
        end.say(ready(source=DECODE, room=6))
        eventually(lambda: end.read() and end.is_closed, prefill, decode)
        assert prefill.said == [PeerSaid(DECODE, ready())]
        assert prefill.is_connected(DECODE)


def test_a_message_out_of_bounds_fails_its_room_and_the_connection_stays() -> None:
    with two_sides() as (prefill, decode), dialled(prefill.port, SECRET, DECODE) as end:
        end.join(pumped((prefill, decode)))
        end.say(Ready(Room(5), 1, DECODE, PREFILL, "layout", -1), ready(room=6))
        eventually(lambda: len(prefill.said) == 2, prefill)
        failed = Release(Room(5), DECODE, "aborted", Cause.PROTOCOL, 1, "prompt_len is out of bounds")
        assert prefill.said == [PeerSaid(DECODE, failed), PeerSaid(DECODE, ready(room=6))]


def test_an_offer_out_of_bounds_fails_its_room_and_the_connection_stays() -> None:
    with impostor(secret=SECRET) as prefill:
        decode = Side(DECODE)
        decode.peers.connect(prefill.replica(), FOUND_AT)
        eventually(prefill.answer, decode)
        (end,) = prefill.ends
        eventually(end.read, decode)
        end.say(offer(generations=(1, 2)), offer())
        eventually(lambda: len(decode.said) == 2, decode)
        failed = Abort(Room(5), PREFILL, Cause.PROTOCOL, "2 generations for 1 pages")
        assert decode.said == [PeerSaid(PREFILL, failed), PeerSaid(PREFILL, offer())]
        decode.peers.close()


def test_a_message_about_no_room_costs_the_connection() -> None:
    with two_sides() as (prefill, decode), dialled(prefill.port, SECRET, DECODE) as end:
        end.join(pumped((prefill, decode)))
        end.say(ready(room=0))
        eventually(lambda: end.read() and end.is_closed, prefill)
        assert prefill.said == []


# --- who may --------------------------------------------------------------------------------------------------------


def test_bytes_that_are_no_hello_are_dropped() -> None:
    with two_sides() as (prefill, decode):
        for words in (
            framed(b""),
            framed(b"\xc1"),
            framed(b"\x80"),
            (513).to_bytes(4),
            bytes(range(256)) * 16,
            b"GET / HTTP/1.1\r\n\r\n",
            nested(10),
            nested(1200),
        ):
            with plain(prefill) as sock:
                sock.sendall(words)
                eventually(lambda sock=sock: is_closed(sock), prefill, decode)
        assert prefill.events == []


def test_a_peer_of_another_protocol_is_dropped_and_the_log_says_which() -> None:
    with two_sides() as (prefill, decode), plain(prefill) as sock:
        body = Session(SECRET, hello_of(DECODE, protocol=99), None, is_dialler=True).outgoing  # type: ignore
        sock.sendall(body)
        eventually(lambda: is_closed(sock), prefill, decode)
        assert f"speaks control protocol 99, here it is {CONTROL_PROTOCOL}" in prefill.notes[0]


def test_decodes_name_without_the_secret_gets_no_message_and_does_not_take_its_place() -> None:
    with joined() as (prefill, decode), dialled(prefill.port, OTHER_SECRET, DECODE) as end:
        eventually(lambda: end.read() or end.is_closed, prefill, decode)
        assert end.trouble == "does not hold this cluster's secret (--cluster-secret-file)"
        end.greet()  # its best guess
        eventually(lambda: is_closed(end.sock), prefill, decode)
        prefill.peers.tell(DECODE, Release(Room(7), PREFILL, "done"))
        eventually(lambda: decode.said, prefill, decode)
        assert prefill.events == [PeerSaid(DECODE, ready())]
        assert decode.lost == prefill.lost == []
        assert end.heard == []
        assert "does not hold this cluster's secret" in prefill.notes[0]


def test_a_connection_that_has_proven_nothing_takes_nobodys_place_however_long_it_lasts() -> None:
    with joined() as (prefill, decode), dialled(prefill.port, SECRET, DECODE) as end:
        eventually(end.read, prefill, decode)  # it could, and does not
        assert prefill.is_connected(DECODE)
        prefill.peers.tell(DECODE, Release(Room(7), PREFILL, "done"))
        eventually(lambda: decode.said, prefill, decode)
        assert [type(message).__name__ for message in end.read()] == ["Greeting"]


def recorded_handshake(prefill: Side, *sides: Side) -> bytes:
    """All that a genuine decode sends before and with its first message."""
    with dialled(prefill.port, SECRET, DECODE) as end:
        sent = bytearray(end.session._hello)
        sent[:0] = len(sent).to_bytes(4)
        eventually(end.read, prefill, *sides)
        sent += end.greet()
        end.session.say(ready())
        sent += end.flush()
        eventually(lambda: prefill.said, prefill, *sides)
    return bytes(sent)


def test_a_recorded_handshake_is_refused() -> None:
    prefill = Side(PREFILL)
    recorded = recorded_handshake(prefill)
    eventually(lambda: not prefill.is_connected(DECODE), prefill)
    with plain(prefill) as sock:
        sock.sendall(recorded)
        eventually(lambda: is_closed(sock), prefill)
    assert len(prefill.said) == 1
    assert not prefill.is_connected(DECODE)
    prefill.peers.close()


def test_a_servers_own_words_said_back_to_it_prove_nothing() -> None:
    prefill = Side(PREFILL)
    with plain(prefill) as sock:
        heard = bytearray()

        def echoes() -> bool:
            try:
                data = sock.recv(4096)
            except TimeoutError:
                return False
            except ConnectionError:
                return True
            heard.extend(data)
            sock.sendall(data)
            return not data

        eventually(echoes, prefill)
    assert heard
    assert prefill.events == []
    assert not prefill.peers.links.peers
    prefill.peers.close()


def test_a_dial_that_is_answered_with_its_own_words_proves_nothing() -> None:
    with impostor() as mirror:
        decode = Side(DECODE)
        decode.peers.connect(mirror.replica(), FOUND_AT)
        decode.peers.tell(PREFILL, ready())

        def mirrors() -> bool:
            if not mirror.ends:
                mirror.answer()
                return False
            sock = mirror.ends[0].sock
            with suppress(TimeoutError, ConnectionError):
                sock.sendall(sock.recv(4096))
            return bool(decode.lost)

        eventually(mirrors, decode)
        assert decode.lost == [PREFILL]
        decode.peers.close()


def test_a_server_that_is_led_to_itself_does_not_take_itself_for_a_peer() -> None:
    prefill = Side(PREFILL)
    prefill.peers.connect(prefill.replica, FOUND_AT)
    eventually(lambda: prefill.events, prefill)
    assert prefill.lost == [PREFILL]
    assert prefill.why == "is this server itself"
    prefill.peers.close()


def test_one_flipped_bit_on_the_way_ends_the_connection_and_no_message_is_made_of_it() -> None:
    with two_sides() as (prefill, decode), dialled(prefill.port, SECRET, DECODE) as end:
        end.join(pumped((prefill, decode)))
        end.session.say(ready(room=5))
        end.session.say(ready(room=6))
        flipped = bytearray(end.session.outgoing)
        flipped[-20] ^= 1
        end.session.outgoing = flipped
        end.flush()
        eventually(lambda: is_closed(end.sock), prefill)
        assert prefill.said == [PeerSaid(DECODE, ready(room=5))]
        assert "connection to decode broke: bytes were changed, lost or repeated on their way" in prefill.notes


# --- those who say nothing -------------------------------------------------------------------------------------------


def test_a_connection_that_says_nothing_is_dropped() -> None:
    with two_sides() as (prefill, decode), plain(prefill) as sock:
        eventually(lambda: prefill.peers.links.unidentified, prefill)
        for _ in range(3):
            prefill.pump()
        prefill.now = decode.now = Nanos(6 * SECOND)
        eventually(lambda: is_closed(sock), prefill, decode)


def test_a_hello_byte_by_byte_gets_no_more_time_than_silence() -> None:
    prefill = Side(PREFILL)
    with plain(prefill) as sock:
        for byte in bytes((0, 0, 1)):
            sock.sendall(bytes([byte]))
            for _ in range(3):
                prefill.pump()
            prefill.now = Nanos(prefill.now + 2 * SECOND)
        eventually(lambda: is_closed(sock), prefill)
    prefill.peers.close()


@pytest.mark.parametrize("drips", [False, True])
def test_a_flood_of_connections_that_prove_nothing_does_not_shut_out_a_peer(drips: bool) -> None:
    """Also not when it goes on meanwhile, and whatever it says: here more come than are ever kept, without end."""
    with two_sides() as (prefill, decode), ExitStack() as flood:

        def come() -> None:
            sock = flood.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(("127.0.0.1", prefill.port))

        def one_more() -> bool:
            come()
            decode.now = Nanos(decode.now + SECOND // 1000)
            return bool(prefill.said)

        for _ in range(Limits().unidentified + 50):
            come()
            prefill.pump()
        assert len(prefill.peers.links.unidentified) == Limits().unidentified
        if drips:
            for wire in prefill.peers.links.unidentified:
                wire.session._splitter._buffer += b"\0"
        decode.peers.tell(PREFILL, ready())
        eventually(one_more, prefill, decode)
        assert prefill.said == [PeerSaid(DECODE, ready())]
        assert len(prefill.peers.links.unidentified) <= Limits().unidentified


def test_what_an_unidentified_connection_may_make_us_keep_is_small() -> None:
    prefill = Side(PREFILL)
    with dialled(prefill.port, OTHER_SECRET, DECODE) as end:
        eventually(lambda: end.read() or end.is_closed, prefill)
        (wire,) = prefill.peers.links.unidentified
        end.sock.sendall((4096).to_bytes(4) + bytes(4000))
        eventually(lambda: len(wire.session._splitter._buffer) == 4004, prefill)
        end.sock.sendall(bytes(1 << 16))
        eventually(lambda: is_closed(end.sock), prefill)
    prefill.peers.close()


def test_without_a_file_descriptor_the_oldest_that_proves_nothing_gives_way_and_then_it_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prefill = Side(PREFILL)
    assert prefill.peers._listener is not None
    with plain(prefill) as first, plain(prefill):
        eventually(lambda: prefill.peers.links.unidentified, prefill)
        calls: list[int] = []

        class Exhausted:
            def accept(self) -> tuple[socket.socket, object]:
                calls.append(1)
                raise OSError(errno.EMFILE, "too many open files")

        real = prefill.peers._listener.sock
        listening = prefill.peers._listener
        monkeypatch.setattr(listening, "sock", Exhausted())
        listening._accept(0)
        assert is_closed(first)
        assert listening.resume_at is None
        monkeypatch.setattr(listening.poller, "unwatch", lambda sock: SelectorPoller.unwatch(listening.poller, real))
        for _ in range(Limits().unidentified):
            if listening.resume_at is None:
                listening._accept(0)
        assert listening.resume_at == listener.PAUSE_NS
        assert prefill.peers.next_deadline() == listener.PAUSE_NS
        monkeypatch.undo()
        with plain(prefill) as third:
            prefill.now = Nanos(listener.PAUSE_NS)
            eventually(lambda: prefill.peers.links.unidentified, prefill)
            assert not is_closed(third)
    prefill.peers.close()


def test_the_log_is_not_filled_by_those_who_prove_nothing() -> None:
    prefill = Side(PREFILL)
    with socket.create_connection(("127.0.0.1", prefill.port)):  # who only looks whether somebody listens
        eventually(lambda: prefill.peers.links.unidentified, prefill)
    eventually(lambda: not prefill.peers.links.unidentified, prefill)
    assert prefill.notes == []
    for _ in range(5):
        with dialled(prefill.port, OTHER_SECRET, DECODE) as end:
            eventually(lambda end=end: end.read() or end.is_closed, prefill)
            end.greet()
            eventually(lambda end=end: is_closed(end.sock), prefill)
    assert len(prefill.notes) == 1
    prefill.now = Nanos(11 * SECOND)
    with dialled(prefill.port, OTHER_SECRET, Incarnation("two\nlines", "1")) as end:
        eventually(lambda: is_closed(end.sock), prefill)
    assert len(prefill.notes) == 2
    assert prefill.notes[1].endswith("(4 more before it)")
    assert "\n" not in prefill.notes[1]
    prefill.peers.close()


# --- where a peer is -------------------------------------------------------------------------------------------------


def test_a_prefill_of_another_secret_is_lost_at_once_and_the_reason_names_the_secret() -> None:
    prefill, decode = Side(PREFILL, secret=OTHER_SECRET), Side(DECODE)
    decode.peers.connect(prefill.replica, FOUND_AT)
    decode.peers.tell(PREFILL, ready())
    eventually(lambda: decode.events, prefill, decode)
    assert decode.lost == [PREFILL]
    assert decode.why == "does not hold this cluster's secret (--cluster-secret-file)"
    eventually(lambda: prefill.notes, prefill, decode)
    assert "says it is decode was dropped: closed the connection before both had proven" in prefill.notes[0]
    for side in (prefill, decode):
        side.peers.close()


def test_where_a_connected_peer_is_dialled_is_not_changed_by_another_address() -> None:
    with joined() as (prefill, decode), impostor() as elsewhere:
        decode.peers.connect(elsewhere.replica(), ELSEWHERE)
        decode.peers.connect(ReplicaInfo(Incarnation("other", "9"), "prefill", "", {}, "x", 1, ()), ELSEWHERE)
        prefill.peers.tell(DECODE, Release(Room(7), PREFILL, "done"))
        eventually(lambda: decode.said, prefill, decode)
        assert PREFILL not in decode.lost
        assert not elsewhere.answer()


def test_a_false_endpoint_that_was_told_first_holds_up_nobody() -> None:
    with impostor() as silent, impostor() as wrong:
        prefill, decode = Side(PREFILL), Side(DECODE)
        decode.peers.connect(silent.replica(), ELSEWHERE)
        decode.peers.connect(wrong.replica(), LOCALHOST)
        decode.peers.tell(PREFILL, ready())
        eventually(wrong.answer, decode)
        decode.peers.connect(prefill.replica, FOUND_AT)
        eventually(lambda: prefill.said, prefill, decode)
        assert decode.now == START, "nobody waited for the silent one"
        assert decode.events == []
        pass_time(6, prefill, decode)
        prefill.peers.tell(DECODE, Release(Room(7), PREFILL, "done"))
        eventually(lambda: decode.said, prefill, decode)
        assert decode.lost == []
        for side in (prefill, decode):
            side.peers.close()


def test_an_impostor_takes_the_requests_of_its_own_address_and_then_the_peer_is_reached_elsewhere() -> None:
    with impostor() as wrong:
        prefill, decode = Side(PREFILL), Side(DECODE)
        decode.peers.connect(wrong.replica(), ELSEWHERE)
        eventually(lambda: wrong.answer() and decode.lost, decode)
        assert decode.lost == [PREFILL]
        decode.peers.connect(prefill.replica, FOUND_AT)
        decode.peers.tell(PREFILL, ready())
        eventually(lambda: prefill.said, prefill, decode)
        assert decode.lost == [PREFILL]
        for side in (prefill, decode):
            side.peers.close()


def test_when_a_peer_ends_an_address_that_never_was_right_does_not_delay_its_loss() -> None:
    with joined() as (prefill, decode), impostor() as silent:
        decode.peers.connect(silent.replica(), ELSEWHERE)
        prefill.peers.close()

        def a_moment_later() -> bool:
            decode.now = Nanos(decode.now + SECOND // 1000)
            return bool(decode.lost)

        eventually(a_moment_later, decode)
        assert decode.lost == [PREFILL]
        assert decode.now < SECOND


def test_a_peer_for_whom_two_addresses_vouch_is_lost_when_neither_does() -> None:
    with joined() as (prefill, decode):
        decode.peers.connect(prefill.replica, LOCALHOST)
        other = Side(Incarnation("other", "11"))
        decode.peers.connect(other.replica, LOCALHOST)
        assert decode.events == []
        decode.peers.connect(other.replica, FOUND_AT)
        assert decode.lost == [PREFILL]
        other.peers.close()


def test_two_endpoints_of_one_peer_are_one_connection() -> None:
    prefill, decode = Side(PREFILL), Side(DECODE)
    second = socket.create_server(("127.0.0.1", 0))
    second.setblocking(False)
    assert prefill.peers._listener is not None
    prefill.poller.watch(second, 1, lambda mask: prefill.peers._accepted(second.accept()[0]))
    decode.peers.connect(prefill.replica, FOUND_AT)
    port = second.getsockname()[1]
    decode.peers.connect(ReplicaInfo(PREFILL, "prefill", "layout", {}, "127.0.0.1", port, ()), LOCALHOST)
    decode.peers.tell(PREFILL, ready())
    eventually(lambda: prefill.said and not decode.peers.links.peers[PREFILL].dials, prefill, decode)
    for number in range(6, 10):
        decode.peers.tell(PREFILL, ready(room=number))
        eventually(lambda number=number: len(prefill.said) == number - 4, prefill, decode)
    assert decode.events == []
    assert len(prefill.events) == 5
    prefill.poller.unwatch(second)
    second.close()
    for side in (prefill, decode):
        side.peers.close()


def test_many_lives_that_nobody_reaches_are_not_all_kept() -> None:
    with joined() as (prefill, decode), impostor() as silent:
        decode.peers.links.limits = Limits(unidentified=3)
        for number in range(10):
            decode.peers.connect(silent.replica(Incarnation("ghost", str(number))), Address("127.0.0.1", 9000 + number))
        assert len(decode.peers.links.peers) == 4
        assert len(decode.lost) == 7
        decode.peers.tell(PREFILL, ready(room=6))
        eventually(lambda: len(prefill.said) == 2, prefill, decode)


# --- data endpoints --------------------------------------------------------------------------------------------------


def test_where_pages_are_read_is_told_by_the_peer_itself_and_not_by_a_bootstrap_server() -> None:
    prefill, decode = Side(PREFILL), Side(DECODE)
    decode.peers.connect(
        ReplicaInfo(PREFILL, "prefill", "layout", {}, "127.0.0.1", prefill.port, (DataEndpoint("127.0.0.9", 9),)),
        FOUND_AT,
    )
    eventually(lambda: decode.reached, prefill, decode)
    assert decode.reached == [(PREFILL, UNCUT, (DATA,))]
    assert prefill.reached == []
    for side in (prefill, decode):
        side.peers.close()


def test_a_data_plane_that_listens_everywhere_is_where_its_node_was_dialled() -> None:
    everywhere = tuple(DataEndpoint(host, 7001) for host in ("0.0.0.0",))
    prefill, decode = Side(PREFILL, shards=everywhere), Side(DECODE)
    decode.peers.connect(prefill.replica, FOUND_AT)
    eventually(lambda: decode.reached, prefill, decode)
    assert decode.reached == [(PREFILL, UNCUT, (DataEndpoint("127.0.0.1", 7001),))]
    for side in (prefill, decode):
        side.peers.close()


@pytest.mark.parametrize(
    ("shards", "why"),
    [
        ((), "tells of 0 data endpoints; its cut has 1"),
        ((DATA, DATA), "tells of 2 data endpoints; its cut has 1"),
        ((DataEndpoint("prefill.example", 1),), "tells of a data endpoint that is no address"),
        ((DataEndpoint("127.0.0.1", 0),), "tells of a data endpoint that is none"),
        ((DataEndpoint("127.0.0.1", 1 << 16),), "Expected `int` <= 65535"),
        ((DataEndpoint("127.0.0.1", 1, "@" + "x" * 107),), "Expected `str` of length <= 107"),
    ],
)
def test_data_endpoints_that_cannot_be_are_refused_by_name(shards: tuple[DataEndpoint, ...], why: str) -> None:
    prefill, decode = Side(PREFILL, shards=shards), Side(DECODE)
    decode.peers.connect(prefill.replica, FOUND_AT)
    eventually(lambda: decode.events, prefill, decode)
    assert why in decode.why
    assert decode.reached == []
    for side in (prefill, decode):
        side.peers.close()


@pytest.mark.parametrize("cut", [Cut(pp_size=2), Cut(cp_size=MAX_SHARDS)], ids=lambda cut: cut.name)
def test_a_prefill_that_is_cut_otherwise_is_reached_with_all_its_workers(cut: Cut) -> None:
    shards = (DATA,) * cut.num_shards
    prefill, decode = Side(PREFILL, shards=shards, cut=cut), Side(DECODE)
    decode.peers.connect(prefill.replica, FOUND_AT)
    eventually(lambda: decode.reached or decode.events, prefill, decode)
    assert decode.reached == [(PREFILL, cut, shards)]
    for side in (prefill, decode):
        side.peers.close()


@pytest.mark.parametrize(
    ("cut", "why"),
    [
        (Cut(pp_size=3), "is cut in a way in which this model cannot be: TP 1 x PP 3"),
        (Cut(tp_size=0), "says a greeting that is none"),
        (Cut(cp_size=0), "says a greeting that is none"),
        (Cut(tp_size=16, cp_size=17), "says a greeting that is none"),
        (Cut(tp_size=257), "says a greeting that is none"),
    ],
)
def test_a_cut_that_cannot_be_is_refused_by_name(cut: Cut, why: str) -> None:
    prefill, decode = Side(PREFILL, shards=(DATA,) * min(cut.num_shards, 3), cut=cut), Side(DECODE)
    decode.peers.connect(prefill.replica, FOUND_AT)
    eventually(lambda: decode.events, prefill, decode)
    assert why in decode.why
    assert decode.reached == []
    for side in (prefill, decode):
        side.peers.close()


# --- losses and returns ----------------------------------------------------------------------------------------------


def test_a_broken_connection_is_dialled_again_and_nobody_is_lost() -> None:
    with joined() as (prefill, decode):
        link = prefill.peers.links.peers[DECODE].link
        assert link is not None
        prefill.peers.links.broken(link, "cut by the test", prefill.now)

        def has_returned() -> bool:
            decode.now = prefill.now = Nanos(decode.now + SECOND // 1000)
            return prefill.is_connected(DECODE)

        eventually(has_returned, prefill, decode)
        decode.peers.tell(PREFILL, ready())
        eventually(lambda: [type(event) for event in prefill.events].count(PeerSaid) == 2, prefill, decode)
        assert PeerReturned(DECODE) in prefill.events
        assert decode.events == [PeerReturned(PREFILL)]
        assert decode.notes == ["connection to prefill broke: closed by the other end"]


def test_a_peer_that_refuses_connections_is_lost_at_once() -> None:
    with joined() as (prefill, decode):
        prefill.peers.close()

        def a_moment_later() -> list[Event]:
            decode.now = Nanos(decode.now + SECOND // 1000)
            return decode.events

        eventually(a_moment_later, decode)
        assert decode.lost == [PREFILL]
        assert decode.now < SECOND


def test_a_peer_that_does_not_return_is_lost() -> None:
    with joined() as (prefill, decode):
        decode.peers.close()
        eventually(lambda: prefill.notes, prefill)
        prefill.now = Nanos(SECOND)
        prefill.pump()
        assert prefill.lost == []
        prefill.now = Nanos(3 * SECOND)
        eventually(lambda: prefill.lost, prefill)


def test_who_is_replaced_at_its_address_is_lost_at_once() -> None:
    with joined() as (prefill, decode):
        reborn = Incarnation(prefill.me.name, "11")
        decode.peers.connect(ReplicaInfo(reborn, "prefill", "layout", {}, "127.0.0.1", 5, ()), FOUND_AT)
        assert decode.lost == [PREFILL]


def test_two_servers_of_one_name_and_port_on_two_addresses_are_two() -> None:
    with joined() as (prefill, decode):
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
        assert decode.lost == [former]


def test_silence_is_filled_with_pings_and_too_much_of_it_is_a_loss() -> None:
    with joined() as (prefill, decode):
        pass_time(20, prefill, decode)
        assert decode.events == []
        assert len(prefill.events) == 1
        prefill.now = Nanos(prefill.now + 6 * SECOND)
        prefill.peers.tick()
        assert prefill.lost == [DECODE]


def test_the_rhythm_of_pings_and_the_patience_can_be_set_and_a_slower_peer_is_given_its_time() -> None:
    quick, slow = Heartbeat(Nanos(SECOND), 1), Heartbeat(Nanos(10 * SECOND), 1)
    with joined(quick, slow) as (prefill, _):
        prefill.now = Nanos(19 * SECOND)
        prefill.peers.tick()
        assert prefill.events == [PeerSaid(DECODE, ready())]
        prefill.now = Nanos(21 * SECOND)
        prefill.peers.tick()
        assert prefill.lost == [DECODE]


def test_a_rhythm_that_nobody_keeps_is_not_believed() -> None:
    assert Heartbeat(Nanos(SECOND), 2).silence_ns(Nanos(10**18)) == 3 * MAX_PING_NS
    assert Heartbeat(Nanos(SECOND), 2).silence_ns(Nanos(-1)) == 3 * SECOND


def test_a_connection_that_is_closed_needs_no_heartbeat_to_be_noticed() -> None:
    slow = Heartbeat(Nanos(60 * SECOND), 10)
    with joined(slow, slow) as (prefill, decode):
        prefill.peers.close()

        def is_lost() -> bool:
            decode.now = Nanos(decode.now + SECOND // 1000)
            return decode.lost == [PREFILL]

        eventually(is_lost, decode)
        assert decode.now < SECOND


def test_nothing_to_do_means_no_deadline_in_the_past() -> None:
    with joined() as (prefill, decode):
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
        assert decode.lost == [named]
        assert decode.why == "names prefill.example, which is no address"
