"""A hand-driven engine: the test says which spans run, pages are found for it.

Page ids are handed out in a scrambled order, and the memory starts full of NaN: a slot that is read before it was
written shows.
"""

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.core.batch import BatchKind, BatchOutcome, BatchPlan, Grow, Join, Row
from tandem.core.values import BatchId, PageId, RequestId, ceil_div
from tandem.engine.batch import Batch
from tandem.engine.engine import DEFAULT_THRESHOLD, Engine
from tandem.engine.models.base import Model, Step
from tandem.engine.parallel import Group
from tandem.engine.weights import load
from tandem.grammar import Vocabulary
from tandem.sampling import Payload, SamplingParams

VOCAB = 300
ROOT = bytes(range(16))
NEAR_TIE = 1e-4  # between two fp32 scores; two machines differ by a tenth of it
UNSEEN = {"logprobs", "top_logprobs", "ignore_eos"}  # parameters that do not change which token is greedy


def prompt_of(length: int, *, seed: int = 0) -> list[int]:
    draw = random.Random(1000 * length + seed)
    return [draw.randrange(VOCAB) for _ in range(length)]


@dataclass
class RecordingModule:
    """Stands where the model stands and keeps the logits of each batch."""

    module: Model
    batches: list[Tensor] = field(default_factory=list)

    def forward(self, step: Step, hidden: Tensor | None = None) -> Tensor:
        return self.module.forward(step, hidden)

    def logits(self, batch: Batch, hidden: Tensor) -> Tensor:
        logits = self.module.logits(batch, hidden)
        self.batches.append(logits.clone())
        return logits


class EngineWorld:
    """One engine, its free pages, and who is in the decode set."""

    def __init__(
        self,
        model_dir: Path,
        *,
        page_size: int = 16,
        num_pages: int = 256,
        deterministic: bool = False,
        dtype: str = "auto",
        group: Group | None = None,
        vocabulary: Vocabulary | None = None,
        quantization: str | None = None,
        kv_is_int8: bool = False,
        block_threshold: float = DEFAULT_THRESHOLD,
        device: str = "cpu",
        **how: Any,
    ) -> None:
        """how: what else an `Engine` takes"""
        torch.set_num_threads(1)
        loaded = load(
            model_dir, dtype=dtype, device=device, group=group, quantization=quantization, kv_is_int8=kv_is_int8
        )
        self.recording = RecordingModule(loaded.module)
        self.engine = Engine(
            replace(loaded, module=self.recording),
            page_size=page_size,
            num_pages=num_pages,
            deterministic=deterministic,
            vocabulary=vocabulary,
            block_threshold=block_threshold,
            **how,
        )
        self.unwritten = -1 if kv_is_int8 else float("nan")  # as bytes of a scale the first is NaN, too
        self.engine.kv.tensor.fill_(self.unwritten)
        self.page_size = page_size
        self.free = list(range(num_pages))
        random.Random(0).shuffle(self.free)
        self.tables: dict[int, list[int]] = {}
        self.num_sent: dict[int, int] = {}  # pages of each table that the engine has been told
        self.tokens: dict[int, list[int]] = {}
        self.is_exact = loaded.dtype == torch.float32
        self.greedy: set[int] = set()
        self.decoding: list[int] = []
        self.logits: dict[int, Tensor] = {}  # of the latest sampling row of each request
        self.flags: dict[int, int] = {}
        self.hashes: dict[int, list[bytes]] = {}
        self.iteration = 0

    def add(self, prompt: Sequence[int], **params: object) -> int:
        request = len(self.tokens)
        self.tokens[request] = list(prompt)
        self.tables[request] = []
        self.num_sent[request] = 0
        sampling = SamplingParams(**{"temperature": 0.0, **params})
        if set(params) <= UNSEEN and self.is_exact:
            self.greedy.add(request)
        self.engine.add(Payload(request, array("i", prompt).tobytes(), sampling, ROOT))
        return request

    def run(
        self,
        *spans: tuple[int, int, int],
        decodes: bool = False,
        join: Sequence[int] = (),
        leave: Sequence[int] = (),
        first_token: int | None = None,
    ) -> BatchOutcome:
        """spans: (request, start, stop); the one that reaches the last known token samples."""
        rows = tuple(
            Row(RequestId(r), start, stop, *self.take_pages(r, stop), samples=stop == len(self.tokens[r]))
            for r, start, stop in spans
        )
        self.decoding = [request for request in self.decoding if request not in leave]
        grow = []
        for request in self.decoding if decodes else ():
            first, pages = self.take_pages(request, len(self.tokens[request]))
            if pages:
                grow.append(Grow(RequestId(request), first, pages))
        if first_token is not None:
            self.tokens[join[0]].append(first_token)
        token = b"" if first_token is None else array("i", [first_token]).tobytes()
        joins = tuple(Join(RequestId(r), *self.take_pages(r, len(self.tokens[r])), token=token) for r in join)
        self.decoding += join
        self.iteration += 1
        outcome = self.engine.run(
            BatchPlan(
                id=BatchId(self.iteration),
                iteration=self.iteration,
                kind=BatchKind.MIXED,
                rows=rows,
                decodes=decodes,
                join=joins,
                leave=tuple(RequestId(request) for request in leave),
                grow=tuple(grow),
            )
        )
        sampling = [row.request for row in rows if row.samples] + (self.decoding if decodes else [])
        self._settle(outcome, sampling)
        return outcome

    def prefill(self, request: int, *, chunk: int = 1 << 30, start: int = 0) -> None:
        """All known tokens from `start` on, in chunks; samples at the end."""
        stop = len(self.tokens[request])
        for at in range(start, stop, chunk):
            self.run((request, at, min(stop, at + chunk)))

    def decode(self, steps: int) -> None:
        for _ in range(steps):
            self.run(decodes=True)

    def generate(self, prompt: Sequence[int], count: int, *, chunk: int = 1 << 30, **params: object) -> list[int]:
        """Alone from the prompt to `count` tokens."""
        request = self.add(prompt, **params)
        self.prefill(request, chunk=chunk)
        self.run(decodes=True, join=[request])
        self.decode(count - 2)
        self.finish(request)
        return self.tokens[request][len(prompt) :]

    def retract(self, request: int) -> None:
        """Out of the decode set and out of its pages; the tokens stay known."""
        self.run(leave=[request])
        self._give_back(request)

    def finish(self, request: int) -> None:
        self.engine.forget([request])
        self.decoding = [other for other in self.decoding if other != request]
        self._give_back(request)

    def _give_back(self, request: int) -> None:
        for page in self.tables[request]:
            self.engine.kv.tensor[page] = self.unwritten
        self.free += self.tables[request]
        self.tables[request] = []
        self.num_sent[request] = 0

    def take_pages(self, request: int, num_tokens: int) -> tuple[int, tuple[PageId, ...]]:
        """first_page and pages of the next plan that needs room for so many tokens."""
        table, first = self.tables[request], self.num_sent[request]
        table += [self.free.pop() for _ in range(ceil_div(num_tokens, self.page_size) - len(table))]
        self.num_sent[request] = len(table)
        return first, tuple(PageId(page) for page in table[first:])

    def _settle(self, outcome: BatchOutcome, sampling: Sequence[int]) -> None:
        tokens = outcome.tokens_by_row()
        assert len(tokens) == len(outcome.flags) == len(sampling)
        for row, request in enumerate(sampling):
            self.tokens[request] += array("i", tokens[row])
            self.flags[request] = outcome.flags[row]
            if not outcome.counts:  # of a block there are logits of several passes
                self.logits[request] = self.recording.batches[-1][row]
                self._refuse_near_ties(request)
        for request, page_hash in outcome.hashes:
            self.hashes.setdefault(request, []).append(page_hash)

    def _refuse_near_ties(self, request: int) -> None:
        """A greedy token that is nearly another one would be it on another machine: the test wants another prompt."""
        best, second = self.logits[request].topk(2).values.tolist()
        if request in self.greedy and best - second < NEAR_TIE:
            raise AssertionError(f"request {request} is at a near-tie ({best} and {second}); give it another prompt")
