"""Optimistic prefill: what to do while decode's READY is missing. Three policies of one shape."""

import hashlib
from enum import StrEnum
from typing import Protocol

from msgspec import Struct

from tandem.core.settings import NodeSettings, OptimisticPolicy


class View(Struct, frozen=True):
    """What a policy may look at."""

    ready: bool
    forced: bool  # the test hook has chosen this request for a retry
    retries: int  # times its pages were given back
    yields: int  # those of them under pressure
    prompt_len: int
    parked_tokens: int  # of all requests parked on this node


class Verdict(StrEnum):
    GO_ON = "go_on"  # next chunk; at the end: offer
    PARK = "park"
    GIVE_BACK = "give_back"  # and run again, as often as the policy allows
    YIELD = "yield"  # give back, and wait for READY before running again


class BootstrapPolicy(Protocol):
    def may_start(self, view: View) -> bool:
        """Compute without, or before, READY?"""
        ...

    def at_boundary(self, view: View) -> Verdict:
        """A chunk that is not the last has returned."""
        ...

    def at_end(self, view: View) -> Verdict:
        """The whole prompt is computed and the first token sampled."""
        ...


class Off:
    def may_start(self, view: View) -> bool:
        return view.ready

    def at_boundary(self, view: View) -> Verdict:
        return Verdict.GO_ON

    def at_end(self, view: View) -> Verdict:
        return Verdict.GO_ON


class Retry(Struct, frozen=True):
    """sglang#26780: without READY at a chunk boundary or at the end, pages go to the prefix tree and it runs again."""

    max_retries: int

    def may_start(self, view: View) -> bool:
        return view.ready or view.retries < self.max_retries

    def at_boundary(self, view: View) -> Verdict:
        return Verdict.GO_ON if view.ready and not view.forced else Verdict.GIVE_BACK

    def at_end(self, view: View) -> Verdict:
        return self.at_boundary(view)


class Park(Struct, frozen=True):
    """Compute to the end and keep everything until READY comes, up to a bound of parked tokens."""

    max_tokens: int
    max_attempts: int

    def may_start(self, view: View) -> bool:
        return view.ready or view.yields < self.max_attempts

    def at_boundary(self, view: View) -> Verdict:
        return Verdict.GIVE_BACK if view.forced else Verdict.GO_ON

    def at_end(self, view: View) -> Verdict:
        if view.forced:
            return Verdict.GIVE_BACK
        if view.ready:
            return Verdict.GO_ON
        return Verdict.PARK if view.parked_tokens + view.prompt_len <= self.max_tokens else Verdict.YIELD


def bootstrap_policy(settings: NodeSettings) -> BootstrapPolicy:
    match settings.optimistic:
        case OptimisticPolicy.OFF:
            return Off()
        case OptimisticPolicy.RETRY:
            return Retry(settings.optimistic_retries)
        case OptimisticPolicy.PARK:
            return Park(settings.park_max_tokens, settings.park_attempts)


def should_force_retry(rid: str, *, prob: float, prefill_retry_count: int, is_retracted: bool = False) -> bool:
    """Test hook of sglang#26780: a share `prob` of the request ids is retried once, the same ids everywhere."""
    if prob <= 0 or prefill_retry_count > 0 or is_retracted:
        return False
    digest = hashlib.sha256(rid.encode()).digest()
    return int.from_bytes(digest[:8], "big") < prob * 2**64
