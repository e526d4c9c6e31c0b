"""Local prefill: which prompts decode computes itself, although a prefill was named for them.

What is short, or mostly cached here already, is computed sooner than it is fetched, and spares prefill the work. It is
asked when its turn to be admitted has come and before READY is said; prefill is told `not_needed`.
"""

from typing import Protocol

from msgspec import Struct

from tandem.core.settings import LocalPrefill, NodeSettings

AUTO_CHUNK_SHARE = 8  # `auto`: at most this part of a chunk, so that decode rows hardly feel it


class LocalView(Struct, frozen=True):
    """What a policy may look at; tokens."""

    uncached: int  # of the prompt: what would have to be computed here
    backlog: int  # of other prompts that are computed here
    chunk: int


class LocalPrefillPolicy(Protocol):
    def may_compute_here(self, view: LocalView) -> bool: ...


class Never:
    def may_compute_here(self, view: LocalView) -> bool:
        return False


class UpTo(Struct, frozen=True):
    max_tokens: int

    def may_compute_here(self, view: LocalView) -> bool:
        return view.uncached <= self.max_tokens


class Auto:
    def may_compute_here(self, view: LocalView) -> bool:
        return view.backlog == 0 and view.uncached <= view.chunk // AUTO_CHUNK_SHARE


def local_prefill_policy(settings: NodeSettings) -> LocalPrefillPolicy:
    match settings.local_prefill:
        case LocalPrefill.OFF:
            return Never()
        case LocalPrefill.UP_TO:
            return UpTo(settings.local_prefill_tokens)
        case LocalPrefill.AUTO:
            return Auto()
