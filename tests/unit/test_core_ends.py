"""However a request ends, in whatever state: one terminal event with a named cause, the peer hears, nothing is kept."""

import msgspec
import pytest

from core_driver import World, assert_nothing_is_held, expected_tokens
from core_scenes import ASKED, IN_THE_WAY, SCENES, TIMEOUT_NS, Scene
from tandem.core.commands import FailRequest, FinishRequest
from tandem.core.disagg.messages import Abort, Release
from tandem.core.events import BatchReturned, PeerSaid
from tandem.core.scheduler.request_state import State, WaitingFor
from tandem.core.settings import LoadFailurePolicy
from tandem.core.values import SECOND, Cause, Room

EXPECTED_WAITS = {
    State.BOOTSTRAPPING: WaitingFor.PEER,
    State.AWAITING: WaitingFor.PREFILL,
    State.QUEUED: WaitingFor.SLOT,
    State.LOADING: WaitingFor.TIER,
    State.COMPUTING: WaitingFor.WINDOW,
    State.RUNNING: WaitingFor.WINDOW,
    State.RETRACTING: WaitingFor.WINDOW,
    State.ARRIVING: WaitingFor.LANDING,
    State.RECOVERING: WaitingFor.DRAIN,
    State.PARKED: WaitingFor.PEER,
    State.SENDING: WaitingFor.COLLECTION,
    State.DRAINING: WaitingFor.DRAIN,
}
WITH_PEER = [
    ("prefill", State.QUEUED, ""),
    ("prefill", State.COMPUTING, ""),
    ("prefill", State.SENDING, ""),
    ("prefill", State.LOADING, ""),
    ("decode", State.AWAITING, ""),
    ("decode", State.QUEUED, ""),
    ("decode", State.LOADING, ""),
    ("decode", State.ARRIVING, ""),
    ("decode", State.ARRIVING, "without offer"),
    ("decode", State.RECOVERING, ""),
    ("decode", State.COMPUTING, ""),
    ("decode", State.RUNNING, ""),
]
WANT_KV = [name for name in WITH_PEER if name[0] == "decode" and name[1] in (State.AWAITING, State.ARRIVING)]
every_scene = pytest.mark.parametrize("name", SCENES, ids=lambda name: "-".join(filter(None, name)))
every_live_scene = pytest.mark.parametrize(
    "name", [name for name in SCENES if name[1] is not State.DRAINING], ids=lambda name: "-".join(filter(None, name))
)


def let_everything_happen(scene: Scene) -> None:
    """What was held back arrives, and every timer of whoever is left comes."""
    for replica in scene.world.replicas.values():
        replica.release()
    scene.world.advance(12 * TIMEOUT_NS)


@every_scene
def test_the_scene_is_what_it_says(name: tuple[str, State, str]) -> None:
    scene = SCENES[name]()
    role, state, _ = name
    assert scene.here.state.settings.role == role
    assert scene.here.state_of(scene.request) is state
    assert scene.here.progress(scene.request).waiting_for is EXPECTED_WAITS[state]


def test_there_is_a_scene_for_every_state_that_a_role_can_be_in() -> None:
    assert {state for _, state, _ in SCENES} == set(State) - {State.DONE}


@every_scene
def test_left_alone_it_ends_well_and_leaves_nothing(name: tuple[str, State, str]) -> None:
    scene = SCENES[name]()
    let_everything_happen(scene)
    assert scene.request in scene.here.ended
    assert_nothing_is_held(scene.world.replicas.values())


@every_scene
def test_an_abort_leaves_nothing_behind(name: tuple[str, State, str]) -> None:
    scene = SCENES[name]()
    here, request = scene.here, scene.request
    scene.world.abort(here, request)
    scene.world.run()
    assert here.cause(request) is Cause.ABORTED
    num_tokens = len(here.tokens.get(request, []))
    let_everything_happen(scene)
    assert len(here.tokens.get(request, [])) == num_tokens
    assert_nothing_is_held(scene.world.replicas.values())


@every_live_scene
def test_an_abort_is_told_to_the_peer_that_is_known(name: tuple[str, State, str]) -> None:
    scene = SCENES[name]()
    before = [message for kind in (Abort, Release) for message in scene.here.said(kind)]
    scene.world.abort(scene.here, scene.request)
    scene.world.run()
    told = [message for kind in (Abort, Release) for message in scene.here.said(kind)]
    is_released = any(message.outcome == "done" for message in before if isinstance(message, Release))
    has_let_go = name[1] in (State.RECOVERING, State.COMPUTING) and name[0] == "decode"
    if scene.other is None or is_released or has_let_go:
        assert told == before
        return
    (message,) = told[len(before) :]
    assert message.room == scene.room
    assert message.cause is Cause.ABORTED
    assert scene.other.cause(scene.twin) is Cause.PEER_ABORTED


@pytest.mark.parametrize("state", [State.BOOTSTRAPPING, State.RETRACTING, State.PARKED], ids=str)
def test_a_peer_that_comes_too_late_is_told_at_its_first_word(state: State) -> None:
    scene = SCENES["prefill", state, ""]()
    world = scene.world
    decode = next(replica for replica in world.replicas.values() if replica is not scene.here)
    world.abort(scene.here, scene.request)
    scene.here.release()
    world.run()
    late = world.submit(decode, room=scene.room, peer=scene.here.address, **ASKED)
    world.run()
    assert decode.cause(late) is Cause.PEER_ABORTED
    assert_nothing_is_held(world.replicas.values())


@every_live_scene
def test_a_missed_deadline_names_the_wait(name: tuple[str, State, str]) -> None:
    scene = SCENES[name]()
    here, request = scene.here, scene.request
    here.holds |= {Abort, Release}  # the other half has the same deadline
    waited_for = str(here.progress(request).waiting_for)
    scene.world.advance(TIMEOUT_NS - SECOND)
    assert request not in here.ended
    assert str(here.progress(request).waiting_for) == waited_for
    scene.world.advance(SECOND + SECOND // 2)
    end = here.ended[request]
    assert isinstance(end, FailRequest)
    assert (end.cause, end.stage) == (Cause.DEADLINE_EXCEEDED, waited_for)
    let_everything_happen(scene)
    assert_nothing_is_held(scene.world.replicas.values())


@pytest.mark.parametrize("name", WANT_KV, ids=lambda name: "-".join(filter(None, name)))
def test_a_prefill_whose_deadline_comes_first_does_not_change_the_wait_that_decode_names(
    name: tuple[str, State, str],
) -> None:
    scene = SCENES[name]()
    here, request, prefill = scene.here, scene.request, scene.other
    assert prefill is not None
    assert scene.room is not None
    waited_for = str(here.progress(request).waiting_for)
    scene.world.advance(TIMEOUT_NS - SECOND // 20)
    late = Abort(Room(scene.room), prefill.name, Cause.DEADLINE_EXCEEDED, "no first token in time")
    scene.world.send(here, PeerSaid(prefill.name, late))
    scene.world.run()
    here.holds |= {Abort, Release}
    scene.world.advance(SECOND)
    end = here.ended[request]
    assert isinstance(end, FailRequest)
    assert (end.cause, end.stage) == (Cause.DEADLINE_EXCEEDED, waited_for)
    assert end.waited_ns > TIMEOUT_NS - SECOND
    let_everything_happen(scene)
    assert_nothing_is_held(scene.world.replicas.values())


@pytest.mark.parametrize("name", WITH_PEER, ids=lambda name: "-".join(filter(None, name)))
def test_the_loss_of_the_peer_ends_or_mends_it(name: tuple[str, State, str]) -> None:
    scene = SCENES[name]()
    here, request = scene.here, scene.request
    assert scene.other is not None
    scene.world.kill(scene.other)
    scene.world.run()
    if name[0] == "prefill":
        assert here.cause(request) is Cause.PEER_LOST
    let_everything_happen(scene)
    if name[0] == "decode":
        end = here.ended[request]
        assert isinstance(end, FinishRequest)
        assert here.tokens[request] == expected_tokens(200, 20, seed=1)
        assert end.path == ("remote" if name[1] is State.RUNNING else "fallback")
    assert_nothing_is_held(here)


@pytest.mark.parametrize("scene_name", ["", "without offer"])
def test_where_recomputing_is_not_allowed_the_loss_of_the_peer_is_the_end(scene_name: str) -> None:
    scene = SCENES["decode", State.ARRIVING, scene_name]()
    state = scene.here.state
    state.settings = msgspec.structs.replace(state.settings, load_failure=LoadFailurePolicy.FAIL)
    scene.world.kill(scene.other)
    scene.world.run()
    assert scene.here.cause(scene.request) is Cause.PEER_LOST
    let_everything_happen(scene)
    assert_nothing_is_held(scene.here)


@every_live_scene
def test_a_second_abort_is_not_a_second_end(name: tuple[str, State, str]) -> None:
    scene = SCENES[name]()
    for _ in range(2):
        scene.world.abort(scene.here, scene.request)
    scene.world.run()
    scene.world.abort(scene.here, scene.request)
    let_everything_happen(scene)
    assert_nothing_is_held(scene.world.replicas.values())


@pytest.mark.parametrize(
    ("waits_for", "settings"),
    [
        (WaitingFor.PAGES, {"num_pages": 15}),
        (WaitingFor.RESULT_SLOT, {"result_slots": 1}),
        (WaitingFor.SLOT, {"max_running": 1}),
        (WaitingFor.WINDOW, {"window_depth": 1, "chunk_tokens": 16}),
    ],
)
def test_a_queued_request_names_what_it_lacks_when_its_deadline_comes(waits_for: WaitingFor, settings: dict) -> None:
    world = World()
    node = world.prefill(**settings)
    node.holds.add(BatchReturned)
    world.submit(node, room=1, **IN_THE_WAY)
    world.run()
    waiting = world.submit(node, room=2, **ASKED)
    world.run()
    assert node.progress(waiting).waiting_for is waits_for
    world.advance(TIMEOUT_NS + SECOND)
    end = node.ended[waiting]
    assert isinstance(end, FailRequest)
    assert (end.cause, end.stage) == (Cause.DEADLINE_EXCEEDED, waits_for)


@pytest.mark.parametrize("settings", [{"max_running": 1}, {"window_depth": 1, "chunk_tokens": 16}], ids=str)
def test_who_waits_behind_another_one_waits_for_its_turn_and_not_for_pages(settings: dict) -> None:
    """Pages are free; the one before it waits for something else."""
    world = World()
    node = world.prefill(**settings)
    node.holds.add(BatchReturned)
    world.submit(node, room=1, **IN_THE_WAY)
    world.run()
    world.submit(node, room=2, **ASKED)
    waiting = world.submit(node, room=3, **ASKED)
    world.run()
    assert node.progress(waiting).waiting_for is WaitingFor.TURN
    world.advance(TIMEOUT_NS + SECOND)
    end = node.ended[waiting]
    assert isinstance(end, FailRequest)
    assert (end.cause, end.stage) == (Cause.DEADLINE_EXCEEDED, WaitingFor.TURN)


def test_a_failure_names_the_wait_how_long_it_was_and_on_whom() -> None:
    world = World()
    prefill, decode = world.prefill(), world.decode()
    request = world.submit(decode, room=7, peer=prefill.address, timeout_ns=3 * SECOND)
    world.advance(4 * SECOND)
    end = decode.ended[request]
    assert isinstance(end, FailRequest)
    assert (end.stage, end.peer) == ("landing", "prefill")
    assert 2 * SECOND < end.waited_ns <= 3 * SECOND
