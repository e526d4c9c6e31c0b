"""Which architectures run, by the name that `config.json` gives them: one line each.

The model is built by `models/<model_type>.py`, which is loaded when a checkpoint asks for it: the command line reads
this table, and it is not to load torch.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture's `model_type`, and what the fields of its `config.json` mean."""

    model_type: str
    defaults: dict[str, int] = field(default_factory=dict)  # of fields that may be absent
    window: int | None = None  # `sliding_window` where the field is absent; null says that there is none
    computes_window: bool = False  # all layers have it; else a window that is used is refused
    has_window_unless_told: bool = True  # a `sliding_window` holds without `use_sliding_window`
    # Biases that the architecture itself decides, and the only values that these fields may have then.
    fixed: dict[str, bool] = field(default_factory=dict)


_NO_BIAS = {"attention_bias": False, "mlp_bias": False}
_QKV_BIAS = {"attention_bias": True, "mlp_bias": False}

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama"),
    "MistralForCausalLM": Family("mistral", {"num_key_value_heads": 8}, 4096, computes_window=True, fixed=_NO_BIAS),
    "Qwen2ForCausalLM": Family("qwen2", {"num_key_value_heads": 32}, has_window_unless_told=False, fixed=_QKV_BIAS),
    "Qwen3ForCausalLM": Family("qwen3", {"num_key_value_heads": 32, "head_dim": 128}, has_window_unless_told=False),
}
