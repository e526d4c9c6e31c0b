"""What the two sides of a rendezvous say to each other. Decode pulls; nothing remote ever writes.

Delivery is at most once and in order per connection; a connection may break at any time. Whoever waits for an answer
says its own message again (`Ready` by decode, the last `Offer` by prefill), so every message is idempotent: it states
a fact about the room, cumulative from page 0, and a repetition changes nothing.
"""

from typing import Literal

from msgspec import Struct

from tandem.core.values import ZERO_NS, Cause, Cut, Incarnation, Nanos, Room

SHUTTING_DOWN = "the server is shutting down"
MAX_GRANT_SECRET_BYTES = 64  # what a data plane may ask to be remembered per grant; opaque to the core
LAYOUT_DIFFERS = "prefill and decode differ in model, dtype or page size"


ReleaseOutcome = Literal["done", "aborted", "not_needed"]


class Ready(Struct, frozen=True, tag="ready"):
    """decode -> prefill: somebody will collect what is computed for this room. This is the bootstrap."""

    room: Room
    attempt: int
    source: Incarnation  # the decode
    target: Incarnation  # the prefill this READY was meant for; another incarnation refuses it
    layout: str  # digest of protocol version, weights, dtype, page size, heads; must be equal
    prompt_len: int  # a prompt of another length is refused: both halves must mean the same request
    held_pages: int = 0  # decode already holds this many leading pages
    known_pages: int = 0  # offers seen so far reach up to here; after a loss prefill goes on from here
    prompt_digest: bytes = b""  # another one is refused: a room that was used twice must not show a foreign prompt
    rendered_at: int = 0  # as in the request: the time in decode's prompt
    cut: Cut = Cut()  # of the decode: which workers will read, and what each of them needs
    has_result: bool = False  # the result slot has come: it may be large, and is not said again
    waited_ns: Nanos = ZERO_NS  # how long decode has had its half


class ResultSlot(Struct, frozen=True):
    """What prefill sampled, read by decode once at the commit: a result slot of the prefill."""

    room: Room
    token: bytes  # int32 little endian: the first, or the first block of them
    flags: int  # TokenFlag bits
    extra: bytes  # opaque to the core: logprobs and top logprobs of the first token
    cached_tokens: int  # prompt tokens that prefill found in its prefix tree
    # prefill's own durations, for the TTFT ledger on decode's clock: between READY and the first offer, and beyond it
    queue_ns: Nanos = Nanos(0)
    compute_ns: Nanos = Nanos(0)
    overlapped_ns: Nanos = Nanos(0)  # it went on computing while pages were on offer
    prompt_extras: tuple[bytes, ...] = ()  # opaque to the core: log-probabilities of the prompt, chunk by chunk


class Offer(Struct, frozen=True, tag="offer"):
    """prefill -> decode: pages [first_page, first_page + len(pages)) are final and may be read under this lease.

    An offer that extends an earlier one is what the contract calls PUBLISH. The last one carries the result slot.
    """

    room: Room
    attempt: int  # of the READY it answers
    source: Incarnation
    first_page: int
    pages: tuple[int, ...]
    generations: tuple[int, ...]
    digests: tuple[bytes, ...]  # one per part (`kv_parts`): 8 bytes per page, made by the data plane
    secrets: tuple[bytes, ...]  # one per shard: what its data plane wants to see from whoever reads these pages
    lease_ns: Nanos
    total_pages: int
    result: ResultSlot | None = None


class Release(Struct, frozen=True, tag="release"):
    """decode -> prefill: no read of these pages will follow."""

    room: Room
    source: Incarnation
    outcome: ReleaseOutcome
    cause: Cause | None = None
    attempt: int = 0  # of the READY; a late copy about a room that is used again is told apart
    detail: str = ""
    prompt_digest: bytes = b""  # before READY nobody is bound to the room: only who has its prompt is believed
    rendered_at: int = 0  # as in READY: of prompts that show different times the digests differ
    num_pulled: int = 0  # pages that were read for it: others that were offered had come for another request


class Abort(Struct, frozen=True, tag="abort"):
    """prefill -> decode: the pages will not come, and why."""

    room: Room
    source: Incarnation
    cause: Cause
    detail: str = ""


class Moved(Struct, frozen=True, tag="moved"):
    """prefill -> decode: this room is not with this DP rank but with that one. Say there what you have said here."""

    room: Room
    source: Incarnation
    dp_rank: int


Message = Ready | Offer | Release | Abort | Moved
LastWord = Release | Abort | Moved  # what a node answers to whatever is said of a room that it has closed
