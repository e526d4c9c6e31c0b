"""Routing policies under any course of requests: who is chosen is there, load stays balanced, memory is bounded."""

from hypothesis import given
from hypothesis import strategies as st

from tandem.core.router.routing import (
    POLICIES,
    CacheAware,
    Candidate,
    LeastLoad,
    PolicySettings,
    make_policy,
)
from tandem.core.router.sent_prefixes import Blocks, SentPrefixes
from tandem.core.router.worker_registry import WorkerId

WORKERS = st.sets(st.integers(0, 4), min_size=1).map(sorted)
LOADS = st.lists(st.integers(0, 40), min_size=5, max_size=5)
PROMPTS = st.tuples(st.integers(0, 2), st.integers(0, 9)).map(lambda it: prompt(*it))
TURNS = st.lists(st.tuples(WORKERS, LOADS, PROMPTS), max_size=40)
SETTINGS = st.builds(
    PolicySettings,
    name=st.just("cache_aware"),
    cache_threshold=st.sampled_from((0.0, 0.3, 1.0)),
    balance_abs_threshold=st.integers(0, 10),
    balance_rel_threshold=st.sampled_from((1.0, 1.5, 3.0)),
    max_blocks=st.integers(1, 12),
)


def prompt(conversation: int, length: int) -> Blocks:
    """The blocks of one conversation that has become so long."""
    return tuple(bytes((conversation, number)) for number in range(length))


def candidates(workers: list[int], loads: list[int]) -> list[Candidate]:
    return [Candidate(WorkerId(worker), loads[worker]) for worker in workers]


@given(st.sampled_from(list(POLICIES)), SETTINGS, TURNS, st.randoms(use_true_random=False))
def test_whoever_is_chosen_is_a_candidate(name: str, settings: PolicySettings, turns: list, random) -> None:
    """What was sent to a worker before does not bring it back while it is not there."""
    settings = PolicySettings(name, max_blocks=settings.max_blocks, cache_threshold=settings.cache_threshold)
    policy = make_policy(settings, lambda: random.getrandbits(64))
    for workers, loads, blocks in turns:
        assert policy.choose(candidates(workers, loads), blocks) in workers


@given(SETTINGS, TURNS)
def test_affinity_keeps_within_the_bounds_of_balance(settings: PolicySettings, turns: list) -> None:
    """Out of balance the least loaded is chosen, so nobody is ahead by more than both thresholds and one prompt."""
    policy = CacheAware(settings)
    for workers, loads, blocks in turns:
        there = candidates(workers, loads)
        chosen = policy.choose(there, blocks)
        least = min(it.active for it in there)
        bound = max(least + settings.balance_abs_threshold, least * settings.balance_rel_threshold)
        assert loads[chosen] <= bound


@given(SETTINGS, TURNS)
def test_a_prompt_that_goes_on_goes_to_who_had_it_where_that_is_enough_of_it(settings, turns: list) -> None:
    """Compared with a memory that forgets nothing: it knows at least as much, so it says who else may be chosen."""
    policy, sent = CacheAware(settings), {}
    for workers, loads, blocks in turns:
        there = candidates(workers, loads)
        by_load = [it.worker for it in there if it.active == min(other.active for other in there)]
        had = {sent[block] for block in blocks if block in sent}
        chosen = policy.choose(there, blocks)
        assert chosen in by_load or (chosen in had and settings.is_balanced(there))
        sent.update(dict.fromkeys(blocks, chosen))


@given(st.integers(1, 12), st.lists(st.tuples(PROMPTS, st.integers(0, 4)), max_size=40))
def test_memory_is_bounded_and_a_known_block_follows_known_ones(max_blocks: int, sent: list) -> None:
    prefixes = SentPrefixes(max_blocks)
    for blocks, worker in sent:
        prefixes.add(blocks, WorkerId(worker))
        assert len(prefixes) <= max_blocks
        for conversation in range(3):
            longest, _ = prefixes.longest(prompt(conversation, 10), range(5))
            known = [prefixes.longest((block,), range(5))[0] for block in prompt(conversation, 10)]
            assert known == [1] * longest + [0] * (10 - longest)
        if len(blocks) <= max_blocks:
            assert prefixes.longest(blocks, range(5)) == (len(blocks), worker if blocks else None)


@given(SETTINGS, TURNS, TURNS)
def test_a_restored_policy_goes_on_alike(settings: PolicySettings, before: list, after: list) -> None:
    policy, other = CacheAware(settings), CacheAware(settings)
    for workers, loads, blocks in before:
        policy.choose(candidates(workers, loads), blocks)
    other.restore(policy.snapshot())
    for workers, loads, blocks in after:
        there = candidates(workers, loads)
        assert other.choose(there, blocks) == policy.choose(there, blocks)


@given(st.lists(st.integers(0, 9), min_size=2, max_size=6), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_of_two_that_are_drawn_the_less_loaded_is_chosen(loads: list[int], one: int, other: int) -> None:
    drawn = iter((one, other))
    there = candidates(list(range(len(loads))), loads)
    chosen = make_policy(PolicySettings("power_of_two"), lambda: next(drawn)).choose(there, ())
    assert any(loads[chosen] <= loads[worker] for worker in range(len(loads)) if worker != chosen)


def test_all_turns_of_a_conversation_go_to_one_worker_and_others_elsewhere() -> None:
    policy = make_policy(PolicySettings("cache_aware"), lambda: 0)
    idle = candidates([0, 1], [0, 0])
    homes = [policy.choose(idle, prompt(conversation, 4)) for conversation in range(2)]
    assert sorted(homes) == [0, 1]
    for length in (6, 9):
        assert [policy.choose(idle, prompt(conversation, length)) for conversation in range(2)] == homes


def test_the_least_loaded_gets_what_nobody_had() -> None:
    policy, by_load = make_policy(PolicySettings("cache_aware"), lambda: 0), LeastLoad()
    for loads in ([3, 0, 2], [1, 1, 0], [0, 0, 0]):
        there = candidates([0, 1, 2], loads)
        assert policy.choose(there, ()) == by_load.choose(there, ())
