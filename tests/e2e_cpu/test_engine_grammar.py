"""Requests that follow a grammar, in an engine of a random model: whatever happens to them, they end as it says."""

from pathlib import Path

import pytest
from engine_world import EngineWorld, prompt_of
from tiny_models import make_llama

from tandem import grammar
from tandem.cli.model_source import BUNDLED, find_model
from tandem.core.batch import TokenFlag
from tandem.grammar import Vocabulary
from tandem.server.api.tokenizer import Tokenizer

TOKENIZER = find_model(BUNDLED)
SIZE = 600  # more logits than the tokenizer has tokens
NUMBERS = grammar.from_regex("[0-9]{12}(-[0-9]{4}){4}")
PROMPT_LEN = 37
TEXTS = Tokenizer(TOKENIZER)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    make_llama(tmp_path, vocab_size=SIZE, eos_token_id=2)
    return tmp_path


def world_of(model_dir: Path) -> EngineWorld:
    return EngineWorld(model_dir, vocabulary=Vocabulary(TOKENIZER / "tokenizer.json", size=SIZE))


def generate(world: EngineWorld, request: int, most: int = 60) -> list[int]:
    """Until a flag says that it is over."""
    world.prefill(request)
    if not world.flags[request]:
        world.run(decodes=True, join=[request])
    for _ in range(most):
        if world.flags[request]:
            break
        world.decode(1)
    return world.tokens[request][PROMPT_LEN:]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 1.5, "seed": 9},
        {"temperature": 1.5, "seed": 9, "frequency_penalty": 2.0, "repetition_penalty": 1.5},
        {"temperature": 2.0, "seed": 3, "top_k": 3, "top_p": 0.9, "min_p": 0.1},
        {"logit_bias": {93: 100.0}},  # {
        {"min_tokens": 100},
        {"ignore_eos": True},
        {"logprobs": True, "top_logprobs": 3},
        {"stop_token_ids": (21,), "min_tokens": 100},
    ],
    ids=str,
)
def test_every_parameter_holds_within_the_grammar(model_dir: Path, params: dict) -> None:
    world = world_of(model_dir)
    request = world.add(prompt_of(PROMPT_LEN), grammar=NUMBERS, **params)
    text = TEXTS.decode(generate(world, request))
    numbers = text.split("-")
    assert [len(number) for number in numbers] == [12, 4, 4, 4, 4], text
    assert all(number.isdigit() for number in numbers)
    assert world.flags[request] == TokenFlag.STOP, "the last token ends it; no other is asked for"


def test_an_answer_that_may_go_on_ends_by_the_end_token_only(model_dir: Path) -> None:
    world = world_of(model_dir)
    bias = {"logit_bias": {2: 90.0}}
    ended = world.add(prompt_of(PROMPT_LEN), grammar=grammar.from_regex("[0-9]{4,90}"), **bias)
    tokens = generate(world, ended)
    assert tokens[-1] == 2
    assert len(TEXTS.decode(tokens)) >= 4
    assert world.flags[ended] & TokenFlag.EOS
    ignored = world_of(model_dir)
    request = ignored.add(prompt_of(PROMPT_LEN), grammar=grammar.from_regex("[0-9]{4,90}"), ignore_eos=True, **bias)
    assert len(TEXTS.decode(generate(ignored, request, most=200))) == 90


def test_rows_with_and_without_a_grammar_do_not_disturb_each_other(model_dir: Path) -> None:
    alone = world_of(model_dir)
    plain = alone.generate(prompt_of(20), 12)
    bound = generate(alone, alone.add(prompt_of(PROMPT_LEN), grammar=NUMBERS))
    world = world_of(model_dir)
    first, second = world.add(prompt_of(20)), world.add(prompt_of(PROMPT_LEN), grammar=NUMBERS)
    world.run((first, 0, 20), (second, 0, PROMPT_LEN))
    world.run(decodes=True, join=[second, first])
    world.decode(10)
    assert world.tokens[first][20:] == plain
    assert world.tokens[second][PROMPT_LEN:] == bound[:12]


@pytest.mark.parametrize("params", [{}, {"temperature": 1.5, "seed": 9}], ids=str)
def test_where_it_stands_is_made_anew_on_decode(model_dir: Path, params: dict) -> None:
    """From the first token, which prefill has sampled."""
    expected = generate(alone := world_of(model_dir), alone.add(prompt_of(PROMPT_LEN), grammar=NUMBERS, **params))
    prefill, decode = world_of(model_dir), world_of(model_dir)
    prompt = prompt_of(PROMPT_LEN)
    sender = prefill.add(prompt, grammar=NUMBERS, **params)
    receiver = decode.add(prompt, grammar=NUMBERS, **params)
    prefill.prefill(sender)
    pages = decode.free[-3:][::-1]
    for source, destination in zip(prefill.tables[sender], pages, strict=True):
        decode.engine.kv.page(destination)[:] = prefill.engine.kv.page(source)
    decode.run(decodes=True, join=[receiver], first_token=prefill.tokens[sender][-1])
    while not decode.flags[receiver]:
        decode.decode(1)
    assert decode.tokens[receiver][PROMPT_LEN:] == expected
    assert [len(number) for number in TEXTS.decode(expected).split("-")] == [12, 4, 4, 4, 4]


@pytest.mark.parametrize("lost", [0, 2])
def test_a_retracted_request_goes_on_where_its_grammar_was(model_dir: Path, lost: int) -> None:
    """`lost`: tokens that were sampled, and that the node never heard of; they are sampled again."""
    expected = generate(alone := world_of(model_dir), alone.add(prompt_of(PROMPT_LEN), grammar=NUMBERS))
    world = world_of(model_dir)
    request = world.add(prompt_of(PROMPT_LEN), grammar=NUMBERS)
    world.prefill(request)
    world.run(decodes=True, join=[request])
    world.decode(5)
    world.retract(request)
    del world.tokens[request][len(world.tokens[request]) - lost :]
    world.prefill(request)
    world.run(decodes=True, join=[request])
    while not world.flags[request]:
        world.decode(1)
    assert world.tokens[request][PROMPT_LEN:] == expected


def test_a_batch_that_was_under_way_when_the_grammar_ended_does_no_harm(model_dir: Path) -> None:
    world = world_of(model_dir)
    request, other = (world.add(prompt_of(PROMPT_LEN), grammar=made) for made in (grammar.from_regex("7"), NUMBERS))
    world.run((request, 0, PROMPT_LEN), (other, 0, PROMPT_LEN))
    assert world.flags[request] == TokenFlag.STOP
    world.run(decodes=True, join=[request, other])
    world.decode(3)
    assert not world.flags[other]
    assert not world.flags[request] & TokenFlag.INVALID


def test_a_grammar_that_outgrows_its_bounds_ends_its_request_only(model_dir: Path) -> None:
    world = world_of(model_dir)
    stuck, other = (world.add(prompt_of(PROMPT_LEN), grammar=made) for made in (grammar.from_regex("7"), NUMBERS))
    world.run(decodes=False)
    world.engine._tables.sequences[stuck].matcher.accept(93)  # { is not 7: llguidance gives up
    world.run((stuck, 0, PROMPT_LEN), (other, 0, PROMPT_LEN))
    assert world.flags[stuck] & TokenFlag.INVALID
    assert not world.flags[other]


def test_rows_that_come_and_go_get_the_tokens_that_each_gets_alone(model_dir: Path) -> None:
    """What may come next is found for all who decode right after a batch: for some who then leave, are taken back or
    never come again, and not for those who join."""
    grammars = [NUMBERS, grammar.from_regex("[a-z]{9}( [a-z]{4}){4}"), grammar.from_json_schema({"type": "array"})]
    alone = [generate(it := world_of(model_dir), it.add(prompt_of(PROMPT_LEN), grammar=made)) for made in grammars]
    world = world_of(model_dir)
    first, second, third, given_up = (
        world.add(prompt_of(PROMPT_LEN), grammar=made) for made in (*grammars, grammars[0])
    )
    for request in (first, second, given_up):
        world.prefill(request)
    world.run(decodes=True, join=[first, second, given_up])
    world.decode(3)
    world.finish(given_up)
    world.retract(first)
    world.prefill(third)
    world.run((first, 0, PROMPT_LEN + 2), decodes=True)  # as far as that goes: the next batch has the rest
    world.run((first, PROMPT_LEN + 2, len(world.tokens[first])), decodes=True, join=[third])
    world.run(decodes=True, join=[first])
    for _ in range(60):
        world.decode(1)
    for request, expected in zip((first, second, third), alone, strict=True):
        assert world.tokens[request][PROMPT_LEN : PROMPT_LEN + len(expected)] == expected


def test_a_grammar_that_fails_among_those_who_decode_ends_its_request_only(model_dir: Path) -> None:
    expected = generate(alone := world_of(model_dir), alone.add(prompt_of(PROMPT_LEN), grammar=NUMBERS))
    world = world_of(model_dir)
    stuck, other = (world.add(prompt_of(PROMPT_LEN), grammar=NUMBERS) for _ in range(2))
    world.run((stuck, 0, PROMPT_LEN), (other, 0, PROMPT_LEN))
    world.run(decodes=True, join=[stuck, other])
    world.engine._tables.sequences[stuck].matcher.accept(93)  # { is no number: llguidance gives up
    world.decode(1)
    assert world.flags[stuck] & TokenFlag.INVALID
    assert not world.flags[other]
    world.run(decodes=True, leave=[stuck])
    world.decode(len(expected) - 4)
    assert world.tokens[other][PROMPT_LEN:] == expected
