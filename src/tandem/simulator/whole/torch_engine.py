"""The product's own engine in the workers of a simulated cluster, and what it has to answer.

A worker makes it as a worker process does: checkpoint, self-check, pool, kernels. In the place of its own is its time:
a batch takes as long as one of `engine.py`, in virtual time, and computing takes none. KV memory is the product's, too;
what its descriptor refers to is the virtual machine's affair (`memory.py`).

The right answer is what one engine says that nobody shares, asked for one prompt at a time. `--deterministic` makes the
two equal to the last bit, log-probabilities too, whatever batches, chunks, cuts and pages a request has come through;
`with_torch` says what does where that flag cannot be.
What is wrong in every engine alike is not seen here: that the model computes what it should is for tests of the engine.

Another processor may round otherwise, so hashes of logs are those of one machine.
"""

import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from math import nan
from pathlib import Path
from random import Random
from typing import Any  # values of flags, and what is handed on to an `Engine`

import msgspec
import torch
from msgspec import structs

from tandem.core.batch import BatchKind, BatchOutcome, BatchPlan, Join, Row
from tandem.core.values import BatchId, PageId, RequestId, ceil_div
from tandem.engine import digest_cache, weights, weights_digest
from tandem.engine.digest_cache import DigestCache
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
from tandem.simulator.whole.options import ENCODER, TORCH, Options
from tandem.simulator.whole.random_models import BERT as ENCODING
from tandem.simulator.whole.random_models import GEMMA as WINDOWED
from tandem.simulator.whole.random_models import GRANITE as STATES
from tandem.simulator.whole.random_models import LLAMA as PLAIN_LAYERS
from tandem.simulator.whole.random_models import SDAR as BLOCKS
from tandem.simulator.whole.random_models import checkpoint
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
STATES_ONE_IN = 6  # of the seeds whose replicas are one worker each, and that have no other model
CONTEXT, FORMED_CONTEXT = 256, 512  # tokens: enough for every request


def with_torch(options: Options) -> Options:
    """The same world, but for what is not known of the answers of the product's engine.

    model     the bundled one, unless the seed has drawn what that is not (`random_models.py`)
    bytes     connections and frames are wider by as much as pages are larger; those of HTTP are as wide as usual
    delays    what workers say is not late where replicas have several: a batch has dozens of sums that wait for it, and
              one of the other engine a single one

    Some seeds have weights of 8 or 4 bits, which the other engine knows nothing of, KV of 8, or states in their pages.

    *Without --deterministic*, which excludes some of that or is not measured with it, a row has its bits anyway where
    native kernels compute in replicas of one worker: each of their sums goes in one order, whatever else is in the
    batch. DP ranks that step together, shards with KV of 8 bits, and those that find blocks cut sums, so in the models
    that they have none of those has a second term (`random_models.py`). Attention of prompts in blocks is torch's,
    which rounds by the shape of a chunk, in the seventh digit; only tokens are compared there. Vectors are compared as
    sums of parts allow.

    Seeds on record have the bundled model only, in which a row samples one token at a time and no layer has a window,
    no ranks that step together, nothing that makes vectors, and nobody who asks for a form.
    """
    is_older, has_kernels = options.seed < FIRST_OFF_RECORD, library.best() is not None
    left_out = set[str]()
    if is_older or not has_kernels:
        left_out |= {*VECTORS, *(TOGETHER if "enable_dp_attention" in options.flags else ())}
    if is_older:
        left_out |= {*FORMS}
    flags = {**_without(options.flags, left_out), "deterministic": True, "cpu_threads": 1}
    roles = {role: _without(flags, left_out) for role, flags in options.roles.items()}
    has_groups = any(of.get(size, 1) > 1 for of in (flags, *roles.values()) for size in SIZES)
    vectors = options.vectors if "is_embedding" in flags else ""
    model = "" if is_older else _model_of(options, flags, has_states=has_kernels and not has_groups)
    if not model and not vectors:
        flags |= draw_bits(options.seed, may_be_of_kv=has_kernels)
        model = PLAIN_LAYERS if has_groups and "kv_cache_dtype" in flags else ""
    if vectors or model in (STATES, BLOCKS) or "enable_dp_attention" in flags:
        flags["deterministic"] = False
    if model == WINDOWED:  # pages lose their window parts where prompts are known to leave some of the pool
        flags["context_length"] = FORMED_CONTEXT if options.formed else CONTEXT
    narrows = options.narrows
    return replace(
        options,
        engine=TORCH,
        model=model,
        flags=flags,
        roles=roles,
        block_tokens=options.block_tokens if model == BLOCKS else 1,
        window_tokens=options.window_tokens if model == WINDOWED else 0,
        vectors=vectors,
        formed=0.0 if is_older else options.formed,
        tcp_capacity=TCP_CAPACITY,
        narrows=replace(
            narrows,
            peer_capacity=_wider(narrows.peer_capacity),
            frame_bytes=_wider(narrows.frame_bytes),
            page_delay_ns=None if has_groups else narrows.page_delay_ns,
        ),
    )


def _model_of(options: Options, flags: Mapping[str, Any], *, has_states: bool) -> str:
    """flags: of all servers."""
    if options.vectors:
        return ENCODING if options.vectors == ENCODER and "is_embedding" in flags else ""
    if options.block_tokens > 1:
        return BLOCKS
    if options.window_tokens:
        return WINDOWED
    if "enable_dp_attention" in flags:
        return PLAIN_LAYERS
    return STATES if has_states and not Random(f"whole states {options.seed}").randrange(STATES_ONE_IN) else ""


def draw_bits(seed: int, *, may_be_of_kv: bool) -> dict[str, Any]:
    """From randomness of its own: whatever else a seed is like does not depend on it."""
    random = Random(f"whole weights {seed}")
    if seed < FIRST_OFF_RECORD or random.randrange(QUANTISED_ONE_IN):
        return {}
    flags: dict[str, Any] = {"quantization": random.choice(("int8", "int4"))}
    if may_be_of_kv and random.random() < 0.5:
        flags = {"kv_cache_dtype": "int8", "deterministic": False}
    return flags


def folder_of(options: Options) -> Path:
    """Of the checkpoint that all servers have."""
    if not options.model:
        return MODEL
    return checkpoint(options.model, window_tokens=options.window_tokens, block_tokens=options.block_tokens)


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


@dataclass(frozen=True, slots=True)
class Computed:
    """`Future`, of which nobody waits for the result."""

    value: str

    def result(self) -> str:
        return self.value


class InTurn:
    """`ThreadPoolExecutor`, without threads: one that waits for a real one holds up the virtual machine for ever."""

    def __init__(self, max_workers: int, *, thread_name_prefix: str) -> None:
        """However many they would be."""

    def __enter__(self) -> "InTurn":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is under way."""

    def submit(self, compute: Callable[[memoryview], str], data: memoryview) -> Computed:
        return Computed(compute(data))


def of_workers(model: PlainModel) -> list[Replacement]:
    """For `virtual_machine`: what `worker_process.load_engine` makes."""
    return [
        (worker_process, "Engine", partial(TimedEngine, base_s=model.base_s, token_s=model.token_s)),
        (collectives, "PIECE_BYTES", WIDER * collectives.PIECE_BYTES),
        (weights_digest, "ThreadPoolExecutor", InTurn),
        (digest_cache, "default_path", lambda: None),  # what was computed before is no part of a seed
    ]


def load_engine(launch: Launch, place: WorkerPlace) -> Loaded:
    """As a worker process does. The memory stays when its descriptor, which is one of the real machine, is given back.

    Raises as `worker_process.load_engine`.
    """
    loaded = worker_process.load_engine(launch, place)
    engine = loaded.engine
    assert isinstance(engine, TimedEngine)
    engine.kv.close()
    engine.kv.free_windows = partial(_give_back, engine)
    return loaded


def _give_back(engine: TimedEngine, pages: Iterable[int]) -> None:
    """All of it: the parts of these small pages may be less than a page of the system, and would stay as they are."""
    kv, runs = engine.kv, engine.model.kv_shape.window_runs(page_size=engine.page_size, dtype=engine.model.dtype)
    assert kv.buffer is not None
    for page in pages:
        for run in runs:
            kv.buffer[page * kv.page_bytes + run.start : page * kv.page_bytes + run.stop] = bytes(len(run))


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

    def __init__(
        self,
        folder: Path,
        *,
        page_size: int,
        quantization: str | None,
        kv_is_int8: bool,
        is_embedding: bool,
        deterministic: bool,
    ) -> None:
        num_pages = ceil_div(MOST_TOKENS, page_size)
        model = weights.load(
            folder,
            quantization=quantization,
            kv_is_int8=kv_is_int8,
            is_embedding=is_embedding,
            cache=DigestCache(None),
            packing_share=0.0 if deterministic else weights.PACKING_SHARE,  # as of a worker
        )
        self._engine = Engine(
            model,
            page_size=page_size,
            num_pages=num_pages,
            deterministic=deterministic,
            vocabulary=tokenizer().open_vocabulary(),
        )
        self._has_scores = model.config.blocks is None
        self._pages = tuple(map(PageId, range(num_pages)))
        self._known: dict[tuple[tuple[int, ...], int, bytes], list[tuple[int, float]]] = {}

    def __call__(self, prompt: Sequence[int], count: int, params: SamplingParams) -> list[tuple[int, float]]:
        key = (tuple(prompt), count, msgspec.msgpack.encode(params))
        if key not in self._known:
            self._known[key] = self._say(prompt, count, structs.replace(params, logprobs=self._has_scores))
        return self._known[key]

    def of_prompt(self, prompt: Sequence[int]) -> list[float]:
        outcome = self._begin(prompt, SamplingParams(prompt_logprobs_from=0))
        ((_, extra),) = outcome.prompt_extras
        return [score.logprob for score in msgspec.msgpack.decode(extra, type=list[TokenScore])]

    def vector(self, prompt: Sequence[int]) -> list[float]:
        ((_, vector),) = self._begin(prompt, SamplingParams(), pools=True).vectors
        return array("f", vector).tolist()

    def _begin(self, prompt: Sequence[int], params: SamplingParams, *, pools: bool = False) -> BatchOutcome:
        """The prompt, and what comes with its last token."""
        self._engine.forget([ONLY])
        self._engine.kv.tensor.zero_()
        self._engine.add(Payload(ONLY, array("i", prompt).tobytes(), params, bytes(16)))
        row = Row(ONLY, 0, len(prompt), 0, self._pages, samples=not pools, pools=pools)
        return self._engine.run(BatchPlan(BatchId(1), 1, BatchKind.PREFILL, rows=(row,)))

    def _say(self, prompt: Sequence[int], count: int, params: SamplingParams) -> list[tuple[int, float]]:
        outcome, found = self._begin(prompt, params), list[tuple[int, float]]()
        number = 1
        while True:
            found += scored(outcome)
            if len(found) >= count or outcome.flags[0]:
                return found[:count]
            number += 1
            join = (Join(ONLY, len(self._pages), ()),) if number == 2 else ()
            plan = BatchPlan(BatchId(number), number, BatchKind.DECODE, decodes=True, join=join)
            outcome = self._engine.run(plan)


def scored(outcome: BatchOutcome) -> list[tuple[int, float]]:
    """The one token, or those of a block, which have no scores."""
    tokens = array("i", outcome.tokens)
    scores = [msgspec.msgpack.decode(extra, type=TokenScore).logprob for _, extra in outcome.extras]
    return list(zip(tokens, scores or [nan] * len(tokens), strict=True))


_alone = cache(Alone)  # one for all seeds of a process


def alone(flags: Mapping[str, Any], folder: Path = MODEL) -> Alone:
    """One engine of a cluster with these flags. folder: of its checkpoint."""
    return _alone(
        folder,
        page_size=flags["page_size"],
        quantization=flags.get("quantization"),
        kv_is_int8=flags.get("kv_cache_dtype") == "int8",
        is_embedding=flags.get("is_embedding", False),
        deterministic=flags.get("deterministic", True),
    )
