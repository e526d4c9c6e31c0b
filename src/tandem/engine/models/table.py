"""Which code runs which checkpoint, by the architecture that `config.json` names."""

from collections.abc import Callable

from tandem.engine.model_config import ModelConfig, ModelError
from tandem.engine.models.llama import Transformer, Weights, build_llama, build_qwen3

ARCHITECTURES: dict[str, Callable[[ModelConfig, Weights], Transformer]] = {
    "LlamaForCausalLM": build_llama,
    "Qwen3ForCausalLM": build_qwen3,
}


def builder(architecture: str) -> Callable[[ModelConfig, Weights], Transformer]:
    if architecture not in ARCHITECTURES:
        raise ModelError(f"the architecture {architecture} is not supported; known are {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[architecture]
