"""A digest of every tensor that a model computes with: two servers whose weights differ anywhere are not put together.

Independent of where the directory lies and of how tensors are spread over files. Tensors are read once, in pieces that
several threads hash over the mapped files, and remembered per file in a cache (`digest_cache.py`).

The hash tells differences, it does not withstand somebody who looks for a collision: who can run a server can claim any
digest. xxh3 reads as fast as memory does; SHA-256 takes six times as long.
"""

import hashlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any  # numpy's types do not say that arrays are buffers

import torch
from xxhash import xxh3_128_hexdigest

from tandem import cgroups
from tandem.engine.checkpoint import Checkpoint
from tandem.engine.digest_cache import DigestCache
from tandem.engine.progress import LoggedProgress

PIECE_BYTES = 16 << 20
MOST_THREADS = 8


def tensor_digests(checkpoint: Checkpoint, names: Iterable[str], cache: DigestCache) -> dict[str, str]:
    """Digest of each tensor: its type, shape and bytes, as stored."""
    wanted = set(names)
    found: dict[str, str] = {}
    for path in checkpoint.files:
        here = [name for name in checkpoint.names_in(path) if name in wanted]
        known = cache.find(path, checkpoint.stamps[path]) if checkpoint.is_unchanged(path) else {}
        missing = [name for name in here if name not in known]
        if missing:
            known = known | _hash(checkpoint, missing)
            if checkpoint.is_unchanged(path):
                cache.keep(path, checkpoint.stamps[path], known)
        found |= {name: known[name] for name in here}
    cache.write()
    return found


def weights_digest(digests: dict[str, str]) -> str:
    """One for all tensors."""
    text = "".join(f"{name} {digest}\n" for name, digest in sorted(digests.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _hash(checkpoint: Checkpoint, names: list[str]) -> dict[str, str]:
    threads = min(MOST_THREADS, cgroups.num_cores())
    progress, found = LoggedProgress("reading for their digests: tensors", len(names)), dict[str, str]()
    with ThreadPoolExecutor(threads, thread_name_prefix="digest") as pool:
        begun = {name: [pool.submit(xxh3_128_hexdigest, each) for each in _pieces(checkpoint, name)] for name in names}
        for name, pieces in begun.items():
            found[name] = _combined(checkpoint, name, [each.result() for each in pieces])
            progress.at(len(found))
    return found


def _pieces(checkpoint: Checkpoint, name: str) -> Iterator[memoryview]:
    array: Any = checkpoint.tensor(name).reshape(-1).view(torch.uint8).numpy()
    data = memoryview(array)
    for start in range(0, len(data), PIECE_BYTES):
        yield data[start : start + PIECE_BYTES]


def _combined(checkpoint: Checkpoint, name: str, pieces: list[str]) -> str:
    text = f"{checkpoint.dtype_of(name)} {checkpoint.shape_of(name)} {' '.join(pieces)}"
    return xxh3_128_hexdigest(text.encode())
