"""The one loop around a node: wait for events, step, carry out, sleep until the node wants to be woken.

One plain thread, in a process without torch. Nothing in it blocks but `Inbox.drain`, which waits for all sockets of
the process at once.
"""

import contextlib
import selectors
import socket
from collections.abc import Callable, Sequence
from typing import Any, Protocol  # Any: what a neighbour says differs with the neighbour

import msgspec

from tandem.core import events
from tandem.core.commands import Effects
from tandem.core.events import Event
from tandem.core.values import SECOND, Incarnation, Nanos
from tandem.ports import Clock, Node
from tandem.server import wire
from tandem.server.channel import ChannelClosed, ChannelFull, MalformedFrame, PolledChannel
from tandem.server.node.dispatch import dispatch
from tandem.server.node.injection import FailedTransfers
from tandem.server.node.peers import Peers

WORKER_HIGH_BYTES = 16 << 20  # no more is read from the API while so much waits for the worker


class LocalPeerLost(Exception):
    """A process of this server is gone, or does not keep up: the server ends. An empty reason: it said nothing."""

    def __init__(self, who: str, reason: str) -> None:
        super().__init__(f"{who}: {reason}")
        self.who = who
        self.reason = reason


class Observer(Protocol):
    """Sees the stream from outside: flight recorder, log, metrics. Must not change what it sees."""

    def before(self, now: Nanos, happened: Sequence[Event]) -> None: ...

    def after(self, now: Nanos, happened: Sequence[Event], effects: Effects) -> None: ...


class Poller:
    """The sockets of a process and what to call when one is ready."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def watch(self, sock: socket.socket, mask: int, ready: Callable[[int], None]) -> None:
        """Watch, or change what is watched."""
        try:
            self._selector.modify(sock, mask, ready)
        except KeyError:
            self._selector.register(sock, mask, ready)

    def unwatch(self, sock: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):  # never watched, or closed
            self._selector.unregister(sock)

    def poll(self, timeout_s: float | None) -> None:
        for key, mask in self._selector.select(timeout_s):
            key.data(mask)


class LocalPeer:
    """A channel to another process of this server; its loss is the end of the server."""

    def __init__(
        self,
        name: str,
        channel: PolledChannel,  # of whatever this neighbour says
        poller: Poller,
        take: Callable[[Any], None],
    ) -> None:
        self._name = name
        self._channel = channel
        self._poller = poller
        self._take = take
        self._mask = 0
        self.is_read = True
        self.watch()

    @property
    def pending_bytes(self) -> int:
        return self._channel.pending_bytes

    def send(self, message: msgspec.Struct) -> None:
        try:
            self._channel.send(message)
        except ChannelFull as error:
            raise LocalPeerLost(self._name, str(error)) from error

    def flush(self) -> None:
        try:
            self._channel.flush()
        except ChannelClosed as error:
            self._read_last_words()
            raise LocalPeerLost(self._name, "") from error
        self.watch()

    def watch(self) -> None:
        reads = selectors.EVENT_READ if self.is_read else 0
        mask = reads | (selectors.EVENT_WRITE if self._channel.pending_bytes else 0)
        if mask == self._mask:
            return
        self._mask = mask
        if mask:
            self._poller.watch(self._channel.sock, mask, self._ready)
        else:
            self._poller.unwatch(self._channel.sock)

    def _ready(self, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self.flush()
        if mask & selectors.EVENT_READ:
            self._read()

    def _read(self) -> None:
        try:
            messages = self._channel.receive()
        except ChannelClosed as error:
            raise LocalPeerLost(self._name, "") from error
        except MalformedFrame as error:
            raise LocalPeerLost(self._name, f"said something that is no message: {error}") from error
        for message in messages:
            self._take(message)

    def _read_last_words(self) -> None:
        """Somebody who closed may have said why."""
        while True:
            try:
                messages = self._channel.receive()
            except (ChannelClosed, MalformedFrame):
                return
            if not messages:
                return
            for message in messages:
                self._take(message)


class Inbox:
    """What has happened since the last step, from all sockets of the node process."""

    def __init__(
        self,
        *,
        poller: Poller,
        api: PolledChannel[wire.ApiToNode],
        worker: PolledChannel[wire.WorkerToNode],
        clock: Clock,
        failures: FailedTransfers,
    ) -> None:
        self._poller = poller
        self._clock = clock
        self.failures = failures
        self._happened: list[Event] = []
        self._peers: Peers | None = None
        self.questions: list[wire.Query] = []
        self.engine: wire.EngineReady | None = None
        self.echoes = 0  # of the worker
        self.is_over = False
        self.api = LocalPeer("API process", api, poller, self._from_api)
        self.worker = LocalPeer("worker", worker, poller, self._from_worker)

    def meet(self, peers: Peers) -> None:
        """From here on the peers' timers are kept."""
        self._peers = peers

    @property
    def peers(self) -> Peers:
        assert self._peers is not None
        return self._peers

    def report(self, event: Event) -> None:
        """What the peers say and do."""
        if isinstance(event, events.PeerLost):
            self.worker.send(wire.Disconnect(event.peer))
        self._happened.append(event)

    def reach(self, peer: Incarnation, shards: tuple[wire.DataEndpoint, ...]) -> None:
        """What a peer says of its data plane."""
        self.worker.send(wire.Reach(peer, shards))

    def wait_for_engine(self) -> wire.EngineReady | None:
        """What the engine reports when it has loaded the model; None when the server ends before."""
        while self.engine is None and not self.is_over:
            self._poller.poll(None)
        return self.engine

    def drain(self, *, until: Nanos | None) -> list[Event]:
        """Wait until something happens, a question comes, the server ends, or `until`; take what has happened."""
        self._poll(0)
        while not (self._happened or self.questions or self.is_over):
            timeout_s = self._patience(until)
            if timeout_s == 0 and until is not None and self._clock.now() >= until:
                break
            self._poll(timeout_s)
        happened, self._happened = self._happened, []
        return happened

    def flush(self) -> None:
        """Write what was sent since the last call."""
        self.worker.flush()
        self.api.flush()
        if self._peers is not None:
            self._peers.flush()
        is_read = self.worker.pending_bytes < WORKER_HIGH_BYTES
        if is_read != self.api.is_read:
            self.api.is_read = is_read
            self.api.watch()

    def _poll(self, timeout_s: float | None) -> None:
        """Sockets first, timers after: a peer is not silent whose bytes are here and not read yet."""
        self._poller.poll(timeout_s)
        if self._peers is not None:
            self._peers.tick()
        self.flush()

    def _patience(self, until: Nanos | None) -> float | None:
        deadlines = [until, self._peers.next_deadline() if self._peers is not None else None]
        times = [deadline for deadline in deadlines if deadline is not None]
        return max(0, min(times) - self._clock.now()) / SECOND if times else None

    def _from_api(self, message: wire.ApiToNode) -> None:
        match message:
            case wire.SubmitAll(submits):
                for submit in submits:
                    self.worker.send(submit.payload)
                    self._happened.append(events.RequestArrived(submit.request))
            case wire.Rendered(submit):
                self.worker.send(submit.payload)
                self._happened.append(events.PromptRendered(submit.request))
            case wire.Query(what="worker"):
                self.worker.send(message)
            case wire.Query():
                if message.what == "flush":
                    self._happened.append(events.FlushRequested())
                if message.what == "pulse":
                    self.worker.send(wire.Ping())
                self.questions.append(message)
            case wire.Connect():
                self.peers.connect(message.replica, message.address)
            case wire.FailTransfers(prob):
                self.failures.prob = prob
            case wire.Shutdown():
                self.is_over = True
            case _:
                self._happened.append(message)

    def _from_worker(self, message: wire.WorkerToNode) -> None:
        match message:
            case wire.EngineReady():
                self.engine = message
            case wire.Died():
                raise LocalPeerLost(message.who, message.reason)
            case wire.Answer():
                self.api.send(message)
            case wire.Echo():
                self.echoes += 1
            case _:
                self._happened.append(self.failures.instead_of(message))


def drive(
    node: Node,
    inbox: Inbox,
    clock: Clock,
    *,
    observers: Sequence[Observer],
    answer: Callable[[wire.Query, Nanos], bytes],
) -> None:
    """Run until the API process says Shutdown. Raises LocalPeerLost."""
    wake_at: Nanos | None = None
    while not inbox.is_over:
        happened = inbox.drain(until=wake_at)
        now = clock.now()
        if happened or (wake_at is not None and now >= wake_at):
            for observer in observers:
                observer.before(now, happened)
            effects = node.step(happened, now)
            for command in effects.commands:
                dispatch(command, api=inbox.api, worker=inbox.worker, peers=inbox.peers)
            inbox.flush()
            for observer in observers:
                observer.after(now, happened, effects)
            wake_at = effects.wake_at
        questions, inbox.questions = inbox.questions, []
        for question in questions:
            inbox.api.send(wire.Answer(question.id, answer(question, now)))
