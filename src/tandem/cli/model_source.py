"""From the MODEL that a user names to a directory on this machine."""

import re
from pathlib import Path

from tandem.cli.failure import CommandFailed

BUNDLED = "tandem/mini"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer*"]


def find_model(name: str) -> Path:
    """A local directory, the bundled model, or a hub name, which is fetched. Raises CommandFailed."""
    if name == BUNDLED:
        return Path(__file__).parent.parent / "bundled" / "mini"
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise CommandFailed(f"{name} is a file; give the Hugging Face checkpoint directory it lies in")
    if not HUB_NAME.fullmatch(name) or name.startswith("tandem/"):
        raise CommandFailed(f"model directory {name} does not exist; give a Hugging Face directory, or {BUNDLED}")
    return _fetch(name)


def _fetch(name: str) -> Path:
    # Why not at the top: half a second of imports that a local directory does not need.
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=HUB_FILES))
    except Exception as error:  # its errors have no common base, and urllib's, httpx's and the disk's come through too
        cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CommandFailed(
            f"no directory {name}, and the hub does not give a model of that name ({cause}); "
            f"give a local directory or {BUNDLED}, or check the name and the network"
        ) from error
