"""`python -m tandem.cli.gguf_conversion FILE FOLDER`: a GGUF file as a Hugging Face directory, see `gguf_checkpoint`.

The last line on stderr says what is wrong.
"""

import os
import sys
from pathlib import Path

from tandem.engine.documents import ModelError

NEEDS = "it takes the packages of `pip install tandem-llm[gguf]`"


def main() -> int:
    file, folder = map(Path, sys.argv[1:])
    os.environ["HF_HUB_OFFLINE"] = "1"  # whatever it needs is in the file
    try:
        from tandem.engine import gguf_checkpoint
    except ImportError as error:
        return failed(f"{NEEDS} ({error})")
    try:
        gguf_checkpoint.make(file, folder)
    except ModelError as error:
        return failed(str(error))
    except Exception as error:  # two libraries, and any bytes
        return failed(f"{type(error).__name__}: {' '.join(str(error).split()) or 'no reason'}")
    return 0


def failed(reason: str) -> int:
    print(reason, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
