"""The loop around the router's core, over workers that are not as ours: what they do to it ends with their request."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Coroutine

import httpx
import pytest

from tandem.core.router.messages import WorkerProbed
from tandem.core.router.routed_request import RequestSettings
from tandem.core.router.router import Router, RouterSettings
from tandem.core.router.worker_registry import HealthSettings, ProbeResult, RegisteredWorker, WorkerId
from tandem.core.settings import Role
from tandem.core.values import MILLISECOND, Nanos
from tandem.server.api.resume import TELLS, Opening, ResumeFrame, encode_frame
from tandem.server.router import shell as router_shell
from tandem.server.router.answer import PIPE_BYTES, StreamedAnswer, WholeAnswer
from tandem.server.router.config import make_worker
from tandem.server.router.metrics import RouterMetrics
from tandem.server.router.prober import Prober
from tandem.server.router.shell import RouterShell, encode_rest

PATIENCE_S = 20.0
EVENTS = {"content-type": "text/event-stream"}
PREFILL = make_worker(0, Role.PREFILL, "http://prefill:1")
DECODE = make_worker(1, Role.DECODE, "http://decode:1")
USUAL = RouterSettings()


class WellProber(Prober):
    """Finds every worker well, at once, but for some."""

    def __init__(self) -> None:
        self._asked: list[RegisteredWorker] = []
        self.found: dict[WorkerId, ProbeResult] = {}  # of those that are not well

    def probe(self, worker: RegisteredWorker) -> None:
        self._asked.append(worker)

    def take(self) -> list[WorkerProbed]:
        asked, self._asked = self._asked, []
        return [WorkerProbed(worker.id, self.found.get(worker.id, ProbeResult.OK)) for worker in asked]

    def close(self) -> None:
        pass


class Body(httpx.AsyncByteStream):
    """These pieces, and then no end if it `hangs`. `is_closed` when its connection is."""

    def __init__(self, *pieces: bytes, hangs: bool = False) -> None:
        self.pieces, self.hangs = pieces, hangs
        self.is_closed = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            yield piece
        if self.hangs:
            await asyncio.Event().wait()

    async def aclose(self) -> None:
        self.is_closed.set()


def with_pair(
    prefill: Callable[[], httpx.Response],
    decode: Callable[[], httpx.Response],
    story: Callable[[RouterShell], Coroutine[None, None, None]],
) -> None:
    """Play it with a shell before these two."""

    with_workers([PREFILL, DECODE], {"prefill": prefill, "decode": decode}, story)


def with_workers(
    workers: list[RegisteredWorker],
    answers: dict[str, Callable[[], httpx.Response]],
    story: Callable[[RouterShell], Coroutine[None, None, None]],
    settings: RouterSettings = USUAL,
) -> None:
    """answers: by host"""

    async def answer(request: httpx.Request) -> httpx.Response:
        return answers[request.url.host]()

    async def main() -> None:
        rooms = itertools.count(1)
        router = Router(workers, draw=lambda: next(rooms), settings=settings, now=Nanos(0))
        client = httpx.AsyncClient(transport=httpx.MockTransport(answer), timeout=None)
        shell = RouterShell(router, client, WellProber(), RouterMetrics(), stall_seconds=600.0, step=router.step)
        shell.tell()
        shell.tell()
        async with client, asyncio.timeout(PATIENCE_S):
            await story(shell)
            await shell.close()

    asyncio.run(main())


def test_a_stream_whose_body_does_not_end_behind_its_last_frame_keeps_no_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router_shell, "BODY_END_SECONDS", 0.01)
    last = ResumeFrame(4, opening=Opening("nonce", 1, (1,)), is_last=True)

    async def story(shell: RouterShell) -> None:
        asked: dict[str, object] = {"stream": True}
        call = shell.open("/generate", asked, encode_rest(asked), {}, timeout_seconds=600.0)
        answer = await call.outcome
        assert isinstance(answer, StreamedAnswer)
        assert [piece async for piece in answer.pipe.chunks()] == [b"text"]
        await hanging[0].is_closed.wait()

    hanging: list[Body] = []

    def decode() -> httpx.Response:
        hanging.append(Body(encode_frame(last, b"text"), hangs=True))
        return httpx.Response(200, headers=EVENTS | {TELLS: "1"}, stream=hanging[0])

    with_pair(lambda: httpx.Response(200, stream=Body(b"")), decode, story)


def test_a_stream_that_nobody_asked_for_does_not_hold_up_an_answer_of_both_halves() -> None:
    """A client gets the first byte when both have ended, so nobody makes room for what comes meanwhile."""
    events = b'data: {"text": "x"}\n\n' * (2 * PIPE_BYTES // 20)

    async def story(shell: RouterShell) -> None:
        asked: dict[str, object] = {"return_logprob": True}
        call = shell.open("/generate", asked, encode_rest(asked), {}, timeout_seconds=600.0)
        answer = await call.outcome
        assert isinstance(answer, WholeAnswer)
        assert answer.body == events

    pieces = [events[at : at + 65536] for at in range(0, len(events), 65536)]
    document = json.dumps({"meta_info": {"input_token_logprobs": []}}).encode()
    with_pair(
        lambda: httpx.Response(200, stream=Body(document)),
        lambda: httpx.Response(200, headers=EVENTS, stream=Body(*pieces)),
        story,
    )


def test_a_silent_stream_of_a_decode_that_stands_still_goes_on_with_another_one() -> None:
    """Once it is silent for as long as that takes; what the first one says behind that is not heard."""
    again = make_worker(2, Role.DECODE, "http://again:1")
    first = encode_frame(ResumeFrame(1, opening=Opening("nonce", 1, (1,))), b"a")
    rest = encode_frame(ResumeFrame(1, is_last=True), b"b")
    hanging = Body(first, hangs=True)

    def decode(body: Body) -> Callable[[], httpx.Response]:
        return lambda: httpx.Response(200, headers=EVENTS | {TELLS: "1"}, stream=body)

    async def story(shell: RouterShell) -> None:
        prober = shell._prober
        assert isinstance(prober, WellProber)
        asked: dict[str, object] = {"stream": True}
        call = shell.open("/generate", asked, encode_rest(asked), {}, timeout_seconds=600.0)
        answer = await call.outcome
        assert isinstance(answer, StreamedAnswer)
        pieces = answer.pipe.chunks()
        assert await anext(pieces) == b"a"
        prober.found[DECODE.id] = ProbeResult.STALLED
        assert [piece async for piece in pieces] == [b"b"]
        await hanging.is_closed.wait()

    answers = {
        "prefill": lambda: httpx.Response(200, stream=Body(b"")),
        "decode": decode(hanging),
        "again": decode(Body(rest)),
    }
    soon = Nanos(20 * MILLISECOND)
    health = HealthSettings(interval_ns=soon, fast_interval_ns=soon)
    settings = RouterSettings(request=RequestSettings(quiet_ns=Nanos(200 * MILLISECOND)), health=health)
    with_workers([PREFILL, DECODE, again], answers, story, settings)
