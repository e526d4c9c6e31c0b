"""How a request wants its tokens sampled, and what is said about a sampled token.

Goes from the edge to the workers beside the core, which never looks at it.
"""

import msgspec
from msgspec import Struct


class SamplingParams(Struct, frozen=True):
    """Sampling is a pure function of (logits, these, seed, position): no generator state exists, so none travels."""

    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int = 0  # drawn at the edge when the user gave none
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0  # end-of-sequence and stop tokens are masked until then
    logprobs: bool = False  # report the logprob of each sampled token ...
    top_logprobs: int = 0  # ... and this many of the best alternatives
    prompt_logprobs_from: int | None = None  # report the logprobs of the prompt tokens behind this one ...
    prompt_top_logprobs: int = 0  # ... and this many of the best alternatives to each
    logprob_ids: tuple[int, ...] = ()  # reported beside each, whatever their scores
    grammar: str = ""  # that the output has to follow, as `grammar.py` writes it; none: it is free


class SamplingDefaults(Struct, frozen=True):
    """Of a server, for what a request leaves open: unless a checkpoint says otherwise, plain draws from the softmax."""

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class TokenScore(Struct, frozen=True, array_like=True):
    """The `extra` of one sampled token, msgpack: log-softmax of the raw logits in fp32 (before temperature).

    top_ids: the best alternatives, in order, and behind them those that were asked for by their ids.
    """

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()

    def first(self, most: int) -> "TokenScore":
        """With fewer of the alternatives: they come in order."""
        return (
            self
            if len(self.top_ids) <= most
            else TokenScore(self.logprob, self.top_ids[:most], self.top_logprobs[:most])
        )


_scores: msgspec.msgpack.Decoder[TokenScore] = msgspec.msgpack.Decoder(TokenScore)
# Of prompt tokens: those of one chunk, in order.
read_scores = msgspec.msgpack.Decoder(list[TokenScore]).decode


def is_score(extra: bytes, *, vocab_size: int) -> bool:
    """Whether the bytes are a `TokenScore` about tokens that exist."""
    try:
        score = _scores.decode(extra)
    except Exception:  # whatever bytes of a peer lead to, RecursionError among it
        return False
    return is_sound(score, vocab_size)


def are_scores(scores: bytes, *, vocab_size: int) -> bool:
    """Whether the bytes are a list of `TokenScore`s about tokens that exist."""
    try:
        found = read_scores(scores)
    except Exception:  # as above
        return False
    return all(is_sound(score, vocab_size) for score in found)


def is_sound(score: TokenScore, vocab_size: int) -> bool:
    return len(score.top_ids) == len(score.top_logprobs) and all(0 <= token < vocab_size for token in score.top_ids)


class VectorParams(Struct, frozen=True):
    """What a request that ends with its prompt wants of it."""

    dimensions: int | None = None  # the first so many of an embedding; None: all
    second_from: int | None = None  # where the second text of a pair begins, in tokens; None: there is one text


class Payload(Struct, frozen=True, tag=True):
    """What workers know of a request and the core does not."""

    request: int  # RequestId
    tokens: bytes  # prompt, int32 little endian; of an answer that was begun elsewhere, with its tokens so far
    sampling: SamplingParams
    last_hash: bytes  # link of the last full prompt page, or the tenant's root: parent of the next page to fill
    vector: VectorParams | None = None  # of a request that ends with its prompt
    num_said: int = 0  # the last of `tokens`, that are the answer so far and not the prompt
