"""API keys: where their text comes from, and how the key of a request is compared.

A key comes from a flag, a file or the environment, once, at start (`with_keys`). From then on the configuration holds
the text of all of them, one per line, and the children of a server are not told. What answers requests has digests
only (`KeyRing`). No error text of this file repeats a key, and a key file that any user of the machine can read or
write is refused.
"""

import hmac
import os
import stat
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from typing import Protocol, TypeVar

from tandem.environment import ADMIN_API_KEY, API_KEY

ENVIRONMENT = {"--api-key": API_KEY, "--admin-api-key": ADMIN_API_KEY}
MAX_FILE_BYTES = 1 << 16
OTHERS = stat.S_IROTH | stat.S_IWOTH


class KeyProblem(Exception):
    """A key cannot be used. One line for the user: cause and remedy, never the key."""


class Keyed(Protocol):
    """A configuration with keys; `api_key` and `admin_api_key` hold one or more, one per line."""

    @property
    def debug_host(self) -> tuple[str, ...]: ...
    @property
    def api_key(self) -> str | None: ...
    @property
    def admin_api_key(self) -> str | None: ...
    @property
    def api_key_file(self) -> str | None: ...
    @property
    def admin_api_key_file(self) -> str | None: ...


Config = TypeVar("Config", bound=Keyed)


class KeyRing:
    """Some keys, as digests. Without any, it is false and holds nothing."""

    def __init__(self, text: str | None) -> None:
        """`text`: as the configuration has it."""
        self._digests = tuple(sha256(key.encode()).digest() for key in (text or "").splitlines())

    def __bool__(self) -> bool:
        return bool(self._digests)

    def holds(self, given: str) -> bool:
        """Takes as long for any key of the same length: the delay of the answer tells nothing of our keys."""
        digest = sha256(given.encode()).digest()
        matches = [hmac.compare_digest(digest, own) for own in self._digests]
        return any(matches)


def with_keys(config: Config, environment: Mapping[str, str] = os.environ) -> Config:
    """`config` with the text of all keys in place of their files. Raises KeyProblem.

    The environment counts where neither flag nor file is given.
    """
    keys = {
        "api_key": key_text("--api-key", config.api_key, config.api_key_file, environment),
        "admin_api_key": key_text("--admin-api-key", config.admin_api_key, config.admin_api_key_file, environment),
    }
    if config.debug_host and not any(keys.values()):
        raise KeyProblem("--debug-host needs an admin key: debug pages would be everybody's there")
    return replace(config, **keys, api_key_file=None, admin_api_key_file=None)  # type: ignore[type-var]  # a dataclass


def forget_environment() -> None:
    """After `with_keys`: whatever this process starts has no use for keys."""
    for name in ENVIRONMENT.values():
        os.environ.pop(name, None)


def authorization(text: str | None) -> dict[str, str]:
    """The header that a client sends: its first key, or nothing where there is none. `text`: as `key_text` has it."""
    return {} if text is None else {"authorization": f"Bearer {text.splitlines()[0]}"}


def key_text(flag: str, value: str | None, path: str | None, environment: Mapping[str, str]) -> str | None:
    """All keys of one kind, one per line. Raises KeyProblem."""
    if value is not None and path is not None:
        raise KeyProblem(f"{flag} and {flag}-file exclude each other: write the key into the file")
    if path is not None:
        return "\n".join(read_key_file(path))
    if value is not None:
        return checked(value.strip(), flag)
    lines = environment.get(ENVIRONMENT[flag], "").splitlines()
    return "\n".join(checked(line.strip(), ENVIRONMENT[flag]) for line in lines if line.strip()) or None


def read_key_file(path: str) -> list[str]:
    """One key per line; blank lines and lines that begin with `#` do not count. Raises KeyProblem."""
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise KeyProblem(f"cannot read the keys in {path}: {error.strerror}") from error
    if mode & OTHERS:
        raise KeyProblem(f"every user of this machine may read or write {path}: chmod o= it, and change its keys")
    if len(data) > MAX_FILE_BYTES:
        raise KeyProblem(f"{path} has more than {MAX_FILE_BYTES} bytes: is it a file of keys, one per line?")
    lines = [line.strip() for line in data.decode("utf-8", "replace").splitlines()]
    keys = [checked(line, path) for line in lines if line and not line.startswith("#")]
    if not keys:
        raise KeyProblem(f"{path} holds no key")
    return keys


def checked(key: str, where: str) -> str:
    """Raises KeyProblem for what could not be sent in a header."""
    if not key:
        raise KeyProblem(f"{where}: the key is empty")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise KeyProblem(f"{where}: a key has a blank or a character that no header can carry")
    return key
