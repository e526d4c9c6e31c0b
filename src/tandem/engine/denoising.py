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

Of several workers each runs its part of every pass, and one samples and tells the others what stays (`drafts.py`).
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tandem.batch_tables import TokenSpan
from tandem.core.batch import TokenFlag
from tandem.core.values import ceil_div
from tandem.engine.attention.base import AttentionBackend
from tandem.engine.batch import Batch, Chunk
from tandem.engine.block_config import BlockConfig
from tandem.engine.drafts import Draft, agree
from tandem.engine.kv_memory import KvMemory
from tandem.engine.models.base import Step
from tandem.engine.parallel import Pipeline
from tandem.engine.rows import Rows
from tandem.engine.sampler import Draw, Sampled, sample
from tandem.engine.sequence import EngineSequence
from tandem.engine.stages import behind_all_layers
from tandem.engine.weights import LoadedModel


class Denoiser:
    """Runs one worker's part of the batches of a model of block diffusion."""

    def __init__(
        self,
        model: LoadedModel,
        blocks: BlockConfig,
        kv: KvMemory,
        attention: AttentionBackend,
        pipeline: Pipeline,
        *,
        threshold: float,
    ) -> None:
        """threshold: share of the softmax beyond which a token stays at once, in (0, 1]."""
        assert kv.page_size % blocks.block_tokens == 0, "a page holds whole blocks"
        self._model, self._blocks, self._kv, self._attention = model, blocks, kv, attention
        self._pipeline = pipeline
        self._least = math.log(threshold)
        words = np.full(ceil_div(model.config.vocab_size, 32), 0xFFFFFFFF, dtype=np.uint32)
        words[blocks.mask_id // 32] &= np.uint32(0xFFFFFFFF ^ 1 << blocks.mask_id % 32)
        self._allowed = words.tobytes()

    def run(self, final: Sequence[TokenSpan[EngineSequence]], samplers: Sequence[EngineSequence]) -> Sampled | None:
        """final: whose KV is written, in whole blocks. None where nobody samples.

        All workers have the tokens then; what is said of them has the one that samples. Raises WorkerGone.
        """
        self._kv.clear([page for span in final for page in self._page_to_clear(span)])
        size, mask_id = self._blocks.block_tokens, self._blocks.mask_id
        drafts = [Draft.of(sequence, block_tokens=size, mask_id=mask_id) for sequence in samplers]
        written, unfinished = [span for span in final if span.start < span.stop], drafts
        while written or unfinished:
            self._pass(written, unfinished)
            written, unfinished = [], agree(self._pipeline, unfinished) if unfinished else []
        if not drafts:
            return None
        tokens = np.concatenate([draft.found for draft in drafts])
        if not self._pipeline.samples:
            return Sampled(tokens, b"", {}, said=tokens[:0])
        return Sampled(
            tokens,
            bytes(draft.flags[draft.first + draft.num_said - 1] for draft in drafts),
            {},
            said=np.concatenate([draft.found[: draft.num_said] for draft in drafts]),
            counts=tuple(draft.num_said for draft in drafts),
        )

    def _pass(self, final: Sequence[TokenSpan[EngineSequence]], drafts: Sequence[Draft[EngineSequence]]) -> None:
        batch = self._batch(final, drafts)
        self._attention.plan(batch)
        hidden = behind_all_layers(self._model, self._pipeline, Step(batch, self._attention))
        if hidden is None or not drafts:
            return
        logits = self._model.module.logits(batch, hidden)  # all shards of the stage have a part in them
        if not self._pipeline.samples:
            return
        found = sample(logits, [d for draft in drafts for d in self._draws(draft)], eos_ids=self._model.eos_ids)
        stop = 0
        for draft in drafts:
            start, stop = stop, stop + len(draft.masks)
            flags = found.flags[start:stop]
            if any(flag & TokenFlag.INVALID for flag in flags):
                _give_up(draft)
                continue
            tokens = found.tokens[start:stop]
            sureness = [self._sureness(row.cpu(), token) for row, token in zip(logits[start:stop], tokens, strict=True)]
            _take(draft, tokens, flags, sureness, least=self._least)

    def _draws(self, draft: Draft[EngineSequence]) -> list[Draw]:
        """For each mask."""
        said_before, params = draft.sequence.output_from, draft.sequence.params
        positions = [draft.start + mask for mask in draft.masks]
        return [Draw(params, position, position - said_before, allowed=self._allowed) for position in positions]

    def _sureness(self, scores: Tensor, token: int) -> float:
        """scores: [vocab] fp32 on the host. Row by row, as all sampling: what rounds sees no other row."""
        others = scores.clone()
        others[self._blocks.mask_id] = -math.inf
        return float(others[token] - others.logsumexp(dim=0))

    def _batch(self, final: Sequence[TokenSpan[EngineSequence]], drafts: Sequence[Draft[EngineSequence]]) -> Batch:
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

    def _page_to_clear(self, span: TokenSpan[EngineSequence]) -> list[int]:
        """The page whose first slot this batch writes, or the next one will, and whose last one it does not: who pulls
        it must not see what somebody else has left there.
        """
        sequence, page_size = span.sequence, self._kv.page_size
        stop = len(sequence.tokens) if span.samples else span.stop
        page_index, filled = divmod(stop, page_size)
        return [sequence.pages[page_index]] if filled and page_index * page_size >= span.start else []


def _take(
    draft: Draft[EngineSequence], tokens: np.ndarray, flags: bytes, sureness: Sequence[float], *, least: float
) -> None:
    """What a pass has found for each mask. sureness, least: logarithms of a share."""
    best = max(sureness)
    kept = [sure > least for sure in sureness]
    kept[list(sureness).index(best)] = True
    for mask, token, flag, is_kept in zip(draft.masks, tokens.tolist(), flags, kept, strict=True):
        if is_kept:
            draft.put(mask, token, flag)


def _give_up(draft: Draft[EngineSequence]) -> None:
    """Its scores are no numbers."""
    for place in range(draft.first, len(draft.tokens)):
        draft.put(place, 0, TokenFlag.INVALID)
