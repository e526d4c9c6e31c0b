"""A tokenizer of whole words for tiny checkpoints, and what transformers makes of texts."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from engine_world import VOCAB
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedModel

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
CLS, SEP = 2, 3


def write_tokenizer(where: Path, *, is_pairwise: bool) -> None:
    """Words are w4, w5, ...: their own ids. is_pairwise: [CLS] first [SEP] second [SEP]; else a text and [SEP]."""
    words = [*SPECIAL, *(f"w{id}" for id in range(len(SPECIAL), VOCAB))]
    tokenizer = Tokenizer(models.WordLevel({word: id for id, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL))
    single, pair = ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1") if is_pairwise else ("$A [SEP]", "$A $B [SEP]")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    tokenizer.save(str(where / "tokenizer.json"))
    (where / "tokenizer_config.json").write_text(json.dumps({"sep_token": "[SEP]", "cls_token": "[CLS]"}))


def words(*ids: int) -> str:
    return " ".join(f"w{id}" for id in ids)


def text_of(length: int, *, seed: int = 0) -> str:
    """So many words."""
    return words(*(4 + (37 * index + 11 * length + 101 * seed) % (VOCAB - 4) for index in range(length)))


def ids_of(text: str) -> list[int]:
    return [int(word[1:]) for word in text.split()]


def mean_vector(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        states = model(torch.tensor([list(ids)])).last_hidden_state[0]
    return torch.nn.functional.normalize(states.mean(dim=0), dim=0)


def last_vector(model: PreTrainedModel, ids: Sequence[int], dimensions: int | None = None) -> torch.Tensor:
    with torch.inference_mode():
        states = model(torch.tensor([list(ids)])).last_hidden_state[0]
    return torch.nn.functional.normalize(states[-1][:dimensions], dim=0)


def pair_score(model: PreTrainedModel, first: str, second: str) -> float:
    """Before any activation."""
    one, other = ids_of(first), ids_of(second)
    ids = [CLS, *one, SEP, *other, SEP]
    types = [0] * (len(one) + 2) + [1] * (len(other) + 1)
    with torch.inference_mode():
        return model(torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits[0].item()
