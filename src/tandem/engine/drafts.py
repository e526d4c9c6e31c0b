"""The blocks of one batch that are being found, as all workers of a replica know them.

Every pass over them is run by all workers. Behind it the one that samples tells the others, in one message, what is
known now of each of these blocks, and they go on with what they are told. So nobody but the sampler decides what stays,
and whether there is another pass is the same everywhere. Nothing of it is taken late (`late_tokens.py`): no worker can
begin the next pass, or know that there is none, without it. How a pass finds tokens is in `denoising.py`; what a
simulation puts in the place of an engine follows the same rules, by this file.
"""

from collections.abc import Sequence as Values
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from tandem.batch_tables import Sequence
from tandem.engine.late_tokens import TokenSource

UNKNOWN = -1  # in a message: still a mask

S = TypeVar("S", bound=Sequence)


class TokenPath(TokenSource, Protocol):
    """A `parallel.Pipeline`, as far as tokens go through it."""

    @property
    def samples(self) -> bool: ...

    def send_tokens(self, tokens: Any) -> None:  # an array of int32
        """Raises WorkerGone."""
        ...


@dataclass(slots=True)
class Draft(Generic[S]):
    """The block of one request that is being found."""

    sequence: S
    start: int  # position of its first token
    tokens: np.ndarray  # [block_tokens] int64
    is_mask: np.ndarray  # [block_tokens] bool
    flags: bytearray  # TokenFlag bits of each; known where they are sampled

    @classmethod
    def of(cls, sequence: S, *, block_tokens: int, mask_id: int) -> "Draft[S]":
        length = len(sequence.tokens)
        start = length - length % block_tokens
        tokens = np.full(block_tokens, mask_id, dtype=np.int64)
        tokens[: length - start] = sequence.tokens[start:]
        is_mask = np.arange(start, start + block_tokens) >= length
        return cls(sequence, start, tokens, is_mask, bytearray(block_tokens))

    @property
    def masks(self) -> list[int]:
        return np.flatnonzero(self.is_mask).tolist()

    @property
    def is_done(self) -> bool:
        return not self.is_mask.any()

    @property
    def first(self) -> int:
        """Of its tokens, the first that was not known."""
        return len(self.sequence.tokens) - self.start

    @property
    def found(self) -> np.ndarray:
        """[n] int32: the tokens that were not known, of a block that is done."""
        assert self.is_done
        return self.tokens[self.first :].astype(np.int32)

    @property
    def num_said(self) -> int:
        """Tokens of the answer: up to the one that ends it."""
        flags = self.flags[self.first :]
        return next((count for count, flag in enumerate(flags, 1) if flag), len(flags))

    def put(self, mask: int, token: int, flag: int) -> None:
        """It stays."""
        self.tokens[mask], self.flags[mask], self.is_mask[mask] = token, flag, False

    @property
    def told(self) -> np.ndarray:
        """[n] int32: what the others have to know."""
        return np.where(self.is_mask, UNKNOWN, self.tokens)[self.first :].astype(np.int32)

    def hear(self, told: np.ndarray) -> None:
        """told: as the sampler has it."""
        known = told != UNKNOWN
        self.tokens[self.first :][known] = told[known]
        self.is_mask[self.first :] = ~known


def agree(pipeline: TokenPath, drafts: Values[Draft[S]]) -> list[Draft[S]]:
    """A pass over these is done, and sampled where it is. Returns which of them need another one.

    Raises WorkerGone.
    """
    if pipeline.samples:
        pipeline.send_tokens(np.concatenate([draft.told for draft in drafts]))
    else:
        stops = np.cumsum([len(draft.tokens) - draft.first for draft in drafts])
        told = pipeline.receive_tokens(int(stops[-1]))
        for draft, part in zip(drafts, np.split(told, stops[:-1]), strict=True):
            draft.hear(part)
    return [draft for draft in drafts if not draft.is_done]
