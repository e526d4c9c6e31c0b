"""Whether a decoder that transformers knows can attend through our port, found out by running its code.

The model is made without weights (on torch's meta device) and run over a whole context of tokens that have no value.
Its attention function is ours and writes down what each layer asks for; so is the function that would make the masks,
which hands on the rule that a mask would follow. What the port does not do is refused by name: layers that do not
attend, or twice; keys and values of other sizes; sinks and whatever else attention is given that is not known here; a
mask that is not the causal one, or differs from the window that the layer names.

`python -m` of this module reads config.json on stdin and writes the facts; the last line on stderr says what is wrong.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any  # the values of transformers have types that change with its versions

import msgspec
import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tandem.engine.documents import ModelError
from tandem.engine.model_config import MOST_LAYERS
from tandem.engine.models.transformers_parts import LEFT_OUT, DecoderHead, Unfit, class_of, config_of, layers_of_model
from tandem.engine.transformers_facts import REFUSED, TransformersFacts, refused
from tandem.logtext import shown

EXAMINED = "tandem_examined"  # the attention implementation of the examination, as transformers calls such things
MOST_CONTEXT = 1 << 24
WITHOUT_EFFECT = {"cache_position", "output_attentions", "position_embeddings", "position_ids", "use_cache"}
MaskRule = Callable[[Any, Any, Any, Any], Any]  # (batch, head, query, key): whether the query sees the key


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one layer handed to attention."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    soft_cap: float | None
    window: int | None


def examine(raw: dict[str, Any]) -> TransformersFacts:
    """Raises ModelError."""
    try:
        return _examine(raw)
    except Unfit as error:
        raise refused(raw, str(error)) from None
    except ModelError:
        raise
    except Exception as error:  # of code that was not written for this, over values that anybody may have written
        reason = " ".join(str(error).split())[:200] or "no reason"
        raise refused(raw, f"transformers cannot run it without weights ({type(error).__name__}: {reason})") from None


def _examine(raw: dict[str, Any]) -> TransformersFacts:
    architecture, model_type = raw["architectures"][0], raw["model_type"]
    if MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type) != architecture or model_type not in CONFIG_MAPPING:
        raise Unfit(
            f"neither Tandem nor transformers {transformers.__version__} has a decoder of this name "
            f"(model_type {shown(model_type)}; docs/models.md)"
        )
    made = class_of(architecture)
    if not getattr(made, "_supports_attention_backend", False):
        raise Unfit("its attention in transformers cannot be handed to somebody else")
    config = config_of(model_type, raw)
    num_layers = _size(config, "num_hidden_layers", MOST_LAYERS)
    context = _context(config)
    calls: list[AttentionCall] = []
    AttentionInterface.register(EXAMINED, _Recorder(calls, context))
    AttentionMaskInterface.register(EXAMINED, _mask_rule)
    with torch.device("meta"):
        model = made._from_config(config, attn_implementation=EXAMINED, dtype=torch.float32).eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")  # without loops over what only weights could tell
    states = _run(layers_of_model(model), context)
    vocab_size = _scored(model, states[0, :1])
    first = _alike(calls, num_layers)
    return TransformersFacts(
        version=transformers.__version__,
        model_type=model_type,
        settings=json.dumps(_settings(config), sort_keys=True, default=str),
        vocab_size=vocab_size,
        hidden_size=states.shape[-1],
        num_layers=num_layers,
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        max_context=context,
        scale=first.scale,
        soft_cap=first.soft_cap,
        windows=tuple(call.window if call.window is None or call.window < context else None for call in calls),
    )


@torch.no_grad()
def _run(base: nn.Module, tokens: int) -> Tensor:
    """Hidden states of so many tokens. The mask of ones keeps transformers from looking for several texts in them."""
    with torch.device("meta"):
        ids, positions, ones = (
            torch.zeros(1, tokens, dtype=torch.int64),
            torch.arange(tokens)[None],
            torch.ones(1, tokens),
        )
    return base(input_ids=ids, position_ids=positions, attention_mask=ones, use_cache=False).last_hidden_state


@torch.no_grad()
def _scored(model: PreTrainedModel, states: Tensor) -> int:
    """How many tokens the head scores, of states alone. Raises Unfit."""
    try:
        return DecoderHead(model)(states).shape[1]
    except Exception as error:  # of code that was not written for this
        reason = " ".join(str(error).split())[:200] or "no reason"
        raise Unfit(f"its head wants more than the states of its layers ({reason})") from None


def _mask_rule(*, mask_function: MaskRule, **_: object) -> Tensor:
    """Stands for a mask on its way to the layers."""
    mask = torch.empty(1)
    mask.rule = mask_function  # pyright: ignore[reportAttributeAccessIssue]
    return mask


class _Recorder:
    """The attention function of the examination."""

    def __init__(self, calls: list[AttentionCall], context: int) -> None:
        self._calls = calls
        self._context = context

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object = None, **given: Any
    ) -> tuple[Tensor, None]:
        """query: [1, heads, t, head_dim], key and value: [1, kv_heads, t, head_dim]. Raises Unfit."""
        layer = getattr(module, "layer_idx", None)
        if layer != len(self._calls):
            raise Unfit(f"its layer {len(self._calls)} calls attention as {shown(layer)}: each has to, once, in order")
        if key.shape != value.shape or query.shape[2:] != key.shape[2:] or query.shape[1] % key.shape[1]:
            shapes = " and ".join(str(tuple(each.shape)) for each in (query, key, value))
            raise Unfit(f"queries, keys and values of a layer do not have heads of one size ({shapes})")
        sharing = query.shape[1] // key.shape[1]
        if (told := getattr(module, "num_key_value_groups", sharing)) != sharing:
            raise Unfit(
                f"by its num_key_value_heads {shown(told)} heads share one for keys and values, in its layers {sharing}"
            )
        asked = {name: thing for name, thing in given.items() if thing is not None and name not in WITHOUT_EFFECT}
        scale = asked.pop("scaling", query.shape[3] ** -0.5)
        window, soft_cap = asked.pop("sliding_window", None), asked.pop("softcap", None)
        if asked.pop("dropout", 0.0) or not asked.pop("is_causal", getattr(module, "is_causal", True)):
            raise Unfit("its attention looks ahead, or drops something at random")
        if asked:
            raise Unfit(f"its attention is given {', '.join(sorted(asked))}, which ours does not know")
        self._refuse_other_masks(attention_mask, window)
        sizes = (query.shape[1], key.shape[1], key.shape[3])
        self._calls.append(AttentionCall(len(self._calls), *sizes, float(scale), soft_cap, window))
        return query.new_empty(1, query.shape[2], query.shape[1], query.shape[3]), None

    def _refuse_other_masks(self, mask: object, window: int | None) -> None:
        rule = getattr(mask, "rule", None)
        if rule is None:
            raise Unfit("its layers make a mask of their own, or have none")
        last, reach = self._context - 1, self._context if window is None else window
        for query in {0, 1, reach - 1, reach, reach + 1, last // 2, last}:
            for key in {
                0,
                1,
                query - reach - 1,
                query - reach,
                query - reach + 1,
                query // 2,
                query - 1,
                query,
                query + 1,
            }:
                if not (0 <= query <= last and 0 <= key <= last):
                    continue
                sees = bool(rule(torch.tensor(0), torch.tensor(0), torch.tensor(query), torch.tensor(key)))
                if sees != (query - reach < key <= query):
                    raise Unfit(f"a mask of its layers lets token {query} {'see' if sees else 'not see'} token {key}")


def _alike(calls: list[AttentionCall], num_layers: int) -> AttentionCall:
    """A layer for all, but for windows. Raises Unfit."""
    if len(calls) != num_layers or not calls:
        raise Unfit(f"{len(calls)} of its {num_layers} layers attend; the others would need a state")
    kinds = {(call.num_heads, call.num_kv_heads, call.head_dim, call.scale, call.soft_cap) for call in calls}
    if len(kinds) > 1:
        raise Unfit("its layers have heads of different numbers, sizes or scales")
    if len({call.window for call in calls if call.window is not None}) > 1:
        raise Unfit("its layers have windows of several sizes")
    return calls[0]


def _context(config: PretrainedConfig) -> int:
    """Tokens of the longest text. Where angles depend on how long the text has become, up to where they begin to."""
    longest = _size(config, "max_position_embeddings", MOST_CONTEXT)
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):
        if isinstance(rope, dict) and rope.get("rope_type") in ("longrope", "dynamic"):
            longest = min(longest, int(rope.get("original_max_position_embeddings") or longest))
    return longest


def _size(config: PretrainedConfig, name: str, most: int) -> int:
    value = getattr(config, name, None)
    if type(value) is not int or not 1 <= value <= most:
        raise Unfit(f"its {name} is {shown(value)}, a whole number from 1 to {most} is needed")
    return value


def _settings(config: PretrainedConfig) -> dict[str, Any]:
    return {name: value for name, value in config.to_dict().items() if name not in LEFT_OUT}


def main() -> int:
    transformers.utils.logging.set_verbosity_error()
    try:
        facts = examine(json.load(sys.stdin))
    except ModelError as error:
        print(error, file=sys.stderr)
        return REFUSED
    sys.stdout.buffer.write(msgspec.json.encode(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
