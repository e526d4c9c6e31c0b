"""A random Llama of a given size with a tokenizer of made-up words: what all servers of a comparison get.

Speed does not depend on what a model says. Each word of `words` is one token, so a text of n words is a prompt of n
tokens for every server, whichever library it splits texts with.
"""

import json
import random
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

END = "<|end|>"
SPACE = "\u0120"  # of byte-level BPE
CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
STD = 0.02
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@dataclass(frozen=True)
class Shape:
    """Of a Llama with heads of `head_dim` values each, and weights that are not tied."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 64
    context: int = 4096

    def tensors(self) -> dict[str, tuple[int, ...]]:
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        found = {f"model.layers.{i}.{name}": size for i in range(self.layers) for name, size in layer.items()}
        ends = {"model.embed_tokens": (self.vocab_size, hidden), "model.norm": (hidden,)}
        return found | ends | {"lm_head": (self.vocab_size, hidden)}

    def matrix_values(self) -> int:
        """Weights that are multiplied with every token: all but the embedding and the norms."""
        return sum(s[0] * s[1] for name, s in self.tensors().items() if len(s) == 2 and "embed_tokens" not in name)

    def kv_bytes(self) -> int:
        """Of one token in bf16."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2


SHAPES = {
    "380m": Shape(32000, 1024, 4096, 20, 16, 8),
    "6m": Shape(4096, 256, 768, 4, 4, 2),
}


def words(shape: Shape) -> list[str]:
    """As many as fit beside single bytes and pieces of words."""
    syllables = ["".join(pair) for pair in product(CONSONANTS, VOWELS)]
    longer = ("".join(pair) for pair in product(syllables, syllables, syllables))
    return list(islice(longer, shape.vocab_size - 7000 if shape.vocab_size > 8000 else 1000))


def prompt(shape: Shape, tokens: int, seed: int) -> str:
    """Another one for each seed, so that no server finds it in its cache."""
    drawn = random.Random(seed)
    known = words(shape)
    return "".join(f" {drawn.choice(known)}" for _ in range(tokens))


def tokenizer(shape: Shape) -> Tokenizer:
    """Byte-level BPE, built and not trained: a word grows letter by letter from its left."""
    vocabulary = {END: 0} | {letter: 1 + i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    for word in words(shape):
        whole = SPACE + word
        for end in range(1, len(whole)):
            left, right = whole[:end], whole[end]
            if left + right not in vocabulary:
                vocabulary[left + right] = len(vocabulary)
                merges.append((left, right))
    assert len(vocabulary) <= shape.vocab_size, len(vocabulary)
    while len(vocabulary) < shape.vocab_size:
        vocabulary[f"<|{len(vocabulary)}|>"] = len(vocabulary)
    built = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([END])
    return built


def make(shape: Shape, folder: Path) -> Path:
    """A folder in Hugging Face's format, in bf16."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer(shape).save(str(folder / "tokenizer.json"))
    words_of_tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END}
    write(folder / "tokenizer_config.json", words_of_tokenizer | {"chat_template": CHAT_TEMPLATE})
    write(folder / "config.json", config(shape))
    write(folder / "generation_config.json", {"eos_token_id": 0, "pad_token_id": 0, "do_sample": False})
    drawn = torch.Generator().manual_seed(7)
    weights = {
        f"{name}.weight": torch.ones(size, dtype=torch.bfloat16)
        if len(size) == 1
        else torch.empty(size).normal_(0, STD, generator=drawn).bfloat16()
        for name, size in shape.tensors().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": "bfloat16",
    }


def write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1))
