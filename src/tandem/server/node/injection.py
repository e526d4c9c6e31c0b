"""Transfers that fail on purpose: what a worker reports becomes the report of a failure, before the node hears of it.

Decode's transfers fail when pages land, prefill's when their digests are made. A transfer without pages, because decode
holds the whole prompt, cannot fail.

One draw per transfer and shard, however often that shard reports: a draw is a pure function of the seed and of the
transfer's name. So probability p is the share of failed transfers, whatever the number of chunks, nothing has to be
remembered, and the same seed chooses the same transfers. The node's flight record holds the failure as its event.
"""

import hashlib
import secrets

from tandem.core.events import Event, PagesDigested, PagesLanded, TransferFailed
from tandem.core.values import Cause

DETAIL = "injected"


class FailedTransfers:
    """The share `prob` of all transfers, which may change at any time. Seed 0: drawn."""

    def __init__(self, prob: float, seed: int = 0) -> None:
        self.prob = prob
        self.seed = seed or secrets.randbits(32)

    def instead_of(self, event: Event) -> Event:
        """The event itself, or the failure that the node hears of instead."""
        if self.prob > 0 and isinstance(event, PagesLanded | PagesDigested) and self._is_chosen(event):
            return TransferFailed(event.request, event.attempt, event.shard, Cause.TRANSFER_FAILED, DETAIL)
        return event

    def _is_chosen(self, report: PagesLanded | PagesDigested) -> bool:
        name = f"{self.seed} {type(report).__name__} {report.request} {report.attempt} {report.shard}"
        drawn = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])
        return drawn < self.prob * 2**64
