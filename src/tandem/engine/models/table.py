"""Which code runs which checkpoint, by the architecture that `config.json` names (`model_config.FAMILIES`)."""

from collections.abc import Callable

from tandem.engine.model_config import ModelConfig
from tandem.engine.models.llama import Transformer, Weights, build_llama, build_qwen3

BUILDERS: dict[str, Callable[[ModelConfig, Weights], Transformer]] = {
    "LlamaForCausalLM": build_llama,
    "Qwen3ForCausalLM": build_qwen3,
}
