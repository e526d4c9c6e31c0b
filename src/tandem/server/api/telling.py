"""Decode's side of a stream that can be resumed (`resume.py`): who may have one, its frames, and where it goes on."""

from array import array
from collections.abc import Sequence
from typing import Protocol

from msgspec import structs

from tandem.core.values import Cause
from tandem.server.api.errors import RULES, Failure, invalid
from tandem.server.api.resume import FIELD, Opening, Proofs, Resume, ResumeFrame, Said, encode_frame, groups_of
from tandem.server.api.text import TextStream
from tandem.server.api.tokenizer import Tokenizer
from tandem.server.api.validation import ModelLimits, SampleRequest, sampling_bytes


class ToldSample(Protocol):
    """What of a sample is told."""

    tokens: list[int]

    @property
    def cached_tokens(self) -> int: ...

    @property
    def host_tokens(self) -> int: ...


def can_tell(asks: Sequence[SampleRequest], limits: ModelLimits, *, is_cumulative: bool) -> bool:
    """Whether the rest of this stream could be asked for. is_cumulative: each event repeats the scores of all tokens,
    which only the server knows that has made them. Of a block a client may have seen a part, with which given the rest
    of it would be found otherwise.
    """
    ask, *others = asks
    sampling = ask.sampling
    has_scores = sampling.prompt_logprobs_from is not None or (is_cumulative and sampling.logprobs)
    is_one = not others and ask.max_new_tokens > 0 and ask.pair.room is not None
    return limits.role == "decode" and is_one and not has_scores and limits.block_tokens == 1


class Teller:
    """Of one stream."""

    def __init__(self, ask: SampleRequest, limits: ModelLimits, *, made_at: int, seed_room: int) -> None:
        self._ask, self._key = ask, limits.keys.digests
        said = ask.said
        self._opening = Opening(
            ask.nonce,
            made_at,
            seed_room,
            0 if said is None else said.cached_tokens,
            0 if said is None else said.host_tokens,
        )
        self._proofs: Proofs | None = None
        self._num_told = 0
        if said is not None:
            self._proofs = self._begin()
            for group in said.groups:
                self._proofs.add(array("i", group).tobytes())
            self._num_told = len(said.tokens)

    def frame(self, sample: ToldSample, data: bytes, *, is_last: bool) -> bytes:
        """Of these bytes of the answer, and of the tokens from which they were made; nothing for nothing."""
        new = sample.tokens[self._num_told :]
        if not new and not data and not is_last:
            return b""
        opening = None
        if self._proofs is None:
            cached, host = sample.cached_tokens, sample.host_tokens
            opening = self._opening = structs.replace(self._opening, cached_tokens=cached, host_tokens=host)
            self._proofs = self._begin()
        self._num_told += len(new)
        ids = array("i", new).tobytes()
        proof = self._proofs.add(ids) if ids else b""
        return encode_frame(ResumeFrame(len(data), ids, proof, opening, is_last), data)

    def last_frame(self, data: bytes, failure: Failure) -> bytes:
        """Of a stream that ends with an error. Who has had no token in all its time does not get some elsewhere."""
        may_go_on = RULES[failure.code].retryable and failure.code is not Cause.DEADLINE_EXCEEDED
        gives_up = failure.message or failure.code.value
        return encode_frame(ResumeFrame(len(data), is_last=True, gives_up=gives_up if may_go_on else ""), data)

    def _begin(self) -> Proofs:
        return proofs_of(self._ask, self._opening, self._key)


def proofs_of(ask: SampleRequest, opening: Opening, key: bytes) -> Proofs:
    return Proofs(key, opening, ask.prompt.tokens, sampling_bytes(ask.sampling))


def goes_on(
    asks: Sequence[SampleRequest], resume: Resume, text: TextStream, tokenizer: Tokenizer, limits: ModelLimits
) -> list[SampleRequest]:
    """The one sample of a stream that was begun elsewhere. In any thread; raises `Refusal`.

    text: a fresh one of the sample.
    """
    ask, *others = asks
    groups = groups_of(resume, proofs_of(ask, resume.opening, limits.keys.digests))
    num_said = len(resume.ids)
    if others or groups is None or not 0 < num_said // 4 <= ask.max_new_tokens:
        raise invalid(FIELD, "is no stream of this cluster for this request")
    said = Said(groups, resume.opening.cached_tokens, resume.opening.host_tokens)
    ends = end_of(ask, said.tokens, text, tokenizer, limits)
    return [structs.replace(ask, said=structs.replace(said, ends=ends))]


def end_of(
    ask: SampleRequest, tokens: Sequence[int], text: TextStream, tokenizer: Tokenizer, limits: ModelLimits
) -> str | None:
    """Why nothing follows these tokens: who has said them was lost before it said so. None: something does."""
    text.feed(tokens)
    if text.matched is not None or text.holds_stop_token:
        return "stop"
    if ask.sampling.grammar:
        vocabulary = tokenizer.opened_vocabulary or tokenizer.open_vocabulary()
        matcher = vocabulary.matcher(
            ask.sampling.grammar, eos_ids=limits.eos_token_ids, ignores_eos=ask.sampling.ignore_eos
        )
        matcher.restart(tokens)
        if matcher.is_finished:
            return "stop"
    return "length" if len(tokens) >= ask.max_new_tokens else None
