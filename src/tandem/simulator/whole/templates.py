"""Chat templates of a cluster's model: its own, one that shows the time before that, or none."""

import json
from functools import cache
from pathlib import Path
from shutil import rmtree

from tandem.server.api.tokenizer import Tokenizer
from tandem.simulator.whole.cluster import MODEL, MODEL_HERE

OWN, CLOCK, NONE = "", "clock", "none"
SHOWN = "It is {{ strftime_now('%H:%M:%S') }}.\n"
CONFIG = "tokenizer_config.json"


def put_model(template: str, model: Path) -> None:
    """Into the current folder, where servers find it. model: its folder."""
    folder = Path(MODEL_HERE)
    folder.unlink(missing_ok=True) if folder.is_symlink() else rmtree(folder, ignore_errors=True)  # another world's
    if template == OWN:
        folder.symlink_to(model)
        return
    folder.mkdir()
    config = json.loads((model / CONFIG).read_text())
    for file in model.iterdir():
        if file.name != CONFIG:
            (folder / file.name).symlink_to(file)
    own = config.pop("chat_template")
    (folder / CONFIG).write_text(json.dumps(config | ({"chat_template": SHOWN + own} if template == CLOCK else {})))


@cache
def tokenizer(*, shows_time: bool = False) -> Tokenizer:
    return Tokenizer(MODEL, template=SHOWN + tokenizer().templates["default"] if shows_time else "")
