"""Decode's side of a stream that can be resumed (`resume.py`): who may have one, its frames, and where it goes on."""

import hmac
from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct, structs

from tandem.core.commands import FinishReason
from tandem.core.values import Cause
from tandem.server.api.errors import RULES, Failure, Refusal, invalid
from tandem.server.api.limits import ModelLimits
from tandem.server.api.resume import (
    ENDS,
    FIELD,
    REASONS,
    Opening,
    Piece,
    PieceKind,
    Proofs,
    Resume,
    ResumeFrame,
    Said,
    encode_frame,
    pieces_in,
)
from tandem.server.api.sample_requests import SampleRequest, digest_of
from tandem.server.api.served_model import ServedModel
from tandem.server.api.text import TextStream


class ToldSample(Protocol):
    """What of a sample is told."""

    ask: SampleRequest
    tokens: list[int]
    ended_ns: int

    @property
    def cached_tokens(self) -> int: ...

    @property
    def host_tokens(self) -> int: ...

    @property
    def storage_tokens(self) -> int: ...

    @property
    def finish_reason(self) -> str: ...


def can_tell(asks: Sequence[SampleRequest], limits: ModelLimits, *, is_cumulative: bool) -> bool:
    """Whether the rest of this stream could be asked for. is_cumulative: each event repeats the scores of all tokens,
    which only the server knows that has made them. Of a block a client may have seen a part, with which given the rest
    of it would be found otherwise.
    """
    is_known = all(
        ask.max_new_tokens > 0
        and ask.pair.room is not None
        and ask.sampling.prompt_logprobs_from is None
        and not (is_cumulative and ask.sampling.logprobs)
        for ask in asks
    )
    return limits.role == "decode" and is_known and limits.block_tokens == 1


class Teller:
    """Of one stream."""

    def __init__(
        self, proofs: Proofs, opening: Opening | None, asks: Sequence[SampleRequest], serves: Callable[[], bool]
    ) -> None:
        """opening: None of a stream that was begun elsewhere, whose router has it. serves: whether a rank works"""
        self._proofs, self._opening, self._serves = proofs, opening, serves
        self._num_told = {ask.index: ask.num_said for ask in asks if ask.said is not None}  # tokens of a choice
        self._said = bytearray()  # for the next frame

    def says(self, sample: ToldSample) -> None:
        """An event was written of what is new of this sample."""
        choice = sample.ask.index
        if choice not in self._num_told:
            self._num_told[choice] = 0
            counts = (sample.cached_tokens, sample.host_tokens, sample.storage_tokens)
            self._said += Piece(choice, PieceKind.BEGINS, counts).encode()
        new = sample.tokens[self._num_told[choice] :]
        self._num_told[choice] += len(new)
        kind = ENDS[FinishReason(sample.finish_reason)] if sample.ended_ns else PieceKind.SAYS
        self._said += Piece(choice, kind, new).encode()

    def frame(self, data: bytes, *, is_last: bool) -> bytes:
        """Of these bytes of the answer, and of all that was said for them; nothing for nothing."""
        said, self._said = bytes(self._said), bytearray()
        if not said and not data and not is_last:
            return b""
        opening, self._opening = self._opening, None
        proof = self._proofs.add(said) if said else b""
        return encode_frame(ResumeFrame(len(data), said, proof, opening, is_last), data)

    def last_frame(self, data: bytes, failure: Failure) -> bytes:
        """Of a stream that ends with an error. Who has had no token in all its time does not get some elsewhere."""
        may_go_on = RULES[failure.code].retryable and failure.code is not Cause.DEADLINE_EXCEEDED
        gives_up = failure.message or failure.code.value
        frame = ResumeFrame(
            len(data),
            is_last=True,
            gives_up=gives_up if may_go_on else "",
            code=failure.code.value,
            serves_on=failure.code is Cause.WORKER_LOST and self._serves(),
        )
        return encode_frame(frame, data)


class Resumed(Struct, frozen=True):
    """A stream that goes on here, checked."""

    asks: list[SampleRequest]
    pieces: list[Piece]
    proofs: Proofs  # of all pieces


def goes_on(
    asks: Sequence[SampleRequest],
    resume: Resume,
    text_of: Callable[[SampleRequest], TextStream],
    served: ServedModel,
) -> Resumed:
    """What is left of a stream that was begun elsewhere. In any thread; raises `Refusal`.

    text_of: a fresh one of a sample.
    """
    digests = [digest_of(ask.prompt.tokens, ask.sampling, served.limits) for ask in asks]
    proofs = Proofs(served.limits.keys.digests, resume.opening, digests)
    if not hmac.compare_digest(proofs.add(resume.said), resume.proof):
        raise not_ours()
    pieces, said = pieces_in(resume.said), dict[int, Said]()
    for piece in pieces:
        if piece.kind is PieceKind.BEGINS:
            cached, host, storage = piece.numbers
            said[piece.choice] = Said([], cached, host, storage)
        else:
            said[piece.choice].tokens.extend(piece.numbers)
        if piece.kind in REASONS:
            said[piece.choice] = structs.replace(said[piece.choice], ends=REASONS[piece.kind])
    rest: list[SampleRequest] = []
    for ask in asks:
        one = said.get(ask.index)
        if one is not None and one.ends is None:
            if len(one.tokens) > ask.max_new_tokens:
                raise not_ours()
            one = structs.replace(one, ends=end_of(ask, one.tokens, text_of(ask), served))
        rest.append(structs.replace(ask, said=one))
    return Resumed(rest, pieces, proofs)


def not_ours() -> Refusal:
    return invalid(FIELD, "is no stream of this cluster for this request")


def end_of(ask: SampleRequest, tokens: Sequence[int], text: TextStream, served: ServedModel) -> FinishReason | None:
    """Why nothing follows these tokens: who has said them was lost before it said so. None: something does."""
    text.feed(tokens)
    if text.matched is not None or text.holds_stop_token:
        return FinishReason.STOP
    if ask.sampling.grammar:
        vocabulary = served.tokenizer.opened_vocabulary or served.tokenizer.open_vocabulary()
        matcher = vocabulary.matcher(
            ask.sampling.grammar, eos_ids=served.limits.eos_token_ids, ignores_eos=ask.sampling.ignore_eos
        )
        matcher.restart(tokens)
        if matcher.is_finished:
            return FinishReason.STOP
    return FinishReason.LENGTH if len(tokens) >= ask.max_new_tokens else None
