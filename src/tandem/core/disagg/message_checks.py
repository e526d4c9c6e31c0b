"""The one door for what a peer says: every field of a message is checked here, before the rest of the core reads it.

Who proves the cluster's secret may speak; what it says may still be wrong. Three cases:

    within bounds          the message goes on as it is; texts for people become one printable line
    out of bounds          the failure of its room goes on instead, as the same peer may say it any time: it costs the
                           sender at most its own request, and the connection stays
    without a room         None: it is no message, and costs the connection

The simulator sends its hostile messages through the same function. What fits into these bounds and does not fit the
request (another prompt, more pages than it has, an earlier attempt) is decided where the request is known:
`prefill_side.refuse`, `decode_side.misfit`.
"""

from collections.abc import Callable, Sequence
from typing import assert_never

from msgspec import Struct, structs

from tandem.core.batch import TOKEN_BYTES, TokenFlag
from tandem.core.disagg.messages import MAX_GRANT_SECRET_BYTES, Abort, Message, Moved, Offer, Ready, Release, ResultSlot
from tandem.core.disagg.transfer_state import DIGEST_BYTES
from tandem.core.kv_parts import KvGrid, parts
from tandem.core.settings import MAX_DP_SIZE
from tandem.core.values import MAX_BLOCK_TOKENS, MAX_RENDERED_AT, SECOND, Cause, Cut, Incarnation

MAX_NUMBER = 1 << 63  # ids, generations, attempts, durations
MAX_COUNT = 1 << 31  # tokens and pages of one prompt
MAX_LEASE_NS = 24 * 3600 * SECOND
MAX_ID_CHARS = 64
MAX_NAME_CHARS = 255
MAX_LAYOUT_CHARS = 128
MAX_DETAIL_CHARS = 1000
MAX_DIGEST_BYTES = 64
MAX_EXTRA_BYTES = 64 << 10
MAX_PROMPT_EXTRA_BYTES = 4 << 20  # of one prompt
KNOWN_FLAGS = TokenFlag.EOS | TokenFlag.STOP | TokenFlag.INVALID


class Bounds(Struct, frozen=True):
    """What this node knows, and a message has to fit."""

    vocab_size: int
    is_extra: Callable[[bytes], bool]  # whether the edge can read this `extra`, which is opaque to the core
    is_prompt_extra: Callable[[bytes], bool]  # the same of one of `prompt_extras`
    grid: KvGrid = KvGrid()
    cut: Cut = Cut()  # of this node
    peer_cut: Cut = Cut()  # of whoever speaks, as it has said when it was met


def admitted(message: Message, bounds: Bounds) -> Message | None:
    """What the node is told when a peer says `message`; None: that was no message. Never raises."""
    if not 0 < message.room < MAX_NUMBER:
        return None
    match message:
        case Ready():
            fault = ready_fault(message, bounds)
            return message if fault is None else given_up(message, fault)
        case Offer():
            fault = offer_fault(message, bounds)
            return message if fault is None else Abort(message.room, message.source, Cause.PROTOCOL, fault)
        case Release():
            fault = release_fault(message)
            return in_one_line(message) if fault is None else given_up(message, fault)
        case Abort():
            return in_one_line(message)
        case Moved():
            return message if 0 <= message.dp_rank < MAX_DP_SIZE else None
        case _:
            assert_never(message)


def given_up(message: Ready | Release, fault: str) -> Release:
    """As if decode had said that it will not collect. For the attempt that was named, where that can be one."""
    attempt = message.attempt if 0 <= message.attempt < MAX_NUMBER else 0
    digest = message.prompt_digest if len(message.prompt_digest) <= MAX_DIGEST_BYTES else b""
    rendered_at = message.rendered_at if 0 <= message.rendered_at <= MAX_RENDERED_AT else 0
    return Release(message.room, message.source, "aborted", Cause.PROTOCOL, attempt, fault, digest, rendered_at)


def release_fault(release: Release) -> str | None:
    if not 0 <= release.attempt < MAX_NUMBER:
        return "attempt is out of bounds"
    if len(release.prompt_digest) > MAX_DIGEST_BYTES:
        return "prompt_digest is too long"
    if not 0 <= release.rendered_at <= MAX_RENDERED_AT:
        return "rendered_at is out of bounds"
    if not 0 <= release.num_pulled < MAX_COUNT:
        return "num_pulled is out of bounds"
    return None


def ready_fault(ready: Ready, bounds: Bounds) -> str | None:
    if not 0 <= ready.attempt < MAX_NUMBER:
        return "attempt is out of bounds"
    if not is_name(ready.target):
        return "target is no name of a server"
    if len(ready.layout) > MAX_LAYOUT_CHARS or len(ready.prompt_digest) > MAX_DIGEST_BYTES:
        return "layout or prompt_digest is too long"
    if not 0 < ready.prompt_len < MAX_COUNT:
        return "prompt_len is out of bounds"
    if not (0 <= ready.held_pages < MAX_COUNT and 0 <= ready.known_pages < MAX_COUNT):
        return "held_pages or known_pages is out of bounds"
    if not 0 <= ready.rendered_at <= MAX_RENDERED_AT:
        return "rendered_at is out of bounds"
    if not 0 <= ready.waited_ns < MAX_NUMBER:
        return "waited_ns is out of bounds"
    if ready.cut != bounds.peer_cut:
        return "cut is not the one that was said before"
    return None if bounds.grid.can_be_cut(ready.cut) else "cut is not possible with this model"


def offer_fault(offer: Offer, bounds: Bounds) -> str | None:
    num_pages = len(offer.pages)
    if not 0 <= offer.attempt < MAX_NUMBER:
        return "attempt is out of bounds"
    if not 0 <= offer.first_page <= offer.first_page + num_pages <= offer.total_pages < MAX_COUNT:
        return f"pages {offer.first_page} to {offer.first_page + num_pages} of {offer.total_pages} are out of bounds"
    if len(offer.generations) != num_pages:
        return f"{len(offer.generations)} generations for {num_pages} pages"
    if not (are_numbers(offer.pages) and are_numbers(offer.generations)):
        return "a page or generation is out of bounds"
    num_parts = len(parts(bounds.grid, bounds.peer_cut, bounds.cut))
    if num_pages and len(offer.digests) != num_parts:
        return f"digests of {len(offer.digests)} parts, want {num_parts}"
    if any(len(digests) != DIGEST_BYTES * num_pages for digests in offer.digests):
        return "the wrong number of digests"
    if len(offer.secrets) != bounds.peer_cut.num_shards or any(len(s) > MAX_GRANT_SECRET_BYTES for s in offer.secrets):
        return "the wrong number of secrets, or one that is too long"
    if not 0 < offer.lease_ns <= MAX_LEASE_NS:
        return "lease_ns is out of bounds"
    return None if offer.result is None else result_fault(offer.result, offer, bounds)


def result_fault(slot: ResultSlot, offer: Offer, bounds: Bounds) -> str | None:
    if slot.room != offer.room:
        return "the result slot belongs to another room"
    if len(slot.token) % TOKEN_BYTES or not 0 < len(slot.token) <= TOKEN_BYTES * MAX_BLOCK_TOKENS:
        return "the first tokens are none, or too many"
    ids = (int.from_bytes(slot.token[at : at + TOKEN_BYTES], "little") for at in range(0, len(slot.token), TOKEN_BYTES))
    if max(ids) >= bounds.vocab_size:
        return "a first token is not in the vocabulary"
    if not 0 <= slot.flags <= KNOWN_FLAGS:
        return "the result slot has unknown flags"
    if len(slot.extra) > MAX_EXTRA_BYTES or (slot.extra and not bounds.is_extra(slot.extra)):
        return "the result slot has logprobs that cannot be read"
    if sum(map(len, slot.prompt_extras)) > MAX_PROMPT_EXTRA_BYTES or not all(
        map(bounds.is_prompt_extra, slot.prompt_extras)
    ):
        return "the result slot has logprobs of the prompt that cannot be read"
    if not 0 <= slot.cached_tokens < MAX_COUNT:
        return "cached_tokens is out of bounds"
    if not are_numbers((slot.queue_ns, slot.compute_ns, slot.overlapped_ns)):
        return "a duration is out of bounds"
    return None


def are_numbers(found: Sequence[int]) -> bool:
    return not found or (min(found) >= 0 and max(found) < MAX_NUMBER)


def is_name(who: Incarnation) -> bool:
    """Short, and safe to show."""
    return 0 < len(who.id) <= MAX_ID_CHARS and len(who.name) <= MAX_NAME_CHARS and (who.id + who.name).isprintable()


def in_one_line(message: Release | Abort) -> Release | Abort:
    line = one_line(message.detail)
    return message if line == message.detail else structs.replace(message, detail=line)


def one_line(text: str) -> str:
    """For logs and error messages: nobody else's text may begin a line of its own, or fill the disk."""
    if len(text) > MAX_DETAIL_CHARS:
        text = text[:MAX_DETAIL_CHARS] + "..."
    return text if text.isprintable() else "".join(char if char.isprintable() else " " for char in text)
