"""Allocation: when decode reserves pages for a prompt that a prefill computes. Two policies of one shape.

Either before it says READY, so that pages are pulled while later ones are computed; or when all of the prompt is
computed, so that nothing of decode's KV is held by what is still queued or computed there.
"""

from typing import Protocol

from tandem.core.settings import AllocationPolicy, NodeSettings


class Allocation(Protocol):
    def may_reserve(self, *, is_computed: bool) -> bool:
        """Pages for a prompt, of which prefill has computed all, or so far nothing is known."""
        ...


class Early:
    def may_reserve(self, *, is_computed: bool) -> bool:
        return True


class PrefillComplete:
    def may_reserve(self, *, is_computed: bool) -> bool:
        return is_computed


def allocation_policy(settings: NodeSettings) -> Allocation:
    match settings.allocation:
        case AllocationPolicy.EARLY:
            return Early()
        case AllocationPolicy.PREFILL_COMPLETE:
            return PrefillComplete()
