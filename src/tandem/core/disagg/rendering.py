"""A prompt that both halves rendered, but not at the same time: which of the two times counts, and how prefill gets it.

A chat template may ask for the time. A router that stamps it into both bodies makes it one time; under others each half
takes its own clock, and the prompts may differ. Decode's counts, because its tokens are the answer: READY carries the
time. A prefill with another prompt gives back what it has computed, waits in the bootstrap queue until its edge has
rendered again (`RenderAgain`, `PromptRendered`), and goes on with that prompt. Once: if the prompts still differ, they
do not mean the same request. READY is kept in the `PrefillSide` meanwhile, so `side.ready` says that this goes on.
"""

from itertools import takewhile

from msgspec import structs

from tandem.core.commands import RenderAgain, Tell
from tandem.core.disagg import prefill_side
from tandem.core.disagg.messages import Ready
from tandem.core.disagg.sides import PrefillSide
from tandem.core.request import Request
from tandem.core.scheduler.leaving import release_aborted_request
from tandem.core.scheduler.page_tables import give_back_pages, too_long
from tandem.core.scheduler.request_state import Progress, State, Trigger, has_ended
from tandem.core.scheduler.state import NodeState, enter
from tandem.core.values import Cause, Incarnation


def on_ready(node: NodeState, peer: Incarnation, ready: Ready) -> None:
    """READY has come. One of another time waits for the prompt; all others are `prefill_side.on_ready`'s."""
    progress = node.in_room(ready.room)
    side = progress.side if progress is not None else None
    if progress is None or not isinstance(side, PrefillSide):
        prefill_side.on_ready(node, peer, ready)
    elif has_ended(progress) and differs_in_time(node, progress.request, peer, ready):
        tombstone = node.tombstones.get(ready.room)
        if tombstone is not None:
            node.out.append(Tell(peer, tombstone))  # and not that the prompts differ, which no fallback would mend
    elif not has_ended(progress) and side.ready is not None:
        side.ready = newest(side.ready, peer, ready)
    elif not has_ended(progress) and may_render(side) and differs_in_time(node, progress.request, peer, ready):
        side.ready = ready
        render_again(node, progress, side, ready)
    else:
        prefill_side.on_ready(node, peer, ready)


def differs_in_time(node: NodeState, request: Request, peer: Incarnation, ready: Ready) -> bool:
    """This READY is for us and means another prompt, and both prompts show a time, but not the same."""
    settings = node.settings
    is_for_us = ready.source == peer and ready.target == settings.incarnation and ready.layout == settings.layout
    has_times = bool(request.rendered_at and ready.rendered_at) and request.rendered_at != ready.rendered_at
    return is_for_us and has_times and ready.prompt_digest != request.prompt_digest


def may_render(side: PrefillSide) -> bool:
    """Once, and only while nobody was promised the KV of the prompt as it is."""
    return not side.is_ready and not side.is_rendered_anew


def newest(kept: Ready, peer: Incarnation, ready: Ready) -> Ready:
    """What this decode said last counts when the prompt is here. Others are not listened to until then."""
    is_same = (kept.source, kept.source, kept.attempt) == (peer, ready.source, ready.attempt)
    return ready if is_same else kept


def render_again(node: NodeState, progress: Progress, side: PrefillSide, ready: Ready) -> None:
    """Ask the edge as soon as no batch knows the request; whoever gives its pages back asks when it has done so."""
    if progress.state in (State.COMPUTING, State.PARKED):
        prefill_side.give_back(node, progress, side, "rendered")
    elif progress.state is not State.RETRACTING:
        if progress.state is State.LOADING:
            give_back_pages(node, progress)
            enter(node, progress, Trigger.REQUEUE)
        if progress.state is State.QUEUED:
            node.results.maybe_release_metadata_buffer(progress.id)
            enter(node, progress, Trigger.FALL_BACK)
        node.out.append(RenderAgain(progress.id, ready.rendered_at))


def on_rendered(node: NodeState, rendered: Request) -> None:
    """The prompt at decode's time. READY, which has waited for it, is checked as if it came now."""
    progress = node.requests.get(rendered.id)
    if progress is None:
        node.forgotten.append(rendered.id)  # it ended meanwhile, and the workers have got tokens for it
        return
    side = progress.side
    if not isinstance(side, PrefillSide) or side.ready is None or progress.state is not State.BOOTSTRAPPING:
        return  # a duplicate
    complaint = too_long(node, rendered)
    if complaint is not None:
        prefill_side.fail(node, progress, side, Cause.CONTEXT_LENGTH_EXCEEDED, complaint)
        return
    ready, side.ready, side.is_rendered_anew = side.ready, None, True
    take_prompt(node, progress, rendered)
    prefill_side.on_ready(node, ready.source, ready)


def take_prompt(node: NodeState, progress: Progress, rendered: Request) -> None:
    """The request means this prompt from here on. What was found in the cache counts as far as the prompts agree."""
    assert not progress.pages
    assert not progress.in_flight
    pairs = zip(progress.hashes, rendered.page_hashes, strict=False)
    num_shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    num_unshared = max(0, progress.cached_tokens - num_shared * node.settings.page_size)
    progress.cached_tokens -= num_unshared
    progress.host_tokens = max(0, progress.host_tokens - num_unshared)  # the last of those that were cached,
    progress.storage_tokens = max(0, progress.storage_tokens - num_unshared)  # and the last of these
    progress.request = structs.replace(
        progress.request,
        prompt_len=rendered.prompt_len,
        page_hashes=rendered.page_hashes,
        prompt_digest=rendered.prompt_digest,
        rendered_at=rendered.rendered_at,
    )
    progress.hashes = list(rendered.page_hashes)
    release_aborted_request(node, progress)  # it hoped for pages of another prompt
    progress.length = rendered.prompt_len
