"""Hosts of one server: who may join, what is said between them and who can open it, and which worker is where."""

import asyncio
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.config import ServerConfig, violations
from tandem.core.values import Incarnation
from tandem.membership import ClusterSecret
from tandem.server import wire
from tandem.server.channel import (
    BlockingChannel,
    ChannelClosed,
    ChannelKeys,
    FrameDecoder,
    MalformedFrame,
    PolledChannel,
)
from tandem.server.frames import HEAD_BYTES
from tandem.server.hosts import connection
from tandem.server.hosts.agreement import Roster
from tandem.server.hosts.connection import HostConnection
from tandem.server.hosts.messages import Beat, Goodbye, Here, Join, Refused, ToFollower, ToLeader, Welcome, as_reason
from tandem.server.hosts.session import MAX_BODY_BYTES, HostSession, body_bytes
from tandem.server.node.session import NotAMember
from tandem.several_hosts import address, host_of

SECRET = ClusterSecret(b"the secret of one cluster")
FLAGS = {"--tp-size": "2", "--page-size": "16"}


def body(framed: bytes) -> bytes:
    return framed[HEAD_BYTES:]


def met(
    ours: ClusterSecret = SECRET, theirs: ClusterSecret = SECRET
) -> tuple["HostSession[ToLeader]", "HostSession[ToFollower]"]:
    """Both ends of a connection, after their hellos."""
    leader: HostSession[ToLeader] = HostSession(ours, ToLeader, is_dialler=False)
    follower: HostSession[ToFollower] = HostSession(theirs, ToFollower, is_dialler=True)
    leader.meet(body(follower.hello))
    follower.meet(body(leader.hello))
    return leader, follower


def test_members_understand_each_other() -> None:
    leader, follower = met()
    assert follower.open(body(leader.seal(Here()))) == Here()
    assert leader.open(body(follower.seal(Join(1, FLAGS)))) == Join(1, FLAGS)
    assert leader.open(body(follower.seal(Beat()))) == Beat()


def test_who_has_another_secret_opens_nothing_and_is_not_opened() -> None:
    leader, stranger = met(theirs=ClusterSecret(b"the secret of another one"))
    with pytest.raises(NotAMember, match="does not hold this cluster's secret"):
        stranger.open(body(leader.seal(Here())))
    with pytest.raises(NotAMember):
        leader.open(body(stranger.seal(Join(1, FLAGS))))
    assert not leader.is_member


def test_what_was_said_on_one_connection_is_nothing_on_another() -> None:
    _, follower = met()
    recorded = body(follower.seal(Join(1, FLAGS)))
    leader, _ = met()
    with pytest.raises(NotAMember):
        leader.open(recorded)


def test_a_frame_that_comes_back_to_who_said_it_is_not_his() -> None:
    leader, _ = met()
    with pytest.raises(NotAMember):
        leader.open(body(leader.seal(Here())))


def test_a_frame_that_is_too_long_is_not_waited_for() -> None:
    with pytest.raises(MalformedFrame, match="at most"):
        body_bytes((MAX_BODY_BYTES + 1).to_bytes(HEAD_BYTES))


def test_a_host_that_does_not_read_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever speaks to it would wait for ever: a rank that starts anew, or the one that says that a worker is lost."""
    monkeypatch.setattr(connection, "WRITE_S", 0.05)

    async def speak() -> list[str]:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            there = socket.create_connection(listener.getsockname())
            here, _ = listener.accept()
        leader: HostConnection[ToLeader] = HostConnection(here, SECRET, ToLeader, is_dialler=False)
        follower: HostConnection[ToFollower] = HostConnection(there, SECRET, ToFollower, is_dialler=True)
        await asyncio.gather(leader.meet(), follower.meet())
        reasons: list[str] = []
        while len(reasons) < 2:  # from a frame that is cut on, no other is begun
            try:
                await leader.say(Goodbye("x" * 100_000))
            except ChannelClosed as error:
                reasons.append(str(error))
        monkeypatch.setattr(connection, "WRITE_S", 60.0)
        with pytest.raises(ChannelClosed):
            await leader.say(Beat())
        leader.close()
        follower.close()
        return reasons

    assert asyncio.run(asyncio.wait_for(speak(), 30)) == ["the other end does not read"] * 2


def channels() -> tuple[socket.socket, ChannelKeys, socket.socket, ChannelKeys]:
    leader, follower = met()
    here, there = socket.socketpair()
    return here, leader.channel_keys(), there, follower.channel_keys()


def test_a_worker_elsewhere_and_its_node_speak_as_on_one_machine() -> None:
    here, node_keys, there, worker_keys = channels()
    node: PolledChannel[wire.WorkerToNode] = PolledChannel(here, wire.WorkerToNode, keys=node_keys)
    worker: BlockingChannel[wire.NodeToWorker] = BlockingChannel(there, wire.NodeToWorker, keys=worker_keys)
    with here, there:
        for id in range(3):
            node.send(wire.Query(id, "worker"))
        node.flush()
        assert worker.receive() == [wire.Query(id, "worker") for id in range(3)]
        worker.send(wire.Echo())
        assert node.receive() == [wire.Echo()]


def test_a_workers_channel_takes_no_frame_that_was_changed_repeated_or_made_elsewhere() -> None:
    here, node_keys, there, worker_keys = channels()
    worker: BlockingChannel[wire.NodeToWorker] = BlockingChannel(there, wire.NodeToWorker, keys=worker_keys)
    with here, there:
        worker.send(wire.Echo())
        said = here.recv(1000)
    assert b"Echo" not in said
    changed = said[:-1] + bytes([said[-1] ^ 1])
    clear = b"\x00\x00\x00\x0b\x81\xa4type\xa4Echo"
    for wrong in (changed, said + said, clear):
        with pytest.raises(MalformedFrame):
            list(FrameDecoder[wire.WorkerToNode](wire.WorkerToNode, key=node_keys.opening).feed(wrong))


# --- who joins -------------------------------------------------------------------------------------------------------


def roster() -> Roster:
    return Roster(3, FLAGS)


def test_a_host_that_fits_is_welcome_once_and_again_when_it_is_gone() -> None:
    it = roster()
    assert it.missing({0, 1, 2}) == [1, 2]
    assert it.admit(Join(1, FLAGS), "10.0.0.1") == Welcome()
    assert it.missing({0, 1, 2}) == [2]
    again = it.admit(Join(1, FLAGS), "10.0.0.9")
    assert again == Refused("node rank 1 is there already, at 10.0.0.1", is_final=False)
    it.leave(1)
    assert it.admit(Join(1, FLAGS), "10.0.0.9") == Welcome()


@pytest.mark.parametrize("node_rank", [0, 3, 7])
def test_a_node_rank_that_is_none_is_refused(node_rank: int) -> None:
    assert roster().admit(Join(node_rank, FLAGS), "") == Refused(
        f"node rank {node_rank} is none of 1 to 2", is_final=True
    )


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (FLAGS | {"--page-size": "32"}, "--page-size is 32 on node rank 2 and 16 on node rank 0"),
        ({"--tp-size": "2"}, "--page-size is not known on node rank 2 and 16 on node rank 0"),
        (FLAGS | {"--new": "1"}, "--new is 1 on node rank 2 and not known on node rank 0"),
    ],
)
def test_the_field_that_differs_is_named(fields: dict[str, str], named: str) -> None:
    it = roster()
    assert it.admit(Join(2, fields), "") == Refused(f"{named}; all hosts need the same", is_final=True)
    assert it.missing({2}) == [2]


# --- which worker is where -------------------------------------------------------------------------------------------


@given(st.integers(1, 16), st.integers(1, 16))
def test_workers_are_spread_evenly_in_order(nnodes: int, each: int) -> None:
    hosts = [host_of(worker, num_workers=nnodes * each, nnodes=nnodes) for worker in range(nnodes * each)]
    assert hosts == [host for host in range(nnodes) for _ in range(each)]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("10.0.0.1:5000", ("10.0.0.1", 5000)),
        ("[fd00::1]:5000", ("fd00::1", 5000)),
        ("head.cluster:1", ("head.cluster", 1)),
        *((text, None) for text in ("fd00::1:5000", ":5000", "a:0", "a:65536", "a:x", "a", "a:-1", "")),
    ],
)
def test_an_address_is_host_and_port(text: str, found: tuple[str, int] | None) -> None:
    assert address(text) == found


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"tp_size": 3}, "3 workers (--tp-size 3 x --pp-size 1 x --dp-size 1)"),
        ({"attn_cp_size": 3}, "3 workers (--tp-size 1 x --pp-size 1 x --attn-cp-size 3 x --dp-size 1)"),
        ({"tp_size": 3, "dp_size": 3, "enable_dp_attention": True}, "3 workers (--dp-size 3)"),
    ],
)
def test_workers_that_cannot_be_spread_evenly_are_told_with_the_flags_that_make_them(
    sizes: dict[str, int], said: str
) -> None:
    config = ServerConfig("m", nnodes=2, dist_init_addr="127.0.0.1:5000", **sizes)  # type: ignore[arg-type]  # flags of any type
    assert violations(config) == [f"{said} cannot be spread evenly over --nnodes 2 hosts"]


def test_a_server_on_hosts_that_others_reach_needs_a_secret_and_addresses() -> None:
    config = ServerConfig("m", tp_size=2, nnodes=2, dist_init_addr="10.0.0.1:5000", disaggregation_mode="prefill")
    assert violations(config) == [
        "a server on several hosts needs --cluster-secret-file, the same on all of them",
        "KV of a worker at --host 127.0.0.1 is out of reach of other hosts: give every host an address of its own, or "
        "0.0.0.0",
    ]


def test_the_incarnation_of_a_life_is_in_no_frame_in_clear() -> None:
    leader, _ = met()
    name = Incarnation("prefill-7:8000", "0123456789abcdef")
    assert b"prefill-7" not in leader.seal(wire.Disconnect(name))


def test_a_reason_of_any_length_is_read_by_the_other_end() -> None:
    leader, follower = met()
    said = Goodbye(as_reason("the engine quotes " + "x" * 10_000))
    assert follower.open(body(leader.seal(said))) == said
    refused = roster().admit(Join(1, FLAGS | {"--page-size": "3" * 4000}), "")
    assert follower.open(body(leader.seal(refused))) == refused
