"""One token from the scores of a row: with every library of kernels that runs here, and by hand, the same one.

What is wanted is computed from all scores with all their noise.
"""

import math
from collections.abc import Iterator
from typing import Any  # parameters of sampling

import numpy as np
import pytest
import torch

from tandem.engine.draws import draw_by_hand, gumbel_noise, noise_key
from tandem.engine.native import library
from tandem.engine.sampler import Draw, sample
from tandem.sampling import SamplingParams

BY_HAND = "by hand"
WAYS = (BY_HAND, *library.available())


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    before = library.in_use()
    library.use(None if request.param == BY_HAND else library.opened(request.param))
    yield request.param
    library.use(before)


def scores_of(seed: int, *, vocab: int, spread: float) -> np.ndarray:
    """In steps, so that some are equal."""
    scores = np.random.default_rng(seed).standard_normal(vocab, np.float32) * np.float32(spread)
    return np.round(scores * 4) / 4


def drawn(scores: np.ndarray, **params: Any) -> int:
    """scores: [vocab], at position 10"""
    found = sample(torch.from_numpy(scores)[None], [Draw(SamplingParams(**params), 10)], eos_ids=[])
    return int(found.tokens[0])


@pytest.mark.parametrize("spread", [0.0, 0.3, 2.0, 8.0, 1e5])
def test_a_draw_is_the_largest_of_all_scores_with_their_noise(way: str, spread: float) -> None:
    """Of most ids a bound of it is looked at only."""
    ids = np.arange(20_000)
    for seed in range(60):
        scores = scores_of(seed, vocab=len(ids), spread=spread)
        wanted = (scores + gumbel_noise(noise_key(seed, 10), ids)).argmax()
        assert drawn(scores, seed=seed) == wanted


@pytest.mark.parametrize("spread", [0.0, 0.3, 2.0, 8.0])
@pytest.mark.parametrize("top_p", [0.01, 0.51, 0.95, 0.9999])
def test_a_nucleus_is_what_sorting_all_probabilities_gives(way: str, spread: float, top_p: float) -> None:
    for seed in range(10):
        scores = scores_of(seed, vocab=3000, spread=spread)
        order = np.argsort(-scores, kind="stable")
        shares = np.exp((scores - scores.max()).astype(np.float64))[order]
        kept = order[: max(1, int((shares.cumsum() - shares < top_p * shares.sum()).sum()))]
        wanted = kept[(scores[kept] + gumbel_noise(noise_key(seed, 10), kept)).argmax()]
        assert drawn(scores, seed=seed, top_p=top_p) == wanted


def test_a_nucleus_reaches_as_far_down_as_it_has_to(way: str) -> None:
    """Half of all probability is with twenty thousand of which each has next to none."""
    scores = np.zeros(20_000, np.float32)
    scores[7] = 10
    tokens = [drawn(scores, seed=seed, top_p=0.9) for seed in range(40)]
    assert 8 < tokens.count(7) < 32
    assert max(tokens) < 16_000


def test_of_equal_scores_exactly_the_share_that_is_asked_for_is_kept(way: str) -> None:
    assert {drawn(np.zeros(6, np.float32), seed=seed, top_p=0.5) for seed in range(100)} == {0, 1, 2}


@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}], ids=str)
def test_of_equal_sums_the_lowest_token_wins(way: str, params: dict[str, float]) -> None:
    scores = np.zeros(100, np.float32)
    scores[[31, 17, 90]] = 1e9  # too large for noise to show
    assert {drawn(scores, seed=seed, **params) for seed in range(10)} == {17}


@pytest.mark.parametrize("top_k", [1, 2, 20, 63, 64, 65, 2999, 3000, 5000])
def test_the_best_are_what_sorting_gives(way: str, top_k: int) -> None:
    for seed in range(20):
        scores = scores_of(seed, vocab=3000, spread=2.0)
        kept = np.argsort(-scores, kind="stable")[:top_k]
        wanted = kept[(scores[kept] + gumbel_noise(noise_key(seed, 10), kept)).argmax()]
        assert drawn(scores, seed=seed, top_k=top_k) == wanted


@pytest.mark.parametrize("vocab", [1, 5, 63, 64, 65, 512, 2049, 5003])
@pytest.mark.parametrize("name", library.available())
def test_every_library_draws_what_is_drawn_by_hand(name: str, vocab: int) -> None:
    """Whatever is asked for together, where something is forbidden, and by as many threads as there are."""
    kernels, random = library.opened(name), np.random.default_rng(vocab)
    rows, wanted, asked = [], [], []
    for row in range(80):
        scores = scores_of(row, vocab=vocab, spread=float(random.choice([0.0, 0.5, 3.0, 30.0])))
        scores[1:][random.random(vocab - 1) < random.choice([0.0, 0.5, 0.99])] = -math.inf
        how = (
            noise_key(int(random.integers(-(2**63), 2**63)), row),
            int(random.choice([0, 0, 1, 7, 100])),
            float(random.choice([1.0, 1.0, 0.0, 0.3, 0.97])),
            float(random.choice([0.2, 1.0, 1.7])),
            float(random.choice([-math.inf, -math.inf, -0.1, -3.0])),
        )
        rows.append(scores)
        asked.append((scores.ctypes.data, *how))
        wanted.append(draw_by_hand(scores, *how))
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert kernels.draw(np.array(asked, library.DRAW), vocab).tolist() == wanted


# --- noise ---------------------------------------------------------------------------------------------------------


def test_noise_is_standard_gumbel_and_independent_of_its_neighbours() -> None:
    noise = torch.stack(
        [torch.from_numpy(gumbel_noise(noise_key(11, position), np.arange(1000))) for position in range(200)]
    )

    assert abs(float(noise.mean()) - 0.5772) < 0.02
    assert abs(float(noise.std()) - math.pi / math.sqrt(6)) < 0.02
    for other in (noise.roll(1, 0), noise.roll(1, 1)):
        assert abs(float(torch.corrcoef(torch.stack((noise.flatten(), other.flatten())))[0, 1])) < 0.01


def test_noise_is_pinned() -> None:
    """Changing it changes what every seed means, and prefill and decode may run different versions."""
    ids = [0, 1, 151_935]

    noise = gumbel_noise(noise_key(2**63 + 5, 17), np.array(ids)).tolist()

    assert noise == pytest.approx([noise_by_hand(2**63 + 5, 17, token) for token in ids], abs=1e-5)
    assert noise == pytest.approx([0.114118, 0.533004, 1.406707], abs=1e-5)


def noise_by_hand(seed: int, position: int, token: int) -> float:
    """The definition in whole numbers of any size: splitmix64 of (seed, position), its token-th successor."""

    def finish(value: int) -> int:
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
        return value ^ (value >> 31)

    golden = 0x9E3779B97F4A7C15
    key = finish(((finish((seed + golden) % 2**64) ^ position) + golden) % 2**64)
    v = ((finish((key + token * golden) % 2**64) >> 32) + 0.5) / 2**32
    return -math.log(-math.log1p(-v))


def test_seeds_of_64_bits_and_negative_ones_are_all_different() -> None:
    seeds = [0, 1, -1, 2**63 - 1, 2**63, 2**64 - 2]

    assert len({tuple(gumbel_noise(noise_key(seed, 0), np.arange(8)).tolist()) for seed in seeds}) == len(seeds)
