"""Attention by the native kernels: keys and values are read in place from their pages, and nothing is masked or padded.

Layers may have windows of their own. Scores that are capped, or divided by anything but the root of the head dimension,
are torch's.

The bits of a token's output depend on its own keys only (`native/attention.h`), so under `--deterministic` the batch
needs no arrangement, provided that the kernels are those of one order: `library.best(deterministic=True)`.
"""

from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from tandem.engine.attention.base import AttentionBackend, AttentionRules, attention_backend
from tandem.engine.attention.torch_sdpa import TorchSdpa
from tandem.engine.batch import Batch
from tandem.engine.documents import ModelError
from tandem.engine.kv_memory import KvMemory
from tandem.engine.native import library
from tandem.engine.native.library import BatchView, Kernels


class NativeAttention:
    """An `AttentionBackend`."""

    needs_tiles = False

    def __init__(self, kv: KvMemory, *, rules: AttentionRules, deterministic: bool) -> None:
        if not fits(kv, rules):
            raise ModelError(
                "--attention-backend native cannot compute the scores of this model (a soft cap, or a divisor that is "
                "not the head dimension); use --attention-backend torch_native"
            )
        kernels = kernels_for(kv, deterministic=deterministic)
        if kernels is None:
            raise ModelError(
                "--attention-backend native has no kernel here: it needs a processor with AVX2, a C++ compiler when "
                f"Tandem is installed, float32 or bfloat16 on the CPU, heads of at most {library.MOST_HEAD_DIM}, and "
                f"{library.SWITCH} not off; use --attention-backend torch_native"
            )
        self.kv = kv
        self.kernels = kernels
        self.view = BatchView()  # of all layers, where they see alike; else of no token
        self._windows = [window or 0 for window in rules.windows[: kv.num_cells]]
        self._views: dict[int, BatchView] = {}  # by window
        self._arrays: tuple[np.ndarray, ...] = ()  # which the views point to

    def plan(self, batch: Batch) -> None:
        self.view = BatchView()
        positions = batch.rows.tokens(batch.positions).numpy()
        tables = np.empty(len(positions), dtype=np.int64)
        pages, filled = [], 0
        for chunk in batch.chunks:
            tables[chunk.first : chunk.last] = filled
            pages.append(chunk.pages)
            filled += len(chunk.pages)
        if (rows := batch.decoding) is not None:
            count, width = rows.tables.shape
            tables[rows.first : rows.first + count] = filled + width * np.arange(count)
            pages.append(rows.tables.reshape(-1))
        self._arrays = (positions, np.ascontiguousarray(batch.slots), tables, np.concatenate(pages))
        addresses = [array.ctypes.data for array in self._arrays]
        self._views = {window: BatchView(len(positions), *addresses, window) for window in self._windows}
        if len(self._views) == 1:
            (self.view,) = self._views.values()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, layer: int) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype)
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        view = self._views[self._windows[layer]]
        self.kernels.attention(self.kv.tensor, view, q, k, v, out, layer=layer)
        return out


def kernels_for(kv: KvMemory, *, deterministic: bool) -> Kernels | None:
    """What reads this memory."""
    if kv.tensor.device.type != "cpu" or kv.head_dim > library.MOST_HEAD_DIM:
        return None
    if kv.dtype not in library.DTYPES:
        return None
    return library.best(deterministic=deterministic)


def fits(kv: KvMemory, rules: AttentionRules) -> bool:
    """Whether the kernels compute these scores."""
    return rules.soft_cap is None and rules.scale == kv.head_dim**-0.5


def automatic(kv: KvMemory, *, rules: AttentionRules, deterministic: bool) -> AttentionBackend:
    """The native kernels where they are and compute what is wanted, Triton's on an NVIDIA device, else plain torch."""
    if kv.tensor.device.type == "cuda" and not kv.is_int8 and not deterministic and find_spec("triton") is not None:
        return attention_backend("triton")(kv, rules=rules, deterministic=False)
    is_native = fits(kv, rules) and kernels_for(kv, deterministic=deterministic) is not None
    kind = NativeAttention if is_native else TorchSdpa
    return kind(kv, rules=rules, deterministic=deterministic)
