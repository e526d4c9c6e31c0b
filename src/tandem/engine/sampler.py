"""From logits to tokens: a pure function of (logits, parameters, seed, position), the same for every row.

No generator state exists. Where chance decides, it is Gumbel noise from a hash of (seed, position, token id): the
token with the largest `score + noise` wins, which is a draw from the softmax of the scores. So a row gets the same
token whatever else is in the batch, on whichever server, and a small difference in scores can change the token only
where two of them nearly tie.

To keep that promise to the last bit, whatever rounds (exp, log, sums) is computed row by row: over a batch, torch may
cut the work between two rows differently. Only exact operations see several rows at once.

Order: grammar, penalties (repetition, frequency, presence), logit bias, minimum length, temperature, top-k, top-p,
min-p.
What is forbidden has a score of minus infinity, and stays there.
Equal scores are ordered by token id, lowest first, so top-k 1 and temperature 0 agree.
"""

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tandem.core.batch import TokenFlag
from tandem.sampling import SamplingParams, TokenScore

GREEDY_BELOW = 1e-5  # temperatures below divide scores out of the range of fp32; the winner is the same
FIRST_CANDIDATES = (64, 1024)  # top-p rarely needs more; sorting a whole vocabulary costs milliseconds
FEW = 2048  # ids of which none is left out, as it would take as long
TOGETHER = 8192  # ids whose noise is looked at: larger arrays would be fresh memory each time
LARGEST_V = np.float32(1 - 2.0**-24)
MOST_NOISE = 22.88  # of v as small as it can be

_MASK_64 = (1 << 64) - 1


@dataclass(slots=True)
class History:
    """How often each token id has occurred, for penalties. Arrays grow in order of first occurrence."""

    ids: array = field(default_factory=lambda: array("q"))
    counts: array = field(default_factory=lambda: array("q"))  # in the output
    _index_of: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, params: SamplingParams, prompt: Iterable[int]) -> "History | None":
        """None when no penalty asks for it. Prompt tokens count as seen, zero times in the output."""
        if not (params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty):
            return None
        history = cls()
        for token in dict.fromkeys(prompt):
            history._enter(token, 0)
        return history

    def add(self, token: int) -> None:
        """One more output token."""
        at = self._index_of.get(token)
        if at is None:
            self._enter(token, 1)
        else:
            self.counts[at] += 1

    def _enter(self, token: int, count: int) -> None:
        self._index_of[token] = len(self.ids)
        self.ids.append(token)
        self.counts.append(count)


@dataclass(frozen=True, slots=True)
class Draw:
    """What sampling one row needs besides its logits."""

    params: SamplingParams
    position: int  # index in the sequence of the token to be drawn
    num_outputs: int = 0  # output tokens so far
    history: History | None = None  # present when the parameters have a penalty
    allowed: bytes | None = None  # as `Matcher.allowed` has it, when the parameters have a grammar


@dataclass(frozen=True, slots=True)
class Sampled:
    tokens: np.ndarray  # [n] int32; 0 where the flag says INVALID
    flags: bytes  # TokenFlag bits per row
    scores: dict[int, TokenScore]  # by row, where log-probabilities were asked for
    # Of rows that get a block: `tokens` has all of them, `said` those up to the one that ends an answer.
    said: np.ndarray | None = None  # [sum of counts] int32
    counts: tuple[int, ...] = ()


def sample(logits: Tensor, draws: Sequence[Draw], *, eos_ids: Sequence[int]) -> Sampled:
    """logits: [n, vocab] fp32, any device. Those that a grammar forbids become minus infinity, in place; the others
    stay.
    """
    assert logits.shape[0] == len(draws)
    if not draws:
        return Sampled(np.empty(0, dtype=np.int32), b"", {})
    is_finite = np.isfinite(logits.sum(dim=-1).cpu().numpy())  # nan and inf survive a sum
    raw = _forbid(logits, draws)
    tokens = _largest(logits).astype(np.int32)
    scores: dict[int, TokenScore] = {}
    flags = bytearray(len(draws))
    for row, (draw, best) in enumerate(zip(draws, tokens.tolist(), strict=True)):
        # A grammar that does not allow the best token of those that it left allows none.
        if not is_finite[row] or (draw.allowed is not None and not draw.allowed[best >> 3] >> (best & 7) & 1):
            tokens[row] = 0
            flags[row] = TokenFlag.INVALID
            continue
        if not is_plain(draw.params):
            best, score = _sample_row(raw[row].cpu(), logits[row].cpu(), draw, eos_ids)
            tokens[row] = best
            if score is not None:
                scores[row] = score
        flags[row] = _flags(best, draw.params, eos_ids)
    return Sampled(tokens, bytes(flags), scores)


def _largest(logits: Tensor) -> np.ndarray:
    """Along the vocabulary, which is last; of equals the lowest token id."""
    if logits.is_cpu:
        return logits.numpy().argmax(axis=-1)  # torch takes ten times as long
    return logits.argmax(dim=-1).cpu().numpy()


def _forbid(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Returns the logits as they were, where somebody is told of them."""
    allowed = [draw.allowed for draw in draws]
    bound = [row for row, bits in enumerate(allowed) if bits is not None]
    if not bound:
        return logits
    raw = logits.clone() if any(draws[row].params.logprobs for row in bound) else logits
    words = np.frombuffer(b"".join(filter(None, allowed)), np.uint8)
    bits = np.unpackbits(~words, bitorder="little").reshape(len(bound), -1)[:, : logits.shape[1]]
    forbidden = bits.view(np.bool_)
    if not logits.is_cpu:
        at = torch.tensor(bound, device=logits.device)
        logits.index_copy_(0, at, logits[at].masked_fill_(torch.from_numpy(forbidden).to(logits.device), -math.inf))
    elif len(bound) == len(draws):
        np.putmask(logits.numpy(), forbidden, -math.inf)  # torch takes longer
    else:
        for scores, its in zip((logits[row].numpy() for row in bound), forbidden, strict=True):
            np.putmask(scores, its, -math.inf)
    return raw


def is_plain(params: SamplingParams) -> bool:
    """Nothing but the largest logit is asked for, of those that a grammar allows."""
    return (
        params.temperature < GREEDY_BELOW
        and not params.logprobs
        and not params.logit_bias
        and params.min_tokens == 0
        and params.repetition_penalty == 1.0
        and not params.frequency_penalty
        and not params.presence_penalty
    )


def _sample_row(raw: Tensor, allowed: Tensor, draw: Draw, eos_ids: Sequence[int]) -> tuple[int, TokenScore | None]:
    """raw: [vocab] fp32 on the host. allowed: the same, with minus infinity where a grammar says no."""
    params = draw.params
    adjusted = _adjust(allowed, draw, eos_ids)
    if params.temperature < GREEDY_BELOW:
        token = int(_largest(adjusted))
    else:
        scores = adjusted if params.temperature == 1.0 else adjusted / params.temperature
        token = _draw(scores.numpy(), params, draw.position)
    return token, score_of(raw, token, params.top_logprobs) if params.logprobs else None


def _flags(token: int, params: SamplingParams, eos_ids: Sequence[int]) -> int:
    flags = 0
    if not params.ignore_eos and token in eos_ids:
        flags |= TokenFlag.EOS
    if token in params.stop_token_ids:
        flags |= TokenFlag.STOP
    return flags


def _adjust(raw: Tensor, draw: Draw, eos_ids: Sequence[int]) -> Tensor:
    """Everything that changes single logits. Returns `raw` itself when nothing does."""
    params = draw.params
    logits = raw
    if draw.history is not None and draw.history.ids:
        logits = _penalize(raw.clone(), params, draw.history)
    if params.logit_bias:
        logits = logits.clone() if logits is raw else logits
        ids = torch.tensor(list(params.logit_bias), dtype=torch.int64)
        logits[ids] += torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
    if draw.num_outputs < params.min_tokens and (ending := [*eos_ids, *params.stop_token_ids]):
        longer = logits.clone()
        longer[torch.tensor(ending, dtype=torch.int64)] = -math.inf
        if draw.allowed is None or longer.max() > -math.inf:  # a grammar that is at its end wins over a minimum length
            logits = longer
    return logits


def _penalize(logits: Tensor, params: SamplingParams, history: History) -> Tensor:
    """Repetition over prompt and output as in transformers, the other two over the output as in the OpenAI API."""
    ids = torch.from_numpy(np.array(history.ids, dtype=np.int64))
    counts = torch.from_numpy(np.array(history.counts, dtype=np.float32))
    values = logits[ids]
    if params.repetition_penalty != 1.0:
        values = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    values = values - counts * params.frequency_penalty - (counts > 0) * params.presence_penalty
    logits[ids] = values
    return logits


def _draw(scores: np.ndarray, params: SamplingParams, position: int) -> int:
    """One draw from the softmax of `scores`, [vocab] fp32, restricted as the parameters say."""
    ids = _candidates(scores, params)
    if ids is None:
        ids = _who_may_win(scores, params.seed, position)
    return int(ids[(scores[ids] + gumbel_noise(params.seed, position, ids)).argmax()])


def _who_may_win(scores: np.ndarray, seed: int, position: int) -> np.ndarray:
    """Ids among which the largest `score + noise` is, in order: of most of a vocabulary a bound of the noise is enough.

    The winner has at least what the best score has with its noise. Noise is at most MOST_NOISE, and -log(v) at most.
    """
    if len(scores) <= FEW:
        return np.arange(len(scores))
    best = np.array([scores.argmax()])
    least = (scores[best] + gumbel_noise(seed, position, best)).item()
    least = np.float32(least - 0.01 - 1e-6 * abs(least))  # sums are rounded
    near = np.flatnonzero(scores >= least - np.float32(MOST_NOISE))
    found: list[np.ndarray] = []
    for first in range(0, len(near), TOGETHER):
        ids = near[first : first + TOGETHER]
        found.append(ids[_uniform(seed, position, ids) <= np.exp(scores[ids] - least)])
    return np.concatenate(found)


def _candidates(scores: np.ndarray, params: SamplingParams) -> np.ndarray | None:
    """Ids that may be drawn, best first; None: all of them. At least the best one stays."""
    ids: np.ndarray | None = None
    if 0 < params.top_k < len(scores):
        ids = _best(scores, params.top_k)
    if params.top_p < 1.0:
        ids = _nucleus(scores, ids, params.top_p)
    if params.min_p > 0.0:
        least = scores.max() + np.float32(math.log(params.min_p))
        ids = np.flatnonzero(scores >= least) if ids is None else ids[scores[ids] >= least]
    return ids


def _best(scores: np.ndarray, count: int) -> np.ndarray:
    """The `count` best ids, best first, equal scores by id."""
    ids = np.arange(len(scores))
    if count < len(scores):
        ids = np.flatnonzero(scores >= np.partition(scores, -count)[-count])
    return ids[np.argsort(-scores[ids], kind="stable")[:count]]


def _nucleus(scores: np.ndarray, ids: np.ndarray | None, top_p: float) -> np.ndarray:
    """The smallest set of best ids that holds at least `top_p` of the probability (of the ids given)."""
    if ids is not None:
        return _cut_at(ids, _softmax(scores[ids]), top_p)
    probabilities = _softmax(scores)
    for count in (*FIRST_CANDIDATES, len(scores)):
        ids = _best(scores, min(count, len(scores)))
        if probabilities[ids].sum() >= top_p:
            break
    assert ids is not None
    return _cut_at(ids, probabilities[ids], top_p)


def _softmax(scores: np.ndarray) -> np.ndarray:
    """fp64"""
    return torch.softmax(torch.from_numpy(scores).double(), dim=0).numpy()


def _cut_at(ids: np.ndarray, probabilities: np.ndarray, top_p: float) -> np.ndarray:
    before = probabilities.cumsum() - probabilities
    return ids[: max(1, int((before < top_p).sum()))]


def score_of(raw: Tensor, token: int, top: int) -> TokenScore:
    """What is said of one token. raw: [vocab] fp32 on the host, the scores of all that may stand in its place."""
    logprobs = raw.log_softmax(dim=0).numpy()
    best = _best(logprobs, min(top, len(logprobs))) if top > 0 else np.empty(0, dtype=np.int64)
    return TokenScore(
        logprob=float(logprobs[token]),
        top_ids=tuple(best.tolist()),
        top_logprobs=tuple(logprobs[best].tolist()),
    )


# --- noise --------------------------------------------------------------------------------------------------------


def gumbel_noise(seed: int, position: int, ids: np.ndarray) -> np.ndarray:
    """Standard Gumbel noise, fp32, one value per id.

    -log(-log(u)) with u close to 1 as 1 - v: the upper tail, which decides, is exact down to 2^-32.
    """
    v = torch.from_numpy(_uniform(seed, position, ids))
    return (-torch.log(-torch.log1p(-v))).numpy()


def _uniform(seed: int, position: int, ids: np.ndarray) -> np.ndarray:
    """v between 0 and 1, fp32, of 32 bits: a hash of (seed, position, id). ids: int64"""
    key = _mix(_mix(seed & _MASK_64) ^ (position & _MASK_64))
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
