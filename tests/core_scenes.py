"""A request in every state of its life, on every role: built by driving nodes there, never by setting a field."""

from collections.abc import Callable
from dataclasses import dataclass

from core_driver import Replica, World
from tandem.core.disagg.messages import Offer
from tandem.core.events import BatchReturned, PagesCopied, PagesLanded, ReadsDrained, TransferDrained, TransferFailed
from tandem.core.scheduler.request_state import State
from tandem.core.values import SECOND, Cause, RequestId, ShardId

TIMEOUT_NS = 10 * SECOND
ASKED = {"prompt_len": 200, "max_new_tokens": 20, "seed": 1, "timeout_ns": TIMEOUT_NS}
IN_THE_WAY = {**ASKED, "prompt_len": 48, "seed": 9, "timeout_ns": 10 * TIMEOUT_NS}


@dataclass
class Scene:
    world: World
    here: Replica  # where the request is in the state
    request: RequestId
    other: Replica | None = None  # its peer, where the two know each other
    twin: RequestId | None = None  # the other half
    room: int | None = None


def build(*, prefill: dict | None = None, decode: dict | None = None) -> tuple[World, Replica, Replica]:
    world = World()
    left = world.prefill(stall_timeout_ns=TIMEOUT_NS, **(prefill or {}))
    return world, left, world.decode(stall_timeout_ns=TIMEOUT_NS, **(decode or {}))


# --- prefill ---------------------------------------------------------------------------------------------------------


def alone_on_prefill(**settings: object) -> Scene:
    """Only the prefill half is there: nobody says READY."""
    world, prefill, _decode = build(prefill=settings)
    room = world.room()
    return Scene(world, prefill, world.submit(prefill, room=room, **ASKED), None, None, room)


def prefill_bootstrapping() -> Scene:
    scene = alone_on_prefill(optimistic="off")
    scene.world.run()
    return scene


def prefill_parked() -> Scene:
    scene = alone_on_prefill()
    scene.world.run()
    return scene


def prefill_retracting() -> Scene:
    scene = alone_on_prefill(optimistic="retry")
    scene.world.run_until(lambda: scene.here.state_of(scene.request) is State.RETRACTING)
    scene.here.holds.add(BatchReturned)
    return scene


def both_on_prefill(state: State, *, fill_first: bool = False, holds: type, **settings: object) -> Scene:
    world, prefill, decode = build(prefill=settings)
    (decode if holds is PagesLanded else prefill).holds.add(holds)
    if fill_first:
        world.submit(prefill, room=world.room(), **IN_THE_WAY)
        world.run()
    left, right = world.pair(prefill, decode, **ASKED)
    room = world.next_room
    world.run()
    assert prefill.state_of(left) is state
    return Scene(world, prefill, left, decode, right, room)


def prefill_queued() -> Scene:
    return both_on_prefill(State.QUEUED, fill_first=True, holds=BatchReturned, max_running=1)


def prefill_computing() -> Scene:
    return both_on_prefill(State.COMPUTING, holds=BatchReturned)


def prefill_sending() -> Scene:
    return both_on_prefill(State.SENDING, holds=PagesLanded)


def prefill_draining() -> Scene:
    scene = prefill_sending()
    scene.here.holds.add(ReadsDrained)
    scene.world.abort(scene.here, scene.request)
    scene.world.run()
    return scene


# --- decode ----------------------------------------------------------------------------------------------------------


def decode_bootstrapping() -> Scene:
    world = World()
    prefill, decode = world.prefill(is_known=False), world.decode(learn_peer_tries=1 << 20)
    room = world.room()
    request = world.submit(decode, room=room, peer=prefill.address, **ASKED)
    world.run()
    return Scene(world, decode, request, None, None, room)


def both_on_decode(state: State, *, holds: type, fill_first: bool = False, **settings: object) -> Scene:
    world, prefill, decode = build(decode=settings)
    decode.holds.add(holds)
    if fill_first:
        world.submit(decode, **IN_THE_WAY)
        world.run()
    left, right = world.pair(prefill, decode, **ASKED)
    room = world.next_room
    world.run()
    assert decode.state_of(right) is state
    return Scene(world, decode, right, prefill, left, room)


def decode_awaiting() -> Scene:
    return both_on_decode(State.AWAITING, holds=Offer, allocation="prefill_complete")


def decode_queued() -> Scene:
    return both_on_decode(State.QUEUED, holds=BatchReturned, fill_first=True, max_running=1)


def decode_without_offer() -> Scene:
    return both_on_decode(State.ARRIVING, holds=Offer)


def decode_arriving() -> Scene:
    return both_on_decode(State.ARRIVING, holds=PagesLanded)


def fail_transfer(scene: Scene) -> None:
    attempt = scene.here.progress(scene.request).side.attempt
    failed = TransferFailed(scene.request, attempt, ShardId(0), Cause.CORRUPT_PAGES, "digests differ")
    scene.world.send(scene.here, failed)
    scene.world.run()


def decode_recovering() -> Scene:
    scene = decode_arriving()
    scene.here.holds.add(TransferDrained)
    fail_transfer(scene)
    return scene


def decode_computing() -> Scene:
    scene = decode_arriving()
    scene.here.holds.add(BatchReturned)
    fail_transfer(scene)
    return scene


def decode_running() -> Scene:
    return both_on_decode(State.RUNNING, holds=BatchReturned)


def decode_draining() -> Scene:
    scene = decode_running()
    scene.world.abort(scene.here, scene.request)
    scene.world.run()
    return scene


def decode_retracting() -> Scene:
    world, prefill, decode = build(decode={"num_pages": 16, "conservativeness": 0.0})
    older = world.submit(decode, prompt_len=16, max_new_tokens=100, seed=9)
    world.run_until(lambda: len(decode.tokens.get(older, [])) > 10)
    _left, right = world.pair(prefill, decode, **{**ASKED, "max_new_tokens": 50})
    room = world.next_room
    world.run_until(lambda: decode.state_of(right) is State.RETRACTING)
    decode.holds.add(BatchReturned)
    return Scene(world, decode, right, None, None, room)


# --- unified ---------------------------------------------------------------------------------------------------------


def unified(state: State, *, fill_first: bool = False) -> Scene:
    world = World()
    node = world.unified(max_running=1, stall_timeout_ns=TIMEOUT_NS)
    node.holds.add(BatchReturned)
    if fill_first:
        world.submit(node, **IN_THE_WAY)
        world.run()
    request = world.submit(node, **ASKED)
    if state is State.RUNNING:
        node.holds.clear()
        world.run_until(lambda: node.state_of(request) is State.RUNNING)
        node.holds.add(BatchReturned)
    world.run()
    assert node.state_of(request) is state
    return Scene(world, node, request)


# --- host memory -----------------------------------------------------------------------------------------------------

TIER = {"num_pages": 24, "conservativeness": 0.0, "host_tier": {"num_pages": 64}}


def patient(seconds: int) -> dict:
    """So long a load is waited for: by default longer than for the first token."""
    return {**TIER, "host_tier": {"num_pages": 64, "load_timeout_ns": seconds * SECOND}}


def leave_for_host(world: World, node: Replica) -> None:
    """Its prompt is computed, copied, and pushed out by another one; what is loaded from here on is kept back."""
    for seed in (ASKED["seed"], 9):
        world.submit(node, **{**ASKED, "seed": seed, "prompt_len": 330 if seed == 9 else 200, "max_new_tokens": 1})
        world.run()
    node.holds.add(PagesCopied)


def unified_loading(seconds: int = 60) -> Scene:
    world = World()
    node = world.unified(stall_timeout_ns=TIMEOUT_NS, **patient(seconds))
    leave_for_host(world, node)
    request = world.submit(node, **ASKED)
    world.run()
    return Scene(world, node, request)


def pair_loading(role: str, seconds: int) -> Scene:
    """One half of the pair loads."""
    world, prefill, decode = build(**{role: patient(seconds)})
    loads, other = (prefill, decode) if role == "prefill" else (decode, prefill)
    leave_for_host(world, loads)
    halves = dict(zip(("prefill", "decode"), world.pair(prefill, decode, **ASKED), strict=True))
    room = world.next_room
    world.run()
    return Scene(world, loads, halves.pop(role), other, *halves.values(), room)


def prefill_loading(seconds: int = 60) -> Scene:
    return pair_loading("prefill", seconds)


def decode_loading(seconds: int = 60) -> Scene:
    return pair_loading("decode", seconds)


LOADING = {"unified": unified_loading, "prefill": prefill_loading, "decode": decode_loading}
SCENES: dict[tuple[str, State, str], Callable[[], Scene]] = {
    ("prefill", State.BOOTSTRAPPING, ""): prefill_bootstrapping,
    ("prefill", State.QUEUED, ""): prefill_queued,
    ("prefill", State.COMPUTING, ""): prefill_computing,
    ("prefill", State.RETRACTING, ""): prefill_retracting,
    ("prefill", State.PARKED, ""): prefill_parked,
    ("prefill", State.SENDING, ""): prefill_sending,
    ("prefill", State.DRAINING, ""): prefill_draining,
    ("decode", State.BOOTSTRAPPING, ""): decode_bootstrapping,
    ("decode", State.AWAITING, ""): decode_awaiting,
    ("decode", State.QUEUED, ""): decode_queued,
    ("decode", State.ARRIVING, ""): decode_arriving,
    ("decode", State.ARRIVING, "without offer"): decode_without_offer,
    ("decode", State.RECOVERING, ""): decode_recovering,
    ("decode", State.COMPUTING, ""): decode_computing,
    ("decode", State.RUNNING, ""): decode_running,
    ("decode", State.RETRACTING, ""): decode_retracting,
    ("decode", State.DRAINING, ""): decode_draining,
    ("unified", State.LOADING, ""): unified_loading,
    ("prefill", State.LOADING, ""): prefill_loading,
    ("decode", State.LOADING, ""): decode_loading,
    ("unified", State.QUEUED, ""): lambda: unified(State.QUEUED, fill_first=True),
    ("unified", State.COMPUTING, ""): lambda: unified(State.COMPUTING),
    ("unified", State.RUNNING, ""): lambda: unified(State.RUNNING),
}
