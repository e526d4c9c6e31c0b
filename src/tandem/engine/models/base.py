"""The port behind which a model computes, and how the model of an architecture is found.

A model is built once per worker from what `config.json` says and the tensors of the checkpoint; it holds no state of
requests. KV is kept by the attention backend that is handed to `forward`, so the same model runs on every backend.
"""

import importlib
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tandem.engine.attention.base import AttentionBackend
from tandem.engine.batch import Batch
from tandem.engine.layers.weights import Weights
from tandem.engine.model_config import ModelConfig
from tandem.engine.models.table import FAMILIES
from tandem.engine.parallel import Group, Shard
from tandem.engine.recurrent_states import RecurrentStates


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass, and where what it keeps goes. Both have planned the batch."""

    batch: Batch
    attention: AttentionBackend
    states: RecurrentStates | None = None  # of a model that has them


class Model(Protocol):
    """One shard of one stage of a model."""

    def forward(self, step: Step, hidden: Tensor | None = None) -> Tensor:
        """Hidden states [n, hidden] of all rows behind this stage's layers, the same on every shard of it.

        hidden: what the stage before has returned; None on the first stage, which begins with the tokens.
        The step's attention is told every layer once, in order: so all KV of the batch is written.
        """
        ...

    def accompany(self) -> None:
        """Compute this worker's part of the MLPs in a step in which only other DP ranks have rows."""
        ...

    def logits(self, batch: Batch, hidden: Tensor) -> Tensor:
        """fp32 scores [outcome rows, vocab] from what `forward` returned on the last stage, in order of outcomes."""
        ...

    def states(self, batch: Batch, hidden: Tensor) -> Tensor:
        """[outcome rows, hidden] from what `forward` returned on the last stage: what vectors are made of."""
        ...

    def score(self, state: Tensor) -> Tensor:
        """fp32 scalar: how well the two texts of a prompt fit, from its first token's state [hidden]. Cross-encoders
        only.
        """
        ...

    def first_layers(self, count: int) -> "Model":
        """The same model without its later layers, for a self-check. Shares all weights."""
        ...

    def product_shapes(self) -> list[tuple[int, int]]:
        """[out_features, in_features] of every linear layer, for a self-check."""
        ...


class Build(Protocol):
    """What the file of a family has under the name `build`."""

    def __call__(self, config: ModelConfig, weights: Weights, group: Group, stage: Shard) -> Model:
        """Raises ModelError where tensors are missing (of any stage), have other shapes, or cannot be cut like that."""
        ...


def build_of(architecture: str) -> Build:
    """architecture: a key of `FAMILIES`, else transformers has its code. Other families' files are not loaded."""
    name = FAMILIES[architecture].model_type if architecture in FAMILIES else "transformers_model"
    return importlib.import_module(f"tandem.engine.models.{name}").build
