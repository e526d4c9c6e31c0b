"""Runs `BatchPlan`s: one shard, one thread, synchronous. Decides nothing.

What a plan means is written in `core/batch.py`; here it is done in exactly that order: leave, join, grow, then the
forward pass over `rows` and, with `decodes`, over the decode set. A plan that speaks of pages or tokens that the
engine does not have is a bug of the caller and raises; the requests of that batch are then in an unknown state, all
others are untouched.

deterministic=True: the logits of a row depend on its own tokens only (see `rows.py`), provided that the libraries
below do their part, which needs an environment (`determinism.py`) and is measured at start (`self_check.py`).
"""

import time
from collections.abc import Iterable

import msgspec
import numpy as np
import torch

from tandem.core.batch import BatchOutcome, BatchPlan, Row
from tandem.core.values import Nanos, RequestId
from tandem.engine.attention.base import attention_backend
from tandem.engine.attention.table import DEFAULT_ATTENTION_BACKEND
from tandem.engine.batch import BatchBuilder, Span
from tandem.engine.decode_set import DecodeSet
from tandem.engine.kv_memory import KvMemory
from tandem.engine.sampler import Draw, Sampled, sample
from tandem.engine.sequence import Sequence
from tandem.engine.weights import LoadedModel
from tandem.sampling import Payload

_EXTRA = msgspec.msgpack.Encoder()


class Engine:
    """Owns the KV memory, the tokens and page tables of its requests, and the decode set."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        page_size: int,
        num_pages: int,
        deterministic: bool = False,
        attention: str = DEFAULT_ATTENTION_BACKEND,
    ) -> None:
        """Raises ModelError for an attention backend that is not known or cannot do what this model needs."""
        open_attention = attention_backend(attention)
        self.model = model
        self.page_size = page_size
        self.kv = KvMemory(
            model.kv_shape, page_size=page_size, num_pages=num_pages, dtype=model.dtype, device=model.device
        )
        self._attention = open_attention(self.kv, window=model.config.sliding_window, deterministic=deterministic)
        self._batches = BatchBuilder(page_size=page_size, device=model.device, deterministic=deterministic)
        self._sequences: dict[int, Sequence] = {}
        self._decode_set = DecodeSet()

    def add(self, payload: Payload) -> None:
        """Make a request known. Must come before the first plan that names it.

        A second time replaces its prompt: it was rendered anew, and no plan that named it is to come or under way.
        """
        assert payload.request not in self._decode_set, "a request that decodes keeps its prompt"
        self._sequences[payload.request] = Sequence.of(payload, page_size=self.page_size)

    def forget(self, requests: Iterable[int]) -> None:
        """Drop tokens and tables, and the place in the decode set. Unknown requests are ignored."""
        gone = set(requests)
        self._decode_set.leave(gone)
        for request in gone:
            self._sequences.pop(request, None)

    def close(self) -> None:
        self.kv.close()

    @torch.inference_mode()
    def run(self, plan: BatchPlan) -> BatchOutcome:
        """Apply the plan's changes, run the forward pass, sample. Raises only for bugs and for a failing device."""
        started = time.perf_counter_ns()
        self._apply_changes(plan)
        spans = [self._span(row) for row in plan.rows]
        sampled, hashes = self._forward(spans, decodes=plan.decodes)
        requests = [span.sequence.request for span in spans if span.samples]
        requests += [member.request for member in self._decode_set.members] if plan.decodes else []
        return BatchOutcome(
            batch=plan.id,
            iteration=plan.iteration,
            tokens=sampled.tokens.astype("<i4").tobytes(),
            flags=sampled.flags,
            hashes=tuple(hashes),
            extras=tuple((RequestId(requests[row]), _EXTRA.encode(score)) for row, score in sampled.scores.items()),
            duration_ns=Nanos(time.perf_counter_ns() - started),
        )

    # --- changes ----------------------------------------------------------------------------------------------------

    def _apply_changes(self, plan: BatchPlan) -> None:
        self._decode_set.leave(set(plan.leave))
        for join in plan.join:
            sequence = self._sequences[join.request]
            for token in np.frombuffer(join.token, dtype="<i4").tolist():
                sequence.append(token)
            sequence.set_pages(join.first_page, join.pages)
            self._decode_set.join(sequence)
        for grow in plan.grow:
            sequence = self._sequences[grow.request]
            sequence.set_pages(grow.first_page, grow.pages)
            self._decode_set.refresh_table(sequence)

    def _span(self, row: Row) -> Span:
        sequence = self._sequences[row.request]
        sequence.set_pages(row.first_page, row.pages)
        for token in np.frombuffer(row.token, dtype="<i4").tolist():
            sequence.append(token)
        if row.samples:
            sequence.cut(row.stop)  # a prompt may run twice; its token is sampled anew
        return Span(sequence=sequence, start=row.start, stop=row.stop, samples=row.samples)

    # --- forward ----------------------------------------------------------------------------------------------------

    def _forward(self, spans: list[Span], *, decodes: bool) -> tuple[Sampled, list[tuple[RequestId, bytes]]]:
        members = self._decode_set.members if decodes else []
        if not spans and not members:
            return sample(torch.empty(0, 1), [], eos_ids=()), []
        batch = self._batches.build(spans, self._decode_set if decodes else None)
        self.kv.clear(batch.pages_to_clear)
        self._attention.plan(batch)
        logits = self.model.module.logits(batch, self.model.module.forward(batch, self._attention))
        samplers = [span.sequence for span in spans if span.samples]
        sampled = sample(logits, [_draw(s) for s in (*samplers, *members)], eos_ids=self.model.eos_ids)
        hashes = self._completed_pages(spans, members)
        for sequence, token in zip(samplers, sampled.tokens.tolist(), strict=False):
            sequence.append(token)
        if decodes:
            self._decode_set.append(sampled.tokens[len(samplers) :])
        return sampled, hashes

    def _completed_pages(self, spans: list[Span], members: list[Sequence]) -> list[tuple[RequestId, bytes]]:
        """Pages with output that are full since this batch, in row order. Called before sampled tokens are appended.

        After a retraction spans run over pages that were told before: those are not told again.
        """
        ends = [(span.sequence, span.stop) for span in spans]
        ends += [(member, len(member.tokens)) for member in members if len(member.tokens) % self.page_size == 0]
        return [(RequestId(sequence.request), h) for sequence, stop in ends for h in sequence.take_hashes(stop)]


def _draw(sequence: Sequence) -> Draw:
    return Draw(
        params=sequence.params,
        position=len(sequence.tokens),
        num_outputs=sequence.num_outputs,
        history=sequence.history,
    )
