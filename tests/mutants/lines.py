"""Breaks of one line: for a behaviour of the parity table, the line that a user would miss, and a test that then fails.

Each runs a pytest of its own on a copy of the sources in which that line is another one, so processes that the test
starts have it too. The test has to fail by an assertion of its own: an error around it kills nothing.
"""

import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "tandem"
HUNG_S = 180.0


@dataclass(frozen=True)
class Edit:
    name: str
    file: str  # below src/tandem
    line: str  # occurs once in it
    instead: str


@dataclass(frozen=True)
class Break(Edit):
    """`instead` differs in one line."""

    test: str  # path::function below tests


OPTIMISTIC = "unit/test_core_optimistic.py::test_"
DELAYER = "unit/test_core_delayer.py::test_"
FLAGS = "unit/test_config_flags.py::test_"
MICRO_BATCHES = "unit/test_core_micro_batches.py::test_"
BLOCKS = "unit/test_core_blocks.py::test_"
FOUND_TOGETHER = "e2e_cpu/test_engine_blocks.py::test_"
SERVED = "e2e_cpu/test_serve_unified.py::test_"
ALIKE = "e2e_cpu/test_pd_equals_unified.py::test_"
GRAMMAR = "e2e_cpu/test_engine_grammar.py::test_"
TOOLS = "unit/test_api_tools.py::test_"
RESPONSES = "unit/test_api_responses_sdk.py::test_"
PROMPT_LOGPROBS = "unit/test_core_prompt_logprobs.py::test_"
MESSAGES = "unit/test_api_messages_sdk.py::test_"
EDGES = "e2e_cpu/test_pd_edges.py::test_"
DRIVER = "unit/test_node_driver.py::test_"
LINKS = "unit/test_links.py::test_"
UPSTREAM = "unit/test_upstream_call.py::test_"
FAULTS = "e2e_cpu/test_fault_injection.py::test_"
CHAT = "e2e_cpu/test_chat_terminal.py::test_"
COMMANDS = "unit/test_client_commands.py::test_"
TRACED = "e2e_cpu/test_traces.py::test_"
KV_LAW = "laws/test_kv_events_laws.py::test_replaying_the_events_gives_what_the_tree_holds_after_every_step"
KV_SERVED = "e2e_cpu/test_kv_events.py::test_"
KV_SENT = "unit/test_kv_publisher.py::test_"
HOSTS = "unit/test_hosts.py::test_"
NNODES = "ranks/test_nnodes.py::test_"
TOGETHER = "ranks/test_dp_attention.py::test_"
TIER = "unit/test_core_host_tier.py::test_"
STORAGE = "unit/test_core_storage.py::test_"
FILES = "unit/test_page_files.py::test_"
BORROWED = "e2e_cpu/test_engine_borrowed.py::test_"
VECTORS = "unit/test_core_vectors.py::test_"
POOLED = "e2e_cpu/test_engine_vectors.py::test_"
QUANTIZED = "e2e_cpu/test_quantized_checkpoints.py::test_"
EMBEDDED = "e2e_cpu/test_vectors.py::test_"

BREAKS = (
    # sglang#26780
    Break(
        "hit_rate_is_always_0",
        "core/scheduler/inspect.py",
        "counters.hit_tokens / counters.input_tokens if counters.input_tokens else 0.0",
        "0.0",
        "unit/test_core_memory.py::test_the_hit_rate_counts_a_prompt_once_however_often_it_is_computed",
    ),
    Break(
        "hit_rate_is_always_0_in_processes",
        "core/scheduler/inspect.py",
        "counters.hit_tokens / counters.input_tokens if counters.input_tokens else 0.0",
        "0.0",
        "e2e_cpu/test_forced_retry.py::test_what_a_retry_finds_of_itself_is_no_cache_hit",
    ),
    Break(
        "number_of_retries_is_ignored",
        "server/node/settings.py",
        "config.optimistic_prefill_retries or DEFAULT_RETRIES",
        "DEFAULT_RETRIES",
        FLAGS + "the_flags_of_the_pair_reach_the_node",
    ),
    Break(
        "number_of_retries_is_ignored_in_processes",
        "server/node/settings.py",
        "config.optimistic_prefill_retries or DEFAULT_RETRIES",
        "DEFAULT_RETRIES",
        ALIKE + "halves_without_a_decode_are_in_the_bootstrap_queue_whatever_is_computed",
    ),
    Break(
        "result_row_is_dropped_on_requeue",
        "core/disagg/prefill_side.py",
        "    if may_retry:",
        "    if node.results.maybe_release_metadata_buffer(progress.id) or may_retry:",
        OPTIMISTIC + "a_retry_keeps_its_result_row_while_it_is_queued",
    ),
    Break(
        "no_failure_is_injected_on_prefill",
        "server/node/injection.py",
        "isinstance(event, PagesLanded | PagesDigested)",
        "isinstance(event, PagesLanded)",
        "unit/test_injection.py::test_with_certainty_both_halves_hear_of_a_failure_instead",
    ),
    Break(
        "no_failure_is_injected_on_prefill_processes",
        "server/node/injection.py",
        "isinstance(event, PagesLanded | PagesDigested)",
        "isinstance(event, PagesLanded)",
        FAULTS + "when_every_transfer_fails_decode_computes_the_same_tokens_itself",
    ),
    Break(
        "forced_retries_choose_other_ids",
        "core/disagg/optimistic_prefill.py",
        'int.from_bytes(digest[:8], "big") <',
        'int.from_bytes(digest[:8], "little") <',
        "unit/test_core_bootstrap.py::test_the_forced_retry_is_the_definition_of_the_seed",
    ),
    Break(
        "retracted_requests_are_forced",
        "core/disagg/optimistic_prefill.py",
        "prefill_retry_count > 0 or is_retracted:",
        "prefill_retry_count > 0:",
        "unit/test_core_bootstrap.py::test_nothing_is_forced_twice_nor_after_a_retraction_nor_without_a_probability",
    ),
    Break(
        "result_row_is_given_back_twice",
        "core/disagg/transfer_state.py",
        "row = self.owners.pop(request, None)",
        "row = self.owners.get(request)",
        "unit/test_core_bootstrap.py::test_giving_a_row_back_twice_gives_it_back_once",
    ),
    Break(
        "lack_of_a_result_row_blocks_the_queue",
        "core/scheduler/admission.py",
        "if blocked_on is WaitingFor.METADATA_SLOT:\n            continue",
        "if blocked_on is WaitingFor.METADATA_SLOT:\n            return",
        "unit/test_core_optimistic.py::test_one_that_waits_for_a_result_row_says_so_and_does_not_block_one_that_needs_none",
    ),
    Break(
        "retry_goes_to_the_end_of_the_queue",
        "core/disagg/prefill_side.py",
        'first=reason != "yield"',
        "first=False",
        "unit/test_core_optimistic.py::test_a_retry_keeps_its_result_row_and_its_place_at_the_head",
    ),
    Break(
        "retry_keeps_its_stages",
        "core/disagg/prefill_side.py",
        'progress.stages = {"prefill_retried": Nanos(sum(progress.stages.values()))}',
        "pass",
        "unit/test_core_optimistic.py::test_a_retry_begins_its_stages_anew_and_the_arrival_stays",
    ),
    Break(
        "retry_is_counted_in_the_hit_rate_again",
        "core/scheduler/admission.py",
        "if not progress.is_counted:",
        "if progress:",
        "unit/test_core_memory.py::test_the_hit_rate_counts_a_prompt_once_however_often_it_is_computed",
    ),
    Break(
        "bootstrap_is_not_polled_between_chunks",
        "core/disagg/prefill_side.py",
        "verdict = bootstrap_policy(node.settings).at_boundary(policy_view(node, progress, side))",
        "verdict = Verdict.GO_ON",
        "unit/test_core_optimistic.py::test_retry_gives_back_at_a_chunk_boundary_and_continues_where_the_cache_ends",
    ),
    Break(
        "retries_are_not_counted_against_their_bound",
        "core/disagg/prefill_side.py",
        "side.prefill_retry_count += 1",
        "side.prefill_retry_count |= 1",
        "unit/test_core_optimistic.py::test_retry_computes_as_often_as_allowed_and_then_holds_nothing_but_what_is_cached",
    ),
    Break(
        "early_ready_is_forgotten",
        "core/disagg/prefill_side.py",
        "stashed = node.stash.pop(side.room, None)",
        "stashed = None",
        "unit/test_core_rendezvous.py::test_a_ready_may_overtake_the_request_it_speaks_of",
    ),
    Break(
        "ready_with_another_layout_is_taken",
        "core/disagg/prefill_side.py",
        "if ready.layout != node.settings.layout:",
        "if not ready.layout:",
        "unit/test_core_rendezvous.py::test_prefill_refuses_a_ready_with_another_layout",
    ),
    Break(
        "fallback_keeps_its_result_row",
        "core/disagg/prefill_side.py",
        "    node.results.maybe_release_metadata_buffer(progress.id)\n    enter",
        "    pass\n    enter",
        "unit/test_core_optimistic.py::test_exhausted_retries_fall_back_to_the_bootstrap_queue_without_a_result_row",
    ),
    # sglang#27028
    Break(
        "failed_bootstraps_of_prefill_are_not_counted",
        "core/disagg/prefill_side.py",
        "node.counters.bootstrap_failed += 1",
        "pass",
        "unit/test_core_inspect.py::test_a_request_that_fails_is_counted_once_by_how_far_it_had_come",
    ),
    Break(
        "failed_bootstraps_of_decode_are_not_counted",
        "core/disagg/decode_side.py",
        "node.counters.bootstrap_failed += side.arrival is None",
        "pass",
        "unit/test_core_inspect.py::test_a_request_that_fails_is_counted_once_by_how_far_it_had_come",
    ),
    Break(
        "failed_bootstraps_are_not_shown",
        "core/scheduler/inspect.py",
        '"num_bootstrap_failed_reqs_total": counters.bootstrap_failed',
        '"num_bootstrap_failed_reqs_total": 0',
        EDGES + "a_decode_that_never_says_ready_ends_the_prefills_half_in_time",
    ),
    Break(
        "failed_requests_have_no_line",
        "server/api/stream.py",
        "        self._log.write_all(records)",
        "        self._log.write_all([record for record in records if not record.is_failed])",
        "unit/test_api_failures.py::test_every_cause_before_the_first_token_is_a_status_of_its_own",
    ),
    Break(
        "failed_requests_have_no_line_in_processes",
        "server/api/stream.py",
        "        self._log.write_all(records)",
        "        self._log.write_all([record for record in records if not record.is_failed])",
        EDGES + "a_decode_that_never_says_ready_ends_the_prefills_half_in_time",
    ),
    Break(
        "bootstrap_queue_is_always_0",
        "core/scheduler/inspect.py",
        '"num_prefill_bootstrap_queue_reqs": len(unready)',
        '"num_prefill_bootstrap_queue_reqs": 0',
        OPTIMISTIC + "halves_that_wait_for_ready_are_in_the_bootstrap_queue_whatever_is_computed",
    ),
    Break(
        "bootstrap_queue_is_always_0_in_processes",
        "core/scheduler/inspect.py",
        '"num_prefill_bootstrap_queue_reqs": len(unready)',
        '"num_prefill_bootstrap_queue_reqs": 0',
        ALIKE + "halves_without_a_decode_are_in_the_bootstrap_queue_whatever_is_computed",
    ),
    Break(
        "failure_of_a_later_shard_is_ignored",
        "core/disagg/shard_progress.py",
        "if report is not None and report.failure is not None:",
        "if report is not None and report.failure is not None and shard == min(expected):",
        "unit/test_core_orphans.py::test_a_failure_on_any_shard_cancels_the_pull_and_waits_for_every_shard",
    ),
    Break(
        "transfer_has_landed_with_its_fastest_shard",
        "core/disagg/shard_progress.py",
        "return Pending(min(behind)) if behind else Landed()",
        "return Pending(min(behind)) if len(behind) == len(expected) else Landed()",
        "unit/test_core_rendezvous.py::test_a_transfer_waits_for_its_slowest_shard",
    ),
    # sglang#23189
    Break(
        "delayer_waits_50_s_by_default",
        "config.py",
        "prefill_delayer_max_delay_ms: float = flag(5000.0",
        "prefill_delayer_max_delay_ms: float = flag(50000.0",
        FLAGS + "the_numbers_of_the_delayer_are_those_of_the_seed",
    ),
    Break(
        "delayer_of_the_core_waits_50_s_by_default",
        "core/settings.py",
        "max_delay_ns: Nanos = Nanos(5 * SECOND)",
        "max_delay_ns: Nanos = Nanos(50 * SECOND)",
        FLAGS + "the_numbers_of_the_delayer_are_those_of_the_seed",
    ),
    Break(
        "delayer_of_a_rank_agrees_with_itself",
        "server/node/settings.py",
        "num_ranks=topology.attn_dp_size,",
        "num_ranks=1,",
        TOGETHER + "prompts_of_one_rank_wait_for_what_the_other_one_sees",
    ),
    Break(
        "pass_of_the_delayer_has_no_deadline",
        "server/api/gathering.py",
        "call_later(left_s, self._tick)",
        "call_later(1000 + left_s, self._tick)",
        "unit/test_gathering.py::test_a_rank_that_says_nothing_is_left_out_at_the_deadline",
    ),
    Break(
        "parts_of_other_ranks_are_left_out",
        "engine/row_exchange.py",
        "total, *others = found.unbind()",
        "total, *others = found.unbind()[:1]",
        TOGETHER + "two_ranks_say_what_transformers_says",
    ),
    Break(
        "queue_gate_takes_the_fewest_that_wait",
        "core/scheduler/delayer_policy.py",
        "return max(rank.num_waiting for rank in ranks)",
        "return min(rank.num_waiting for rank in ranks)",
        "unit/test_gates.py::test_of_unequal_ranks_the_one_with_most_running_and_the_one_with_most_waiting_count",
    ),
    Break(
        "queue_gate_takes_the_fewest_that_run",
        "core/scheduler/delayer_policy.py",
        "int(max(rank.num_running for rank in ranks)",
        "int(min(rank.num_running for rank in ranks)",
        "unit/test_gates.py::test_of_unequal_ranks_the_one_with_most_running_and_the_one_with_most_waiting_count",
    ),
    Break(
        "usual_batch_is_that_of_the_smallest_rank",
        "core/scheduler/delayer_policy.py",
        "return max(rank.usual_batch for rank in ranks)",
        "return min(rank.usual_batch for rank in ranks)",
        "unit/test_gates.py::test_of_unequal_ranks_the_one_with_the_largest_usual_batch_counts",
    ),
    Break(
        "queue_gate_is_removed",
        "core/scheduler/delayer_policy.py",
        "= (slot_gate_closes, queue_gate_closes)",
        "= (slot_gate_closes,)",
        DELAYER + "requests_that_finish_one_by_one_are_replaced_in_groups",
    ),
    Break(
        "queue_gate_is_removed_in_processes",
        "core/scheduler/delayer_policy.py",
        "= (slot_gate_closes, queue_gate_closes)",
        "= (slot_gate_closes,)",
        "e2e_cpu/test_prefill_delayer.py::test_prompts_wait_for_each_other_and_nobody_gets_other_tokens",
    ),
    Break(
        "slot_gate_is_removed",
        "core/scheduler/delayer_policy.py",
        "= (slot_gate_closes, queue_gate_closes)",
        "= (queue_gate_closes,)",
        DELAYER + "the_slot_gate_waits_until_a_usual_batch_fits",
    ),
    Break(
        "deadline_of_the_queue_gate_is_ignored",
        "core/scheduler/delayer_policy.py",
        "or any(rank.is_timed_out for rank in ranks):",
        ":",
        "unit/test_core_delayer.py::test_the_queue_gate_gives_up_at_its_deadline",
    ),
    Break(
        "passes_are_no_bound",
        "core/scheduler/delayer_policy.py",
        "settings.max_delay_passes - 1:",
        "settings.max_delay_passes + 9:",
        "unit/test_gates.py::test_nobody_waits_for_more_passes_than_allowed",
    ),
    Break(
        "watermark_is_ignored",
        "core/scheduler/prefill_delayer.py",
        "is_under_watermark=is_prefillable and",
        "is_under_watermark=False and",
        "unit/test_core_delayer.py::test_a_pool_that_is_hardly_used_lets_everybody_begin",
    ),
    Break(
        "first_delay_is_not_skipped",
        "core/scheduler/delayer_policy.py",
        "if is_closed and memory.has_skipped_first:",
        "if is_closed:",
        "unit/test_gates.py::test_the_last_pass_of",
    ),
    Break(
        "prompt_that_has_begun_is_held",
        "core/scheduler/batch_planner.py",
        "(not may_begin and is_fresh(progress))",
        "not may_begin",
        "unit/test_core_delayer.py::test_a_prompt_that_has_begun_goes_on_and_does_not_let_others_in",
    ),
    Break(
        "prompts_wait_though_nobody_runs",
        "core/scheduler/delayer_policy.py",
        "any(rank.num_running for rank in ranks) and any(",
        "any(",
        "unit/test_gates.py::test_where_nobody_runs_nobody_with_prompts_waits",
    ),
    Break(
        "outcomes_are_counted_once",
        "core/scheduler/prefill_delayer.py",
        "state.outcomes.get(outcome, 0) + 1",
        "1",
        "unit/test_core_delayer.py::test_outcomes_and_waits_are_counted_once_per_pass",
    ),
    Break(
        "bounds_in_seconds_are_ignored",
        "server/node/settings.py",
        "config.prefill_delayer_wait_seconds_buckets or usual",
        "usual",
        "unit/test_config_flags.py::test_the_buckets_of_the_delayer_reach_the_node_each_on_its_own",
    ),
    Break(
        "peak_of_long_ago_is_usual",
        "core/scheduler/delayer_policy.py",
        "return (*sizes, size)[-window:]",
        "return (*sizes, size)",
        "unit/test_gates.py::test_a_peak_is_usual_for_as_many_batches_as_the_window_has",
    ),
    Break(
        "flag_of_passes_is_ignored_in_processes",
        "server/node/settings.py",
        "max_delay_passes=config.prefill_delayer_max_delay_passes",
        "max_delay_passes=usual.max_delay_passes",
        "e2e_cpu/test_prefill_delayer.py::test_nobody_waits_for_more_batches_than_the_flag_says",
    ),
    Break(
        "flag_of_the_watermark_is_ignored_in_processes",
        "server/node/settings.py",
        "low_watermark=config.prefill_delayer_token_usage_low_watermark",
        "low_watermark=None",
        "e2e_cpu/test_prefill_delayer.py::test_below_the_watermark_nobody_waits",
    ),
    # sglang#22901
    Break(
        "forced_query_is_ignored",
        "core/disagg/dp_rank.py",
        "if not prefill.rooms_tell_the_rank or force_query:",
        "if not prefill.rooms_tell_the_rank:",
        "unit/test_dp_rank.py::test_decode_finds_the_rank",
    ),
    Break(
        "rooms_are_trusted_though_routes_may_contradict",
        "core/disagg/dp_rank.py",
        "return Known(implied) if prefill.conflict is DpConflictPolicy.FAIL else Likely(implied)",
        "return Known(implied)",
        "unit/test_dp_rank.py::test_resolving_refuses_nothing_that_carries_no_rank",
    ),
    Break(
        "rank_in_the_body_is_ignored_in_processes",
        "core/disagg/dp_rank.py",
        "return Known(hint)",
        "return Ask()",
        "e2e_cpu/test_pd_edges.py::test_a_dp_rank_that_the_body_names_is_believed_without_a_question",
    ),
    Break(
        "conflict_is_not_refused",
        "core/disagg/dp_rank.py",
        "return Conflict(room_conflict(",
        "return Quiet() or Conflict(room_conflict(",
        "unit/test_core_dp_ranks.py::test_an_external_route_that_contradicts_the_room_is_refused_in_the_seeds_words",
    ),
    Break(
        "rank_is_not_announced",
        "core/disagg/prefill_side.py",
        "node.out.append(AnnounceDpRank(side.room, node.settings.dp_rank, side.sought))",
        "pass",
        "unit/test_core_dp_ranks.py::test_any_route_is_announced_and_asked_for_where_rooms_do_not_tell",
    ),
    Break(
        "ready_is_not_sent_on",
        "core/disagg/prefill_side.py",
        "node.out.append(Tell(waiting.peer, moved))",
        "pass",
        "unit/test_core_dp_ranks.py::test_ready_for_a_room_that_was_routed_elsewhere_is_sent_on",
    ),
    Break(
        "rank_where_decode_looks_is_not_told_in_processes",
        "server/api/process.py",
        "self._client.tell_elsewhere(announced)",
        "pass",
        "ranks/test_dp_ranks.py::test_a_route_that_is_refused_ends_both_halves_at_once",
    ),
    Break(
        "environment_of_forced_queries_is_ignored",
        "server/node/settings.py",
        "force_query=environment_switch(FORCE_QUERY)",
        "force_query=False",
        "unit/test_config_flags.py::test_the_timeouts_of_a_pair_come_from_the_environment_and_are_the_deadline_otherwise",
    ),
    # sglang#20845
    Break(
        "prefill_ignores_the_overlap_switch",
        "server/node/settings.py",
        "window_depth=1 if config.disable_overlap_schedule",
        'window_depth=1 if config.disable_overlap_schedule and config.role != "prefill"',
        FLAGS + "the_overlap_switch_reaches_the_node_of_every_role",
    ),
    Break(
        "decode_ignores_the_overlap_switch",
        "server/node/settings.py",
        "window_depth=1 if config.disable_overlap_schedule",
        'window_depth=1 if config.disable_overlap_schedule and config.role != "decode"',
        FLAGS + "the_overlap_switch_reaches_the_node_of_every_role",
    ),
    Break(
        "line_takes_the_counter_of_the_node",
        "server/logs.py",
        "batch_number(launched.plan.iteration, forward_count",
        "batch_number(None, forward_count",
        "unit/test_log_lines.py::test_the_last_batch_before_idle_keeps_its_number",
    ),
    Break(
        "batches_under_way_together_share_a_number",
        "core/scheduler/batch_planner.py",
        "    node.forward_ct += 1",
        "    node.forward_ct += not node.inflight",
        "unit/test_core_plans.py::test_the_last_batch_before_idle_keeps_its_number",
    ),
    Break(
        "line_of_vectors_takes_the_counter_of_the_node",
        "server/logs.py",
        "batch_number(launched.plan.iteration, forward_count",
        "batch_number(None, forward_count",
        VECTORS + "batches_with_vectors_carry_the_numbers_of_their_launch",
    ),
    Break(
        "line_takes_the_counter_of_the_node_in_processes",
        "server/logs.py",
        "batch_number(launched.plan.iteration, forward_count",
        "batch_number(None, forward_count",
        SERVED + "batches_are_logged_under_the_numbers_of_their_launch",
    ),
    Break(
        "result_of_another_iteration_is_taken",
        "core/scheduler/node.py",
        "assert outcome.iteration == flight.forward_iter",
        "assert outcome.iteration",
        "unit/test_core_plans.py::test_outcomes_of_another_iteration_are_our_own_bug",
    ),
    Break(
        "numbers_are_always_shown",
        "server/logs.py",
        "if self.shows_numbers else None",
        "if self.write else None",
        "unit/test_log_lines.py::test_numbers_are_shown_only_when_they_are_asked_for",
    ),
    Break(
        "numbers_are_never_shown_in_processes",
        "server/node/process.py",
        "shows_numbers=environment_switch(LOG_FORWARD_ITERS)",
        "shows_numbers=False",
        "e2e_cpu/test_serve_unified.py::test_batches_are_logged_under_the_numbers_of_their_launch",
    ),
    Break(
        "batches_of_blocks_are_logged_under_the_latest_number",
        "server/logs.py",
        "batch_number(launched.plan.iteration, forward_count",
        "batch_number(self._forward_count, forward_count",
        "e2e_cpu/test_blocks_served.py::test_lines_of_batches_carry_the_numbers_of_their_launch",
    ),
    # servers of several workers and ranks
    Break(
        "batch_has_returned_with_its_first_worker",
        "server/node/workers.py",
        "whole = self._group.returned(rank.shard, outcome)",
        "whole = outcome",
        DRIVER + "every_worker_hears_everything_and_what_they_say_comes_when_all_have_said_it",
    ),
    Break(
        "failure_does_not_name_its_worker",
        "server/node/driver.py",
        "self.workers.with_rank(self.failures.instead_of(event))",
        "self.failures.instead_of(event)",
        DRIVER + "a_transfer_that_fails_names_the_worker_however_it_came_about",
    ),
    Break(
        "rank_that_a_request_names_is_ignored",
        "server/api/live_requests.py",
        "Newcomer(arrival.request.prompt_len, arrival.request.room, arrival.routed)",
        "Newcomer(arrival.request.prompt_len, arrival.request.room, None)",
        "unit/test_api_ranks.py::test_the_rank_that_a_request_names_comes_before_every_method",
    ),
    # docs/structured-output.md
    Break(
        "grammar_is_not_followed",
        "engine/sampler.py",
        "return logits.masked_fill(forbidden, -math.inf)",
        "return logits",
        GRAMMAR + "every_parameter_holds_within_the_grammar",
    ),
    Break(
        "grammar_is_not_taken_back_with_its_tokens",
        "engine/sequence.py",
        "self._read_again()",
        "pass",
        GRAMMAR + "a_retracted_request_goes_on_where_its_grammar_was",
    ),
    Break(
        "grammar_forgets_the_first_token",
        "engine/sequence.py",
        "self.matcher.accept(token)",
        "self.num_outputs > 1 and self.matcher.accept(token)",
        GRAMMAR + "where_it_stands_is_made_anew_on_decode",
    ),
    Break(
        "end_of_a_grammar_is_not_told",
        "engine/engine.py",
        "flags=_with_ends(sampled.flags, batch.samplers)",
        "flags=sampled.flags",
        GRAMMAR + "a_batch_that_was_under_way_when_the_grammar_ended_does_no_harm",
    ),
    Break(
        "minimum_length_wins_over_a_grammar",
        "engine/sampler.py",
        "if draw.allowed is None or longer.max() > -math.inf:",
        "if True:",
        "unit/test_engine_sampler.py::test_a_grammar_at_its_end_wins_over_a_minimum_length",
    ),
    Break(
        "end_that_llguidance_guesses_is_allowed",
        "grammar.py",
        "for id in self._masked_ids:",
        "for id in self._eos_ids:",
        "unit/test_grammar.py::test_no_token_but_those_of_the_model_ends_an_answer",
    ),
    Break(
        "grammar_is_compiled_for_nobody",
        "server/api/structured_output.py",
        "await asyncio.to_thread(vocabulary.check, made)",
        "pass",
        "unit/test_api_structured.py::test_what_cannot_be_is_the_same_400_on_every_server",
    ),
    Break(
        "required_tool_is_optional",
        "server/api/chat_form.py",
        "must_call=choice == REQUIRED",
        "must_call=False",
        TOOLS + "a_choice_is_forced_by_a_grammar",
    ),
    Break(
        "calls_end_with_stop",
        "server/api/openai.py",
        'return "tool_calls" if calls else sample.finish_reason',
        "return sample.finish_reason",
        TOOLS + "calls_in_an_answer_are_told_from_its_text",
    ),
    Break(
        "template_is_not_told_the_tools",
        "server/api/openai.py",
        'variables["tools"] = list(tools)',
        "pass",
        TOOLS + "the_template_is_told_the_tools_and_the_calls_before",
    ),
    Break(
        "the_calculator_is_not_shown_to_the_model",
        "server/api/openai.py",
        'variables["tools"] = list(tools)',
        "pass",
        "e2e_cpu/test_calculator.py::test_a_call_that_nothing_forces_leads_to_the_right_answer",
    ),
    Break(
        "thoughts_are_part_of_the_answer",
        "server/api/reasoning.py",
        "self._pieces.append(Reasoning(thought))",
        "self._pieces.append(Text(thought))",
        TOOLS + "thoughts_are_told_from_the_answer",
    ),
    Break(
        "an_abort_is_not_in_the_trace",
        "server/request_spans.py",
        "            own.abort(abort_of(record))",
        "            pass",
        TRACED + "an_abort_is_recorded_with_its_reason_wherever_it_happens",
    ),
)

# Of machines that no row of the parity table is about.
OTHERS = (
    # a prefill that comes back with other DP ranks
    Break(
        "what_a_room_was_looked_for_on_outlives_its_ranks",
        "core/disagg/decode_side.py",
        "            side.search = PeerSearch() if is_another else side.search",
        "            side.search = side.search",
        "unit/test_core_dp_ranks.py::test_a_room_of_a_rank_that_is_no_more_is_found_on_the_one_that_it_implies_now",
    ),
    Break(
        "ranks_of_the_former_life_are_said_ready_to",
        "core/disagg/prefill_lookup.py",
        "    if before != prefill:",
        "    if False:",
        "unit/test_core_dp_ranks.py::test_a_room_of_a_rank_that_is_no_more_is_found_on_the_one_that_it_implies_now",
    ),
    Break(
        "a_rank_is_refused_by_what_the_former_life_had",
        "core/disagg/decode_side.py",
        "        case Conflict() if not search.is_informed:",
        "        case Conflict() if False:",
        "unit/test_core_dp_ranks.py::test_a_rank_that_only_the_next_life_has_is_no_conflict",
    ),
    Break(
        "an_early_end_is_told_to_a_rank_that_is_no_more",
        "core/disagg/prefill_lookup.py",
        "        if dp_rank is None:",
        "        if True:",
        "unit/test_core_dp_ranks.py::test_a_half_that_ends_early_is_told_to_the_rank_that_has_its_room_now",
    ),
    Break(
        "a_prefill_with_fewer_ranks_is_refused",
        "core/bootstrap_registry.py",
        "        is_next_life = is_own or new.dp_rank in self._ranks",
        "        is_next_life = is_own",
        "unit/test_bootstrap_registry.py::"
        "test_a_prefill_that_comes_back_with_fewer_ranks_registers_and_none_of_the_former_ones_is_waited_for",
    ),
    # rows that sample blocks
    Break(
        "end_behind_the_last_token_that_was_asked_for_ends_the_answer",
        "core/scheduler/node.py",
        "count, tokens, flags = room, tokens[: TOKEN_BYTES * room], 0",
        "count, tokens = room, tokens[: TOKEN_BYTES * room]",
        BLOCKS + "an_end_of_sequence_behind_the_last_token_that_was_asked_for_is_none",
    ),
    Break(
        "answer_is_not_cut_inside_a_block",
        "core/scheduler/node.py",
        "if count > room:",
        "if count > room + 64:",
        BLOCKS + "a_batch_brings_a_block_of_each_row_and_no_row_more_than_it_takes",
    ),
    Break(
        "decode_row_writes_its_last_token_only",
        "batch_tables.py",
        "Span(member, len(member.tokens) - block, len(member.tokens), True)",
        "Span(member, len(member.tokens) - 1, len(member.tokens), True)",
        BLOCKS + "tokens_are_the_same_for_blocks_of_any_size",
    ),
    Break(
        "result_of_half_a_block_is_taken",
        "core/disagg/decode_side.py",
        "least = TOKEN_BYTES if row.flags else TOKEN_BYTES * num_tokens",
        "least = TOKEN_BYTES",
        BLOCKS + "decode_takes_no_result_that_is_no_whole_block",
    ),
    Break(
        "attention_does_not_see_the_rest_of_its_block",
        "engine/attention/blocks.py",
        "// block * block + block",
        "+ 1",
        FOUND_TOGETHER + "tokens_are_those_of_whole_sequences_for_any_chunks",
    ),
    Break(
        "every_pass_settles_one_token",
        "engine/denoising.py",
        "kept = [sure > least for sure in sureness]",
        "kept = [sure > 0 for sure in sureness]",
        FOUND_TOGETHER + "the_threshold_decides_how_many_passes_a_block_takes",
    ),
    Break(
        "tokens_behind_the_end_are_said",
        "engine/denoising.py",
        "return next((count for count, flag in enumerate(flags, 1) if flag), len(flags))",
        "return len(flags)",
        FOUND_TOGETHER + "an_end_of_sequence_inside_a_block_is_the_last_that_is_said",
    ),
    Break(
        "page_that_a_prompt_ends_in_keeps_what_was_left_there",
        "engine/denoising.py",
        "stop = len(sequence.tokens) if span.samples else span.stop",
        "stop = span.stop",
        FOUND_TOGETHER + "what_others_left_in_a_page_is_gone_before_somebody_pulls_it",
    ),
    Break(
        "stream_of_blocks_goes_on_elsewhere",
        "server/api/telling.py",
        " and limits.block_tokens == 1",
        "",
        "unit/test_api_resume.py::test_a_stream_of_blocks_has_no_frames",
    ),
    Break(
        "penalties_of_blocks_are_ignored",
        "server/api/validation.py",
        "    if limits.block_tokens > 1:",
        "    if limits.block_tokens > 64:",
        "unit/test_api_blocks.py::test_what_speaks_of_one_token_behind_the_other_is_refused",
    ),
    # Micro-batches
    Break(
        "stages_share_one_micro_batch",
        "server/node/settings.py",
        "num_micro_batches=1 if config.disable_overlap_schedule else config.pp_size",
        "num_micro_batches=1",
        FLAGS + "each_pipeline_stage_has_a_micro_batch_unless_nothing_overlaps",
    ),
    Break(
        "what_prompts_took_is_forgotten_when_one_micro_batch_had_its_turn",
        "core/scheduler/batch_planner.py",
        "all_had_turn = decode is not None and not node.micro_batches.longest_wait",
        "all_had_turn = decode is not None",
        MICRO_BATCHES + "what_prompts_may_take_is_counted_until_all_have_had_their_turn",
    ),
    Break(
        "few_requests_are_divided_all_the_same",
        "core/scheduler/micro_batches.py",
        "count >= (found + 1) * least",
        "count > found",
        MICRO_BATCHES + "there_is_another_micro_batch_where_each_has_as_many_members_as_are_worth_it",
    ),
    Break(
        "members_stay_when_others_have_left",
        "core/scheduler/micro_batches.py",
        "if self.num_open > before or self._difference >= UNEVEN:",
        "if self.num_open > before:",
        MICRO_BATCHES + "members_move_when_others_have_left_and_say_the_same_tokens",
    ),
    Break(
        "one_micro_batch_has_all_turns",
        "core/scheduler/micro_batches.py",
        "self.next = (index + 1) % len(self.each)",
        "self.next = index",
        MICRO_BATCHES + "requests_are_shared_out_evenly_and_take_turns",
    ),
    Break(
        "prompts_go_on_when_one_micro_batch_had_its_turn",
        "core/scheduler/micro_batches.py",
        "max((one.num_prompt_batches for one in self.each if one.members), default=0)",
        "min((one.num_prompt_batches for one in self.each if one.members), default=0)",
        MICRO_BATCHES + "prompts_let_every_micro_batch_have_its_turn",
    ),
    Break(
        "who_waits_for_pages_keeps_the_other_micro_batch_waiting",
        "core/scheduler/batch_planner.py",
        "    for index in node.micro_batches.in_turn():",
        "    for index in (next(node.micro_batches.in_turn()),):",
        MICRO_BATCHES + "a_micro_batch_that_waits_for_pages_does_not_keep_the_other_waiting",
    ),
    Break(
        "a_stage_waits_for_the_tokens_of_another_micro_batch",
        "engine/late_tokens.py",
        "self.plan.decodes and self.plan.micro_batch == plan.micro_batch and bool(changes)",
        "self.plan.decodes and bool(changes)",
        "unit/test_late_tokens.py::test_a_micro_batch_runs_ahead_of_the_tokens_of_another_one",
    ),
    # a prompt that others are computing already (decision 027)
    Break(
        "questions_are_sent_before_answers_are_read",
        "server/api/http_exchange.py",
        "            return await _read(reader)  # meanwhile",
        "            return await writer.drain() or await _read(reader)  # meanwhile",
        "unit/test_bootstrap_client.py::test_who_answers_before_the_question_was_sent_is_heard",
    ),
    Break(
        "what_follows_a_thought_counts_as_one",
        "server/api/reasoning.py",
        "        if self._splitter.is_over:",
        "        if False:",
        "unit/test_api_tools.py::test_usage_tells_the_tokens_of_thoughts",
    ),
    Break(
        "prompts_stall_those_who_decode",
        "core/scheduler/batch_planner.py",
        "rows = prompt_rows(node, budget, may_begin=may_begin)",
        "rows = prompt_rows(node, node.settings.chunk_tokens, may_begin=may_begin)",
        "unit/test_core_plans.py::test_prompts_take_as_long_as_those_who_decode_may_wait",
    ),
    Break(
        "what_was_launched_for_prompts_is_forgotten",
        "core/scheduler/chunk_budget.py",
        "self.num_launched = 0 if all_had_turn else self.num_launched + num_tokens",
        "self.num_launched = 0",
        "unit/test_core_plans.py::test_prompts_take_as_long_as_those_who_decode_may_wait",
    ),
    Break(
        "what_prompts_cost_is_not_learned",
        "core/scheduler/chunk_budget.py",
        "        self.took_ns = Nanos(self.took_ns + duration_ns)",
        "        self.took_ns = ZERO_NS",
        "unit/test_core_plans.py::test_prompts_take_as_long_as_those_who_decode_may_wait",
    ),
    Break(
        "prompts_are_cut_small_where_nobody_decodes",
        "core/scheduler/batch_planner.py",
        "    if not others_wait:",
        "    if False:",
        "unit/test_core_plans.py::test_where_nobody_decodes_chunks_are_whole",
    ),
    Break(
        "samples_compute_their_prompt_each",
        "core/scheduler/shared_prefix.py",
        "            if 2 * shared >= pages_for(node, progress.length) - first:",
        "            if not shared:",
        "unit/test_core_shared_prefix.py::test_samples_of_a_prompt_are_forked_from_one_prefill",
    ),
    # integers over which the library of the grammars would end
    Break(
        "integers_that_end_the_process_are_no_complaint",
        "grammar.py",
        "            return BEYOND_INTEGERS",
        '            return ""',
        "unit/test_grammar.py::test_an_integer_that_would_end_the_process_is_refused_wherever_it_stands",
    ),
    # states of state-space layers (decision 029)
    Break(
        "a_chunk_goes_on_from_its_own_page",
        "engine/recurrent_states.py",
        "        source = int(chunk.pages[(chunk.start - 1) // size]) if chunk.start else NO_PAGE",
        "        source = int(chunk.pages[chunk.start // size]) if chunk.start else NO_PAGE",
        "e2e_cpu/test_engine_states.py::test_a_request_goes_on_behind_the_cached_pages_of_another",
    ),
    Break(
        "a_row_that_begins_a_page_begins_anew",
        "engine/recurrent_states.py",
        "        sources, targets = (rows.tables[places, at // self._page_size] for at in (ends - 1, ends))",
        "        sources, targets = (rows.tables[places, at // self._page_size] for at in (ends, ends))",
        "e2e_cpu/test_engine_states.py::test_neither_pages_nor_chunks_show",
    ),
    Break(
        "a_full_page_has_no_state",
        "engine/recurrent_states.py",
        "            stop = min(chunk.stop, (at // size + 1) * size)",
        "            stop = chunk.stop",
        "e2e_cpu/test_engine_states.py::test_a_request_goes_on_behind_the_cached_pages_of_another",
    ),
    Break(
        "states_are_no_part_of_what_a_page_takes",
        "engine/kv_memory.py",
        "        state_bytes = 4 * self.state.numbers if self.state is not None else 0",
        "        state_bytes = 0",
        "e2e_cpu/test_engine_states.py::test_the_bytes_of_a_page_are_those_of_keys_values_and_states",
    ),
    Break(
        "states_are_cut_as_layers_are",
        "engine/kv_memory.py",
        "        self.cell_bytes = cell_bytes if shape.state is None else self.num_cells * cell_bytes",
        "        self.cell_bytes = cell_bytes",
        "ranks/test_states_over_ranks.py::test_a_pair_says_what_transformers_says",
    ),
    Break(
        "what_states_cannot_do_is_accepted",
        "cli/serve.py",
        "    if model.has_states:",
        "    if False:",
        "e2e_cpu/test_state_space.py::test_what_states_do_not_allow_is_refused_by_name",
    ),
    # decoders whose layers transformers computes
    Break(
        "all_layers_of_transformers_share_the_pages_of_the_first",
        "engine/models/transformers_model.py",
        "    return port.attention.forward(q, k, v, layer=layer)[None].to(query.dtype), None",
        "    return port.attention.forward(q, k, v, layer=0)[None].to(query.dtype), None",
        BORROWED + "scores_are_those_of_transformers_through_chunks_and_decode",
    ),
    Break(
        "layers_of_transformers_that_say_something_else_are_served",
        "engine/trial.py",
        "    if not error <= MOST_ERROR.get(dtype, MOST_ERROR_IN_16_BITS):  # nor if it is no number",
        "    if False:",
        BORROWED + "a_model_that_says_something_else_through_the_port_is_not_served",
    ),
    Break(
        "masks_of_layers_are_not_looked_at",
        "engine/models/transformers_examination.py",
        "                if sees != (query - reach < key <= query):",
        "                if False:",
        BORROWED + "what_the_port_does_not_do_is_refused_by_name",
    ),
    Break(
        "what_layers_of_transformers_cannot_do_is_accepted",
        "cli/serve.py",
        "    if model.library:\n        complaints",
        "    if False:\n        complaints",
        "e2e_cpu/test_borrowed_served.py::test_what_layers_of_transformers_do_not_allow_is_refused_by_name",
    ),
    # streams that go on with another decode (decision 022)
    Break(
        "counts_of_penalties_are_lost_with_the_decode",
        "engine/sequence.py",
        "        return self.prompt_len - self.num_said",
        "        return self.prompt_len",
        "unit/test_engine_resume.py::test_counts_grammar_and_positions_begin_with_what_was_said",
    ),
    Break(
        "minimum_length_counts_from_where_a_stream_goes_on",
        "engine/sequence.py",
        "            num_outputs=self.num_said + self.num_outputs,",
        "            num_outputs=self.num_outputs,",
        "unit/test_engine_resume.py::test_counts_grammar_and_positions_begin_with_what_was_said",
    ),
    Break(
        "tokens_are_told_twice",
        "server/api/telling.py",
        "            self._num_told = len(said.tokens)",
        "            self._num_told = 0",
        "unit/test_api_resume.py::test_bytes_behind_any_frame_are_those_of_a_stream_that_was_not_cut",
    ),
    Break(
        "draws_go_on_with_the_seed_of_another_room",
        "server/api/validation.py",
        "                    sampling=with_seed(params, sample, seed_room or pair.room),",
        "                    sampling=with_seed(params, sample, pair.room),",
        "unit/test_api_resume.py::test_draws_go_on_with_the_seed_of_the_first_attempt",
    ),
    Break(
        "rest_of_a_stream_is_as_long_as_all_of_it",
        "server/api/validation.py",
        "            max_new_tokens=max(ask.max_new_tokens - num_said, 1) if ask.said is None or num_said else 1,",
        "            max_new_tokens=max(ask.max_new_tokens, 1) if ask.said is None or num_said else 1,",
        "unit/test_api_resume.py::test_prompt_and_what_was_said_are_computed_as_one_and_the_rest_is_what_is_left",
    ),
    Break(
        "anybody_may_say_what_was_said",
        "server/api/resume.py",
        "    return tuple(groups) if hmac.compare_digest(proofs.last, resume.proof) else None",
        "    return tuple(groups)",
        "unit/test_api_resume.py::test_who_writes_the_field_himself_or_changes_it_is_refused",
    ),
    Break(
        "what_was_said_to_its_end_goes_on",
        "server/api/telling.py",
        "    if text.matched is not None or text.holds_stop_token:",
        "    if text.matched is not None:",
        "unit/test_api_resume.py::test_what_had_been_said_to_its_end_ends_without_another_token",
    ),
    Break(
        "request_may_kill_every_decode",
        "core/router/routed_request.py",
        "        may_go_on = self.is_resumable and not self.is_aborted and self.num_resumes < self.settings.resumes",
        "        may_go_on = self.is_resumable and not self.is_aborted",
        "unit/test_router_core_resume.py::test_a_request_whose_decode_has_died_twice_kills_no_third",
    ),
    Break(
        "gap_begins_anew_where_a_stream_goes_on",
        "core/router/routed_request.py",
        "        deadline = Nanos(now - event.silent_ns + self.settings.gap_ns)",
        "        deadline = Nanos(now + self.settings.gap_ns)",
        "unit/test_router_core_resume.py::test_the_gap_between_two_tokens_bounds_it_and_not_the_deadline_of_the_first",
    ),
    Break(
        "rejection_is_forwarded_into_a_stream",
        "core/router/routed_request.py",
        "            last = self.lost",
        "            pass",
        "unit/test_router_core_resume.py::test_a_rejection_is_no_answer_to_who_has_half_of_one",
    ),
    Break(
        "router_keeps_no_tokens_of_a_stream",
        "server/router/shell.py",
        "                leg.told.add(frame)",
        "                leg.told = Told(frame.opening)",
        "e2e_cpu/test_router_resume.py::test_streams_go_on_with_another_decode_when_theirs_is_killed",
    ),
    Break(
        "a_host_with_other_flags_joins",
        "server/hosts/agreement.py",
        "        if ours != theirs:",
        "        if not ours:",
        HOSTS + "the_field_that_differs_is_named",
    ),
    Break(
        "two_hosts_have_one_node_rank",
        "server/hosts/agreement.py",
        "if join.node_rank in self.there:",
        "if join.node_rank < 0:",
        HOSTS + "a_host_that_fits_is_welcome_once_and_again_when_it_is_gone",
    ),
    Break(
        "plans_for_workers_elsewhere_travel_in_clear",
        "server/channel.py",
        "        append_sealed(self._pending, message, self._sealing)",
        "        append_sealed(self._pending, message, None)",
        HOSTS + "a_worker_elsewhere_and_its_node_speak_as_on_one_machine",
    ),
    Break(
        "workers_are_dealt_out_in_turns",
        "several_hosts.py",
        "return worker // (num_workers // nnodes)",
        "return worker % nnodes",
        HOSTS + "workers_are_spread_evenly_in_order",
    ),
    Break(
        "a_host_that_is_lost_ends_nothing",
        "server/hosts/leader.py",
        "            if node_rank in self._ranks_by_host(dp_rank):",
        "            if node_rank == 0:",
        NNODES + "a_group_over_two_hosts_dies_together_and_lives_again_when_all_are_there",
    ),
    Break(
        "hosts_end_well_whatever_the_server_ended_for",
        "server/hosts/follower.py",
        "            raise ServerFailure(reason)",
        "            pass",
        NNODES + "a_worker_that_dies_while_it_loads_ends_the_start_on_all_hosts",
    ),
    Break(
        "keys_of_other_context_ranks_are_not_written",
        "engine/context_parallel.py",
        "self._kv.tensor[:, :, layer, kind][pages, :, offsets] = values",
        "self._kv.tensor[:, :, layer, kind][pages, :, offsets] = 0.0",
        "e2e_cpu/test_engine_stages.py::test_ranks_that_share_out_prompts_keep_the_bits_of_one_engine_and_all_hold_its_kv",
    ),
    Break(
        "tokens_of_other_context_ranks_are_sampled_from",
        "engine/context_parallel.py",
        "self._own, self._places = slice(first, first + num_own), (pages, offsets)",
        "self._own, self._places = slice(0, num_own), (pages, offsets)",
        "e2e_cpu/test_engine_stages.py::test_ranks_that_share_out_prompts_keep_the_bits_of_one_engine_and_all_hold_its_kv",
    ),
    Break(
        "one_context_rank_lends_to_all_readers",
        "core/kv_parts.py",
        "lender = (reader_cp if target.cp_size > 1 else shard) % source.cp_size",
        "lender = (reader_cp if target.cp_size > 1 else 0) % source.cp_size",
        "laws/test_kv_parts_laws.py::test_shards_with_the_same_head_are_spread_over_those_that_have_it_there",
    ),
    Break(
        "deterministic_shards_cut_their_sums",
        "engine/layers/linear.py",
        "    return group.is_exact and group.shard.size > 1",
        "    return False",
        "e2e_cpu/test_engine_stages.py::test_deterministic_workers_keep_the_bits_of_one_engine",
    ),
    Break(
        "last_token_of_a_batch_is_nobodys",
        "batch_tables.py",
        "    runs = [share(total, rank, num_ranks) for rank in range(num_ranks)]",
        "    runs = [share(total - 1, rank, num_ranks) for rank in range(num_ranks)]",
        "laws/test_shared_out_laws.py::test_every_token_has_one_rank_and_ends_stay_where_they_are",
    ),
    Break(
        "rooms_are_numbers_that_browsers_round",
        "core/scheduler/inspect.py",
        '            "room": None if progress.request.room is None else str(progress.request.room),',
        '            "room": progress.request.room,',
        "unit/test_core_inspect.py::test_the_flow_names_every_request_with_its_room_as_text",
    ),
    Break(
        "tokens_are_counted_when_a_request_has_ended",
        "server/api/stream.py",
        "        stats.emit(now_ns, count)",
        "        stats.generation_tokens += count if live.ended is not None else 0",
        "unit/test_request_stats.py::test_token_counters_move_while_a_request_runs_and_the_throughput_is_0_when_it_has_ended",
    ),
    Break(
        "router_takes_mistakes_of_clients_for_failures",
        "server/router/metrics.py",
        "if is_own := 400 <= status < 500:",
        "if is_own := False:",
        "e2e_cpu/test_router_http.py::test_metrics_count_requests_retries_failures_and_workers",
    ),
    Break(
        "schema_offers_bodies_without_what_they_are_about",
        "server/api/openapi.py",
        'parts = [reference(kind), with_one(fields, of="oneOf"), *still[path], *beside, refused_fields(kind)]',
        "parts = [reference(kind), *still[path], *beside, refused_fields(kind)]",
        "unit/test_openapi_schemathesis.py::test_nothing_that_fits_its_schema_is_refused",
    ),
    Break(
        "encoder_computes_whole_mlps_and_adds_those_of_other_ranks",
        "engine/models/bert.py",
        "all_inner = [one.part(inner) for one in group.mlp.shard.all]",
        "all_inner = [one.part(inner) for one in group.shard.all] * group.mlp.shard.size",
        "e2e_cpu/test_engine_vectors.py::test_ranks_that_share_their_mlps_say_what_one_engine_says",
    ),
    Break(
        "rank_that_steps_with_others_is_started_anew",
        "server/api/process.py",
        "if ends_alone or self._steps_together or not",
        "if ends_alone or not",
        TOGETHER + "a_rank_that_is_killed_takes_all_of_them_with_it",
    ),
    Break(
        "rank_that_is_silent_is_not_looked_for",
        "core/stall_detector.py",
        "if stall.is_sick and stall.is_silent]",
        "if stall.is_sick and not stall.is_silent]",
        "unit/test_liveness.py::test_of_ranks_that_hang_together_the_one_that_does_not_answer_has_begun",
    ),
    Break(
        "rank_goes_along_only_with_all_others",
        "core/lockstep.py",
        "return any(launched > run",
        "return all(launched > run",
        "unit/test_lockstep.py::test_a_rank_goes_along_for_what_others_have_launched_and_it_has_not_run",
    ),
    Break(
        "launch_that_was_run_before_it_was_told_counts_again",
        "core/lockstep.py",
        "            self._run[rank] += 1",
        "            self._run[rank] = self._launched[rank]",
        "unit/test_lockstep.py::test_every_order_of_news_ends_with_every_batch_run_in_steps_of_all",
    ),
    Break(
        "false_is_never_a_wish",
        "server/api/foreign.py",
        "    if name not in NEUTRAL:",
        "    if True:",
        "unit/test_api_structured.py::test_a_wish_that_looks_like_nothing_is_one",
    ),
    Break(
        "prompt_logprobs_lack_their_alternatives",
        "server/api/openai.py",
        "prompt_top_logprobs=max(wanted, default=0),",
        "",
        "unit/test_api_prompt_logprobs.py::test_prompt_logprobs_are_told_by_id_with_the_best_alternatives",
    ),
    Break(
        "router_tells_browsers_nothing_of_allowed_origins",
        "server/router/app.py",
        "                *cors(config),",
        "",
        "e2e_cpu/test_router_access.py::test_a_page_of_an_allowed_origin_may_use_the_router_streams_too",
    ),
    Break(
        "pages_of_allowed_origins_may_give_orders",
        "server/api/access.py",
        "not (access in SHARED and self._is_invited(headers))",
        "not self._is_invited(headers)",
        "unit/test_access.py::test_only_pages_of_these_origins_may_and_no_debug_pages_or_orders",
    ),
    Break(
        "logprobs_of_a_prompt_are_taken_from_a_cache",
        "core/scheduler/state.py",
        "return min(prompt_logprobs_from, progress.length - 1)",
        "return progress.length - 1",
        PROMPT_LOGPROBS + "what_is_wanted_is_computed_and_what_is_before_it_comes_from_the_cache",
    ),
    Break(
        "logprobs_of_a_prompt_are_told_twice_after_a_retry",
        "core/scheduler/state.py",
        "progress.prompt_extras = []  # of what is computed again",
        "pass",
        PROMPT_LOGPROBS + "a_prompt_that_is_computed_twice_is_told_once",
    ),
    Break(
        "responses_of_every_key_are_one_store",
        "server/api/response_store.py",
        "return tenant_of(given_key(request.headers), None)",
        'return ""',
        RESPONSES + "a_key_sees_no_response_of_another",
    ),
    Break(
        "deleted_response_takes_its_turn_along",
        "server/api/response_store.py",
        "            if turn.num_referrers > 0:",
        "            if turn.num_referrers > 9:",
        "unit/test_response_store.py::test_bytes_are_those_of_what_is_kept_and_nothing_else",
    ),
    Break(
        "cached_tokens_are_input_too",
        "server/api/messages.py",
        "len(sample.ask.prompt.tokens) - cached",
        "len(sample.ask.prompt.tokens)",
        MESSAGES + "prompt_tokens_that_were_cached_are_not_input",
    ),
    Break(
        "error_of_a_stream_has_no_name",
        "server/api/errors.py",
        'b"event: error\\n" if path in NAMED_EVENTS else b""',
        'b""',
        MESSAGES + "a_stream_that_breaks_ends_with_an_error_event",
    ),
    Break(
        "blocks_of_an_answer_have_one_number",
        "server/api/messages.py",
        "self._open, self._num_blocks = kind, self._num_blocks + 1",
        "self._open, self._num_blocks = kind, 1",
        MESSAGES + "calls_are_blocks_with_their_arguments",
    ),
    Break(
        "whoever_knows_a_room_may_end_it",
        "core/disagg/prefill_side.py",
        "(has_times or release.prompt_digest == request.prompt_digest)",
        "True",
        "unit/test_core_rendezvous.py::test_before_ready_a_member_who_knows_the_room_and_not_the_prompt_ends_nothing",
    ),
    Break(
        "a_call_that_was_given_up_is_believed",
        "server/api/bootstrap_questions.py",
        "under_way = self._calls.pop(number, None)",
        "under_way = self._calls.get(number)",
        "unit/test_bootstrap_questions.py::"
        "test_a_call_that_brings_nothing_in_time_is_given_up_and_what_it_brings_later_is_ignored",
    ),
    Break(
        "a_probe_that_was_answered_is_late_all_the_same",
        "server/router/shell.py",
        "self._step((*probed, *events), Nanos(time.monotonic_ns()))",
        "self._step(events, Nanos(time.monotonic_ns()))",
        "unit/test_router_probes.py::test_an_answer_that_is_there_counts_before_the_time_that_has_passed_meanwhile",
    ),
    Break(
        "offer_of_a_stranger_is_taken",
        "core/disagg/decode_side.py",
        "        peer != arrival.peer\n",
        "        False\n",
        "unit/test_core_rendezvous.py::test_an_offer_of_somebody_else_than_the_prefill_changes_nothing",
    ),
    Break(
        "gap_in_a_hash_chain_is_bridged",
        "core/scheduler/node.py",
        "if len(progress.hashes) + len(hashes) == computed // node.settings.page_size:",
        "if len(progress.hashes) + len(hashes) <= computed // node.settings.page_size:",
        "unit/test_core_plans.py::test_a_chain_of_hashes_with_a_gap_is_not_continued",
    ),
    Break(
        "worker_keeps_the_prompt_of_a_request_that_has_ended",
        "core/disagg/rendering.py",
        "node.forgotten.append(rendered.id)  # it ended meanwhile, and the workers have got tokens for it",
        "pass",
        "unit/test_core_rendering.py::test_an_abort_reaches_decode_and_the_late_answer_is_forgotten",
    ),
    Break(
        "redials_grow_apart_without_a_bound",
        "server/node/links.py",
        "peer.retry_ns = min(Nanos(2 * peer.retry_ns), MAX_RETRY_NS)",
        "peer.retry_ns = Nanos(2 * peer.retry_ns)",
        LINKS + "a_connection_that_can_be_made_again_shortly_before_it_is_given_up_is_made",
    ),
    Break(
        "silent_members_shut_out_a_decode",
        "server/node/links.py",
        "if len(self.peers) >= self.limits.peers and not self._lose_least_heard():",
        "if len(self.peers) >= self.limits.peers:",
        LINKS + "members_that_greet_and_say_nothing_do_not_shut_out_a_decode_that_comes_back",
    ),
    Break(
        "who_spoke_last_gives_way",
        "server/node/links.py",
        "min(dialling, key=last_word_ns)",
        "max(dialling, key=last_word_ns)",
        LINKS + "who_has_been_silent_longest_gives_way_where_all_have_spoken",
    ),
    Break(
        "a_reader_that_does_not_read_is_kept",
        "server/node/links.py",
        "if pending > self.limits.pending_bytes:",
        "if pending > 1 << 62:",
        LINKS + "a_peer_that_does_not_read_is_dropped_at_the_limit_and_returns",
    ),
    Break(
        "a_return_is_not_told",
        "server/node/links.py",
        "if peer.lost_at is not None:\n            self.report(PeerReturned(peer.who))",
        "if peer.lost_at is not None:\n            self.note(peer.who.name)",
        LINKS + "a_connection_that_can_be_made_again_shortly_before_it_is_given_up_is_made",
    ),
    Break(
        "every_piece_of_a_stream_is_the_first",
        "core/router/upstream_call.py",
        "if self.is_over or not self.is_stream or self._has_spoken:",
        "if self.is_over or not self.is_stream:",
        UPSTREAM + "of_a_stream_of_decode_the_first_piece_counts_and_from_then_on_silence_too",
    ),
    Break(
        "a_call_goes_on_after_its_last_word",
        "core/router/upstream_call.py",
        "        self.is_over = True\n        has_error",
        "        self.is_over = False\n        has_error",
        UPSTREAM + "after_its_last_word_a_call_says_nothing",
    ),
    # what a fault leaves on record
    Break(
        "a_cause_of_ours_leaves_no_record",
        "server/node/last_steps.py",
        "if type(command) is FailRequest and command.cause in OURS:",
        "if type(command) is FailRequest and command.cause not in OURS:",
        "unit/test_ring.py::test_a_request_that_ends_with_a_cause_of_ours_leaves_a_record",
    ),
    Break(
        "a_cause_of_ours_leaves_no_record_in_processes",
        "server/node/process.py",
        "observer for observer in (recorder, kept) if observer is not None",
        "observer for observer in (recorder,) if observer is not None",
        "e2e_cpu/test_fault_records.py"
        "::test_a_request_that_ends_with_a_cause_of_ours_leaves_a_record_while_the_server_goes_on",
    ),
    Break(
        "a_cause_of_ours_leaves_no_record_of_the_edge",
        "server/api/edge_record.py",
        "elif cause in OURS:",
        "elif cause not in OURS:",
        "unit/test_edge_record.py::test_only_ends_that_are_our_fault_are_told",
    ),
    Break(
        "tokens_are_in_a_record",
        "server/node/without_tokens.py",
        "tokens=bytes(len(outcome.tokens)),",
        "tokens=outcome.tokens,",
        "unit/test_ring.py::test_no_token_and_no_score_is_written",
    ),
    Break(
        "first_tokens_are_in_a_snapshot_on_record",
        "server/node/without_tokens.py",
        "token, extra = bytes(len(result.token)), bytes",
        "token, extra = result.token, bytes",
        "unit/test_ring.py::test_no_token_is_in_the_snapshot_of_a_node_that_hands_one_over",
    ),
    Break(
        "what_a_worker_says_is_in_a_record",
        "server/router/record.py",
        'return structs.replace(event, detail="") if isinstance(event, HalfFailed) else event',
        "return event",
        "unit/test_router_record.py::test_no_words_of_a_worker_are_in_it",
    ),
    Break(
        "a_ready_of_a_stranger_to_the_prompt_ends_the_half",
        "core/disagg/prefill_side.py",
        "    return side.is_rendered_anew or ready.prompt_digest == request.prompt_digest",
        "    return True",
        "unit/test_core_rendezvous.py"
        "::test_a_ready_that_does_not_fit_of_a_member_without_the_prompt_is_refused_to_it_and_ends_nothing",
    ),
    Break(
        "a_turn_begins_all_requests_of_a_burst",
        "server/api/turn_limits.py",
        "if self._begun == REQUESTS_PER_TURN or self._held:",
        "if self._held:",
        "unit/test_turn_limits.py::test_a_turn_begins_a_few_requests_in_their_order",
    ),
    Break(
        "a_turn_makes_connections_of_all_who_wait",
        "server/api/accept.py",
        "for _ in range(min(PER_TURN, len(self._let_in))):",
        "for _ in range(len(self._let_in)):",
        "unit/test_api_accept.py::test_a_turn_makes_a_few_connections",
    ),
    Break(
        "who_cannot_be_served_is_let_in_to_be_refused",
        "server/api/accept.py",
        "return path is not None and path not in PAGES",
        "return False",
        "unit/test_api_accept.py::test_nothing_is_made_of_a_connection_that_is_refused",
    ),
    Break(
        "a_probe_of_who_is_full_is_refused_at_the_socket",
        "server/api/accept.py",
        "return path is not None and path not in PAGES",
        "return path is not None",
        "unit/test_api_accept.py::test_who_is_full_hears_probes_and_who_has_said_nothing_yet",
    ),
    Break(
        "a_refused_socket_is_kept_for_ever",
        "server/api/accept.py",
        "self._timer = loop.call_later(LINGER_SECONDS, self.close)",
        "self._timer = loop.call_later(3600, self.close)",
        "unit/test_api_accept.py::test_a_refused_socket_goes_with_its_client_or_after_a_while",
    ),
    Break(
        "long_chats_are_rendered_on_the_loop",
        "server/api/openai.py",
        "await off_loop(size, LOOP_CHAT_BYTES, rendered, body",
        "await off_loop(0, LOOP_CHAT_BYTES, rendered, body",
        "unit/test_loop_work.py::test_no_callback_of_a_server_works_on_more_than_the_limit",
    ),
    Break(
        "large_bodies_are_read_on_the_routers_loop",
        "server/router/generate.py",
        "await off_loop(size, LOOP_BYTES, self._read, raw, conversation, key)",
        "self._read(raw, conversation, key)",
        "unit/test_loop_work.py::test_no_callback_of_a_router_works_on_more_than_the_limit",
    ),
    Break(
        "prefixes_are_sent_anywhere",
        "core/router/routing.py",
        "self._sent.add(blocks, chosen)",
        "self._sent.add((), chosen)",
        "e2e_cpu/test_router_affinity.py::test_every_turn_of_a_conversation_finds_the_turn_before_in_the_cache",
    ),
    Break(
        "the_prompts_of_the_router_have_no_blocks",
        "server/router/generate.py",
        "return body, content, self._blocks_of(body, key)",
        "return body, content, ()",
        "e2e_cpu/test_router_affinity.py::test_every_turn_of_a_conversation_finds_the_turn_before_in_the_cache",
    ),
    Break(
        "affinity_knows_no_balance",
        "core/router/routing.py",
        "if self._settings.is_balanced(candidates) else None",
        "if True else None",
        "laws/test_routing_laws.py::test_affinity_keeps_within_the_bounds_of_balance",
    ),
    Break(
        "affinity_brings_a_dead_worker_back",
        "core/router/sent_prefixes.py",
        "if (worker := self._sent_to[blocks[count - 1]]) in among:",
        "if (worker := self._sent_to[blocks[count - 1]]) is not None:",
        "laws/test_routing_laws.py::test_whoever_is_chosen_is_a_candidate",
    ),
    Break(
        "a_prompt_is_forgotten_from_its_beginning",
        "core/router/sent_prefixes.py",
        "for block in reversed(blocks[: self._max_blocks]):",
        "for block in blocks[: self._max_blocks]:",
        "laws/test_routing_laws.py::test_memory_is_bounded_and_a_known_block_follows_known_ones",
    ),
    Break(
        "of_two_the_more_loaded_is_chosen",
        "core/router/routing.py",
        "return min(one, other, key=lambda candidate: candidate.active).worker",
        "return max(one, other, key=lambda candidate: candidate.active).worker",
        "laws/test_routing_laws.py::test_of_two_that_are_drawn_the_less_loaded_is_chosen",
    ),
    Break(
        "who_asks_is_no_part_of_a_prompts_hash",
        "server/router/prompt_blocks.py",
        "tenant=tenant_of(key, salt if isinstance(salt, str) else None)",
        'tenant=tenant_of("", salt if isinstance(salt, str) else None)',
        "unit/test_prompt_blocks.py::test_nobody_shares_with_another_key_or_another_router",
    ),
    Break(
        "a_failing_worker_is_used_all_the_same",
        "core/router/worker_registry.py",
        "return allowed or live",
        "return live",
        "e2e_cpu/test_router_workers.py::test_an_open_breaker_keeps_requests_away_as_long_as_there_is_another_worker",
    ),
    Break(
        "a_breaker_takes_the_last_worker_away",
        "core/router/worker_registry.py",
        "return allowed or live",
        "return allowed",
        "unit/test_router_breaker.py::test_the_last_worker_of_its_role_is_used_whatever_its_breaker_says",
    ),
    Break(
        "an_open_breaker_is_tried_by_everybody",
        "core/router/circuit_breaker.py",
        "            self.until = Nanos(now + self.settings.timeout_ns)\n\n    def succeeded",
        "            self.until = now\n\n    def succeeded",
        "unit/test_router_breaker.py::test_an_open_one_allows_nothing_until_its_time_and_then_one_at_a_time",
    ),
    Break(
        "a_success_forgives_nothing",
        "core/router/circuit_breaker.py",
        "            case BreakerState.CLOSED:\n                self.failed_at.clear()",
        "            case BreakerState.CLOSED:\n                pass",
        "unit/test_router_breaker.py::test_what_has_happened_tells_the_state",
    ),
    Break(
        "old_failures_open_a_breaker",
        "core/router/circuit_breaker.py",
        "[at for at in self.failed_at if now - at < self.settings.window_ns] + [now]",
        "[*self.failed_at, now]",
        "unit/test_router_breaker.py::test_what_has_happened_tells_the_state",
    ),
    Break(
        "load_opens_a_breaker",
        "core/router/router.py",
        "if status >= 500 and status not in NOT_ITS_FAULT:",
        "if status >= 500:",
        "e2e_cpu/test_router_workers.py::test_what_a_worker_says_of_its_load_or_its_peer_opens_no_breaker",
    ),
    Break(
        "who_is_to_leave_is_used_on",
        "core/router/worker_registry.py",
        "return entry.health in (Health.LIVE, Health.SUSPECT) and not entry.is_leaving",
        "return entry.health in (Health.LIVE, Health.SUSPECT)",
        "e2e_cpu/test_router_workers.py::test_a_worker_answers_what_it_has_before_it_is_gone",
    ),
    Break(
        "who_leaves_goes_at_once",
        "core/router/router.py",
        "            if not self._load[worker]:",
        "            if True:",
        "e2e_cpu/test_router_workers.py::test_a_worker_answers_what_it_has_before_it_is_gone",
    ),
    Break(
        "numbers_of_workers_are_used_again",
        "core/router/worker_registry.py",
        "self._next_id = max(self._next_id, WorkerId(worker.id + 1))",
        "self._next_id = WorkerId(len(self._entries))",
        "unit/test_router_core_turnover.py::test_an_idle_worker_is_gone_at_once_and_its_number_is_not_used_again",
    ),
    Break(
        "anybody_with_a_key_adds_workers_from_elsewhere",
        "server/api/access.py",
        "if access is Access.OPERATOR and not self.admin and not is_local(scope, headers):",
        "if False:",
        "e2e_cpu/test_router_workers.py::test_without_an_admin_key_nobody_from_elsewhere_changes_workers",
    ),
    Break(
        "models_are_sent_anywhere",
        "core/router/worker_registry.py",
        "_is_live(e) and e.serves(model)]",
        "_is_live(e)]",
        "e2e_cpu/test_router_models.py::test_requests_go_to_the_pair_that_serves_their_model",
    ),
    Break(
        "who_names_no_model_gets_two",
        "core/router/router.py",
        "exchange.model = next(iter(self.registry.paired_models()), None)",
        "exchange.model = None",
        "e2e_cpu/test_router_models.py::test_who_names_none_gets_the_first",
    ),
    Break(
        "unknown_models_are_let_through",
        "server/router/generate.py",
        'if is_model is False and path != "/generate":',
        "if False:",
        "e2e_cpu/test_router_models.py::test_an_unknown_model_is_404_and_one_whose_workers_are_gone_is_503",
    ),
    Break(
        "models_of_one_decode_are_listed",
        "server/router/app.py",
        "        if not self._config.enable_igw:\n            return await self._to_decode(request, MODELS)",
        "        if True:\n            return await self._to_decode(request, MODELS)",
        "e2e_cpu/test_router_models.py::test_the_models_of_all_pairs_are_listed_and_shown_one_by_one",
    ),
    Break(
        "as_many_values_as_fit_a_body_are_made",
        "server/api/large_body.py",
        "    check_counts(raw)\n    return",
        "    counts_of(raw)\n    return",
        "unit/test_loop_work.py::test_a_body_with_too_many_values_is_refused_before_one_is_made",
    ),
    # The terminal
    Break(
        "the_doctor_is_content_with_everything",
        "cli/doctor.py",
        "    return 1 if num_bad else 0",
        "    return 0",
        "unit/test_doctor.py::test_a_model_that_cannot_be_served_is_bad_and_ends_with_1",
    ),
    Break(
        "a_rate_is_the_counter_itself",
        "cli/top.py",
        "return new - old if old is not None and new is not None and new >= old else None",
        "return new",
        "unit/test_top.py::test_rates_are_what_counters_did_between_two_looks",
    ),
    Break(
        "flags_of_other_servers_are_guessed_by_their_letters",
        "cli/main.py",
        "if (found := self.synonyms.get(argument)) is not None:",
        "if (found := {}.get(argument)) is not None:",
        "unit/test_flag_help.py::test_all_that_is_unknown_is_told_in_one_line_with_its_name_here",
    ),
    Break(
        "one_who_cannot_come_back_ends_all",
        "cli/supervisor.py",
        "if restarts.unready >= MAX_UNREADY and not self._has_substitute(member):",
        "if restarts.unready >= MAX_UNREADY:",
        "unit/test_supervisor.py::test_who_never_gets_ready_is_tried_on_while_another_of_its_kind_serves",
    ),
    Break(
        "the_terminal_obeys_the_model",
        "cli/chat_terminal.py",
        "lambda piece: _put(answer.feed(piece)),",
        "lambda piece: _put(piece),",
        CHAT + "a_model_cannot_have_the_terminal_do_anything",
    ),
    Break(
        "control_c_never_leaves",
        "cli/chat_terminal.py",
        "                may_leave = True\n                _say",
        "                may_leave = False\n                _say",
        CHAT + "control_c_stops_an_answer_and_twice_leaves",
    ),
    Break(
        "a_key_of_openai_goes_to_whoever_listens",
        "cli/api.py",
        "    elif not (args.api_key or",
        "    if not (args.api_key or",
        COMMANDS + "a_key_of_openai_is_not_told_to_who_only_listens_where_a_server_may_be",
    ),
    # KV events
    Break(
        "cached_pages_are_stored_again",
        "core/scheduler/state.py",
        "first_new = min(first_new, index)",
        "first_new = progress.inserted",
        KV_LAW,
    ),
    Break(
        "flush_says_all_is_cleared_although_pages_are_held",
        "core/scheduler/state.py",
        "AnnounceRemoved(removed) if node.tree.nodes else AnnounceCleared()",
        "AnnounceCleared()",
        KV_LAW,
    ),
    Break(
        "evictions_are_not_told",
        "core/scheduler/state.py",
        "node.out.append(AnnounceRemoved(removed))",
        "pass",
        KV_SERVED + "events_follow_the_cache_of_a_server_through_use_pressure_and_flush",
    ),
    Break(
        "blocks_have_the_tokens_of_the_first_ones",
        "server/node/kv_events.py",
        "start = stored.first_page * self._page_bytes",
        "start = 0",
        KV_SERVED + "up_publishes_what_prefill_and_decode_hold",
    ),
    Break(
        "tokens_of_a_request_are_kept_for_ever",
        "server/node/kv_events.py",
        "self._tokens.pop(request, None)",
        "self._tokens.get(request)",
        KV_SENT + "tokens_are_kept_as_long_as_their_request_lives",
    ),
    Break(
        "a_dropped_batch_takes_no_number",
        "server/node/kv_publisher.py",
        "            self.num_dropped += 1\n",
        "            self.num_dropped, self._next_number = self.num_dropped + 1, number\n",
        KV_SENT + "a_subscriber_that_does_not_read_and_a_thread_that_hangs_hold_nobody_up",
    ),
    Break(
        "a_server_that_starts_says_nothing",
        "server/node/kv_publisher.py",
        "self.publish([Announced(AnnounceCleared())])",
        "self._next_number += 1",
        KV_SENT + "a_subscriber_gets_topic_number_and_batch_and_missed_ones_again",
    ),
    Break(
        "every_dp_rank_has_the_same_port",
        "kv_events_config.py",
        'port = int(found["port"]) + dp_rank',
        'port = int(found["port"])',
        KV_SENT + "ports_rise_by_the_rank",
    ),
    # traces
    Break(
        "halves_are_not_told_whose_part_they_are",
        "server/router/shell.py",
        "headers | leg.span.headers",
        "headers",
        TRACED + "one_trace_goes_through_router_prefill_and_decode_in_parts_that_add_up",
    ),
    Break(
        "what_a_caller_says_of_its_trace_is_not_heard",
        "server/otel.py",
        "{key: headers[key] for key in TRACE_HEADERS if key in headers}",
        "{}",
        TRACED + "a_request_that_is_not_sampled_is_told_nowhere",
    ),
    Break(
        "stages_begin_together",
        "metrics/stage_spans.py",
        "        at += duration_ns",
        "        at += 0",
        "unit/test_request_spans.py::test_stages_lie_end_to_end_and_are_the_time_to_the_first_token",
    ),
    Break(
        "every_batch_that_is_lost_is_a_line",
        "server/otel.py",
        "now - self._said_at >= COMPLAIN_S",
        "now - self._said_at >= 0",
        "unit/test_request_spans.py::test_spans_that_are_lost_are_said_once_a_minute",
    ),
    # sglang#26780: HiCache; #34568: no rank may see a prefix that another does not
    Break(
        "a_copy_counts_when_the_first_worker_has_it",
        "core/kv/host_tier.py",
        "return self.copies.pop(number) if len(copy.whole) == len(shards) else None",
        "return self.copies.pop(number)",
        TIER + "a_worker_that_has_not_answered_is_waited_for",
    ),
    Break(
        "a_copy_counts_as_far_as_the_fastest_worker",
        "core/kv/host_tier.py",
        "num_whole = min(copy.whole.values(), default=0)",
        "num_whole = max(copy.whole.values(), default=0)",
        TIER + "a_worker_that_has_not_answered_is_waited_for",
    ),
    Break(
        "a_slow_load_is_waited_for_to_the_end",
        "core/scheduler/ends.py",
        "    stop_if_late(node, progress)\n",
        "    pass\n",
        TIER + "a_load_that_takes_too_long_is_not_waited_for",
    ),
    # sglang#27028: `release_aborted_request`; #34568: what is there is what every worker has
    Break(
        "who_ends_goes_on_fetching",
        "core/scheduler/state.py",
        "    node.storage.release(progress.id)",
        "    del progress",
        STORAGE + "who_ends_meanwhile_asks_for_no_more",
    ),
    Break(
        "storage_has_what_one_worker_finds",
        "core/kv/storage_tier.py",
        "return min(self.answers.values(), default=0)",
        "return max(self.answers.values(), default=0)",
        STORAGE + "all_workers_have_the_same_prefix",
    ),
    Break(
        "nobody_waits_for_storage",
        "core/scheduler/admission.py",
        "        if awaits_storage(node, progress):",
        "        if False:",
        STORAGE + "who_waits_says_so_is_passed_over_and_computes_in_time",
    ),
    Break(
        "storage_is_waited_for_without_end",
        "core/scheduler/prefetch.py",
        "    if not is_over(node, node.storage.until(progress.id)):",
        "    if True:",
        STORAGE + "who_waits_says_so_is_passed_over_and_computes_in_time",
    ),
    Break(
        "a_file_is_whatever_page_is_wanted",
        "page_files.py",
        "if head != self.head(page_hash) or len(page) != self.page_bytes:",
        "if len(page) != self.page_bytes:",
        FILES + "a_page_of_another_hash_is_none",
    ),
    Break(
        "nixl_reads_as_much_as_a_page_has_from_a_file_that_is_shorter",
        "server/nixl_mover.py",
        "size = min(most, os.fstat(fd).st_size)",
        "size = most",
        "unit/test_nixl_mover.py::test_a_file_of_another_length_is_removed",
    ),
    Break(
        "nixl_uses_memory_that_may_still_be_written_to",
        "server/nixl_mover.py",
        "            self._begin(len(self.memory))",
        "            pass",
        "unit/test_nixl_mover.py::test_a_transfer_that_does_not_end_is_given_up_and_its_memory_is_not_used_again",
    ),
    Break(
        "answers_wait_until_their_head_is_acknowledged",
        "server/processes.py",
        "    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)",
        "    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 0)",
        "unit/test_server_processes.py::test_an_answer_does_not_wait_until_its_head_is_acknowledged",
    ),
    Break(
        "page_hashes_are_keyed_anew_although_pages_are_stored",
        "server/api/facts.py",
        "    if config.hicache_storage_dir is None:",
        "    if True:",
        "e2e_cpu/test_storage_tier.py::test_a_conversation_is_a_hit_after_the_server_was_killed",
    ),
    Break(
        "selective_copies_at_once",
        "core/settings.py",
        "return 2 if self.write_policy is WritePolicy.WRITE_THROUGH_SELECTIVE else 1",
        "return 1",
        TIER + "selective_waits_for_a_second_use",
    ),
    Break(
        "write_back_drops_what_it_should_copy",
        "core/scheduler/state.py",
        "if node.host.writes_back and drop_copied(node, num_pages) > 0:",
        "if False:",
        TIER + "write_back_copies_what_is_about_to_leave_and_nothing_is_lost",
    ),
    Break(
        "each_request_loads_for_itself_what_is_on_its_way",
        "core/kv/tree.py",
        "if node is None or not (node.is_loading or (node.host != NOWHERE and node.page == NOWHERE)):",
        "if node is None or not (node.host != NOWHERE and node.page == NOWHERE):",
        TIER + "several_requests_wait_for_one_load",
    ),
    Break(
        "a_flush_forgets_what_is_being_copied",
        "core/kv/host_tier.py",
        "self.flushes = bool(self.copies)",
        "self.flushes = False",
        TIER + "a_flush_drops_the_copies_too_also_those_under_way",
    ),
    Break(
        "loads_are_not_weighed",
        "core/kv/load_policy.py",
        "if self.page_load_ns * num_pages <= token_ns * num_tokens or not token_ns:",
        "if True:",
        TIER + "a_load_is_worth_what_it_has_cost",
    ),
    Break(
        "host_memory_gives_whatever_lies_there",
        "host_memory.py",
        "if label is None or label.page_hash != page_hash:",
        "if label is None:",
        "unit/test_host_memory.py::test_a_page_comes_back_under_its_own_hash_only",
    ),
    Break(
        "bytes_that_have_changed_are_a_page",
        "host_memory.py",
        'return "" if xxh3_64_intdigest(place) == label.digest else "its bytes have changed"',
        'return ""',
        "unit/test_host_memory.py::test_bytes_that_have_changed_are_no_page",
    ),
    Break(
        "prompts_of_encoders_are_cut",
        "core/scheduler/batch_planner.py",
        "if stop < progress.length and node.settings.whole_prompts:",
        "if False:",
        VECTORS + "prompts_of_an_encoder_are_never_cut",
    ),
    Break(
        "prompts_beyond_a_batch_wait_for_ever",
        "core/scheduler/state.py",
        "if node.settings.whole_prompts and request.prompt_len > node.settings.chunk_tokens:",
        "if False:",
        VECTORS + "a_prompt_that_no_batch_holds_is_refused_by_name",
    ),
    Break(
        "no_vector_is_a_vector",
        "core/scheduler/node.py",
        "    elif vector is None:",
        "    elif False:",
        VECTORS + "what_is_not_finite_fails_by_name_and_nobody_else",
    ),
    Break(
        "who_wants_a_vector_gets_a_token",
        "core/scheduler/batch_planner.py",
        "    samples = is_last and not pools",
        "    samples = is_last",
        VECTORS + "a_request_that_ends_with_its_prompt_has_a_vector_and_no_token",
    ),
    Break(
        "vectors_are_in_a_record",
        "server/node/without_tokens.py",
        "vectors=_zeroed(outcome.vectors),",
        "vectors=outcome.vectors,",
        VECTORS + "no_vector_is_on_record",
    ),
    Break(
        "encoders_have_a_prefix_cache",
        "server/node/settings.py",
        "prefix_cache=keeps_prefixes(config) and not engines.whole_prompts,",
        "prefix_cache=keeps_prefixes(config),",
        EMBEDDED + "nothing_is_left_behind_and_the_metrics_count_prompts_only",
    ),
    Break(
        "encoders_look_back_only",
        "engine/attention/both_ways.py",
        "queries, keys, values, scale",
        "queries, keys, values, is_causal=True, scale",
        POOLED + "an_encoders_vectors_are_those_of_transformers_at_any_lengths_in_one_batch",
    ),
    Break(
        "decoders_pool_the_first_token",
        "engine/pooling.py",
        "return range(chunk.last - 1, chunk.last)",
        "return range(chunk.first, chunk.first + 1)",
        POOLED + "a_decoders_vectors_are_the_last_tokens_states_however_a_prompt_is_cut",
    ),
    Break(
        "dimensions_are_cut_off_a_whole_vector",
        "engine/pooling.py",
        "functional.normalize(states.mean(dim=0)[:dimensions], dim=0)",
        "functional.normalize(states.mean(dim=0), dim=0)[:dimensions]",
        POOLED + "the_first_dimensions_are_taken_before_the_length_becomes_one",
    ),
    Break(
        "second_texts_are_of_the_first_type",
        "engine/models/bert.py",
        "types = self.types[0] if batch.token_types is None else",
        "types = self.types[0] if True else",
        POOLED + "a_cross_encoders_scores_are_those_of_transformers",
    ),
    Break(
        "four_bits_of_awq_are_in_order",
        "engine/quantized_formats.py",
        "AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)",
        "AWQ_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)",
        QUANTIZED + "a_quantised_checkpoint_computes_what_its_dequantised_weights_do",
    ),
    Break(
        "int8_kv_attends_to_what_is_not_kept",
        "engine/attention/torch_sdpa.py",
        "        if is_causal and self._rules.soft_cap is None and not self._kv.is_int8:",
        "        if is_causal and self._rules.soft_cap is None:",
        "unit/test_int8_kv.py::test_attention_is_that_of_fp64_over_what_is_kept",
    ),
    Break(
        "halves_that_keep_kv_differently_are_put_together",
        "engine/weights.py",
        "if kv_is_int8 else {}),",
        "if False else {}),",
        "e2e_cpu/test_int8_kv_served.py::test_the_layout_says_so",
    ),
    Break(
        "shards_cut_groups",
        "engine/quantized_formats.py",
        "if start % group != 0 or (stop % group != 0 and stop != inputs):",
        "if False:",
        QUANTIZED + "a_group_that_shards_would_share_is_refused_by_name",
    ),
    Break(
        "sides_that_quantise_differently_are_put_together",
        "engine/weights.py",
        "if scheme is not None else {}),",
        "if False else {}),",
        QUANTIZED + "two_sides_that_quantise_differently_have_different_layouts",
    ),
    Break(
        "servers_of_vectors_generate",
        "server/api/app.py",
        "        check_task(self._limits, *tasks)",
        "        pass",
        EMBEDDED + "an_embedding_server_generates_nothing",
    ),
    Break(
        "base64_is_asked_for_in_vain",
        "server/api/vectors.py",
        'is_base64 = body.encoding_format == "base64"',
        "is_base64 = False",
        EMBEDDED + "ids_lists_of_ids_base64_and_dimensions",
    ),
    Break(
        "the_worst_is_ranked_first",
        "server/api/vectors.py",
        "key=lambda one: -one[1]",
        "key=lambda one: one[1]",
        EMBEDDED + "a_cross_encoder_cut_into_four_workers_scores_as_transformers",
    ),
    Break(
        "ranked_documents_are_written_on_the_loop",
        "server/api/app.py",
        "shows_prompts=body.return_documents is not False",
        "shows_prompts=False",
        "unit/test_loop_work.py::test_no_callback_works_on_more_of_vectors_than_the_limit",
    ),
)


@dataclass(frozen=True)
class Run:
    code: int
    failed: frozenset[str]  # functions in which an assertion failed
    errors: int
    output: str


def broken_text(it: Edit) -> str:
    """The file with the break. Raises ValueError when the line is not there any more, or there twice."""
    text = (PACKAGE / it.file).read_text()
    if text.count(it.line) != 1:
        raise ValueError(f"{it.file} has {text.count(it.line)} times: {it.line}")
    return text.replace(it.line, it.instead)


def broken_copy(it: Edit, folder: Path) -> Path:
    """A folder for PYTHONPATH; what is large and no code is a link."""
    text, copy = broken_text(it), folder / "tandem"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("bundled"))
    (copy / "bundled").symlink_to(PACKAGE / "bundled")
    (copy / it.file).write_text(text)
    return folder


def run(it: Break, folder: Path) -> Run:
    """Raises TimeoutExpired when it hangs."""
    report = folder / "report.xml"
    words = ["-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", f"--junitxml={report}", f"tests/{it.test}"]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(broken_copy(it, folder / "broken"))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HUNG_S,
        check=False,
    )
    cases = list(ET.parse(report).getroot().iter("testcase"))
    failed = frozenset(
        case.get("name", "").partition("[")[0] for case in cases for found in case if found.tag == "failure"
    )
    errors = sum(found.tag == "error" for case in cases for found in case)
    return Run(done.returncode, failed, errors, done.stdout)
