"""A seed that breaks an invariant becomes a scenario of a few lines that breaks the same one."""

from dataclasses import replace
from random import Random

import pytest

from seeded_bugs import MUTANTS
from tandem.simulator.faults.options import draw_options
from tandem.simulator.hunt import run_seed
from tandem.simulator.oracle import Script as Answer
from tandem.simulator.oracle import Violation
from tandem.simulator.scenario.parse import (
    chance_words,
    ns_text,
    parse_chances,
    parse_ns,
    parse_setting,
    settings_words,
)
from tandem.simulator.scenario.play import DIVIDER, Scenario
from tandem.simulator.scenario.prompts import Namer, Stories
from tandem.simulator.scenario.record import Recorder
from tandem.simulator.scenario.script import OrderLine, RequestLine, Script
from tandem.simulator.scenario.shrink import Found, shrink_seed
from tandem.simulator.world import RECOUNT_EVERY, World

FEW = 20  # events
PATIENCE = 12  # seeds after the recorded one, as in tests/mutants


def killing_seed(name: str) -> int:
    mutant = MUTANTS[name]
    seeds = range(mutant.seed, mutant.seed + PATIENCE)
    return next(seed for seed in seeds if run_seed(seed).invariant in mutant.killed_by)


def told_again(text: str) -> tuple[str, str]:
    """(the invariant that breaks, the trace up to there)"""
    scenario = Scenario()
    scenario.read(text.partition(DIVIDER)[0])
    with pytest.raises(Violation) as broken:
        scenario.run()
    return broken.value.invariant, "\n".join(scenario.lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "terminal_event_comes_twice",
        "source_pages_freed_without_waiting_for_readers",
        "grown_page_is_not_told",
        "ready_waits_for_its_timer_when_the_connection_is_back",
        "refusal_of_the_edge_is_not_for_the_other_half",
    ],
)
def test_a_killing_seed_shrinks_to_a_few_events_that_break_the_same_invariant(name: str) -> None:
    with MUTANTS[name].breaks():
        seed = killing_seed(name)
        found = shrink_seed(seed)
        assert found is not None
        assert found.num_events <= FEW
        invariant, trace = told_again(found.text())
        assert invariant == found.violation.invariant == run_seed(seed).invariant
        assert trace in found.text()
    scenario = Scenario()
    scenario.read(found.script.text())
    scenario.run()  # without the bug nothing is wrong with it


def test_a_seed_that_breaks_nothing_is_not_shrunk() -> None:
    assert shrink_seed(1) is None


def test_what_chance_brings_counts_as_events() -> None:
    line = OrderLine(0, ("prefill-0", "crash"))
    found = Found(Script(scheduled=(line,)), Violation("S1", ""), (), ended_at=0, num_by_chance=3)
    assert found.num_events == 4


# --- the recorder ----------------------------------------------------------------------------------------------------


def test_a_recorder_has_the_requests_of_the_world_and_can_be_told() -> None:
    world = World(draw_options(2))
    recorder = Recorder(world)
    world.schedule_all()
    world.run()
    script = recorder.script()
    told = [line for line in script.scheduled if isinstance(line, RequestLine)]
    asked = {half.ask.index for each in world.edge.exchanges for half in each.halves if not half.must_finish}
    assert len({line.story for line in told}) == len(asked)
    scenario = Scenario()
    scenario.read(replace(script, recount_every=RECOUNT_EVERY).text())
    scenario.run()


def test_groups_are_the_halves_of_a_request_with_what_its_client_does() -> None:
    request = RequestLine(1, "prefill-0", 8, 3, 7, "7")
    lines = (
        request,
        OrderLine(2, ("prefill-0", "pause", "1s")),
        OrderLine(3, ("prefill-0", "abort", "prompt", "7"), 7),
    )
    assert Script(scheduled=lines).groups() == [frozenset({0, 2}), frozenset({1})]


# --- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("time_ns", [0, 1, 999, 1000, 1_234_567, 5_000_000, 61_000_000_000])
def test_a_time_is_written_exactly(time_ns: int) -> None:
    assert parse_ns(ns_text(time_ns)) == time_ns


@pytest.mark.parametrize("seed", range(20))
def test_settings_and_chances_of_a_seed_are_written_exactly(seed: int) -> None:
    options = draw_options(seed)
    settings = dict(map(parse_setting, settings_words(options.prefill)))
    assert all(getattr(options.prefill, name) == value for name, value in settings.items())
    chances, has_jitter = parse_chances([f"seed={seed}", *chance_words(options)])
    assert has_jitter
    assert chances.seed == seed
    assert chances.links == options.links
    names = ("corruption", "linger_ns", "batch_failure", "event_copies", "page_read_ns")
    assert [getattr(chances, name) for name in names] == [getattr(options, name) for name in names]


def test_prompts_share_in_words_what_they_shared() -> None:
    random = Random(4711)
    first = Answer(tuple(random.randrange(10, 1000) for _ in range(20)), 6, 0)
    prefix = Answer((*first.prompt[:12], 5000, 5001), 6, 0)
    next_turn = Answer((*first.tokens, *(first.output_token(index) for index in range(4)), 6000), 6, 0)
    namer, stories = Namer(), Stories()
    told = [namer.words(script) for script in (first, prefix, next_turn)]
    again = [
        stories.script(words, prompt_len=len(script.prompt), max_new_tokens=6, eos_one_in=0)
        for (_, words), script in zip(told, (first, prefix, next_turn), strict=True)
    ]
    assert [words for _, words in told] == ["1", "1:12/2", "1:24/3"]
    assert again[1].prompt[:12] == again[0].prompt[:12]
    assert again[1].prompt[12] != again[0].prompt[12]
    assert again[2].prompt[:24] == tuple(again[0].token(index) for index in range(24))


def test_an_answer_that_ended_early_ends_as_early_in_words() -> None:
    script = next(
        script for first in range(1000) if (script := Answer((first, first + 1), 40, 8)).output_length() not in (1, 40)
    )
    _, words = Namer().words(script)
    told = Stories().script(words, prompt_len=2, max_new_tokens=40, eos_one_in=8)
    assert told.output_length() == script.output_length()


def test_a_script_is_written_in_the_order_of_time() -> None:
    lines = (OrderLine(5_000_000, ("heal",)), RequestLine(1_000_000, "unified-0", 8, 3, 1, "1"))
    script = Script(scheduled=lines)
    assert script.text().splitlines() == ["at 1ms unified-0 request 8+3 prompt 1", "at 5ms heal", "until idle"]
    assert replace(script, chances=("seed=1", "loss=0.5")).text().startswith("chances seed=1 loss=0.5\n")
