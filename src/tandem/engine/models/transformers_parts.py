"""A decoder of transformers in two parts: its layers, and the head, which makes scores of their states."""

import copy
from typing import Any  # the configurations of transformers have fields that change with its versions

import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tandem.engine.lean_torch import read_rules

read_rules()  # this code may want any of them

# Fields of config.json that are not part of what is computed, or are decided elsewhere.
LEFT_OUT = {"_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version"}
TOLD = ("output_attentions", "output_hidden_states", "output_router_logits")


class Unfit(Exception):
    """Tandem cannot do what the model asks for: the reason, as the end of a sentence."""


def config_of(model_type: str, settings: dict[str, Any]) -> PretrainedConfig:
    """Of what config.json holds. It cannot choose an implementation, and with it code from elsewhere."""
    known = {name: value for name, value in settings.items() if name not in LEFT_OUT and "implementation" not in name}
    config = CONFIG_MAPPING[model_type].from_dict(known)
    config.use_cache = False
    for name in TOLD:
        if getattr(config, name, False):
            setattr(config, name, False)
    return config


def class_of(architecture: str) -> type[PreTrainedModel]:
    return getattr(transformers, architecture)


def layers_of_model(model: PreTrainedModel) -> nn.Module:
    """Its layers, with the embedding and the last norm. Raises Unfit."""
    layers = getattr(model, model.base_model_prefix, None)
    if not isinstance(layers, nn.Module) or layers is model:
        raise Unfit("its layers and its head are not apart")
    return layers


class DecoderHead:
    """What a decoder does with the states of its layers: its own code, run without them."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._given = _GivenStates()
        self._model = copy.copy(model)
        self._model._modules = {**model._modules, model.base_model_prefix: self._given}

    def __call__(self, states: Tensor) -> Tensor:
        """[n, hidden] to [n, vocab]"""
        self._given.states = states
        return self._model(input_ids=None, use_cache=False).logits[0]


class _States:
    """What layers return, as far as a head reads it: neither caches nor attentions."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]


class _GivenStates(nn.Module):
    """Stands where the layers stand."""

    def __init__(self) -> None:
        super().__init__()
        self.states: Tensor | None = None  # [n, hidden]

    def forward(self, *_: object, **__: object) -> _States:
        assert self.states is not None, "they are given before the head runs"
        return _States(self.states[None])
