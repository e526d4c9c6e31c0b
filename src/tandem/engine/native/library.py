"""The native kernels: one library for each instruction set, built with the package where there is a compiler.

    avx2, avx512   fp32 sums of one order. Both give the same bits, so these are what `--deterministic` computes with.
    avx512_bf16    bf16 products by dot products of pairs; fp32 as above
    amx_bf16       bf16 products and attention by tiles; fp32 as above

The best one that the processor has is taken, at the first use. TANDEM_NATIVE names another one, or says `off`: then,
and where no library was built, everything is computed by torch.

Each thread of Python has its own choice (`use`), for an engine runs on one. Tensors go to C as addresses: they have to
be contiguous, on the host, and of one type, fp32 or bf16.
"""

import ctypes
import os
import threading
from ctypes import POINTER, Structure, byref, c_double, c_int, c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tandem.engine.native import sources

SWITCH = "TANDEM_NATIVE"
OFF = "off"
AVX2 = frozenset({"avx2", "fma", "f16c"})
AVX512 = AVX2 | frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})
# Best first: what a processor has to have, all that `setup.py` compiles for.
NEEDS: dict[str, frozenset[str]] = {
    "amx_bf16": AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"},
    "avx512_bf16": AVX512 | {"avx512_bf16"},
    "avx512": AVX512,
    "avx2": AVX2,
}
ONE_ORDER = ("avx512", "avx2")
SPIN_NS = 200_000  # between two steps it is milliseconds, between two loops of a step it is microseconds
MOST_HEAD_DIM = 512
PACKED = {("amx_bf16", torch.bfloat16), ("avx512_bf16", torch.bfloat16)}  # that multiply packed weights as they lie
SCALED_SUMS = {("avx512_bf16", torch.bfloat16)}  # of packed codes: they multiply the codes, and scale what comes of it
CODES_IN_ROWS = {("amx_bf16", torch.bfloat16)}  # that multiply codes in rows only
PACKED_MULTIPLE = 32  # outputs and inputs of a packed weight
DTYPES = (torch.float32, torch.bfloat16)  # others are torch's

SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, TILE_DATA = 158, 0x1023, 18


class StaleKernels(Exception):
    """What was compiled is not what is there."""


class Codes(Protocol):
    """A weight that is not plain rows: of few bits (`quantized.h`), or packed (`packed.h`, `packed_codes.h`)."""

    @property
    def codes(self) -> Tensor: ...
    @property
    def scales(self) -> Tensor | None: ...
    @property
    def offsets(self) -> Tensor | None: ...
    @property
    def bits(self) -> int: ...
    @property
    def group(self) -> int: ...
    @property
    def is_float8(self) -> bool: ...
    @property
    def is_packed(self) -> bool: ...
    @property
    def has_offsets(self) -> bool: ...
    @property
    def unit(self) -> float: ...
    @property
    def shape(self) -> tuple[int, int]: ...


class LinearView(Structure):
    _fields_ = [
        *(("weight", c_void_p), ("bias", c_void_p), ("outputs", c_int64), ("inputs", c_int64)),
        *(("scales", c_void_p), ("offsets", c_void_p), ("bits", c_int64), ("group", c_int64)),
        *(("is_float8", c_int64), ("is_packed", c_int64), ("has_offsets", c_int64), ("unit", c_double)),
    ]

    @classmethod
    def of(cls, weight: "Tensor | Codes", bias: Tensor | None) -> "LinearView":
        """weight: [outputs, inputs]. Both have to outlive what is returned."""
        at_bias = None if bias is None else bias.data_ptr()
        if isinstance(weight, Tensor):
            assert weight.is_contiguous()
            return cls(weight.data_ptr(), at_bias, *weight.shape)
        scales, offsets = (None if each is None else each.data_ptr() for each in (weight.scales, weight.offsets))
        kind = (weight.bits, weight.group, weight.is_float8, weight.is_packed, weight.has_offsets, weight.unit)
        return cls(weight.codes.data_ptr(), at_bias, *weight.shape, scales, offsets, *kind)


class LayerView(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("input_norm", "q_norm", "k_norm", "post_norm")),
        *((name, LinearView) for name in ("q", "k", "v", "o", "gate", "up", "down")),
    ]


class DecoderView(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("num_layers", "hidden", "heads", "kv_heads", "head_dim", "inner")),
        ("eps", c_double),
        ("layers", POINTER(LayerView)),
        ("kv", c_void_p),
        ("page_size", c_int64),
        ("kv_is_int8", c_int64),
        ("cos", c_void_p),
        ("sin", c_void_p),
    ]


class BatchView(Structure):
    """Arrays of int64: see `attention.h`."""

    _fields_ = [
        ("num_tokens", c_int64),
        *((name, c_void_p) for name in ("positions", "slots", "tables", "pages")),
        ("window", c_int64),
    ]


class ScanView(Structure):
    """Sizes and weights of one layer of Mamba 2: see `scan.h`. The tensors have to outlive it."""

    _fields_ = [
        *((name, c_int64) for name in ("heads", "heads_per_kv", "dim", "size", "groups", "width")),
        *((name, c_void_p) for name in ("conv_weight", "conv_bias", "decay", "dt_bias", "skip", "group")),
    ]


class StatesView(Structure):
    """Where the states of one layer are: see `scan.h`."""

    _fields_ = [("at", c_void_p), *((name, c_int64) for name in ("page_stride", "head_stride", "scanned", "convolved"))]


# One token that is to be drawn: see `sampling.h`.
DRAW = np.dtype(
    [
        *(("logits", np.uint64), ("key", np.uint64), ("top_k", np.int64), ("top_p", np.float64)),
        *(("temperature", np.float32), ("log_min_p", np.float32)),
    ]
)


class Kernels:
    """One library. Every call takes as many threads as torch would."""

    def __init__(self, name: str, path: Path, *, deterministic: bool) -> None:
        """deterministic: whoever computes with them wants a row to keep its bits."""
        self.name = name
        self.deterministic = deterministic
        library = ctypes.CDLL(str(path))
        _refuse_others(library, path)
        self._linear = _function(library.tandem_linear, "ipqppi")
        self._pack = _function(library.tandem_pack, "pqqpi")
        self._pack_codes = _function(library.tandem_pack_codes, "pppi")
        self._plain_rows = _function(library.tandem_plain_rows, "ipqqpi")
        self._rms_norm = _function(library.tandem_rms_norm, "ipqqpdpi")
        self._rotate = _function(library.tandem_rotate, "ipqqqppi")
        self._silu_and_mul = _function(library.tandem_silu_and_mul, "ippqqi")
        self._attention = _function(library.tandem_attention, "ipiqqqqpqqppppi")
        self._layers = _function(library.tandem_layers, "ipppi")
        self._scan = _function(library.tandem_scan, "ippppqppppqi")
        self._take_rows = _function(library.tandem_take_rows, "pqqpqpi", returns=c_int64)
        self._widen = _function(library.tandem_widen, "pqpi")
        self._largest = _function(library.tandem_largest, "pqqppi")
        self._draw = _function(library.tandem_draw, "pqqpi")
        self._spin = _function(library.tandem_spin, "q")
        self.set_spin(SPIN_NS)

    def set_spin(self, nanoseconds: int) -> None:
        """How long a thread that waits for work keeps its core."""
        self._spin(nanoseconds)

    def linear(self, x: Tensor, weight: Tensor | Codes, bias: Tensor | None) -> Tensor:
        """x: [n, inputs], weight: [outputs, inputs]"""
        out = x.new_empty(x.shape[0], weight.shape[0])
        view = LinearView.of(weight, bias)
        self._linear(_is_bf16(x), _address(x), x.shape[0], byref(view), _address(out), torch.get_num_threads())
        return out

    def packs(self, dtype: torch.dtype) -> bool:
        """Whether products take less time with a weight that is packed."""
        return (self.name, dtype) in PACKED

    def pack(self, weight: Tensor) -> Tensor:
        """weight: bf16 [outputs, inputs]; returns what `packed.h` says, [outputs, inputs] that are whole blocks."""
        outputs, inputs = (-(-size // PACKED_MULTIPLE) * PACKED_MULTIPLE for size in weight.shape)
        out = weight.new_empty(outputs, inputs)
        self._pack(_address(weight), *weight.shape, _address(out), torch.get_num_threads())
        return out

    def packs_codes(self, dtype: torch.dtype, weight: Codes) -> bool:
        """The same of a weight of few bits."""
        if (self.name, dtype) in CODES_IN_ROWS:
            return False
        # there offsets are multiplied with the sums of so many inputs
        return (self.name, dtype) not in SCALED_SUMS or not (weight.has_offsets and weight.group % PACKED_MULTIPLE)

    def pack_codes(self, rows: Codes, packed: Codes) -> None:
        """Fills the codes of `packed`, which says what they become."""
        views = (LinearView.of(each, None) for each in (rows, packed))
        self._pack_codes(*map(byref, views), packed.codes.data_ptr(), torch.get_num_threads())

    def plain_rows(self, weight: Codes, first: int, out: Tensor) -> Tensor:
        """Rows of a weight from `first` on, as many as `out` [n, inputs] has."""
        view = LinearView.of(weight, None)
        self._plain_rows(_is_bf16(out), byref(view), first, out.shape[0], _address(out), torch.get_num_threads())
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x: [..., features]"""
        out = torch.empty_like(x)
        features = x.shape[-1]
        rows = x.numel() // features
        self._rms_norm(
            _is_bf16(x), _address(x), rows, features, _address(weight), eps, _address(out), torch.get_num_threads()
        )
        return out

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [n, heads, head_dim], in place; cos, sin: [n, 1, head_dim]"""
        self._rotate(_is_bf16(x), _address(x), *x.shape, _address(cos), _address(sin), torch.get_num_threads())
        return x

    def silu_and_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """[n, features] each; the result is in the memory of `gate`"""
        self._silu_and_mul(_is_bf16(gate), _address(gate), _address(up), *gate.shape, torch.get_num_threads())
        return gate

    def attention(
        self, kv: Tensor, batch: BatchView, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *, layer: int
    ) -> None:
        """kv: [pages, kv_heads, layers, 2, page_size, head_dim], of the same type, or int8 with four bytes more in the
        last dimension; the others: [tokens, heads or kv_heads, head_dim]
        """
        _, kv_heads, layers, _, page_size, _ = kv.shape
        self._attention(
            _is_bf16(q),
            _address(kv),
            kv.dtype == torch.int8,
            page_size,
            kv_heads,
            layers,
            q.shape[2],
            byref(batch),
            layer,
            q.shape[1],
            *map(_address, (q, k, v, out)),
            torch.get_num_threads(),
        )

    def scan(
        self,
        layer: ScanView,
        states: StatesView,
        stretches: np.ndarray,
        begins: np.ndarray,
        own: Tensor,
        shared: Tensor,
        dt: Tensor,
    ) -> Tensor:
        """What `layer` makes of the tokens; their states are left where the stretches say.

        stretches: [s, 4] int64, begins: [r + 1] int64, of r requests; own: [n, heads * dim], shared: [n, 2 * groups *
        size], dt: [n, heads]; returns fp32 [n, heads * dim].
        """
        out = own.new_empty(own.shape, dtype=torch.float32)
        self._scan(
            _is_bf16(own),
            byref(layer),
            byref(states),
            stretches.ctypes.data,
            begins.ctypes.data,
            len(begins) - 1,
            *map(_address, (own, shared, dt, out)),
            own.shape[0],
            torch.get_num_threads(),
        )
        return out

    def taken(self, table: Tensor, rows: Tensor) -> Tensor:
        """table: [m, features], rows: [n] int64; returns [n, features]. Raises IndexError."""
        assert rows.dtype == torch.int64
        assert rows.is_contiguous()
        out = table.new_empty(rows.shape[0], table.shape[1])
        row_bytes = table.shape[1] * table.element_size()
        pointers = (_address(rows), rows.shape[0], _address(out))
        if self._take_rows(_address(table), table.shape[0], row_bytes, *pointers, torch.get_num_threads()):
            raise IndexError(f"there are {table.shape[0]} rows, and not all of {rows.tolist()}")
        return out

    def widened(self, x: Tensor) -> Tensor:
        """As fp32."""
        if x.dtype == torch.float32:
            return x
        out = x.new_empty(x.shape, dtype=torch.float32)
        self._widen(_address(x), x.numel(), _address(out), torch.get_num_threads())
        return out

    def largest(self, logits: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """logits: fp32 [n, vocab]; returns the token of the largest of each row, of equals the lowest, [n] int32, and
        whether all of the row are finite, [n] bool.
        """
        tokens, are_finite = np.empty(len(logits), np.int32), np.empty(len(logits), np.bool_)
        pointers = (tokens.ctypes.data, are_finite.ctypes.data)
        self._largest(_address(logits), *logits.shape, *pointers, torch.get_num_threads())
        return tokens, are_finite

    def draw(self, draws: np.ndarray, vocab: int) -> np.ndarray:
        """draws: [n] of DRAW; returns their tokens, [n] int32."""
        tokens = np.empty(len(draws), np.int32)
        self._draw(draws.ctypes.data, len(draws), vocab, tokens.ctypes.data, torch.get_num_threads())
        return tokens

    def layers(self, model: DecoderView, batch: BatchView, x: Tensor) -> None:
        """All layers of a decoder over x [tokens, hidden], in place."""
        self._layers(_is_bf16(x), byref(model), byref(batch), _address(x), torch.get_num_threads())


_KINDS = {"i": c_int, "q": c_int64, "d": c_double, "p": c_void_p}
_chosen = threading.local()


def in_use() -> Kernels | None:
    """What this thread computes with; None: torch."""
    try:
        return _chosen.kernels
    except AttributeError:
        return use(best())


def use(kernels: Kernels | None) -> Kernels | None:
    _chosen.kernels = kernels
    return kernels


def set_waiting(*, spins: bool) -> None:
    """Of threads that wait for work: whether they keep their cores for a bounded time, or give them away at once."""
    kernels = in_use()
    if kernels is not None:
        kernels.set_spin(SPIN_NS if spins else 0)


def fitting(x: Tensor) -> Kernels | None:
    """What can take this tensor."""
    kernels = in_use()
    if kernels is None or x.device.type != "cpu" or x.dtype not in DTYPES:
        return None
    return kernels if x.is_contiguous() else None


def best(*, deterministic: bool = False) -> Kernels | None:
    """deterministic: of those that sum in one order, whatever TANDEM_NATIVE says except `off`."""
    wanted = os.environ.get(SWITCH, "")
    names = [name for name in NEEDS if not deterministic or name in ONE_ORDER]
    if wanted == OFF:
        return None
    found = available()
    chosen = next((name for name in ([wanted] if wanted in names else names) if name in found), None)
    return None if chosen is None else opened(chosen, deterministic=deterministic)


@cache
def available() -> tuple[str, ...]:
    """The libraries that were built and that this processor runs, best first."""
    has = processor_flags()
    return tuple(name for name, needs in NEEDS.items() if needs <= has and _path(name) is not None and _may_run(name))


@cache
def opened(name: str, *, deterministic: bool = False) -> Kernels:
    """name: one of `available`. deterministic: as of `Kernels`. Raises StaleKernels."""
    path = _path(name)
    assert path is not None
    return Kernels(name, path, deterministic=deterministic)


@cache
def processor_flags() -> frozenset[str]:
    """Empty where the system does not tell: then nothing native runs."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":")[1] for line in lines if line.startswith("flags")), "").split())


def _path(name: str) -> Path | None:
    return next(iter(sorted(Path(__file__).parent.glob(f"kernels_{name}.*.so"))), None)


def _may_run(name: str) -> bool:
    """The system lends a process the tile registers when it asks for them."""
    if name != "amx_bf16":
        return True
    return ctypes.CDLL(None).syscall(SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0


def _refuse_others(library: ctypes.CDLL, path: Path) -> None:
    """Raises StaleKernels for one that was compiled from other sources."""
    told = getattr(library, "tandem_sources", None)
    if told is not None:
        told.restype = c_uint64
    if told is None or told() != sources.digest():
        raise StaleKernels(
            f"the native kernels in {path} were compiled from other sources than those that are there now; install "
            "Tandem again (make setup, or pip install)"
        )


def _function(
    function: "ctypes._NamedFuncPointer", kinds: str, *, returns: type[c_int64] | None = None
) -> "ctypes._NamedFuncPointer":
    function.argtypes = [_KINDS[kind] for kind in kinds]
    function.restype = returns
    return function


def _is_bf16(x: Tensor) -> int:
    return x.dtype == torch.bfloat16


def _address(x: Tensor) -> int:
    return x.data_ptr()
