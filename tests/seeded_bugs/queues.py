"""Seeded bugs of who waits behind whom."""

from collections.abc import Iterator

from seeded_bugs.base import mutant, replaced
from tandem.core.disagg.sides import Local, PrefillSide
from tandem.core.kv.pool import PageState
from tandem.core.scheduler import admission, node, page_tables, preemption, request_state, state
from tandem.core.scheduler.request_state import State
from tandem.core.values import Cause
from tandem.simulator.actors import edge


@mutant(4, "S11")
def who_lacks_a_row_stops_everybody_behind() -> Iterator[None]:
    """`break` in the place of `continue`: sglang#26780, whose prefill stood still with READY requests in its queue."""
    original = admission.candidates

    def candidates(node_state):
        chosen = original(node_state)
        rows = node_state.results
        for index, request in enumerate(chosen):
            if (
                isinstance(node_state.requests[request].side, PrefillSide)
                and request not in rows.owners
                and not rows.free_slots
            ):
                return chosen[: index + 1]
        return chosen

    with replaced(admission, "candidates", candidates):
        yield


@mutant(1, "L4")
def shortest_prompts_come_first() -> Iterator[None]:
    original = admission.candidates

    def candidates(node_state):
        return sorted(original(node_state), key=lambda request: node_state.requests[request].request.prompt_len)

    with replaced(admission, "candidates", candidates):
        yield


@mutant(204, "L7")
def resumed_request_gives_way_at_once() -> Iterator[None]:
    original = node.settle_prompt_row

    def settle_prompt_row(node_state, one, emitted, is_last, token, flags, extra):
        is_resumed = is_last and one.retractions and isinstance(one.side, Local) and one.state is State.COMPUTING
        if is_resumed and node_state.micro_batches.members:
            state.enter(node_state, one, request_state.Trigger.RUN)
            preemption.retract(node_state, one)
        else:
            original(node_state, one, emitted, is_last, token, flags, extra)

    with replaced(node, "settle_prompt_row", settle_prompt_row):
        yield


@mutant(355, "L10")
def bootstrap_queue_has_no_bound() -> Iterator[None]:
    original = node.refuse

    def refuse(node_state, request, *, has_place):
        refusal = original(node_state, request, has_place=has_place)
        if refusal is not None and refusal[0] is Cause.QUEUE_FULL:
            is_full = len(node_state.queues[State.QUEUED]) >= node_state.settings.max_queued
            return refusal if is_full else None
        return refusal

    with replaced(node, "refuse", refuse):
        yield


@mutant(1, "L9")
def draining_server_accepts() -> Iterator[None]:
    original = node.refuse

    def refuse(node_state, request, *, has_place):
        was_draining, node_state.draining = node_state.draining, False
        refusal = original(node_state, request, has_place=has_place)
        node_state.draining = was_draining
        return refusal

    with replaced(node, "refuse", refuse):
        yield


@mutant(5, "S18")
def refused_half_tells_nobody() -> Iterator[None]:
    with replaced(node, "decline_room", lambda node_state, request, cause, detail: None):
        yield


@mutant(0, "L11")
def quarantined_pages_are_forgotten() -> Iterator[None]:
    original = page_tables.give_back_pages

    def give_back_pages(node_state, one):
        if one.pages and node_state.pool.states[one.pages[-1]] == PageState.QUARANTINED and one.id % 3 == 0:
            one.pages = one.pages[:-1]
        original(node_state, one)

    with replaced(page_tables, "give_back_pages", give_back_pages):
        yield


@mutant(2, "S32")
def tenants_share_one_root() -> Iterator[None]:
    original = edge.root_hash

    def root_hash(*, secret, tenant):
        return original(secret=secret, tenant="")

    with replaced(edge, "root_hash", root_hash):
        yield
