"""Who may write to a bootstrap server: those who prove the cluster's secret for this very request.

    1  the writer gets a challenge: `GET /challenge`, or the 401 that answers a write without a proof
    2  it sends the write with three headers

        X-Tandem-Challenge     as it was given
        X-Tandem-Body-SHA256   of the body, 64 hex digits
        X-Tandem-Signature     hex of `ClusterSecret.proof` over method, target, challenge and the body's hash

A challenge is a random number and the time until which it holds, with a MAC of a key that only this process has: it is
recognised without having been remembered, so a flood of questions for challenges costs no memory. It is accepted once,
here and nowhere else. What is remembered are the challenges of proved writes, until they expire. No clock of another
machine is compared.

The body is named by its hash and not by itself so that a writer is known before its body is read: of others, none is.
"""

import hashlib
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hmac import compare_digest, digest

from tandem.core.values import SECOND, Nanos
from tandem.membership import ClusterSecret
from tandem.server.api.http_exchange import HttpResponse, exchange

WRITE = "bootstrap-write"  # what the proof is for
CHALLENGE_NS = 30 * SECOND
WRITE_SECONDS = 10.0  # for each of the two answers
MAX_SPENT = 65_536  # proved writes of the last CHALLENGE_NS
CHALLENGE_PATH = "/challenge"
CHALLENGE_HEADER = "x-tandem-challenge"
HASH_HEADER = "x-tandem-body-sha256"
SIGNATURE_HEADER = "x-tandem-signature"

NONCE_BYTES, TIME_BYTES, MAC_BYTES = 16, 8, 32
CHALLENGE = re.compile(rf"[0-9a-f]{{{2 * (NONCE_BYTES + TIME_BYTES + MAC_BYTES)}}}")
HASH = re.compile(r"[0-9a-f]{64}")


def signature(secret: ClusterSecret, *, method: str, target: str, challenge: str, body_hash: str) -> str:
    parts = (method, target, challenge, body_hash)
    return secret.proof(WRITE, *(part.encode() for part in parts)).hex()


def signed_headers(secret: ClusterSecret, *, method: str, target: str, challenge: str, body: bytes) -> dict[str, str]:
    """What a writer sends. `target` is path and query as they stand in the request line."""
    body_hash = hashlib.sha256(body).hexdigest()
    made = signature(secret, method=method, target=target, challenge=challenge, body_hash=body_hash)
    return {CHALLENGE_HEADER: challenge, HASH_HEADER: body_hash, SIGNATURE_HEADER: made}


async def signed_write(
    secret: ClusterSecret, host: str, port: int, *, method: str, target: str, body: bytes
) -> HttpResponse:
    """Write to a bootstrap server: what a rank of another process, and a dispatcher, does. `host` is a number.

    Raises OSError and `ExchangeError`; a refusal is an answer.
    """
    given = await exchange(host, port, "GET", CHALLENGE_PATH, timeout_s=WRITE_SECONDS)
    challenge = given.body.decode("ascii", "replace").strip()
    if CHALLENGE.fullmatch(challenge) is None:
        return given
    headers = signed_headers(secret, method=method, target=target, challenge=challenge, body=body)
    return await exchange(host, port, method, target, body=body, headers=headers, timeout_s=WRITE_SECONDS)


@dataclass(slots=True)
class WriteGuard:
    """Of one bootstrap server. Without a secret nobody writes."""

    secret: ClusterSecret | None
    now: Callable[[], Nanos]
    _key: bytes = field(default_factory=lambda: secrets.token_bytes(MAC_BYTES), repr=False)
    _spent: dict[str, Nanos] = field(default_factory=dict)  # until when each holds; in the order of their use

    def challenge(self) -> str:
        until = self.now() + CHALLENGE_NS
        made = secrets.token_bytes(NONCE_BYTES) + until.to_bytes(TIME_BYTES)
        return (made + digest(self._key, made, "sha256")).hex()

    def refusal(self, headers: Mapping[str, str], *, method: str, target: str) -> str | None:
        """Why this write is refused, or None: then its challenge is spent, and its body has to have the hash that it
        names. Header names are in lower case.
        """
        if self.secret is None:
            return "this server takes no writes: it has no cluster secret"
        names = (CHALLENGE_HEADER, HASH_HEADER, SIGNATURE_HEADER)
        challenge, body_hash, found = (headers.get(name, "") for name in names)
        if not (challenge and body_hash and found):
            return f"not signed: prove the cluster secret for this challenge ({', '.join(names)})"
        until = self._until(challenge)
        if until is None or HASH.fullmatch(body_hash) is None:
            return "the challenge is not one of this server, or the hash is none"
        wanted = signature(self.secret, method=method, target=target, challenge=challenge, body_hash=body_hash)
        if not compare_digest(wanted.encode(), found.encode()):
            return "the signature is wrong"
        return self._spend(challenge, until)

    def _until(self, challenge: str) -> Nanos | None:
        """None: it was not made here. Checked first, so that nothing but a hash is computed for guesses."""
        if CHALLENGE.fullmatch(challenge) is None:
            return None
        raw = bytes.fromhex(challenge)
        made, mac = raw[:-MAC_BYTES], raw[-MAC_BYTES:]
        if not compare_digest(mac, digest(self._key, made, "sha256")):
            return None
        return Nanos(int.from_bytes(made[NONCE_BYTES:]))

    def _spend(self, challenge: str, until: Nanos) -> str | None:
        now = self.now()
        if until <= now:
            return f"the challenge is older than {CHALLENGE_NS // SECOND} s; ask for another"
        if challenge in self._spent:
            return "this challenge was used before; ask for another"
        if len(self._spent) >= MAX_SPENT:
            self._spent = {spent: until for spent, until in self._spent.items() if until > now}
        if len(self._spent) >= MAX_SPENT:
            return "too many writes; try again in a minute"
        self._spent[challenge] = until
        return None


def has_hash(body: bytes, headers: Mapping[str, str]) -> bool:
    """Of a write that was admitted."""
    return compare_digest(hashlib.sha256(body).hexdigest(), headers.get(HASH_HEADER, ""))
