"""Frames: what goes in comes out, whatever the pieces; what is no frame is an error; nothing grows without end."""

import socket
import threading
from contextlib import suppress

import pytest

from tandem.core.events import AbortRequested
from tandem.core.values import RequestId
from tandem.server import wire
from tandem.server.channel import (
    BlockingChannel,
    ChannelClosed,
    ChannelFull,
    CheckedFrames,
    Frames,
    MalformedFrame,
    PolledChannel,
    append_checked_frame,
    frame,
)

QUERIES = [wire.Query(number, "x" * number) for number in range(40)]


def frames() -> Frames[wire.ApiToNode]:
    return Frames(wire.ApiToNode, max_frame_bytes=1 << 12)


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


@pytest.mark.parametrize("size", [1, 3, 7, 64, 1 << 20])
def test_messages_come_out_in_order_whatever_the_pieces_are(size: int) -> None:
    data = b"".join(map(frame, QUERIES))
    parser = frames()
    got = [message for start in range(0, len(data), size) for message in parser.feed(data[start : start + size])]
    assert got == QUERIES


def test_a_message_of_the_core_travels_as_it_is() -> None:
    abort = AbortRequested(RequestId(7))
    assert list(frames().feed(frame(abort))) == [abort]


def test_a_frame_beyond_the_largest_size_is_refused_before_its_bytes_come() -> None:
    with pytest.raises(MalformedFrame, match="4097 bytes"):
        list(frames().feed((4097).to_bytes(4)))


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x80", frame(wire.Shutdown())[4:-1], b"\x81\xa4type\xa6Nobody"])
def test_bytes_that_are_no_message_are_an_error(body: bytes) -> None:
    with pytest.raises(MalformedFrame):
        list(frames().feed(len(body).to_bytes(4) + body))


def checked(*messages: wire.Query) -> list[bytes]:
    """The frames of one connection between servers."""
    found, check = [], 0
    for message in messages:
        buffer = bytearray()
        check = append_checked_frame(buffer, message, check)
        found.append(bytes(buffer))
    return found


def taken(data: bytes) -> list[wire.ApiToNode]:
    """What a receiver takes for messages before it gives the connection up."""
    parser: CheckedFrames[wire.ApiToNode] = CheckedFrames(wire.ApiToNode, max_frame_bytes=1 << 20)
    found: list[wire.ApiToNode] = []
    with suppress(MalformedFrame):
        for message in parser.feed(data):
            found.append(message)  # not `extend`, which drops what came before the error
    return found


@pytest.mark.parametrize("size", [1, 3, 7, 64, 1 << 20])
def test_checked_messages_come_out_in_order_whatever_the_pieces_are(size: int) -> None:
    data = b"".join(checked(*QUERIES))
    parser: CheckedFrames[wire.ApiToNode] = CheckedFrames(wire.ApiToNode)
    got = [message for start in range(0, len(data), size) for message in parser.feed(data[start : start + size])]
    assert got == QUERIES


def test_a_flipped_bit_anywhere_is_never_taken_for_another_message() -> None:
    first, second = checked(QUERIES[3], QUERIES[5])
    for bit in range(8 * len(first)):
        data = bytearray(first + second)
        data[bit // 8] ^= 1 << bit % 8
        parser: CheckedFrames[wire.ApiToNode] = CheckedFrames(wire.ApiToNode, max_frame_bytes=1 << 20)
        with pytest.raises(MalformedFrame, match="changed"):
            list(parser.feed(bytes(data)))


def test_a_checked_frame_that_is_missing_or_comes_twice_ends_the_connection() -> None:
    first, second, third = checked(*QUERIES[:3])
    assert taken(first + first + second) == QUERIES[:1]
    assert taken(first + third) == QUERIES[:1]
    assert taken(second) == []


def test_messages_before_a_malformed_one_are_taken_once() -> None:
    parser = frames()
    data = frame(QUERIES[1]) + (1).to_bytes(4) + b"\xc1"
    feed = parser.feed(data)
    assert next(feed) == QUERIES[1]
    with pytest.raises(MalformedFrame):
        next(feed)


def test_a_reader_that_does_not_read_cannot_make_memory_grow() -> None:
    ours, theirs = pair()
    channel: PolledChannel[wire.ApiToNode] = PolledChannel(ours, wire.ApiToNode, max_pending_bytes=1 << 16)

    def send_much() -> None:
        for _ in range(1000):
            channel.send(wire.Query(1, "x" * 4096))
            channel.flush()

    with theirs, pytest.raises(ChannelFull):
        send_much()
    assert channel.pending_bytes < (1 << 16) + 8192
    channel.close()


def test_what_the_kernel_did_not_take_is_written_later_in_order() -> None:
    ours, theirs = pair()
    sender: PolledChannel[wire.ApiToNode] = PolledChannel(ours, wire.ApiToNode)
    reader: PolledChannel[wire.ApiToNode] = PolledChannel(theirs, wire.ApiToNode)
    sent = [wire.Query(number, "x" * 10_000) for number in range(200)]
    for message in sent:
        sender.send(message)
    got: list[wire.ApiToNode] = []
    sender.flush()
    assert sender.pending_bytes > 0
    while len(got) < len(sent):
        got += reader.receive()
        sender.flush()
    assert got == sent
    sender.close()
    reader.close()


def test_the_end_of_the_other_side_is_noticed_by_reader_and_writer() -> None:
    ours, theirs = pair()
    channel: PolledChannel[wire.ApiToNode] = PolledChannel(ours, wire.ApiToNode)
    assert channel.receive() == []
    theirs.close()
    with pytest.raises(ChannelClosed):
        channel.receive()
    channel.send(wire.Shutdown())
    with pytest.raises(ChannelClosed):
        channel.flush()
    channel.close()


def test_a_close_wakes_the_thread_that_waits() -> None:
    ours, theirs = pair()
    channel: BlockingChannel[wire.ApiToNode] = BlockingChannel(ours, wire.ApiToNode)
    ends: list[Exception] = []

    def read() -> None:
        try:
            channel.receive()
        except ChannelClosed as error:
            ends.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    channel.close()
    reader.join(5)
    theirs.close()
    assert len(ends) == 1


def test_frames_of_several_senders_do_not_mix() -> None:
    ours, theirs = pair()
    sender: BlockingChannel[wire.ApiToNode] = BlockingChannel(ours, wire.ApiToNode)
    reader: BlockingChannel[wire.ApiToNode] = BlockingChannel(theirs, wire.ApiToNode)

    def send(name: str) -> None:
        for number in range(50):
            sender.send(wire.Query(number, name * 3000))

    threads = [threading.Thread(target=send, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    got: list[wire.ApiToNode] = []
    while len(got) < 150:
        got += reader.receive()
    for thread in threads:
        thread.join()
    sender.close()
    reader.close()
    for name in "abc":
        mine = [message for message in got if isinstance(message, wire.Query) and message.what == name * 3000]
        assert [message.id for message in mine] == list(range(50))
