"""Seeded bugs of plans and of what comes back."""

from collections.abc import Iterator

from msgspec import structs

from seeded_bugs.base import mutant, replaced
from tandem.core.commands import LaunchBatch
from tandem.core.scheduler import batch_planner, node
from tandem.core.worker_group import WorkerGroup


@mutant(1, "S20", "S24")
def iteration_is_used_twice() -> Iterator[None]:
    original = batch_planner.launch

    def launch(node_state, rows, decode):
        if node_state.forward_ct and decode is not None:
            node_state.forward_ct -= 1
        original(node_state, rows, decode)

    with replaced(batch_planner, "launch", launch):
        yield


@mutant(1, "S24")
def iteration_of_a_mixed_window_is_that_of_the_batch_before() -> Iterator[None]:
    original = batch_planner.launch

    def launch(node_state, rows, decode):
        original(node_state, rows, decode)
        if len(node_state.inflight) > 1 and rows:
            plan = node_state.out[-1].plan
            node_state.out[-1] = LaunchBatch(structs.replace(plan, iteration=plan.iteration - 1))
            node_state.inflight[-1].forward_iter -= 1

    with replaced(batch_planner, "launch", launch):
        yield


@mutant(1, "S21", "S2", "S5", "S13", "S14")
def leaving_the_decode_set_is_not_told() -> Iterator[None]:
    original = batch_planner.launch

    def launch(node_state, rows, decode):
        for micro_batch in node_state.micro_batches.each:
            micro_batch.leaves = []
        original(node_state, rows, decode)

    with replaced(batch_planner, "launch", launch):
        yield


@mutant(1, "S5")
def grown_page_is_not_told() -> Iterator[None]:
    original = batch_planner.launch

    def launch(node_state, rows, decode):
        original(node_state, rows, decode and structs.replace(decode, grow=decode.grow[1:]))

    with replaced(batch_planner, "launch", launch):
        yield


@mutant(3, "S14")
def tokens_of_one_step_change_places() -> Iterator[None]:
    def flush(emission, node_state):
        if emission.requests:
            tokens = b"".join(reversed(emission.tokens))
            node_state.out.append(node.EmitTokens(tuple(emission.requests), tokens, ()))
        for one, reason in emission.ends:
            node.finish(node_state, one, reason)

    with replaced(node.Emission, "flush", flush):
        yield


@mutant(15, "S14", "S13", "S2", "L2")
def late_batch_result_is_settled_again() -> Iterator[None]:
    original = node.settle

    def settle(node_state, outcome):
        flight = node_state.inflight[0] if node_state.inflight else None
        original(node_state, outcome)
        if flight is not None and outcome.batch % 7 == 0:
            node_state.inflight.insert(0, flight)
            original(node_state, outcome)

    with replaced(node, "settle", settle):
        yield


@mutant(4, "S2")
def batch_has_returned_when_its_first_worker_has() -> Iterator[None]:
    """What is published then is not written yet on the others."""

    def returned(group, shard, outcome):
        return outcome if shard == 0 else None

    with replaced(WorkerGroup, "returned", returned):
        yield
