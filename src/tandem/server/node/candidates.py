"""Where one life of a prefill may be dialled, and which bootstrap servers say so.

What a bootstrap server tells belongs to its address: it can neither change nor take away what another one told. Whether
an endpoint is right shows when who answers there proves to be the one that was meant.
"""

from dataclasses import dataclass, field

from tandem.core.values import Address

Endpoint = tuple[str, int]
Voucher = tuple[Address, int]  # a bootstrap server, and the DP rank it was asked for

MAX_ENDPOINTS = 8
MAX_VOUCHERS = 64  # of one endpoint


@dataclass(slots=True)
class CandidateEndpoint:
    vouchers: set[Voucher] = field(default_factory=set[Voucher])
    has_more_vouchers: bool = False  # than are remembered: it is never without one
    is_proven: bool = False  # the one that was meant has answered there


@dataclass(slots=True)
class Candidates:
    _found: dict[Endpoint, CandidateEndpoint] = field(default_factory=dict[Endpoint, CandidateEndpoint])

    @property
    def endpoints(self) -> list[Endpoint]:
        return list(self._found)

    @property
    def is_proven(self) -> bool:
        return any(candidate.is_proven for candidate in self._found.values())

    def vouch(self, voucher: Voucher, endpoint: Endpoint) -> None:
        """It stands for one endpoint at a time. The table may be full of better ones: then nothing changes."""
        if not self.is_vouched_by(voucher, endpoint):
            self.withdraw(voucher)
        if endpoint not in self._found and not self._has_room():
            return
        candidate = self._found.setdefault(endpoint, CandidateEndpoint())
        if len(candidate.vouchers) < MAX_VOUCHERS:
            candidate.vouchers.add(voucher)
        else:
            candidate.has_more_vouchers = True

    def is_vouched_by(self, voucher: Voucher, endpoint: Endpoint | None = None) -> bool:
        found = self._found.values() if endpoint is None else [self._found[endpoint]] if endpoint in self._found else []
        return any(voucher in candidate.vouchers for candidate in found)

    def withdraw(self, voucher: Voucher) -> None:
        """An endpoint for which nobody vouches any more is none."""
        for endpoint, candidate in list(self._found.items()):
            candidate.vouchers.discard(voucher)
            if not candidate.vouchers and not candidate.has_more_vouchers:
                self.remove(endpoint)

    def prove(self, endpoint: Endpoint) -> None:
        if endpoint in self._found:
            self._found[endpoint].is_proven = True

    def remove(self, endpoint: Endpoint) -> None:
        """Nobody answers there, or somebody else. When the last one goes that was right, guesses are no hope."""
        candidate = self._found.pop(endpoint, None)
        if candidate is not None and candidate.is_proven and not self.is_proven:
            self._found.clear()

    def _has_room(self) -> bool:
        """If need be by forgetting the oldest guess."""
        if len(self._found) < MAX_ENDPOINTS:
            return True
        guess = next((endpoint for endpoint, candidate in self._found.items() if not candidate.is_proven), None)
        if guess is not None:
            del self._found[guess]
        return guess is not None
