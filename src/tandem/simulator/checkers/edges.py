"""At the edge of a server, where its clients hear: each request ends there once, in time, and not too early."""

from tandem.core.commands import FailRequest
from tandem.core.values import Cause
from tandem.server.api.live_requests import QUIET_NS
from tandem.simulator.actors.clients import Half
from tandem.simulator.actors.replica import Life
from tandem.simulator.actors.servers import Server, server_of
from tandem.simulator.checkers.base import GRACE_NS, End, Watched
from tandem.simulator.clock import MILLION
from tandem.simulator.oracle import Violation


class EdgeEnds:
    """An edge passes on what its node says; its own word comes for a node that is lost, that had its time, or that
    stands still while a stream may go on with another one.
    """

    id = "W4"

    def __init__(self, world: Watched) -> None:
        self.world = world

    def ended(self, server: Server, half: Half | None, terminal: End) -> None:
        if half is None:
            raise Violation(self.id, f"{server.name}: request {terminal.request} ends at its edge a second time")
        if terminal is half.terminal:
            return
        where = f"{half.replica}: the edge ends request {half.request}"
        if not isinstance(terminal, FailRequest) or half.terminal is not None:
            raise Violation(self.id, f"{where} otherwise than its node: {terminal}")
        if terminal.cause is Cause.WORKER_LOST:
            life = self.world.replicas[half.replica].life
            if life is not None and life.halves.get(half.request) is half and not self._may_move(server, half, life):
                raise Violation(self.id, f"{where} as lost, and its node lives")
        elif terminal.cause is not Cause.DEADLINE_EXCEEDED or self.world.clock.time < silent_until(server, half):
            raise Violation(self.id, f"{where} as {terminal.cause} before its node had its time")

    def _may_move(self, server: Server, half: Half, life: Life) -> bool:
        """A stream that has begun, from a rank that stands still."""
        is_quiet = (
            half.last_token_at is not None and later(server, half.last_token_at, QUIET_NS) <= self.world.clock.time
        )
        return is_quiet and life.vitals.liveness.longest.is_sick


def later(server: Server, since: int, span_ns: int) -> int:
    """By the edge's own clock: one that is fast has had enough a little earlier."""
    return since + span_ns - span_ns * max(0, server.clock.drift_ppm) // MILLION


def silent_until(server: Server, half: Half) -> int:
    """Until then the node may keep silent. An end by a stop string is hurried too, at a time that nobody notes."""
    assert server.requests is not None
    stall_ns = server.requests.stall_ns
    if half.stop_sent:
        return half.arrived_at
    deadline = later(server, half.arrived_at, half.deadline - half.arrived_at)
    latest = deadline if half.last_token_at is None else later(server, half.last_token_at, stall_ns)
    if half.abort_sent_at is None:
        return latest
    return min(
        latest, deadline, later(server, half.abort_sent_at, stall_ns)
    )  # tokens that come after an abort move nothing


class EdgeDeadlines:
    """Looks again at the latest moment at which a client may still wait, whatever the node does."""

    id = "W5"

    def __init__(self, world: Watched) -> None:
        self.world = world

    def watch(self, half: Half) -> None:
        server = self.world.servers[server_of(half.replica)]
        self.world.clock.at(self._latest_end(server, half), self._look, server, half)

    def _latest_end(self, server: Server, half: Half) -> int:
        """By the edge's own clock."""
        assert server.requests is not None
        if half.last_token_at is not None:
            return half.last_token_at + server.requests.stall_ns + GRACE_NS
        lost_ns = (half.deadline - half.arrived_at) * max(0, -server.clock.drift_ppm) // MILLION
        return half.deadline + lost_ns + GRACE_NS

    def _look(self, server: Server, half: Half) -> None:
        """A server that is frozen ends it as soon as it goes on."""
        if server.halves.get(half.request) is not half:
            return
        latest = max(self._latest_end(server, half), server.frozen_until + 1)
        if latest <= self.world.clock.time:
            raise Violation(self.id, f"{half.replica}: the client of request {half.request} still waits at its edge")
        self.world.clock.at(latest, self._look, server, half)
