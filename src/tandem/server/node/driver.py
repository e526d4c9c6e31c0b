"""The one loop around a node: wait for events, step, carry out, sleep until the node wants to be woken.

One plain thread, in a process without torch. Nothing in it blocks but `Inbox.drain`, which waits for all sockets of
the process at once.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from tandem.core import events
from tandem.core.commands import Effects
from tandem.core.events import Event
from tandem.core.values import SECOND, Cut, Incarnation, Nanos
from tandem.ports import Clock, Node
from tandem.ranks import Rank
from tandem.server import wire
from tandem.server.channel import PolledChannel
from tandem.server.node.dispatch import Siblings, dispatch
from tandem.server.node.injection import FailedTransfers
from tandem.server.node.local_peer import LocalPeer, SelectorPoller
from tandem.server.node.peers import Peers
from tandem.server.node.workers import Engines, Workers

WORKER_HIGH_BYTES = 16 << 20  # no more is read from the API while so much waits for the worker


class Observer(Protocol):
    """Sees the stream from outside: flight recorder, log, metrics. Must not change what it sees."""

    def before(self, now: Nanos, happened: Sequence[Event]) -> None: ...

    def after(self, now: Nanos, happened: Sequence[Event], effects: Effects) -> None: ...


class Inbox:
    """What has happened since the last step, from all sockets of the node process."""

    def __init__(
        self,
        *,
        poller: SelectorPoller,
        api: PolledChannel[wire.ApiToNode],
        ranks: Sequence[Rank],
        workers: Sequence[PolledChannel[wire.WorkerToNode]],
        clock: Clock,
        failures: FailedTransfers,
    ) -> None:
        self._poller = poller
        self._clock = clock
        self.failures = failures
        self.prompt_came: Callable[[wire.Submit], None] = lambda submit: None  # who else wants the prompts
        self._happened: list[Event] = []
        self._peers: Peers | None = None
        self.questions: list[wire.Query] = []
        self.is_over = False
        self.api = LocalPeer("API process", api, poller, self._from_api)
        self.workers = Workers(ranks, workers, poller, report=self._from_workers, answer=self.api.send)

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
            self.workers.send(wire.Disconnect(event.peer))
        self._happened.append(event)

    def reach(self, peer: Incarnation, cut: Cut, shards: tuple[wire.DataEndpoint, ...]) -> None:
        """What a peer says of its data plane."""
        self.workers.send(wire.Reach(peer, cut, shards))

    def wait_for_engines(self) -> Engines | None:
        """What the engines report when they have loaded the model; None when the server ends before."""
        while self.workers.engines is None and not self.is_over:
            self._poll(None)
        return self.workers.engines

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
        self.workers.flush()
        self.api.flush()
        if self._peers is not None:
            self._peers.flush()
        is_read = self.workers.pending_bytes < WORKER_HIGH_BYTES
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
                    self.workers.send(submit.encoded)
                    self.prompt_came(submit)
                    self._happened.append(events.RequestArrived(submit.request))
            case wire.Rendered(submit):
                self.workers.send(submit.encoded)
                self.prompt_came(submit)
                self._happened.append(events.PromptRendered(submit.request))
            case wire.Query(what="worker"):
                self.workers.send(message)
            case wire.Query():
                if message.what == "flush":
                    self._happened.append(events.FlushRequested())
                if message.what == "pulse":
                    self.workers.send(wire.Ping())
                self.questions.append(message)
            case wire.Connect():
                self.peers.connect(message.replica, message.address)
            case wire.FailTransfers(prob):
                self.failures.prob = prob
            case wire.BatchLaunched():
                self.workers.send(message)
            case wire.Shutdown():
                self.is_over = True
            case _:
                self._happened.append(message)

    def _from_workers(self, event: Event) -> None:
        self._happened.append(self.workers.with_rank(self.failures.instead_of(event)))


def drive(
    node: Node,
    inbox: Inbox,
    clock: Clock,
    *,
    observers: Sequence[Observer],
    answer: Callable[[wire.Query, Nanos], bytes],
    siblings: Siblings,
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
                dispatch(command, api=inbox.api, workers=inbox.workers, peers=inbox.peers, siblings=siblings)
            inbox.flush()
            for observer in observers:
                observer.after(now, happened, effects)
            wake_at = effects.wake_at
        questions, inbox.questions = inbox.questions, []
        for question in questions:
            inbox.api.send(wire.Answer(question.id, answer(question, now)))
