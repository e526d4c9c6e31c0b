"""Probes have a loop of their own: they are made, and count, whatever the loop of the traffic is busy with."""

import asyncio
import json
import logging
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from msgspec import structs

from raw_http import Handler, handling
from tandem.core.router.messages import AbortAsked, Side, WorkerProbed
from tandem.core.router.router import Router, RouterSettings
from tandem.core.router.worker_registry import Health, HealthSettings, ProbeResult, RegisteredWorker
from tandem.core.settings import Role
from tandem.core.values import Nanos, RequestId
from tandem.server.router.app import make_client
from tandem.server.router.config import make_worker
from tandem.server.router.metrics import RouterMetrics
from tandem.server.router.prober import Prober, names_in
from tandem.server.router.shell import RouterShell

PATIENCE_S = 20.0


@pytest.mark.parametrize(
    ("raw", "names"),
    [
        (b'{"object": "list", "data": [{"id": "a", "root": "x"}, {"id": "b"}]}', ("a", "b")),
        (b'{"data": []}', None),
        (b'{"data": [{"id": 5}]}', None),
        (b"[]", None),
        (b"no JSON", None),
        (b'{"data": [{"id": "a"}, {"id": "%s"}]}' % (b"x" * 300), ("a",)),
        (b'{"data": [%s]}' % b",".join(b'{"id": "%d"}' % number for number in range(99)), tuple(map(str, range(64)))),
    ],
)
def test_names_of_models_are_read_as_far_as_they_are_names(raw: bytes, names: tuple[str, ...] | None) -> None:
    assert names_in(raw) == names


@contextmanager
def healthy_server(
    status: int = 200,
    says: Callable[[], str] = str,
    asked: list[tuple[str, str | None]] | None = None,
    *,
    header: str = "x-tandem-role",
    body: bytes = b"",
) -> Iterator[RegisteredWorker]:
    """says: its role, as ours do; nothing by default, as servers of others. asked: for what, and with which key."""

    class Healthy(Handler):
        def do_GET(self) -> None:
            if asked is not None:
                asked.append((self.path, self.headers["authorization"]))
            word = says()
            self.say(body, status, {header: word} if word else {})

    with handling(Healthy) as port:
        yield make_worker(0, Role.PREFILL, f"http://127.0.0.1:{port}")


def taken(prober: Prober) -> list[WorkerProbed]:
    """What is found, without giving any loop of this thread a turn."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if found := prober.take():
            return found
        time.sleep(0.001)
    raise AssertionError("nothing was found")


def probing(story: Callable[[Prober], None], *, asks_models: bool = False, key: str = "") -> list[str]:
    """`story` holds up the loop from which the prober is used. Returns what that loop has heard by its next turn."""
    heard: list[str] = []

    async def main() -> None:
        prober = Prober(make_client, timeout_s=PATIENCE_S, asks_models=asks_models, key=key)
        loop = asyncio.get_running_loop()
        prober.start(lambda: loop.call_soon_threadsafe(heard.append, "come"))
        try:
            story(prober)
            await asyncio.sleep(0)
        finally:
            prober.close()
        await asyncio.sleep(0)

    asyncio.run(main())
    return heard


def test_a_probe_is_made_and_answered_while_the_loop_of_the_traffic_is_held_up() -> None:
    with healthy_server() as well, healthy_server(503) as starting:

        def story(prober: Prober) -> None:
            for worker, result in ((well, ProbeResult.OK), (starting, ProbeResult.DECLINED)):
                prober.probe(worker)
                assert taken(prober) == [WorkerProbed(worker.id, result)]

        assert probing(story) == ["come", "come"]


@pytest.mark.parametrize(
    ("code", "result"), [("node_silent", ProbeResult.STALLED), ("not_ready", ProbeResult.DECLINED)]
)
def test_a_worker_that_says_that_it_stands_still_is_told_from_one_that_takes_no_requests(
    code: str, result: ProbeResult
) -> None:
    with healthy_server(503, body=json.dumps({"error": {"code": code}}).encode()) as worker:

        def story(prober: Prober) -> None:
            prober.probe(worker)
            assert taken(prober) == [WorkerProbed(worker.id, result)]

        probing(story)


def test_a_worker_that_says_another_role_than_the_router_was_told_gets_no_requests_and_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Taken for a decode, a prefill would answer everybody with its one token."""
    roles = ["decode", "decode", "unified", "router", "prefill", "decode", ""]
    said = iter(roles)

    with healthy_server(says=lambda: next(said)) as worker:

        def story(prober: Prober) -> None:
            for role in roles:
                prober.probe(worker)
                expected = ProbeResult.OK if role in ("prefill", "") else ProbeResult.DECLINED
                assert taken(prober) == [WorkerProbed(worker.id, expected)]

        probing(story)
    named = [f"{worker.url} is no prefill server but says '{role}': it gets no requests" for role in roles]
    assert caplog.messages == [named[0], named[2], named[3], named[5]]


def test_a_prefill_says_the_port_of_its_bootstrap_server_and_what_is_none_is_nothing() -> None:
    ports = {"8999": 8999, "1": 1, "65535": 65535, "0": None, "65536": None, "-1": None, "8k": None, "": None}
    ports["9" * 5000] = None
    said = iter(ports)

    with healthy_server(says=lambda: next(said), header="x-tandem-bootstrap-port") as worker:

        def story(prober: Prober) -> None:
            for port in ports.values():
                prober.probe(worker)
                assert taken(prober) == [WorkerProbed(worker.id, ProbeResult.OK, bootstrap_port=port)]

        probing(story)


def test_the_port_of_a_decode_is_not_asked_for() -> None:
    with healthy_server(says=lambda: "8999", header="x-tandem-bootstrap-port") as worker:

        def story(prober: Prober) -> None:
            prober.probe(structs.replace(worker, role=Role.DECODE))
            assert taken(prober) == [WorkerProbed(worker.id, ProbeResult.OK)]

        probing(story)


def test_the_key_of_workers_is_shown_where_they_ask_for_it() -> None:
    asked: list[tuple[str, str | None]] = []
    with healthy_server(asked=asked) as worker:

        def story(prober: Prober) -> None:
            prober.probe(worker)
            taken(prober)

        probing(story, asks_models=True, key="user")
    assert asked == [("/health", None), ("/v1/models", "Bearer user")]


def test_who_cannot_be_reached_is_missed() -> None:
    with healthy_server() as gone:
        pass

    def story(prober: Prober) -> None:
        prober.probe(gone)
        assert taken(prober) == [WorkerProbed(gone.id, ProbeResult.MISSED)]

    probing(story)


def test_a_probe_whose_answer_does_not_end_is_missed_in_time() -> None:
    async def drip() -> AsyncIterator[bytes]:
        while True:
            yield b" "
            await asyncio.sleep(0.01)

    async def main() -> None:
        transport = httpx.MockTransport(lambda request: httpx.Response(200, content=drip()))
        prober = Prober(lambda: httpx.AsyncClient(transport=transport), timeout_s=0.1)
        has_come = asyncio.Event()
        loop = asyncio.get_running_loop()
        prober.start(lambda: loop.call_soon_threadsafe(has_come.set))
        try:
            prober.probe(make_worker(0, Role.DECODE, "http://127.0.0.1:1"))
            await asyncio.wait_for(has_come.wait(), PATIENCE_S)
            assert [found.result for found in prober.take()] == [ProbeResult.MISSED]
        finally:
            prober.close()

    asyncio.run(main())


def test_a_name_that_nobody_answers_for_holds_up_no_probe_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look-up cannot be cancelled, and is asked for again with every probe: it must not take everybody's threads."""
    answers, num_more = threading.Event(), (os.cpu_count() or 1) + 40  # than threads of asyncio's own
    look_up = socket.getaddrinfo

    def looked_up(host: str | bytes | None, *args: Any, **named: Any) -> Any:
        if host in ("silent.test", b"silent.test"):
            answers.wait(PATIENCE_S)
            raise OSError("no such name")
        return look_up("127.0.0.1", *args, **named)

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    silent = make_worker(1, Role.DECODE, "http://silent.test:1")

    async def main(well: RegisteredWorker) -> None:
        prober = Prober(make_client, timeout_s=PATIENCE_S / 2)
        has_come = asyncio.Event()
        loop = asyncio.get_running_loop()
        prober.start(lambda: loop.call_soon_threadsafe(has_come.set))
        try:
            for _ in range(num_more):
                prober.probe(silent)
            prober.probe(well)
            await asyncio.wait_for(has_come.wait(), PATIENCE_S)
            assert prober.take() == [WorkerProbed(well.id, ProbeResult.OK)]
        finally:
            answers.set()
            prober.close()

    with healthy_server() as well:
        asyncio.run(main(make_worker(0, Role.PREFILL, well.url.replace("127.0.0.1", "well.test"))))


def test_a_probe_that_is_under_way_at_the_end_is_given_up() -> None:
    asked = threading.Event()

    async def silence(request: httpx.Request) -> httpx.Response:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError("nobody is waited for")

    async def main() -> None:
        prober = Prober(lambda: httpx.AsyncClient(transport=httpx.MockTransport(silence)), timeout_s=PATIENCE_S)
        prober.start(lambda: None)
        prober.probe(make_worker(0, Role.DECODE, "http://127.0.0.1:9"))
        assert asked.wait(PATIENCE_S)
        prober.close()
        assert not prober._thread.is_alive()
        assert prober.take() == []

    asyncio.run(main())


class AnsweredWhileBusy(Prober):
    """A thread that has found something while the loop of the traffic had no time to look."""

    def __init__(self) -> None:
        super().__init__(make_client, timeout_s=PATIENCE_S)
        self.absent: set[int] = set()

    def probe(self, worker: RegisteredWorker) -> None:
        result = ProbeResult.MISSED if worker.id in self.absent else ProbeResult.OK
        self._found.append(WorkerProbed(worker.id, result))


def test_a_mistake_of_the_client_is_no_failure_of_a_worker() -> None:
    metrics = RouterMetrics()
    for status in (400, 503, 503):
        metrics.see_rejection(Side.DECODE, status)
    found = metrics.registry.get_sample_value
    assert found("tandem:router_client_errors_total", {"status": "400"}) == 1
    assert found("tandem:router_client_errors_total", {"status": "503"}) is None
    assert found("tandem:router_failures_total", {"cause": "decode_rejected"}) == 2


def test_an_answer_that_is_there_counts_before_the_time_that_has_passed_meanwhile() -> None:
    workers = [make_worker(0, Role.PREFILL, "http://a:1"), make_worker(1, Role.DECODE, "http://b:1")]
    settings = RouterSettings(health=HealthSettings(probe_timeout_ns=Nanos(0)))
    router = Router(workers, draw=lambda: 1, settings=settings, now=Nanos(0))

    async def main() -> None:
        prober, metrics = AnsweredWhileBusy(), RouterMetrics()
        shell = RouterShell(router, make_client(), prober, metrics, stall_seconds=1.0, step=router.step)
        shell.tell()  # asks both; any answer would be too late by now
        shell.tell(AbortAsked(RequestId(7)))  # something else has its turn first
        assert [router.registry.health(worker.id) for worker in workers] == [Health.LIVE, Health.LIVE]
        assert router.has_live_pair()

    asyncio.run(main())


def test_a_probe_that_is_answered_while_a_router_ends_has_nobody_asked_any_more() -> None:
    """Its loop has heard of the answer, and has its turn when there is no loop of probes left."""

    async def main(worker: RegisteredWorker) -> None:
        settings = RouterSettings(health=HealthSettings(interval_ns=Nanos(0)))
        router = Router([worker], draw=lambda: 1, settings=settings, now=Nanos(0))
        prober = Prober(make_client, timeout_s=PATIENCE_S)
        shell = RouterShell(router, make_client(), prober, RouterMetrics(), stall_seconds=1.0, step=router.step)
        failures: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
        shell.start()
        deadline = time.monotonic() + PATIENCE_S
        while not prober._found and time.monotonic() < deadline:  # without a turn of this loop
            time.sleep(0.001)
        await shell.close()
        for _ in range(10):
            await asyncio.sleep(0)
        assert failures == []

    with healthy_server() as worker:
        asyncio.run(main(worker))


def test_a_worker_that_does_not_answer_from_the_beginning_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """Else a router whose user has mistyped an address says that it listens, and then nothing."""
    caplog.set_level(logging.INFO)
    workers = [make_worker(0, Role.PREFILL, "http://a:1"), make_worker(1, Role.DECODE, "http://b:1")]
    settings = RouterSettings(health=HealthSettings(interval_ns=Nanos(0), fast_interval_ns=Nanos(0)))
    router = Router(workers, draw=lambda: 1, settings=settings, now=Nanos(0))

    async def main() -> None:
        prober = AnsweredWhileBusy()
        prober.absent = {0}
        shell = RouterShell(router, make_client(), prober, RouterMetrics(), stall_seconds=1.0, step=router.step)
        for _ in range(4):
            shell.tell()
        prober.absent = set()
        for _ in range(2):
            shell.tell()

    asyncio.run(main())
    assert caplog.messages == [
        "decode worker http://b:1: joining -> live",
        "prefill worker http://a:1 does not answer yet: it joins when it does",
        "prefill worker http://a:1: joining -> live",
    ]
