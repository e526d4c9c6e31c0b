"""Training rows of the bundled model: problems in every prompt format it must know, padded into batches."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from rows import SYSTEM_PROMPTS, Row, RowMaker
from torch import Tensor
from transformers import PreTrainedTokenizerFast

POOL_SIZE = 480
"""Single-problem examples drawn and grouped by length at a time, before the long share is taken off."""
BUCKETS = (48, 64, 80, 96, 112, 128, 144, 160, 192, 224, 256, 320, 400, 1024, 4096, 8192)
"""Row lengths in tokens, close enough to each other that little is padding."""
SHORT, LONG = 400, 1024
TYPICAL_LENGTH = 110
"""Mean length of a one-problem chat in tokens."""
VERY_LONG_SHARE = {4096: 0.3, 8192: 0.1}
"""Mean number of rows of these lengths per pool; attention makes them expensive, and a few are enough."""
TOOLS_SHARE = 0.14
"""Share of chats in which there is a calculator."""


@dataclass
class Example:
    """One training row before padding."""

    tokens: list[int]
    weights: list[float]
    """Loss weight of each token as a target, same length as ``tokens``."""


# --- data -------------------------------------------------------------------------------------------------------


class ExampleMaker:
    """Turns rows of text into rows of tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self._tokenizer = tokenizer
        self._rows = RowMaker(seed)
        self._random = self._rows.random

    def _extend(self, example: Example, row: Row) -> None:
        for text, weight in row:
            tokens = self._tokenizer.encode(text, add_special_tokens=False)
            example.tokens += tokens
            example.weights += [weight] * len(tokens)

    def _background(self, length: int) -> str:
        """About ``length`` tokens of text that has nothing to do with the question that follows."""
        pieces: list[str] = []
        tokens = 0
        while tokens < length:
            kind = self._random.random()
            if kind < 0.2:
                piece = self._random.choice(SYSTEM_PROMPTS)
            elif kind < 0.4:
                piece = self._rows.problem().question
            else:
                piece = self._rows.words(digits=True)
            tokens += len(self._tokenizer.encode(piece, add_special_tokens=False))
            pieces.append(piece)
        return self._random.choice((" ", "\n")).join(pieces)

    def _start_chat(self, max_length: int) -> Example:
        """A system message in a third of chats, sometimes made of background text that fills up to 2/3 of the row."""
        example = Example([], [])
        kind = self._random.random()
        if kind < 0.15:
            self._extend(example, [(f"<|im_start|>system\n{self._random.choice(SYSTEM_PROMPTS)}<|im_end|>\n", 0.0)])
        elif kind < 0.22:
            length = self._random.randint(5, 60 if max_length <= SHORT else max_length * 2 // 3)
            self._extend(example, [(f"<|im_start|>system\n{self._background(length)}<|im_end|>\n", 0.0)])
        return example

    def chat(self, max_length: int, max_turns: int) -> Example:
        """A chat of up to ``max_turns`` problems that fits in ``max_length`` tokens."""
        has_tools = self._random.random() < TOOLS_SHARE
        example = Example([], []) if has_tools else self._start_chat(max_length)
        if has_tools:
            self._extend(example, self._rows.tools())
            max_turns = max(max_turns, self._random.randint(1, 3))
        for _ in range(max_turns):
            before = len(example.tokens)
            if before and example.tokens[-1] == self._tokenizer.eos_token_id:
                self._extend(example, [("\n", 0.0)])
            self._extend(example, self._rows.tool_turn() if has_tools else self._rows.turn())
            if len(example.tokens) > max_length:
                del example.tokens[before:], example.weights[before:]
                break
        return example

    def plain(self, shots: int) -> Example:
        """``shots`` problems in "Question: ... Answer: ..." form."""
        example = Example([], [])
        self._extend(example, self._rows.plain(shots))
        return example


def make_pool(tokenizer: PreTrainedTokenizerFast, seed: int, long_share: float) -> list[Example]:
    """Draw a pool; ``long_share`` is the share of tokens (about) that come from long multi-turn rows."""
    maker = ExampleMaker(tokenizer, seed)
    rng = random.Random(f"pool-{seed}")
    pool = []
    for _ in range(round(long_share * POOL_SIZE * TYPICAL_LENGTH / LONG)):
        pool.append(maker.chat(LONG, max_turns=rng.choice((7, 99, 99))))
    for _ in range(round((1 - long_share) * POOL_SIZE)):
        pool.append(maker.plain(1) if rng.random() < 0.1 else maker.chat(SHORT, max_turns=1))
    pool += [maker.plain(rng.randint(3, 6)) for _ in range(2)]
    for length, rows in VERY_LONG_SHARE.items():
        if rng.random() < rows:
            pool.append(maker.chat(length, max_turns=99))
    return [example for example in pool if sum(example.weights) > 0 and len(example.tokens) <= BUCKETS[-1]]


def collate(rows: list[Example], length: int, pad: int) -> tuple[Tensor, Tensor]:
    """Right-pad to ``[len(rows), length]``; returns token ids (int64) and loss weights (float32)."""
    ids = torch.full((len(rows), length), pad)
    weights = torch.zeros(len(rows), length)
    for index, row in enumerate(rows):
        ids[index, : len(row.tokens)] = torch.tensor(row.tokens)
        weights[index, : len(row.tokens)] = torch.tensor(row.weights)
    return ids, weights


class BatchStream:
    """Endless batches of about ``tokens_per_batch`` tokens, all rows of a batch from one length bucket."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int, tokens_per_batch: int, long_share: float) -> None:
        self._tokenizer = tokenizer
        self._seed = seed
        self._tokens_per_batch = tokens_per_batch
        self._long_share = long_share
        self._waiting: dict[int, list[Example]] = {length: [] for length in BUCKETS}
        self._rng = random.Random(seed)
        self.pools_drawn = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            pool_seed = self._seed * 1_000_003 + self.pools_drawn
            self.pools_drawn += 1
            ready = []
            for example in make_pool(self._tokenizer, pool_seed, self._long_share):
                length = next(length for length in BUCKETS if len(example.tokens) <= length)
                rows = self._waiting[length]
                rows.append(example)
                if len(rows) == max(1, self._tokens_per_batch // length):
                    ready.append(collate(rows, length, self._tokenizer.pad_token_id))
                    self._waiting[length] = []
            self._rng.shuffle(ready)
            yield from ready
