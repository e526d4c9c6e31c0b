"""The children of one server as the API process holds them: who is ended, collected and named, and who is not."""

import asyncio
import signal
import socket
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from tandem.config import ServerConfig
from tandem.core.values import Incarnation
from tandem.ranks import Rank, all_ranks
from tandem.server import processes
from tandem.server.processes import EXIT_WITH_OTHERS, Children, Elsewhere, Launch, Replicas, start_children

LAUNCH = Launch(ServerConfig(model="m", tp_size=2), "m", Incarnation("s", "1"), 1, 1, 1)


@dataclass
class Child:
    """`ends_in`: so many looks at it from now; None: it ends when it is killed."""

    ends_in: int | None = None
    code: int = 0
    was_killed: bool = False
    is_collected: bool = False
    signals: list[int] = field(default_factory=list)

    def poll(self) -> int | None:
        if self.ends_in is not None and self.ends_in > 0:
            self.ends_in -= 1
            return None
        return None if self.ends_in is None else self.code

    def kill(self) -> None:
        self.was_killed, self.ends_in, self.code = True, 0, -signal.SIGKILL

    def wait(self) -> int:
        assert self.ends_in is not None, "it would be waited for for ever"
        self.is_collected = True
        return self.code

    def send_signal(self, number: int) -> None:
        self.signals.append(number)


def children(node: Child, *workers: Child, told_loss: str = "") -> Children:
    ranks = tuple(all_ranks(len(workers), 1))
    return Children(node, workers, ranks, socket.socket(), told_loss)  # type: ignore[arg-type]  # all that is asked


def test_who_is_to_end_has_its_time_and_who_does_not_is_killed() -> None:
    node, soon, never = Child(ends_in=5), Child(ends_in=2), Child()
    asyncio.run(children(node, soon).wait(20))
    assert not node.was_killed
    assert not soon.was_killed
    asyncio.run(children(Child(ends_in=0), never).wait(0.02))
    assert never.was_killed
    assert all(child.is_collected for child in (node, soon, never))


def test_a_node_that_writes_is_waited_for_and_not_longer_than_it_may_take() -> None:
    node = Child(ends_in=5)
    asyncio.run(children(node).node_ends(20))
    assert node.poll() == 0
    asyncio.run(children(Child()).node_ends(0.02))


@pytest.mark.parametrize("name", ["node", "worker"])
def test_who_hangs_is_killed_and_the_others_end_by_themselves(name: Literal["node", "worker"]) -> None:
    node, worker = Child(), Child()
    children(node, worker).kill_some(name)
    assert (node.was_killed, worker.was_killed) == (name == "node", name == "worker")


def test_a_node_that_is_stopped_is_asked_for_its_record_too() -> None:
    node, worker = Child(), Child()
    children(node, worker).ask_for_record()
    assert (node.signals, worker.signals) == ([signal.SIGUSR1, signal.SIGCONT], [])


@pytest.mark.parametrize(
    ("node", "worker", "told", "reason", "was_killed"),
    [
        (Child(0, EXIT_WITH_OTHERS), Child(0, -9), "", "the worker TP1 PP0 process was killed by signal SIGKILL", True),
        (Child(0, 1), Child(0, EXIT_WITH_OTHERS), "", "the node process ended with exit code 1", False),
        (Child(0, 0), Child(0, EXIT_WITH_OTHERS), "the one elsewhere", "the one elsewhere", False),
        (Child(0, 1), Child(0, 0), "the one elsewhere", "the node process ended with exit code 1", False),
        (Child(), Child(), "", "", False),
    ],
)
def test_who_was_first_is_named(node: Child, worker: Child, told: str, reason: str, was_killed: bool) -> None:
    found = children(node, Child(), worker, told_loss=told)
    assert found.exit_reason().partition(";")[0] == reason
    assert found.was_killed == was_killed


Started = list[tuple[str, list[socket.socket], Launch]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """What is started: module, ends that it inherits, what it is told. Of a model that is `full` the node is not."""
    found: Started = []

    def start_child(module: str, ends: list[socket.socket], launch: Launch, _environment: Any) -> Child:
        found.append((module, ends, launch))
        if launch.model_dir == "full" and module.startswith("node"):
            raise OSError("no process is left")
        return Child()

    monkeypatch.setattr(processes, "start_child", start_child)
    return found


def test_two_workers_meet_where_the_first_of_them_listens_and_the_node_has_a_channel_to_each(started: Started) -> None:
    replica = start_children(LAUNCH)
    (_, first, to_first), (_, second, _), (_, node, _) = started
    assert [len(ends) for ends in (first, second, node)] == [2, 1, 3]
    assert (to_first.group_host != "", to_first.group_port != 0) == (True, True)
    assert all(end.fileno() == -1 for ends in (first, second, node) for end in ends), "the children have them now"
    assert replica.channel.fileno() != -1
    replica.channel.close()


def test_a_worker_that_is_alone_has_its_channel_only(started: Started) -> None:
    start_children(processes.structs.replace(LAUNCH, config=ServerConfig(model="m"))).channel.close()
    assert [(len(ends), launch.group_port) for _, ends, launch in started] == [(1, 0), (2, 0)]


def test_of_a_replica_that_cannot_be_started_nobody_is_left(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[Child]()
    start_child = processes.start_child

    def remember(*given: Any) -> Any:
        made.append(start_child(*given))  # type: ignore[arg-type]  # as they were given
        return made[-1]

    monkeypatch.setattr(processes, "start_child", remember)
    with pytest.raises(OSError, match="no process is left"):
        start_children(processes.structs.replace(LAUNCH, model_dir="full"))
    assert [(child.was_killed, child.is_collected) for child in made] == [(True, True)] * 2
    assert all(end.fileno() == -1 for _, ends, _ in started for end in ends)


def test_what_a_replica_has_on_other_hosts_is_closed_with_it() -> None:
    channel, meeting = socket.socket(), socket.socket()
    Elsewhere(Incarnation("s", "1"), {1: (channel, Any)}, meeting=meeting).close()  # type: ignore[dict-item]  # its link is not asked for anything
    assert (channel.fileno(), meeting.fileno()) == (-1, -1)
    Elsewhere(Incarnation("s", "1"), {}).close()


def test_a_replica_is_ended_before_its_next_life_and_none_is_left_where_one_cannot_be_started() -> None:
    lives: list[Child] = []

    def start(dp_rank: int, _elsewhere: Elsewhere | None) -> Children:
        if dp_rank == 2:
            raise OSError("no process is left")
        assert all(child.was_killed for child in lives[1:]), "of this rank"
        lives.append(Child())
        return children(lives[-1])

    replicas = Replicas(start, 2)
    replicas.restart(1)
    assert [child.was_killed for child in lives] == [False, True, False]
    lives.clear()
    with pytest.raises(OSError, match="no process is left"):
        Replicas(start, 3)
    assert [child.was_killed for child in lives] == [True, True]


def test_a_rank_is_named_where_there_are_several() -> None:
    assert processes.process_name(LAUNCH, "node") == "node"
    several = processes.structs.replace(LAUNCH, config=ServerConfig(model="m", dp_size=2), dp_rank=1, rank=Rank())
    assert processes.process_name(several, "node") == "node DP1"
