"""The product's own engine in the workers of a simulated cluster, with the bundled model, and what it has to answer.

A worker makes it as a worker process does: checkpoint, self-check, pool, kernels. In the place of its own is its time:
a batch takes as long as one of `engine.py`, in virtual time, and computing takes none. KV memory is the product's, too;
what its descriptor refers to is the virtual machine's affair (`memory.py`).

The right answer is what one engine says that nobody shares, asked for one prompt at a time. `--deterministic` makes the
two equal to the last bit, log-probabilities too, whatever batches, chunks, cuts and pages a request has come through.
What is wrong in every engine alike is not seen here: that the model computes what it should is for tests of the engine.

Another processor may round otherwise, so hashes of logs are those of one machine.
"""

import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from random import Random
from typing import Any  # values of flags, and what is handed on to an `Engine`

import msgspec
import torch

from tandem.core.batch import BatchKind, BatchOutcome, BatchPlan, Join, Row
from tandem.core.values import BatchId, PageId, RequestId, ceil_div
from tandem.engine import weights
from tandem.engine.engine import Engine
from tandem.engine.late_tokens import RunBatch
from tandem.engine.native import library
from tandem.sampling import Payload, SamplingParams, TokenScore
from tandem.server import worker_process
from tandem.server.processes import Launch
from tandem.server.worker_process import Loaded, WorkerPlace
from tandem.simulator.faults.options import FIRST_OFF_RECORD
from tandem.simulator.whole import collectives
from tandem.simulator.whole.cluster import MODEL, PlainModel
from tandem.simulator.whole.network import TCP_CAPACITY
from tandem.simulator.whole.options import TORCH, Options
from tandem.simulator.whole.templates import tokenizer
from tandem.simulator.whole.virtual_process import Replacement

# What a seed may have drawn, and flags for it: see `with_torch`.
TOGETHER = ("enable_dp_attention", "dp_size", "tp_size")
SIZES = ("tp_size", "pp_size", "attn_cp_size")
FORMS = ("tool_call_parser", "reasoning_parser")
VECTORS = ("is_embedding",)
WIDER = 512  # a token has 4 KiB of KV, and one of `engine.py` 8 bytes for each cell
QUANTISED_ONE_IN = 4
MOST_TOKENS = 1024  # of a prompt and its answer
ONLY = RequestId(1)


def with_torch(options: Options) -> Options:
    """The same world, but for what the bundled model is not, and for what is not known of its answers.

    ranks     none step together, which --deterministic excludes; a replica may have several workers
    model     a row samples one token at a time, no layer has a window, nothing makes vectors
    bytes     connections and frames are wider by as much as pages are larger; those of HTTP are as wide as usual
    delays    what workers say is not late where replicas have several: a batch has dozens of sums that wait for it, and
              one of the other engine a single one

    Some seeds have weights of 8 or 4 bits, which the other engine knows nothing of, or KV of 8: --deterministic is not
    measured with that, so where rows have their bits anyway, which is by native kernels in replicas of one worker.
    """
    is_older = options.seed < FIRST_OFF_RECORD  # of these, nobody asked for a form
    together = TOGETHER if "enable_dp_attention" in options.flags else ()
    left_out = {*together, *(FORMS if is_older else ()), *VECTORS}
    flags = {**_without(options.flags, left_out), "deterministic": True, "cpu_threads": 1}
    roles = {role: _without(flags, left_out) for role, flags in options.roles.items()}
    has_groups = any(of.get(size, 1) > 1 for of in (flags, *roles.values()) for size in SIZES)
    flags |= draw_bits(options.seed, may_be_of_kv=not has_groups and library.best() is not None)
    narrows = options.narrows
    return replace(
        options,
        engine=TORCH,
        flags=flags,
        roles=roles,
        block_tokens=1,
        window_tokens=0,
        vectors="",
        formed=0.0 if is_older else options.formed,
        tcp_capacity=TCP_CAPACITY,
        narrows=replace(
            narrows,
            peer_capacity=_wider(narrows.peer_capacity),
            frame_bytes=_wider(narrows.frame_bytes),
            page_delay_ns=None if has_groups else narrows.page_delay_ns,
        ),
    )


def draw_bits(seed: int, *, may_be_of_kv: bool) -> dict[str, Any]:
    """From randomness of its own: whatever else a seed is like does not depend on it."""
    random = Random(f"whole weights {seed}")
    if seed < FIRST_OFF_RECORD or random.randrange(QUANTISED_ONE_IN):
        return {}
    flags: dict[str, Any] = {"quantization": random.choice(("int8", "int4"))}
    if may_be_of_kv and random.random() < 0.5:
        flags = {"kv_cache_dtype": "int8", "deterministic": False}
    return flags


def _without(flags: Mapping[str, Any], left_out: set[str]) -> dict[str, Any]:
    return {name: value for name, value in flags.items() if name not in left_out}


def _wider(size: int | None) -> int | None:
    return None if size is None else size * WIDER


class TimedEngine(Engine):
    """`engine.Engine`, of which a batch takes virtual time, and may fail."""

    def __init__(self, *given: Any, base_s: float, token_s: float, **named: Any) -> None:
        super().__init__(*given, **named)
        self._base_s, self._token_s = base_s, token_s
        self.fails_next = False
        self.runs: Callable[[BatchPlan, RunBatch[Any]], None] | None = None
        self.ends: Callable[[], None] | None = None

    def _forward(self, batch: RunBatch[Any]) -> Any:
        if self.runs is not None:
            self.runs(batch.plan, batch)
        inputs = self._tables.inputs(batch.plan, batch.spans)
        length_s = self._base_s + self._token_s * sum(span.stop - span.start for span in inputs)
        time.sleep(length_s / self._pipeline.stage.size)
        if self.fails_next:
            self.fails_next = False
            if self.ends is not None:
                self.ends()
            raise RuntimeError("a forward pass that fails, as drawn")
        return super()._forward(batch)


def of_workers(model: PlainModel) -> list[Replacement]:
    """For `virtual_machine`: what `worker_process.load_engine` makes."""
    return [
        (worker_process, "Engine", partial(TimedEngine, base_s=model.base_s, token_s=model.token_s)),
        (collectives, "PIECE_BYTES", WIDER * collectives.PIECE_BYTES),
    ]


def load_engine(launch: Launch, place: WorkerPlace) -> Loaded:
    """As a worker process does. The memory stays when its descriptor, which is one of the real machine, is given back.

    Raises as `worker_process.load_engine`.
    """
    loaded = worker_process.load_engine(launch, place)
    assert isinstance(loaded.engine, TimedEngine)
    loaded.engine.kv.close()
    return loaded


@contextmanager
def one_thread() -> Iterator[None]:
    """Of torch, in whatever thread of Python."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Alone:
    """What one engine says that nobody shares: `clients.Answers`."""

    def __init__(self, page_size: int, quantization: str | None = None, *, kv_is_int8: bool = False) -> None:
        num_pages = ceil_div(MOST_TOKENS, page_size)
        model = weights.load(
            MODEL,
            quantization=quantization,
            kv_is_int8=kv_is_int8,
            packing_share=weights.PACKING_SHARE if kv_is_int8 else 0.0,  # as of a worker
        )
        self._engine = Engine(
            model,
            page_size=page_size,
            num_pages=num_pages,
            deterministic=not kv_is_int8,
            vocabulary=tokenizer().open_vocabulary(),
        )
        self._pages = tuple(map(PageId, range(num_pages)))
        self._known: dict[tuple[tuple[int, ...], int, bytes], list[tuple[int, float]]] = {}

    def __call__(self, prompt: Sequence[int], count: int, params: SamplingParams) -> list[tuple[int, float]]:
        key = (tuple(prompt), count, msgspec.msgpack.encode(params))
        if key not in self._known:
            self._known[key] = self._say(prompt, count, params)
        return self._known[key]

    def of_prompt(self, prompt: Sequence[int]) -> list[float]:
        outcome = self._begin(prompt, SamplingParams(prompt_logprobs_from=0))
        self._engine.forget([ONLY])
        ((_, extra),) = outcome.prompt_extras
        return [score.logprob for score in msgspec.msgpack.decode(extra, type=list[TokenScore])]

    def _begin(self, prompt: Sequence[int], params: SamplingParams) -> BatchOutcome:
        """The prompt, and the first token."""
        self._engine.kv.tensor.zero_()
        self._engine.add(Payload(ONLY, array("i", prompt).tobytes(), params, bytes(16)))
        row = Row(ONLY, 0, len(prompt), 0, self._pages, samples=True)
        return self._engine.run(BatchPlan(BatchId(1), 1, BatchKind.PREFILL, rows=(row,)))

    def _say(self, prompt: Sequence[int], count: int, params: SamplingParams) -> list[tuple[int, float]]:
        outcome, found = self._begin(prompt, params), list[tuple[int, float]]()
        while True:
            found.append(scored(outcome))
            if len(found) == count or outcome.flags[0]:
                self._engine.forget([ONLY])
                return found
            number = len(found) + 1
            join = (Join(ONLY, len(self._pages), ()),) if number == 2 else ()
            plan = BatchPlan(BatchId(number), number, BatchKind.DECODE, decodes=True, join=join)
            outcome = self._engine.run(plan)


def scored(outcome: BatchOutcome) -> tuple[int, float]:
    """The one token."""
    (token,) = array("i", outcome.tokens)
    ((_, extra),) = outcome.extras
    return token, msgspec.msgpack.decode(extra, type=TokenScore).logprob


_alone = cache(Alone)  # one for all seeds of a process


def alone(flags: Mapping[str, Any]) -> Alone:
    """One engine of a cluster with these flags."""
    return _alone(flags["page_size"], flags.get("quantization"), kv_is_int8=flags.get("kv_cache_dtype") == "int8")
