"""The API process: HTTP on an event loop, in front of the node. Parent of the other two; its end is the server's end.

start     the children load while this process reads the tokenizer; the ports listen when the node is ready,
          the bootstrap server's before the one whose /health says so
SIGTERM   /health says 503 and nothing new is accepted; what runs may finish within --drain-timeout; exit 0
again     exit at once
a child hangs   /health says 503, later the child is killed (`watchdog.py`)
a child dies    every live request ends with `worker_lost`, then exit 1 with one line that says why
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
from collections.abc import Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any  # what a coroutine is sent and gives back while it runs

import uvicorn
from starlette.types import ASGIApp

from tandem.config import ServerConfig
from tandem.core.bootstrap_registry import Registry, Rejected
from tandem.core.commands import AnnounceDpRank
from tandem.core.values import Cause
from tandem.membership import ClusterSecret
from tandem.server import wire
from tandem.server.api.app import build_app
from tandem.server.api.bootstrap import BootstrapServer, monotonic_now, registration
from tandem.server.api.client import NodeClient
from tandem.server.api.cluster_auth import WriteGuard
from tandem.server.api.connections import Bounds
from tandem.server.api.errors import Problem, Refusal
from tandem.server.api.facts import ModelFacts
from tandem.server.api.hosts import Hosts
from tandem.server.api.http1 import Http1, uvicorn_config
from tandem.server.api.tokenizer import Tokenizer
from tandem.server.api.watchdog import Watchdog
from tandem.server.channel import AsyncChannel, ChannelClosed, ChannelFull, MessageTooLong, open_channel
from tandem.server.processes import ChildName, Children, Listeners, ServerFailure

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
EXIT_GRACE_S = 5.0  # for children that were told to end
FLUSH_S = 2  # for responses that have their last token, or their error
OBITUARY_S = 1.0  # until the kernel has told how a child ended

logger = logging.getLogger("tandem.api")


class NodeLink:
    """The way to the node, for `NodeClient`."""

    def __init__(self) -> None:
        self.channel: AsyncChannel[wire.NodeToApi] | None = None

    def send(self, message: wire.ApiToNode) -> None:
        assert self.channel is not None
        try:
            if isinstance(message, wire.SubmitAll):
                self.channel.send(message, max_bytes=wire.MAX_SUBMIT_BYTES)
            else:
                self.channel.send_always(message)
        except ChannelClosed:
            pass  # whoever waits learns it from the end of the channel
        except ChannelFull as error:
            raise Refusal(Cause.QUEUE_FULL, str(error)) from None
        except MessageTooLong as error:
            raise Refusal(Problem.BODY_TOO_LARGE, f"all samples together make {error}") from None


class QuietServer(uvicorn.Server):
    """Leaves the signals to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class ApiProcess:
    """One life of one server, from the start of its children to their end."""

    def __init__(self, config: ServerConfig, children: Children, listeners: Listeners) -> None:
        self._config = config
        self._children = children
        self._listeners = listeners
        self._ready = asyncio.Event()
        self._stop = asyncio.Event()
        self._loss: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._servers: list[tuple[QuietServer, asyncio.Task[None]]] = []
        self._watching: asyncio.Task[None] | None = None
        self._registry = Registry()
        self._link = NodeLink()
        self._client = NodeClient(self._link, stall_timeout=config.stall_timeout, hosts=Hosts.of(config))

    async def run(self, model: ModelFacts, secret: ClusterSecret | None) -> None:
        """Until a signal ends it. Raises ServerFailure. `secret`: the cluster's, None for a server without peers."""
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._signalled)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        self._link.channel = await open_channel(
            self._children.channel, wire.NodeToApi, receive=self._receive, closed=self._channel_closed
        )
        try:
            tokenizer = load_tokenizer(model)
            if self._listeners.bootstrap is not None:
                guard = WriteGuard(secret, monotonic_now)
                server = BootstrapServer(self._registry, guard)
                self._open(server.app(), self._listeners.bootstrap, http=Bounds().protocol())
            digest_secret = None if secret is None else secret.key("prompt digest")
            app = build_app(self._config, self._client, model, tokenizer, digest_secret=digest_secret)
            self._open(app, self._listeners.http)
            await self._wait_for(self._ready.wait(), self._stop.wait())
            if self._ready.is_set():
                gc.collect()
                gc.freeze()  # what is here now stays; the collector need not look at it again
                self._watch()
                print(ready_line(self._config, self._listeners), flush=True)
                await self._wait_for(self._stop.wait())
            self._client.drain()
            await self._wait_for(self._client.wait_idle(), asyncio.sleep(self._config.drain_timeout))
            self._unregister()  # not before: decode may still have to find us for what runs here
            self._client.abort_all()
        finally:
            await self._end()

    async def _wait_for(self, *ends: Coroutine[Any, Any, object]) -> None:
        """The first of `ends`. Raises ServerFailure when a child is lost, which ends all requests."""
        waits = [asyncio.ensure_future(end) for end in ends]
        await asyncio.wait([*waits, self._loss], return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if self._loss.done():
            reason = await self._cause_of_loss()
            self._client.lose(reason)
            raise ServerFailure(reason)

    async def _cause_of_loss(self) -> str:
        """What was said last, or else what the kernel knows."""
        said = self._loss.result()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + OBITUARY_S
        while not said and not self._children.exit_reason() and loop.time() < deadline:
            await asyncio.sleep(0.01)
        return said or self._children.exit_reason() or "a process of this server ended without a word; see its log"

    async def _end(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        for server, _ in self._servers:
            server.should_exit = True
        for _, task in self._servers:
            await asyncio.wait([task])
        await self._client.close()
        self._link.send(wire.Shutdown())
        await self._children.wait(EXIT_GRACE_S if self._ready.is_set() else 0)
        if self._link.channel is not None:
            self._link.channel.close()

    def _open(self, app: ASGIApp, listener: socket.socket, *, http: type[Http1] = Http1) -> None:
        config = uvicorn_config(app, drain_seconds=FLUSH_S, http=http)
        server = QuietServer(config)
        task = asyncio.get_running_loop().create_task(server.serve(sockets=[listener]))
        task.add_done_callback(partial(self._task_ended, "HTTP server"))
        self._servers.append((server, task))

    def _watch(self) -> None:
        watchdog = Watchdog(self._client, timeout_s=self._config.watchdog_timeout, fire=self._hangs)
        self._watching = asyncio.get_running_loop().create_task(watchdog.run())
        self._watching.add_done_callback(partial(self._task_ended, "watchdog"))

    # -- what comes --------------------------------------------------------------------------------------------------

    def _receive(self, message: wire.NodeToApi) -> None:
        match message:
            case wire.Died():
                self._lose(message.reason)
            case wire.NodeReady():
                self._client.receive(message)
                self._register(message.replica)
                self._ready.set()
            case AnnounceDpRank():
                self._announce(message)
            case _:
                self._client.receive(message)

    def _register(self, replica: wire.ReplicaInfo) -> None:
        """With our own bootstrap server: the same registry that answers decode."""
        if self._listeners.bootstrap is None:
            return
        outcome = self._registry.register(registration(replica), is_own=True)
        if isinstance(outcome, Rejected):
            self._lose(f"cannot register with our own bootstrap server: {outcome.param}: {outcome.reason}")

    def _announce(self, command: AnnounceDpRank) -> None:
        outcome = self._registry.announce(command.room, command.dp_rank, monotonic_now())
        if isinstance(outcome, Rejected):  # we have unregistered: decode finds another life, or nobody
            logger.warning("room %d is not announced: %s", command.room, outcome.reason)

    def _unregister(self) -> None:
        if self._client.node is not None:
            self._registry.unregister(self._client.node.replica.incarnation)

    def _channel_closed(self, _reason: str) -> None:
        self._lose("")

    def _task_ended(self, name: str, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._lose(f"the {name} ended: {error}")

    def _hangs(self, who: ChildName, reason: str) -> None:
        """End it, which the others take for the loss that it is: they write what they still have, and end too."""
        self._lose(f"{reason} (--watchdog-timeout); start the server again")
        self._children.kill_some(who)

    def _lose(self, reason: str) -> None:
        self._unregister()
        if not self._loss.done():
            self._loss.set_result(reason)

    def _signalled(self) -> None:
        if self._stop.is_set():
            logger.warning("second signal: ending at once")
            self._children.kill()
            os._exit(1)
        logger.info("draining: at most %g s, a second signal ends it at once", self._config.drain_timeout)
        self._stop.set()


def ready_line(config: ServerConfig, listeners: Listeners) -> str:
    bootstrap = f", bootstrap port {listeners.bootstrap_port}" if listeners.bootstrap is not None else ""
    return f"tandem: ready: {config.model_name} ({config.role}) at http://{listeners.address}{bootstrap}"


def load_tokenizer(model: ModelFacts) -> Tokenizer:
    try:
        return Tokenizer(Path(model.model_path))
    except Exception as error:  # the tokenizers library raises bare exceptions for a broken file
        raise ServerFailure(f"cannot load the tokenizer of {model.model_path}: {error}") from error


def run_api(
    config: ServerConfig, children: Children, listeners: Listeners, model: ModelFacts, secret: ClusterSecret | None
) -> None:
    """Serve until a signal comes. Raises ServerFailure. Nothing is left running afterwards."""

    async def run() -> None:
        await ApiProcess(config, children, listeners).run(model, secret)

    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # until `run` hears them: half an event loop cannot end well
    try:
        asyncio.run(run())
    finally:
        children.kill()
