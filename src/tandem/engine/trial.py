"""At the start of a model whose layers transformers computes: see that through our port it says what it says alone.

One text in chunks, beside another one, by our attention; each of them whole, by the attention of transformers. So what
mixes tokens outside of attention shows, and positions that are counted instead of read. They are the last positions of
the longest context: what depends on how far a text has come shows there. Masks were looked at before
(`models/transformers_examination.py`), over the whole context. And told no positions transformers has to say the same:
RoBERTa begins to count behind the number of its padding.
"""

from array import array
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from tandem.batch_tables import TokenSpan
from tandem.core.values import PageId
from tandem.engine.attention.base import AttentionBackend, AttentionRules, attention_backend
from tandem.engine.attention.table import DEFAULT_ATTENTION_BACKEND
from tandem.engine.batch import BatchBuilder
from tandem.engine.documents import ModelError
from tandem.engine.kv_memory import KvMemory, KvShape
from tandem.engine.model_config import ModelConfig
from tandem.engine.models.base import Model, Step
from tandem.engine.sequence import EngineSequence
from tandem.sampling import Payload, SamplingParams

PAGE_SIZE = 16
LENGTHS = (41, 9)  # tokens of the texts, which have pages for themselves
BATCHES = (((0, 0, 23),), ((0, 23, 40), (1, 0, 9)), ((0, 40, 41),))  # of each (text, start, stop)
# Mean difference of scores, as a part of their mean size. What is wrong makes it about 1; fp32 sums in another order
# make 1e-6, types of 16 bits 0.01, and some more where experts are chosen by a hair.
MOST_ERROR = {torch.float32: 1e-3}
MOST_ERROR_IN_16_BITS = 0.2


@runtime_checkable
class Borrowed(Model, Protocol):
    """A model whose code is somebody else's, which can also run without us."""

    def alone(self, token_ids: Tensor, positions: Tensor | None) -> Tensor:
        """fp32 [t, vocab]: the scores after each token of one text, by its own attention. positions: unless its own."""
        ...


@torch.inference_mode()
def run(
    module: Borrowed, config: ModelConfig, shape: KvShape, rules: AttentionRules, dtype: torch.dtype, device: str
) -> None:
    """shape: of plain numbers, whatever the server will keep. Raises ModelError where the two differ."""
    try:
        _run(module, config, shape, rules, dtype, device)
    except ModelError:
        raise
    except Exception as error:  # of code that was not written for this
        reason = " ".join(str(error).split())[:200] or "no reason"
        raise ModelError(f"{_name(config)} cannot be run by Tandem ({type(error).__name__}: {reason})") from error


def _run(
    module: Borrowed, config: ModelConfig, shape: KvShape, rules: AttentionRules, dtype: torch.dtype, device: str
) -> None:
    lengths = [min(length, config.max_context) for length in LENGTHS]
    end = config.max_context - max(lengths)
    pages = [range(3), range(3, 4)]
    texts = [
        _text(number, length, own, config.vocab_size)
        for number, (length, own) in enumerate(zip(lengths, pages, strict=True))
    ]
    kv = KvMemory(shape, page_size=PAGE_SIZE, num_pages=pages[-1].stop, dtype=dtype, device=device)
    try:
        attention = attention_backend(DEFAULT_ATTENTION_BACKEND)(kv, rules=rules, deterministic=False)
        found = _through_the_port(module, kv, attention, texts, shift=end)
    finally:
        kv.close()
    for text, ours in zip(texts, found, strict=True):
        ids = torch.tensor(text.tokens.tolist(), device=device)
        positions = torch.arange(len(text.tokens), device=device)
        _compare(config, ours, module.alone(ids, positions + end)[-1], dtype)
        if not _error(module.alone(ids, positions), module.alone(ids, None)) <= MOST_ERROR[torch.float32]:
            raise ModelError(f"{_name(config)} cannot be served: it does not count the positions of a text from 0 on")


def _text(number: int, length: int, pages: range, vocab_size: int) -> EngineSequence:
    tokens = array("i", [(7919 * index + 31 * number) % vocab_size for index in range(length)])
    payload = Payload(number, tokens.tobytes(), SamplingParams(temperature=0.0), bytes(16))
    sequence = EngineSequence.of(payload, page_size=PAGE_SIZE)
    sequence.set_pages(0, [PageId(page) for page in pages])
    return sequence


def _through_the_port(
    module: Model, kv: KvMemory, attention: AttentionBackend, texts: list[EngineSequence], *, shift: int
) -> list[Tensor]:
    """fp32 [vocab]: the scores after the last token of each text. shift: of the positions that the model is told."""
    builder = BatchBuilder(page_size=PAGE_SIZE, device=str(kv.tensor.device), tiles=attention.needs_tiles)
    found: dict[int, Tensor] = {}
    for spans in BATCHES:
        known = [
            (n, start, min(stop, len(texts[n].tokens))) for n, start, stop in spans if start < len(texts[n].tokens)
        ]
        if not known:
            continue
        ends = [n for n, _, stop in known if stop == len(texts[n].tokens)]
        batch = builder.build([TokenSpan(texts[n], start, stop, samples=n in ends) for n, start, stop in known], None)
        kv.clear(batch.pages_to_clear)
        attention.plan(batch)
        moved = replace(batch, positions=batch.positions + shift, last_position=batch.last_position + shift)
        states = module.forward(Step(moved, attention))
        if ends:
            found |= zip(ends, module.logits(moved, states), strict=True)
    return [found[n] for n in range(len(texts))]


def _compare(config: ModelConfig, ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> None:
    error = _error(ours, theirs)
    if not error <= MOST_ERROR.get(dtype, MOST_ERROR_IN_16_BITS):  # nor if it is no number
        raise ModelError(
            f"{_name(config)} cannot be served: its scores through Tandem's attention differ from those that it "
            f"computes alone by {error:.2g} of their size"
        )


def _error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().mean() / theirs.abs().mean())


def _name(config: ModelConfig) -> str:
    assert config.transformers is not None, "somebody else's code is that of transformers"
    return f"{config.architecture} of {config.transformers.library}"
