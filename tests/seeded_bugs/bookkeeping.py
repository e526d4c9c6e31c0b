"""Seeded bugs of what a node knows of itself."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from msgspec import structs

from seeded_bugs.base import mutant, replaced
from tandem.core.kv.pool import PagePool, PageState
from tandem.core.kv.tree import PrefixTree
from tandem.core.machine import Machine
from tandem.core.scheduler import leaving, node, request_state, state
from tandem.core.scheduler.request_state import State
from tandem.simulator.checkers import accounting


@mutant(0, "S13", "S5", "S16")
def state_goes_where_no_rule_leads() -> Iterator[None]:
    original = Machine.next

    def follow(machine, before, trigger):
        if machine is request_state.LIFECYCLE and trigger is request_state.Trigger.RUN:
            return State.BOOTSTRAPPING
        return original(machine, before, trigger)

    with replaced(Machine, "next", follow):
        yield


@contextmanager
def some_stay_in(left: State) -> Iterator[None]:
    """One in three keeps its place in the queue of a state that it has left."""
    original = state.enter

    def enter(node_state, one, trigger, *, first=False):
        before = one.state
        original(node_state, one, trigger, first=first)
        if before is left and one.id % 3 == 0:
            node_state.queues[before][one.id] = None

    with replaced(state, "enter", enter):
        yield


@mutant(0, "S13", "S16")
def request_stays_in_its_old_queue() -> Iterator[None]:
    with some_stay_in(State.QUEUED):
        yield


@mutant(1, "S16")
def sent_request_keeps_its_place() -> Iterator[None]:
    with some_stay_in(State.SENDING):
        yield


@mutant(0, "S17")
def room_outlives_its_request() -> Iterator[None]:
    original = leaving.forget_if_drained

    def forget_if_drained(node_state, gone):
        original(node_state, gone)
        if gone.request.room is not None and gone.state is State.DONE and gone.id % 3 == 0:
            node_state.rooms[gone.request.room] = gone.id

    with replaced(leaving, "forget_if_drained", forget_if_drained):
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
    original = accounting.numbers

    def numbers(shown):
        return structs.replace(original(shown), queued=len(shown.state.requests))

    with replaced(accounting, "numbers", numbers):
        yield


@mutant(46, "S33")
def snapshot_forgets_the_streak() -> Iterator[None]:
    original = state.NodeState.decode.__func__

    def restore(cls, snapshot):
        restored = original(cls, snapshot)
        restored.stash = {}
        for micro_batch in restored.micro_batches.each:
            micro_batch.num_prompt_batches = 0
        return restored

    with replaced(state.NodeState, "decode", classmethod(restore)):
        yield


@mutant(298, "S33")
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
    names = {key: name for key, name in request_state._WAITS.items() if key is not State.BOOTSTRAPPING}
    with replaced(request_state, "_WAITS", names):
        yield


@mutant(0, "W2")
def node_wakes_for_nothing() -> Iterator[None]:
    with replaced(node, "earliest_timer", lambda node_state: node_state.now + 1):
        yield
