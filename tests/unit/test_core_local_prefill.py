"""Local prefill: short or mostly cached prompts are computed by decode, and prefill is told that it is not needed."""

import pytest

from core_driver import Replica, World, assert_nothing_is_held, expected_tokens
from tandem.core.commands import FinishRequest, Path
from tandem.core.disagg.local_prefill import Auto, LocalView, Never, UpTo
from tandem.core.disagg.messages import Ready, Release
from tandem.core.events import RequestArrived
from tandem.core.scheduler.request_state import State, WaitingFor
from tandem.core.settings import LocalPrefill
from tandem.core.values import RequestId

PROMPT_LEN = 40
TOKENS = expected_tokens(PROMPT_LEN, 4, seed=1)


def path_of(replica: Replica, request: RequestId) -> Path:
    end = replica.ended[request]
    assert isinstance(end, FinishRequest), end
    return end.path


@pytest.mark.parametrize(
    ("policy", "uncached", "backlog", "is_local"),
    [
        (Never(), 1, 0, False),
        (UpTo(10), 10, 500, True),
        (UpTo(10), 11, 0, False),
        (Auto(), 64, 0, True),
        (Auto(), 65, 0, False),
        (Auto(), 1, 1, False),
    ],
)
def test_verdicts(policy: Never | UpTo | Auto, uncached: int, backlog: int, is_local: bool) -> None:
    assert policy.may_compute_here(LocalView(uncached=uncached, backlog=backlog, chunk=512)) == is_local


def test_a_short_prompt_is_computed_by_decode_and_prefill_ends_well_without_a_token() -> None:
    world = World()
    prefill = world.prefill()
    decode = world.decode(local_prefill=LocalPrefill.UP_TO, local_prefill_tokens=PROMPT_LEN)
    left, right = world.pair(prefill, decode, prompt_len=PROMPT_LEN)
    world.run()
    assert (path_of(decode, right), decode.tokens[right]) == (Path.LOCAL, TOKENS)
    assert path_of(prefill, left) is Path.LOCAL
    assert left not in prefill.tokens
    assert [release.outcome for release in decode.said(Release)] == ["not_needed"]
    assert decode.said(Ready) == []
    assert_nothing_is_held([prefill, decode])


def test_a_longer_prompt_is_fetched() -> None:
    world = World()
    prefill = world.prefill()
    decode = world.decode(local_prefill=LocalPrefill.UP_TO, local_prefill_tokens=PROMPT_LEN - 1)
    _left, right = world.pair(prefill, decode, prompt_len=PROMPT_LEN)
    world.run()
    assert (path_of(decode, right), decode.tokens[right]) == (Path.REMOTE, TOKENS)


def test_only_what_decode_has_not_cached_counts() -> None:
    world = World()
    prefill = world.prefill()
    decode = world.decode(local_prefill=LocalPrefill.UP_TO, local_prefill_tokens=8)
    _left, first = world.pair(prefill, decode, prompt_len=PROMPT_LEN)
    world.run()
    _left, again = world.pair(prefill, decode, prompt_len=PROMPT_LEN)
    world.run()
    assert (path_of(decode, first), path_of(decode, again)) == (Path.REMOTE, Path.LOCAL)
    assert decode.tokens[again] == TOKENS


def test_not_needed_may_overtake_the_request() -> None:
    world = World()
    prefill = world.prefill()
    decode = world.decode(local_prefill=LocalPrefill.UP_TO, local_prefill_tokens=PROMPT_LEN)
    prefill.holds.add(RequestArrived)
    left, right = world.pair(prefill, decode, prompt_len=PROMPT_LEN)
    world.run()
    assert path_of(decode, right) is Path.LOCAL
    prefill.release()
    world.run()
    assert path_of(prefill, left) is Path.LOCAL
    assert prefill.plans() == []
    assert_nothing_is_held([prefill, decode])


def test_a_short_prompt_that_lacks_pages_is_not_taken_from_prefill_before_they_are_there() -> None:
    world = World()
    prefill = world.prefill()
    decode = world.decode(local_prefill=LocalPrefill.UP_TO, local_prefill_tokens=PROMPT_LEN, num_pages=4)
    busy = world.submit(decode, prompt_len=30, max_new_tokens=20, seed=5)
    world.run_until(lambda: decode.state_of(busy) is State.RUNNING)
    left, right = world.pair(prefill, decode, prompt_len=PROMPT_LEN)
    world.run_until(lambda: decode.state_of(right) is State.QUEUED and prefill.state_of(left) is State.PARKED)
    assert decode.progress(right).waiting_for is WaitingFor.PAGES
    assert decode.said(Release) == [], "prefill may compute it meanwhile"
    world.run()
    assert (path_of(decode, right), decode.tokens[right]) == (Path.LOCAL, TOKENS)
    assert_nothing_is_held([prefill, decode])
