"""Who may write to a bootstrap server: those who hold the cluster's secret.

A writer signs each request with HMAC-SHA256 over method, target, time, nonce and body, and sends three headers:

    X-Tandem-Time        Unix time in whole seconds; off by more than `MAX_SKEW_S` is refused
    X-Tandem-Nonce       8 to 64 characters, of which none is accepted twice
    X-Tandem-Signature   hex

A server that listens on loopback only and was given no secret accepts every write: whoever reaches it is on this
machine. One that listens on more and was given no secret accepts none.
"""

import hashlib
import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

MAX_SKEW_S = 30
MAX_NONCES = 65_536  # of the last 2 x MAX_SKEW_S; only signed requests get in
TIME_HEADER, NONCE_HEADER, SIGNATURE_HEADER = "x-tandem-time", "x-tandem-nonce", "x-tandem-signature"


def signature(secret: bytes, *, method: str, target: str, time_s: str, nonce: str, body: bytes) -> str:
    digest = hashlib.sha256(body).hexdigest()
    return hmac.new(secret, "\n".join((method, target, time_s, nonce, digest)).encode(), hashlib.sha256).hexdigest()


def signed_headers(secret: bytes, *, method: str, target: str, body: bytes, now_s: float, nonce: str) -> dict[str, str]:
    """What a writer sends. `target` is path and query as they stand in the request line."""
    time_s = str(int(now_s))
    made = signature(secret, method=method, target=target, time_s=time_s, nonce=nonce, body=body)
    return {TIME_HEADER: time_s, NONCE_HEADER: nonce, SIGNATURE_HEADER: made}


@dataclass(slots=True)
class WriteGuard:
    secret: bytes | None
    is_loopback: bool  # the server listens on loopback only
    clock: Callable[[], float]  # Unix time in seconds
    _nonces: dict[str, float] = field(default_factory=dict)  # until when each is remembered; the oldest first

    def refusal(self, headers: Mapping[str, str], *, method: str, target: str, body: bytes) -> str | None:
        """Why this write is refused, or None. Header names are in lower case."""
        if self.secret is None:
            return None if self.is_loopback else "this server takes no writes: it was started without a cluster secret"
        given = {name: headers.get(name, "") for name in (TIME_HEADER, NONCE_HEADER, SIGNATURE_HEADER)}
        if not all(given.values()):
            return f"not signed: send {', '.join(given)}"
        time_s, nonce, found = given.values()
        wanted = signature(self.secret, method=method, target=target, time_s=time_s, nonce=nonce, body=body)
        # First of all, and in constant time: what follows tells something about requests of others.
        if not hmac.compare_digest(wanted.encode(), found.encode()):
            return "the signature is wrong"
        now = self.clock()
        if not (time_s.isascii() and time_s.isdigit() and abs(int(time_s) - now) <= MAX_SKEW_S):
            return f"signed more than {MAX_SKEW_S} s ago or ahead: compare the clocks of the two hosts"
        if not 8 <= len(nonce) <= 64:
            return "the nonce must have 8 to 64 characters"
        return self._spend(nonce, now)

    def _spend(self, nonce: str, now: float) -> str | None:
        while self._nonces and next(iter(self._nonces.values())) <= now:
            del self._nonces[next(iter(self._nonces))]
        if nonce in self._nonces:
            return "this nonce was used before"
        if len(self._nonces) >= MAX_NONCES:
            return "too many writes; try again in a minute"
        self._nonces[nonce] = now + 2 * MAX_SKEW_S + 1  # so that one signed ahead of our clock expires first
        return None
