"""A stream that goes on elsewhere: what a decode tells its router beside the answer, and what the next pair is asked.

    router -> both halves   head `x-tandem-resume`: tell me, if this stream can be resumed
    decode -> router        head `x-tandem-resumable`: the body comes in frames
    frame                   one line of JSON (`ResumeFrame`), then so many bytes of the answer as it says
    router -> the next pair `tandem_resume` in the body (`Resume`): all that the frames have told

A frame counts when all of it has come: the client gets its bytes then, and the router keeps its tokens. So what a
client has of a stream is always what some tokens make, however the connection broke.

The next pair computes prompt and tokens as one prompt, and writes the events of these tokens once more, in the same
groups, without sending them: whatever a reply counts, holds back or is in the middle of is then as it was. What of an
answer is no function of request and tokens (names, times, what was cached) is told in the first frame.

Nobody but a member of the cluster can make a `Resume`: each frame proves all tokens so far with the secret that both
halves have (`HashKeys.digests`), for this prompt and these parameters. A router needs no secret to pass it on, and a
client that writes the field itself, or changes a token, gets a 400.
"""

import hmac
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from tandem.pagehash import prompt_digest
from tandem.server.api.bounds import MAX_INT

ASKS = "x-tandem-resume"
TELLS = "x-tandem-resumable"
FIELD = "tandem_resume"
ID_BYTES = 4
PROOF_BYTES = 16
NAME_DIGITS = 48
MAX_HEAD_BYTES = 1 << 20  # of a frame
MAX_FRAME_BYTES = 256 << 20

Count = Annotated[int, Meta(ge=0, le=MAX_INT)]
Ids = Annotated[bytes, Meta(max_length=32 << 20)]  # int32 little endian


class Opening(Struct, frozen=True):
    """What of an answer no other server could know."""

    nonce: Annotated[str, Meta(max_length=64)]  # from which its names are made
    made_at: Count  # Unix seconds
    room: Count  # of the first attempt: draws are seeded with it where the client gave no seed
    cached_tokens: Count = 0
    host_tokens: Count = 0


class ResumeFrame(Struct, frozen=True, omit_defaults=True):
    """The head of one."""

    size: int  # bytes of the answer that follow
    ids: Ids = b""  # tokens from which they were made
    proof: bytes = b""  # of all tokens so far
    opening: Opening | None = None  # in the first one
    is_last: bool = False
    gives_up: str = ""  # why it does not go on here, and may elsewhere; the bytes say so to a client


class Resume(Struct, frozen=True):
    """A stream so far."""

    opening: Opening
    ids: Ids  # tokens
    sizes: Ids  # tokens of each frame that had some
    proof: Annotated[bytes, Meta(max_length=PROOF_BYTES)]


class Resuming(Struct):
    """A body that may ask for the rest of a stream."""

    tandem_resume: Resume | None = None


class Said(Struct, frozen=True):
    """The tokens of a stream so far, checked."""

    groups: tuple[list[int], ...]  # as they were told
    cached_tokens: int
    host_tokens: int
    ends: str | None = None  # nothing follows them, for this reason; but the client has not heard of it

    @property
    def tokens(self) -> list[int]:
        return [token for group in self.groups for token in group]


class Proofs:
    """Of a growing stream: each holds for all tokens before it, for one prompt, its parameters and one opening."""

    def __init__(self, key: bytes, opening: Opening, prompt: Sequence[int], sampling: bytes) -> None:
        self._key = key
        digest = prompt_digest(prompt, sampling, secret=key)
        self.last = self._next(b"said\0" + digest + msgspec.msgpack.encode(opening))

    def add(self, ids: bytes) -> bytes:
        self.last = self._next(self.last + ids)
        return self.last

    def _next(self, data: bytes) -> bytes:
        return hmac.digest(self._key, data, "sha256")[:PROOF_BYTES]


def made_name(nonce: str, purpose: str, index: int = 0) -> str:
    """48 hexadecimal digits. A stream that goes on elsewhere has the same names there."""
    return sha256(f"{nonce}/{purpose}/{index}".encode()).hexdigest()[:NAME_DIGITS]


def groups_of(resume: Resume, proofs: Proofs) -> tuple[list[int], ...] | None:
    """None for what no member of the cluster has told."""
    if len(resume.ids) % ID_BYTES or len(resume.sizes) % ID_BYTES:
        return None
    sizes = array("i", resume.sizes)
    if min(sizes, default=0) < 1 or sum(sizes) * ID_BYTES != len(resume.ids):
        return None
    groups: list[list[int]] = []
    start = 0
    for size in sizes:
        raw = resume.ids[start : start + size * ID_BYTES]
        proofs.add(raw)
        groups.append(list(array("i", raw)))
        start += len(raw)
    return tuple(groups) if hmac.compare_digest(proofs.last, resume.proof) else None


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
            if not 0 <= self._head.size <= MAX_FRAME_BYTES or len(self._head.ids) % ID_BYTES:
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
    ids: bytearray = field(default_factory=bytearray)
    sizes: array = field(default_factory=lambda: array("i"))

    def add(self, frame: ResumeFrame) -> None:
        """All of it has come, and the client gets its bytes."""
        self.opening = self.opening or frame.opening
        if frame.ids:
            self.ids += frame.ids
            self.sizes.append(len(frame.ids) // ID_BYTES)
            self.proof = frame.proof

    def resume(self) -> Resume:
        assert self.opening is not None, "it has told nothing yet"
        return Resume(self.opening, bytes(self.ids), self.sizes.tobytes(), self.proof)
