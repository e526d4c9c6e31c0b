"""Seeded bugs: each breaks the production core in one place, and a checker has to notice.

An invariant that no bug can break is not checked; a simulator that stays silent is worth nothing. A mutant is a context
in which one function of the core is another one. It is found wherever it was imported to, so the core needs no hooks
and knows nothing of this. Every mutant names the checkers that may kill it and a seed on which one of them does.
"""

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any  # functions of the core, of any shape

from tandem.core.commands import Tell
from tandem.core.kv.pool import PagePool, PageState
from tandem.core.kv.tree import PrefixTree
from tandem.core.machine import Machine
from tandem.core.pd import bootstrap, transfer
from tandem.core.pd.messages import Release
from tandem.core.sched import decode, inspect, node, planner, prefill, progress, retraction, state
from tandem.core.sched.progress import State


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    breaks: Callable[[], Any]  # a context manager
    killed_by: tuple[str, ...]  # invariants, any of them
    seed: int


MUTANTS: dict[str, Mutant] = {}


def mutant(seed: int, *killed_by: str) -> Callable[[Callable[[], Iterator[None]]], Callable[[], Any]]:
    def register(breaks: Callable[[], Iterator[None]]) -> Callable[[], Any]:
        context = contextmanager(breaks)
        MUTANTS[breaks.__name__] = Mutant(breaks.__name__, context, killed_by, seed)
        return context

    return register


@contextmanager
def replaced(owner: Any, name: str, new: Any) -> Iterator[None]:
    """`owner.name` is `new` for a while; for a function of a module, in every module of the core that imported it."""
    old = getattr(owner, name)
    places = [(owner, name)]
    if not isinstance(owner, type):
        modules = [module for key, module in sorted(sys.modules.items()) if key.startswith("tandem.core")]
        places += [(module, key) for module in modules for key, value in vars(module).items() if value is old]
    for place, key in places:
        setattr(place, key, new)
    try:
        yield
    finally:
        for place, key in places:
            setattr(place, key, old)


# --- pages -----------------------------------------------------------------------------------------------------------


@mutant(1, "S2", "S4", "S5", "S13", "S14")
def pages_freed_with_a_batch_in_flight() -> Iterator[None]:
    original = state.end

    def end(node_state, gone, verdict):
        original(node_state, gone, verdict)
        if gone.in_flight:
            node_state.pool.free(gone.pages, gone.id)

    with replaced(state, "end", end):
        yield


@mutant(39, "S3", "S4")
def source_pages_freed_without_waiting_for_readers() -> Iterator[None]:
    original = prefill.revoke

    def revoke(node_state, gone):
        original(node_state, gone)
        gone.drains = {}

    with replaced(prefill, "revoke", revoke):
        yield


@mutant(1, "S4", "S5")
def destination_pages_freed_without_waiting_for_the_transfer() -> Iterator[None]:
    original = decode.let_go

    def let_go(node_state, gone, cause):
        original(node_state, gone, cause)
        gone.drains = {}

    with replaced(decode, "let_go", let_go):
        yield


@mutant(18, "S3", "S4", "S5")
def one_drained_shard_is_taken_for_all() -> Iterator[None]:
    original = node.drained

    def drained(node_state, request, shard):
        gone = node_state.requests.get(request)
        if gone is not None:
            gone.drains = {}
        original(node_state, request, shard)

    with replaced(node, "drained", drained):
        yield


@mutant(10, "S1", "S2", "S17")
def last_page_leaks() -> Iterator[None]:
    original = PagePool.free

    def free(pool, pages, owner):
        original(pool, pages[:-1] if len(pages) > 1 else pages, owner)

    with replaced(PagePool, "free", free):
        yield


@mutant(3, "S1")
def page_freed_twice() -> Iterator[None]:
    original = PagePool.evict

    def evict(pool, page):
        original(pool, page)
        pool.free_pages.append(page)

    with replaced(PagePool, "evict", evict):
        yield


@mutant(6, "S5")
def cached_pages_come_in_the_wrong_order() -> Iterator[None]:
    original = PrefixTree.match

    def match(tree, hashes):
        return list(reversed(original(tree, hashes)))

    with replaced(PrefixTree, "match", match):
        yield


@mutant(6, "S5", "S19")
def prefix_hit_counts_one_token_too_many() -> Iterator[None]:
    original = state.take_pages

    def take_pages(node_state, one, **sizes):
        taken = original(node_state, one, **sizes)
        if taken and one.computed:
            one.computed = one.launched = min(one.computed + 1, one.length - 1)
        return taken

    with replaced(state, "take_pages", take_pages):
        yield


@mutant(6, "S2", "S5", "S6", "S13")
def cached_pages_are_evicted_while_read() -> Iterator[None]:
    def lock(tree, page_hash):
        return None

    with replaced(PrefixTree, "lock", lock), replaced(PrefixTree, "unlock", lock):
        yield


@mutant(13, "S5", "S14", "S19")
def gap_in_a_hash_chain_is_bridged() -> Iterator[None]:
    def learn_hashes(node_state, flight, outcome):
        for request, page_hash in outcome.hashes:
            if request in node_state.requests and (request + outcome.iteration) % 4:
                node_state.requests[request].hashes.append(page_hash)

    with replaced(node, "learn_hashes", learn_hashes):
        yield


# --- result rows -----------------------------------------------------------------------------------------------------


@mutant(0, "S8")
def result_row_leaks_at_the_end() -> Iterator[None]:
    def keep(table, request):
        return None

    with replaced(transfer.ResultTable, "maybe_release_metadata_buffer", keep):
        yield


@mutant(10, "S8", "S10", "S13")
def result_row_is_given_back_twice() -> Iterator[None]:
    original = transfer.ResultTable.maybe_release_metadata_buffer

    def give_back(table, request):
        row = table.owners.get(request)
        original(table, request)
        if row is not None:
            table.free_rows.append(row)

    with replaced(transfer.ResultTable, "maybe_release_metadata_buffer", give_back):
        yield


@mutant(0, "S8", "S10")
def result_row_is_handed_out_twice() -> Iterator[None]:
    def ensure(table, request):
        table.owners.setdefault(request, 0)
        return True

    with replaced(transfer.ResultTable, "ensure_metadata_buffer", ensure):
        yield


# --- ends ------------------------------------------------------------------------------------------------------------


@mutant(1, "S12")
def terminal_event_comes_twice() -> Iterator[None]:
    original = state.end

    def end(node_state, gone, verdict):
        node_state.out.append(verdict)
        original(node_state, gone, verdict)

    with replaced(state, "end", end):
        yield


@mutant(1, "S12", "S13")
def aborted_request_still_gets_its_token() -> Iterator[None]:
    original = node.settle_late

    def settle_late(node_state, gone):
        if gone.state is State.DRAINING:
            node_state.out.append(node.EmitTokens((gone.id,), b"\0\0\0\0"))
        original(node_state, gone)

    with replaced(node, "settle_late", settle_late):
        yield


@mutant(7, "L1", "W1")
def deadline_is_ignored() -> Iterator[None]:
    original = node.expire

    def expire(node_state, late):
        if late.deadline > node_state.now:
            original(node_state, late)

    with replaced(node, "expire", expire):
        yield


@mutant(4, "L1", "W1")
def stall_timeout_has_no_timer() -> Iterator[None]:
    with replaced(node, "schedule", lambda node_state, late: None):
        yield


@mutant(10, "L2", "S17")
def drained_request_is_never_forgotten() -> Iterator[None]:
    original = state.forget_if_drained

    def forget_if_drained(node_state, gone):
        if gone.id % 5:
            original(node_state, gone)

    with replaced(state, "forget_if_drained", forget_if_drained):
        yield


@mutant(5, "S2", "S5")
def forget_comes_after_the_next_batch() -> Iterator[None]:
    original = planner.launch

    def launch(node_state, rows, grow):
        waiting, node_state.forgotten = node_state.forgotten, []
        original(node_state, rows, grow)
        node_state.forgotten = waiting

    with replaced(planner, "launch", launch):
        yield


@mutant(5, "L6")
def running_request_ends_as_soon_as_pages_are_short() -> Iterator[None]:
    def relieve(node_state, num_pages):
        planner.fail_for_lack_of_pages(node_state, node_state.requests[next(iter(node_state.decode_set))])
        return True

    with replaced(planner, "relieve", relieve):
        yield


# --- rendezvous ------------------------------------------------------------------------------------------------------


@mutant(0, "S4", "S5", "S19")
def decode_starts_before_the_last_page_has_landed() -> Iterator[None]:
    def is_complete(receiver, shards):
        landed = [report.landed for report in receiver.reports.values()]
        return receiver.result is not None and min(landed, default=0) >= receiver.total_pages - receiver.held_pages - 1

    with replaced(transfer.Receiver, "is_complete", is_complete):
        yield


@mutant(4, "S4", "S5", "S19")
def fastest_shard_decides() -> Iterator[None]:
    def is_complete(receiver, shards):
        landed = [report.landed for report in receiver.reports.values()]
        return receiver.result is not None and max(landed, default=0) >= receiver.total_pages - receiver.held_pages

    with replaced(transfer.Receiver, "is_complete", is_complete):
        yield


@mutant(6, "L5")
def release_is_forgotten() -> Iterator[None]:
    original = decode.commit

    def commit(node_state, arrived):
        row = original(node_state, arrived)
        node_state.out = [
            command
            for command in node_state.out
            if not (isinstance(command, Tell) and isinstance(command.message, Release))
        ]
        node_state.tombstones.clear()
        return row

    with replaced(decode, "commit", commit):
        yield


@mutant(19, "S14", "S5", "S19")
def offer_of_a_stranger_is_taken() -> Iterator[None]:
    original = decode.on_offer

    def on_offer(node_state, peer, offer):
        original(node_state, offer.source, offer)

    with replaced(decode, "on_offer", on_offer):
        yield


@mutant(34, "S14", "S5", "S19")
def room_is_trusted_without_comparing_prompts() -> Iterator[None]:
    original = prefill.refuse

    def refuse(node_state, one, ready):
        digest = one.request.prompt_digest
        return original(node_state, one, prefill.Ready(**{**_fields(ready), "prompt_digest": digest}))

    with replaced(prefill, "refuse", refuse):
        yield


@mutant(65, "L5", "S13", "S14", "S19", "L1")
def retracted_request_waits_for_its_peer_again() -> Iterator[None]:
    original = retraction.retract

    def retract(node_state, one):
        receiver = one.receiver
        original(node_state, one)
        one.receiver = receiver

    with replaced(retraction, "retract", retract):
        yield


@mutant(5, "S5")
def first_token_of_a_retracted_request_is_lost() -> Iterator[None]:
    original = state.leave_decode_set

    def leave_decode_set(node_state, one):
        original(node_state, one)
        one.untold_token = b""

    with replaced(state, "leave_decode_set", leave_decode_set):
        yield


@mutant(9, "L5", "L1")
def forced_retry_without_optimistic_prefill() -> Iterator[None]:
    def is_forced(node_state, one):
        return prefill.should_force_retry(
            one.request.rid,
            prob=node_state.settings.force_retry_prob,
            prefill_retry_count=one.prefill_retry_count,
        )

    with replaced(prefill, "is_forced", is_forced):
        yield


@mutant(4, "S25")
def retries_have_no_bound() -> Iterator[None]:
    with replaced(bootstrap.Retry, "may_start", lambda policy, view: True):
        yield


@mutant(8, "S9", "S14")
def result_row_of_another_request_is_offered() -> Iterator[None]:
    original = prefill.timed_result
    last: list[Any] = []

    def timed_result(one, sender):
        row = original(one, sender)
        last.append(row)
        other = last[-2] if len(last) > 1 else row
        return prefill.ResultRow(row.room, other.token, other.flags, other.extra, other.cached_tokens)

    with replaced(prefill, "timed_result", timed_result):
        yield


# --- batches ---------------------------------------------------------------------------------------------------------


@mutant(7, "S24")
def iteration_is_used_twice() -> Iterator[None]:
    original = planner.launch

    def launch(node_state, rows, grow):
        if node_state.forward_ct and grow is not None:
            node_state.forward_ct -= 1
        original(node_state, rows, grow)

    with replaced(planner, "launch", launch):
        yield


@mutant(5, "S2", "S5", "S13", "S14")
def leaving_the_decode_set_is_not_told() -> Iterator[None]:
    original = planner.launch

    def launch(node_state, rows, grow):
        node_state.leaves = []
        original(node_state, rows, grow)

    with replaced(planner, "launch", launch):
        yield


@mutant(7, "S5")
def grown_page_is_not_told() -> Iterator[None]:
    original = planner.launch

    def launch(node_state, rows, grow):
        original(node_state, rows, grow and grow[1:])

    with replaced(planner, "launch", launch):
        yield


@mutant(5, "S14")
def tokens_of_one_step_change_places() -> Iterator[None]:
    def flush(emission, node_state):
        if emission.requests:
            tokens = b"".join(reversed(emission.tokens))
            node_state.out.append(node.EmitTokens(tuple(emission.requests), tokens, ()))
        for one, reason in emission.ends:
            node.finish(node_state, one, reason)

    with replaced(node.Emission, "flush", flush):
        yield


@mutant(14, "S13")
def late_batch_result_is_settled_again() -> Iterator[None]:
    original = node.settle

    def settle(node_state, outcome):
        flight = node_state.window[0] if node_state.window else None
        original(node_state, outcome)
        if flight is not None and outcome.batch % 7 == 0:
            node_state.window.insert(0, flight)
            original(node_state, outcome)

    with replaced(node, "settle", settle):
        yield


# --- bookkeeping -----------------------------------------------------------------------------------------------------


@mutant(3, "S13")
def state_goes_where_no_rule_leads() -> Iterator[None]:
    original = Machine.next

    def follow(machine, before, trigger):
        if machine is progress.LIFECYCLE and trigger is progress.Trigger.RUN:
            return State.BOOTSTRAPPING
        return original(machine, before, trigger)

    with replaced(Machine, "next", follow):
        yield


@mutant(3, "S16", "S13")
def request_stays_in_its_old_queue() -> Iterator[None]:
    original = state.enter

    def enter(node_state, one, trigger, *, first=False):
        before = one.state
        original(node_state, one, trigger, first=first)
        if before is State.QUEUED and one.id % 3 == 0:
            node_state.queues[before][one.id] = None

    with replaced(state, "enter", enter):
        yield


@mutant(1, "S1")
def count_of_pages_drifts() -> Iterator[None]:
    original = PagePool.share

    def share(pool, page, owner):
        original(pool, page, owner)
        pool.counts[PageState.CACHED] -= page == 7

    with replaced(PagePool, "share", share):
        yield


@mutant(0, "S6")
def unlock_forgets_one_pin() -> Iterator[None]:
    original = PrefixTree.unlock

    def unlock(tree, page_hash):
        if tree.step % 5:
            original(tree, page_hash)

    with replaced(PrefixTree, "unlock", unlock):
        yield


@mutant(0, "S30")
def gauge_counts_something_else() -> Iterator[None]:
    original = inspect.gauges

    def gauges(shown):
        return {**original(shown), "num_queue_reqs": len(shown.state.requests)}

    with replaced(inspect, "gauges", gauges):
        yield


@mutant(15, "S33")
def snapshot_forgets_the_streak() -> Iterator[None]:
    original = state.NodeState.decode.__func__

    def restore(cls, snapshot):
        restored = original(cls, snapshot)
        restored.stash, restored.streak = {}, 0
        return restored

    with replaced(state.NodeState, "decode", classmethod(restore)):
        yield


@mutant(11, "S33")
def snapshot_forgets_the_order_of_queues() -> Iterator[None]:
    original = state.NodeState.decode.__func__

    def restore(cls, snapshot):
        restored = original(cls, snapshot)
        for queue, requests in restored.queues.items():
            restored.queues[queue] = OrderedDict.fromkeys(sorted(requests))
        return restored

    with replaced(state.NodeState, "decode", classmethod(restore)):
        yield


@mutant(1, "W1")
def wait_has_no_name() -> Iterator[None]:
    names = {key: name for key, name in progress._WAITS.items() if key is not State.BOOTSTRAPPING}
    with replaced(progress, "_WAITS", names):
        yield


@mutant(0, "W2")
def node_wakes_for_nothing() -> Iterator[None]:
    with replaced(node, "earliest_timer", lambda node_state: node_state.now + 1):
        yield


def _fields(struct: Any) -> dict[str, Any]:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}
