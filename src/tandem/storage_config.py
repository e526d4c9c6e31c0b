"""What `--hicache-storage-backend-extra-config` says: those of SGLang's keys that mean something here.

prefetch_threshold                 tokens; a prompt that misses fewer is not looked up
prefetch_timeout_base              seconds that policy `timeout` waits for any prompt
prefetch_timeout_per_ki_token      and for each 1,024 tokens of it
"""

from importlib.util import find_spec
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

EXAMPLE = '{"prefetch_threshold":256,"prefetch_timeout_base":1,"prefetch_timeout_per_ki_token":0.25}'
BACKENDS = ("file", "nixl")
REFUSED = "--hicache-storage-backend is file or nixl, both a folder; the others of SGLang are services of their own"
MISSING = "--hicache-storage-backend nixl needs NIXL: pip install 'tandem-llm[nixl]'"

Seconds = Annotated[float, Meta(ge=0, le=3600)]


class StorageExtra(Struct, frozen=True, forbid_unknown_fields=True):
    prefetch_threshold: Annotated[int, Meta(ge=1)] = 256
    prefetch_timeout_base: Seconds = 1.0
    prefetch_timeout_per_ki_token: Seconds = 0.25


def is_nixl_installed() -> bool:
    return find_spec("nixl") is not None


def read(text: str | None) -> StorageExtra:
    """Raises ValueError with what is wrong."""
    try:
        return StorageExtra() if text is None else msgspec.json.decode(text, type=StorageExtra)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None


def is_readable(text: str | None) -> bool:
    try:
        read(text)
    except ValueError:
        return False
    return True
