"""Seeded bugs between prefill and decode."""

from collections.abc import Iterator
from typing import Any  # functions of the core, of any shape

from msgspec import structs

from seeded_bugs.base import mutant, replaced
from tandem.core.commands import Tell
from tandem.core.disagg import decode_side, optimistic_prefill, prefill_lookup, prefill_side, shard_progress, sides
from tandem.core.disagg.messages import Release
from tandem.core.scheduler import node, preemption
from tandem.core.scheduler.micro_batches import MicroBatches


@mutant(4, "S4", "S5", "S19")
def decode_starts_before_the_last_page_has_landed() -> Iterator[None]:
    def landed_result(arrival, shards):
        landed = [report.landed for report in arrival.reports.values()]
        return arrival.result if min(landed, default=0) >= arrival.num_wanted - 1 else None

    with replaced(sides.Arrival, "landed_result", landed_result):
        yield


@mutant(4, "S4", "S5", "S19")
def fastest_shard_decides() -> Iterator[None]:
    def landed_result(arrival, shards):
        landed = [report.landed for report in arrival.reports.values()]
        return arrival.result if max(landed, default=0) >= arrival.num_wanted else None

    with replaced(sides.Arrival, "landed_result", landed_result):
        yield


@mutant(1, "L5")
def release_is_forgotten() -> Iterator[None]:
    original = decode_side.commit_if_landed

    def commit_if_landed(node_state, request):
        landed = original(node_state, request)
        if landed is None:
            return None
        node_state.out = [
            command
            for command in node_state.out
            if not (isinstance(command, Tell) and isinstance(command.message, Release))
        ]
        node_state.tombstones.clear()
        return landed

    with replaced(decode_side, "commit_if_landed", commit_if_landed):
        yield


@mutant(4, "S14", "S5", "S19")
def room_is_trusted_without_comparing_prompts() -> Iterator[None]:
    original = prefill_side.refuse

    def refuse(node_state, request, reader, ready):
        return original(node_state, request, reader, structs.replace(ready, prompt_digest=request.prompt_digest))

    with replaced(prefill_side, "refuse", refuse):
        yield


@mutant(364, "S14", "L5", "S13", "S19", "L1", "L7")
def retracted_request_waits_for_its_peer_again() -> Iterator[None]:
    """And what had come before its retraction counts as if it came again."""
    original, original_wait = preemption.retract, decode_side.await_arrival

    def retract(node_state, one):
        side = one.side
        original(node_state, one)
        one.side = side

    def await_arrival(node_state, one, side):
        before = side.arrival
        original_wait(node_state, one, side)
        if before is not None:
            side.arrival.reports, side.arrival.pulling = before.reports, before.pulling
            side.arrival.result, side.arrival.result_at = before.result, before.result_at
            side.arrival.offered_at = before.offered_at

    with replaced(preemption, "retract", retract), replaced(decode_side, "await_arrival", await_arrival):
        yield


@mutant(3, "S5")
def first_token_of_a_retracted_request_is_lost() -> Iterator[None]:
    original = MicroBatches.leave

    def leave(micro_batches, one):
        original(micro_batches, one)
        one.untold_token = b""

    with replaced(MicroBatches, "leave", leave):
        yield


@mutant(7, "L5", "L1")
def forced_retry_without_optimistic_prefill() -> Iterator[None]:
    def is_chosen_for_retry(node_state, request):
        return prefill_side.should_force_retry(
            request.rid, prob=node_state.settings.force_retry_prob, prefill_retry_count=0
        )

    with replaced(prefill_side, "is_chosen_for_retry", is_chosen_for_retry):
        yield


@mutant(0, "S25")
def retries_have_no_bound() -> Iterator[None]:
    with replaced(optimistic_prefill.Retry, "may_start", lambda policy, view: True):
        yield


@mutant(1, "S9", "S14")
def result_slot_of_another_request_is_offered() -> Iterator[None]:
    original = prefill_side.timed_result
    last: list[Any] = []

    def timed_result(*times, **moments):
        row = original(*times, **moments)
        last.append(row)
        other = last[-2] if len(last) > 1 else row
        return prefill_side.ResultSlot(row.room, other.token, other.flags, other.extra, other.cached_tokens)

    with replaced(prefill_side, "timed_result", timed_result):
        yield


@mutant(74, "W3")
def every_answer_makes_decode_ask_again() -> Iterator[None]:
    original = decode_side.ask_rank

    def ask_rank(node_state, waiting, side):
        if side.search.rank_asked % decode_side.RELEARN_EVERY == decode_side.RELEARN_EVERY - 1:
            prefill_lookup.ask_who(node_state, side.address, None)
        original(node_state, waiting, side)

    with replaced(decode_side, "ask_rank", ask_rank):
        yield


@mutant(2, "L5")
def dead_peer_stays_known() -> Iterator[None]:
    original = node.lose_peer

    def lose_peer(node_state, event):
        known = dict(node_state.peers)
        original(node_state, event)
        node_state.peers.update(known)

    with replaced(node, "lose_peer", lose_peer):
        yield


@mutant(0, "S19", "S5", "S14")
def request_runs_when_all_pages_but_one_have_landed() -> Iterator[None]:
    def landed_result(arrival, shards):
        wanted = max(0, arrival.num_wanted - 1)
        verdict = shard_progress.verdict(dict.fromkeys(shards, wanted), arrival.reports)
        return arrival.result if isinstance(verdict, shard_progress.Landed) else None

    with replaced(sides.Arrival, "landed_result", landed_result):
        yield
