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
FIRST_CANDIDATES = 1024  # top-p rarely needs more; sorting a whole vocabulary costs milliseconds

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
    """By row; of equals the lowest token id."""
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
        token = int(adjusted.argmax())
    else:
        token = _draw(adjusted / params.temperature, params, draw.position)
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


def _draw(scores: Tensor, params: SamplingParams, position: int) -> int:
    """One draw from the softmax of `scores` [vocab], restricted as the parameters say."""
    ids = _candidates(scores, params)
    if ids is None:
        return int((scores + gumbel_noise(params.seed, position, torch.arange(scores.shape[0]))).argmax())
    return int(ids[(scores[ids] + gumbel_noise(params.seed, position, ids)).argmax()])


def _candidates(scores: Tensor, params: SamplingParams) -> Tensor | None:
    """Ids that may be drawn, best first; None: all of them. At least the best one stays."""
    ids: Tensor | None = None
    vocab = scores.shape[0]
    if 0 < params.top_k < vocab:
        ids = _best(scores, params.top_k)
    if params.top_p < 1.0:
        ids = _nucleus(scores, ids, params.top_p)
    if params.min_p > 0.0:
        ids = torch.arange(vocab) if ids is None else ids
        ids = ids[scores[ids] >= scores.max() + math.log(params.min_p)]
    return ids


def _best(scores: Tensor, count: int) -> Tensor:
    """The `count` best ids, best first, equal scores by id. (`topk` alone leaves the order of ties open.)"""
    threshold = scores.topk(count).values[-1]
    ids = (scores >= threshold).nonzero().squeeze(1)
    order = scores[ids].sort(descending=True, stable=True).indices
    return ids[order[:count]]


def _nucleus(scores: Tensor, ids: Tensor | None, top_p: float) -> Tensor:
    """The smallest set of best ids that holds at least `top_p` of the probability (of the ids given)."""
    if ids is not None:
        return _cut_at(ids, torch.softmax(scores[ids].double(), dim=0), top_p)
    probabilities = torch.softmax(scores.double(), dim=0)
    ids = _best(scores, min(FIRST_CANDIDATES, scores.shape[0]))
    if float(probabilities[ids].sum()) < top_p:
        ids = _best(scores, scores.shape[0])
    return _cut_at(ids, probabilities[ids], top_p)


def _cut_at(ids: Tensor, probabilities: Tensor, top_p: float) -> Tensor:
    before = probabilities.cumsum(0) - probabilities
    return ids[: max(1, int((before < top_p).sum()))]


def score_of(raw: Tensor, token: int, top: int) -> TokenScore:
    """What is said of one token. raw: [vocab] fp32 on the host, the scores of all that may stand in its place."""
    logprobs = raw.log_softmax(dim=0)
    best = _best(logprobs, min(top, raw.shape[0])) if top > 0 else torch.empty(0, dtype=torch.int64)
    return TokenScore(
        logprob=float(logprobs[token]),
        top_ids=tuple(best.tolist()),
        top_logprobs=tuple(logprobs[best].tolist()),
    )


# --- noise --------------------------------------------------------------------------------------------------------


def gumbel_noise(seed: int, position: int, ids: Tensor) -> Tensor:
    """Standard Gumbel noise, fp32, one value per id: a hash of (seed, position, id). ids: [n] int64.

    -log(-log(u)) with u close to 1 as 1 - v, v of 32 bits: the upper tail, which decides, is exact down to 2^-32.
    """
    key = _mix(_mix(seed & _MASK_64) ^ (position & _MASK_64))
    bits = _mixed(ids * _signed(0x9E3779B97F4A7C15) + _signed(key))
    v = (((bits >> 32) & 0xFFFFFFFF).float() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-v.clamp_(max=1 - 2.0**-24)))


def _mix(value: int) -> int:
    """Finaliser of splitmix64."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


def _mixed(values: Tensor) -> Tensor:
    """The same on int64 tensors: products wrap, and a mask makes shifts logical."""
    values = (values ^ ((values >> 30) & ((1 << 34) - 1))) * _signed(0xBF58476D1CE4E5B9)
    values = (values ^ ((values >> 27) & ((1 << 37) - 1))) * _signed(0x94D049BB133111EB)
    return values ^ ((values >> 31) & ((1 << 33) - 1))


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
