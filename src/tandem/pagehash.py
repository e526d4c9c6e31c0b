"""The keyed hash chain over the pages of a token sequence: how the prefix tree knows equal prefixes without tokens.

Used by the edge (prompt pages) and by the workers (pages completed while decoding); both must agree byte for byte.
SHA-256 because prefixes of different users meet in one cache: a collision would show one user the KV of another.
"""

import hashlib
from array import array
from collections.abc import Sequence

HASH_BYTES = 16


def root_hash(*, secret: bytes, tenant: str) -> bytes:
    """Parent of the first page. Another secret or tenant means other hashes, so nothing is shared between tenants."""
    return hashlib.sha256(secret + b"\0" + tenant.encode()).digest()[:HASH_BYTES]


def page_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Hash of one full page, given the hash of the page before it (or `root_hash`)."""
    return hashlib.sha256(parent + array("i", tokens).tobytes()).digest()[:HASH_BYTES]


def prompt_digest(tokens: Sequence[int], sampling: bytes = b"") -> bytes:
    """Of the whole prompt and of how its first token is sampled: two halves with equal digests mean the same request.

    Without a key, so that two servers agree on it; compared, never used to find pages.
    """
    prompt = array("i", tokens).tobytes()
    return hashlib.sha256(b"prompt\0%d\0" % len(prompt) + prompt + sampling).digest()[:HASH_BYTES]


def prompt_hashes(root: bytes, tokens: Sequence[int], *, page_size: int) -> list[bytes]:
    """One hash per full page of `tokens`."""
    hashes: list[bytes] = []
    parent = root
    for stop in range(page_size, len(tokens) + 1, page_size):
        parent = page_hash(parent, tokens[stop - page_size : stop])
        hashes.append(parent)
    return hashes
