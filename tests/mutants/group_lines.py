"""Seeded bugs of replicas that have several workers, one to three lines each, that whole clusters have to notice.

As those of `whole_lines.py`, written down before any was tried: what one worker says is taken for all, one of them is
forgotten, or the wrong one is meant.
"""

from whole_lines import WholeBreak

WORKER, WORKERS = "server/worker.py", "server/node/workers.py"
API, DISPATCH, EXCHANGE = "server/api/process.py", "server/node/dispatch.py", "engine/row_exchange.py"
PROCESSES, COLLECTIVES, LATE = "server/processes.py", "engine/process_group.py", "engine/late_tokens.py"

GROUP_BREAKS = (
    WholeBreak(
        "other_workers_drop_their_abort",
        WORKER,
        "                self._data_plane.cancel(message)\n",
        "                self._rank.shard or self._data_plane.cancel(message)\n",
        "one worker ends its pull, the others go on",
    ),
    WholeBreak(
        "other_workers_drop_their_revocation",
        WORKER,
        "                self._data_plane.revoke(message)\n",
        "                self._rank.shard or self._data_plane.revoke(message)\n",
        "one worker takes its grants back, the others let them be",
    ),
    WholeBreak(
        "landed_by_one_is_landed_by_all",
        "core/disagg/shard_progress.py",
        "if behind else Landed()",
        "if len(behind) == len(expected) else Landed()",
        "one shard's report is taken for all",
    ),
    WholeBreak(
        "all_workers_report_as_the_first",
        "transfer/owner.py",
        "            kv.shard,\n",
        "            kv.cut.shards[0],\n",
        "reports on transfers of several shards are counted as those of one",
    ),
    WholeBreak(
        "all_workers_pull_from_the_first",
        "transfer/puller.py",
        "Source[Link](tile, addresses[tile.source])",
        "Source[Link](tile, addresses[0])",
        "the pages of one shard are taken for those of another",
    ),
    WholeBreak(
        "runs_of_a_page_follow_each_other",
        "core/kv_parts.py",
        "    return Runs(first, size, stride, len(part.heads))",
        "    return Runs(first, size, size, len(part.heads))",
        "some layers of several heads are read as if they lay one behind the other",
    ),
    WholeBreak(
        "digests_of_a_part_are_looked_up_by_its_source",
        "transfer/puller.py",
        "command.digests[tile.index], ",
        "command.digests[tile.source], ",
        "every worker that reads from one takes the digests of the first of them",
    ),
    WholeBreak(
        "page_has_landed_when_one_worker_has_sent_its_part",
        "transfer/jobs.py",
        "return min(pull.landed for pull in self.pulls)",
        "return max(pull.landed for pull in self.pulls)",
        "the fastest of several sources stands for all",
    ),
    WholeBreak(
        "other_pulls_of_a_failed_attempt_go_on",
        "transfer/puller.py",
        "        self._stop(attempt)\n        self._report(TransferFailed(",
        "        attempt.is_over = True\n        self._report(TransferFailed(",
        "bytes of the other workers land after the attempt has drained",
    ),
    WholeBreak(
        "drained_by_one_is_drained_by_all",
        "core/scheduler/node.py",
        "    progress.drains.pop(shard, None)\n",
        "    progress.drains.clear()\n",
        "pages are free while other workers still read or write them",
    ),
    WholeBreak(
        "batch_has_returned_with_its_first_worker",
        "core/worker_group.py",
        "        if not all(self._returned):\n            return None\n"
        "        return combined([waiting.popleft() for waiting in self._returned])",
        "        if not self._returned[0]:\n            return None\n"
        "        return combined([waiting.popleft() for waiting in self._returned if waiting])",
        "who returns first is enough, and KV is published before all have written their part",
    ),
    WholeBreak(
        "steady_batch_runs_ahead_of_its_tokens",
        LATE,
        "[batch.shares_decode_set(plan) or batch.touches(requests) for batch",
        "[batch.touches(requests) for batch",
        "a worker decodes on without the tokens that another one has sampled",
    ),
    WholeBreak(
        "prompt_runs_ahead_of_its_own_token",
        LATE,
        "[batch.shares_decode_set(plan) or batch.touches(requests) for batch",
        "[batch.shares_decode_set(plan) for batch",
        "a prompt that runs again does not wait for the token of its first time",
    ),
    WholeBreak(
        "tokens_go_to_one_other_worker",
        COLLECTIVES,
        "        for other in self._others:\n",
        "        for other in self._others[:1]:\n",
        "of three workers one is never told what was sampled",
    ),
    WholeBreak(
        "what_a_pass_has_found_is_taken_by_nobody_else",
        "engine/drafts.py",
        "self.tokens[self.first :][known] = told[known]",
        "pass",
        "masks stand where the others have tokens of a block",
    ),
    WholeBreak(
        "hidden_states_go_to_the_next_shard",
        COLLECTIVES,
        "self.rank.shard + self._in_stage, tag=HIDDEN",
        "self.rank.shard + 1, tag=HIDDEN",
        "the next shard of the stage is taken for the next stage",
    ),
    WholeBreak(
        "fastest_worker_answers_for_all",
        WORKERS,
        "return min(self._echoes)",
        "return max(self._echoes)",
        "a worker that hangs is not noticed while another one answers",
    ),
    WholeBreak(
        "first_worker_hangs_for_all",
        WORKERS,
        "return self._ranks[self._echoes.index(self.echoes)]",
        "return self._ranks[0]",
        "a worker is blamed that has answered",
    ),
    WholeBreak(
        "numbers_of_one_worker_are_those_of_all",
        WORKERS,
        "if len(bodies) == len(self._peers):",
        "if len(bodies) == 1:",
        "a question is answered by the first, and again by every other",
    ),
    WholeBreak(
        "who_ends_with_others_is_blamed",
        PROCESSES,
        "if (code := child.poll()) not in (None, 0, EXIT_WITH_OTHERS):",
        "if (code := child.poll()) not in (None, 0):",
        "the reason of an end is a worker that had nobody to compute with any more",
    ),
    WholeBreak(
        "lost_worker_is_a_failed_batch",
        WORKER,
        "        except WorkerGone:\n            raise\n",
        "",
        "a worker says that it has failed, where another one has",
    ),
    WholeBreak(
        "first_ready_worker_is_enough",
        WORKERS,
        "if self.num_ready < len(self._peers):",
        "if self.num_ready == 0:",
        "a node asks for what a worker that still loads has not said",
    ),
    WholeBreak(
        "launches_are_told_to_nobody",
        DISPATCH,
        "self.api.send(wire.BatchLaunched(self.dp_rank))",
        "pass",
        "ranks that have nothing do not go along",
    ),
    WholeBreak(
        "launches_are_told_to_the_next_rank",
        API,
        "                    if other != dp_rank:",
        "                    if other == dp_rank + 1:",
        "the last rank steps alone",
    ),
    WholeBreak(
        "launches_of_one_rank_are_told_as_of_another",
        DISPATCH,
        "wire.BatchLaunched(self.dp_rank)",
        "wire.BatchLaunched(0)",
        "a rank waits for a batch that nobody has",
    ),
    WholeBreak(
        "sums_go_to_ranks_in_another_order",
        EXCHANGE,
        "input_split_sizes=[size * row_bytes for size in self._sizes],",
        "input_split_sizes=[size * row_bytes for size in reversed(self._sizes)],",
        "rows of unequal batches go to another rank",
    ),
)


# Which seed has noticed it, or which world of `directed.py`.
GROUP_KILLED_BY: dict[str, int | str] = {
    "all_workers_pull_from_the_first": 36,
    "all_workers_report_as_the_first": 36,
    "batch_has_returned_with_its_first_worker": 36,
    "digests_of_a_part_are_looked_up_by_its_source": 3,
    "drained_by_one_is_drained_by_all": 36,
    "fastest_worker_answers_for_all": "idle_worker_hangs",
    "first_ready_worker_is_enough": 36,
    "first_worker_hangs_for_all": "idle_worker_hangs",
    "hidden_states_go_to_the_next_shard": 225,
    "landed_by_one_is_landed_by_all": 77,
    "launches_are_told_to_nobody": 130,
    "launches_are_told_to_the_next_rank": 130,
    "launches_of_one_rank_are_told_as_of_another": 130,
    "lost_worker_is_a_failed_batch": "second_worker_is_killed_behind_a_node_that_is_held_up",
    "numbers_of_one_worker_are_those_of_all": 36,
    "other_workers_drop_their_abort": 479,
    "other_workers_drop_their_revocation": 36,
    "other_pulls_of_a_failed_attempt_go_on": 78,
    "page_has_landed_when_one_worker_has_sent_its_part": 3,
    "runs_of_a_page_follow_each_other": 3,
    "steady_batch_runs_ahead_of_its_tokens": 36,
    "sums_go_to_ranks_in_another_order": 130,
    "tokens_go_to_one_other_worker": 225,
    "what_a_pass_has_found_is_taken_by_nobody_else": 10_257,
    "who_ends_with_others_is_blamed": "second_worker_is_killed_behind_a_node_that_is_held_up",
}

GROUP_SURVIVORS = {
    "prompt_runs_ahead_of_its_own_token": "only a prompt of a prefill runs again before its token has come everywhere, "
    "and there nothing is computed from that token; tests/unit/test_late_tokens.py notices it",
}
