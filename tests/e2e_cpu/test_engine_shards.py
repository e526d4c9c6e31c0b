"""A model cut into shards computes what the whole one computes: all shards run in one process and talk by threads."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_world import EngineWorld, prompt_of
from safetensors.torch import load_file
from shard_group import ThreadGroup, on_every_shard
from tiny_models import (
    make_gemma2,
    make_gemma3,
    make_granite,
    make_llama,
    make_mistral,
    make_mixtral,
    make_olmo2,
    make_phi3,
    make_qwen2,
    make_qwen3,
    make_qwen3_moe,
)
from torch import Tensor

from tandem.engine.model_config import ModelError
from tandem.engine.parallel import Group
from tandem.engine.weights import load

# name -> how the checkpoint is made, and how many KV heads each of two and of four shards has
CASES: dict[str, tuple[Callable[[Path], object], tuple[int, int], tuple[int, int, int, int]]] = {
    "as_many_kv_heads_as_shards": (
        lambda where: make_llama(where, num_attention_heads=8, num_key_value_heads=4),
        (2, 2),
        (1, 1, 1, 1),
    ),
    "a_kv_head_on_two_shards": (
        lambda where: make_llama(where, num_attention_heads=8, num_key_value_heads=2),
        (1, 1),
        (1, 1, 1, 1),
    ),
    "one_kv_head_on_all": (
        lambda where: make_qwen2(where, num_attention_heads=6, num_key_value_heads=1),
        (1, 1),
        (1, 1, 1, 1),
    ),
    "nine_heads_and_three_kv_heads": (
        lambda where: make_qwen3(where, num_attention_heads=9, num_key_value_heads=3),
        (1, 2),
        (1, 1, 1, 1),
    ),
    "seven_heads_with_a_kv_head_each": (
        lambda where: make_llama(where, hidden_size=56, num_attention_heads=7, num_key_value_heads=7),
        (3, 4),
        (1, 2, 2, 2),
    ),
    "biases_and_sizes_that_divide_by_nothing": (
        lambda where: make_llama(where, intermediate_size=97, vocab_size=301, attention_bias=True, mlp_bias=True),
        (1, 1),
        (1, 1, 1, 1),
    ),
    "qwen2_untied": (lambda where: make_qwen2(where, tie_word_embeddings=False), (1, 1), (1, 1, 1, 1)),
    "mistral_with_a_window": (lambda where: make_mistral(where, sliding_window=24), (1, 1), (1, 1, 1, 1)),
    "qwen3_moe_with_a_dense_layer": (
        lambda where: make_qwen3_moe(where, mlp_only_layers=[1], moe_intermediate_size=19),
        (1, 1),
        (1, 1, 1, 1),
    ),
    "phi3": (
        lambda where: make_phi3(where, num_attention_heads=8, num_key_value_heads=4, intermediate_size=97),
        (2, 2),
        (1, 1, 1, 1),
    ),
    "phi3_seven_heads": (
        lambda where: make_phi3(where, hidden_size=56, num_attention_heads=7, num_key_value_heads=7),
        (3, 4),
        (1, 2, 2, 2),
    ),
    "olmo2": (lambda where: make_olmo2(where, num_attention_heads=8, num_key_value_heads=4), (2, 2), (1, 1, 1, 1)),
    "olmo2_with_a_kv_head_on_two_shards": (lambda where: make_olmo2(where), (1, 1), (1, 1, 1, 1)),
    "gemma2": (lambda where: make_gemma2(where, num_attention_heads=8, num_key_value_heads=4), (2, 2), (1, 1, 1, 1)),
    "gemma3_untied": (lambda where: make_gemma3(where, tie_word_embeddings=False), (1, 1), (1, 1, 1, 1)),
    "granite_hybrid": (
        lambda where: make_granite(where, num_attention_heads=8, num_key_value_heads=4, mamba_n_heads=8),
        (2, 2),
        (1, 1, 1, 1),
    ),
    "granite_hybrid_with_a_group_on_two_shards": (
        lambda where: make_granite(
            where, num_attention_heads=8, num_key_value_heads=4, mamba_n_groups=2, mamba_proj_bias=True
        ),
        (2, 2),
        (1, 1, 1, 1),
    ),
    "mixtral": (lambda where: make_mixtral(where), (1, 1), (1, 1, 1, 1)),
}


def logits_of(where: Path, group: Group | None, **settings: bool) -> tuple[Tensor, list[list[int]]]:
    """Of two requests: chunked prompts, then decoding together. And their tokens."""
    world = EngineWorld(where, num_pages=64, group=group, **settings)
    first, second = world.add(prompt_of(50)), world.add(prompt_of(9))
    world.run((first, 0, 20))
    world.run((first, 20, 50), (second, 0, 9))
    rows = [world.logits[first], world.logits[second]]
    for step in range(6):
        world.run(decodes=True, join=[first, second] if step == 0 else [])
        rows += [world.logits[first], world.logits[second]]
    return torch.stack(rows), list(world.tokens.values())


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_shards_together_compute_what_the_whole_model_computes(tmp_path: Path, case: str, size: int) -> None:
    make, *kv_heads = CASES[case]
    make(tmp_path)
    whole, tokens = logits_of(tmp_path, None)

    shards = on_every_shard(size, lambda group: (load(tmp_path, group=group).kv_shape, logits_of(tmp_path, group)))

    assert tuple(shape.num_kv_heads for shape, _ in shards) == kv_heads[size == 4]
    for _, (logits, said) in shards:
        assert torch.equal(logits, shards[0][1][0]), "shards that differ would sample different tokens"
        assert said == tokens
    assert float((shards[0][1][0] - whole).abs().max() / whole.abs().max()) < 1e-5


@pytest.mark.parametrize("make", [make_llama, make_qwen3_moe])
def test_a_layer_needs_two_sums_and_the_ends_of_the_model_one_exchange_each(
    tmp_path: Path, make: Callable[..., object]
) -> None:
    make(tmp_path, num_hidden_layers=3)

    def counted(group: ThreadGroup) -> tuple[int, int]:
        world = EngineWorld(tmp_path, group=group)
        world.prefill(world.add(prompt_of(5)))
        return group.num_reduced, group.num_gathered

    assert on_every_shard(2, counted) == [(1 + 3 * 2, 1)] * 2


def test_a_shard_holds_its_part_of_each_tensor_and_all_shards_hold_all(tmp_path: Path) -> None:
    make_qwen2(tmp_path, num_attention_heads=8, num_key_value_heads=4, intermediate_size=97)
    stored = load_file(tmp_path / "model.safetensors")
    blocks = on_every_shard(4, lambda group: load(tmp_path, group=group).module.blocks[1])
    at = "model.layers.1"

    for name, parts, dim in (
        (f"{at}.self_attn.q_proj.weight", [block.qkv.q_proj.weight for block in blocks], 0),
        (f"{at}.self_attn.k_proj.bias", [block.qkv.k_proj.bias for block in blocks], 0),
        (f"{at}.self_attn.o_proj.weight", [block.o_proj.weight for block in blocks], 1),
        (f"{at}.mlp.up_proj.weight", [block.mlp.gate_up.up_proj.weight for block in blocks], 0),
        (f"{at}.mlp.down_proj.weight", [block.mlp.down_proj.weight for block in blocks], 1),
    ):
        assert torch.equal(torch.cat(parts, dim=dim), stored[name]), name


def test_shards_of_one_checkpoint_have_one_layout_and_one_digest_of_the_weights(tmp_path: Path) -> None:
    make_llama(tmp_path)
    whole = load(tmp_path).layout_fields

    assert on_every_shard(2, lambda group: load(tmp_path, group=group).layout_fields) == [whole, whole]


def test_more_shards_than_heads_are_refused(tmp_path: Path) -> None:
    make_llama(tmp_path)

    with pytest.raises(ModelError, match="6 attention heads cannot be spread over 7 shards; take fewer"):
        on_every_shard(7, lambda group: load(tmp_path, group=group))
