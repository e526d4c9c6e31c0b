"""What a model takes its tensors from, checked against what `config.json` says of it."""

import math
from collections.abc import Collection

import torch
from torch import Tensor

from tandem.engine.checkpoint import Checkpoint
from tandem.engine.documents import ModelError
from tandem.engine.layers.packed import PackedCodes, PackedWeight
from tandem.engine.layers.quantized import GROUPS, LinearWeight, QuantizedWeight, Table, quantized
from tandem.engine.layers.weights import WHOLE
from tandem.engine.native.library import Kernels
from tandem.engine.progress import LoggedProgress
from tandem.engine.quantization import Quantization
from tandem.engine.quantized_formats import StoredTensors, read_quantized, refuse_cut_groups
from tandem.logtext import shown

STORED = ("F32", "BF16", "F16")
MARKS = ("BOOL", "U8", "I64")  # of masks and positions that older checkpoints hold, and nobody computes with


class WeightSource:
    """Hands tensors to a model: checked, in the wanted type, on the wanted device. Remembers which it handed out, and
    says in the log how far that has come.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype,
        device: str,
        quantization: Quantization | None = None,
        packing: Kernels | None = None,
        has_data: bool = True,
    ) -> None:
        """packing: what linear layers are packed for."""
        self.dtype = dtype
        self.device = device
        self.taken: list[str] = []
        self._sizes: dict[str, int] = {}  # numbers that weights stand for, by name: some are asked for part by part
        self._progress = LoggedProgress("loading: tensors", len(checkpoint.names()))
        self.packed_bytes: list[tuple[int, int]] = []  # address and length of what was packed, and is not read any more
        self._checkpoint = checkpoint
        self._quantization = quantization
        self._packing = packing
        self._has_rows = False  # linear layers that are not packed
        self._has_data = has_data

    def elsewhere(self) -> "WeightSource":
        other = WeightSource(
            self._checkpoint, dtype=self.dtype, device=self.device, quantization=self._quantization, has_data=False
        )
        other.taken, other._sizes, other._progress = self.taken, self._sizes, self._progress  # of the whole model
        return other

    @property
    def num_parameters(self) -> int:
        """Of the whole model, as far as it was handed out."""
        return sum(self._sizes.values())

    def take(self, name: str, *shape: int, rows: slice = WHOLE, columns: slice = WHOLE) -> Tensor:
        stored, found = self._checkpoint.dtype_of(name), self._checkpoint.shape_of(name)
        if found != shape:
            raise ModelError(
                f"the tensor {name} has the shape {shown(found)}, config.json asks for {shape}; "
                "weights and config.json belong to different models"
            )
        refuse_other_types(name, stored, STORED)
        self.taken.append(name)
        self._count(name, shape)
        if not self._has_data:
            return torch.empty(0, dtype=self.dtype, device=self.device)
        part = self._checkpoint.tensor(name)[rows]
        if part.ndim > 1:
            part = part[:, columns].contiguous()  # a part of the columns is copied; rows, and the whole, stay mapped
        return part.to(dtype=self.dtype).to(device=self.device)

    def linear(
        self, name: str, outputs: int, inputs: int, *, rows: slice = WHOLE, columns: slice = WHOLE
    ) -> LinearWeight:
        return self.packed(self._linear(name, outputs, inputs, rows, columns))

    def table(self, name: str, outputs: int, inputs: int, *, rows: slice = WHOLE) -> Table:
        scheme = self._quantization
        if scheme is None or scheme.is_made_here:
            return self.take(f"{name}.weight", outputs, inputs, rows=rows)
        return self._linear(name, outputs, inputs, rows, WHOLE)

    def packed(self, weight: Table) -> LinearWeight:
        kernels = self._packing
        if kernels is not None and isinstance(weight, Tensor) and kernels.packs(self.dtype):
            self.packed_bytes.append((weight.data_ptr(), weight.nbytes))
            return PackedWeight.of(weight, kernels)
        if kernels is not None and isinstance(weight, QuantizedWeight) and kernels.packs_codes(self.dtype, weight):
            self.packed_bytes += [(each.data_ptr(), each.nbytes) for each in weight.tensors]
            return PackedCodes.of(weight, kernels, self.dtype)
        self._has_rows = True
        return weight

    @property
    def are_packed(self) -> bool:
        """Whether all linear layers are that were handed out."""
        return bool(self.packed_bytes) and not self._has_rows

    def _linear(self, name: str, outputs: int, inputs: int, rows: slice, columns: slice) -> Table:
        scheme = self._quantization
        if scheme is None or (not scheme.is_made_here and self._checkpoint.has(f"{name}.weight", STORED)):
            return self.take(f"{name}.weight", outputs, inputs, rows=rows, columns=columns)
        if self.device != "cpu":
            raise ModelError("quantised weights are computed on a CPU only; use --device cpu, or another checkpoint")
        if scheme.is_made_here:
            group = GROUPS[scheme.bits]
            refuse_cut_groups(name, columns, inputs=inputs, group=group)
            plain = self.take(f"{name}.weight", outputs, inputs, rows=rows, columns=columns)
            return quantized(plain, bits=scheme.bits) if self._has_data else plain
        tensors = StoredTensors(self._checkpoint, name, self.taken)
        stored = read_quantized(scheme, tensors, outputs, inputs)
        self._count(name, (outputs, inputs))
        if not self._has_data:
            return torch.empty(0)
        return stored.part(name, rows, columns)

    def everything(self) -> dict[str, Tensor]:
        names = self._checkpoint.names()
        for name in names:
            refuse_other_types(name, self._checkpoint.dtype_of(name), (*STORED, *MARKS))
        self.taken += names
        for name in names:
            self._count(name, self._checkpoint.shape_of(name))
        return {name: self._checkpoint.tensor(name) for name in names}

    def _count(self, name: str, shape: tuple[int, ...]) -> None:
        self._sizes[name] = math.prod(shape)
        self._progress.at(len(self.taken))


def refuse_other_types(name: str, stored: str, known: Collection[str]) -> None:
    """Raises ModelError."""
    if stored not in known:
        raise ModelError(f"the tensor {name} is stored as {stored}, which is not supported; choose another checkpoint")
