"""Before a `--deterministic` server takes requests: measure what `rows.py` and `determinism.py` set out to ensure.

    sums   Products of the shapes of the model's own, on terms that cancel (`summation.py`), with one thread and more.
    path   Two layers and the head of the loaded model run over one text in several ways: whole and cut into chunks,
           alone and beside others, with one thread and more; all keys, values and logits have to come out the same.
           Layers of a model have the same shapes, so two stand for all: the second shows what the first put out. A
           prefix is taken as cached, so that attention sees more keys than one of torch's blocks holds.

Every server that passes computes what one thread computes there. A digest of it goes into the layout: machines that
round differently are not put together, as long as both promise not to.
"""

import hashlib
import logging
import os
from array import array
from dataclasses import replace
from itertools import takewhile

import torch
from torch import Tensor

from tandem.batch_tables import TokenSpan
from tandem.core.values import PageId, ceil_div
from tandem.engine import determinism
from tandem.engine.attention.base import attention_backend
from tandem.engine.attention.table import DEFAULT_ATTENTION_BACKEND
from tandem.engine.batch import BatchBuilder
from tandem.engine.kv_memory import KvMemory
from tandem.engine.layers.product import product
from tandem.engine.model_config import ModelError
from tandem.engine.models.base import Step
from tandem.engine.native import library
from tandem.engine.sequence import EngineSequence
from tandem.engine.summation import Products, pattern
from tandem.engine.weights import LoadedModel
from tandem.sampling import Payload, SamplingParams

NUM_LAYERS = 2
CACHED_TOKENS = 608
CHUNKS = (1, 2, 7, 8, 15)
WHOLE = (sum(CHUNKS),)
NEIGHBOUR_TOKENS = 5

logger = logging.getLogger("tandem.engine")


def proven(
    model: LoadedModel,
    *,
    threads: int,
    may_lower: bool,
    page_size: int,
    attention: str = DEFAULT_ATTENTION_BACKEND,
    part: LoadedModel | None = None,
) -> LoadedModel:
    """The model, its layout saying what its deterministic numbers are. torch is left with the threads that may compute.

    part: of it, where this worker is one of several; it is returned then. In an exact group a part computes some
    outputs of the same products, so its numbers are those of the whole model, which is what the layout has to say.

    may_lower: nobody asked for so many threads: where their number shows, fewer are taken.
    Raises ModelError with cause and remedy where the promise cannot be kept.
    """
    library.use(library.best(deterministic=True))
    counts = thread_counts(model.device, threads)
    products = Products(model.module.product_shapes(), dtype=model.dtype, device=model.device, product=product)
    sums, neighbours_show, digest = products.compare(counts)
    if part is not None:
        own_shapes = part.module.product_shapes()
        own = Products(own_shapes, dtype=model.dtype, device=model.device, product=product).compare(counts)
        sums, neighbours_show = sums & own[0], neighbours_show or own[1]
        if products.parts_show(own_shapes):
            raise ModelError(_cannot_be_kept("that a worker has a part of the outputs shows", model, "use --tp-size 1"))
    path = ForwardPath(model, page_size=page_size, attention=attention)
    expected = path.bits(WHOLE, threads=1)
    same = takewhile(lambda n: n in sums and path.bits(WHOLE, threads=n) == expected, counts)
    steady = max(same, default=0)
    if steady == 0:
        raise ModelError(_cannot_be_kept("two runs of the same rows differ", model))
    if steady < threads and not may_lower:
        raise ModelError(_threads_show(model, threads=threads, steady=steady))
    if neighbours_show or path.bits(CHUNKS, threads=steady, beside_others=True) != expected:
        raise ModelError(_cannot_be_kept("how a prompt is cut and what else is in its batch shows", model))
    if steady < threads:
        logger.warning("%d threads show in the %s; computing with %d", threads, _sums(model), steady)
    torch.set_num_threads(steady)
    numbers = hashlib.sha256(f"{digest} {expected}".encode()).hexdigest()[:8]
    found = model if part is None else part
    return replace(found, layout_fields={**found.layout_fields, "deterministic": f"on, {numbers}"})


def thread_counts(device: str, threads: int) -> list[int]:
    """1, 2, the number wanted, and the powers of two between: work divides most evenly among these."""
    if torch.device(device).type != "cpu":
        return [threads]
    return sorted({threads, *(1 << exponent for exponent in range(threads.bit_length()))})


def _cannot_be_kept(cause: str, model: LoadedModel, *remedies: str) -> str:
    instead = "".join(f"{remedy}, or " for remedy in remedies)
    return f"--deterministic cannot be kept: {cause} in the {_sums(model)}; {instead}leave --deterministic out"


def _threads_show(model: LoadedModel, *, threads: int, steady: int) -> str:
    remedies = [f"use --cpu-threads {steady}"]
    if model.dtype != torch.float32:
        remedies.append("--dtype float32")
    for name, value in determinism.LIBRARIES.items():
        if os.environ.get(name, value) != value:
            remedies.append(f"take {name} out of the environment")
    return _cannot_be_kept(f"that there are {threads} threads shows", model, *remedies)


def _sums(model: LoadedModel) -> str:
    kind = str(model.dtype).removeprefix("torch.")
    return f"{kind} sums of this machine ({model.device}, {torch.backends.cpu.get_cpu_capability()})"


class ForwardPath:
    """The first layers and the head of a model, and one text that they run over in various ways."""

    def __init__(self, model: LoadedModel, *, page_size: int, attention: str) -> None:
        self._module = model.module.first_layers(NUM_LAYERS)
        self._model = model
        self._kv_shape = replace(model.kv_shape, num_layers=min(NUM_LAYERS, model.kv_shape.num_layers))
        self._page_size = page_size
        self._open_attention = attention_backend(attention)

    @torch.inference_mode()
    def bits(self, chunks: tuple[int, ...], *, threads: int, beside_others: bool = False) -> str:
        """Digest of all keys and values of the text after its cached prefix, and of the logits of its last token."""
        torch.set_num_threads(threads)
        text = self._sequence(1, CACHED_TOKENS + sum(chunks), first_page=0)
        other = self._sequence(2, NEIGHBOUR_TOKENS, first_page=len(text.pages))
        kv = KvMemory(
            self._kv_shape,
            page_size=self._page_size,
            num_pages=len(text.pages) + len(other.pages),
            dtype=self._model.dtype,
            device=self._model.device,
        )
        try:
            kv.tensor.copy_(pattern(tuple(kv.tensor.shape), dtype=torch.float32, device=self._model.device))
            logits = self._run(kv, text, chunks, others=[other] if beside_others else [])
            computed = kv.tensor[CACHED_TOKENS // self._page_size : len(text.pages)]
            return hashlib.sha256(_bytes(computed) + _bytes(logits)).hexdigest()
        finally:
            kv.close()

    def _run(
        self, kv: KvMemory, text: EngineSequence, chunks: tuple[int, ...], *, others: list[EngineSequence]
    ) -> Tensor:
        attention = self._open_attention(kv, rules=self._model.attention, deterministic=True)
        builder = BatchBuilder(page_size=self._page_size, device=self._model.device, tiles=attention.needs_tiles)
        logits = torch.empty(0)
        start = CACHED_TOKENS
        for size in chunks:
            stop = start + size
            spans = [TokenSpan(other, 0, NEIGHBOUR_TOKENS, samples=True) for other in others]
            spans.append(TokenSpan(text, start, stop, samples=stop == len(text.tokens)))
            batch = builder.build(spans, None)
            kv.clear(batch.pages_to_clear)
            attention.plan(batch)
            logits = self._module.logits(batch, self._module.forward(Step(batch, attention)))
            start = stop
        return logits[-1]

    def _sequence(self, request: int, num_tokens: int, *, first_page: int) -> EngineSequence:
        tokens = array("i", [(7919 * index + request) % self._model.config.vocab_size for index in range(num_tokens)])
        payload = Payload(request, tokens.tobytes(), SamplingParams(temperature=0.0), bytes(16))
        sequence = EngineSequence.of(payload, page_size=self._page_size)
        num_pages = ceil_div(num_tokens, self._page_size)
        sequence.set_pages(0, [PageId(first_page + index) for index in range(num_pages)])
        return sequence


def _bytes(values: Tensor) -> bytes:
    return values.contiguous().view(torch.uint8).cpu().numpy().tobytes()
