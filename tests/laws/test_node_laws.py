"""Laws of a node, for any course of events: requests end, tokens are right, books balance, and time can be repeated."""

import os
import subprocess
import sys
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from core_driver import Replica, World, assert_nothing_is_held
from core_scripts import ACTIONS, USUAL, Life, encoded, lives, scripts
from tandem.core.commands import FinishRequest
from tandem.core.events import BatchReturned, FlushRequested
from tandem.core.scheduler.node import EngineNode

HERE = Path(__file__).parent
FAULTS = [name for name in ACTIONS if name not in USUAL]


def live(chosen: dict, script: list[tuple[str, int]]) -> Life:
    life = Life(chosen)
    life.run(script)
    return life


@settings(max_examples=max(100, settings.default.max_examples))
@given(chosen=lives, script=scripts([*USUAL, *USUAL, *FAULTS]))
def test_whatever_happens_every_request_ends_with_the_right_tokens_and_nothing_is_kept(
    chosen: dict, script: list[tuple[str, int]]
) -> None:
    life = live(chosen, script)
    life.heal()
    assert_nothing_is_held(life.both)
    life.assert_tokens()
    for asked in life.asked:
        assert asked.replica.is_dead or asked.request in asked.replica.ended


@given(chosen=lives, script=scripts(USUAL, max_size=40))
def test_without_faults_every_request_that_fits_finishes_and_its_ledger_adds_up(
    chosen: dict, script: list[tuple[str, int]]
) -> None:
    life = live({**chosen, "num_pages": 64, "max_queued": 10_000}, script)
    life.world.advance(30 * 10**9)
    life.assert_tokens()
    for asked in life.asked:
        assert isinstance(asked.replica.ended[asked.request], FinishRequest)
    assert_nothing_is_held(life.both)


@given(chosen=lives, script=scripts([*USUAL, *FAULTS]), cut=st.floats(0, 1))
def test_a_restored_node_goes_on_as_the_original_would(chosen: dict, script: list[tuple[str, int]], cut: float) -> None:
    life = live(chosen, script)
    life.heal()
    for replica in life.both:
        assert_restored_is_equal(replica, int(cut * len(replica.log)))


def assert_restored_is_equal(replica: Replica, cut: int) -> None:
    original = EngineNode(replica.state.settings)
    for now, events, _ in replica.log[:cut]:
        original.step(events, now)
    restored = EngineNode(replica.state.settings)
    restored.restore(original.snapshot())
    assert restored.state == original.state
    assert restored.snapshot() == original.snapshot()
    again = [restored.step(events, now) for now, events, _ in replica.log[cut:]]
    assert encoded(again) == encoded([effects for _, _, effects in replica.log[cut:]])
    assert restored.snapshot() == replica.node.snapshot()


@given(chosen=lives, script=scripts([*USUAL, *FAULTS]))
def test_the_same_events_give_the_same_commands_byte_for_byte(chosen: dict, script: list[tuple[str, int]]) -> None:
    life = live(chosen, script)
    for replica in life.both:
        twin = EngineNode(replica.state.settings)
        again = [twin.step(events, now) for now, events, _ in replica.log]
        assert encoded(again) == encoded([effects for _, _, effects in replica.log])


FINGERPRINT = """
import hashlib, random
from core_scripts import ACTIONS, Life, encoded
random = random.Random(4)
life = Life({"num_pages": 14, "result_slots": 2, "conservativeness": 0.0})
names = list(ACTIONS)
life.run([(random.choice(names + ["pair", "turn_both"] * 8), random.randrange(4096)) for _ in range(400)])
life.heal()
digest = hashlib.sha256()
for replica in life.world.replicas.values():
    for effects in encoded([effects for _, _, effects in replica.log]):
        digest.update(effects)
    digest.update(replica.node.snapshot())
print(len(life.asked), digest.hexdigest())
"""


def test_commands_do_not_depend_on_the_hash_seed() -> None:
    def fingerprint(hash_seed: str) -> str:
        paths = os.pathsep.join((str(HERE.parent), str(HERE.parents[1] / "src")))
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": paths}
        command = [sys.executable, "-c", FINGERPRINT]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120).stdout

    first, *others = [fingerprint(seed) for seed in ("0", "1", "31337")]
    assert int(first.split()[0]) > 50
    assert others == [first, first]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5_000_000)), min_size=1, max_size=120))
def test_ttft_stages_partition_the_time_to_the_first_token_however_long_each_hop_takes(
    hops: list[tuple[int, int]],
) -> None:
    world = World()
    prefill, decode, unified = world.prefill(chunk_tokens=32), world.decode(), world.unified()
    left, right = world.pair(prefill, decode, prompt_len=100)
    alone = world.submit(unified, prompt_len=70)
    replicas = (prefill, decode, unified)
    for which, delay in hops:
        world.now += delay
        world.turn(replicas[which % 3])
    while world.turn_all():
        world.now += 777
    for replica, request in ((prefill, left), (decode, right), (unified, alone)):
        stages = dict(replica.ended[request].ledger.stages)
        assert sum(stages.values()) == replica.started_at[request] - replica.arrived_at[request]
        assert any(stage.startswith("decode_") for stage in stages) == (replica is decode)
    assert {"prefill_forward", "peer_wire"} & dict(decode.ended[right].ledger.stages).keys()


@given(st.lists(st.integers(1, 5_000_000), min_size=4, max_size=4), st.booleans())
def test_what_prefill_computes_while_its_pages_are_read_is_forward_time_on_decode(
    chunks: list[int], has_cached_prefix: bool
) -> None:
    """The first chunk is on offer long before the last is computed, and what is cached before any of them."""
    world = World()
    prefill, decode = world.prefill(chunk_tokens=32), world.decode()
    if has_cached_prefix:
        world.pair(prefill, decode, prompt_len=2 * 32)
        world.run()
        world.send(decode, FlushRequested())
        world.run()
    prefill.holds.add(BatchReturned)
    _left, right = world.pair(prefill, decode, prompt_len=(4 + 2 * has_cached_prefix) * 32)
    world.run()
    assert bool(decode.progress(right).side.offered) is has_cached_prefix
    for duration in chunks:
        world.now += duration
        prefill.release(BatchReturned)
        world.turn(prefill)
        prefill.holds.add(BatchReturned)
        world.run()
    stages = dict(decode.ended[right].ledger.stages)
    assert stages["prefill_forward"] >= sum(chunks)
    assert sum(stages.values()) == decode.started_at[right] - decode.arrived_at[right]
