"""Seeded bugs of accounts, messages and clocks."""

from collections.abc import Iterator

from msgspec import structs

from seeded_bugs.base import mutant, replaced
from tandem.core.commands import Tell
from tandem.core.disagg import decode_side, prefill_side
from tandem.core.scheduler import admission, node
from tandem.core.scheduler.request_state import State


@mutant(41, "S15")
def token_of_one_row_is_lost_on_the_way() -> Iterator[None]:
    original = node.Emission.flush

    def flush(emission, node_state):
        if len(emission.requests) > 3 and not emission.ends:
            del emission.requests[1], emission.tokens[1]
        original(emission, node_state)

    with replaced(node.Emission, "flush", flush):
        yield


@mutant(0, "S26")
def prompt_computed_again_counts_as_a_hit() -> Iterator[None]:
    original = admission.reserve_pages

    def reserve_pages(node_state, one, reserve):
        was_counted = one.is_counted
        taken = original(node_state, one, reserve)
        if taken and was_counted:
            node_state.counters.input_tokens += one.request.prompt_len
            node_state.counters.hit_tokens += one.computed
        return taken

    with replaced(admission, "reserve_pages", reserve_pages):
        yield


@mutant(3, "S27")
def retraction_resets_the_first_token_clock() -> Iterator[None]:
    original = decode_side.recover_if_drained

    def recover_if_drained(node_state, one):
        original(node_state, one)
        if one.state is State.QUEUED:
            one.stages = {}

    with replaced(decode_side, "recover_if_drained", recover_if_drained):
        yield


@mutant(162, "S31")
def sizes_of_an_offer_are_not_checked() -> Iterator[None]:
    with replaced(decode_side, "misfit", lambda node_state, one, side, arrival, offer: None):
        yield


@mutant(1, "S34")
def lease_is_told_as_a_time() -> Iterator[None]:
    original = prefill_side.offer

    def offer(node_state, one, side, reader, *, first_page):
        original(node_state, one, side, reader, first_page=first_page)
        told = node_state.out[-1]
        assert isinstance(told, Tell)
        message = structs.replace(told.message, lease_ns=reader.lease_until)
        node_state.out[-1] = Tell(told.peer, message)

    with replaced(prefill_side, "offer", offer):
        yield
