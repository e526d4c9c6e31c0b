"""What the router knows a prompt by, so as to send it where its beginning has been: hashes of the text as it came.

The router has no tokenizer and renders no template. It hashes what a template puts into a prompt (tools, then the
messages in order; or the text, or the token ids), as JSON, in blocks of 128 bytes, each together with all before it. A
conversation that goes on begins with the same blocks; where a client writes the same prompt in another way (other
spaces, another order of fields), or a template shows the time, they differ, and the guess is missing, never wrong.

The chain is keyed by a secret of this process and, as on the workers, by who asks: nobody can try out from the router's
records what a prompt was, and nobody is sent where another one's prompt is cached.
"""

import hashlib
from collections.abc import Callable, Mapping
from typing import cast

import msgspec

from tandem.core.router.sent_prefixes import Blocks
from tandem.pagehash import root_hash
from tandem.server.api.tenant import tenant_of

BLOCK_BYTES = 128  # about two pages of 16 tokens
MAX_BLOCKS = 2048  # of one prompt; what comes after them is the same guess
HASH_BYTES = 8
FIELDS = ("tools", "system", "instructions", "kept_items", "messages", "prompt", "text", "input_ids", "input")

BlocksOf = Callable[[Mapping[str, object], str], Blocks]  # of a body, and the key that it came with


def no_blocks(body: Mapping[str, object], key: str) -> Blocks:
    """Where no policy looks at them."""
    return ()


class PromptBlocks:
    """`BlocksOf` of one router process."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def __call__(self, body: Mapping[str, object], key: str) -> Blocks:
        """In any thread. Of several prompts the first counts: they go to the same worker."""
        salts = [salt if isinstance(salt, str) else None for salt in (body.get("cache_salt"), body.get("extra_key"))]
        parent = root_hash(secret=self._secret, tenant=tenant_of(key, *salts))
        text = b"".join(msgspec.json.encode(first_of(body[name])) for name in FIELDS if name in body)
        blocks: list[bytes] = []
        for stop in range(BLOCK_BYTES, min(len(text), BLOCK_BYTES * MAX_BLOCKS) + 1, BLOCK_BYTES):
            parent = hashlib.sha256(parent + text[stop - BLOCK_BYTES : stop]).digest()
            blocks.append(parent[:HASH_BYTES])
        return tuple(blocks)


def first_of(value: object) -> object:
    """Of a list of prompts (texts or lists of tokens) the first; anything else is one prompt."""
    prompts = cast(list[object], value) if isinstance(value, list) else []
    return prompts[0] if prompts and isinstance(prompts[0], (str, list)) else value
