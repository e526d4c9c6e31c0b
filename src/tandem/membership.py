"""Who belongs to the cluster: those who hold its secret, and prove it without saying it.

One secret for all servers that exchange KV: the one of `--cluster-secret-file`, or else this user's on this machine,
which is made at first use. It never travels. From it come proofs and keys, each bound to what it is for:

    proof   HMAC-SHA256 over a purpose and parts, among them a challenge of the other side: nobody can use it again
    key     the same function, for a cipher of one connection

A purpose is a constant text per use, so that a proof for one door is none for another. Parts are counted and carry
their lengths: two lists of parts that differ never give the same bytes.

Why one secret and no key per server: who holds the KV of one request has its text, and any decode may be sent any
request; members have to trust each other anyway. What differs between members is what they were granted.
"""

import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

MIN_SECRET_BYTES = 16
MAX_SECRET_BYTES = 4096
CHALLENGE_BYTES = 32
PROOF_BYTES = 32
USER_SECRET = Path("tandem") / "cluster-secret"  # below the user's state folder


class SecretError(Exception):
    """The secret cannot be used. One line for the user: cause and remedy."""


class NoPlaceForSecret(SecretError):
    """This user has none yet, and nowhere to keep one."""


class ClusterSecret:
    """What all members share. Its bytes appear in no log line, error or `repr`."""

    __slots__ = ("_raw",)

    def __init__(self, raw: bytes) -> None:
        """Raises SecretError for one that is too short to be one."""
        if len(raw) < MIN_SECRET_BYTES:
            raise SecretError(f"the cluster secret has fewer than {MIN_SECRET_BYTES} bytes; make a longer one")
        self._raw = raw

    @property
    def raw(self) -> bytes:
        """For the processes of this server only."""
        return self._raw

    def proof(self, purpose: str, *parts: bytes) -> bytes:
        """PROOF_BYTES that only a member can make."""
        mac = hmac.new(self._raw, digestmod="sha256")
        for part in (purpose.encode(), len(parts).to_bytes(4), *parts):
            mac.update(len(part).to_bytes(8) + part)
        return mac.digest()

    def is_proof(self, found: bytes, purpose: str, *parts: bytes) -> bool:
        """In constant time, whatever was found."""
        return hmac.compare_digest(found, self.proof(purpose, *parts))

    def key(self, purpose: str, *parts: bytes) -> bytes:
        """32 bytes for a cipher. Never say it: a purpose is used for proofs or for keys."""
        return self.proof(purpose, *parts)

    def __repr__(self) -> str:
        return "ClusterSecret(...)"


def new_challenge() -> bytes:
    return secrets.token_bytes(CHALLENGE_BYTES)


def read_secret(path: Path) -> ClusterSecret:
    """White space around it does not count. Raises SecretError: not there, too short, or everybody may read it."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            raw = file.read(MAX_SECRET_BYTES + 1).strip()
    except OSError as error:
        raise SecretError(f"cannot read the cluster secret {path}: {error.strerror}") from error
    if stat.S_ISREG(mode) and mode & (stat.S_IROTH | stat.S_IWOTH):
        raise SecretError(f"everybody on this machine may read or write the cluster secret {path}; chmod 600 {path}")
    if not MIN_SECRET_BYTES <= len(raw) <= MAX_SECRET_BYTES:
        raise SecretError(
            f"the cluster secret in {path} has {len(raw)} bytes; it must have {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES}"
        )
    return ClusterSecret(raw)


def user_secret(environment: Mapping[str, str]) -> ClusterSecret:
    """This user's, made at first use with mode 0600. Raises SecretError.

    Several servers that start at once agree: it is written under another name and linked, which one of them wins.
    """
    path = user_secret_path(environment)
    if not os.path.exists(path):  # nor where another user is, whose folders this one may not enter
        make_secret(path)
    return read_secret(path)


def user_secret_path(environment: Mapping[str, str]) -> Path:
    """`$XDG_STATE_HOME/tandem/cluster-secret`, below `~/.local/state` where that is not set. Raises SecretError."""
    state = environment.get("XDG_STATE_HOME", "")
    if os.path.isabs(state):
        return Path(state) / USER_SECRET
    try:
        return Path.home() / ".local" / "state" / USER_SECRET
    except RuntimeError as error:
        raise NoPlaceForSecret("this user has no home folder for a secret; give --cluster-secret-file") from error


def make_secret(path: Path) -> None:
    """A new one, unless there is one. Raises NoPlaceForSecret."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            with open(descriptor, "w") as file:
                file.write(secrets.token_hex(32) + "\n")
            os.link(draft, path)
        finally:
            draft.unlink()
    except FileExistsError:
        pass  # another server was first; its secret is ours
    except OSError as error:
        raise NoPlaceForSecret(
            f"cannot make the cluster secret {path}: {error.strerror}; give --cluster-secret-file"
        ) from error
