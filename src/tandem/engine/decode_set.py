"""The requests that get one token from every decoding batch, in join order, with their numbers kept as arrays.

A steady step touches no Python object per row except to append the sampled token. Rows change place only when a
member leaves.
"""

from collections.abc import Collection, Sequence

import numpy as np

from tandem.engine.sequence import EngineSequence

INITIAL_ROWS = 16
INITIAL_PAGES = 16


class ArrayDecodeSet:
    """Arrays have one entry per member, in join order; beyond `len(self)` they hold leftovers."""

    def __init__(self) -> None:
        self.members: list[EngineSequence] = []
        self._row_of: dict[int, int] = {}
        self._last_tokens = np.zeros(INITIAL_ROWS, dtype=np.int64)
        self._lengths = np.zeros(INITIAL_ROWS, dtype=np.int64)
        self._num_pages = np.zeros(INITIAL_ROWS, dtype=np.int64)
        self._tables = np.zeros((INITIAL_ROWS, INITIAL_PAGES), dtype=np.int64)

    def __len__(self) -> int:
        return len(self.members)

    def __contains__(self, request: int) -> bool:
        return request in self._row_of

    @property
    def last_tokens(self) -> np.ndarray:
        """[n] the token each member feeds next"""
        return self._last_tokens[: len(self.members)]

    @property
    def lengths(self) -> np.ndarray:
        """[n] tokens so far, the last one included"""
        return self._lengths[: len(self.members)]

    @property
    def num_pages(self) -> np.ndarray:
        """[n] how many entries of each table are the member's own"""
        return self._num_pages[: len(self.members)]

    @property
    def tables(self) -> np.ndarray:
        """[n, width] page ids; entries beyond a member's own pages are page ids that somebody once had"""
        return self._tables[: len(self.members)]

    def join(self, sequence: EngineSequence) -> None:
        assert sequence.request not in self._row_of, "a request joins once"
        row = len(self.members)
        if row == len(self._lengths):
            self._reserve(rows=2 * row, pages=self._tables.shape[1])
        self.members.append(sequence)
        self._row_of[sequence.request] = row
        self._last_tokens[row] = sequence.tokens[-1]
        self._lengths[row] = len(sequence.tokens)
        self._set_table(row, sequence)

    def leave(self, requests: Collection[int]) -> None:
        """Unknown ones are ignored: a request may be forgotten after it has left."""
        leaving = [self._row_of.pop(request) for request in requests if request in self._row_of]
        if not leaving:
            return
        kept = np.delete(np.arange(len(self.members)), leaving)
        n = len(kept)
        for values in (self._last_tokens, self._lengths, self._num_pages, self._tables):
            values[:n] = values[kept]
        self.members = [self.members[row] for row in kept]
        self._row_of = {member.request: row for row, member in enumerate(self.members)}

    def refresh_table(self, sequence: EngineSequence) -> None:
        """The sequence's page table has changed."""
        if sequence.request in self._row_of:
            self._set_table(self._row_of[sequence.request], sequence)

    def append(self, tokens: Sequence[int]) -> None:
        """Every member has got its next tokens, as many as the others, in join order."""
        if not self.members:
            return
        each = np.array(tokens, dtype=np.int64).reshape(len(self.members), -1)
        self.last_tokens[:] = each[:, -1]
        self.lengths[:] += each.shape[1]
        for member, own in zip(self.members, each.tolist(), strict=True):
            for token in own:
                member.append(token)

    def _set_table(self, row: int, sequence: EngineSequence) -> None:
        if len(sequence.pages) > self._tables.shape[1]:
            self._reserve(rows=len(self._lengths), pages=2 * len(sequence.pages))
        self._tables[row, : len(sequence.pages)] = sequence.pages
        self._num_pages[row] = len(sequence.pages)

    def _reserve(self, *, rows: int, pages: int) -> None:
        old_rows, old_pages = self._tables.shape
        tables = np.zeros((rows, pages), dtype=np.int64)
        tables[:old_rows, :old_pages] = self._tables
        self._tables = tables
        more = np.zeros(rows - old_rows, dtype=np.int64)
        self._last_tokens = np.concatenate((self._last_tokens, more))
        self._lengths = np.concatenate((self._lengths, more))
        self._num_pages = np.concatenate((self._num_pages, more))
