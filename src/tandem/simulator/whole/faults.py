"""What goes wrong with processes and bytes, drawn from the seed; all of it has ended when the last phase begins.

kill_process, kill_server      SIGKILL to one process of a server, or to its first; it is started again
terminate                      SIGTERM to a server, which drains; it is started again
freeze                         SIGSTOP and SIGCONT
cut, stall, vanish, dribble    of connections over TCP
partition                      two machines do not hear of each other
cable                          what the hosts of one server say to each other is cut, held up or lost: between the
                               processes that lead them, and between the workers of a replica
corrupt                        one bit of a connection between nodes or workers, never of HTTP
no_descriptors                 a process cannot open any more
failed_batch                   a forward pass raises
abort_all                      an operator ends everything
"""

import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from tandem.core.values import SECOND
from tandem.simulator.oracle import Violation
from tandem.simulator.whole.cluster import Server
from tandem.simulator.whole.engine import SimulatedEngine
from tandem.simulator.whole.kernel import Kernel, Process
from tandem.simulator.whole.network import Network, Stream
from tandem.simulator.whole.options import Cluster, Options

OF_CONNECTIONS = frozenset(("cut", "stall", "vanish", "partition", "corrupt", "dribble"))
SUPERVISE_NS = SECOND // 5
CABLES_ONE_IN = 2  # of the seeds with a server on several hosts
DRIBBLES = 600  # bytes, each of which takes a delay of its own
ENDING_NS = 3 * SECOND  # until a server that has lost a process has ended, and `_supervise` sees it
LAST_STOP_NS = 9 * SECOND  # at most, that a freeze, a stall or a partition lasts
NOTICED_NS = 10 * SECOND  # within which a server that has lost a process has ended, or has another
NOTICES_S = 1.5  # beside its watchdog's timeout, until a server has ended what hangs
CONSEQUENCES_NS = 20 * SECOND  # within which a server may end by what was done to it


@dataclass(slots=True)
class Disturbance:
    """What may have kept a server from answering, or answering in time."""

    name: str  # of a server; empty: of any
    began_ns: int
    ended_ns: int
    is_lasting: bool = True  # False: it is over at once, and whatever it broke can be made anew


@dataclass(slots=True)
class Faults:
    kernel: Kernel
    network: Network
    cluster: Cluster
    options: Options
    random: Random
    engines: list[SimulatedEngine]
    abort_all: Callable[[], None]
    crowd: Callable[[Server, int], None]  # has strangers dial its ports within so many nanoseconds
    counts: Counter[str] = field(default_factory=Counter)
    disturbances: list[Disturbance] = field(default_factory=list)
    vanished: list[Stream] = field(default_factory=list)
    is_over: bool = False
    over_ns: int = 0  # when it was
    ends: set[str] = field(default_factory=set)  # servers that are not started again
    http_ports: set[int] = field(default_factory=set)
    struck: set[Process] = field(default_factory=set)  # one by one
    dead_since: dict[int, int] = field(default_factory=dict)  # children of servers that live, by number
    cables: Random = field(init=False)
    has_cables: bool = field(init=False)  # that fail

    def __post_init__(self) -> None:
        self.cables = Random(f"cables {self.options.seed}")
        fails = self.cables.randrange(CABLES_ONE_IN) == 0 and self.options.num_faults > 0
        self.has_cables = fails and bool(self.cluster.further_hosts)

    def start(self, begin_ns: int, until_ns: int) -> None:
        self.network.opened = self._opened
        self.kernel.after(SUPERVISE_NS, self._supervise)
        for _ in range(self.options.num_faults):
            kind = self.random.choice(self.options.faults)
            self.kernel.at(self.random.randrange(begin_ns, until_ns), lambda kind=kind: self._strike(kind))
        for _ in range(self.cables.choice((1, 2, 3)) if self.has_cables else 0):
            self.kernel.at(self.cables.randrange(begin_ns, until_ns), lambda: self._strike("cable"))

    def finish(self) -> None:
        """Nothing goes wrong from here on, and what went wrong is mended."""
        self.is_over, self.over_ns = True, self.kernel.now
        self.network.deaf.clear()
        for process in self.kernel.processes:
            self.kernel.thaw(process)
            process.max_fds = 1 << 20
        for stream in (*self.network.open_connections(), *self.network.worker_ends):
            stream.line.dribbles = 0
            stream.line.stalled_until = min(stream.line.stalled_until, self.kernel.now)
            if stream.remote[1] in self.cluster.meeting_ports:
                stream.line.corrupts_after = None  # else it would come some time
        for stream in self.vanished:
            stream.cut()  # also where the dialling end is closed: nobody has told the other one

    # --- the life of servers -----------------------------------------------------------------------------------------

    def _supervise(self) -> None:
        """As a supervisor does: what has ended is started again, a little later."""
        for server in self.cluster.all_hosts:
            if not server.is_alive and server.name not in self.ends:
                self._look_why(server)
                self.ends.add(server.name)
                self.disturb(server.whole, 20 * SECOND)
                self.kernel.after(self.random.randrange(SECOND // 10, 3 * SECOND), lambda one=server: self._again(one))
            elif server.is_alive:
                self._look_for_losses(server)
        self.kernel.after(SUPERVISE_NS, self._supervise)

    def _look_why(self, server: Server) -> None:
        """Raises Violation for one that has ended, and nothing was done to it."""
        now = self.kernel.now
        if not self.may_cut_off(server.whole) and not self.was_held_up(server.whole, now - CONSEQUENCES_NS, now):
            raise Violation("L9", f"{server.name} has ended by itself")

    def _look_for_losses(self, server: Server) -> None:
        """Raises Violation where a process of a server has died, and it neither ends nor has started another."""
        assert server.process is not None
        children, now = server.process.children, self.kernel.now
        for child in children:
            if child.is_alive or any(other.is_alive and other.pid > child.pid for other in children):
                continue
            since = self.dead_since.setdefault(child.pid, now)
            if now - since > NOTICED_NS and not self.may_silence() and server.name not in self.ends:
                raise Violation("L8", f"{child.name} has died, and {server.name} goes on without it")

    def _again(self, server: Server) -> None:
        self.ends.discard(server.name)
        server.start(self.kernel)

    def disturb(self, name: str, for_ns: int, *, is_lasting: bool = True) -> Disturbance:
        found = Disturbance(name, self.kernel.now, self.kernel.now + for_ns, is_lasting)
        self.disturbances.append(found)
        return found

    def was_disturbed(self, name: str, began_ns: int, ended_ns: int) -> bool:
        return any(
            one.name in ("", name) and one.began_ns <= ended_ns and began_ns <= one.ended_ns
            for one in self.disturbances
        )

    def was_held_up(self, name: str, began_ns: int, ended_ns: int) -> bool:
        """Whether processes of this very server may not have run, or not as they should."""
        return any(
            one.name == name and one.began_ns <= ended_ns and began_ns <= one.ended_ns for one in self.disturbances
        )

    def was_slow(self, began_ns: int, ended_ns: int) -> bool:
        """Whether anything anywhere may have taken longer than usual."""
        return any(
            one.is_lasting and one.began_ns <= ended_ns and began_ns <= one.ended_ns for one in self.disturbances
        )

    def may_cut_off(self, name: str) -> bool:
        """Whether a host of this server may be out of reach of another one. Of changed bits no account is kept."""
        may_break = self.has_cables or self.options.dribbles > 0 or not OF_CONNECTIONS.isdisjoint(self.options.faults)
        return may_break and any(other.whole == name for other in self.cluster.further_hosts)

    def may_silence(self) -> bool:
        """Whether a node may live and say nothing."""
        return "freeze" in self.options.faults or bool(self.options.starves)

    def has_cause(self, since_ns: int, must_last: bool) -> bool:
        """Whether since then anything may have broken a connection or held it up; must_last: and not only for a moment.

        A bit that is changed and bytes that come one by one are not kept account of. A server ends of a connection
        between its own hosts, however soon that could be made anew.
        """
        if "corrupt" in self.options.faults or self.options.dribbles:
            return True
        is_any = not must_last or any(self.may_cut_off(host.whole) for host in self.cluster.further_hosts)
        return any(one.ended_ns >= since_ns and (one.is_lasting or is_any) for one in self.disturbances)

    # --- what goes wrong ---------------------------------------------------------------------------------------------

    def _strike(self, kind: str) -> None:
        if not self.is_over and getattr(self, f"_{kind}")():
            self.counts[kind] += 1
            self.kernel.note(f"fault {kind}")

    def _server(self) -> Server | None:
        alive = [server for server in self.cluster.all_hosts if server.is_alive]
        return self.random.choice(alive) if alive else None

    def _process_of(self, server: Server) -> Process:
        assert server.process is not None
        family = [server.process, *(child for child in server.process.children if child.is_alive)]
        found = self.random.choice(family)
        self.struck.add(found)
        return found

    def _kill_process(self) -> bool:
        server = self._server()
        if server is None:
            return False
        self.disturb(server.whole, ENDING_NS)
        self.kernel.kill(self._process_of(server))
        return True

    def _kill_server(self) -> bool:
        server = self._server()
        if server is None or server.process is None:
            return False
        self.disturb(server.whole, SECOND)
        self.kernel.kill(server.process)
        return True

    def _terminate(self) -> bool:
        server = self._server()
        if server is None or server.process is None:
            return False
        self.disturb(server.whole, 15 * SECOND)
        self.kernel.signal(server.process, signal.SIGTERM)
        return True

    def _freeze(self) -> bool:
        server = self._server()
        if server is None:
            return False
        self.freeze(server, self._process_of(server), self._length())
        return True

    def freeze(self, server: Server, process: Process, length_ns: int) -> None:
        is_alone = not self.was_held_up(server.whole, self.kernel.now - CONSEQUENCES_NS, self.kernel.now)
        frozen = self.disturb(server.whole, length_ns)
        self.kernel.freeze(process)

        def thaw() -> None:
            if is_alone and process is not server.process and not self.is_over:
                self._look_whether_it_was_noticed(server, process, frozen)
            self.kernel.thaw(process)

        self.kernel.after(length_ns, thaw)

    def _look_whether_it_was_noticed(self, server: Server, process: Process, frozen: Disturbance) -> None:
        """Raises Violation where a process hung for longer than its server may wait, and was let live.

        Not where anything else was done to that server meanwhile.
        """
        hung_s = (frozen.ended_ns - frozen.began_ns) / SECOND
        others = [one for one in self.disturbances if one.name == server.whole and one.ended_ns > frozen.began_ns]
        is_sure = others == [frozen] and not self.options.starves and server.is_alive
        if is_sure and process.is_alive and hung_s > self.options.flags["watchdog_timeout"] + NOTICES_S:
            raise Violation("L8", f"{process.name} has hung for {hung_s:.1f} s, and {server.name} has let it")

    def _length(self) -> int:
        return int(LAST_STOP_NS * self.random.random() ** 2) + SECOND // 100

    def _connections(self, *, with_http: bool = True) -> list[Stream]:
        found = self.network.open_connections()
        return [stream for stream in found if with_http or stream.remote[1] not in self.http_ports]

    def _some(self, *, with_http: bool = True) -> list[Stream]:
        found = self._connections(with_http=with_http)
        return self.random.sample(found, min(len(found), self.random.choice((1, 1, 3, 20))))

    def _cut(self) -> bool:
        streams = self._some()
        self.disturb("", SECOND if streams else 0, is_lasting=False)
        for stream in streams:
            stream.cut()
        return bool(streams)

    def _stall(self) -> bool:
        streams, length = self._some(), self._length()
        for stream in streams:
            stream.line.stalled_until = max(stream.line.stalled_until, self.kernel.now + length)
        self.disturb("", length)
        return bool(streams)

    def _vanish(self) -> bool:
        """Of clients' connections nobody would ever hear again; those are cut in the end."""
        streams = self._some()
        for stream in streams:
            stream.line.has_vanished = True
        self.vanished += streams
        self.disturb("", 60 * SECOND)
        return bool(streams)

    def _dribble(self) -> bool:
        streams = self._some()
        for stream in streams:
            stream.line.dribbles = DRIBBLES
        self.disturb("", SECOND)
        return bool(streams)

    def _corrupt(self) -> bool:
        streams = self._some(with_http=False)
        for stream in streams:
            for end in (stream, stream.peer):
                if end is not None:
                    stream.line.corrupts_after = end.num_sent + self.random.randrange(400)
        return bool(streams)

    def _partition(self) -> bool:
        machines = sorted({server.host for server in self.cluster.all_hosts})
        if len(machines) < 2:
            return False
        one, other = self.random.sample(machines, 2)
        length = self._length()
        self.network.deaf |= {(one, other), (other, one)}
        for stream in self._connections():
            if {str(stream.local[0]), str(stream.remote[0])} == {one, other}:
                stream.line.stalled_until = max(stream.line.stalled_until, self.kernel.now + length)
        self.disturb("", length + SECOND)
        self.kernel.after(length, lambda: self.network.deaf.difference_update({(one, other), (other, one)}))
        return True

    def _cable(self) -> bool:
        """Of all connections between two hosts of a server one thing becomes: they have it in common."""
        host = self.cables.choice(self.cluster.further_hosts)
        if host.process is None:
            return False
        streams = [stream for stream in self.network.open_connections() if stream.remote[1] == host.port]
        streams += self.network.between_workers(host.process.children)
        what, length = self.cables.choice(("cut", "stall", "vanish")), int(LAST_STOP_NS * self.cables.random())
        for stream in streams:
            if what == "cut":
                stream.cut()
            elif what == "vanish":
                stream.line.has_vanished = True
                self.vanished.append(stream)
            else:
                stream.line.stalled_until = max(stream.line.stalled_until, self.kernel.now + length)
        self.disturb(host.whole, {"cut": SECOND, "stall": length, "vanish": 60 * SECOND}[what])
        return bool(streams)

    def _no_descriptors(self) -> bool:
        server = self._server()
        if server is None:
            return False
        process, length = self._process_of(server), self._length()
        process.max_fds = len(process.fds) + self.random.randrange(2)
        self.disturb(server.whole, length + SECOND)
        self.crowd(server, length)

        def mend() -> None:
            process.max_fds = 1 << 20

        self.kernel.after(length, mend)
        return True

    def _failed_batch(self) -> bool:
        if not self.engines:
            return False
        self.random.choice(self.engines).fails_next = True
        return True

    def _abort_all(self) -> bool:
        self.abort_all()
        return True

    def _opened(self, stream: Stream) -> None:
        if not self.is_over and self.random.random() < self.options.dribbles:
            stream.line.dribbles = DRIBBLES
