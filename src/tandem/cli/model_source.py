"""From the MODEL that a user names to a directory on this machine."""

import re
from pathlib import Path

from tandem.cli import gguf_source
from tandem.cli.failure import CommandFailed

BUNDLED = "tandem/mini"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
NAME_IT = "give that file itself, there may be several"
NO_PICKLES = "pickled weights are not read, for they can run code; give a checkpoint in safetensors"
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer*"]


def find_model(name: str) -> Path:
    """A local directory, the bundled model, what is made of a GGUF file, or a hub name, which is fetched. Raises
    CommandFailed.
    """
    if name == BUNDLED:
        return Path(__file__).parent.parent / "bundled" / "mini"
    path = Path(name).expanduser()
    if path.suffix == ".gguf" and not path.is_dir():
        return gguf_source.directory_of(path)
    if path.is_dir():
        refuse_other_formats(path)
        return path
    if path.exists():
        raise CommandFailed(f"{name} is a file; give the Hugging Face checkpoint directory it lies in")
    if not HUB_NAME.fullmatch(name) or name.startswith("tandem/"):
        raise CommandFailed(f"model directory {name} does not exist; give a Hugging Face directory, or {BUNDLED}")
    return _fetch(name)


def refuse_other_formats(folder: Path) -> None:
    """Raises CommandFailed where the weights are there, but not as safetensors."""
    names = sorted(entry.name for entry in folder.iterdir())
    if any(name.endswith(".safetensors") for name in names):
        return
    for ending, reason in ((".gguf", NAME_IT), (".bin", NO_PICKLES), (".pth", NO_PICKLES)):
        if found := next((name for name in names if name.endswith(ending)), None):
            raise CommandFailed(f"{folder} has {found} and no safetensors: {reason}")


def _fetch(name: str) -> Path:
    # Why not at the top: half a second of imports that a local directory does not need.
    import huggingface_hub

    try:
        folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=HUB_FILES))
    except Exception as error:  # its errors have no common base, and urllib's, httpx's and the disk's come through too
        raise CommandFailed(f"no directory {name}, and {_why_not(name, error)}; or serve {BUNDLED}") from error
    if not any(folder.glob("*.safetensors")):
        raise CommandFailed(
            f"{name} has no safetensors on the hub; give a GGUF file of it, if there is one, or the model that it was "
            "made from"
        )
    return folder


def _why_not(name: str, error: Exception) -> str:
    """A clause with what to do."""
    from huggingface_hub import constants, utils

    if isinstance(error, utils.GatedRepoError):
        return f"the hub wants its licence to be accepted: do so at {constants.ENDPOINT}/{name}, and set HF_TOKEN"
    if isinstance(error, utils.RepositoryNotFoundError):
        return f"the hub has no model {name}, or a private one: check the name, or set HF_TOKEN"
    if isinstance(error, utils.LocalEntryNotFoundError):
        if constants.HF_HUB_OFFLINE:
            return (
                f"HF_HUB_OFFLINE forbids to ask the hub, and {constants.HF_HUB_CACHE} does not hold the model: run "
                f"`hf download {name}` where that is allowed, or give a local directory"
            )
        return f"the hub cannot be reached and {constants.HF_HUB_CACHE} does not hold the model: check the network"
    cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return f"the hub does not give a model of that name ({cause}): check the name and the network"
