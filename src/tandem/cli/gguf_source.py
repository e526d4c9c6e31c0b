"""GGUF files: of each a Hugging Face directory is made, once, and served.

Why a directory: everything else reads one format, checked in one place. It lies in the user's cache, under a name that
says which state of which file it was made of; whoever wants it while it is being made waits.
"""

import fcntl
import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tandem.cli.failure import CommandFailed
from tandem.engine import digest_cache
from tandem.programs import module_command, working_folder

FORM = 5  # of the directories; those of another one are made anew
PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


def directory_of(file: Path) -> Path:
    """Raises CommandFailed."""
    if not file.is_file():
        raise CommandFailed(f"{file} does not exist, or is no file")
    if PART.search(file.name):
        raise CommandFailed(f"{file} is one of several parts; join them first (`llama-gguf-split --merge`)")
    weights = digest_cache.default_path()
    if weights is None:
        raise CommandFailed(f"{file}: there is no home to keep what is made of it in; set XDG_CACHE_HOME")
    made = weights.parent / "gguf" / name_of(file)
    try:
        made.parent.mkdir(parents=True, exist_ok=True)
        with (made.parent / f"{made.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                make(file, made)
    except OSError as error:
        reason = error.strerror or str(error)
        raise CommandFailed(
            f"{file}: {made} cannot be made of it: {reason}; have XDG_CACHE_HOME name a place for it"
        ) from error
    return made


def name_of(file: Path) -> str:
    """Another one when the file is another one, as far as its status tells."""
    status = file.stat()
    state = f"{FORM} {file.resolve()} {status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns}"
    return f"{file.stem}-{hashlib.sha256(state.encode()).hexdigest()[:16]}"


def make(file: Path, target: Path) -> None:
    """In a process of its own, whose memory for all weights goes with it; `target` appears when it is whole."""
    print(f"tandem: making a directory of {file.name}, once: {target}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=target.parent) as scratch:
        folder = Path(scratch) / "model"
        command = module_command("tandem.cli.gguf_conversion", str(file.resolve()), str(folder))
        done = subprocess.run(
            command, cwd=working_folder(), stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, check=False
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"it ends with {done.returncode}"]
            raise CommandFailed(f"{file} cannot be read: {lines[-1][:300]}")
        folder.rename(target)
