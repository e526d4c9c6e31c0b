"""Frames: what goes in comes out, whatever the pieces; what is no frame is an error; nothing grows without end."""

import socket
import threading

import pytest

from deep import DEEP
from tandem.core.events import AbortRequested
from tandem.core.values import RequestId
from tandem.server import wire
from tandem.server.channel import (
    BlockingChannel,
    ChannelClosed,
    ChannelFull,
    FrameDecoder,
    MalformedFrame,
    PolledChannel,
    frame,
)

QUERIES = [wire.Query(number, "x" * number) for number in range(40)]


def frames() -> FrameDecoder[wire.ApiToNode]:
    return FrameDecoder(wire.ApiToNode, max_frame_bytes=1 << 12)


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


def deep(depth: int) -> bytes:
    """A `Shutdown` with an unknown field, nested so deeply."""
    return b"\x82\xa4type\xa8Shutdown\xa1x" + b"\x91" * depth + b"\xc0"


@pytest.mark.parametrize("depth", [DEEP, 100_000])
def test_a_field_that_nobody_knows_and_that_is_nested_deeply_is_an_error_like_any_other(depth: int) -> None:
    body = deep(depth)
    with pytest.raises(MalformedFrame, match="RecursionError"):
        list(FrameDecoder(wire.ApiToNode).feed(len(body).to_bytes(4) + body))


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
