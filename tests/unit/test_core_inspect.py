"""What a node shows of itself is what is there: queue gauges, counters of failures, and who waits for what."""

from collections import Counter

import pytest

from core_driver import World, assert_nothing_is_held
from core_scenes import SCENES, TIMEOUT_NS
from tandem.core.disagg.sides import PrefillSide
from tandem.core.scheduler import inspect
from tandem.core.scheduler.numbers import numbers
from tandem.core.scheduler.request_state import State
from tandem.core.values import SECOND, Nanos
from tandem.metrics.node_numbers import named

QUEUES = {
    ("early", State.BOOTSTRAPPING): {"num_prefill_bootstrap_queue_reqs"},
    ("early", State.QUEUED): {"num_prefill_bootstrap_queue_reqs"},
    ("early", State.COMPUTING): {
        "num_prefill_bootstrap_queue_reqs",
        "tandem:num_prefill_early_reqs",
        "num_running_reqs",
    },
    ("early", State.RETRACTING): {"num_prefill_bootstrap_queue_reqs", "num_retracted_reqs"},
    ("early", State.PARKED): {"num_prefill_bootstrap_queue_reqs"},
    ("prefill", State.QUEUED): {"num_queue_reqs"},
    ("prefill", State.COMPUTING): {"num_running_reqs"},
    ("prefill", State.RETRACTING): {"num_retracted_reqs"},
    ("prefill", State.SENDING): {"num_prefill_inflight_queue_reqs"},
    ("decode", State.BOOTSTRAPPING): {"num_decode_prealloc_queue_reqs"},
    ("decode", State.AWAITING): {"num_decode_prealloc_queue_reqs"},
    ("decode", State.QUEUED): {"num_decode_prealloc_queue_reqs", "num_queue_reqs"},
    ("decode", State.ARRIVING): {"num_decode_transfer_queue_reqs"},
    ("decode", State.RECOVERING): {"num_decode_transfer_queue_reqs"},
    ("decode", State.COMPUTING): {"num_running_reqs"},
    ("decode", State.RUNNING): {"num_running_reqs"},
    ("decode", State.RETRACTING): {"num_retracted_reqs"},
    ("unified", State.QUEUED): {"num_queue_reqs"},
    ("unified", State.COMPUTING): {"num_running_reqs"},
    ("unified", State.RUNNING): {"num_running_reqs"},
}
OWNERS = {
    ("prefill", State.BOOTSTRAPPING, ""): "decode",
    ("prefill", State.PARKED, ""): "decode",
    ("prefill", State.SENDING, ""): "decode",
    ("decode", State.BOOTSTRAPPING, ""): "bootstrap server prefill.host:8998",
    ("decode", State.AWAITING, ""): "prefill",
    ("decode", State.ARRIVING, ""): "prefill",
    ("decode", State.ARRIVING, "without offer"): "prefill",
}
NAMES = set().union(*QUEUES.values())
every_scene = pytest.mark.parametrize("name", SCENES, ids=lambda name: "-".join(filter(None, name)))


@every_scene
def test_each_request_is_counted_in_the_queues_of_its_state_and_in_no_other(name: tuple[str, State, str]) -> None:
    scene = SCENES[name]()
    expected: Counter[str] = Counter()
    for progress in scene.here.node.state.requests.values():
        role = name[0] if progress.request.room is not None else "unified"
        if isinstance(progress.side, PrefillSide) and progress.side.reader is None:
            role = "early"
        expected.update(QUEUES.get((role, progress.state), ()))
    found = named(numbers(scene.here.node))
    assert {gauge: found[gauge] for gauge in NAMES} == {gauge: expected[gauge] for gauge in NAMES}


@every_scene
def test_whoever_does_not_run_is_listed_with_reason_owner_age_and_deadline(name: tuple[str, State, str]) -> None:
    scene = SCENES[name]()
    node, now = scene.here.node, Nanos(scene.world.now + SECOND // 2)
    shown = {wait["request"]: wait for wait in inspect.waits(node, now)}
    assert set(shown) == {
        progress.id for progress in node.state.requests.values() if progress.state is not State.RUNNING
    }
    if name[1] is State.RUNNING:
        return
    wait, progress = shown[scene.request], scene.here.progress(scene.request)
    assert (wait["rid"], wait["room"]) == (progress.request.rid, progress.request.room)
    assert (wait["state"], wait["waiting_for"]) == (name[1], str(progress.waiting_for))
    assert wait["owner"] == OWNERS.get(name, "worker" if wait["waiting_for"] in ("window", "tier", "drain") else "node")
    assert wait["age_seconds"] == (now - progress.entered_at) / SECOND >= 0.5
    if name[1] is State.DRAINING:
        assert wait["deadline_in_seconds"] is None, "its client has its answer"
    else:
        assert wait["deadline_in_seconds"] == (progress.deadline - now) / SECOND <= TIMEOUT_NS / SECOND


@every_scene
def test_the_flow_names_every_request_with_its_room_as_text(name: tuple[str, State, str]) -> None:
    scene = SCENES[name]()
    node, now = scene.here.node, Nanos(scene.world.now + SECOND // 2)
    shown = {one["rid"]: one for one in inspect.flow(node, now)}
    here = {p.request.rid: p for p in node.state.requests.values() if p.state not in (State.DRAINING, State.DONE)}
    assert set(shown) == set(here)
    for rid, progress in here.items():
        room = progress.request.room
        assert (shown[rid]["state"], shown[rid]["room"]) == (progress.state, None if room is None else str(room))


@every_scene
def test_pages_and_result_slots_are_shown_by_their_owner(name: tuple[str, State, str]) -> None:
    scene = SCENES[name]()
    shown, requests = inspect.state(scene.here.node), scene.here.state.requests.values()
    assert shown["pages_by_request"] == {p.id: len(p.pages) for p in requests if p.pages}
    assert shown["result_slots"]["by_request"] == scene.here.state.results.owners


def test_what_prompts_and_loads_have_cost_is_shown() -> None:
    node = World().unified()
    node.state.chunk_budget.learn(10, Nanos(30_000))
    node.state.host.break_even.loaded(2, Nanos(8000))
    costs = {
        "prompt_token_us": 3.0,
        "prompt_batch_us": 0.0,
        "load_page_from_host_us": 4.0,
        "load_page_from_storage_us": 0.0,
    }
    assert inspect.state(node.node)["costs"] == costs


@pytest.mark.parametrize(
    ("name", "counter"),
    [
        (("prefill", State.BOOTSTRAPPING, ""), "num_bootstrap_failed_reqs_total"),
        (("prefill", State.PARKED, ""), "num_bootstrap_failed_reqs_total"),
        (("prefill", State.SENDING, ""), "num_transfer_failed_reqs_total"),
        (("decode", State.BOOTSTRAPPING, ""), "num_bootstrap_failed_reqs_total"),
        (("decode", State.ARRIVING, ""), "num_transfer_failed_reqs_total"),
        (("decode", State.RECOVERING, ""), "num_transfer_failed_reqs_total"),
    ],
    ids=lambda it: it if isinstance(it, str) else "-".join(filter(None, it)),
)
def test_a_request_that_fails_is_counted_once_by_how_far_it_had_come(
    name: tuple[str, State, str], counter: str
) -> None:
    scene = SCENES[name]()
    scene.world.abort(scene.here, scene.request)
    scene.world.run()
    for replica in scene.world.replicas.values():
        replica.release()
    scene.world.advance(12 * TIMEOUT_NS)
    assert_nothing_is_held(scene.world.replicas.values())
    found = named(numbers(scene.here.node))
    both = ("num_bootstrap_failed_reqs_total", "num_transfer_failed_reqs_total")
    assert {name: found[name] for name in both} == {name: name == counter for name in both}


def test_a_pair_that_goes_well_counts_no_failure_and_shows_no_wait() -> None:
    world = World()
    prefill, decode = world.prefill(), world.decode()
    world.pair(prefill, decode, prompt_len=100)
    world.run()
    for replica in (prefill, decode):
        found = named(numbers(replica.node))
        assert not any(found[name] for name in found if "failed" in name or "retries" in name or name in NAMES)
        assert inspect.waits(replica.node, world.now) == []
