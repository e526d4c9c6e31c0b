"""What can happen to one replica of the small world.

Each function lets one thing happen to a `Draft` and returns what the node hears of it: events for its next step, or
None if it hears nothing. A worker answers in launch order, one thread digests in the order of the commands, and what
the data plane has to say comes in order; between these three every order is possible.
"""

from collections.abc import Callable
from typing import cast

import msgspec

from tandem.core.batch import BatchPlan
from tandem.core.disagg.messages import Message, Release
from tandem.core.events import (
    AbortRequested,
    BatchFailed,
    BatchReturned,
    Event,
    PagesCopied,
    PeerLearned,
    PeerLost,
    PeerSaid,
    PeerUnknown,
    PromptRendered,
    RequestArrived,
)
from tandem.core.kv.pool import PageState
from tandem.core.values import Address, Cause, Incarnation, Nanos, PageId, RequestId
from tandem.page_files import NAMESPACE_BYTES, PageFiles
from tandem.page_storage import nothing, perform
from tandem.simulator.actors.executor import digests, last_link
from tandem.simulator.actors.host_tier import copy_pages
from tandem.simulator.actors.storage import VirtualFolder
from tandem.simulator.model_check.data_plane import SHARD
from tandem.simulator.model_check.replica_value import Draft, SmallHalf
from tandem.simulator.oracle import Script, Violation
from tandem.transfer.jobs import Trouble
from tandem.transfer.lender import Grant
from tandem.transfer.protocol import Status

NAMESPACE, FOLDER_BYTES = bytes(NAMESPACE_BYTES), 1 << 30  # all servers are alike, and nothing is too much


def _arrives(draft: Draft, request: RequestId) -> tuple[Event, ...]:
    draft.to_come.remove(request)
    draft.halves[request] = SmallHalf(request)
    _give_prompt(draft, request, draft.cast.scripts[request])
    return (RequestArrived(draft.cast.requests[request]),)


def _rendered(draft: Draft, request: RequestId) -> tuple[Event, ...]:
    """Its edge has rendered it at the peer's time, also if it has ended meanwhile."""
    draft.to_render.remove(request)
    rendered, script = draft.cast.rendered[request]
    draft.halves[request] = msgspec.structs.replace(draft.halves[request], is_rendered_anew=True)
    _give_prompt(draft, request, script)
    return (PromptRendered(rendered),)


def _give_prompt(draft: Draft, request: RequestId, script: Script) -> None:
    prompt_hash = last_link(draft.cast.root, script.prompt, page_size=draft.executor.page_size)
    draft.executor.add(request, script, prompt_hash)


def _never_comes(draft: Draft, request: RequestId) -> None:
    draft.to_come.remove(request)


def _is_not_needed(draft: Draft, request: RequestId, peer: Incarnation) -> None:
    """The decode half is served without a peer, and says so (local prefill)."""
    draft.to_come.remove(request)
    asked = draft.cast.requests[request]
    assert asked.room is not None
    draft.told.append((peer, Release(asked.room, draft.life, "not_needed", prompt_digest=asked.prompt_digest)))


def _aborts(draft: Draft, request: RequestId) -> tuple[Event, ...]:
    return (AbortRequested(request),)


def _batch_returns(draft: Draft) -> tuple[Event, ...]:
    plan = cast(BatchPlan, draft.work.pop(0))
    return (BatchReturned(draft.executor.run(plan)),)


def _batch_fails(draft: Draft) -> tuple[Event, ...]:
    plan = cast(BatchPlan, draft.work.pop(0))
    draft.executor.break_off(plan)
    return (BatchFailed(plan.id, Cause.WORKER_LOST, "the forward pass raised"),)


def _pages_are_copied(draft: Draft) -> tuple[Event, ...]:
    """The first copy that was asked for, now: what it reads, and writes, is what is there at its end."""
    copied = copy_pages(draft.copies.pop(0), draft.host, draft.executor.memory, SHARD)
    if copied.detail:
        raise Violation("S7", f"{draft.cast.name}: {copied.detail}")
    return (copied,)


def _copy_fails(draft: Draft) -> tuple[Event, ...]:
    return (PagesCopied(draft.copies.pop(0).copy, SHARD, 0, "no memory"),)


def _storage_answers(draft: Draft) -> tuple[Event, ...]:
    """The first thing that was asked of it, now. What has left host memory meanwhile is not written."""
    page_bytes = draft.host.page_bytes
    files = PageFiles(VirtualFolder.without_faults(draft.stored), NAMESPACE, page_bytes, FOLDER_BYTES, now=lambda: 0)
    return (perform(draft.asked.pop(0), files, draft.host, SHARD),)


def _storage_fails(draft: Draft) -> tuple[Event, ...]:
    return (nothing(draft.asked.pop(0), SHARD, "the disk is gone"),)


def _finds(draft: Draft, address: Address, peer: Incarnation, layout: str) -> tuple[Event, ...]:
    draft.lookups.remove(address)
    return (PeerLearned(address, peer, layout),)


def _finds_nobody(draft: Draft, address: Address) -> tuple[Event, ...]:
    draft.lookups.remove(address)
    return (PeerUnknown(address, "nobody answers"),)


def _hears(draft: Draft, peer: Incarnation, message: Message) -> tuple[Event, ...]:
    return (PeerSaid(peer, message),)


def _loses_peer(draft: Draft, peer: Incarnation) -> tuple[Event, ...]:
    return (PeerLost(peer),)


def _is_told(draft: Draft) -> tuple[Event, ...]:
    return (draft.inbox.pop(0),)


def _wakes(draft: Draft, after_ns: int) -> tuple[Event, ...]:
    draft.now = Nanos(draft.now + after_ns)
    return ()


def _waits(draft: Draft, for_ns: int) -> None:
    draft.now = Nanos(draft.now + for_ns)


# The source of pages.


def _digested(draft: Draft) -> tuple[Event, ...]:
    command = draft.to_digest.pop(0)
    grant = draft.lender.publish(command)  # the one that it has
    draft.lender.digested(grant, command, digests(command, draft.reader.kv, draft.executor.memory))
    return (draft.inbox.pop(),)  # the one thread that digests says it before it goes on


def _read_begins(
    draft: Draft, link: int, room: int, secret: bytes, pages: tuple[int, ...], generations: tuple[int, ...]
) -> None:
    """Answers with the status of a refusal."""
    grant = draft.lender.lease(link, room, secret=secret, pages=pages, generations=generations)
    if isinstance(grant, Status):
        draft.answer = grant


def _page_is_sent(draft: Draft, link: int, page: PageId, generation: int, is_last: bool) -> None:
    """Answers with the contents, and whether it is the last page that this link sends. The page must still be what it
    was when the read began."""
    grant = _lease(draft, link)
    pool = draft.node.state.pool
    if pool.generations[page] != generation:
        raise Violation(
            "S3", f"{draft.cast.name}: page {page} of request {grant.request} is read under an old generation"
        )
    if pool.owners[page] != grant.request and pool.states[page] != PageState.CACHED:
        raise Violation("S4", f"{draft.cast.name}: page {page} of request {grant.request} is read and given away")
    is_last = is_last or grant.is_revoked
    draft.answer = tuple(draft.executor.memory.copy_out(page)), is_last
    if is_last:
        draft.lender.end_lease(grant, link, draft.now, is_sent=not grant.is_revoked)


def _link_breaks(draft: Draft, link: int) -> None:
    draft.lender.end_lease(_lease(draft, link), link, draft.now, is_sent=False)


def _lease(draft: Draft, link: int) -> Grant[int]:
    return next(grant for grant in draft.lender.grants() if link in grant.readers)


def _readers_die(draft: Draft) -> None:
    for grant in reversed(draft.lender.grants()):
        for link in list(grant.readers):
            draft.lender.end_lease(grant, link, draft.now, is_sent=False)


# The destination of pages.


def _connects(draft: Draft, number: int) -> None:
    draft.reader.connects(number)


def _asks(draft: Draft, number: int) -> None:
    draft.reader.is_asked(number)


def _page_lands(draft: Draft, number: int, contents: tuple[int, ...], is_last: bool) -> None:
    """A cancelled pull is drained once its page on the way has landed."""
    request, destination = draft.reader.next_page(number)
    if draft.node.state.pool.owners[destination] != request:
        raise Violation(
            "S4", f"{draft.cast.name}: a page of request {request} lands in {destination}, which is not its own"
        )
    draft.reader.lands(number, draft.executor.memory, [contents], is_last_sent=is_last)


def _read_fails(draft: Draft, number: int, trouble: Trouble, status: Status = Status.OK) -> None:
    draft.reader.fails(number, trouble, status)


TRANSITIONS: dict[str, Callable[..., tuple[Event, ...] | None]] = {
    "arrives": _arrives,
    "rendered": _rendered,
    "never comes": _never_comes,
    "is not needed": _is_not_needed,
    "aborts": _aborts,
    "batch returns": _batch_returns,
    "batch fails": _batch_fails,
    "pages are copied": _pages_are_copied,
    "copy fails": _copy_fails,
    "storage answers": _storage_answers,
    "storage fails": _storage_fails,
    "finds": _finds,
    "finds nobody": _finds_nobody,
    "hears": _hears,
    "loses peer": _loses_peer,
    "is told": _is_told,
    "wakes": _wakes,
    "waits": _waits,
    "digested": _digested,
    "read begins": _read_begins,
    "page is sent": _page_is_sent,
    "link breaks": _link_breaks,
    "readers die": _readers_die,
    "connects": _connects,
    "asks": _asks,
    "page lands": _page_lands,
    "read fails": _read_fails,
}
