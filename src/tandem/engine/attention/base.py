"""The port behind which attention is computed. A backend serves one KV memory and one thread.

Each step: `plan` once, then `forward` once per layer, in order of the layers. What a plan holds is the backend's own
affair and is valid until the next `plan`. Nothing that `forward` returns is touched again by the backend; what it is
given it may read only, the KV memory excepted.
"""

import importlib
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable  # Any: what a backend reserves is its own affair

from torch import Tensor

from tandem.engine.attention.table import ATTENTION_BACKENDS, BLOCKS, BOTH_WAYS
from tandem.engine.batch import Batch
from tandem.engine.documents import ModelError
from tandem.engine.kv_memory import KvMemory
from tandem.logtext import shown


@dataclass(frozen=True, slots=True)
class AttentionRules:
    """What a model wants of the layers of one stage. `score = scale * q @ k`, capped, is what the softmax is of."""

    windows: tuple[int | None, ...]  # of each layer: tokens that a query sees, itself included; None: all before it
    scale: float
    soft_cap: float | None = None  # `soft_cap * tanh(score / soft_cap)`
    looks_both_ways: bool = False  # an encoder: a query sees all keys of its prompt, and nothing is kept of them
    block_tokens: int = 1  # a query sees all keys up to the end of its block of so many


class AttentionBackend(Protocol):
    """What a model calls between the two halves of a layer."""

    @property
    def needs_tiles(self) -> bool:
        """Whether rows keep their bits only in tiles (`rows.py`): the batch has to be arranged so."""
        ...

    def plan(self, batch: Batch) -> None:
        """Get ready for a batch: everything that is the same for all layers (masks, gathers, buckets)."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, layer: int) -> Tensor:
        """Write keys and values of the batch's tokens to their slots, then let every query see all keys up to its own
        position (and, in a layer with a window, only the latest of them).

        q: [t, num_heads, head_dim], k and v: [t, num_kv_heads, head_dim], in the order of the batch's tokens, no
        padding; heads are those of this shard, and query head i goes with KV head i * num_kv_heads // num_heads.
        Returns [t, num_heads, head_dim].
        """
        ...


@runtime_checkable
class ReservingBackend(AttentionBackend, Protocol):
    """One whose launches can be captured and replayed (`cuda_graphs.py`): they read what is planned from tensors that
    stay where they are.
    """

    def reserve(self, rows: int, *, width: int) -> Any:
        """Room to plan so many decoding rows of at most `width` pages each. Before it is planned into it is zeros."""
        ...

    def plan_into(self, reserved: Any, batch: Batch) -> None:
        """As `plan`, of as many decoding rows as were reserved and nothing else."""
        ...


class AttentionFactory(Protocol):
    """How a backend is made."""

    def __call__(self, kv: KvMemory, *, rules: AttentionRules, deterministic: bool) -> AttentionBackend:
        """kv: where keys and values lie; stays its owner's. rules: of its layers at least.

        deterministic: the output for a token must depend on nothing but its request's tokens up to it: not on what
        else is in the batch, how the prompt is cut, or which pages hold it. Raises ModelError where that, or anything
        else that was asked for, cannot be had.
        """
        ...


def attention_backend(name: str, *, looks_both_ways: bool = False, block_tokens: int = 1) -> AttentionFactory:
    """looks_both_ways, block_tokens: of an encoder, or a model of block diffusion, whose attention is one and the same.
    Raises ModelError for a name that is not in the table, or not theirs.
    """
    if name not in ATTENTION_BACKENDS:
        raise ModelError(f"the attention backend {shown(name)} is not known; known are {', '.join(ATTENTION_BACKENDS)}")
    looks_ahead = "an encoder" if looks_both_ways else "a model of block diffusion" if block_tokens > 1 else ""
    if looks_ahead and name in ("native", "triton"):
        raise ModelError(f"--attention-backend {name} looks back only; leave it out for {looks_ahead}")
    one_and_only = BOTH_WAYS if looks_both_ways else BLOCKS if block_tokens > 1 else None
    module, _, kind = (one_and_only or ATTENTION_BACKENDS[name]).partition(":")
    try:
        return getattr(importlib.import_module(module), kind)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ModelError(f"--attention-backend {name} needs Triton: pip install 'tandem-llm[cuda]'") from None
