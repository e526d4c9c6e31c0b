"""The loop around the router's core, over workers that are not as ours: what they do to it ends with their request."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine

import httpx
import pytest

from tandem.core.router.messages import WorkerProbed
from tandem.core.router.router import Router, RouterSettings
from tandem.core.router.worker_registry import ProbeResult, RegisteredWorker
from tandem.core.settings import Role
from tandem.core.values import Nanos
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


class WellProber(Prober):
    """Finds every worker well, at once."""

    def __init__(self) -> None:
        self._asked: list[RegisteredWorker] = []

    def probe(self, worker: RegisteredWorker) -> None:
        self._asked.append(worker)

    def take(self) -> list[WorkerProbed]:
        asked, self._asked = self._asked, []
        return [WorkerProbed(worker.id, ProbeResult.OK) for worker in asked]

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

    async def answer(request: httpx.Request) -> httpx.Response:
        return prefill() if request.url.host == "prefill" else decode()

    async def main() -> None:
        router = Router([PREFILL, DECODE], draw=lambda: 1, settings=RouterSettings(), now=Nanos(0))
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
