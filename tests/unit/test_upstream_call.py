"""What one half's connection shows, in the words of the router: each head and end once, and nothing after the last."""

import pytest

from tandem.core.router.messages import (
    DecodeSpoke,
    HalfAnswered,
    HalfEnded,
    HalfFailed,
    HalfFailure,
    HalfRejected,
    Side,
)
from tandem.core.router.upstream_call import UpstreamCall
from tandem.core.router.worker_registry import ProbeResult, probe_result
from tandem.core.values import SECOND, Nanos, RequestId

REQUEST, STALL_NS = RequestId(7), Nanos(3 * SECOND)


def a_call(half: Side = Side.DECODE) -> UpstreamCall:
    return UpstreamCall(REQUEST, 2, half, STALL_NS)


def test_a_document_of_decode_is_spoken_when_it_is_whole() -> None:
    call = a_call()
    assert call.head(200, is_event_stream=False) == (HalfAnswered(REQUEST, 2, Side.DECODE),)
    assert call.piece() == ()
    assert call.end() == (DecodeSpoke(REQUEST, 2), HalfEnded(REQUEST, 2, Side.DECODE))


def test_of_a_stream_of_decode_the_first_piece_counts_and_from_then_on_silence_too() -> None:
    call = a_call()
    assert call.head(200, is_event_stream=True) == ()
    assert call.patience_ns is None
    assert call.piece() == (DecodeSpoke(REQUEST, 2),)
    assert call.piece() == ()
    assert call.patience_ns == STALL_NS
    assert call.stall() == (HalfFailed(REQUEST, 2, Side.DECODE, HalfFailure.STALLED, "no byte for 3 s", STALL_NS),)
    assert call.patience_ns is None


def test_a_stream_of_decode_ends_with_its_body_and_an_error_in_it_is_the_clients() -> None:
    call = a_call()
    call.head(200, is_event_stream=True)
    call.piece()
    assert call.end("peer_lost") == (HalfEnded(REQUEST, 2, Side.DECODE),)


@pytest.mark.parametrize("is_event_stream", [False, True])
def test_of_prefill_head_and_end_are_told_and_an_error_at_its_end(is_event_stream: bool) -> None:
    call = a_call(Side.PREFILL)
    assert call.head(200, is_event_stream=is_event_stream) == (HalfAnswered(REQUEST, 2, Side.PREFILL),)
    assert call.piece() == ()
    assert call.patience_ns is None
    assert call.end("transfer_failed") == (HalfEnded(REQUEST, 2, Side.PREFILL, has_error=True),)


def test_a_prefill_whose_server_ends_has_broken() -> None:
    call = a_call(Side.PREFILL)
    call.head(200, is_event_stream=False)
    expected = HalfFailed(REQUEST, 2, Side.PREFILL, HalfFailure.BROKEN, "its server ends: worker 0 died")
    assert call.end("worker_lost", "worker 0 died") == (expected,)


@pytest.mark.parametrize("status", [199, 300, 404, 503])
def test_another_status_is_a_rejection_when_its_body_is_there(status: int) -> None:
    call = a_call()
    assert call.head(status, is_event_stream=True) == ()
    assert not call.is_stream
    assert call.reject(is_retryable=None) == (HalfRejected(REQUEST, 2, Side.DECODE, status, None),)


@pytest.mark.parametrize("last", ["end", "cancel", "fail"])
def test_after_its_last_word_a_call_says_nothing(last: str) -> None:
    call = a_call()
    call.head(200, is_event_stream=True)
    match last:
        case "end":
            call.end()
        case "cancel":
            call.cancel()
        case _:
            call.fail(HalfFailure.REFUSED, "cannot connect")
    after = (call.head(200, is_event_stream=False), call.piece(), call.end(), call.stall())
    assert after == ((), (), (), ())
    assert call.reject(is_retryable=True) == call.fail(HalfFailure.BROKEN, "") == ()


@pytest.mark.parametrize(
    ("status", "result"),
    [(200, ProbeResult.OK), (503, ProbeResult.DECLINED), (500, ProbeResult.MISSED), (None, ProbeResult.MISSED)],
)
def test_what_a_probe_finds(status: int | None, result: ProbeResult) -> None:
    assert probe_result(status) is result
