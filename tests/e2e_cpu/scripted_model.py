"""A checkpoint whose greedy answers are written down: for what no small model was trained to say, such as thoughts.

A Llama of one layer that follows a chain of tokens. Embeddings are one-hot, and the row of the head for a token scores
the one before it in its script. So what follows a token must be the same wherever it is, and the tokenizer has pieces
of the scripts as whole tokens. After `FORK`, and nowhere else, there is a choice: attention, which looks at all
positions alike, finds there which of the words that name scripts are in the context. So what decode says behind it
depends on the KV of the prompt.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END, ASSISTANT, FORK = "<|end|>", "<|assistant|>", "\n\n"
ROLES = ("<|system|>", "<|user|>", "<|tool|>", ASSISTANT)
HIDDEN, HEAD_DIM = 512, 16
CHAIN = 50.0  # more than attention can add to the score of a token
TEMPLATE = """\
{%- if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call in <tool_call></tool_call>.<|end|>{% endif %}
{%- for m in messages %}<|{{ m.role }}|>
{%- if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{{ opening or '' }}
{%- if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""


@dataclass(frozen=True)
class Scripts:
    """`beginning`: what is said behind `ASSISTANT`, up to and with `FORK`. `endings`: what comes then, by the word that
    names it; of several words, each there once, the last one here. Pieces of one character are tokens of its bytes."""

    beginning: Sequence[str]
    endings: Mapping[str, Sequence[str]]  # each ends with `END`
    special: Sequence[str] = ()  # pieces that are special tokens

    @property
    def pieces(self) -> list[str]:
        return [*self.beginning, *(piece for ending in self.endings.values() for piece in ending)]


def make_scripted(where: Path, scripts: Scripts) -> None:
    """Write what `tandem serve` reads. Raises ValueError for scripts in which a token is there twice."""
    tokenizer = tokenizer_of(scripts)
    tokenizer.save(str(where / "tokenizer.json"))
    config = {"eos_token": END, "chat_template": TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    (where / "tokenizer_config.json").write_text(json.dumps(config))
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    (where / "config.json").write_text(json.dumps(config_of(size, tokenizer.token_to_id(END))))
    save_file(weights_of(tokenizer, scripts, size), where / "model.safetensors")


def tokenizer_of(scripts: Scripts) -> Tokenizer:
    """Bytes, and the pieces of the scripts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={char: id for id, char in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([*ROLES, END, *scripts.special])
    words = [word for word in (*scripts.endings, *scripts.pieces) if len(word) > 1 and made.token_to_id(word) is None]
    made.add_tokens([AddedToken(word, normalized=False) for word in words])
    return made


def config_of(vocab_size: int, end: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": HEAD_DIM,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": end,
        "dtype": "float32",
    }


def weights_of(tokenizer: Tokenizer, scripts: Scripts, size: int) -> dict[str, NDArray[np.float32]]:
    """Dimensions of the hidden state: tokens by their ids, then one per script that the context names."""
    assert size + len(scripts.endings) <= HIDDEN
    assert len(scripts.endings) <= HEAD_DIM
    values, output, head = zeros(HEAD_DIM, HIDDEN), zeros(HIDDEN, HEAD_DIM), zeros(size, HIDDEN)
    for before, after in next_tokens(tokenizer, scripts).items():
        head[after, before] = CHAIN
    for number, (word, ending) in enumerate(scripts.endings.items()):
        values[number, ids(tokenizer, word)] = 1.0
        output[size + number, number] = 1.0
        first = ids(tokenizer, ending[0])[0]
        head[first, ids(tokenizer, FORK)] = CHAIN
        head[first, size + number] = 1.0 + number
    layer = "model.layers.0."
    return {
        "model.embed_tokens.weight": np.eye(size, HIDDEN, dtype=np.float32),
        "model.norm.weight": ones(HIDDEN),
        "lm_head.weight": head,
        f"{layer}input_layernorm.weight": ones(HIDDEN),
        f"{layer}post_attention_layernorm.weight": ones(HIDDEN),
        f"{layer}self_attn.q_proj.weight": zeros(HEAD_DIM, HIDDEN),
        f"{layer}self_attn.k_proj.weight": zeros(HEAD_DIM, HIDDEN),
        f"{layer}self_attn.v_proj.weight": values,
        f"{layer}self_attn.o_proj.weight": output,
        f"{layer}mlp.gate_proj.weight": zeros(HEAD_DIM, HIDDEN),
        f"{layer}mlp.up_proj.weight": zeros(HEAD_DIM, HIDDEN),
        f"{layer}mlp.down_proj.weight": zeros(HIDDEN, HEAD_DIM),
    }


def next_tokens(tokenizer: Tokenizer, scripts: Scripts) -> dict[int, int]:
    """What follows each token but `FORK`. Raises ValueError where two may."""
    found: dict[int, int] = {}
    for pieces in ((ASSISTANT, *scripts.beginning), *scripts.endings.values()):
        tokens = ids(tokenizer, *pieces)
        for before, after in pairwise(tokens):
            if found.setdefault(before, after) != after:
                raise ValueError(f"{tokenizer.id_to_token(before)!r} is there twice")
    return found


def zeros(*shape: int) -> NDArray[np.float32]:
    return np.zeros(shape, np.float32)


def ones(size: int) -> NDArray[np.float32]:
    return np.ones(size, np.float32)


def ids(tokenizer: Tokenizer, *pieces: str) -> list[int]:
    return [id for piece in pieces for id in tokenizer.encode(piece).ids]
