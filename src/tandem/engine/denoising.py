"""Block diffusion: how a row gets the tokens up to the border of its block at once.

The unknown tokens of a block stand as masks. Every pass says of each mask what token belongs there, drawn by the same
pure sampler as everywhere (logits, parameters, seed, position), and how sure the model is of it: the share that the
softmax of the raw scores gives that token, the mask left out. Those of which it is surer than the threshold stay, and
at least the surest one, of equals the first; the others are masks again. So a block takes at most as many passes as it
has masks. Tokens that stay are not changed any more. (The low-confidence rule of LLaDA and SDAR; SGLang's
`LowConfidence`.)

The first pass also writes the KV of what has become final: prompts, and each member's last block (`core/batch.py`). A
draft writes none, so what pages hold depends on final tokens alone: prefixes, transfers and retraction hold as for
other models.

A step is all passes of its blocks. Why not one pass per step: a block whose passes are spread over steps would have to
be kept by every worker and told to whoever goes on with the request, and the tokens come together anyway. The price is
that a block in need of many passes holds up those in need of few, and newcomers.
"""

import math
from collections.abc import Sequence as Values
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tandem.batch_tables import Span
from tandem.core.batch import TokenFlag
from tandem.core.values import ceil_div
from tandem.engine.attention.base import AttentionBackend
from tandem.engine.batch import Batch, Chunk
from tandem.engine.block_config import BlockConfig
from tandem.engine.kv_memory import KvMemory
from tandem.engine.models.base import Step
from tandem.engine.rows import Rows
from tandem.engine.sampler import Draw, Sampled, sample
from tandem.engine.sequence import Sequence
from tandem.engine.weights import LoadedModel


@dataclass(slots=True)
class Draft:
    """The block of one request that is being found."""

    sequence: Sequence
    start: int  # position of its first token
    tokens: np.ndarray  # [block_tokens] int64
    is_mask: np.ndarray  # [block_tokens] bool
    flags: bytearray  # TokenFlag bits of each

    @classmethod
    def of(cls, sequence: Sequence, blocks: BlockConfig) -> "Draft":
        size, length = blocks.block_tokens, len(sequence.tokens)
        start = length - length % size
        tokens = np.full(size, blocks.mask_id, dtype=np.int64)
        tokens[: length - start] = sequence.tokens[start:]
        return cls(sequence, start, tokens, np.arange(start, start + size) >= length, bytearray(size))

    @property
    def masks(self) -> list[int]:
        return np.flatnonzero(self.is_mask).tolist()

    @property
    def first(self) -> int:
        """Of its tokens, the first that was not known."""
        return len(self.sequence.tokens) - self.start

    @property
    def num_said(self) -> int:
        """Tokens of the answer: up to the one that ends it."""
        flags = self.flags[self.first :]
        return next((count for count, flag in enumerate(flags, 1) if flag), len(flags))

    def draws(self, allowed: np.ndarray) -> list[Draw]:
        """For each mask."""
        said_before, params = self.sequence.output_from, self.sequence.params
        positions = [self.start + mask for mask in self.masks]
        return [Draw(params, position, position - said_before, allowed=allowed) for position in positions]

    def take(self, tokens: np.ndarray, flags: bytes, sureness: Values[float], *, least: float) -> None:
        """What a pass has found for each mask. sureness, least: logarithms of a share."""
        best = max(sureness)
        kept = [sure > least for sure in sureness]
        kept[list(sureness).index(best)] = True
        for mask, token, flag, is_kept in zip(self.masks, tokens.tolist(), flags, kept, strict=True):
            if is_kept:
                self.tokens[mask], self.flags[mask], self.is_mask[mask] = token, flag, False

    def give_up(self) -> None:
        """Its scores are no numbers."""
        self.tokens[self.first :] = 0
        self.flags[self.first :] = bytes([TokenFlag.INVALID]) * (len(self.tokens) - self.first)
        self.is_mask[:] = False


class Denoiser:
    """Runs the batches of a model of block diffusion. One worker has the whole model."""

    def __init__(
        self, model: LoadedModel, blocks: BlockConfig, kv: KvMemory, attention: AttentionBackend, *, threshold: float
    ) -> None:
        """threshold: share of the softmax beyond which a token stays at once, in (0, 1]."""
        assert kv.page_size % blocks.block_tokens == 0, "a page holds whole blocks"
        self._model, self._blocks, self._kv, self._attention = model, blocks, kv, attention
        self._least = math.log(threshold)
        words = np.full(ceil_div(model.config.vocab_size, 32), 0xFFFFFFFF, dtype=np.uint32)
        words[blocks.mask_id // 32] &= np.uint32(0xFFFFFFFF ^ 1 << blocks.mask_id % 32)
        self._allowed = words

    def run(self, final: Values[Span[Sequence]], samplers: Values[Sequence]) -> Sampled | None:
        """final: whose KV is written, in whole blocks. None where nobody samples."""
        self._kv.clear([page for span in final for page in self._page_to_clear(span)])
        drafts = [Draft.of(sequence, self._blocks) for sequence in samplers]
        written, unfinished = [span for span in final if span.start < span.stop], drafts
        while written or unfinished:
            self._pass(written, unfinished)
            written, unfinished = [], [draft for draft in unfinished if draft.is_mask.any()]
        if not drafts:
            return None
        return Sampled(
            np.concatenate([draft.tokens[draft.first :] for draft in drafts]).astype(np.int32),
            bytes(draft.flags[draft.first + draft.num_said - 1] for draft in drafts),
            {},
            said=np.concatenate([draft.tokens[draft.first :][: draft.num_said] for draft in drafts]).astype(np.int32),
            counts=tuple(draft.num_said for draft in drafts),
        )

    def _pass(self, final: Values[Span[Sequence]], drafts: Values[Draft]) -> None:
        batch = self._batch(final, drafts)
        self._attention.plan(batch)
        hidden = self._model.module.forward(Step(batch, self._attention))
        if not drafts:
            return
        logits = self._model.module.logits(batch, hidden)
        found = sample(logits, [d for draft in drafts for d in draft.draws(self._allowed)], eos_ids=self._model.eos_ids)
        stop = 0
        for draft in drafts:
            start, stop = stop, stop + len(draft.masks)
            flags = found.flags[start:stop]
            if any(flag & TokenFlag.INVALID for flag in flags):
                draft.give_up()
                continue
            tokens = found.tokens[start:stop]
            sureness = [self._sureness(row.cpu(), token) for row, token in zip(logits[start:stop], tokens, strict=True)]
            draft.take(tokens, flags, sureness, least=self._least)

    def _sureness(self, scores: Tensor, token: int) -> float:
        """scores: [vocab] fp32 on the host. Row by row, as all sampling: what rounds sees no other row."""
        others = scores.clone()
        others[self._blocks.mask_id] = -math.inf
        return float(others[token] - others.logsumexp(dim=0))

    def _batch(self, final: Values[Span[Sequence]], drafts: Values[Draft]) -> Batch:
        """Final tokens, then drafts, of which every mask is scored."""
        size, page_size, device = self._blocks.block_tokens, self._kv.page_size, self._model.device
        parts = [(s.sequence, s.start, np.array(s.sequence.tokens[s.start : s.stop], dtype=np.int64)) for s in final]
        parts += [(draft.sequence, draft.start, draft.tokens) for draft in drafts]
        num_final = sum(span.stop - span.start for span in final)
        chunks, positions, slots = list[Chunk](), list[np.ndarray](), list[np.ndarray]()
        for sequence, start, tokens in parts:
            first, stop = chunks[-1].last if chunks else 0, start + len(tokens)
            is_draft = first >= num_final
            pages = np.array(sequence.pages[: ceil_div(start if is_draft else stop, page_size)], dtype=np.int64)
            chunks.append(Chunk(first, start, stop, pages))
            positions.append(np.arange(start, stop))
            if not is_draft:
                slots.append(pages[positions[-1] // page_size] * page_size + positions[-1] % page_size)
        masks = [num_final + size * index + mask for index, draft in enumerate(drafts) for mask in draft.masks]
        at = np.concatenate(positions)
        return Batch(
            token_ids=torch.from_numpy(np.concatenate([tokens for _, _, tokens in parts])).to(device),
            positions=torch.from_numpy(at).to(device),
            last_position=int(at.max()),
            chunks=chunks,
            decoding=None,
            slots=np.concatenate(slots) if slots else np.empty(0, dtype=np.int64),
            rows=Rows(),
            sampled=torch.tensor(masks, dtype=torch.int64, device=device),
            sampled_place=None,
            pages_to_clear=[],
        )

    def _page_to_clear(self, span: Span[Sequence]) -> list[int]:
        """The page whose first slot this batch writes, or the next one will, and whose last one it does not: who pulls
        it must not see what somebody else has left there.
        """
        sequence, page_size = span.sequence, self._kv.page_size
        stop = len(sequence.tokens) if span.samples else span.stop
        page_index, filled = divmod(stop, page_size)
        return [sequence.pages[page_index]] if filled and page_index * page_size >= span.start else []
