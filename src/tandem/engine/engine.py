"""Runs `BatchPlan`s: one shard, one thread, synchronous. Decides nothing.

What a plan does to tokens, page tables and the decode set is in `batch_tables.py`; here is the forward pass. A plan
that speaks of pages or tokens that the engine does not have is a bug of the caller and raises; the requests of that
batch are then in an unknown state, all others are untouched.

deterministic=True: the logits of a row depend on its own tokens only (see `rows.py`), provided that the libraries
below do their part, which needs an environment (`determinism.py`) and is measured at start (`self_check.py`).
"""

import time
from collections.abc import Iterable

import msgspec
import torch

from tandem.batch_tables import BatchTables, Span
from tandem.core.batch import BatchOutcome, BatchPlan
from tandem.core.values import Nanos
from tandem.engine.attention.base import attention_backend
from tandem.engine.attention.table import DEFAULT_ATTENTION_BACKEND
from tandem.engine.batch import BatchBuilder
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
        self._decode_set = DecodeSet()
        self._tables: BatchTables[Sequence] = BatchTables(self._decode_set)

    def add(self, payload: Payload) -> None:
        """Make a request known. Must come before the first plan that names it.

        A second time replaces its prompt: it was rendered anew, and no plan that named it is to come or under way.
        """
        self._tables.add(Sequence.of(payload, page_size=self.page_size))

    def forget(self, requests: Iterable[int]) -> None:
        """Drop tokens and tables, and the place in the decode set. Unknown requests are ignored."""
        self._tables.forget(requests)

    def close(self) -> None:
        self.kv.close()

    @torch.inference_mode()
    def run(self, plan: BatchPlan) -> BatchOutcome:
        """Apply the plan's changes, run the forward pass, sample. Raises only for bugs and for a failing device."""
        started = time.perf_counter_ns()
        spans = self._tables.apply(plan)
        samplers = self._tables.sampling(spans, decodes=plan.decodes)
        sampled = self._forward(spans, samplers, decodes=plan.decodes)
        hashes = self._tables.finish(spans, sampled.tokens.tolist(), decodes=plan.decodes)
        return BatchOutcome(
            batch=plan.id,
            iteration=plan.iteration,
            tokens=sampled.tokens.astype("<i4").tobytes(),
            flags=sampled.flags,
            hashes=tuple(hashes),
            extras=tuple((samplers[row].request, _EXTRA.encode(score)) for row, score in sampled.scores.items()),
            duration_ns=Nanos(time.perf_counter_ns() - started),
        )

    def _forward(self, spans: list[Span[Sequence]], samplers: list[Sequence], *, decodes: bool) -> Sampled:
        if not spans and not samplers:
            return sample(torch.empty(0, 1), [], eos_ids=())
        batch = self._batches.build(spans, self._decode_set if decodes else None)
        self.kv.clear(batch.pages_to_clear)
        self._attention.plan(batch)
        logits = self.model.module.logits(batch, self.model.module.forward(batch, self._attention))
        return sample(logits, [_draw(s) for s in samplers], eos_ids=self.model.eos_ids)


def _draw(sequence: Sequence) -> Draw:
    return Draw(
        params=sequence.params,
        position=len(sequence.tokens),
        num_outputs=sequence.num_outputs,
        history=sequence.history,
    )
