"""The world is made of the product's parts: router, bootstrap registry, dispatcher, ranks, shards; and how they die."""

from dataclasses import replace
from random import Random

import msgspec
import pytest

from tandem.core.commands import Command, FailRequest, LearnPeer
from tandem.core.disagg.messages import Release
from tandem.core.events import (
    DpRankAnswered,
    Event,
    FlushRequested,
    HooksChanged,
    PeerLost,
    PeerReturned,
    PeerUnknown,
    RequestRefused,
)
from tandem.core.router.routed_request import RequestSettings
from tandem.core.router.router import Router, RouterSettings
from tandem.core.scheduler.chunk_budget import ChunkBudget
from tandem.core.settings import DpConflictPolicy, LoadBalanceMethod, PrefillInfo, PrefillStall, Role
from tandem.core.values import MILLISECOND, SECOND, Address, Cause, Cut, Incarnation, Room
from tandem.server.api.bootstrap_questions import ANSWER_NS
from tandem.server.api.errors import Failure, Problem
from tandem.server.node.links import RETURN_NS
from tandem.simulator.actors.clients import RoutedRequest
from tandem.simulator.actors.edge import BOOTSTRAP_PORT
from tandem.simulator.actors.linking import introduce
from tandem.simulator.actors.replica import Life, Replica
from tandem.simulator.actors.servers import server_of
from tandem.simulator.actors.vitals import Hang
from tandem.simulator.hunt import run_seed
from tandem.simulator.network import links
from tandem.simulator.oracle import Script
from tandem.simulator.scenario.parse import SMALL, quiet_options
from tandem.simulator.workload import WorkloadRequest
from tandem.simulator.world import World

PATIENT = RouterSettings(RequestSettings(retries=0))
RANKS = PrefillInfo(2, LoadBalanceMethod.ROUND_ROBIN)


def a_world(**options: object) -> World:
    quiet = replace(quiet_options(), num_prefills=2, num_decodes=2, num_gateways=1, direct_share=0.0)
    world = World(replace(quiet, **options))  # type: ignore[arg-type]
    world.run(SECOND)  # everybody has registered, and the gateway has found everybody
    return world


def an_ask(world: World, index: int = 0) -> WorkloadRequest:
    script = Script(tuple(range(100, 112)), 4, 0)
    return WorkloadRequest(
        index, world.clock.time, script, 60 * SECOND, 0, None, None, repeats_room=False, is_direct=False
    )


def ask(world: World, index: int = 0, **fields: object) -> WorkloadRequest:
    """A request that is asked of the first gateway now."""
    asked = an_ask(world, index)
    for name, value in fields.items():
        setattr(asked, name, value)
    world.edge.num_to_come += 1
    world._ask(asked)
    return asked


def outcome(world: World) -> str:
    """Of the one client: runs until it has heard its end."""
    (caller,) = world.gateways["router-0"].callers.values()
    world.run(world.clock.time + 100 * SECOND)
    return caller.outcome


def test_the_router_of_the_world_is_the_product_s() -> None:
    assert type(a_world().gateways["router-0"].router) is Router


def test_a_client_of_the_router_gets_its_tokens() -> None:
    world = a_world()
    ask(world)
    assert outcome(world) == "finished"


def test_a_prefill_that_dies_before_the_first_token_is_replaced() -> None:
    world = a_world()
    ask(world)
    world.injector.crash("prefill-0", down_ns=100 * SECOND)
    world.injector.crash("decode-0", down_ns=100 * SECOND)
    assert outcome(world) == "finished"


def test_clients_of_a_router_that_dies_hear_it() -> None:
    world = a_world()
    ask(world)
    (caller,) = world.gateways["router-0"].callers.values()
    world.injector.lose_gateway("router-0", down_ns=SECOND)
    assert caller.outcome == "gateway lost"


def test_both_halves_are_let_go_when_the_router_dies() -> None:
    world = a_world()
    ask(world)
    world.run(world.clock.time + 1_000_000)
    world.injector.lose_gateway("router-0", down_ns=SECOND)
    world.run(world.clock.time + SECOND)
    assert world.edge.num_open == 0


def test_a_prefill_is_not_found_until_all_of_its_ranks_have_registered() -> None:
    world = a_world(prefill_info=RANKS, num_prefills=1)
    server = world.servers["prefill-0"]
    world.injector.lose_bootstrap("prefill-0", down_ns=0)
    server.ranks[1].life = None
    world.run(world.clock.time + SECOND)
    assert server.registry is not None
    assert not server.registry.is_ready
    world.start(server.ranks[1])
    world.run(world.clock.time + SECOND)
    assert server.registry.is_ready


def test_ranks_register_again_when_their_bootstrap_server_has_restarted() -> None:
    world = a_world(prefill_info=RANKS)
    world.injector.lose_bootstrap("prefill-0", down_ns=SECOND)
    assert not world.servers["prefill-0"].is_healthy
    world.run(world.clock.time + 2 * SECOND)
    assert world.servers["prefill-0"].is_healthy


def test_a_registration_under_way_does_not_overtake_that_of_the_next_life() -> None:
    world = a_world(prefill_info=RANKS)
    rank = world.replicas["prefill-0/1"]
    world.bootstraps.register_ns = (SECOND, SECOND + 1)
    world.injector.lose_bootstrap("prefill-0", down_ns=0)
    world.run(world.clock.time)
    world.bootstraps.register_ns = (0, 1)
    world.injector.crash(rank.name, down_ns=0)
    world.run(world.clock.time + 2 * SECOND)
    assert rank.life is not None
    assert registered(world, rank) == rank.life.incarnation


def test_a_life_that_has_ended_tries_no_more_to_register() -> None:
    world = a_world(prefill_info=RANKS)
    rank = world.replicas["prefill-0/1"]
    world.bootstraps.register_ns = (0, 1)
    world.injector.lose_bootstrap("prefill-0", down_ns=SECOND)
    assert rank.life is not None
    world.bootstraps.register(rank.life)
    world.run(world.clock.time + SECOND // 2)  # nobody heard it, so it is going to say it again
    world.injector.crash("prefill-0", down_ns=0)
    world.run(world.clock.time + 2 * SECOND)
    assert registered(world, rank) == rank.life.incarnation


def test_a_question_whose_call_is_lost_is_answered_all_the_same() -> None:
    world = a_world()
    world.network.settings.loss = 1.0
    decode = world.replicas["decode-0"].life
    assert decode is not None
    world.bootstraps.ask(decode, LearnPeer(Address("prefill-0", BOOTSTRAP_PORT)))
    asked_at = world.clock.time
    while not decode.inbox:
        assert world.clock.run_next()
    assert [type(event) for event in decode.inbox] == [PeerUnknown]
    assert world.clock.time == asked_at + ANSWER_NS


def registered(world: World, rank: Replica) -> Incarnation:
    """Who decode is told to be this rank."""
    registry = world.servers[server_of(rank.name)].registry
    assert registry is not None
    found = registry.find(rank.template.dp_rank)
    assert found is not None
    return found.who


@pytest.mark.parametrize("method", [method for method in LoadBalanceMethod if method is not LoadBalanceMethod.AUTO])
@pytest.mark.parametrize("conflict", DpConflictPolicy)
def test_every_method_and_policy_serves(method: LoadBalanceMethod, conflict: DpConflictPolicy) -> None:
    world = a_world(prefill_info=PrefillInfo(3, method, conflict), decode_info=RANKS)
    ask(world)
    assert outcome(world) == "finished"


def test_a_route_that_contradicts_the_room_is_refused_where_rooms_tell_the_rank() -> None:
    info = PrefillInfo(2, LoadBalanceMethod.FOLLOW_BOOTSTRAP_ROOM, DpConflictPolicy.FAIL)
    outcomes = set()
    for rank in (0, 1):
        world = a_world(prefill_info=info, decode_info=RANKS)
        ask(world, routed_rank=rank)
        outcomes.add(outcome(world))
    assert outcomes == {"finished", "rejected 400"}


def test_a_rank_that_does_not_exist_is_refused() -> None:
    world = a_world(prefill_info=RANKS)
    ask(world, routed_rank=7)
    assert outcome(world) == "rejected 400"


def test_a_dead_shard_takes_its_replica_with_it() -> None:
    cut = Cut(tp_size=2)
    settings = msgspec.structs.replace(SMALL, cut=cut)
    world = a_world(prefill=settings, decode=settings, num_shards=2)
    world.injector.lose_shard("prefill-0", down_ns=SECOND)
    before = world.replicas["prefill-0"].epoch
    world.run(world.clock.time + 5 * SECOND)
    assert world.replicas["prefill-0"].epoch == before + 1


def test_a_dead_rank_leaves_the_others_alive() -> None:
    world = a_world(prefill_info=RANKS)
    world.injector.lose_shard("prefill-0/1", down_ns=SECOND)
    assert world.replicas["prefill-0/1"].life is None
    assert world.replicas["prefill-0/0"].life is not None
    assert world.servers["prefill-0"].is_up


def test_a_server_that_is_scaled_down_stays_away_and_the_last_one_does_not() -> None:
    world = a_world()
    for name in ("prefill-0", "prefill-1"):
        world.injector.scale_down(name)
    world.run(world.clock.time + 10 * SECOND)
    assert [server.is_gone for server in world.servers.values() if server.role is Role.PREFILL] == [True, False]
    assert world.servers["prefill-1"].is_up


# --- connections that break, and what edge and operators say ---------------------------------------------------------


def told(world: World, *kinds: type) -> list[tuple[str, Event]]:
    """What the nodes hear of these kinds from here on, as it comes."""
    heard: list[tuple[str, Event]] = []

    def look(now: int, life: Life, events: tuple[Event, ...], commands: tuple[Command, ...]) -> None:
        heard.extend((life.replica.name, event) for event in events if isinstance(event, kinds))

    world.trace = look
    return heard


def a_linked_world() -> World:
    """Every decode is connected to every prefill."""
    world = a_world()
    introduce(world.replicas.values())
    world.run(2 * SECOND)
    return world


def test_a_connection_that_is_back_in_time_is_told_to_both_ends_and_ends_nothing() -> None:
    world = a_linked_world()
    heard = told(world, PeerReturned, PeerLost)
    ask(world)
    world.injector.flicker("prefill-0", "decode-0", down_ns=RETURN_NS * 3 // 4)
    assert outcome(world) == "finished"
    expected = {
        "prefill-0": PeerReturned(Incarnation("decode-0", "1")),
        "decode-0": PeerReturned(Incarnation("prefill-0", "1")),
    }
    assert len(heard) == 2
    assert dict(heard) == expected
    assert {half.terminal.path for half in world.edge.exchanges[0].halves} == {"remote"}  # type: ignore[union-attr]


def test_a_connection_that_stays_away_is_a_lost_peer_on_both_ends() -> None:
    world = a_linked_world()
    heard = told(world, PeerReturned, PeerLost)
    world.injector.flicker("prefill-0", "decode-0", down_ns=RETURN_NS + MILLISECOND)
    world.run(world.clock.time + 10 * SECOND)
    expected = {
        "prefill-0": PeerLost(Incarnation("decode-0", "1")),
        "decode-0": PeerLost(Incarnation("prefill-0", "1")),
    }
    assert [name for name, _ in heard] == list(expected) or [name for name, _ in heard] == list(reversed(expected))
    assert {name: type(event) for name, event in heard} == dict.fromkeys(expected, PeerLost)
    assert {name: event.peer for name, event in heard} == {name: event.peer for name, event in expected.items()}  # type: ignore[union-attr]


def test_a_life_that_ends_while_its_connection_is_broken_does_not_return() -> None:
    world = a_linked_world()
    heard = told(world, PeerReturned)
    world.injector.flicker("prefill-0", "decode-0", down_ns=SECOND)
    world.injector.crash("decode-0", down_ns=MILLISECOND)
    world.run(world.clock.time + 10 * SECOND)
    assert heard == []


def test_healing_brings_broken_connections_back() -> None:
    world = a_linked_world()
    heard = told(world, PeerReturned, PeerLost)
    world.injector.flicker("prefill-0", "decode-0", down_ns=5 * SECOND)
    world.num_planned += 1
    world.injector.heal()
    world.run(world.clock.time + 10 * SECOND)
    assert [type(event) for _, event in heard] == [PeerReturned, PeerReturned]


def test_healing_brings_a_connection_back_whose_reader_waits_for_a_longer_frame(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A bit of its length was flipped: nothing is wrong with it so far, and only its silence would tell."""
    world = a_linked_world()
    monkeypatch.setattr(links, "flipped", lambda data, random: bytes((data[0], data[1] ^ 8)) + data[2:])
    prefill, decode = (world.replicas[name].life for name in ("prefill-0", "decode-0"))
    assert prefill is not None
    assert decode is not None
    heard = told(world, PeerReturned, PeerLost)
    world.network.settings.flips = 1.0
    decode.host.tell(prefill.incarnation, Release(Room(7), decode.incarnation, "done"))
    world.run(world.clock.time + SECOND)
    assert heard == []
    world.num_planned += 1
    world.injector.heal()
    world.run(world.clock.time + SECOND)
    assert [type(event) for _, event in heard] == [PeerReturned, PeerReturned]


def test_operators_reach_every_rank_of_a_server() -> None:
    world = a_world(prefill_info=RANKS)
    heard = told(world, FlushRequested, HooksChanged)
    world.injector.flush("prefill-0")
    world.injector.change_hooks("prefill-0", force_retry_prob=0.5)
    world.run(world.clock.time + SECOND)
    for name in ("prefill-0/0", "prefill-0/1"):
        assert [event for told_to, event in heard if told_to == name] == [FlushRequested(), HooksChanged(0.5)]
    assert len(heard) == 4


@pytest.mark.parametrize("refuses", [False, True])
def test_an_edge_that_drains_refuses_by_itself_and_its_node_tells_the_other_half(refuses: bool) -> None:
    world = a_world(edge_refuses=refuses, num_prefills=1, num_decodes=1, router=PATIENT)
    heard = told(world, RequestRefused)
    world.edge.drain(world.servers["prefill-0"])
    ask(world)
    assert outcome(world) == "rejected 503"
    assert [event.cause for _, event in heard if isinstance(event, RequestRefused)] == [Cause.DRAINING] * refuses
    assert world.edge.codes == ({Cause.DRAINING: 1} if refuses else {})


def test_a_lost_rank_s_rooms_are_answered_by_another_one_and_its_clients_hear_why() -> None:
    world = a_world(num_prefills=1, num_decodes=1, prefill_info=RANKS, router=PATIENT)
    heard = told(world, RequestRefused)
    server = world.servers["prefill-0"]
    ask(world)
    while not server.halves:
        world.run(world.clock.time + MILLISECOND)
    (half,) = server.halves.values()
    world.injector.crash(half.replica, down_ns=SECOND)
    other = next(rank.name for rank in server.ranks if rank.name != half.replica)
    assert isinstance(half.answer, FailRequest)
    assert half.answer.cause is Cause.WORKER_LOST
    world.run(world.clock.time + SECOND)
    ((name, refused),) = [each for each in heard if isinstance(each[1], RequestRefused)]
    assert (name, refused.cause) == (other, Cause.WORKER_LOST)
    assert server.registry is not None
    assert server.registry.ranks_of([refused.request.room], server.local_time(world.clock.time)) == {
        refused.request.room: int(other[-1])
    }


def test_decode_may_be_led_to_the_rank_that_answers_for_a_refused_use_of_the_room() -> None:
    """It is answered before the prefill half of the second use comes to another rank."""
    world = a_world(num_prefills=1, num_decodes=1, num_gateways=0, prefill_info=RANKS)
    world.bootstraps.look_up_ns = (100 * MILLISECOND, 100 * MILLISECOND + 1)
    heard = told(world, DpRankAnswered)
    prefill, decode = world.servers["prefill-0"], world.servers["decode-0"]
    room, address = Room(7), Address("prefill-0", BOOTSTRAP_PORT)
    refused, exchange = (RoutedRequest(an_ask(world, index), room) for index in range(2))
    assert isinstance(world.edge.submit(refused, prefill, room, None, routed=-1), Failure)
    world.edge.submit(exchange, decode, room, address)
    world.run(world.clock.time + 170 * MILLISECOND)  # it has learned who prefill is, and is being answered
    world.edge.submit(exchange, prefill, room, None, routed=1)
    world.run(world.clock.time + 10 * SECOND)
    assert next(event.dp_rank for _, event in heard if isinstance(event, DpRankAnswered)) == 0
    assert [half.replica for half in exchange.halves] == ["decode-0", "prefill-0/1"]


def test_the_client_of_a_node_that_hangs_hears_so_by_its_deadline() -> None:
    world = a_world(num_prefills=0, num_decodes=0, num_unified=1, num_gateways=0, watchdog_ns=600 * SECOND)
    ask(world, timeout_ns=3 * SECOND, is_direct=True)
    server = world.servers["unified-0"]
    while not server.halves:
        world.run(world.clock.time + MILLISECOND)
    (half,) = server.halves.values()
    world.injector.hang("unified-0", Hang.NODE, duration_ns=100 * SECOND)
    world.run(world.clock.time + 5 * SECOND)
    assert isinstance(half.answer, FailRequest)
    assert (half.answer.cause, half.terminal) == (Cause.DEADLINE_EXCEEDED, None)
    assert half.ended_at is not None
    assert half.ended_at <= half.deadline + SECOND
    world.run(world.clock.time + 100 * SECOND)
    assert isinstance(half.terminal, FailRequest), "its node has heard of it when it goes on"


def test_a_client_that_takes_nothing_is_cut_off_by_its_edge() -> None:
    world = a_world(num_prefills=1, num_decodes=1, slow_readers=1.0, router=PATIENT)
    world.edge.readers = Random(1)
    world.edge.readers.uniform = lambda low, high: high  # type: ignore[method-assign]  # for as long as any of them
    world.servers["decode-0"].requests.stall_ns = MILLISECOND
    ask(world)
    assert outcome(world) != "finished"
    (half,) = [half for half in world.edge.exchanges[0].halves if half.role is Role.DECODE]
    assert isinstance(half.answer, FailRequest)
    assert half.answer.cause is Cause.ABORTED


def test_a_name_that_is_in_use_is_refused_by_the_edge() -> None:
    world = a_world(edge_refuses=True, num_prefills=1, num_decodes=1, router=PATIENT)
    heard = told(world, RequestRefused)
    ask(world)
    world.run(world.clock.time + MILLISECOND)
    ask(world, 1, named_as=0)
    world.run(world.clock.time + 100 * SECOND)
    assert {event.cause for _, event in heard if isinstance(event, RequestRefused)} == {Cause.PEER_ABORTED}
    assert set(world.edge.codes) == {Problem.DUPLICATE_RID}


@pytest.mark.parametrize("seed", [10_059, 10_131])
def test_prompts_are_cut_by_what_they_cost_while_others_decode(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    num_cut = 0
    allowed = ChunkBudget.tokens_while_others_wait

    def counted(self: ChunkBudget, stall: PrefillStall | None, most: int, page_size: int, *, num_decoding: int) -> int:
        nonlocal num_cut
        found = allowed(self, stall, most, page_size, num_decoding=num_decoding)
        num_cut += 0 < found < most
        return found

    monkeypatch.setattr(ChunkBudget, "tokens_while_others_wait", counted)
    found = run_seed(seed)
    assert (found.invariant, found.detail) == ("", "")
    assert num_cut > 10
