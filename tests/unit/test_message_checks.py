"""The door for what peers say: within bounds nothing changes, out of bounds the room fails, texts are one line."""

from functools import partial
from typing import Any  # fields of any message

import msgspec
import pytest

from tandem.core.disagg.message_checks import MAX_DETAIL_CHARS, Bounds, admitted, one_line
from tandem.core.disagg.messages import Abort, Message, Offer, Ready, Release, ResultSlot
from tandem.core.kv_parts import KvGrid
from tandem.core.values import SECOND, Cause, Cut, Incarnation, Nanos, Room
from tandem.sampling import TokenScore, are_scores, is_score

PREFILL, DECODE = Incarnation("prefill:1", "a" * 32), Incarnation("decode:1", "b" * 32)
BOUNDS = Bounds(
    512,
    partial(is_score, vocab_size=512),
    partial(are_scores, vocab_size=512),
    KvGrid(1, 2),
    cut=Cut(tp_size=2),
    peer_cut=Cut(tp_size=2),
)
ROOM = Room(5)
SCORE = msgspec.msgpack.encode(TokenScore(-0.5, (1, 511), (-0.5, -2.0)))
PROMPT_SCORES = msgspec.msgpack.encode([TokenScore(-0.5, (1, 511), (-0.5, -2.0)), TokenScore(-1.5)])
TOLD = (PROMPT_SCORES, PROMPT_SCORES)
ROW = ResultSlot(ROOM, (511).to_bytes(4, "little"), 1, SCORE, 16, Nanos(1), Nanos(2), Nanos(3), TOLD)
READY = Ready(ROOM, 1, DECODE, PREFILL, "f" * 32, 100, 2, 3, b"d" * 16, cut=Cut(tp_size=2))
OFFER = Offer(ROOM, 1, PREFILL, 2, (7, 8), (1, 1), (b"d" * 16, b"e" * 16), (b"s", b"t"), Nanos(30 * SECOND), 4, ROW)
RELEASE = Release(ROOM, DECODE, "done", None, 1)
ABORT = Abort(ROOM, PREFILL, Cause.DRAINING, "the server is shutting down")
HUGE, TOO_MANY = 1 << 63, 1 << 31


def changed(message: Any, **fields: Any) -> Any:
    return msgspec.structs.replace(message, **fields)


@pytest.mark.parametrize("message", [READY, OFFER, RELEASE, ABORT, changed(OFFER, result=None)])
def test_what_fits_goes_through_as_it_is(message: Message) -> None:
    assert admitted(message, BOUNDS) == message


@pytest.mark.parametrize("message", [READY, OFFER, RELEASE, ABORT])
@pytest.mark.parametrize("room", [0, -1, HUGE])
def test_a_message_about_no_room_is_none(message: Message, room: int) -> None:
    assert admitted(changed(message, room=room), BOUNDS) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"attempt": -1},
        {"attempt": HUGE},
        {"target": Incarnation("x" * 300, "1")},
        {"target": Incarnation("two\nlines", "1")},
        {"target": Incarnation("x", "")},
        {"layout": "x" * 200},
        {"prompt_len": 0},
        {"prompt_len": TOO_MANY},
        {"held_pages": -1},
        {"held_pages": TOO_MANY},
        {"known_pages": -1},
        {"known_pages": HUGE},
        {"prompt_digest": bytes(65)},
        {"cut": Cut(tp_size=3)},
        {"waited_ns": -1},
        {"waited_ns": HUGE},
    ],
)
def test_a_ready_out_of_bounds_gives_its_room_up(fields: dict[str, Any]) -> None:
    told = admitted(changed(READY, **{"rendered_at": 7, **fields}), BOUNDS)
    assert isinstance(told, Release)
    assert told.rendered_at == 7
    assert (told.room, told.source, told.outcome, told.cause) == (ROOM, DECODE, "aborted", Cause.PROTOCOL)
    assert told.attempt in (0, 1)
    assert told.prompt_digest == (b"" if "prompt_digest" in fields else READY.prompt_digest)  # who has none is nobody


@pytest.mark.parametrize(
    "fields",
    [
        {"attempt": -1},
        {"attempt": HUGE},
        {"first_page": -1},
        {"first_page": 3},
        {"first_page": HUGE},
        {"total_pages": 3},
        {"total_pages": TOO_MANY},
        {"pages": (7,)},
        {"pages": (7, -8)},
        {"pages": (7, HUGE)},
        {"generations": (1,)},
        {"generations": (1, 1, 1)},
        {"generations": (1, -1)},
        {"digests": (b"d" * 16,)},
        {"digests": ()},
        {"digests": (b"d" * 16, b"e" * 15)},
        {"digests": (b"d" * 16, b"e" * 24)},
        {"secrets": (b"s",)},
        {"secrets": (b"s", bytes(65))},
        {"lease_ns": 0},
        {"lease_ns": HUGE},
    ],
)
def test_an_offer_out_of_bounds_is_the_end_of_its_room(fields: dict[str, Any]) -> None:
    told = admitted(changed(OFFER, **fields), BOUNDS)
    assert isinstance(told, Abort)
    assert (told.room, told.source, told.cause) == (ROOM, PREFILL, Cause.PROTOCOL)


@pytest.mark.parametrize(
    "fields",
    [
        {"room": Room(6)},
        {"token": b""},
        {"token": bytes(7)},
        {"token": bytes(4 * 65)},
        {"token": bytes(4) + (512).to_bytes(4, "little")},
        {"token": (512).to_bytes(4, "little")},
        {"token": (-1).to_bytes(4, "little", signed=True)},
        {"flags": 8},
        {"flags": -1},
        {"flags": HUGE},
        {"extra": b"\xc1"},
        {"extra": b"\x91" * 2000 + b"\xc0"},
        {"extra": bytes(1 << 20)},
        {"extra": msgspec.msgpack.encode(TokenScore(-0.5, (512,), (-0.5,)))},
        {"extra": msgspec.msgpack.encode(TokenScore(-0.5, (1, 2), (-0.5,)))},
        {"prompt_extras": (b"\xc1",)},
        {"prompt_extras": (SCORE,)},
        {"prompt_extras": (PROMPT_SCORES, msgspec.msgpack.encode([TokenScore(-0.5, (512,), (-0.5,))]))},
        {"prompt_extras": (bytes(5 << 20),)},
        {"cached_tokens": -1},
        {"cached_tokens": HUGE},
        {"queue_ns": -1},
        {"compute_ns": HUGE},
        {"overlapped_ns": -1},
    ],
)
def test_a_result_slot_out_of_bounds_is_the_end_of_its_room(fields: dict[str, Any]) -> None:
    told = admitted(changed(OFFER, result=changed(ROW, **fields)), BOUNDS)
    assert isinstance(told, Abort)
    assert (told.room, told.source, told.cause) == (ROOM, PREFILL, Cause.PROTOCOL)


@pytest.mark.parametrize("attempt", [-1, HUGE])
def test_a_release_of_an_attempt_that_cannot_be_gives_its_room_up(attempt: int) -> None:
    told = admitted(changed(RELEASE, attempt=attempt), BOUNDS)
    assert told == Release(ROOM, DECODE, "aborted", Cause.PROTOCOL, 0, "attempt is out of bounds")


@pytest.mark.parametrize("num_pulled", [-1, HUGE])
def test_a_release_of_so_many_pages_as_there_cannot_be_gives_its_room_up(num_pulled: int) -> None:
    told = admitted(changed(RELEASE, num_pulled=num_pulled), BOUNDS)
    assert told == Release(ROOM, DECODE, "aborted", Cause.PROTOCOL, 1, "num_pulled is out of bounds")


@pytest.mark.parametrize("message", [RELEASE, ABORT])
def test_a_reason_for_people_is_one_line_and_the_rest_of_the_message_stays(message: Message) -> None:
    forged = "gone\n2026-01-01 tandem: \x1b[31mall is well\u2028" + "x" * 5000
    told = admitted(changed(message, detail=forged), BOUNDS)
    assert told == changed(message, detail=one_line(forged))
    assert told.detail.isprintable()
    assert len(told.detail) == MAX_DETAIL_CHARS + 3
