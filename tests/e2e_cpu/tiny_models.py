"""Tiny random checkpoints, and what transformers says of them."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from engine_world import VOCAB, EngineWorld, prompt_of
from torch import Tensor
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 128}


def make_llama(where: Path, *, seed: int = 0, max_shard_size: str = "50GB", **changes: object) -> PreTrainedModel:
    """A random Llama, saved to `where`; GQA, untied embeddings unless `changes` say otherwise."""
    torch.manual_seed(seed)
    return _save(LlamaForCausalLM(LlamaConfig(**{**LLAMA, **changes})), where, max_shard_size)


def make_qwen3(where: Path, *, seed: int = 0, **changes: object) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**{**LLAMA, "head_dim": 16, "tie_word_embeddings": True, **changes}))
    for name, parameter in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)  # all ones would hide a missing norm weight
    return _save(model, where, "50GB")


SDAR = {"block_size": 4, "mask_token_id": VOCAB - 1}


def make_sdar(where: Path, *, seed: int = 0, blocks: dict[str, int] = SDAR, **changes: object) -> PreTrainedModel:
    """Returns its layers as a Qwen3: what they see is up to the caller. blocks: fields of its `config.json`."""
    model = make_qwen3(where, seed=seed, **changes)
    written = json.loads((where / "config.json").read_text())
    named = {"architectures": ["SDARForCausalLM"], "model_type": "sdar"}
    (where / "config.json").write_text(json.dumps(written | named | blocks))
    return model


def make_qwen2(where: Path, *, seed: int = 0, **changes: object) -> PreTrainedModel:
    torch.manual_seed(seed)
    return _save(Qwen2ForCausalLM(Qwen2Config(**{**LLAMA, "tie_word_embeddings": True, **changes})), where, "50GB")


def make_mistral(where: Path, *, seed: int = 0, **changes: object) -> PreTrainedModel:
    """Without a window unless `changes` say so."""
    torch.manual_seed(seed)
    return _save(MistralForCausalLM(MistralConfig(**{**LLAMA, "sliding_window": None, **changes})), where, "50GB")


EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 22, "norm_topk_prob": True}


def make_qwen3_moe(where: Path, *, seed: int = 0, **changes: object) -> PreTrainedModel:
    """Seven experts of which a token goes to three, in every layer."""
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**LLAMA, "head_dim": 16, **EXPERTS, **changes}))
    model.set_experts_implementation("eager")  # the other one wants sizes that are multiples of 16 bytes
    for name, parameter in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return _save(model, where, "50GB")


def make_mixtral(where: Path, *, seed: int = 0, **changes: object) -> PreTrainedModel:
    """Five experts of which a token goes to two. No window unless `changes` say so."""
    torch.manual_seed(seed)
    model = MixtralForCausalLM(MixtralConfig(**{**LLAMA, "num_local_experts": 5, **changes}))
    model.set_experts_implementation("eager")
    return _save(model, where, "50GB")


GRANITE = {
    "num_hidden_layers": 4,
    "layer_types": ["mamba", "mamba", "attention", "mamba"],
    "shared_intermediate_size": 80,
    "num_local_experts": 0,
    "mamba_n_heads": 4,
    "mamba_d_state": 16,
    "position_embedding_type": "nope",
    "attention_multiplier": 0.2,
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 3.0,
}


def make_granite(where: Path, *, seed: int = 0, **changes: object) -> PreTrainedModel:
    """Granite 4, hybrid: three of four layers are Mamba 2 with four heads of 24, the other one attends."""
    torch.manual_seed(seed)
    model = GraniteMoeHybridForCausalLM(GraniteMoeHybridConfig(**{**LLAMA, **GRANITE, **changes}))
    for name, parameter in model.named_parameters():
        if name.endswith(("A_log", "dt_bias", "mamba.D", "norm.weight")):
            torch.nn.init.uniform_(parameter, -1.5, 1.5)  # as they are made they hide what is missing
        if "conv1d" in name:
            torch.nn.init.uniform_(parameter, -0.7, 0.7)
    return _save(model, where, "50GB")


def longrope(pairs: int) -> dict[str, object]:
    """Stretched from 256 positions, for heads of which so many pairs are turned."""
    return {
        "rope_type": "longrope",
        "rope_theta": 5000.0,
        "short_factor": [1.0 + 0.3 * pair for pair in range(pairs)],
        "long_factor": [2.0 + pair for pair in range(pairs)],
        "original_max_position_embeddings": 256,
    }


def make_phi3(where: Path, *, seed: int = 0, **changes: object) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = Phi3Config(**{**LLAMA, "original_max_position_embeddings": 256, **changes})
    return _save(Phi3ForCausalLM(config), where, "50GB")


def make_olmo2(where: Path, *, seed: int = 0, **changes: object) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = Olmo2ForCausalLM(Olmo2Config(**{**LLAMA, **changes}))
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return _save(model, where, "50GB")


GEMMA = {"head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": 24, "attn_implementation": "eager"}


def make_gemma2(where: Path, *, seed: int = 0, **changes: object) -> PreTrainedModel:
    """Every other layer has a window of 24 tokens; caps that show."""
    torch.manual_seed(seed)
    caps = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 8.0}
    return _save_gemma(Gemma2ForCausalLM(Gemma2Config(**{**LLAMA, **GEMMA, **caps, **changes})), where)


def make_gemma3(where: Path, *, seed: int = 0, **changes: object) -> PreTrainedModel:
    """The second of three layers has no window."""
    torch.manual_seed(seed)
    layers = {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    return _save_gemma(Gemma3ForCausalLM(Gemma3TextConfig(**{**LLAMA, **GEMMA, **layers, **changes})), where)


def _save_gemma(model: PreTrainedModel, where: Path) -> PreTrainedModel:
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(parameter, -0.5, 0.5)  # one is added to them
        if name.endswith("embed_tokens.weight"):
            torch.nn.init.normal_(parameter, std=0.1)
    return _save(model, where, "50GB")


def _save(model: PreTrainedModel, where: Path, max_shard_size: str) -> PreTrainedModel:
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
        if name.endswith("mlp.gate.weight"):
            torch.nn.init.normal_(parameter, std=0.5)  # a router of zeros would choose the first experts for all
    model.eval().save_pretrained(where, max_shard_size=max_shard_size)
    return model


def reference_logits(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """[len(tokens), vocab]: what transformers says after each token."""
    with torch.inference_mode():
        return model(torch.tensor([list(tokens)])).logits[0]


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def largest_error(world: EngineWorld, theirs: PreTrainedModel) -> float:
    """Of the logits behind a prompt in three chunks and 19 tokens of its continuation, against transformers."""
    request = world.add(prompt_of(150))
    world.prefill(request, chunk=64)
    ours = [world.logits[request]]
    for step in range(19):
        world.run(decodes=True, join=[request] if step == 0 else [])
        ours.append(world.logits[request])
    return relative_error(torch.stack(ours), reference_logits(theirs, world.tokens[request][:-1])[149:])


def reference_tokens(model: PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy continuation by transformers."""
    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
        )
    return out[0, len(prompt) :].tolist()


# --- vectors ---------------------------------------------------------------------------------------------------------

BERT = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 128,
    "initializer_range": 0.25,
}


def make_bert(where: Path, *, seed: int = 0, pooling: str = "", **changes: object) -> PreTrainedModel:
    """A random BertModel. pooling: what sentence-transformers calls its mode, such as mean_tokens."""
    torch.manual_seed(seed)
    model = _save(_shaken(BertModel(BertConfig(**{**BERT, **changes}))), where, "50GB")
    if pooling:
        write_pooling(where, pooling)
    return model


def make_cross_encoder(where: Path, *, seed: int = 0, activation: str = "", **changes: object) -> PreTrainedModel:
    """A random BertForSequenceClassification of one label. activation: as sentence-transformers names it."""
    torch.manual_seed(seed)
    config = BertConfig(**{**BERT, "num_labels": 1, **changes})
    if activation:
        config.sentence_transformers = {"activation_fn": activation}
    return _save(_shaken(BertForSequenceClassification(config)), where, "50GB")


def write_pooling(where: Path, mode: str) -> None:
    (where / "1_Pooling").mkdir()
    modes = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False, f"pooling_mode_{mode}": True}
    (where / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 48, **modes}))


def _shaken(model: PreTrainedModel) -> PreTrainedModel:
    """Weights of norms that are all ones, and a row of zeros for padding, would hide what is missing."""
    for name, parameter in model.named_parameters():
        if name.endswith("LayerNorm.weight"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        if name.endswith("embeddings.weight"):
            torch.nn.init.normal_(parameter, std=0.25)
    return model


def reference_states(model: PreTrainedModel, tokens: Sequence[int], types: Sequence[int] | None = None) -> Tensor:
    """[len(tokens), hidden]: behind the last norm of a model without a head."""
    kinds = {} if types is None else {"token_type_ids": torch.tensor([list(types)])}
    with torch.inference_mode():
        return model(torch.tensor([list(tokens)]), **kinds).last_hidden_state[0]
