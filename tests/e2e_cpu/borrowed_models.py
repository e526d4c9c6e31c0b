"""Tiny random checkpoints of architectures that transformers computes, by what is particular about each."""

from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from tiny_models import LLAMA
from transformers import CONFIG_MAPPING, PreTrainedModel

EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2}
HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
TWO_WINDOWS = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
ARCHITECTURES: dict[str, tuple[str, str, dict[str, object]]] = {
    "gpt_neox": ("gpt_neox", "GPTNeoXForCausalLM", {}),  # parallel residual, a quarter of the head turned
    "gpt2": ("gpt2", "GPT2LMHeadModel", {}),  # positions are embeddings
    "cohere": ("cohere", "CohereForCausalLM", {"logit_scale": 0.3}),  # pairs that turn lie side by side
    "cohere2_windows": ("cohere2", "Cohere2ForCausalLM", {**TWO_WINDOWS, "logit_scale": 0.3}),
    "starcoder2_window": ("starcoder2", "Starcoder2ForCausalLM", {"sliding_window": 24}),
    "glm4": ("glm4", "Glm4ForCausalLM", {"head_dim": 12, "rope_parameters": HALF}),  # norms behind, too
    "smollm3": ("smollm3", "SmolLM3ForCausalLM", {"no_rope_layers": [1, 0], "use_sliding_window": False}),
    "granite": (
        "granite",
        "GraniteForCausalLM",
        {"attention_multiplier": 0.2, "embedding_multiplier": 6.0, "residual_multiplier": 0.4, "logits_scaling": 3.0},
    ),
    "nemotron": ("nemotron", "NemotronForCausalLM", {"head_dim": 8, "partial_rotary_factor": 0.5}),
    "olmo3_windows": ("olmo3", "Olmo3ForCausalLM", TWO_WINDOWS),
    "helium": ("helium", "HeliumForCausalLM", {"head_dim": 8}),
    "ernie4_5": ("ernie4_5", "Ernie4_5ForCausalLM", {"head_dim": 8}),
    "phi": ("phi", "PhiForCausalLM", {}),
    "gpt_bigcode": ("gpt_bigcode", "GPTBigCodeForCausalLM", {}),  # one KV head
    "vaultgemma_caps": (
        "vaultgemma",
        "VaultGemmaForCausalLM",
        {**TWO_WINDOWS, "head_dim": 12, "query_pre_attn_scalar": 7, "attn_logit_softcapping": 3.0},
    ),
    "olmoe_experts": ("olmoe", "OlmoeForCausalLM", EXPERTS),
}
NAMES = tuple(ARCHITECTURES)
UNFIT: dict[str, tuple[str, str, dict[str, object]]] = {
    "roberta": ("roberta", "RobertaForCausalLM", {"is_decoder": True, "pad_token_id": 1}),  # begins to count behind it
}


def make(name: str, where: Path, *, seed: int = 0, **changes: object) -> PreTrainedModel:
    """Of `ARCHITECTURES` or `UNFIT`; what would hide that it is missing is random, too."""
    model_type, architecture, particular = (ARCHITECTURES | UNFIT)[name]
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[model_type](**{**LLAMA, **particular, **changes})
    config._attn_implementation = "eager"
    config.eos_token_id = None  # some have ends of their own, beyond so small a vocabulary
    model = getattr(transformers, architecture)(config)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    for parameter_name, parameter in model.named_parameters():
        _shake(parameter_name, parameter)
    model.generation_config.eos_token_id = None
    model.eval().save_pretrained(where)
    return model


def _shake(name: str, parameter: torch.nn.Parameter) -> None:
    kinds: dict[str, Callable[[], object]] = {
        "bias": lambda: torch.nn.init.normal_(parameter, std=0.2),
        "norm": lambda: torch.nn.init.uniform_(parameter, 0.5, 1.5),
        "gate.weight": lambda: torch.nn.init.normal_(parameter, std=0.5),
    }
    for part, change in kinds.items():
        if part in name:
            change()
            return
