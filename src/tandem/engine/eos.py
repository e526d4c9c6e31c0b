"""At which tokens an answer ends.

transformers takes `eos_token_id` of generation_config.json, or else that of config.json. Chat checkpoints made from
base models often name only <|endoftext|> there, while the template closes each turn with another token, which the
tokenizer names as its own end; an engine that does not know it talks on as the user. So the tokenizer's is always
added, as other servers do: a token that the tokenizer calls the end never belongs into an answer.
"""

from pathlib import Path
from typing import Any  # values of JSON documents

from tandem.engine.documents import Fields, ModelError, read_json

MOST_IDS = 256
TOKENIZER_BYTES = 64 << 20
NAME = "eos_token_id"


def eos_ids(config: Fields, generation: Fields, tokenizer_eos: int | None, *, vocab_size: int) -> tuple[int, ...]:
    """In the order of the files, the tokenizer's last; none is an answer too. Raises ModelError."""
    given = generation if generation.has(NAME) else config
    value = given.values.get(NAME)
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if len(listed) > MOST_IDS or not all(type(id) is int and 0 <= id < vocab_size for id in listed):
        raise given.wrong(NAME, f"token ids below vocab_size {vocab_size} are needed")
    if tokenizer_eos is not None and tokenizer_eos >= vocab_size:
        raise ModelError(
            f"the tokenizer ends texts with token {tokenizer_eos}, config.json knows {vocab_size}; "
            "tokenizer and weights belong to different models"
        )
    return tuple(dict.fromkeys([*listed, *([] if tokenizer_eos is None else [tokenizer_eos])]))


def tokenizer_eos(model_dir: Path) -> int | None:
    """Id of the `eos_token` of tokenizer_config.json; None where there is none, or nothing says which id it has.

    Where that file has no `added_tokens_decoder`, special_tokens_map.json names the token, as transformers once did.
    """
    config = read_json(model_dir / "tokenizer_config.json", optional=True)
    if "added_tokens_decoder" not in config:
        config |= read_json(model_dir / "special_tokens_map.json", optional=True)
    name = _content(config.get("eos_token"))
    if name is None:
        return None
    added = config.get("added_tokens_decoder")
    for id, token in added.items() if isinstance(added, dict) else ():
        if _content(token) == name and id.isascii() and id.isdigit() and len(id) < 10:
            return int(id)
    return _in_vocabulary(model_dir, name)


def _in_vocabulary(model_dir: Path, name: str) -> int | None:
    definition = read_json(model_dir / "tokenizer.json", optional=True, most_bytes=TOKENIZER_BYTES)
    added = definition.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if _content(token) == name and isinstance(token, dict) and _is_id(token.get("id")):
            return token["id"]
    model = definition.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    found = vocab.get(name) if isinstance(vocab, dict) else None
    return found if _is_id(found) else None


def _content(token: Any) -> str | None:
    """A token is written as its text or as an object around it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _is_id(value: object) -> bool:
    return type(value) is int and value >= 0
