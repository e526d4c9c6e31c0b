"""What one forward pass is about: tokens, positions, pages, the slots to write. The only place where plans become that.

The order of the tokens: prompt chunks one after another, then one token per decoding request, longest context first.
Batches in tiles (`rows.py`) know no decoding rows: each is a chunk of one token, whoever else decodes.

How attention is computed (masks, gathered keys, buckets) is the affair of its backend, which `plan`s from a `Batch`.
Arrays of numpy are on the host; a backend takes to its device what it needs there.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tandem.batch_tables import TokenSpan
from tandem.core.values import ceil_div
from tandem.engine.decode_set import ArrayDecodeSet
from tandem.engine.rows import Rows, tile_places
from tandem.engine.sequence import EngineSequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [first, first + stop - start) of the batch are positions [start, stop) of one request."""

    first: int
    start: int
    stop: int
    pages: np.ndarray  # [ceil(stop / page_size)] int64: those of positions [0, stop)

    @property
    def last(self) -> int:
        """One behind its last token in the batch."""
        return self.first + self.stop - self.start


@dataclass(frozen=True, slots=True)
class DecodingRows:
    """Tokens [first, first + d) of the batch are the newest ones of d requests."""

    first: int
    lengths: np.ndarray  # [d] int64, falling: tokens of each, the newest included
    tables: np.ndarray  # [d, width] int64: pages of each; behind a request's own there are ids of somebody else's


@dataclass(frozen=True, slots=True)
class Batch:
    """`n` rows go through the layers, `t <= n` of them are tokens (`t == n` unless in tiles)."""

    token_ids: Tensor  # [n] int64
    positions: Tensor  # [n] int64
    last_position: int
    chunks: list[Chunk]
    decoding: DecodingRows | None
    slots: np.ndarray  # [t] int64: where KV of each token goes, page * page_size + position % page_size (`denoising.py`
    # keeps that of the first ones only)
    rows: Rows  # which of the n rows are the t tokens
    sampled: Tensor  # [s] int64: rows whose next token is wanted; in tiles: arranged in tiles again
    sampled_place: Tensor | None  # in tiles: [outcome rows] int64, index into `sampled`
    pages_to_clear: list[int]  # that nobody has written yet and that this batch does not fill (see `kv_memory.py`)
    token_types: Tensor | None = None  # [n] int64: 1 for tokens of the second text of a pair; None: there is no pair

    def sampling(self, tokens: range) -> "Batch":
        """The same forward pass, of which the scores behind these tokens of the batch are wanted."""
        if self.rows.place is None:
            at = torch.tensor(tokens, dtype=torch.int64, device=self.sampled.device)
            return replace(self, sampled=at, sampled_place=None)
        rows = self.rows.place[tokens.start : tokens.stop]
        sampled, place = _in_tiles(rows.cpu().numpy(), self.positions[rows].cpu().numpy())
        device = self.sampled.device
        return replace(
            self, sampled=torch.from_numpy(sampled).to(device), sampled_place=torch.from_numpy(place).to(device)
        )


class BatchBuilder:
    """Turns spans and the decode set into a `Batch`."""

    def __init__(self, *, page_size: int, device: str, tiles: bool) -> None:
        self._page_size = page_size
        self._device = device
        self._tiles = tiles

    def build(self, spans: list[TokenSpan[EngineSequence]], decode_set: ArrayDecodeSet | None) -> Batch:
        """Rows of outcomes: spans that sample, in order, then the members of the decode set, in join order."""
        if self._tiles:
            members = decode_set.members if decode_set is not None else []
            ends = [TokenSpan(m, len(m.tokens) - 1, len(m.tokens), True) for m in members]
            return self._tiled(spans + ends)
        return self._packed(spans, decode_set if decode_set is not None and len(decode_set) else None)

    def _packed(self, spans: list[TokenSpan[EngineSequence]], decode_set: ArrayDecodeSet | None) -> Batch:
        tokens, positions, slots, sampled = [], [], [], []
        chunks = self._chunks(spans)
        clear = [page for span in spans for page in self._page_to_clear(span)]
        for span, chunk in zip(spans, chunks, strict=True):
            tokens.append(_tokens(span))
            positions.append(np.arange(span.start, span.stop))
            slots.append(self._slots(chunk.pages[positions[-1] // self._page_size], positions[-1]))
            if span.samples:
                sampled.append(chunk.last - 1)
        decoding = None
        if decode_set is not None:
            first = chunks[-1].last if chunks else 0
            lengths = decode_set.lengths
            order = np.argsort(-lengths, kind="stable")
            ends = lengths[order] - 1
            # Without this a missing Grow would write into a page that belongs to somebody else by now.
            assert (ends // self._page_size < decode_set.num_pages[order]).all(), "every decoding token has a page"
            written = decode_set.tables[order, ends // self._page_size]
            tokens.append(decode_set.last_tokens[order])
            positions.append(ends)
            slots.append(self._slots(written, ends))
            clear += written[ends % self._page_size == 0].tolist() if self._page_size > 1 else []
            most_pages = int(ends[0]) // self._page_size + 1
            decoding = DecodingRows(first, ends + 1, decode_set.tables[order, :most_pages])
            rows = np.empty(len(order), dtype=np.int64)
            rows[order] = np.arange(first, first + len(order))
            sampled += rows.tolist()
        at = np.concatenate(positions)
        return Batch(
            token_ids=self._tensor(np.concatenate(tokens)),
            positions=self._tensor(at),
            last_position=int(at.max()),
            chunks=chunks,
            decoding=decoding,
            slots=np.concatenate(slots),
            rows=Rows(),
            sampled=self._tensor(np.array(sampled, dtype=np.int64)),
            sampled_place=None,
            pages_to_clear=clear,
            token_types=self._token_types(spans),
        )

    def _tiled(self, spans: list[TokenSpan[EngineSequence]]) -> Batch:
        chunks = self._chunks(spans)
        positions = np.concatenate([np.arange(span.start, span.stop) for span in spans])
        pages = np.concatenate([c.pages[np.arange(c.start, c.stop) // self._page_size] for c in chunks])
        place, num_rows = tile_places(positions)
        token_ids, row_positions = np.zeros((2, num_rows), dtype=np.int64)
        token_ids[place] = np.concatenate([_tokens(span) for span in spans])
        row_positions[place] = positions
        ends = [chunk.last - 1 for span, chunk in zip(spans, chunks, strict=True) if span.samples]
        sampled, sampled_place = _in_tiles(place[ends], positions[ends])
        return Batch(
            token_ids=self._tensor(token_ids),
            positions=self._tensor(row_positions),
            last_position=int(positions.max()),
            chunks=chunks,
            decoding=None,
            slots=self._slots(pages, positions),
            rows=Rows(self._tensor(place)),
            sampled=self._tensor(sampled),
            sampled_place=self._tensor(sampled_place),
            pages_to_clear=[page for span in spans for page in self._page_to_clear(span)],
        )

    def _token_types(self, spans: list[TokenSpan[EngineSequence]]) -> Tensor | None:
        """Of batches that are not in tiles, which encoders' never are."""
        seconds = [None if span.sequence.vector is None else span.sequence.vector.second_from for span in spans]
        if all(second is None for second in seconds):
            return None
        types = [
            np.arange(span.start, span.stop) >= (span.stop if second is None else second)
            for span, second in zip(spans, seconds, strict=True)
        ]
        return self._tensor(np.concatenate(types).astype(np.int64))

    def _chunks(self, spans: list[TokenSpan[EngineSequence]]) -> list[Chunk]:
        chunks, first = [], 0
        for span in spans:
            chunks.append(Chunk(first, span.start, span.stop, self._pages_of(span)))
            first = chunks[-1].last
        return chunks

    def _pages_of(self, span: TokenSpan[EngineSequence]) -> np.ndarray:
        assert span.start < span.stop <= len(span.sequence.tokens), "a span holds known tokens"
        num_pages = ceil_div(span.stop, self._page_size)
        assert num_pages <= len(span.sequence.pages), "every token of a span has a page"
        return np.array(span.sequence.pages[:num_pages], dtype=np.int64)

    def _page_to_clear(self, span: TokenSpan[EngineSequence]) -> list[int]:
        """The page whose first slot the span writes and whose last one it does not."""
        page_index, filled = divmod(span.stop, self._page_size)
        return [span.sequence.pages[page_index]] if filled and page_index * self._page_size >= span.start else []

    def _slots(self, pages: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return pages * self._page_size + positions % self._page_size

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self._device)


def _in_tiles(rows: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows arranged in tiles again, and the place of each among them. Padding is row 0."""
    place, num_rows = tile_places(positions)
    arranged = np.zeros(num_rows, dtype=np.int64)
    arranged[place] = rows
    return arranged, place


def _tokens(span: TokenSpan[EngineSequence]) -> np.ndarray:
    return np.array(span.sequence.tokens[span.start : span.stop], dtype=np.int64)
