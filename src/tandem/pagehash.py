"""The keyed hash chain over the pages of a token sequence: how the prefix tree knows equal prefixes without tokens.

Used by the edge (prompt pages) and by the workers (pages completed while decoding); both must agree byte for byte.

    root   of a tenant, keyed by a secret of the API process: the parent of the first page's link
    link   SHA-256 over the parent's link and the tokens of one full page
    hash   the first half of a link: all that the core sees of a page, and with it flight records

Links stay in the API process and its worker. Whoever reads hashes knows no link, so he cannot try out what the prompt
was, not even page by page. They never travel to a peer: another server has another secret. SHA-256 because prefixes of
different users meet in one cache: a collision would show one user the KV of another.
"""

import hashlib
import hmac
from array import array
from collections.abc import Sequence

HASH_BYTES = 16
TOKEN_BYTES = array("i").itemsize


def root_hash(*, secret: bytes, tenant: str) -> bytes:
    """Parent of the first link. Another secret or tenant means other hashes, so nothing is shared between tenants."""
    return hmac.digest(secret, b"root\0" + tenant.encode(), "sha256")


def page_link(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Link of one full page, given that of the page before it (or `root_hash`)."""
    return _link(parent, array("i", tokens).tobytes())


def _link(parent: bytes, written: bytes) -> bytes:
    return hashlib.sha256(parent + written).digest()


def hash_of(link: bytes) -> bytes:
    """What may be told of a page."""
    return link[:HASH_BYTES]


def prompt_links(root: bytes, tokens: Sequence[int], *, page_size: int) -> list[bytes]:
    """One link per full page of `tokens`."""
    links: list[bytes] = []
    parent, written = root, array("i", tokens).tobytes()
    page_bytes = page_size * TOKEN_BYTES
    for stop in range(page_bytes, len(written) + 1, page_bytes):
        parent = _link(parent, written[stop - page_bytes : stop])
        links.append(parent)
    return links


def prompt_hashes(root: bytes, tokens: Sequence[int], *, page_size: int) -> list[bytes]:
    """One hash per full page of `tokens`."""
    return [hash_of(link) for link in prompt_links(root, tokens, page_size=page_size)]


def prompt_digest(tokens: Sequence[int], sampling: bytes = b"", *, secret: bytes) -> bytes:
    """Of the whole prompt and of how its first token is sampled: two halves with equal digests mean the same request.

    Compared, never used to find pages. The secret is one that both halves have: it is for those who read messages
    between nodes or flight records and would try out prompts.
    """
    prompt = array("i", tokens).tobytes()
    return hmac.digest(secret, b"prompt\0%d\0" % len(prompt) + prompt + sampling, "sha256")[:HASH_BYTES]
