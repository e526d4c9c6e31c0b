"""Whose prompts share cached pages: those that came with one API key, one `cache_salt` and one `extra_key`.

How much of a prompt was cached is told to its sender (`cached_tokens`) and shows in the time to the first token. So a
prompt of another key is never found, whatever the sender puts into the salt.
"""

import hashlib

from starlette.datastructures import Headers


def given_key(headers: Headers) -> str:
    """The key that a request presented, as a bearer token or as clients of Anthropic do; empty when it has none."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    token = given.strip() if scheme.lower() == "bearer" else ""
    return token or headers.get("x-api-key", "").strip()


def tenant_of(key: str, salt: str | None, extra_key: str | None = None) -> str:
    """The name under which pages are cached (`pagehash.root_hash`). extra_key: SGLang's name for a second salt.

    The key comes first, hashed to one length, and a slash ends it: no key with some salt has the name of another key
    with another salt, nor that of a request without key. A plus instead says that the length of the salt follows, which
    tells where the second one begins.
    """
    owner = hashlib.sha256(b"tandem/tenant\0" + key.encode()).hexdigest() if key else ""
    salt = salt or ""
    return f"{owner}+{len(salt)}/{salt}{extra_key}" if extra_key else f"{owner}/{salt}"
