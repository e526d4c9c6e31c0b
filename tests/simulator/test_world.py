"""The world is made of the product's parts: router, bootstrap registry, dispatcher, ranks, shards; and how they die."""

from dataclasses import replace

import msgspec
import pytest

from tandem.core.router.router import Router
from tandem.core.settings import DpConflictPolicy, LoadBalanceMethod, PrefillInfo, Role
from tandem.core.values import SECOND, Cause, ShardId
from tandem.server.api.errors import RULES
from tandem.simulator.actors.upstream_calls import FINAL, OTHER_STATUS, STATUS
from tandem.simulator.oracle import Script
from tandem.simulator.scenario.parse import SMALL, quiet_options
from tandem.simulator.workload import Ask
from tandem.simulator.world import World

RANKS = PrefillInfo(2, LoadBalanceMethod.ROUND_ROBIN)


def a_world(**options: object) -> World:
    quiet = replace(quiet_options(), num_prefills=2, num_decodes=2, num_gateways=1, direct_share=0.0)
    world = World(replace(quiet, **options))  # type: ignore[arg-type]
    world.run(SECOND)  # everybody has registered, and the gateway has found everybody
    return world


def ask(world: World, index: int = 0, **fields: object) -> Ask:
    """A request that is asked of the first gateway now."""
    script = Script(tuple(range(100, 112)), 4, 0)
    asked = Ask(index, world.clock.time, script, 60 * SECOND, 0, None, None, repeats_room=False, is_direct=False)
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


@pytest.mark.parametrize("cause", Cause)
def test_a_server_answers_with_the_status_of_the_product(cause: Cause) -> None:
    assert STATUS.get(cause, OTHER_STATUS) == RULES[cause].status
    assert (RULES[cause].status >= 500 and cause not in FINAL) is RULES[cause].retryable


def test_the_router_of_the_world_is_the_product_s() -> None:
    assert type(a_world().gateways["router-0"].router) is Router


def test_a_client_of_the_router_gets_its_tokens() -> None:
    world = a_world()
    ask(world)
    assert outcome(world) == "finished"


def test_a_prefill_that_dies_before_the_first_token_is_replaced() -> None:
    world = a_world()
    ask(world)
    world.harm.crash("prefill-0", down_ns=100 * SECOND)
    world.harm.crash("decode-0", down_ns=100 * SECOND)
    assert outcome(world) == "finished"


def test_clients_of_a_router_that_dies_hear_it() -> None:
    world = a_world()
    ask(world)
    (caller,) = world.gateways["router-0"].callers.values()
    world.harm.lose_gateway("router-0", down_ns=SECOND)
    assert caller.outcome == "gateway lost"


def test_both_halves_are_let_go_when_the_router_dies() -> None:
    world = a_world()
    ask(world)
    world.run(world.clock.time + 1_000_000)
    world.harm.lose_gateway("router-0", down_ns=SECOND)
    world.run(world.clock.time + SECOND)
    assert world.edge.num_open == 0


def test_a_prefill_is_not_found_until_all_of_its_ranks_have_registered() -> None:
    world = a_world(prefill_info=RANKS, num_prefills=1)
    server = world.servers["prefill-0"]
    world.harm.lose_bootstrap("prefill-0", down_ns=0)
    server.ranks[1].life = None
    world.run(world.clock.time + SECOND)
    assert server.registry is not None
    assert not server.registry.is_ready
    world.start(server.ranks[1])
    world.run(world.clock.time + SECOND)
    assert server.registry.is_ready


def test_ranks_register_again_when_their_bootstrap_server_has_restarted() -> None:
    world = a_world(prefill_info=RANKS)
    world.harm.lose_bootstrap("prefill-0", down_ns=SECOND)
    assert not world.servers["prefill-0"].is_healthy
    world.run(world.clock.time + 2 * SECOND)
    assert world.servers["prefill-0"].is_healthy


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
    shards = (ShardId(0), ShardId(1))
    world = a_world(prefill=msgspec.structs.replace(SMALL, shards=shards), num_shards=2)
    world.harm.lose_shard("prefill-0", down_ns=SECOND)
    before = world.replicas["prefill-0"].epoch
    world.run(world.clock.time + 5 * SECOND)
    assert world.replicas["prefill-0"].epoch == before + 1


def test_a_dead_rank_leaves_the_others_alive() -> None:
    world = a_world(prefill_info=RANKS)
    world.harm.lose_shard("prefill-0/1", down_ns=SECOND)
    assert world.replicas["prefill-0/1"].life is None
    assert world.replicas["prefill-0/0"].life is not None
    assert world.servers["prefill-0"].is_up


def test_a_server_that_is_scaled_down_stays_away_and_the_last_one_does_not() -> None:
    world = a_world()
    for name in ("prefill-0", "prefill-1"):
        world.harm.scale_down(name)
    world.run(world.clock.time + 10 * SECOND)
    assert [server.is_gone for server in world.servers.values() if server.role is Role.PREFILL] == [True, False]
    assert world.servers["prefill-1"].is_up
