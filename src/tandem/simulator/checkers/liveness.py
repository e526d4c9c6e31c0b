"""Everything ends: requests, waits, what they held, and the reasons for which they may fail."""

from collections import defaultdict, deque

from tandem.core.commands import AskDpRank, Command, FailRequest, LearnPeer
from tandem.core.events import Event
from tandem.core.kv.pool import PageState
from tandem.core.scheduler import inspect
from tandem.core.scheduler.request_state import State
from tandem.core.settings import Role
from tandem.core.values import Cause, Incarnation, Nanos
from tandem.server.api.live_requests import SILENCE_GRACE_NS
from tandem.simulator.actors.clients import Half
from tandem.simulator.actors.replica import Life
from tandem.simulator.checkers.base import GRACE_NS, End, Watched, where
from tandem.simulator.clock import MILLION
from tandem.simulator.oracle import Violation

MAX_IDLE_STEPS = 1000
NODE_GRACE_NS = SILENCE_GRACE_NS // 2  # for a node, whose edge speaks for it after all of that
MAX_QUESTIONS = 10  # within the time after which one question would be put again
Question = LearnPeer | AskDpRank
LETS_GO = (Cause.ABORTED, Cause.PEER_ABORTED, Cause.PEER_LOST)


class NothingLeft:
    """At idle: no request, page, slot, lock, timer, grant or transfer is left of anybody."""

    id = "S17"

    def at_idle(self, life: Life) -> None:
        state, store = life.node.state, life.store
        left = {
            "requests": len(state.requests),
            "queued": sum(map(len, state.queues.values())),
            "rooms": len(state.rooms),
            "result slots": len(state.results.owners),
            "owned pages": state.pool.counts[PageState.OWNED],
            "quarantined pages": state.pool.counts[PageState.QUARANTINED],
            "pinned pages": state.tree.num_pinned,
            "batches in flight": len(state.inflight),
            "decode rows": state.micro_batches.num_members,
            "requests of the workers": sum(len(worker.executor.requests) for worker in life.workers),
            "decode rows of the workers": sum(len(worker.executor.decoding) for worker in life.workers),
            "grants": len(store.grants()),
            "pulls": sum(reader.puller.held().live_rooms for reader in store.readers),
        }
        held = [f"{count} {what}" for what, count in left.items() if count]
        if held:
            raise Violation(self.id, f"{where(life)} still holds {', '.join(held)}")


class Waits:
    """Every wait has a name and a deadline, and a failure says in which wait it was."""

    id = "W1"

    def recount(self, life: Life) -> None:
        named = {wait["request"]: wait for wait in inspect.waits(life.node, Nanos(life.node.state.now))}
        for request, progress in life.node.state.requests.items():
            if progress.state is State.RUNNING:
                continue
            wait = named.get(request)
            if wait is None or not wait["waiting_for"]:
                raise Violation(
                    self.id, f"{where(life, request)} is {progress.state} and waits for nothing that has a name"
                )
            if progress.state is not State.DRAINING and progress.deadline <= life.node.state.now:
                raise Violation(self.id, f"{where(life, request)} waits for {wait['waiting_for']} beyond its deadline")

    def ended(self, life: Life, command: End) -> None:
        if isinstance(command, FailRequest) and not command.stage:
            raise Violation(self.id, f"{where(life, command.request)} fails in no stage")


class IdleSteps:
    """A node does not wake up for nothing for ever."""

    id = "W2"

    def after_step(self, life: Life, events: tuple[Event, ...], commands: tuple[Command, ...]) -> None:
        life.num_idle_steps = 0 if events or commands else life.num_idle_steps + 1
        if life.num_idle_steps > MAX_IDLE_STEPS:
            raise Violation(self.id, f"{where(life)} has woken {MAX_IDLE_STEPS} times for nothing")


class Questions:
    """An answer is no reason to put the same question again at once."""

    id = "W3"

    def __init__(self) -> None:
        self.asked: defaultdict[Incarnation, dict[Question, deque[Nanos]]] = defaultdict(dict)

    def put(self, life: Life, question: Question) -> None:
        now = life.node.state.now
        asked = self.asked[life.incarnation].setdefault(question, deque(maxlen=MAX_QUESTIONS))
        if len(asked) == MAX_QUESTIONS and now - asked[0] < life.settings.learn_peer_ns:
            raise Violation(self.id, f"{where(life)} asks more than {MAX_QUESTIONS} times in a row: {question}")
        asked.append(now)


class Deadlines:
    """Looks again at the latest moment at which a request may still be there."""

    id = "L1"

    def __init__(self, world: Watched) -> None:
        self.world = world

    def watch(self, life: Life, half: Half) -> None:
        self.world.clock.at(self._latest_end(life, half), self._look, life, half)

    def _latest_end(self, life: Life, half: Half) -> int:
        """Before the first token the deadline counts, after it the stall timeout; pauses are given back.

        It is the node's own clock that counts, and over hours one that is slow may lose more than the grace.
        """
        paused_ns = life.replica.pauses_ns - half.pauses_before_ns
        if half.last_token_at is None:
            lost_ns = (half.deadline - half.arrived_at) * max(0, -life.local_clock.drift_ppm) // MILLION
            return half.deadline + lost_ns + paused_ns + NODE_GRACE_NS
        return half.last_token_at + life.settings.stall_timeout_ns + paused_ns + NODE_GRACE_NS

    def _look(self, life: Life, half: Half) -> None:
        """What its node says; what its client hears is the edge's."""
        if half.terminal is not None or not life.is_alive:
            return
        latest = max(self._latest_end(life, half), life.replica.paused_until)
        if latest > self.world.clock.time:
            self.world.clock.at(latest, self._look, life, half)
        else:
            progress = life.node.state.requests.get(half.request)
            state = progress.state if progress is not None else "unknown to its node"
            raise Violation(self.id, f"{where(life, half.request)} is {state} and has not ended by its deadline")


class Releases:
    """After its end a request's resources come back as soon as nothing touches them."""

    id = "L2"

    def __init__(self, world: Watched) -> None:
        self.world = world

    def ended(self, life: Life, command: End) -> None:
        self._watch(life, life.halves[command.request])

    def _watch(self, life: Life, half: Half) -> None:
        self.world.clock.after(GRACE_NS, self._look, life, half)

    def _look(self, life: Life, half: Half) -> None:
        if not life.is_alive or half.request not in life.node.state.requests:
            return
        is_away = life.replica.paused_until > self.world.clock.time - GRACE_NS or life.store.dead  # which will end it
        if is_away or life.touches(half.request):
            self._watch(life, half)
            return
        progress = life.node.state.requests[half.request]
        raise Violation(
            self.id,
            f"{where(life, half.request)} has ended and keeps {len(progress.pages)} pages: "
            f"{progress.in_flight} batches, {len(progress.drains)} drains",
        )


class WorksWhenHealed:
    """After healing every pair works again."""

    id = "L5"

    def ended(self, life: Life, command: End) -> None:
        half = life.halves[command.request]
        if not half.must_finish or not isinstance(command, FailRequest):
            return
        if half.role is not Role.PREFILL or command.cause not in LETS_GO:
            raise Violation(
                self.id, f"{where(life, half.request)} fails after healing: {command.cause} ({command.detail})"
            )


class PagesComeBack:
    """Nobody fails for want of pages who would fit alone."""

    id = "L6"

    def ended(self, life: Life, command: End) -> None:
        if not isinstance(command, FailRequest) or command.cause is not Cause.OUT_OF_PAGES:
            return
        script = life.halves[command.request].script
        total = len(script.prompt) + script.max_new_tokens
        if total <= life.settings.num_pages * life.settings.page_size:
            raise Violation(self.id, f"{where(life, command.request)} fails for lack of pages and would fit alone")
