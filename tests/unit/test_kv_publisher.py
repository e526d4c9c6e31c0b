"""The publisher of KV events on real sockets: what every subscriber can read, what is told again, and who waits."""

import threading
from array import array
from typing import Any

import msgspec
import pytest
import zmq

from kv_subscriber import AllBlocksCleared, BlockRemoved, BlockStored, Subscriber
from tandem.cli.failure import CommandFailed
from tandem.cli.fleet import KvEventsFlags
from tandem.cli.ports import free_ports
from tandem.core.commands import (
    AnnounceCleared,
    AnnounceRemoved,
    AnnounceStored,
    Effects,
    EmitTokens,
    ForgetRequests,
)
from tandem.core.values import Incarnation, Nanos, PageHash, RequestId
from tandem.kv_events_config import KvEventsConfig, at_rank, complaint, read, shifted
from tandem.sampling import Payload, SamplingParams
from tandem.server.node import kv_publisher
from tandem.server.node.kv_events import CannotPublish, KvAnnouncement, KvEvents, block_hash, encode
from tandem.server.node.kv_publisher import KvPublisher

HASHES = tuple(PageHash(bytes([index]) * 16) for index in range(1, 5))
STORED = KvAnnouncement(AnnounceStored(RequestId(1), 0, None, HASHES[:2]), array("i", range(4)).tobytes())
REMOVED = KvAnnouncement(AnnounceRemoved(HASHES[1:2]))
CLEARED = KvAnnouncement(AnnounceCleared())
NOBODY = Incarnation("server", "1")


def publisher(config: KvEventsConfig, *, dp_rank: int = 0, notes: list[str] | None = None) -> KvPublisher:
    note = (notes if notes is not None else []).append
    return KvPublisher(config, dp_rank=dp_rank, page_size=2, who=NOBODY, note=note)


def config(**fields: Any) -> tuple[KvEventsConfig, int, int]:
    """Bound to free ports; the configuration and the two ports."""
    port, replay_port = free_ports(2)
    endpoints = {"endpoint": f"tcp://*:{port}", "replay_endpoint": f"tcp://*:{replay_port}"}
    return KvEventsConfig(**{**endpoints, **fields}), port, replay_port


def test_an_endpoint_of_ipv6_is_bound() -> None:
    port, replay_port = free_ports(2)
    chosen = KvEventsConfig(endpoint=f"tcp://[::]:{port}", replay_endpoint=f"tcp://[::1]:{replay_port}")
    publisher(chosen).close()


# --- what is on the wire ---------------------------------------------------------------------------------------------


class WithoutMedium(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag="BlockStored"):
    """SGLang's, and vLLM's first."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None


class WithMore(WithoutMedium, tag="BlockStored"):
    """vLLM's later ones, positional."""

    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None


@pytest.mark.parametrize("kind", [WithoutMedium, WithMore])
def test_subscribers_of_every_age_read_a_stored_block(kind: Any) -> None:
    class Batch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
        ts: float
        events: list[kind]
        data_parallel_rank: int | None = None

    batch = msgspec.msgpack.decode(encode([STORED], ts=1.5, page_size=2, dp_rank=3), type=Batch)
    (event,) = batch.events
    assert (batch.ts, batch.data_parallel_rank) == (1.5, 3)
    assert event.block_hashes == [block_hash(page) for page in HASHES[:2]]
    assert (event.parent_block_hash, event.token_ids, event.block_size, event.lora_id) == (None, [0, 1, 2, 3], 2, None)


def test_a_subscriber_gets_topic_number_and_batch_and_missed_ones_again() -> None:
    chosen, port, replay_port = config(topic="kv-events")
    publishing = publisher(chosen, dp_rank=0)
    try:
        with Subscriber(port, replay_port=replay_port) as early:
            list(early.replay())  # the first batch has been sent, so who comes now has missed it
        with Subscriber(port, replay_port=replay_port, topic="kv-events") as subscriber:
            number = 0
            while not subscriber.sub.poll(10):  # until the subscription has reached it
                publishing.publish([REMOVED])
                number += 1
            seen, topic, batch = subscriber.next()
            assert topic == b"kv-events"
            assert seen >= 1
            assert batch.data_parallel_rank == 0
            publishing.publish([STORED, REMOVED, CLEARED])
            while seen <= number:
                seen, _, batch = subscriber.next()
            assert [type(event) for event in batch.events] == [BlockStored, BlockRemoved, AllBlocksCleared]
            again = dict(subscriber.replay())
            assert list(again) == list(range(seen + 1))
            assert again[seen] == batch
            assert again[0].events == [AllBlocksCleared()]
            assert [number for number, _ in subscriber.replay(seen)] == [seen]
    finally:
        publishing.close()


def test_what_is_kept_to_be_told_again_is_bounded_in_batches_and_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, port, replay_port = config(buffer_steps=5)
    publishing = publisher(chosen)
    try:
        with Subscriber(port, replay_port=replay_port) as subscriber:
            for _ in range(20):
                publishing.publish([REMOVED])
            while (numbers := [number for number, _ in subscriber.replay()])[-1] < 20:
                pass
            assert numbers == [16, 17, 18, 19, 20]
            monkeypatch.setattr(kv_publisher, "BUFFER_BYTES", 100)
            publishing.publish([REMOVED])
            while (numbers := [number for number, _ in subscriber.replay()])[-1] < 21:
                pass
            assert len(numbers) < 5
    finally:
        publishing.close()


def test_a_subscriber_that_does_not_read_and_a_thread_that_hangs_hold_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Batches are dropped then, and the numbers of those that come show it. `publish` waits for nothing at all."""
    chosen, port, replay_port = config(hwm=1, max_queue_size=10)
    notes: list[str] = []
    hangs, goes_on = threading.Event(), threading.Event()

    def encode_late(announced: Any, **how: Any) -> bytes:
        if announced[0] is REMOVED:
            hangs.set()
            assert goes_on.wait(20)
        return encode(announced, **how)

    monkeypatch.setattr(kv_publisher, "encode", encode_late)
    publishing = publisher(chosen, notes=notes)
    try:
        with Subscriber(port, replay_port=replay_port) as subscriber:
            publishing.publish([REMOVED])
            assert hangs.wait(20)
            for _ in range(5000):
                publishing.publish([CLEARED])
            goes_on.set()
            while (numbers := [number for number, _ in subscriber.replay()])[-1] < 11:
                pass
            assert numbers == list(range(12))  # ten waited behind the one that hung
            publishing.publish([CLEARED])
            while (numbers := [number for number, _ in subscriber.replay()])[-1] == 11:
                pass
            assert numbers == [*range(12), 5002]  # and the number tells how many are missing
            assert publishing.num_dropped == 4990
            assert sum("batches dropped" in note for note in notes) == 5
    finally:
        publishing.close()


def test_who_asks_for_a_replay_in_other_words_gets_no_answer_and_does_no_harm() -> None:
    chosen, port, replay_port = config()
    publishing = publisher(chosen)
    try:
        context = zmq.Context()
        asker = context.socket(zmq.DEALER)
        asker.connect(f"tcp://127.0.0.1:{replay_port}")
        for frames in ([b"x"], [b"", b"short"], [b"", b"12345678", b"more"], [b""] * 9):
            asker.send_multipart(frames)
        with Subscriber(port, replay_port=replay_port) as subscriber:
            assert [number for number, _ in subscriber.replay()] == [0]
        assert not asker.poll(0)
        context.destroy(linger=0)
    finally:
        publishing.close()


def test_an_endpoint_that_is_taken_is_said_in_one_line() -> None:
    chosen, port, _ = config()
    publishing = publisher(chosen)
    try:
        with pytest.raises(CannotPublish, match=rf"tcp://\*:{port}: Address already in use; choose another endpoint"):
            publisher(chosen)
    finally:
        publishing.close()


def test_a_publisher_may_connect_to_an_index_that_waits_for_it() -> None:
    """As llm-d's: one socket of the index, to which every engine connects."""
    context = zmq.Context()
    sub = context.socket(zmq.SUB)
    sub.setsockopt_string(zmq.SUBSCRIBE, "kv@")
    port = sub.bind_to_random_port("tcp://127.0.0.1")
    publishing = publisher(KvEventsConfig(endpoint=f"tcp://127.0.0.1:{port}", topic="kv@pod@model"))
    try:
        while not sub.poll(10):
            publishing.publish([REMOVED])
        assert sub.recv_multipart()[0] == b"kv@pod@model"
    finally:
        publishing.close()
        context.destroy(linger=0)


# --- tokens ----------------------------------------------------------------------------------------------------------


class Sent:
    def __init__(self) -> None:
        self.announced: list[KvAnnouncement] = []

    def publish(self, announced: list[KvAnnouncement]) -> None:
        self.announced += announced

    def close(self) -> None:
        pass


def test_tokens_are_kept_as_long_as_their_request_lives() -> None:
    sent = Sent()
    events = KvEvents(sent, page_size=2)
    events.prompt_came(Payload(1, array("i", [5, 6, 7]).tobytes(), SamplingParams(), b""))
    one = RequestId(1)
    emitted = EmitTokens((one,), array("i", [8]).tobytes())
    stored = AnnounceStored(one, 1, HASHES[0], HASHES[1:2])
    events.after(Nanos(1), [], Effects((emitted, stored, ForgetRequests((one,))), None))
    assert array("i", sent.announced[0].tokens).tolist() == [7, 8]
    assert events.num_kept == 0


def test_a_prompt_that_is_rendered_anew_takes_the_place_of_the_first() -> None:
    sent = Sent()
    events = KvEvents(sent, page_size=2)
    for tokens in ([5, 6, 7], [9, 9, 9, 9]):
        events.prompt_came(Payload(1, array("i", tokens).tobytes(), SamplingParams(), b""))
    events.after(Nanos(1), [], Effects((AnnounceStored(RequestId(1), 0, None, HASHES[:2]),), None))
    assert array("i", sent.announced[0].tokens).tolist() == [9, 9, 9, 9]


# --- the flag --------------------------------------------------------------------------------------------------------


def test_the_json_of_vllm_and_of_sglang_is_read() -> None:
    of_vllm = '{"enable_kv_cache_events":true,"publisher":"zmq","topic":"kv-events","endpoint":"tcp://*:5556"}'
    of_sglang = '{"publisher":"zmq","endpoint":"tcp://*:5561","replay_endpoint":null,"buffer_steps":7,"hwm":8}'
    assert read(of_vllm) == KvEventsConfig(topic="kv-events", endpoint="tcp://*:5556")
    assert read(of_sglang) == KvEventsConfig(endpoint="tcp://*:5561", buffer_steps=7, hwm=8)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"publisher":"null"}',
        '{"publisher":"kafka"}',
        '{"enable_kv_cache_events":false}',
        '{"endpoints":"tcp://*:5557"}',
        '{"endpoint":"*:5557"}',
        '{"endpoint":"tcp://*"}',
        '{"endpoint":"tcp://*:0"}',
        '{"endpoint":"tcp://*:65535"}',
        '{"replay_endpoint":"tcp://*:5558"}',
        '{"hwm":0}',
    ],
)
def test_what_would_do_nothing_or_meets_itself_is_refused(text: str) -> None:
    assert complaint(text, dp_size=2)


def test_ports_rise_by_the_rank() -> None:
    assert at_rank("tcp://*:5557", 2) == "tcp://*:5559"
    assert at_rank("ipc:///tmp/kv", 1) == "ipc:///tmp/kv_dp1"
    first = KvEventsConfig(endpoint="tcp://*:100", replay_endpoint="tcp://*:200")
    assert shifted(first, 3) == KvEventsConfig(endpoint="tcp://*:103", replay_endpoint="tcp://*:203")


def test_servers_of_one_machine_get_ports_behind_each_other() -> None:
    told = KvEventsFlags('{"endpoint":"tcp://*:100","replay_endpoint":"tcp://*:200","topic":"t"}')
    for flags, first in ((["--dp-size", "2"], 0), ([], 2), (["--dp", "3"], 3), (["--no-such-flag"], 6)):
        *before, name, text = told.added_to(flags)
        assert (before, name) == (flags, "--kv-events-config")
        expected = KvEventsConfig(
            endpoint=f"tcp://*:{100 + first}", replay_endpoint=f"tcp://*:{200 + first}", topic="t"
        )
        assert read(text) == expected
    assert KvEventsFlags(None).added_to(["--dp-size", "2"]) == ["--dp-size", "2"]
    with pytest.raises(CommandFailed, match="--kv-events-config: "):
        KvEventsFlags('{"endpoint":"5557"}').added_to([])
