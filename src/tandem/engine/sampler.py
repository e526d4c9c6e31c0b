"""From logits to tokens: a pure function of (logits, parameters, seed, position), the same for every row.

No generator state exists. Where chance decides, it is Gumbel noise from a hash of (seed, position, token id): the
token with the largest `score + noise` wins, which is a draw from the softmax of the scores. So a row gets the same
token whatever else is in the batch, on whichever server, and a small difference in scores can change the token only
where two of them nearly tie.

To keep that promise to the last bit, whatever rounds (exp, log, sums) is computed row by row: over a batch, torch may
cut the work between two rows differently. Only exact operations see several rows at once. Rows are drawn by the native
kernels where there are some (`native/sampling.h`), else by numpy (`draws.py`).

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
from tandem.engine.draws import best_ids, draw_by_hand, noise_key
from tandem.engine.native import library
from tandem.sampling import SamplingParams, TokenScore

GREEDY_BELOW = 1e-5  # temperatures below divide scores out of the range of fp32; the winner is the same


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
    tokens, are_finite = _largest(logits)
    bound = [row for row, draw in enumerate(draws) if draw.allowed is not None]
    raw = logits
    if bound:
        raw = _forbid(logits, draws, bound)
        tokens[bound], _ = _largest(logits if len(bound) == len(draws) else logits[bound])
    flags = bytearray(len(draws))
    asked: list[int] = []  # rows where more is asked for than the largest
    for row, (draw, best) in enumerate(zip(draws, tokens.tolist(), strict=True)):
        # A grammar that does not allow the best token of those that it left allows none.
        if not are_finite[row] or (draw.allowed is not None and not draw.allowed[best >> 3] >> (best & 7) & 1):
            tokens[row] = 0
            flags[row] = TokenFlag.INVALID | (TokenFlag.OUTGROWN if are_finite[row] else 0)
        elif not is_plain(draw.params):
            asked.append(row)
    scores = _sample_rows(raw, logits, draws, asked, tokens, eos_ids) if asked else {}
    for row, (draw, token) in enumerate(zip(draws, tokens.tolist(), strict=True)):
        if not flags[row]:
            flags[row] = _flags(token, draw.params, eos_ids)
    return Sampled(tokens, bytes(flags), scores)


def _largest(logits: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """logits: [n, vocab]; returns the token of each row with the largest, of equals the lowest, [n] int32, and whether
    all logits of the row are finite, [n] bool.
    """
    kernels = library.fitting(logits)
    if kernels is not None:
        return kernels.largest(logits)
    are_finite = np.isfinite(logits.sum(dim=-1).cpu().numpy())  # nan and inf survive a sum
    # torch takes ten times as long as numpy
    tokens = logits.numpy().argmax(axis=-1) if logits.is_cpu else logits.argmax(dim=-1).cpu().numpy()
    return tokens.astype(np.int32), are_finite


def _forbid(logits: Tensor, draws: Sequence[Draw], bound: Sequence[int]) -> Tensor:
    """bound: rows that have a grammar. Returns the logits as they were, where somebody is told of them."""
    allowed = [draws[row].allowed for row in bound]
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


def _sample_rows(
    raw: Tensor,
    logits: Tensor,
    draws: Sequence[Draw],
    rows: Sequence[int],
    tokens: np.ndarray,
    eos_ids: Sequence[int],
) -> dict[int, TokenScore]:
    """Writes the tokens of these rows; returns what is said of those that ask. raw: the logits as they were, where a
    grammar has changed them.
    """
    host = logits.cpu().unbind()
    adjusted = {row: _adjust(host[row], draws[row], eos_ids) for row in rows}
    drawn = [row for row in rows if draws[row].params.temperature >= GREEDY_BELOW]
    for row in rows:
        if draws[row].params.temperature < GREEDY_BELOW:
            tokens[row] = _largest(adjusted[row][None])[0][0]
    if drawn:
        tokens[drawn] = _draw_rows([adjusted[row] for row in drawn], [draws[row] for row in drawn])
    return {
        row: score_of(raw[row].cpu(), int(tokens[row]), draws[row].params.top_logprobs, draws[row].params.logprob_ids)
        for row in rows
        if draws[row].params.logprobs
    }


def _draw_rows(adjusted: Sequence[Tensor], draws: Sequence[Draw]) -> np.ndarray:
    """adjusted: [vocab] fp32 on the host, each"""
    kernels = library.in_use()
    if kernels is None:
        return np.array([draw_by_hand(row.numpy(), *_asked(draw)) for row, draw in zip(adjusted, draws, strict=True)])
    contiguous = [row.contiguous() for row in adjusted]  # stay until all are drawn
    wanted = [(row.data_ptr(), *_asked(draw)) for row, draw in zip(contiguous, draws, strict=True)]
    return kernels.draw(np.array(wanted, library.DRAW), len(contiguous[0]))


def _asked(draw: Draw) -> tuple[int, int, float, float, float]:
    """As `library.DRAW` has it, behind the logits."""
    params = draw.params
    log_min_p = math.log(params.min_p) if params.min_p > 0.0 else -math.inf
    return noise_key(params.seed, draw.position), params.top_k, params.top_p, params.temperature, log_min_p


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


def score_of(raw: Tensor, token: int, top: int, ids: Sequence[int]) -> TokenScore:
    """What is said of one token. raw: [vocab] fp32 on the host, the scores of all that may stand in its place."""
    logprobs = raw.log_softmax(dim=0).numpy()
    best = best_ids(logprobs, min(top, len(logprobs))) if top > 0 else np.empty(0, dtype=np.int64)
    told = [*best.tolist(), *ids]
    return TokenScore(
        logprob=float(logprobs[token]),
        top_ids=tuple(told),
        top_logprobs=tuple(logprobs[told].tolist()),
    )
