"""Runs `BatchPlan`s: one worker's part of the model, one thread, synchronous. Decides nothing.

What a plan does to tokens, page tables and decode sets is in `batch_tables.py`; here is the forward pass. A plan that
speaks of pages or tokens that the engine does not have is a bug of the caller and raises; the requests of that
batch are then in an unknown state, all others are untouched.

deterministic=True: the logits of a row depend on its own tokens only (see `rows.py`), provided that the libraries
below do their part, which needs an environment (`determinism.py`) and is measured at start (`self_check.py`).

Of several workers all run the same plans in the same order, and one samples. The others take its tokens as late as
they can (`late_tokens.py`): a batch whose requests had no part in the batch before begins while that one is on later
stages. So the chunks of a prompt and the micro-batches of those who decode follow each other through the pipeline, and
nothing is asked of anybody on the way. The tokens of blocks (`denoising.py`) are told pass by pass instead.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable

import msgspec
import torch
from msgspec import UNSET, UnsetType

from tandem.batch_tables import BatchTables
from tandem.core.batch import BatchOutcome, BatchPlan, TokenFlag
from tandem.core.values import Nanos, RequestId
from tandem.engine.attention.base import ReservingBackend, attention_backend
from tandem.engine.attention.table import DEFAULT_ATTENTION_BACKEND
from tandem.engine.batch import BatchBuilder
from tandem.engine.context_parallel import SharedPrompts
from tandem.engine.cuda_graphs import CudaGraph, DecodeGraphs, Graph, can_be_captured
from tandem.engine.decode_set import ArrayDecodeSet
from tandem.engine.denoising import Denoiser
from tandem.engine.kv_memory import KvMemory
from tandem.engine.late_tokens import LateTokens, RunBatch
from tandem.engine.models.base import Step
from tandem.engine.native import library
from tandem.engine.parallel import ContextRanks, DpRanks, OneContext, OneRank, OneStage, Pipeline
from tandem.engine.pooling import Vectors, pooled
from tandem.engine.prompt_scores import prompt_scores
from tandem.engine.recurrent_states import RecurrentStates
from tandem.engine.sampler import Sampled, sample
from tandem.engine.sequence import EngineSequence
from tandem.engine.stages import behind_all_layers
from tandem.engine.weights import LoadedModel
from tandem.grammar import Matcher, Vocabulary, look_ahead
from tandem.sampling import Payload

_EXTRA = msgspec.msgpack.Encoder()
ONE_STAGE = OneStage()
ONE_RANK = OneRank()
ONE_CONTEXT = OneContext()
DEFAULT_THRESHOLD = 0.95  # as in SGLang
PromptExtras = tuple[tuple[RequestId, bytes], ...]


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
        pipeline: Pipeline = ONE_STAGE,
        ranks: DpRanks = ONE_RANK,
        context: ContextRanks = ONE_CONTEXT,
        vocabulary: Vocabulary | None = None,
        block_threshold: float = DEFAULT_THRESHOLD,
        maps_kv: bool = True,
        graph_rows: int = 0,
        new_graph: Callable[[], Graph] = CudaGraph,
    ) -> None:
        """`model` is the part of the stage that `pipeline` names; `vocabulary` is for grammars, where it samples;
        `block_threshold` is as `Denoiser` has it; `maps_kv` as `KvMemory`; `graph_rows`: up to so many are decoded by
        graphs, where that can be.

        Raises ModelError for an attention backend that is not known or cannot do what this model needs.
        """
        rules, blocks = model.attention, model.config.blocks
        open_attention = attention_backend(
            attention, looks_both_ways=rules.looks_both_ways, block_tokens=rules.block_tokens
        )
        self.model = model
        self.page_size = page_size
        graph_rows = graph_rows if can_be_captured(model) else 0
        num_scratch = 1 if graph_rows else 0  # pages behind those of requests
        self.kv = KvMemory(
            model.kv_shape,
            page_size=page_size,
            num_pages=num_pages + num_scratch,
            dtype=model.dtype,
            device=model.device,
            is_mapped=maps_kv,
        )
        kernels = library.best(deterministic=deterministic) if model.dtype in library.DTYPES else None
        self._kernels = library.use(kernels)
        self._attention = open_attention(self.kv, rules=rules, deterministic=deterministic)
        state = model.kv_shape.state
        self._states = RecurrentStates(self.kv, state) if state is not None else None
        self._batches = BatchBuilder(page_size=page_size, device=model.device, tiles=self._attention.needs_tiles)
        self._decode_sets: defaultdict[int, ArrayDecodeSet] = defaultdict(ArrayDecodeSet)  # by micro-batch
        self._tables: BatchTables[EngineSequence] = BatchTables(self._decode_sets, block_tokens=rules.block_tokens)
        self._denoiser = (
            Denoiser(model, blocks, self.kv, self._attention, pipeline, threshold=block_threshold)
            if blocks is not None
            else None
        )
        self._pipeline = pipeline
        self._ranks = ranks
        self._context = SharedPrompts(context, self._attention, self.kv)
        self._is_first_context = context.shard.rank == 0
        self._vocabulary = vocabulary if pipeline.samples else None
        self._late_tokens = LateTokens(self._tables, pipeline)
        self._has_graphs = bool(graph_rows) or torch.device(model.device).type == "cuda"
        self._replayed: bool | UnsetType = UNSET  # the batch, where there are graphs
        self._graphs = self._captured(graph_rows, new_graph) if graph_rows else None

    @torch.inference_mode()
    def _captured(self, most_rows: int, new_graph: Callable[[], Graph]) -> DecodeGraphs | None:
        """None where attention cannot be captured."""
        if not isinstance(self._attention, ReservingBackend):
            return None
        scratch_page = self.kv.num_pages - 1
        return DecodeGraphs(
            self.model.module,
            self._attention,
            most_rows=most_rows,
            max_tokens=min(self.model.max_context, scratch_page * self.page_size),
            page_size=self.page_size,
            scratch_page=scratch_page,
            device=self.model.device,
            new_graph=new_graph,
        )

    def add(self, payload: Payload) -> None:
        """Make a request known. Must come before the first plan that names it.

        A second time replaces its prompt: it was rendered anew, and no plan that named it is to come or under way.
        """
        self._tables.add(EngineSequence.of(payload, page_size=self.page_size, matcher=self._matcher_of(payload)))

    def prepare(self, payload: Payload) -> None:
        """Compile its grammar, so that `add` need not. From any thread; takes no part in what the others do."""
        self._matcher_of(payload)

    def _matcher_of(self, payload: Payload) -> Matcher | None:
        params = payload.sampling
        if not params.grammar or self._vocabulary is None:
            return None
        return self._vocabulary.matcher(params.grammar, eos_ids=self.model.eos_ids, ignores_eos=params.ignore_eos)

    def forget(self, requests: Iterable[int]) -> None:
        """Drop tokens and tables, and the place in the decode set. Unknown requests are ignored."""
        gone = set(requests)
        self._late_tokens.before_forgetting(gone)
        self._tables.forget(gone)

    @property
    def kernels(self) -> str:
        """What computes: for people."""
        attention = f"attention by {type(self._attention).__name__}"
        if self.model.config.transformers is not None:
            return f"layers by {self.model.config.transformers.library}, {attention}"
        graphs = ", decoding by CUDA graphs" if self._graphs is not None else ""
        packed = " with packed weights" if self.model.is_packed else ""
        products = f"products by {self._kernels.name if self._kernels is not None else 'torch'}{packed}"
        return f"{products}, {attention}{graphs}"

    def close(self) -> None:
        self.kv.close()

    @torch.inference_mode()
    def run(self, plan: BatchPlan) -> BatchOutcome:
        """Apply the plan's changes, run the forward pass, sample. Where another worker samples, there are no tokens.

        Raises only for bugs, for a failing device, and when another worker is gone.
        """
        started = time.perf_counter_ns()
        library.use(self._kernels)
        self._late_tokens.before(plan)
        spans = self._tables.apply(plan)
        batch = RunBatch(plan, spans, self._tables.sampling(plan, spans))
        self._replayed = False if self._has_graphs else UNSET
        sampled, scores, vectors = self._forward(batch)
        if batch.samplers and sampled is None:
            self._late_tokens.wait_for(batch)
            return BatchOutcome(plan.id, plan.iteration, b"", b"", duration_ns=since(started))
        sampled = sampled if sampled is not None else sample(torch.empty(0, 1), [], eos_ids=())
        if batch.samplers and self._denoiser is None:  # else they were told pass by pass
            self._pipeline.send_tokens(sampled.tokens)
        hashes = self._tables.finish(plan, spans, sampled.tokens.tolist())
        flags = _with_ends(sampled.flags, [sequence.matcher for sequence in batch.samplers])
        look_ahead(matcher for member in self._tables.members(plan) if (matcher := member.matcher) is not None)
        return BatchOutcome(
            batch=plan.id,
            iteration=plan.iteration,
            tokens=(sampled.tokens if sampled.said is None else sampled.said).astype("<i4").tobytes(),
            flags=flags,
            hashes=tuple(hashes) if self._pipeline.samples else (),
            extras=tuple((batch.samplers[row].request, _EXTRA.encode(score)) for row, score in sampled.scores.items()),
            prompt_extras=scores,
            vectors=vectors,
            duration_ns=since(started),
            counts=sampled.counts,
            prefill_ranks=self._ranks.num_prefill_ranks,
            cuda_graph=self._replayed,
        )

    @torch.inference_mode()
    def accompany(self) -> None:
        """Take part in a step without a batch. Raises as `run`."""
        library.use(self._kernels)
        if self._ranks.meet(None):
            self.model.module.accompany()

    def _forward(self, batch: RunBatch[EngineSequence]) -> tuple[Sampled | None, PromptExtras, Vectors]:
        """The tokens, where they are sampled, what was asked of the prompts, and the vectors that they end with."""
        model, pipeline = self.model.module, self._pipeline
        if not batch.spans and not batch.samplers:
            if self._ranks.meet(0):
                model.accompany()
            return None, (), ()
        if self._denoiser is not None:
            return self._denoiser.run(self._tables.inputs(batch.plan, batch.spans), batch.samplers), (), ()
        decode_set = self._decode_sets[batch.plan.micro_batch] if batch.plan.decodes else None
        rows = self._batches.build(batch.spans, decode_set)
        self._ranks.meet(len(rows.token_ids), has_prompts=bool(batch.spans))
        self.kv.clear(rows.pages_to_clear)
        if self._graphs is not None and (logits := self._graphs.logits(rows)) is not None:
            self._replayed = True
            return sample(logits, [s.draw() for s in batch.samplers], eos_ids=self.model.eos_ids), (), ()
        if self._states is not None:
            self._states.plan(rows)
        shared = self._context.share(batch.spans)
        own = rows if shared is None else self._batches.build(shared, decode_set)
        if shared is None:
            self._attention.plan(rows)
        else:
            self._context.plan_part(own, rows)
        attention = self._attention if shared is None else self._context
        hidden = behind_all_layers(self.model, pipeline, Step(own, attention, self._states))
        if hidden is None:
            return None, (), ()
        if shared is not None:
            hidden = self._context.whole_states(own, rows, hidden)
        if not self._is_first_context:
            return None, (), ()
        vectors = pooled(self.model, rows, hidden, batch.spans) if pipeline.samples else ()
        scores = prompt_scores(model, rows, hidden, batch.spans, is_told=pipeline.samples)
        if not batch.samplers:
            return None, scores, vectors
        logits = model.logits(rows, hidden)  # all shards of the stage have a part in them
        if not pipeline.samples:
            return None, (), ()
        return sample(logits, [s.draw() for s in batch.samplers], eos_ids=self.model.eos_ids), scores, vectors


def since(started: int) -> Nanos:
    return Nanos(time.perf_counter_ns() - started)


def _with_ends(flags: bytes, matchers: list[Matcher | None]) -> bytes:
    """A token after which a grammar allows nothing is the last one. `matchers`, of all rows, have got theirs."""
    ends = [TokenFlag.STOP if matcher is not None and matcher.is_finished else 0 for matcher in matchers]
    return bytes(flag | end for flag, end in zip(flags, ends, strict=True)) if any(ends) else flags
