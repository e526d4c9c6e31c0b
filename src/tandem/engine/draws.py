"""One token from the scores of a row, by numpy: `native/sampling.h` does the same where there is a compiler.

The largest score with its noise wins, of those that top-k, top-p and min-p leave. Both ways agree: scores and their
order are exact, shares of the probability are whole numbers, and noise is rounded from logarithms in fp64. They may
differ where a share of fp32 is on the verge of another whole number, and that decides where a nucleus ends.
"""

import math

import numpy as np

FIRST_CANDIDATES = (64, 1024)  # top-p rarely needs more; sorting a whole vocabulary costs milliseconds
WHOLE_SHARE = np.float32(2.0**40)  # that of the best score
COLUMNS = 1024  # of a vocabulary, whose best are soon found
FEW = 2048  # ids of which none is left out, as it would take as long
TOGETHER = 8192  # ids whose noise is looked at: larger arrays would be fresh memory each time
LARGEST_V = np.float32(1 - 2.0**-24)
MOST_NOISE = 22.88  # of v as small as it can be

_MASK_64 = (1 << 64) - 1


def draw_by_hand(logits: np.ndarray, key: int, top_k: int, top_p: float, temperature: float, log_min_p: float) -> int:
    """One draw from the softmax of `logits / temperature`, [vocab] fp32, restricted as the parameters say."""
    scores = logits / np.float32(temperature)
    ids = _candidates(scores, top_k, top_p, log_min_p)
    if ids is None:
        ids = _who_may_win(scores, key)
    return int(ids[(scores[ids] + gumbel_noise(key, ids)).argmax()])


def _who_may_win(scores: np.ndarray, key: int) -> np.ndarray:
    """Ids among which the largest `score + noise` is, in order: of most of a vocabulary a bound of the noise is enough.

    The winner has at least what the best score has with its noise. Noise is at most MOST_NOISE, and -log(v) at most.
    """
    if len(scores) <= FEW:
        return np.arange(len(scores))
    best = np.array([scores.argmax()])
    least = (scores[best] + gumbel_noise(key, best)).item()
    least = np.float32(least - 0.01 - 1e-6 * abs(least))  # sums are rounded
    near = np.flatnonzero(scores >= least - np.float32(MOST_NOISE))
    found: list[np.ndarray] = []
    for first in range(0, len(near), TOGETHER):
        ids = near[first : first + TOGETHER]
        found.append(ids[_uniform(key, ids) <= np.exp(scores[ids] - least)])
    return np.concatenate(found)


def _candidates(scores: np.ndarray, top_k: int, top_p: float, log_min_p: float) -> np.ndarray | None:
    """Ids that may be drawn, best first; None: all of them. At least the best one stays."""
    ids: np.ndarray | None = None
    if 0 < top_k < len(scores):
        ids = best_ids(scores, top_k)
    if top_p < 1.0:
        ids = _nucleus(scores, ids, top_p)
    if log_min_p > -math.inf:
        least = scores.max() + np.float32(log_min_p)
        ids = np.flatnonzero(scores >= least) if ids is None else ids[scores[ids] >= least]
    return ids


def best_ids(scores: np.ndarray, count: int) -> np.ndarray:
    """The `count` best ids, best first, equal scores by id."""
    ids = np.arange(len(scores))
    if count < len(scores):
        rows = len(scores) // COLUMNS
        if rows > 1 and count <= COLUMNS:  # so many columns have each a score that reaches this, and few others do
            maxima = scores[: rows * COLUMNS].reshape(rows, COLUMNS).max(axis=0)
            ids = np.flatnonzero(scores >= np.partition(maxima, -count)[-count])
        near = scores[ids]
        ids = ids[near >= np.partition(near, -count)[-count]]
    return ids[np.argsort(-scores[ids], kind="stable")[:count]]


def _nucleus(scores: np.ndarray, ids: np.ndarray | None, top_p: float) -> np.ndarray:
    """The smallest set of best ids that holds at least `top_p` of the probability (of the ids given)."""
    if ids is not None:
        shares = _shares(scores[ids])
        return _cut_at(ids, shares, _limit(shares, top_p))
    shares = _shares(scores)
    limit = _limit(shares, top_p)
    for count in (*FIRST_CANDIDATES, len(scores)):
        ids = best_ids(scores, min(count, len(scores)))
        if shares[ids].sum() >= limit:
            break
    assert ids is not None
    return _cut_at(ids, shares[ids], limit)


def _shares(scores: np.ndarray) -> np.ndarray:
    """Of the probability, int64: sums of whole numbers do not depend on their order."""
    return (np.exp(scores - scores.max()) * WHOLE_SHARE).astype(np.int64)


def _limit(shares: np.ndarray, top_p: float) -> int:
    total = int(shares.sum())
    return min(total, math.ceil(top_p * float(total)))


def _cut_at(ids: np.ndarray, shares: np.ndarray, limit: int) -> np.ndarray:
    before = shares.cumsum() - shares
    return ids[: max(1, int((before < limit).sum()))]


# --- noise --------------------------------------------------------------------------------------------------------


def gumbel_noise(key: int, ids: np.ndarray) -> np.ndarray:
    """Standard Gumbel noise, fp32, one value per id. key: of seed and position (`noise_key`).

    -log(-log(u)) with u close to 1 as 1 - v: the upper tail, which decides, is exact down to 2^-32. The logarithms are
    of fp64, so that what it is rounded to does not depend on who computes them.
    """
    v = _uniform(key, ids).astype(np.float64)
    return (-np.log(-np.log1p(-v))).astype(np.float32)


def noise_key(seed: int, position: int) -> int:
    return _mix(_mix(seed & _MASK_64) ^ (position & _MASK_64))


def _uniform(key: int, ids: np.ndarray) -> np.ndarray:
    """v between 0 and 1, fp32, of 32 bits: a hash of (seed, position, id). ids: int64"""
    hashed = ids.astype(np.uint64)
    hashed *= np.uint64(0x9E3779B97F4A7C15)  # products and sums wrap
    hashed += np.uint64(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        hashed ^= hashed >> np.uint64(shift)
        hashed *= np.uint64(factor)
    hashed ^= hashed >> np.uint64(31)
    high = (hashed >> np.uint64(32)).astype(np.float32)
    return np.minimum((high + np.float32(0.5)) * np.float32(2.0**-32), LARGEST_V)


def _mix(value: int) -> int:
    """Finaliser of splitmix64."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)
