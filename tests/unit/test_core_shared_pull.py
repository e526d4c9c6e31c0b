"""A prompt that comes several times at once from one prefill is pulled once: the others take over what has come."""

from core_driver import Replica, World, assert_nothing_is_held, expected_tokens
from tandem.core.commands import PullPages
from tandem.core.disagg.messages import Offer
from tandem.core.events import PagesLanded, PeerLost, PeerSaid
from tandem.core.scheduler import inspect
from tandem.core.scheduler.request_state import State, WaitingFor
from tandem.core.values import Cause

PROMPT = 200  # tokens: 12 full pages and a half


def pulled(node: Replica) -> int:
    """Pages that were asked for."""
    return sum(len(command.sources) for command in node.commands if isinstance(command, PullPages))


def one_pair(**decode: bool) -> tuple[World, Replica, Replica]:
    world = World()
    return world, world.prefill(num_pages=400), world.decode(num_pages=600, **decode)


def test_full_pages_of_several_samples_are_pulled_once() -> None:
    world, prefill, decode = one_pair()
    pairs = [world.pair(prefill, decode, prompt_len=PROMPT) for _ in range(4)]
    world.run()
    assert pulled(decode) == 13 + 3 * 1
    assert {tuple(decode.tokens[request]) for _, request in pairs} == {tuple(expected_tokens(PROMPT, 4, seed=1))}
    for node, ids in ((prefill, [left for left, _ in pairs]), (decode, [right for _, right in pairs])):
        assert [getattr(node.ended[request], "kv_pages", None) for request in ids] == [13, 1, 1, 1]
    assert_nothing_is_held([prefill, decode])


def test_nothing_is_pulled_of_a_prompt_of_full_pages() -> None:
    world, prefill, decode = one_pair()
    pairs = [world.pair(prefill, decode, prompt_len=192) for _ in range(3)]
    world.run()
    assert pulled(decode) == 12
    assert {tuple(decode.tokens[request]) for _, request in pairs} == {tuple(expected_tokens(192, 4, seed=1))}
    assert_nothing_is_held([prefill, decode])


def test_who_waits_says_what_for_and_holds_no_pages_twice_when_it_goes_on() -> None:
    world, prefill, decode = one_pair()
    decode.holds.add(PagesLanded)
    (_, first), (_, second) = (world.pair(prefill, decode, prompt_len=PROMPT) for _ in range(2))
    world.run()
    assert decode.state_of(first) is decode.state_of(second) is State.ARRIVING
    assert [wait["waiting_for"] for wait in inspect.waits(decode.node, decode.state.now)] == ["landing", "prefix"]
    assert len(set(decode.progress(first).pages) & set(decode.progress(second).pages)) == 0
    decode.release()
    world.run_until(lambda: decode.state_of(second) is State.RUNNING)
    assert decode.progress(second).waiting_for is not WaitingFor.PREFIX
    assert decode.progress(first).pages[:12] == decode.progress(second).pages[:12]
    world.run()
    assert_nothing_is_held([prefill, decode])


def test_when_the_one_who_pulls_ends_the_next_one_pulls_all() -> None:
    world, prefill, decode = one_pair()
    decode.holds.add(PagesLanded)
    (_, first), (_, second), (_, third) = (world.pair(prefill, decode, prompt_len=PROMPT) for _ in range(3))
    world.run()
    world.abort(decode, first)
    world.run()
    assert pulled(decode) == 2 * 13
    assert decode.progress(third).waiting_for is WaitingFor.PREFIX
    decode.release()
    world.run()
    assert pulled(decode) == 2 * 13 + 1
    for request in (second, third):
        assert decode.tokens[request] == expected_tokens(PROMPT, 4, seed=1)
    assert_nothing_is_held([prefill, decode])


def test_an_offer_that_comes_again_as_the_other_ends_is_pulled_and_waits_no_more() -> None:
    world, prefill, decode = one_pair()
    decode.holds.add(PagesLanded)
    (_, first), (_, second) = (world.pair(prefill, decode, prompt_len=PROMPT) for _ in range(2))
    world.run()
    again = next(offer for offer in prefill.said(Offer) if offer.room == world.next_room)
    world.abort(decode, first)
    world.send(decode, PeerSaid(prefill.name, again))
    world.run()
    assert pulled(decode) == 13 + len(again.pages)
    assert decode.progress(second).waiting_for is WaitingFor.LANDING
    decode.release()
    world.advance(2 * decode.state.settings.resend_ns)  # the last page was offered while it waited
    assert decode.tokens[second] == expected_tokens(PROMPT, 4, seed=1)
    assert_nothing_is_held([prefill, decode])


def test_who_waits_may_end_itself() -> None:
    world, prefill, decode = one_pair()
    decode.holds.add(PagesLanded)
    (_, first), (_, second) = (world.pair(prefill, decode, prompt_len=PROMPT) for _ in range(2))
    world.run()
    world.abort(decode, second)
    decode.release()
    world.run()
    assert decode.tokens[first] == expected_tokens(PROMPT, 4, seed=1)
    assert not decode.state.held_back
    assert_nothing_is_held([prefill, decode])


def test_when_the_prefill_is_lost_all_of_them_hear_of_it() -> None:
    world, prefill, decode = one_pair()
    decode.holds.add(PagesLanded)
    pairs = [world.pair(prefill, decode, prompt_len=PROMPT) for _ in range(3)]
    world.run()
    world.send(decode, PeerLost(prefill.name, Cause.PEER_LOST))
    decode.release()
    world.run()
    for _, request in pairs:
        assert decode.tokens[request] == expected_tokens(PROMPT, 4, seed=1)  # computed here
    assert_nothing_is_held(decode)


def test_what_comes_from_another_prefill_is_not_waited_for() -> None:
    world = World()
    one, other, decode = world.prefill("one", num_pages=400), world.prefill("other", num_pages=400), world.decode()
    decode.holds.add(PagesLanded)
    world.pair(one, decode, prompt_len=PROMPT)
    world.pair(other, decode, prompt_len=PROMPT)
    world.run()
    assert pulled(decode) == 2 * 13
    decode.release()
    world.run()
    assert_nothing_is_held([one, other, decode])


def test_without_a_prefix_cache_everybody_pulls() -> None:
    world, prefill, decode = one_pair(prefix_cache=False)
    for _ in range(3):
        world.pair(prefill, decode, prompt_len=PROMPT)
    world.run()
    assert pulled(decode) == 3 * 13
    assert_nothing_is_held([prefill, decode])
