"""Asks workers how they are, on an event loop of its own in a thread of its own.

Why not on the loop of the traffic: there a question begins, and its answer is read, when everybody else's turn is over.
Under more than the router can carry that took longer than a probe may, and workers that were well counted as dead.

The router's state has one owner, the loop of the traffic. What is found here waits in order until that loop takes it
(`take`), which it does before it looks at the clock for anything else; `has_come` only wakes it.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable

import httpx
import msgspec

from tandem.core.router.messages import WorkerProbed
from tandem.core.router.worker_registry import ProbeResult, RegisteredWorker, WorkerId, probe_result
from tandem.core.settings import Role
from tandem.logtext import shown
from tandem.server.api.body import NOT_JSON
from tandem.server.api.browser_page import BOOTSTRAP_PORT_HEADER, ROLE_HEADER
from tandem.server.api.errors import Problem
from tandem.server.router.answer import code_of
from tandem.server.router.worker_documents import ModelList

log = logging.getLogger("tandem.router")

MAX_MODELS = 64  # of one worker
MAX_NAME_CHARS = 256
MAX_DOCUMENT_BYTES = 1 << 20
CLOSE_SECONDS = 5.0  # a look-up of a name may not be over by then; its thread does not keep the process


class Prober:
    """`start`, `probe`, `take` and `close` belong to the loop of the traffic."""

    def __init__(
        self,
        make_client: Callable[[], httpx.AsyncClient],
        *,
        timeout_s: float,
        asks_models: bool = False,
        key: str = "",
    ) -> None:
        """asks_models: of healthy workers, too, which models they serve. key: that workers then ask for"""
        self._asks_models = asks_models
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._make_client = make_client
        self._timeout_s = timeout_s
        self._found: deque[WorkerProbed] = deque()
        self._others: dict[WorkerId, str] = {}  # workers with another role than the router was told; the log says so
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="probes", daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()  # of the probes' loop, like what follows
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self._client: httpx.AsyncClient
        self._has_come: Callable[[], object]

    def start(self, has_come: Callable[[], object]) -> None:
        """has_come: called in the thread of the probes whenever `take` has something."""
        self._has_come = has_come
        self._thread.start()
        self._is_up.wait()

    def probe(self, worker: RegisteredWorker) -> None:
        """Begin, and return at once. `take` brings the result."""
        self._loop.call_soon_threadsafe(self._begin, worker)

    def take(self) -> list[WorkerProbed]:
        """What has been found since the last call, in the order in which it was found."""
        found: list[WorkerProbed] = []
        while self._found:
            found.append(self._found.popleft())
        return found

    def close(self) -> None:
        """Nothing is found any more."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(CLOSE_SECONDS)

    # --- in the thread of the probes ----------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with self._make_client() as self._client:
            self._is_up.set()
            await self._stop.wait()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, worker: RegisteredWorker) -> None:
        task = self._loop.create_task(self._ask(worker))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(self, worker: RegisteredWorker) -> None:
        response = await self._get(worker.url + "/health", {})
        result = probe_result(None if response is None else response.status_code)
        if result is ProbeResult.DECLINED and response is not None and code_of(response.content) == Problem.NODE_SILENT:
            result = ProbeResult.STALLED
        if result is ProbeResult.OK and response is not None and self._is_another(worker, response.headers):
            result = ProbeResult.DECLINED
        models = await self._models(worker) if self._asks_models and result is ProbeResult.OK else None
        port = None if response is None or worker.role is not Role.PREFILL else port_in(response.headers)
        self._found.append(WorkerProbed(worker.id, result, models, port))
        self._has_come()

    def _is_another(self, worker: RegisteredWorker, headers: httpx.Headers) -> bool:
        """Whether it says that its role is not what the router was told: a prefill that is taken for a decode would
        answer with its one token, and nobody would notice. Servers of others say nothing, and are believed.
        """
        says = headers.get(ROLE_HEADER, worker.role)
        if says == worker.role:
            self._others.pop(worker.id, None)
            return False
        if self._others.get(worker.id) != says:
            self._others[worker.id] = says
            log.warning("%s is no %s server but says %s: it gets no requests", worker.url, worker.role, shown(says))
        return True

    async def _models(self, worker: RegisteredWorker) -> tuple[str, ...] | None:
        """None: it does not tell, or nothing that can be used."""
        response = await self._get(worker.url + "/v1/models", self._headers)
        return names_in(response.content) if response is not None and response.is_success else None

    async def _get(self, url: str, headers: dict[str, str]) -> httpx.Response | None:
        """None: not all of an answer has come in time, whatever came of it."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._client.get(url, headers=headers)
        except (httpx.HTTPError, TimeoutError):
            return None


def port_in(headers: httpx.Headers) -> int | None:
    """Of a prefill's bootstrap server. None: it says none, as servers of others."""
    text = headers.get(BOOTSTRAP_PORT_HEADER, "")
    return int(text) if len(text) <= 5 and text.isascii() and text.isdigit() and 0 < int(text) < 1 << 16 else None


def names_in(raw: bytes) -> tuple[str, ...] | None:
    """Of an answer to /v1/models."""
    if len(raw) > MAX_DOCUMENT_BYTES:
        return None
    try:
        names = [model.id for model in msgspec.json.decode(raw, type=ModelList).data]
    except NOT_JSON:
        return None
    return tuple(name for name in names[:MAX_MODELS] if len(name) <= MAX_NAME_CHARS) or None
