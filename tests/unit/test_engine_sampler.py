"""From logits to tokens: each parameter alone, chance without state, flags, log-probabilities."""

import math
from collections import Counter

import pytest
import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tandem.core.batch import TokenFlag
from tandem.engine.sampler import Draw, History, sample
from tandem.sampling import SamplingParams

VOCAB = 50
EOS = 3
DRAWS = 3000


def logits_of(seed: int = 0, *, rows: int = 1, vocab: int = VOCAB, spread: float = 2.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def draw_one(logits: Tensor, *, position: int = 10, num_outputs: int = 0, output=(), prompt=(), **params) -> int:
    """`logits`: [vocab]. Returns the token; flags must be clean of INVALID."""
    sampling = SamplingParams(**params)
    history = History.of(sampling, prompt)
    for token in output:
        history.add(token)
    result = sample(logits[None], [Draw(sampling, position, num_outputs, history)], eos_ids=[EOS])
    assert not result.flags[0] & TokenFlag.INVALID
    return int(result.tokens[0])


def frequencies(logits: Tensor, **params) -> Tensor:
    """[vocab]: share of each token over DRAWS positions of one request."""
    torch.set_num_threads(1)
    draws = [Draw(SamplingParams(seed=7, **params), position) for position in range(DRAWS)]
    counts = Counter(sample(logits[None].expand(DRAWS, -1), draws, eos_ids=[]).tokens.tolist())
    return torch.tensor([counts[token] / DRAWS for token in range(logits.shape[0])])


def assert_distribution(seen: Tensor, expected: Tensor) -> None:
    """Every share within five standard deviations; what cannot be drawn is not drawn."""
    deviation = (expected * (1 - expected) / DRAWS).sqrt()
    assert ((seen - expected).abs() <= 5 * deviation + 1e-9).all()
    assert not seen[expected == 0].any()


def test_temperature_zero_takes_the_largest_logit_and_the_lowest_id_of_equals() -> None:
    logits = torch.zeros(VOCAB)
    logits[[31, 17, 40]] = 5.0

    assert draw_one(logits, temperature=0.0) == 17


def test_sampling_follows_the_softmax_of_the_logits() -> None:
    logits = logits_of()[0]

    assert_distribution(frequencies(logits), logits.softmax(0))


def test_temperature_divides_the_logits() -> None:
    logits = logits_of()[0]

    assert_distribution(frequencies(logits, temperature=2.5), (logits / 2.5).softmax(0))


def test_top_k_leaves_the_k_best() -> None:
    logits = logits_of()[0]
    expected = TopKLogitsWarper(5)(None, logits[None])[0].softmax(0)

    assert_distribution(frequencies(logits, top_k=5), expected)


def test_top_k_takes_exactly_k_of_equal_logits_lowest_ids_first() -> None:
    seen = frequencies(torch.zeros(VOCAB), top_k=4)

    assert_distribution(seen, torch.tensor([0.25] * 4 + [0.0] * (VOCAB - 4)))


def test_top_k_beyond_the_vocabulary_changes_nothing() -> None:
    logits = logits_of()[0]

    assert torch.equal(frequencies(logits, top_k=10 * VOCAB), frequencies(logits))


@pytest.mark.parametrize("seed", range(20))
def test_top_k_one_is_greedy_also_for_ties(seed: int) -> None:
    logits = logits_of(seed)[0].round()

    assert draw_one(logits, top_k=1, seed=seed) == draw_one(logits, temperature=0.0)


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9])
def test_top_p_leaves_the_smallest_set_with_that_probability(top_p: float) -> None:
    logits = logits_of()[0]
    expected = TopPLogitsWarper(top_p)(None, logits[None])[0].softmax(0)

    assert_distribution(frequencies(logits, top_p=top_p), expected)


def test_top_p_zero_leaves_the_best_token() -> None:
    logits = logits_of()[0]

    assert frequencies(logits, top_p=0.0)[logits.argmax()] == 1.0


def test_top_p_finds_more_candidates_than_it_looks_at_first() -> None:
    logits = torch.zeros(5000)
    tokens = [draw_one(logits, position=p, top_p=0.5, seed=3) for p in range(300)]

    assert 1024 < max(tokens) < 2500


def test_top_p_applies_to_what_top_k_left() -> None:
    logits = logits_of()[0]
    kept = TopKLogitsWarper(8)(None, logits[None])
    expected = TopPLogitsWarper(0.7)(None, kept)[0].softmax(0)

    assert_distribution(frequencies(logits, top_k=8, top_p=0.7), expected)


def test_min_p_drops_what_is_much_less_likely_than_the_best() -> None:
    logits = logits_of()[0]
    expected = MinPLogitsWarper(0.2)(None, logits[None])[0].softmax(0)

    assert_distribution(frequencies(logits, min_p=0.2), expected)


def test_min_p_one_leaves_the_best_token() -> None:
    logits = logits_of()[0]

    assert frequencies(logits, min_p=1.0)[logits.argmax()] == 1.0


@pytest.mark.parametrize("penalty", [0.5, 1.7])
def test_repetition_penalty_is_that_of_transformers_over_prompt_and_output(penalty: float) -> None:
    logits = logits_of(spread=0.3)[0]
    prompt, output = [1, 2, 2, 30], [5, 30, 6]
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits[None].clone())[0]

    token = draw_one(logits, temperature=0.0, repetition_penalty=penalty, prompt=prompt, output=output)

    assert token == int(expected.argmax())


def test_repetition_penalty_turns_down_a_prompt_token() -> None:
    logits = torch.zeros(VOCAB)
    logits[9], logits[4] = 2.0, 1.5

    assert draw_one(logits, temperature=0.0, repetition_penalty=1.2, prompt=[9]) == 9
    assert draw_one(logits, temperature=0.0, repetition_penalty=1.5, prompt=[9]) == 4


def test_frequency_penalty_counts_the_output_only() -> None:
    logits = torch.zeros(VOCAB)
    logits[9], logits[4] = 2.0, 1.5
    penalty = {"temperature": 0.0, "frequency_penalty": 0.2, "prompt": [9] * 10}

    assert draw_one(logits, output=[9, 9], **penalty) == 9
    assert draw_one(logits, output=[9, 9, 9], **penalty) == 4


def test_presence_penalty_does_not_grow() -> None:
    logits = torch.zeros(VOCAB)
    logits[9], logits[4] = 2.0, 1.5

    assert draw_one(logits, temperature=0.0, presence_penalty=0.4, output=[9] * 20) == 9
    assert draw_one(logits, temperature=0.0, presence_penalty=0.6, output=[9]) == 4
    assert draw_one(logits, temperature=0.0, presence_penalty=0.6, prompt=[9], output=[8]) == 9


def test_logit_bias_adds_to_single_logits() -> None:
    logits = logits_of()[0]

    assert draw_one(logits, temperature=0.0, logit_bias={12: 100.0}) == 12
    assert frequencies(logits, logit_bias={int(logits.argmax()): -100.0})[logits.argmax()] == 0.0


def test_min_tokens_masks_the_end_until_there_are_enough() -> None:
    logits = torch.zeros(VOCAB)
    logits[EOS], logits[20], logits[8] = 9.0, 8.0, 1.0
    params = {"temperature": 0.0, "min_tokens": 4, "stop_token_ids": (20,)}

    assert draw_one(logits, num_outputs=3, **params) == 8
    assert draw_one(logits, num_outputs=4, **params) == EOS


def test_what_was_asked_for_does_not_change_the_logits_of_the_caller() -> None:
    logits = logits_of()
    before = logits.clone()
    params = {"logit_bias": {1: 5.0}, "repetition_penalty": 1.3, "frequency_penalty": 1.0, "min_tokens": 9}

    draw_one(logits[0], prompt=[1, 2], output=[3], **params)

    assert torch.equal(logits, before)


# --- chance without state ------------------------------------------------------------------------------------------

MIXED = [
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"top_k": 5},
    {"min_p": 0.05, "logprobs": True},
    {"temperature": 0.0},
    {"logit_bias": {4: 2.0}, "top_p": 0.5},
]


def test_a_row_gets_the_same_token_whatever_the_batch() -> None:
    logits = logits_of(rows=60, vocab=3001)
    draws = [Draw(SamplingParams(seed=row, **MIXED[row % 6]), position=row) for row in range(60)]
    together = sample(logits, draws, eos_ids=[]).tokens.tolist()

    assert together == [int(sample(logits[row : row + 1], [draws[row]], eos_ids=[]).tokens[0]) for row in range(60)]
    backwards = sample(logits.flip(0), draws[::-1], eos_ids=[]).tokens.tolist()
    assert together == backwards[::-1]


def test_the_same_seed_and_position_draw_the_same_token() -> None:
    logits = logits_of()[0]

    assert [draw_one(logits, position=p, seed=5) for p in range(40)] == [
        draw_one(logits, position=p, seed=5) for p in range(40)
    ]


def test_another_seed_and_another_position_draw_otherwise() -> None:
    logits = logits_of(spread=0.1)[0]
    by_position = [draw_one(logits, position=p, seed=5) for p in range(40)]

    assert by_position != [draw_one(logits, position=p, seed=6) for p in range(40)]
    assert len(set(by_position)) > 15


# --- flags and scores ----------------------------------------------------------------------------------------------


def flags_for(token: int, **params) -> int:
    logits = torch.zeros(1, VOCAB)
    logits[0, token] = 10.0
    return sample(logits, [Draw(SamplingParams(temperature=0.0, **params), 0)], eos_ids=[EOS, 40]).flags[0]


def test_the_end_of_the_sequence_is_flagged() -> None:
    assert flags_for(EOS) == TokenFlag.EOS
    assert flags_for(40) == TokenFlag.EOS
    assert flags_for(5) == 0


def test_stop_tokens_are_flagged_and_may_be_the_end_as_well() -> None:
    assert flags_for(5, stop_token_ids=(4, 5)) == TokenFlag.STOP
    assert flags_for(EOS, stop_token_ids=(EOS,)) == TokenFlag.STOP | TokenFlag.EOS


def test_ignore_eos_leaves_stop_tokens() -> None:
    assert flags_for(EOS, ignore_eos=True) == 0
    assert flags_for(EOS, ignore_eos=True, stop_token_ids=(EOS,)) == TokenFlag.STOP


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_flagged_and_harm_no_other_row(bad: float, temperature: float) -> None:
    logits = logits_of(rows=3)
    logits[1, 20] = bad
    draws = [Draw(SamplingParams(temperature=temperature), 4)] * 3

    result = sample(logits, draws, eos_ids=[])

    assert list(result.flags) == [0, TokenFlag.INVALID, 0]
    assert result.tokens[1] == 0
    assert int(result.tokens[2]) == draw_one(logits[2], position=4, temperature=temperature)


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = logits_of()
    params = SamplingParams(temperature=0.3, top_k=3, logit_bias={7: 50.0}, logprobs=True, top_logprobs=4)

    result = sample(logits, [Draw(params, 0)], eos_ids=[])

    expected = logits[0].log_softmax(0)
    best = expected.sort(descending=True)
    assert result.tokens[0] == 7
    assert result.scores[0].logprob == pytest.approx(float(expected[7]))
    assert result.scores[0].top_ids == tuple(best.indices[:4].tolist())
    assert result.scores[0].top_logprobs == pytest.approx(best.values[:4].tolist())


def test_tokens_that_are_asked_for_by_their_ids_are_told_behind_the_best() -> None:
    params = SamplingParams(temperature=0.0, logprobs=True, top_logprobs=2, logprob_ids=(9, 3, 9))
    expected = logits_of()[0].log_softmax(0)
    score = sample(logits_of(), [Draw(params, 0)], eos_ids=[]).scores[0]
    assert score.top_ids == (*expected.topk(2).indices.tolist(), 9, 3, 9)
    assert score.top_logprobs == pytest.approx(expected[list(score.top_ids)].tolist())


def test_only_rows_that_ask_for_logprobs_get_them() -> None:
    draws = [Draw(SamplingParams(temperature=t, logprobs=ask), 0) for t, ask in ((0, False), (0, True), (1, False))]

    assert list(sample(logits_of(rows=3), draws, eos_ids=[]).scores) == [1]


def test_no_rows_give_no_tokens() -> None:
    result = sample(torch.empty(0, VOCAB), [], eos_ids=[])

    assert (len(result.tokens), result.flags, result.scores) == (0, b"", {})


def bits(*ids: int) -> bytes:
    """As `Matcher.allowed` has them."""
    return sum(1 << id for id in ids).to_bytes((VOCAB + 31) // 32 * 4, "little")


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 2.0, "seed": 4}, {"top_k": 2}], ids=str)
def test_what_a_grammar_forbids_is_not_drawn_and_other_rows_are_as_they_were(params: dict) -> None:
    logits = logits_of(rows=3)
    sampling = SamplingParams(**params)
    draws = [Draw(sampling, 1), Draw(sampling, 1, allowed=bits(7, 40)), Draw(sampling, 1)]

    result = sample(logits, draws, eos_ids=[])

    free = sample(logits, [Draw(sampling, 1)] * 3, eos_ids=[]).tokens
    assert result.tokens[1] in (7, 40)
    assert [result.tokens[row] for row in (0, 2)] == [free[row] for row in (0, 2)]


def test_what_is_not_forbidden_stays_and_logprobs_beside_a_grammar_are_right() -> None:
    logits = logits_of(rows=3)
    draws = [
        Draw(SamplingParams(temperature=0.0), 1, allowed=bits(7, 40)),
        Draw(SamplingParams(temperature=0.0, logprobs=True), 1),
        Draw(SamplingParams(temperature=0.0), 1, allowed=bits(3)),
    ]
    result = sample(logits, draws, eos_ids=[])
    before = logits_of(rows=3)
    assert [set(row.isfinite().nonzero().flatten().tolist()) for row in logits[[0, 2]]] == [{7, 40}, {3}]
    assert torch.equal(logits[1], before[1])
    assert torch.equal(logits[0, [7, 40]], before[0, [7, 40]])
    assert result.scores[1].logprob == pytest.approx(float(before[1].log_softmax(0).max()))


def test_logprobs_are_those_of_the_raw_logits_under_a_grammar_too() -> None:
    params = SamplingParams(temperature=0.0, logprobs=True)
    result = sample(logits_of(), [Draw(params, 0, allowed=bits(11))], eos_ids=[])
    assert result.tokens[0] == 11
    assert result.scores[0].logprob == pytest.approx(float(logits_of()[0].log_softmax(0)[11]))


def test_a_grammar_at_its_end_wins_over_a_minimum_length() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=9)
    result = sample(logits_of(), [Draw(params, 0, allowed=bits(EOS))], eos_ids=[EOS])
    assert (result.tokens[0], result.flags[0]) == (EOS, TokenFlag.EOS)
    longer = sample(logits_of(), [Draw(params, 0, allowed=bits(EOS, 9))], eos_ids=[EOS])
    assert longer.tokens[0] == 9


def test_a_grammar_that_allows_nothing_gives_no_token() -> None:
    draws = [Draw(SamplingParams(temperature=0.0), 0, allowed=bits()), Draw(SamplingParams(temperature=0.0), 0)]
    assert list(sample(logits_of(rows=2), draws, eos_ids=[]).flags) == [TokenFlag.INVALID | TokenFlag.OUTGROWN, 0]
