"""Any other decoder, computed by the code that transformers has of it; attention and KV are ours.

A batch is one text to transformers, each token with its position; it keeps no cache. What makes texts of it is the
attention port, which every layer calls by its number. Which architectures can be had like that is found out before
(`transformers_examination.py`), and that the whole computes what transformers does alone, at start (`trial.py`).
"""

import json
from dataclasses import dataclass
from typing import Any, cast  # with what it found, a model comes in a pair that has no type

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from tandem.engine.attention.base import AttentionBackend
from tandem.engine.batch import Batch
from tandem.engine.documents import ModelError
from tandem.engine.layers.weights import Weights
from tandem.engine.model_config import ModelConfig
from tandem.engine.models.base import Step
from tandem.engine.models.transformers_parts import DecoderHead, class_of, config_of, layers_of_model
from tandem.engine.parallel import Group, Shard
from tandem.logtext import shown

OURS = "tandem"  # our attention, as transformers calls implementations
THEIRS = "eager"  # the one of its own that knows everything
WITHOUT_PROMISE = "--deterministic cannot be kept for layers that transformers computes; leave it out"


@dataclass(slots=True)
class Port:
    """Where the layers find the attention of the step. Modules of transformers hold it; it is no module."""

    dtype: torch.dtype  # of keys and values; some layers turn theirs in another one
    attention: AttentionBackend | None = None


class TransformersModel:
    """A `Model`."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._layers = layers_of_model(model)
        self._port = Port(model.dtype)
        for module in self._layers.modules():
            if hasattr(module, "layer_idx"):
                object.__setattr__(module, "tandem_port", self._port)
        self._head = DecoderHead(model)

    def forward(self, step: Step, hidden: Tensor | None = None) -> Tensor:
        assert hidden is None, "it has one stage"
        batch = step.batch
        self._port.attention = step.attention
        try:
            ids, positions = batch.token_ids[None], batch.positions[None]
            return self._layers(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state[0]
        finally:
            self._port.attention = None

    def accompany(self) -> None:
        raise AssertionError("no other rank has a part of it")

    def logits(self, batch: Batch, hidden: Tensor) -> Tensor:
        assert batch.sampled_place is None, "it promises no bits, so its batches are in no tiles"
        return self._head(hidden.index_select(0, batch.sampled)).float()

    def states(self, batch: Batch, hidden: Tensor) -> Tensor:
        return hidden.index_select(0, batch.sampled)

    def score(self, state: Tensor) -> Tensor:
        raise AssertionError("a decoder is no cross-encoder")

    def first_layers(self, count: int) -> "TransformersModel":
        raise ModelError(WITHOUT_PROMISE)

    def product_shapes(self) -> list[tuple[int, int]]:
        raise ModelError(WITHOUT_PROMISE)

    @torch.inference_mode()
    def alone(self, token_ids: Tensor, positions: Tensor | None) -> Tensor:
        """fp32 [t, vocab]: what transformers says after each token of one text, with its own attention, and unless
        told with its own positions.
        """
        told = {} if positions is None else {"position_ids": positions[None]}
        self._model.set_attn_implementation(THEIRS)
        try:
            said = self._model(input_ids=token_ids[None], **told, use_cache=False)
        finally:
            self._model.set_attn_implementation(OURS)
        return said.logits[0].float()


def build(config: ModelConfig, weights: Weights, group: Group, stage: Shard) -> TransformersModel:
    facts = config.transformers
    assert facts is not None, "it was examined when its configuration was read"
    if group.shard.size > 1 or stage.size > 1 or group.mlp.shard.size > 1:
        raise ModelError(f"{config.architecture} is computed by {facts.library}, which cannot be cut; use one worker")
    transformers.utils.logging.set_verbosity_error()  # what is wrong with the weights is said below
    transformers.utils.logging.disable_progress_bar()
    AttentionInterface.register(OURS, attend)
    try:
        loaded: Any = class_of(config.architecture).from_pretrained(
            None,
            config=config_of(facts.model_type, json.loads(facts.settings)),
            state_dict=weights.everything(),
            dtype=weights.dtype,
            attn_implementation=OURS,
            output_loading_info=True,
        )
    except Exception as error:  # of code that was not written for this, over values that anybody may have written
        reason = " ".join(str(error).split())[:200] or "no reason"
        raise ModelError(
            f"{facts.library} cannot load {config.architecture} ({type(error).__name__}: {reason})"
        ) from None
    model, found = loaded
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if found[what]:
            names = sorted(str(name) for name in found[what])
            raise ModelError(
                f"{config.architecture} as config.json describes it does not go with the tensors of the checkpoint: "
                f"{what.replace('_', ' ')}, {shown(names[0])} and {len(names) - 1} others"
            )
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # one expert after the other, whatever their sizes are
    return TransformersModel(model.to(weights.device).eval())


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: None = None, **_: object
) -> tuple[Tensor, None]:
    """The attention function of the layers. query: [1, heads, t, head_dim], key and value: [1, kv_heads, t, head_dim].

    Returns [1, t, heads, head_dim]. What else they say has been looked at in the examination, and is the port's rules.
    """
    port, layer = cast(Port, module.tandem_port), cast(int, module.layer_idx)
    assert port.attention is not None, "layers run in a step"
    q, k, v = (each[0].transpose(0, 1).to(port.dtype).contiguous() for each in (query, key, value))
    return port.attention.forward(q, k, v, layer=layer)[None].to(query.dtype), None
