"""How the states of a prompt's tokens become its one vector: what sentence-transformers keeps beside a checkpoint.

    modules.json               what a text goes through: the transformer, a pooling, perhaps a normalisation
    1_Pooling/config.json      which tokens are taken, in the folder that modules.json names

Vectors are always normalised, as by other servers. Where the files are absent an encoder takes its first token, as BERT
was trained to, and a decoder its last, the only one that has seen the whole prompt. Whatever else a text would go
through (a dense layer, a pooling of several kinds at once) is refused, and so is a decoder whose pooling needs states
that earlier chunks of the prompt had.
"""

from enum import StrEnum
from pathlib import Path
from typing import Any  # values of JSON documents

from tandem.engine.documents import Fields, ModelError, parse_json, read_json, read_regular
from tandem.logtext import shown

MODULES_BYTES = 1 << 16
DEFAULT_FOLDER = "1_Pooling"
KNOWN = ("Transformer", "Pooling", "Normalize")


class Pooling(StrEnum):
    CLS = "cls"  # the first token's state
    MEAN = "mean"  # of all tokens
    LAST = "last"  # the last token's


FIELDS = {
    "pooling_mode_cls_token": Pooling.CLS,
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_lasttoken": Pooling.LAST,
}
PREFIX = "pooling_mode_"


def read_pooling(model_dir: Path, *, is_encoder: bool) -> Pooling:
    """Raises ModelError."""
    folder = _pooling_folder(model_dir)
    document = read_json(model_dir / folder / "config.json", optional=True)
    if not document:
        return Pooling.CLS if is_encoder else Pooling.LAST
    fields = Fields(f"{folder}/config.json", document)
    named = [name for name in document if name.startswith(PREFIX) and fields.flag(name, default=False)]
    if len(named) != 1 or named[0] not in FIELDS:
        raise ModelError(f"{fields.where} pools by {shown(named)}; exactly one of {', '.join(FIELDS)} is supported")
    pooling = FIELDS[named[0]]
    if not is_encoder and pooling is not Pooling.LAST:
        raise ModelError(
            f"{fields.where} pools by {named[0]}, and of a decoder only the last token's state is supported: prompts "
            "are computed in chunks, and cached prefixes have no states"
        )
    return pooling


def _pooling_folder(model_dir: Path) -> str:
    """Raises ModelError for modules that are not known."""
    path = model_dir / "modules.json"
    try:
        modules = parse_json(read_regular(path, most_bytes=MODULES_BYTES))
    except FileNotFoundError:
        return DEFAULT_FOLDER
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read ({type(error).__name__}); download the checkpoint again") from None
    found = DEFAULT_FOLDER
    for module in modules if isinstance(modules, list) else [None]:
        kind, folder = _module(module, path)
        if kind not in KNOWN:
            raise ModelError(f"{path} has a module {shown(kind)}, which is not supported; choose another checkpoint")
        if kind == "Pooling":
            found = folder
    return found


def _module(module: Any, path: Path) -> tuple[str, str]:
    kind = module.get("type") if isinstance(module, dict) else None
    folder = module.get("path", "") if isinstance(module, dict) else None
    is_plain = isinstance(folder, str) and "/" not in folder and "\0" not in folder and folder not in (".", "..")
    if not isinstance(kind, str) or not isinstance(folder, str) or not is_plain:
        raise ModelError(f"{path} is no list of modules; download the checkpoint again")
    return kind.rpartition(".")[2], folder
