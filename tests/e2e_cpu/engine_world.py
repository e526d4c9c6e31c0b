"""Tiny random checkpoints and a hand-driven engine: the test says which spans run, pages are found for it.

Page ids are handed out in a scrambled order, and the memory starts full of NaN: a slot that is read before it was
written shows.
"""

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from tandem.core.batch import BatchKind, BatchOutcome, BatchPlan, Grow, Join, Row
from tandem.core.values import BatchId, PageId, RequestId, ceil_div
from tandem.engine.attention import PagedAttention
from tandem.engine.engine import Engine
from tandem.engine.inputs import Inputs
from tandem.engine.weights import load
from tandem.sampling import Payload, SamplingParams

VOCAB = 300
ROOT = bytes(range(16))

LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 128}


def make_llama(where: Path, *, seed: int = 0, max_shard_size: str = "50GB", **changes: object) -> PreTrainedModel:
    """A random Llama, saved to `where`; GQA, untied embeddings unless `changes` say otherwise."""
    torch.manual_seed(seed)
    return _save(LlamaForCausalLM(LlamaConfig(**{**LLAMA, **changes})), where, max_shard_size)


def make_qwen3(where: Path, *, seed: int = 0, **changes: object) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**{**LLAMA, "head_dim": 16, "tie_word_embeddings": True, **changes}))
    for name, parameter in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)  # all ones would hide a missing norm weight
    return _save(model, where, "50GB")


def _save(model: PreTrainedModel, where: Path, max_shard_size: str) -> PreTrainedModel:
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    model.eval().save_pretrained(where, max_shard_size=max_shard_size)
    return model


def prompt_of(length: int, *, seed: int = 0) -> list[int]:
    draw = random.Random(1000 * length + seed)
    return [draw.randrange(VOCAB) for _ in range(length)]


def reference_logits(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """[len(tokens), vocab]: what transformers says after each token."""
    with torch.inference_mode():
        return model(torch.tensor([list(tokens)])).logits[0]


def reference_tokens(model: PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy continuation by transformers."""
    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
        )
    return out[0, len(prompt) :].tolist()


@dataclass
class RecordingModule:
    """Stands where the model stands and keeps the logits of each batch."""

    module: object
    batches: list[Tensor] = field(default_factory=list)

    def logits(self, inputs: Inputs, attend: PagedAttention) -> Tensor:
        self.batches.append(self.module.logits(inputs, attend).clone())
        return self.batches[-1]


class EngineWorld:
    """One engine, its free pages, and who is in the decode set."""

    def __init__(
        self, model_dir: Path, *, page_size: int = 16, num_pages: int = 256, deterministic: bool = False, dtype="auto"
    ) -> None:
        torch.set_num_threads(1)
        loaded = load(model_dir, dtype=dtype, device="cpu")
        self.recording = RecordingModule(loaded.module)
        self.engine = Engine(
            replace(loaded, module=self.recording),
            page_size=page_size,
            num_pages=num_pages,
            deterministic=deterministic,
        )
        self.engine.kv.tensor.fill_(float("nan"))
        self.page_size = page_size
        self.free = list(range(num_pages))
        random.Random(0).shuffle(self.free)
        self.tables: dict[int, list[int]] = {}
        self.num_sent: dict[int, int] = {}  # pages of each table that the engine has been told
        self.tokens: dict[int, list[int]] = {}
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
            self.engine.kv.tensor[page] = float("nan")
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
        tokens = array("i", outcome.tokens)
        assert len(tokens) == len(outcome.flags) == len(sampling)
        for row, request in enumerate(sampling):
            self.tokens[request].append(tokens[row])
            self.flags[request] = outcome.flags[row]
            self.logits[request] = self.recording.batches[-1][row]
        for request, page_hash in outcome.hashes:
            self.hashes.setdefault(request, []).append(page_hash)
