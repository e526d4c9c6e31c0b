"""Attackers at the data plane, on raw sockets: without the cluster's secret, without the grant's, and greedy members.

Each of them knows everything that can be guessed or read off: the owner's incarnation, its ports, room, pages and
generations.
"""

import socket
from collections.abc import Callable

import pytest
from transfer_world import (
    DECODE,
    NO_SECRET,
    PREFILL,
    SECRET,
    ServingProcess,
    Side,
    eventually,
    pair,
    target,
    transfer_threads,
)

from attackers_data import WRONG, Asker, Impostor, Target, connect, read_all, read_exactly
from data_planes import introduce, pack_read
from tandem.core.values import Cause, Incarnation
from tandem.membership import ClusterSecret
from tandem.transfer import protocol
from tandem.transfer.listener import MAX_UNPROVEN
from tandem.transfer.protocol import NO_PROOF, Status

pytestmark = pytest.mark.usefixtures("no_transfer_thread_is_left")

FABRICS = pytest.mark.parametrize("fabric", ["unix", "tcp"])
GUESSES = 311
NO_TIMEOUT_S = 600.0  # far beyond what a test waits: whatever comes, comes without a timeout


def drip(link: socket.socket, message: bytes) -> int:
    """Say it byte by byte, until the other end has closed. Returns how many bytes were said before."""
    link.settimeout(0.02)
    for said, byte in enumerate(message):
        try:
            link.sendall(bytes([byte]))
            if link.recv(1) == b"":
                return said
        except TimeoutError:
            continue
        except OSError:
            return said
    return len(message)


# --- who is no member ------------------------------------------------------------------------------------------------


@FABRICS
def test_whoever_has_not_the_clusters_secret_reads_no_byte_however_often_it_guesses(fabric: str) -> None:
    server = ServingProcess(num_pages=4, page_bytes=4096, frame_ms=0)
    try:
        where = Target(PREFILL, 4096, server.host, server.port, server.unix if fabric == "unix" else "")
        for room in range(1, GUESSES + 1):
            with Asker(where, secret=WRONG) as attacker:
                attacker.hear_challenge()
                attacker.say(attacker.hello() + pack_read(room, server.secrets[1], [0, 1], [1, 1]))
                assert read_all(attacker.link) == protocol.pack_welcome(Status.NOT_A_MEMBER, NO_PROOF)
        with Asker(where, secret=SECRET) as member:  # the same words, of somebody who may say them
            assert member.join() is Status.OK
            member.ask(1, server.secrets[1], [0, 1], [1, 1])
            assert member.answer()[0] is Status.OK
    finally:
        server.end()


@FABRICS
def test_who_is_no_member_learns_nothing_of_what_does_not_fit(fabric: str) -> None:
    with pair() as (owner, _):
        for changes in ({}, {"version": 1}, {"page_bytes": 1}, {"incarnation": bytes(16)}):
            with Asker(target(owner, fabric=fabric), secret=WRONG) as attacker:
                attacker.hear_challenge()
                welcome = attacker.say_hello(attacker.hello(**changes))
                assert (welcome.status, welcome.proof) == (Status.NOT_A_MEMBER, NO_PROOF)
                assert attacker.is_closed()


@FABRICS
def test_a_member_is_told_what_does_not_fit_with_a_proof(fabric: str) -> None:
    with pair() as (owner, _):
        for changes, status in (
            ({"version": protocol.VERSION + 1}, Status.WRONG_VERSION),
            ({"page_bytes": 1}, Status.WRONG_PAGE_BYTES),
            ({"incarnation": bytes(16)}, Status.OTHER_INCARNATION),
        ):
            with Asker(target(owner, fabric=fabric), secret=SECRET) as asker:
                asker.hear_challenge()
                welcome = asker.say_hello(asker.hello(**changes))
                assert welcome.status is status
                assert asker.is_proven(welcome)
                assert asker.is_closed()


def test_every_connection_gets_a_challenge_of_its_own() -> None:
    with pair() as (owner, _):
        challenges = set()
        for _ in range(20):
            with Asker(target(owner), secret=WRONG) as attacker:
                challenges.add(attacker.hear_challenge())
        assert len(challenges) == 20


@FABRICS
def test_what_was_recorded_on_one_connection_opens_no_other(fabric: str) -> None:
    with pair() as (owner, _):
        with Asker(target(owner, fabric=fabric), secret=SECRET) as member:
            member.hear_challenge()
            recorded = member.hello()
            assert member.say_hello(recorded).status is Status.OK
        with Asker(target(owner, fabric=fabric), secret=WRONG) as attacker:
            attacker.hear_challenge()
            assert attacker.say_hello(recorded).status is Status.NOT_A_MEMBER


def test_a_proof_covers_every_byte_of_a_hello() -> None:
    with pair() as (owner, _):
        for position in range(protocol.HELLO_BYTES):
            with Asker(target(owner), secret=SECRET) as asker:
                asker.hear_challenge()
                changed = bytearray(asker.hello())
                changed[position] ^= 1
                asker.say(bytes(changed))
                answer = read_all(asker.link)
                assert answer in (b"", protocol.pack_welcome(Status.NOT_A_MEMBER, NO_PROOF))


def test_a_challenge_that_is_passed_on_to_another_owner_proves_nothing_there() -> None:
    """The attacker has the answer of a genuine reader to the challenge of an owner, who is not the one it means."""
    with pair() as (owner, reader), Impostor() as impostor:
        other = Incarnation("prefill", "another")
        introduce(reader.transfer, other, "127.0.0.1", impostor.port, "")
        with Asker(target(owner), secret=WRONG) as attacker:
            reader.pull(1, [0], [0], bytes(8), peer=other)
            with impostor.accept() as link:
                welcome = attacker.say_hello(impostor.greet(link, attacker.hear_challenge()))
        assert welcome.status is Status.OTHER_INCARNATION
        eventually(lambda: bool(reader.transfer._reader._puller.held().live_rooms), "it still tries")
        reader.cancel(1)
        reader.wait_drained(1)


@FABRICS
def test_a_handshake_that_is_cut_short_ends_without_an_answer(fabric: str) -> None:
    with pair() as (owner, _):
        for length in (0, 1, 8, protocol.HELLO_BYTES - 1):
            with Asker(target(owner, fabric=fabric), secret=SECRET) as asker:
                asker.hear_challenge()
                asker.say(asker.hello()[:length])
                asker.link.shutdown(socket.SHUT_WR)
                assert asker.is_closed()
        eventually(lambda: not owner.transfer._owner._listener._unproven, "nothing is kept of them")


# --- who is not the owner --------------------------------------------------------------------------------------------


def own_proof(hello: bytes) -> bytes:
    """The reader's, sent back."""
    return protocol.pack_welcome(Status.OK, hello[-len(NO_PROOF) :])


def other_status(hello: bytes) -> bytes:
    """With the proof of a Welcome that says something else."""
    busy, fine = (Impostor.welcome(status, SECRET, hello) for status in (Status.BUSY, Status.OK))
    return busy[: -len(NO_PROOF)] + fine[-len(NO_PROOF) :]


FORGERIES: dict[str, Callable[[bytes], bytes]] = {
    "no proof": lambda hello: protocol.pack_welcome(Status.OK, NO_PROOF),
    "no proof of a refusal": lambda hello: protocol.pack_welcome(Status.WRONG_PAGE_BYTES, NO_PROOF),
    "proof of another secret": lambda hello: Impostor.welcome(Status.OK, WRONG, hello),
    "proof of another connection": lambda hello: Impostor.welcome(Status.OK, SECRET, bytes(len(hello))),
    "proof of the reader": own_proof,
    "proof of another status": other_status,
}


@pytest.mark.parametrize("forged", FORGERIES.values(), ids=FORGERIES)
def test_a_reader_believes_no_owner_that_does_not_prove_the_secret(forged: Callable[[bytes], bytes]) -> None:
    reader = Side(DECODE)
    with Impostor() as impostor:
        introduce(reader.transfer, PREFILL, "127.0.0.1", impostor.port, "")
        reader.pull(1, [0], [0], bytes(8))
        with impostor.accept() as link:
            link.sendall(forged(impostor.greet(link)))
            failed = reader.wait_failed(1)
            assert read_all(link) == b"", "it has asked for a page"
    reader.transfer.close()
    assert failed.cause == Cause.TRANSFER_FAILED
    assert "does not prove the secret" in failed.detail


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(100), protocol.pack_challenge(bytes(32)) + bytes(48)]
)
def test_what_is_no_data_plane_fails_the_transfer(answer: bytes) -> None:
    reader = Side(DECODE)
    with Impostor() as impostor:
        introduce(reader.transfer, PREFILL, "127.0.0.1", impostor.port, "")
        reader.pull(1, [0], [0], bytes(8))
        with impostor.accept() as link:
            link.sendall(answer)
            failed = reader.wait_failed(1)
    reader.transfer.close()
    assert failed.cause == Cause.TRANSFER_FAILED
    assert "not a data plane" in failed.detail


def test_an_owner_that_speaks_byte_by_byte_has_one_deadline_for_its_handshake() -> None:
    reader = Side(DECODE, io_timeout_s=0.3)
    with Impostor() as impostor:
        introduce(reader.transfer, PREFILL, "127.0.0.1", impostor.port, "")
        reader.pull(1, [0], [0], bytes(8))
        with impostor.accept() as link:
            said = drip(link, protocol.pack_challenge(bytes(32)))
        failed = reader.wait_failed(1)
    reader.transfer.close()
    assert said < protocol.CHALLENGE_MESSAGE_BYTES
    assert failed.cause == Cause.PEER_LOST


@FABRICS
def test_servers_with_different_secrets_name_the_reason(fabric: str) -> None:
    with pair(fabric) as (owner, _):
        reader = Side(DECODE, secret=ClusterSecret(b"the secret of some other cluster"))
        introduce(
            reader.transfer,
            PREFILL,
            owner.transfer.host,
            owner.transfer.port,
            owner.transfer.unix if fabric == "unix" else "",
        )
        reader.pull(1, [0], [0], owner.publish(1, [0]), secret=owner.secrets[1])
        failed = reader.wait_failed(1)
        reader.transfer.close()
    assert failed.cause == Cause.TRANSFER_FAILED
    assert "does not have its cluster's secret" in failed.detail


# --- members, and what they were granted -----------------------------------------------------------------------------


@FABRICS
def test_a_member_without_the_grants_secret_reads_no_byte_and_learns_not_what_is_there(fabric: str) -> None:
    with pair() as (owner, _):
        owner.publish(1, [0, 1], generation=7)
        owner.publish(2, [2], generation=1)
        for secret in (NO_SECRET, owner.secrets[2]):
            for room, page, generation in ((1, 0, 7), (1, 0, 8), (1, 5, 7), (1, 1 << 40, 7), (3, 0, 7)):
                with Asker(target(owner, fabric=fabric), secret=SECRET) as member:
                    assert member.join() is Status.OK
                    member.ask(room, secret, [page], [generation])
                    assert member.answer() == (Status.NOT_GRANTED, b"")
                    assert member.is_closed()
        assert owner.transfer.held().open_transfers == 0


def test_the_decode_that_was_granted_the_pages_fails_without_their_secret() -> None:
    with pair() as (owner, reader):
        reader.pull(1, [0], [0], owner.publish(1, [0]), secret=b"x" * 16)
        assert reader.wait_failed(1).cause == Cause.LEASE_EXPIRED


# --- places ----------------------------------------------------------------------------------------------------------


@FABRICS
def test_silent_and_dripping_connections_do_not_hold_up_a_reader(fabric: str) -> None:
    where_from = "unix" if fabric == "tcp" else "tcp"
    with pair(fabric, max_links=2) as (owner, reader):
        digests = owner.publish(1, range(40))
        crowd: list[socket.socket] = []
        for request in range(2, 42):
            for number in range(8):
                link = connect(target(owner, fabric=fabric if number % 2 else where_from))
                crowd.append(link)
                if number < 4:
                    link.sendall(b"T")
            for link in crowd[-200::20]:
                try:
                    link.sendall(b"a")
                except OSError:
                    continue  # it had to make room
            page = request - 2
            reader.pull(request, [page], [page], digests[8 * page : 8 * page + 8], room=1)
            reader.wait_landed(request, 1)
            reader.transfer.disconnect(PREFILL)  # so that every pull has to come in anew
            unix = owner.transfer.unix if fabric == "unix" else ""
            introduce(reader.transfer, PREFILL, owner.transfer.host, owner.transfer.port, unix)
            assert len(owner.transfer._owner._listener._unproven) <= MAX_UNPROVEN
        assert transfer_threads().count("kv-owner") <= 4, "who has proved nothing has no thread"
        for link in crowd:
            link.close()


def test_who_proves_nothing_has_one_deadline_however_it_drips() -> None:
    with pair(io_timeout_s=0.3) as (owner, _), Asker(target(owner), secret=SECRET) as asker:
        asker.hear_challenge()
        said = drip(asker.link, asker.hello())
        assert said < protocol.HELLO_BYTES, "it had all the time in the world"


def test_a_member_that_was_just_welcomed_keeps_its_place_until_it_has_asked() -> None:
    with pair(max_links=1) as (owner, _):
        owner.publish(1, [0])
        with Asker(target(owner), secret=SECRET) as first:
            assert first.join() is Status.OK
            for _ in range(20):
                with Asker(target(owner), secret=SECRET, reader=DECODE) as newcomer:
                    assert newcomer.join() is Status.BUSY
            first.ask(1, owner.secrets[1], [0], [1])
            assert first.answer() == (Status.OK, owner.page(0))

            def takes_the_idle_place() -> bool:
                with Asker(target(owner), secret=SECRET, reader=DECODE) as newcomer:
                    return newcomer.join() is Status.OK

            eventually(takes_the_idle_place, "the idle connection makes room")


def test_a_member_that_never_asks_loses_its_place_after_the_timeout() -> None:
    with pair(max_links=1, io_timeout_s=0.3) as (owner, reader):
        digests = owner.publish(1, [0])
        with Asker(target(owner), secret=SECRET) as silent:
            assert silent.join() is Status.OK
            reader.pull(1, [0], [0], digests)
            reader.wait_landed(1, 1)


def test_a_reader_with_many_connections_leaves_places_to_others() -> None:
    with pair(max_links=8, io_timeout_s=NO_TIMEOUT_S) as (owner, reader):
        digests = owner.publish(1, [0])
        askers = [Asker(target(owner), secret=SECRET) for _ in range(8)]
        assert [asker.join() for asker in askers] == [Status.OK] * 2 + [Status.BUSY] * 6
        reader.pull(1, [0], [0], digests)
        reader.wait_landed(1, 1)
        for asker in askers:
            asker.link.close()


def test_readers_that_are_frozen_in_the_middle_of_a_read_do_not_block_another() -> None:
    with pair(num_pages=1024, page_bytes=16384, max_links=8, io_timeout_s=NO_TIMEOUT_S) as (owner, reader):
        digests = owner.publish(1, range(1024))
        frozen = [Asker(target(owner), secret=SECRET) for _ in range(2)]
        for asker in frozen:
            assert asker.join() is Status.OK
            asker.ask(1, owner.secrets[1], range(1024), [1] * 1024)
            read_exactly(asker.link, protocol.FRAME_HEADER_BYTES)
        reader.pull(1, [0], [0], digests[:8])
        reader.wait_landed(1, 1)
        for asker in frozen:
            asker.link.close()


def test_a_reader_whose_handshake_is_ended_tries_again() -> None:
    with pair("tcp") as (owner, reader), Impostor() as impostor:
        digests = owner.publish(1, [0])
        introduce(reader.transfer, PREFILL, "127.0.0.1", impostor.port, "")
        reader.pull(1, [0], [0], digests)
        for _ in range(3):
            impostor.accept().close()
        link = impostor.accept()
        with link, socket.create_connection((owner.transfer.host, owner.transfer.port)) as far:
            link.sendall(read_exactly(far, protocol.CHALLENGE_MESSAGE_BYTES))
            hello = read_exactly(link, protocol.HELLO_BYTES)
            far.sendall(hello)
            link.sendall(read_exactly(far, protocol.WELCOME_BYTES))
            far.sendall(read_exactly(link, protocol.READ_BYTES + protocol.NAME_BYTES))
            link.sendall(read_exactly(far, protocol.FRAME_HEADER_BYTES + owner.page_bytes))
            reader.wait_landed(1, 1)


@pytest.mark.parametrize("place", ["_listener._handshake", "_lender.lease"])
def test_an_error_of_ours_ends_one_connection_and_the_next_is_served(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pair(io_timeout_s=NO_TIMEOUT_S) as (owner, reader):
        digests = owner.publish(1, [0])
        part, _, name = place.partition(".")
        broken = getattr(owner.transfer._owner, part)
        works, failures = getattr(broken, name), iter([RuntimeError("a mistake")])

        def fails_once(*args: object, **options: object) -> object:
            for error in failures:
                raise error
            return works(*args, **options)

        monkeypatch.setattr(broken, name, fails_once)
        reader.pull(1, [0], [0], digests)
        reader.wait_landed(1, 1)
