"""Seeded bugs of how requests end: twice, late, never, or too early."""

from collections.abc import Iterator

from seeded_bugs.base import mutant, replaced
from tandem.core.scheduler import batch_planner, leaving, node
from tandem.core.scheduler.request_state import State


@mutant(0, "S12")
def terminal_event_comes_twice() -> Iterator[None]:
    original = leaving.end

    def end(node_state, gone, verdict):
        node_state.out.append(verdict)
        original(node_state, gone, verdict)

    with replaced(leaving, "end", end):
        yield


@mutant(0, "S12", "S13")
def aborted_request_still_gets_its_token() -> Iterator[None]:
    original = node.settle_late

    def settle_late(node_state, gone):
        if gone.state is State.DRAINING:
            node_state.out.append(node.EmitTokens((gone.id,), b"\0\0\0\0"))
        original(node_state, gone)

    with replaced(node, "settle_late", settle_late):
        yield


@mutant(1, "L1", "W1")
def deadline_is_ignored() -> Iterator[None]:
    original = node.expire

    def expire(node_state, late):
        if late.deadline > node_state.now:
            original(node_state, late)

    with replaced(node, "expire", expire):
        yield


@mutant(3, "L1", "W1")
def stall_timeout_has_no_timer() -> Iterator[None]:
    with replaced(node, "schedule", lambda node_state, late: None):
        yield


@mutant(0, "L2", "S17", "L11")
def drained_request_is_never_forgotten() -> Iterator[None]:
    original = leaving.forget_if_drained

    def forget_if_drained(node_state, gone):
        if gone.id % 5:
            original(node_state, gone)

    with replaced(leaving, "forget_if_drained", forget_if_drained):
        yield


@mutant(15, "S21", "S2", "S5")
def forget_comes_after_the_next_batch() -> Iterator[None]:
    original = batch_planner.launch

    def launch(node_state, rows, decode):
        waiting, node_state.forgotten = node_state.forgotten, []
        original(node_state, rows, decode)
        node_state.forgotten = waiting

    with replaced(batch_planner, "launch", launch):
        yield


@mutant(3, "L6")
def running_request_ends_as_soon_as_pages_are_short() -> Iterator[None]:
    def preempt_for_pages(node_state, num_pages):
        batch_planner.fail_for_lack_of_pages(node_state, node_state.requests[node_state.micro_batches.members[0]])
        return True

    with replaced(batch_planner, "preempt_for_pages", preempt_for_pages):
        yield
