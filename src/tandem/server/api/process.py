"""The API process: HTTP on an event loop, in front of the nodes. Parent of the others; its end is the server's end.

start     the children load while this process reads the tokenizer; the ports listen when all nodes are ready,
          the bootstrap server's before the one whose /health says so
SIGTERM, SIGINT, SIGHUP
          /health says 503 and nothing new is accepted; what runs may finish within --drain-timeout, and ends with
          `draining` after that; exit 0
again     exit at once
a child hangs   its rank takes no more requests, later the child is killed (`watchdog.py`)
this process hangs
                its loop's watchdog ends it, and the kernel the children (`loop_watchdog.py`)
a child dies    every live request of its rank ends with `worker_lost`. The only rank: exit 1 with one line that says
                why. One of several: the others serve, it is started anew, unless they step together (DP attention):
                then it takes all of them with it. On several hosts the only one is started anew, too, when all
                its hosts are there
"""

import asyncio
import contextlib
import gc
import itertools
import logging
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any  # what a coroutine is sent and gives back while it runs

from starlette.types import ASGIApp

from tandem.config import ServerConfig
from tandem.core.bootstrap_registry import BootstrapRegistry
from tandem.core.commands import AnnounceDpRank, GatherLoad
from tandem.core.dp_dispatch import method_for
from tandem.core.settings import DpConflictPolicy, LoadBalanceMethod
from tandem.core.stall_detector import who_began
from tandem.core.values import Cause
from tandem.environment import FORCE_QUERY, environment_switch
from tandem.membership import ClusterSecret
from tandem.metrics.request_stats import RequestStats
from tandem.server import wire
from tandem.server.api.accept import BoundedServer
from tandem.server.api.allowed_hosts import AllowedHosts
from tandem.server.api.app import build_app
from tandem.server.api.bootstrap import BootstrapServer, monotonic_now
from tandem.server.api.bootstrap_questions import registration
from tandem.server.api.client import NodeClient
from tandem.server.api.cluster_auth import WriteGuard
from tandem.server.api.connections import ConnectionBounds, api_bounds, raise_fd_limit
from tandem.server.api.errors import Problem
from tandem.server.api.gathering import Gathering
from tandem.server.api.limits import Task
from tandem.server.api.loop_watchdog import LoopWatchdog, end_process, try_to
from tandem.server.api.model_facts import ModelFacts
from tandem.server.api.node_link import NodeLink
from tandem.server.api.node_rank import NodeRank
from tandem.server.api.tokenizer import Tokenizer
from tandem.server.api.watchdog import Watchdog
from tandem.server.channel import open_channel
from tandem.server.fault_records import OFF, folder_of
from tandem.server.hosts.leader import Hooks, HostLost, OtherHosts
from tandem.server.logs import say
from tandem.server.node.settings import delayer_settings
from tandem.server.processes import (
    EXIT_GRACE_S,
    STOP_SIGNALS,
    ChildName,
    Children,
    Listeners,
    Replicas,
    ServerFailure,
    topology_of,
)
from tandem.server.tracing import make_tracing

ABORT_S = 2.0  # for nodes to say that what was aborted has ended
FLUSH_S = 2  # for responses that have their last token, or their error
RESTART_S, RESTART_MAX_S = 0.25, 30.0  # until a replica is started anew; doubles while it dies before it is ready
LOADING_TIMES = 3.0  # as long as the whole server took to be ready, a replica may take; doubles with each attempt
READY_POLL_S = 0.05
URGENT_REQUESTS = 64  # beyond those that nodes may hold, of which some may take the place of others there
HALVES_REFUSED_BY_NODES = 256  # beyond those that nodes may hold, at once
RECORD_S = 2.0  # for a node that hangs, to write what it did last
EXIT_REASON_S = 1.0  # until the kernel has told how a child ended

MakeHosts = Callable[[Hooks], OtherHosts]

logger = logging.getLogger("tandem.api")


class QuietServer(BoundedServer):
    """Leaves the signals to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass
class Restart:
    """Of one DP rank."""

    task: asyncio.Task[None]
    attempt: int
    is_loading: bool = False  # the new processes are there; not ready yet


class ApiProcess:
    """One life of one server, from the start of its children to their end."""

    def __init__(self, config: ServerConfig, replicas: Replicas, listeners: Listeners, make_hosts: MakeHosts) -> None:
        self._config = config
        self._replicas = replicas
        self._hosts = make_hosts(Hooks(self._lose_elsewhere, self._drain))
        self._farewell = ""  # what the server ends for, unless it should
        self._listeners = listeners
        self._ready = asyncio.Event()
        self._stop = asyncio.Event()
        self._loss: asyncio.Future[tuple[int | None, str]] = asyncio.get_running_loop().create_future()
        self._servers: list[tuple[QuietServer, asyncio.Task[None]]] = []
        self._watching: dict[int, asyncio.Task[None]] = {}  # by DP rank
        self._watchdogs: dict[int, Watchdog] = {}  # by DP rank
        self._fatal_messages: dict[int, str] = {}  # by DP rank, where ranks end together
        self._restarts: dict[int, Restart] = {}  # of DP ranks that are not back yet
        self._first_start_s = 0.0  # what the server took to be ready
        self._has_said_goodbye = False  # the nodes end because we told them to
        self._loop_watchdog = LoopWatchdog(timeout_s=config.watchdog_timeout, fire=self._loop_hangs)
        self._tracing = make_tracing(
            is_enabled=config.enable_trace,
            endpoint=config.otlp_traces_endpoint,
            service=f"tandem-{config.role}",
            attributes={"tandem.role": config.role, "tandem.port": config.port},
            note=logger.warning,
        )
        self._registry = BootstrapRegistry()
        self._links = [NodeLink() for _ in range(config.dp_size)]
        self._steps_together = config.enable_dp_attention
        self._gathering = Gathering(delayer_settings(config, topology_of(config, 0)), self._tell, monotonic_now)
        self._client = NodeClient(
            *self._links,
            stall_timeout=config.stall_timeout,
            hosts=AllowedHosts.of(config),
            method=method_for(LoadBalanceMethod(config.load_balance_method), config.role),
            rooms_move=config.disaggregation_dp_rank_conflict == DpConflictPolicy.RESOLVE,
            force_query=environment_switch(FORCE_QUERY),
            announce=self._announce,
            fault_folder=folder_of(config.fault_records),
        )

    async def run(self, model: ModelFacts, secret: ClusterSecret | None) -> None:
        """Until a signal ends it. Raises ServerFailure. `secret`: the cluster's, None for a server without peers."""
        loop = asyncio.get_running_loop()
        raise_fd_limit()
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                loop.add_signal_handler(number, self._signalled)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        began = loop.time()
        for dp_rank in self._replicas.children:
            await self._meet(dp_rank)
        try:
            tokenizer = load_tokenizer(model)
            if self._listeners.bootstrap is not None:
                guard = WriteGuard(secret, monotonic_now)
                server = BootstrapServer(self._registry, guard)
                self._open(server.app(), self._listeners.bootstrap, ConnectionBounds())
            digest_secret, stats = None if secret is None else secret.key("prompt digest"), RequestStats()
            app = build_app(
                self._config,
                self._client,
                model,
                tokenizer,
                digest_secret=digest_secret,
                tracing=self._tracing,
                stats=stats,
            )
            self._open(app, self._listeners.http, self._bounds(lambda _waited: stats.refuse(Problem.BUSY.value)))
            await self._wait_for(self._bring_all(), self._stop.wait())
            await self._wait_for(self._ready.wait(), self._stop.wait())
            if self._ready.is_set():
                self._first_start_s = loop.time() - began
                gc.collect()
                gc.freeze()  # what is here now stays; the collector need not look at it again
                for dp_rank in self._replicas.children:
                    self._watch(dp_rank)
                self._loop_watchdog.start()
                say(ready_line(self._config, self._listeners))
                if self._config.role == "unified":  # the halves of a pair are asked by a router
                    chats = "default" in tokenizer.templates
                    say(request_to_copy(self._config, self._listeners, model.task, chats=chats))
                await self._wait_for(self._stop.wait())
            self._client.drain()
            await self._wait_for(self._client.wait_idle(), asyncio.sleep(self._config.drain_timeout))
            self._unregister()  # not before: decode may still have to find us for what runs here
            self._client.abort_all(Cause.DRAINING)
            await self._wait_for(self._client.wait_idle(), asyncio.sleep(ABORT_S))
            if self._client.num_live:  # a node hangs, and its watchdog needs longer
                self._client.lose("the node kept silent while the server ended")
        except ServerFailure as failure:  # somebody else's, or it is on record already
            self._farewell = str(failure)
            raise
        except Exception as error:
            self._farewell = f"the API process ends: {type(error).__name__} {error}"
            self._client.last_steps.write_last(self._farewell)
            raise
        finally:
            await self._end()

    async def _wait_for(self, *ends: Coroutine[Any, Any, object]) -> None:
        """The first of `ends`. Raises what that raised, and ServerFailure when a child is lost: all requests end."""
        waits = [asyncio.ensure_future(end) for end in ends]
        await asyncio.wait([*waits, self._loss], return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if self._loss.done():
            reason = await self._cause_of_loss()
            self._client.lose(reason)
            if self._ready.is_set():  # else there was nothing to decide, and most likely a flag does not fit the model
                self._client.last_steps.write(f"the server ends: {reason}")
            raise ServerFailure(reason)
        for wait in waits:
            if wait.done():
                wait.result()

    async def _bring_all(self) -> None:
        """Start what waits for other hosts; on one host it has been started."""
        self._hosts.open()
        for dp_rank in range(self._config.dp_size):
            if dp_rank in self._replicas.children:
                continue
            try:
                elsewhere = await self._hosts.bring(dp_rank, timeout_s=self._config.dist_timeout)
                self._replicas.restart(dp_rank, elsewhere)
            except (HostLost, OSError) as error:
                self._end_with(dp_rank, str(error))
                break
            await self._meet(dp_rank)

    async def _meet(self, dp_rank: int) -> None:
        """Open the channel to the node of this rank, which has just been started."""
        children = self._replicas.children[dp_rank]
        self._links[dp_rank].channel = await open_channel(
            children.channel,
            wire.NodeToApi,
            receive=partial(self._receive, dp_rank),
            closed=lambda _reason: self._lose(dp_rank, "", children),
        )

    async def _cause_of_loss(self) -> str:
        dp_rank, said = self._loss.result()
        if dp_rank is None:
            return said
        if self._steps_together and not said:
            return await self._who_began()
        reason = await self._reason(dp_rank, said)
        return reason if self._config.dp_size == 1 else f"DP rank {dp_rank}: {reason}"

    async def _who_began(self) -> str:
        """Of ranks that end together: who had something to say, or else was ended by a signal."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + EXIT_REASON_S
        while True:
            found = self._fatal_messages | {
                dp_rank: children.exit_reason()
                for dp_rank, children in self._replicas.children.items()
                if children.was_killed or loop.time() >= deadline
            }
            for dp_rank, reason in found.items():
                if reason:
                    return f"DP rank {dp_rank}: {reason}"
            if loop.time() >= deadline:
                return self._without_a_word
            await asyncio.sleep(0.01)

    async def _reason(self, dp_rank: int, said: str) -> str:
        """What was said last, or else what the kernel knows."""
        if said:
            return said
        loop = asyncio.get_running_loop()
        children = self._replicas.children[dp_rank]
        deadline = loop.time() + EXIT_REASON_S
        while not children.exit_reason() and loop.time() < deadline:
            await asyncio.sleep(0.01)
        return children.exit_reason() or self._without_a_word

    @property
    def _without_a_word(self) -> str:
        broke = "" if self._config.nnodes == 1 else ", or the connection to one on another host broke"
        return f"a process of this server ended without a word{broke}; see its log"

    async def _end(self) -> None:
        self._loop_watchdog.stop()
        self._gathering.close()
        for task in (*self._watching.values(), *(restart.task for restart in self._restarts.values())):
            task.cancel()
        for server, _ in self._servers:
            server.should_exit = True
        for _, task in self._servers:
            await asyncio.wait([task])
        await self._client.close()
        self._has_said_goodbye = True
        for link in self._links:
            link.send(wire.Shutdown())
        await self._replicas.wait(EXIT_GRACE_S if self._ready.is_set() else 0)
        for link in self._links:
            link.close()
        await self._hosts.close(self._farewell)
        self._tracing.close()

    def _bounds(self, refused: Callable[[float | None], object]) -> ConnectionBounds:
        """More requests than all nodes may hold would be refused by them, once their bodies were read and parsed. Only
        the body says which of them would not be, where priorities count, and whose other half waits on another server:
        a node that refuses a half tells it, so that it does not wait for its deadline.
        """
        config = self._config
        held = config.dp_size * (config.max_running_requests + config.max_queued_requests)
        if config.role != "unified":
            held += HALVES_REFUSED_BY_NODES
        if config.enable_priority_scheduling:
            held += URGENT_REQUESTS
        return api_bounds(max_requests=held, write_s=config.stall_timeout, refused=refused)

    def _open(self, app: ASGIApp, listener: socket.socket, bounds: ConnectionBounds) -> None:
        server = QuietServer(app, bounds, drain_seconds=FLUSH_S)
        task = asyncio.get_running_loop().create_task(server.serve(sockets=[listener]))
        task.add_done_callback(partial(self._task_ended, "HTTP server"))
        self._servers.append((server, task))

    def _watch(self, dp_rank: int) -> None:
        rank = self._client.ranks[dp_rank]
        watchdog = Watchdog(rank, timeout_s=self._config.watchdog_timeout, fire=partial(self._hangs, dp_rank))
        self._watchdogs[dp_rank] = watchdog
        self._watching[dp_rank] = asyncio.get_running_loop().create_task(watchdog.run())
        self._watching[dp_rank].add_done_callback(partial(self._task_ended, "watchdog"))

    # -- what comes --------------------------------------------------------------------------------------------------

    def _receive(self, dp_rank: int, message: wire.NodeToApi) -> None:
        match message:
            case wire.Died():
                self._lose(dp_rank, message.reason, self._replicas.children[dp_rank])
            case wire.NodeReady():
                self._client.receive(message, dp_rank)
                self._register(message.replica)
                if self._client.has_started:
                    self._ready.set()
            case AnnounceDpRank():
                self._announce(message)
            case wire.BatchLaunched():
                for other, link in enumerate(self._links):
                    if other != dp_rank:
                        link.send(message)
            case GatherLoad():
                self._gathering.say(dp_rank, message)
            case _:
                self._client.receive(message, dp_rank)

    def _tell(self, dp_rank: int, message: wire.ApiToNode) -> None:
        self._links[dp_rank].send(message)

    def _register(self, replica: wire.ReplicaInfo) -> None:
        """With our own bootstrap server: the same registry that answers decode."""
        if self._listeners.bootstrap is None:
            return
        outcome = self._registry.register(registration(replica), is_own=True)
        if outcome is not None:
            reason = f"cannot register with our own bootstrap server: {outcome.param}: {outcome.reason}"
            self._end_with(replica.dp_rank, reason)

    def _announce(self, announced: AnnounceDpRank) -> None:
        outcome = self._registry.announce(announced.room, announced.dp_rank, monotonic_now())
        if outcome is not None:  # we have unregistered: decode finds another life, or nobody
            logger.warning("room %d is not announced: %s", announced.room, outcome.reason)
        self._client.tell_elsewhere(announced)

    def _unregister(self) -> None:
        for rank in self._client.there:
            self._unregister_rank(rank)

    def _unregister_rank(self, rank: NodeRank) -> None:
        if rank.node is not None:
            self._registry.unregister(rank.node.replica.incarnation)

    def _task_ended(self, name: str, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._end_with(None, f"the {name} ended: {error}")

    def _hangs(self, dp_rank: int, who: ChildName, reason: str) -> None:
        """End it, which the others take for the loss that it is: they write what they still have, and end too."""
        if self._steps_together:
            stalls = {rank: watchdog.longest for rank, watchdog in self._watchdogs.items()}
            dp_rank = list(stalls)[who_began(list(stalls.values()))]
            who, reason = stalls[dp_rank].who, self._watchdogs[dp_rank].describe()
        children = self._replicas.children[dp_rank]
        self._lose(dp_rank, f"{reason} (--watchdog-timeout)", children, remedy="; start the server again")
        if who == "node" and self._config.fault_records != OFF:
            children.ask_for_record()
            asyncio.get_running_loop().call_later(RECORD_S, children.kill_some, who)
        else:
            children.kill_some(who)

    def _loop_hangs(self, line: str) -> None:
        """In the thread of the watchdog. What the loop was in the middle of may be half done on record."""
        try_to(partial(self._client.last_steps.write_last, line))
        end_process(line)

    # -- a rank that is lost -----------------------------------------------------------------------------------------

    def _lose(self, dp_rank: int, reason: str, children: Children, *, remedy: str = "") -> None:
        """The only rank takes the server with it, and so does one that has never been ready; another comes back.

        remedy: goes with the reason where the server ends
        """
        if children is not self._replicas.children[dp_rank] or self._has_said_goodbye:
            return  # it has been replaced already, or ends as it was told to
        if reason:
            self._fatal_messages.setdefault(dp_rank, f"{reason}{remedy}")
        ends_alone = self._config.dp_size == 1 and self._config.nnodes == 1
        if ends_alone or self._steps_together or not self._ready.is_set():
            self._end_with(dp_rank, f"{reason}{remedy}")
        elif dp_rank not in self._restarts or self._restarts[dp_rank].is_loading:
            before = self._restarts.get(dp_rank)
            if before is not None:
                before.task.cancel()  # it waits for processes that are gone
            attempt = 0 if before is None else before.attempt + 1
            task = asyncio.get_running_loop().create_task(self._restart(dp_rank, reason, attempt))
            task.add_done_callback(partial(self._task_ended, "restart of a replica"))
            self._restarts[dp_rank] = Restart(task, attempt)

    def _lose_elsewhere(self, dp_rank: int, reason: str) -> None:
        """On another host. One that lost its worker before this replica was started is noticed by who starts it."""
        children = self._replicas.children.get(dp_rank)
        if children is not None:
            children.told_loss = children.told_loss or reason
            self._lose(dp_rank, reason, children)

    async def _restart(self, dp_rank: int, said: str, attempt: int) -> None:
        """End what is left of the replica, and start it anew unless the server is about to end."""
        rank = self._client.ranks[dp_rank]
        self._unregister_rank(rank)
        reason = await self._reason(dp_rank, said)
        self._client.lose(f"DP rank {dp_rank}: {reason}", dp_rank)
        if (watching := self._watching.pop(dp_rank, None)) is not None:
            watching.cancel()
        logger.warning("DP rank %d is lost: %s", dp_rank, reason)
        self._client.last_steps.write(f"DP rank {dp_rank} is lost")
        self._links[dp_rank].close()
        if not await self._start_anew(dp_rank, attempt):
            return
        self._restarts[dp_rank].is_loading = True
        await self._meet(dp_rank)
        loop = asyncio.get_running_loop()
        patience_s = loading_patience_s(self._first_start_s, self._config.watchdog_timeout, attempt)
        deadline = loop.time() + patience_s
        while rank.node is None:  # should it die or hang instead, `_lose` cancels this and starts the next attempt
            await asyncio.sleep(READY_POLL_S)
            if rank.node is None and loop.time() >= deadline:
                self._lose(dp_rank, f"it was not ready after {patience_s:.1f} s", self._replicas.children[dp_rank])
        del self._restarts[dp_rank]
        self._watch(dp_rank)
        logger.info("DP rank %d serves again", dp_rank)

    async def _start_anew(self, dp_rank: int, attempt: int) -> bool:
        """False: the server is about to end. Where the machine has no process left for it, others serve meanwhile."""
        for number in itertools.count(attempt):
            await asyncio.sleep(restart_delay_s(number))
            await self._replicas.children[dp_rank].node_ends(RECORD_S)
            if self._stop.is_set():
                break
            self._replicas.end(dp_rank)
            try:
                elsewhere = await self._hosts.bring(dp_rank, timeout_s=None)
                self._replicas.restart(dp_rank, elsewhere)
                return True
            except (HostLost, OSError) as error:
                logger.warning("DP rank %d cannot be started yet: %s", dp_rank, error)
        return False

    def _end_with(self, dp_rank: int | None, reason: str) -> None:
        """The server ends. dp_rank: whose end it is; None: that of no rank in particular."""
        self._unregister()
        if not self._loss.done():
            self._loss.set_result((dp_rank, reason))

    def _signalled(self) -> None:
        if self._stop.is_set():
            logger.warning("second signal: ending at once")
            self._replicas.kill()
            os._exit(1)
        self._drain("a second signal ends it at once")

    def _drain(self, note: str) -> None:
        logger.info("draining: at most %g s, %s", self._config.drain_timeout, note)
        self._stop.set()


def restart_delay_s(attempt: int) -> float:
    """`attempt`: how often it has died before it was ready, since it last served."""
    return min(RESTART_MAX_S, RESTART_S * 2.0 ** min(attempt, 32))


def loading_patience_s(first_start_s: float, watchdog_timeout: float, attempt: int) -> float:
    """For a replica that loads again, until it is taken for one that hangs."""
    return watchdog_timeout + LOADING_TIMES * first_start_s * 2.0 ** min(attempt, 32)


def ready_line(config: ServerConfig, listeners: Listeners) -> str:
    bootstrap = f", bootstrap port {listeners.bootstrap_port}" if listeners.bootstrap is not None else ""
    return f"tandem: ready: {config.model_name} ({config.role}) at http://{listeners.address}{bootstrap}"


def request_to_copy(config: ServerConfig, listeners: Listeners, task: Task, *, chats: bool) -> str:
    """A line for a shell. chats: the model has a template for them."""
    path, body = "chat/completions", '{"messages": [{"role": "user", "content": "What is 3 + 4?"}]}'
    if task is Task.SCORES:
        path, body = "rerank", '{"query": "a fruit", "documents": ["an apple", "a car"]}'
    elif task is Task.EMBEDDINGS:
        path, body = "embeddings", '{"input": "an apple"}'
    elif not chats:
        path, body = "completions", '{"prompt": "What is 3 + 4?", "max_tokens": 32}'
    key = '-H "authorization: Bearer $TANDEM_API_KEY" ' if config.api_key is not None else ""
    return f"curl -s http://{listeners.address}/v1/{path} {key}-H 'content-type: application/json' -d '{body}'"


def load_tokenizer(model: ModelFacts) -> Tokenizer:
    try:
        return Tokenizer(Path(model.model_path), template=model.chat_template)
    except Exception as error:  # the tokenizers library raises bare exceptions for a broken file
        raise ServerFailure(f"cannot load the tokenizer of {model.model_path}: {error}") from error


def run_api(
    config: ServerConfig,
    replicas: Replicas,
    listeners: Listeners,
    model: ModelFacts,
    secret: ClusterSecret | None,
    make_hosts: MakeHosts,
) -> None:
    """Serve until a signal comes. Raises ServerFailure. Nothing is left running afterwards."""

    async def run() -> None:
        await ApiProcess(config, replicas, listeners, make_hosts).run(model, secret)

    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # until `run` hears them: half an event loop cannot end well
    try:
        asyncio.run(run())
    finally:
        replicas.kill()
