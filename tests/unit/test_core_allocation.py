"""Pages that decode reserves when the prompt is computed: until then READY is said, and nothing is held for it."""

from typing import Any

import pytest

from core_driver import Replica, World, assert_nothing_is_held, expected_tokens, finished
from core_scenes import TIER
from tandem.core.commands import CancelPull, FailRequest, LoadPages, Path, PullPages
from tandem.core.disagg.allocation import Early, PrefillComplete
from tandem.core.disagg.messages import Offer, Ready, Release
from tandem.core.events import BatchReturned, PagesLanded, PeerReturned
from tandem.core.scheduler import inspect
from tandem.core.scheduler.numbers import numbers
from tandem.core.scheduler.request_state import State, WaitingFor
from tandem.core.settings import AllocationPolicy, LoadFailurePolicy, LocalPrefill, OptimisticPolicy
from tandem.core.values import SECOND, Cause, RequestId

PROMPT = 200  # tokens: 12 full pages and a half
TOKENS = expected_tokens(PROMPT, 4, seed=1)
SMALL = {"num_pages": 14, "prefix_cache": False}  # with room for one such prompt, and for what follows it


def new_pair(
    *, is_slow: bool = True, prefill: dict[str, Any] | None = None, **decode: Any
) -> tuple[World, Replica, Replica]:
    """is_slow: no batch of the prefill returns until it is released"""
    world = World()
    sender = world.prefill(**{"num_pages": 400, "optimistic": OptimisticPolicy.OFF, **(prefill or {})})
    if is_slow:
        sender.holds.add(BatchReturned)
    return world, sender, world.decode(allocation=AllocationPolicy.PREFILL_COMPLETE, **decode)


def let_one_batch_return(world: World, node: Replica) -> None:
    node.holds.discard(BatchReturned)
    world.turn(node)
    node.holds.add(BatchReturned)
    world.run()


def num_held(node: Replica) -> int:
    """Pages in tables of requests."""
    return sum(len(progress.pages) for progress in node.state.requests.values())


def test_verdicts() -> None:
    assert [Early().may_reserve(is_computed=known) for known in (False, True)] == [True, True]
    assert [PrefillComplete().may_reserve(is_computed=known) for known in (False, True)] == [False, True]


def test_decode_holds_nothing_for_a_prompt_until_all_of_it_is_computed() -> None:
    world, prefill, decode = new_pair(prefill={"chunk_tokens": 64})
    left, right = world.pair(prefill, decode, prompt_len=PROMPT)
    world.run()
    for num_offered in (0, 4, 8, 12):
        assert (prefill.state_of(left), decode.state_of(right)) == (State.COMPUTING, State.AWAITING)
        assert sum(len(offer.pages) for offer in prefill.said(Offer)) == num_offered
        assert (num_held(decode), decode.state.num_slots_used, decode.state.pool.num_free) == (0, 0, 64)
        let_one_batch_return(world, prefill)
    assert decode.tokens[right] == TOKENS
    assert (finished(decode, right).path, finished(decode, right).kv_pages) == (Path.REMOTE, 13)
    assert finished(prefill, left).kv_pages == 13
    assert_nothing_is_held([prefill, decode])


def test_who_awaits_says_what_for_and_is_counted_where_nothing_is_held() -> None:
    world, prefill, decode = new_pair()
    world.pair(prefill, decode, prompt_len=PROMPT)
    world.run()
    (wait,) = inspect.waits(decode.node, world.now)
    assert (wait["state"], wait["waiting_for"], wait["owner"]) == ("awaiting", "prefill", "prefill")
    shown = numbers(decode.node)
    assert (shown.preallocating, shown.arriving, shown.used_tokens) == (1, 0, 0)


def test_one_prompt_after_the_other_gets_the_pages_that_there_are() -> None:
    world, prefill, decode = new_pair(**SMALL)
    pairs = [world.pair(prefill, decode, prompt_len=PROMPT, seed=seed) for seed in (1, 2, 3)]
    world.run()
    assert [decode.state_of(right) for _, right in pairs] == [State.AWAITING] * 3
    decode.holds.add(PagesLanded)
    prefill.release(BatchReturned)
    world.run()
    assert [decode.state_of(right) for _, right in pairs] == [State.ARRIVING, State.QUEUED, State.QUEUED]
    assert decode.progress(pairs[1][1]).waiting_for is WaitingFor.PAGES
    assert num_held(decode) == 13
    decode.release()
    world.run()
    for seed, (left, right) in enumerate(pairs, 1):
        assert decode.tokens[right] == expected_tokens(PROMPT, 4, seed=seed)
        assert finished(decode, right).path is finished(prefill, left).path is Path.REMOTE
    assert decode.said(PullPages)[0].first_wanted == 0
    assert_nothing_is_held([prefill, decode])


def test_an_early_decode_of_that_size_keeps_the_prefill_from_all_but_one() -> None:
    """What the policy is for."""
    world, prefill, decode = new_pair(**SMALL)
    early = world.decode("early", **SMALL)
    lefts = [
        world.pair(prefill, taker, prompt_len=PROMPT, seed=seed)[0]
        for seed, taker in enumerate((decode, decode, decode, early, early, early))
    ]
    world.run()
    assert [prefill.state_of(left) is State.BOOTSTRAPPING for left in lefts] == [False] * 4 + [True] * 2
    prefill.release(BatchReturned)
    world.run()
    assert_nothing_is_held([prefill, decode, early])


def busy_decode(world: World, decode: Replica) -> None:
    """It runs a request that leaves no room for a prompt, and does not come to its end."""
    busy = world.submit(decode, prompt_len=100, max_new_tokens=8, seed=5)
    world.run_until(lambda: decode.state_of(busy) is State.RUNNING)
    decode.holds.add(BatchReturned)


def test_who_lacks_pages_keeps_what_is_offered_to_it_by_asking_and_gets_it_when_there_are_some() -> None:
    world, prefill, decode = new_pair(is_slow=False, **SMALL, stall_timeout_ns=600 * SECOND)
    busy_decode(world, decode)
    left, right = world.pair(prefill, decode, prompt_len=PROMPT)
    world.advance(3 * prefill.state.settings.lease_ns)
    assert (prefill.state_of(left), decode.state_of(right)) == (State.SENDING, State.QUEUED)
    assert decode.progress(right).waiting_for is WaitingFor.PAGES
    assert sum(len(offer.pages) for offer in prefill.said(Offer)) == 13, "that it knows is said once"
    decode.release(BatchReturned)
    world.run()
    assert decode.tokens[right] == TOKENS
    assert_nothing_is_held([prefill, decode])


def test_who_never_gets_pages_ends_at_its_deadline_and_prefill_gets_its_own_back() -> None:
    world, prefill, decode = new_pair(is_slow=False, **SMALL, stall_timeout_ns=600 * SECOND)
    busy_decode(world, decode)
    left, right = world.pair(prefill, decode, prompt_len=PROMPT, timeout_ns=60 * SECOND)
    world.advance(50 * SECOND)
    assert prefill.state_of(left) is State.SENDING
    world.advance(11 * SECOND)
    end = decode.ended[right]
    assert isinstance(end, FailRequest)
    assert (end.cause, end.stage) == (Cause.DEADLINE_EXCEEDED, "pages")
    assert left in prefill.ended
    decode.release(BatchReturned)
    world.run()
    assert_nothing_is_held([prefill, decode])


def test_a_prefill_that_does_not_come_to_an_end_is_given_up_by_its_name() -> None:
    world, prefill, decode = new_pair(waiting_timeout_ns=20 * SECOND, load_failure=LoadFailurePolicy.FAIL)
    _left, right = world.pair(prefill, decode, prompt_len=PROMPT)
    world.advance(21 * SECOND)
    end = decode.ended[right]
    assert isinstance(end, FailRequest)
    assert (end.cause, end.stage, end.peer) == (Cause.WAITING_TIMEOUT, "prefill", "prefill")
    prefill.release(BatchReturned)
    world.run()
    assert_nothing_is_held([prefill, decode])


def test_the_time_for_the_kv_to_come_does_not_run_while_this_node_lacks_pages() -> None:
    world, prefill, decode = new_pair(
        is_slow=False, **SMALL, waiting_timeout_ns=20 * SECOND, stall_timeout_ns=600 * SECOND
    )
    busy_decode(world, decode)
    _left, right = world.pair(prefill, decode, prompt_len=PROMPT)
    world.advance(60 * SECOND)
    decode.release(BatchReturned)
    world.run()
    assert finished(decode, right).path is Path.REMOTE


STATES = (State.AWAITING, State.QUEUED, State.ARRIVING)


def bring_to(state: State) -> tuple[World, Replica, Replica, RequestId, RequestId]:
    """A decode half that has said READY, in this state, with both its nodes."""
    world, prefill, decode = new_pair(is_slow=state is State.AWAITING, **SMALL)
    if state is State.QUEUED:
        busy_decode(world, decode)
    decode.holds.add(PagesLanded)
    left, right = world.pair(prefill, decode, prompt_len=PROMPT)
    world.run()
    assert decode.state_of(right) is state
    assert len(decode.said(Ready)) == 1 + (state is State.ARRIVING)
    return world, prefill, decode, left, right


def assert_both_let_go(world: World, prefill: Replica, decode: Replica) -> None:
    for node in (prefill, decode):
        node.release()
    world.run()
    assert_nothing_is_held([prefill, decode])


@pytest.mark.parametrize("state", STATES)
def test_whoever_leaves_in_any_state_leaves_nothing_behind(state: State) -> None:
    world, prefill, decode, left, right = bring_to(state)
    world.abort(decode, right)
    world.run()
    assert [release.outcome for release in decode.said(Release)] == ["aborted"]
    assert len(decode.said(CancelPull)) == (state is State.ARRIVING)
    assert decode.cause(right) is Cause.ABORTED
    assert prefill.cause(left) is Cause.PEER_ABORTED
    assert_both_let_go(world, prefill, decode)


@pytest.mark.parametrize("state", STATES)
def test_a_prefill_that_is_lost_is_replaced_by_computing_in_any_state(state: State) -> None:
    world, prefill, decode, _left, right = bring_to(state)
    world.kill(prefill)
    world.run()
    decode.release()
    world.run()
    assert (decode.tokens[right], finished(decode, right).path) == (TOKENS, Path.FALLBACK)
    assert_nothing_is_held(decode)


@pytest.mark.parametrize("state", STATES)
def test_a_prefill_whose_client_leaves_ends_both_halves_in_any_state(state: State) -> None:
    world, prefill, decode, left, right = bring_to(state)
    world.abort(prefill, left)
    world.run()
    assert decode.cause(right) is Cause.PEER_ABORTED
    assert_both_let_go(world, prefill, decode)


@pytest.mark.parametrize("state", STATES)
def test_a_connection_that_is_back_brings_ready_again_in_any_state(state: State) -> None:
    world, prefill, decode, _left, _right = bring_to(state)
    before = len(decode.said(Ready))
    world.send(decode, PeerReturned(prefill.name))
    world.run()
    assert len(decode.said(Ready)) == before + 1


@pytest.mark.parametrize("kind", [Ready, Offer])
def test_what_is_lost_before_there_are_pages_is_said_again(kind: type) -> None:
    world, prefill, decode = new_pair(is_slow=False, prefill={"chunk_tokens": 64})
    (prefill if kind is Ready else decode).drops.add(kind)
    left, right = world.pair(prefill, decode, prompt_len=PROMPT)
    world.run()
    assert decode.state_of(right) is State.AWAITING
    for node in (prefill, decode):
        node.drops.clear()
    world.advance(2 * decode.state.settings.resend_ns)
    assert decode.tokens[right] == TOKENS
    assert finished(prefill, left).path is Path.REMOTE


@pytest.mark.parametrize("kind", [Ready, Offer])
def test_what_is_lost_when_there_are_pages_is_said_again(kind: type) -> None:
    world, prefill, decode, _left, right = bring_to(State.QUEUED)
    (prefill if kind is Ready else decode).drops.add(kind)
    decode.release()
    world.run()
    assert (decode.state_of(right), decode.said(PullPages)) == (State.ARRIVING, [])
    for node in (prefill, decode):
        node.drops.clear()
    world.advance(2 * decode.state.settings.resend_ns)
    assert decode.tokens[right] == TOKENS
    assert_nothing_is_held([prefill, decode])


@pytest.mark.parametrize("logprobs_from", [None, 150])
@pytest.mark.parametrize("prompt_len", [192, PROMPT])
def test_of_what_decode_has_nothing_travels_and_a_whole_prompt_is_answered_at_once(
    prompt_len: int, logprobs_from: int | None
) -> None:
    world, prefill, decode = new_pair(is_slow=False)
    answers: list[tuple[RequestId, RequestId]] = []
    for _ in range(2):
        answers.append(world.pair(prefill, decode, prompt_len=prompt_len, logprobs_from=logprobs_from))
        world.run()
    for _, right in answers:
        assert decode.tokens[right] == expected_tokens(prompt_len, 4, seed=1)
    assert [finished(decode, right).kv_pages for _, right in answers] == [(prompt_len + 15) // 16, prompt_len % 16 > 0]
    assert [ready.held_pages for ready in decode.said(Ready)] == [0] * 4
    assert_nothing_is_held([prefill, decode])


def test_samples_of_one_prompt_are_pulled_once() -> None:
    world, prefill, decode = new_pair(is_slow=False)
    pairs = [world.pair(prefill, decode, prompt_len=PROMPT) for _ in range(4)]
    world.run()
    assert [decode.tokens[right] for _, right in pairs] == [TOKENS] * 4
    assert sum(len(pull.sources) for pull in decode.said(PullPages)) == 13 + 3 * 1
    assert_nothing_is_held([prefill, decode])


@pytest.mark.parametrize("policy", list(OptimisticPolicy))
@pytest.mark.parametrize("forced", [0.0, 1.0])
def test_whatever_prefill_does_before_ready(policy: OptimisticPolicy, forced: float) -> None:
    of_prefill = {"optimistic": policy, "force_retry_prob": forced, "chunk_tokens": 64}
    world, prefill, decode = new_pair(is_slow=False, prefill=of_prefill, **SMALL)
    pairs = [world.pair(prefill, decode, prompt_len=PROMPT, seed=seed) for seed in (1, 2, 3)]
    world.run()
    for seed, (_, right) in enumerate(pairs, 1):
        assert decode.tokens[right] == expected_tokens(PROMPT, 4, seed=seed)
        assert finished(decode, right).path is Path.REMOTE
    assert_nothing_is_held([prefill, decode])


@pytest.mark.parametrize("prefill_tp", [1, 2])
def test_with_several_shards_on_either_side(prefill_tp: int) -> None:
    of_prefill = {"cut": {"tp_size": prefill_tp}}
    world, prefill, decode = new_pair(is_slow=False, prefill=of_prefill, cut={"tp_size": 2}, **SMALL)
    pairs = [world.pair(prefill, decode, prompt_len=PROMPT, seed=seed) for seed in (1, 2)]
    world.run()
    for seed, (_, right) in enumerate(pairs, 1):
        assert decode.tokens[right] == expected_tokens(PROMPT, 4, seed=seed)
    assert_nothing_is_held([prefill, decode])


def test_a_prefix_in_host_memory_is_loaded_when_there_are_pages_for_it() -> None:
    world, prefill, decode = new_pair(is_slow=False, **TIER)
    for seed, prompt_len in ((1, PROMPT), (9, 330)):
        world.pair(prefill, decode, prompt_len=prompt_len, seed=seed, max_new_tokens=1)
        world.run()
    prefill.holds.add(BatchReturned)
    _left, right = world.pair(prefill, decode, prompt_len=PROMPT)
    world.run()
    assert (decode.state_of(right), decode.said(LoadPages)) == (State.AWAITING, [])
    prefill.release(BatchReturned)
    world.run()
    assert decode.tokens[right] == TOKENS
    assert finished(decode, right).host_tokens > 0
    assert_nothing_is_held(decode)


def test_a_prompt_that_decode_computes_itself_is_never_promised() -> None:
    world, prefill, decode = new_pair(is_slow=False, local_prefill=LocalPrefill.UP_TO, local_prefill_tokens=PROMPT)
    left, right = world.pair(prefill, decode, prompt_len=PROMPT)
    world.run()
    assert (decode.tokens[right], decode.said(Ready)) == (TOKENS, [])
    assert finished(decode, right).path is finished(prefill, left).path is Path.LOCAL
    _left, longer = world.pair(prefill, decode, prompt_len=500, seed=2)
    world.run()
    assert finished(decode, longer).path is Path.REMOTE


def test_those_who_await_count_for_the_bound_of_those_who_wait() -> None:
    world, prefill, decode = new_pair(max_queued=2)
    pairs = [world.pair(prefill, decode, prompt_len=PROMPT, seed=seed) for seed in (1, 2, 3)]
    world.run()
    assert decode.cause(pairs[2][1]) is Cause.QUEUE_FULL


def test_the_ledger_tells_computing_from_waiting_for_pages() -> None:
    world, prefill, decode = new_pair(**SMALL, stall_timeout_ns=600 * SECOND)
    busy_decode(world, decode)
    _left, right = world.pair(prefill, decode, prompt_len=PROMPT)
    world.advance(5 * SECOND)
    prefill.release(BatchReturned)
    world.run()
    world.advance(7 * SECOND)
    decode.release(BatchReturned)
    world.run()
    stages = {name: duration // SECOND for name, duration in finished(decode, right).ledger.stages}
    assert {name: seconds for name, seconds in stages.items() if seconds} == {"prefill_forward": 5, "decode_waiting": 7}
    assert sum(dict(finished(decode, right).ledger.stages).values()) == (
        decode.started_at[right] - decode.arrived_at[right]
    )
