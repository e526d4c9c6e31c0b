"""Seeded bugs of agreement: over shards, over DP ranks, over when prompts begin."""

from collections.abc import Iterator
from typing import Any  # whatever the core hands over

from msgspec import structs

from seeded_bugs.base import mutant, replaced
from tandem.core.disagg import decode_side, sides
from tandem.core.router import routed_request
from tandem.core.scheduler import batch_planner, delayer_policy
from tandem.core.values import ShardId


@mutant(2, "S20")
def batch_number_is_skipped() -> Iterator[None]:
    original = batch_planner.launch

    def launch(node_state, rows, decode):
        node_state.forward_ct += node_state.forward_ct % 50 == 49
        original(node_state, rows, decode)

    with replaced(batch_planner, "launch", launch):
        yield


@mutant(5, "S21")
def node_takes_its_decode_set_for_sorted() -> Iterator[None]:
    original = batch_planner.launch

    def launch(node_state, rows, decode):
        original(node_state, rows, decode)
        flight = node_state.inflight[-1]
        flight.members = tuple(sorted(flight.members))

    with replaced(batch_planner, "launch", launch):
        yield


@mutant(6, "S22")
def failure_of_a_later_shard_is_not_heard() -> Iterator[None]:
    original = sides.Arrival.record_report

    def record_report(arrival: Any, shard: ShardId, report: Any) -> None:
        if report.failure is None or shard == 0:
            original(arrival, shard, report)

    with replaced(sides.Arrival, "record_report", record_report):
        yield


@mutant(2, "S23")
def ready_goes_to_the_prefill_that_was_learned_last() -> Iterator[None]:
    original = decode_side.bind_peer

    def bind_peer(node_state, one, side, known):
        original(node_state, one, side, list(node_state.peers.values())[-1])

    with replaced(decode_side, "bind_peer", bind_peer):
        yield


@mutant(98, "S28")
def slot_gate_stays_closed_when_all_fit() -> Iterator[None]:
    def slot_gate_closes(ranks, settings):
        return min(rank.num_free_slots for rank in ranks) <= delayer_policy.usual_batch(ranks)

    with replaced(delayer_policy, "GATES", (slot_gate_closes, delayer_policy.queue_gate_closes)):
        yield


@mutant(2, "L3")
def delayed_passes_are_not_counted() -> Iterator[None]:
    original = delayer_policy.delay

    def delay(estimation, memory, settings):
        return original(estimation, delayer_policy.DelayHistory(0, memory.has_skipped_first), settings)

    with replaced(delayer_policy, "delay", delay):
        yield


@mutant(3, "S29")
def failed_half_leaves_the_other_one_running() -> Iterator[None]:
    original = routed_request.RoutedRequest._cancel_open

    def cancel_open(one):
        return [] if one.attempt == 1 and original(one) else original(one)

    with replaced(routed_request.RoutedRequest, "_cancel_open", cancel_open):
        yield


@mutant(1, "S29")
def retry_keeps_its_room() -> Iterator[None]:
    original = routed_request.RoutedRequest.start

    def start(one, pair, now):
        if one.pair is not None:
            pair = structs.replace(pair, rooms=one.pair.rooms)
        return original(one, pair, now)

    with replaced(routed_request.RoutedRequest, "start", start):
        yield
