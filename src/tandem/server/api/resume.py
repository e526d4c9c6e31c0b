"""A stream that goes on elsewhere: what a decode tells its router beside the answer, and what the next pair is asked.

    router -> both halves   head `x-tandem-resume-2`: tell me, if this stream can be resumed
    decode -> router        head `x-tandem-resumable-2`: the body comes in frames
    frame                   one line of JSON (`ResumeFrame`), then so many bytes of the answer as it says
    piece                   what a frame says of one choice; int32 little endian: choice, kind, how many numbers, these
    router -> the next pair `tandem_resume` in the body (`Resume`): all that the frames have told

A frame counts when all of it has come: the client gets its bytes then, and the router keeps its pieces. So what a
client has of a stream is always what some tokens make, however the connection broke.

The next pair computes the prompt and the tokens of each choice as one prompt, and writes the events of all pieces once
more, in the same order, without sending them: whatever a reply counts, holds back or is in the middle of is then as it
was. A choice that has ended is not computed. What of an answer is no function of request and tokens is told, too: names
and times in the first frame, what was cached with the first piece of a choice.

Nobody but a member of the cluster can make a `Resume`: each frame proves all pieces so far with the secret that both
halves have (`HashKeys.digests`), for these prompts and their parameters. A router needs no secret to pass it on, and a
client that writes the field itself, or changes a token, gets a 400.
"""

import hmac
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from hashlib import sha256
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from tandem.core.commands import FinishReason
from tandem.server.api.bounds import MAX_INT, MAX_SAMPLES

ASKS = "x-tandem-resume-2"  # the number is that of the form of frames: who has another one is not asked
TELLS = "x-tandem-resumable-2"
FIELD = "tandem_resume"
NUMBER_BYTES = 4
PIECE_HEAD = 3  # numbers
PROOF_BYTES = 16
NAME_DIGITS = 48
MAX_HEAD_BYTES = 8 << 20  # of a frame: with all that many choices have said while their client took nothing
MAX_FRAME_BYTES = 256 << 20

Count = Annotated[int, Meta(ge=0, le=MAX_INT)]
Pieces = Annotated[bytes, Meta(max_length=32 << 20)]


class Opening(Struct, frozen=True):
    """What of an answer no other server could know."""

    nonce: Annotated[str, Meta(max_length=64)]  # from which its names are made
    made_at: Count  # Unix seconds
    # Of the first attempt, one for each choice: draws are seeded with them where the client gave no seed.
    rooms: Annotated[tuple[Count, ...], Meta(max_length=MAX_SAMPLES)]


class ResumeFrame(Struct, frozen=True, omit_defaults=True):
    """The head of one."""

    size: int  # bytes of the answer that follow
    said: Pieces = b""  # from which they were made
    proof: bytes = b""  # of all pieces so far
    opening: Opening | None = None  # in the first one
    is_last: bool = False
    gives_up: str = ""  # why it does not go on here, and may elsewhere; the bytes say so to a client
    code: str = ""  # of the error that ends it
    serves_on: bool = False  # it gives up for a DP rank that was lost, and has others


class Resume(Struct, frozen=True):
    """A stream so far."""

    opening: Opening
    said: Pieces
    proof: Annotated[bytes, Meta(max_length=PROOF_BYTES)]


class Resuming(Struct):
    """A body that may ask for the rest of a stream."""

    tandem_resume: Resume | None = None


class PieceKind(Enum):
    """What the numbers of a piece are."""

    BEGINS = 0  # prompt tokens that were cached, those of them from host memory, those of these from storage
    SAYS = 1  # tokens
    STOPS = 2  # tokens, behind which it has ended
    IS_CUT = 3  # the same, for its length


ENDS = {FinishReason.STOP: PieceKind.STOPS, FinishReason.LENGTH: PieceKind.IS_CUT}
REASONS = {kind: reason for reason, kind in ENDS.items()}


class Piece(Struct, frozen=True):
    """What was said of one choice at once."""

    choice: int
    kind: PieceKind
    numbers: Sequence[int]

    def encode(self) -> bytes:
        return array("i", (self.choice, self.kind.value, len(self.numbers), *self.numbers)).tobytes()


def pieces_in(said: bytes) -> list[Piece]:
    """Of what is proved to be some."""
    numbers, at = array("i", said), 0
    found: list[Piece] = []
    while at < len(numbers):
        choice, kind, count = numbers[at : at + PIECE_HEAD]
        at += PIECE_HEAD
        found.append(Piece(choice, PieceKind(kind), numbers[at : at + count].tolist()))
        at += count
    return found


class Said(Struct, frozen=True):
    """One choice so far, as another server has said it."""

    tokens: list[int]
    cached_tokens: int
    host_tokens: int
    storage_tokens: int
    ends: FinishReason | None = None  # nothing follows, for this reason; the client may not have heard of it


class Proofs:
    """Of a growing stream: each holds for all pieces before it, for one opening, and prompts and their parameters."""

    def __init__(self, key: bytes, opening: Opening, digests: Sequence[bytes]) -> None:
        """digests: of prompt and parameters, one for each choice."""
        first = hmac.digest(key, b"said\0" + msgspec.msgpack.encode((opening, digests)), "sha256")
        self._said = hmac.new(key, first, "sha256")

    def add(self, said: bytes) -> bytes:
        self._said.update(said)
        return self._said.digest()[:PROOF_BYTES]


def made_name(nonce: str, purpose: str, index: int = 0) -> str:
    """48 hexadecimal digits. A stream that goes on elsewhere has the same names there."""
    return sha256(f"{nonce}/{purpose}/{index}".encode()).hexdigest()[:NAME_DIGITS]


def encode_frame(frame: ResumeFrame, data: bytes) -> bytes:
    return msgspec.json.encode(frame) + b"\n" + data


class FrameReader:
    """Finds the frames in a body that comes in pieces."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._head: ResumeFrame | None = None

    def feed(self, piece: bytes) -> Iterator[tuple[ResumeFrame, bytes]]:
        """Those that are whole now. Raises ValueError for what is none."""
        self._held += piece
        while (found := self._take()) is not None:
            yield found

    def _take(self) -> tuple[ResumeFrame, bytes] | None:
        if self._head is None:
            end = self._held.find(b"\n")
            if end < 0 and len(self._held) <= MAX_HEAD_BYTES:
                return None
            try:
                self._head = msgspec.json.decode(bytes(self._held[: max(end, 0)]), type=ResumeFrame)
            except msgspec.DecodeError as error:  # of old versions it is no ValueError
                raise ValueError(f"no frame: {error}") from error
            if not 0 <= self._head.size <= MAX_FRAME_BYTES or len(self._head.said) % NUMBER_BYTES:
                raise ValueError("a frame out of bounds")
            del self._held[: end + 1]
        if len(self._held) < self._head.size:
            return None
        head, self._head = self._head, None
        data = bytes(self._held[: head.size])
        del self._held[: head.size]
        return head, data


@dataclass(slots=True)
class Told:
    """What the router keeps of a stream that it passes on."""

    opening: Opening | None = None
    proof: bytes = b""
    said: bytearray = field(default_factory=bytearray)

    def add(self, frame: ResumeFrame) -> None:
        """All of it has come, and the client gets its bytes."""
        self.opening = self.opening or frame.opening
        if frame.said:
            self.said += frame.said
            self.proof = frame.proof

    def resume(self) -> Resume:
        assert self.opening is not None, "it has told nothing yet"
        return Resume(self.opening, bytes(self.said), self.proof)
