"""How `--help` of servers and routers orders their flags: what most people need first, each with its like."""

# Names of fields. What is in no group stands in the last one.
GROUPS: dict[str, tuple[str, ...]] = {
    "most used": (
        *("host", "port", "api_key", "api_key_file", "served_model_name", "dtype", "context_length"),
        *("max_running_requests", "mem_fraction_static", "tp_size", "disaggregation_mode", "policy"),
    ),
    "several workers": (
        *("pp_size", "pp_min_micro_batch_size", "attn_cp_size"),
        *("dp_size", "enable_dp_attention", "load_balance_method"),
        *("nnodes", "node_rank", "dist_init_addr", "dist_timeout"),
    ),
    "prefill and decode servers": (
        *("disaggregation_bootstrap_port", "cluster_secret_file", "disaggregation_allow"),
        *("disaggregation_transfer_backend", "disaggregation_decode_enable_radix_cache"),
        "disaggregation_decode_allocation_policy",
        *("disaggregation_local_prefill", "disaggregation_dp_rank_conflict", "num_reserved_decode_tokens"),
        *("disaggregation_metadata_slots", "disaggregation_park_max_tokens"),
        *("optimistic_prefill_policy", "optimistic_prefill_retries", "optimistic_prefill_attempts"),
        *("kv_load_failure_policy", "strict_remote"),
    ),
    "memory and batches": (
        *("max_total_tokens", "page_size", "chunked_prefill_size", "enable_mixed_chunk", "max_prefill_stall_ms"),
        "prefill_max_requests",
        *("swa_full_tokens_ratio", "disable_hybrid_swa_memory"),
        *("max_queued_requests", "max_active_requests"),
        *("schedule_policy", "enable_priority_scheduling", "schedule_low_priority_values_first"),
        "priority_scheduling_preemption_threshold",
        *("disable_radix_cache", "disable_overlap_schedule", "schedule_conservativeness"),
        *("cpu_threads", "device", "quantization", "kv_cache_dtype", "attention_backend", "deterministic"),
        *("disable_cuda_graph", "cuda_graph_max_bs"),
        "dllm_threshold",
    ),
    "when prompts wait for those who decode": (
        *("enable_prefill_delayer", "prefill_delayer_max_delay_passes", "prefill_delayer_token_usage_low_watermark"),
        *("prefill_delayer_queue_min_ratio", "prefill_delayer_max_delay_ms"),
        *("prefill_delayer_forward_passes_buckets", "prefill_delayer_wait_seconds_buckets"),
    ),
    "what is asked and answered": (
        *("chat_template", "tool_call_parser", "reasoning_parser", "sampling_defaults"),
        *("max_stored_responses", "stored_responses_max_bytes", "is_embedding"),
    ),
    "which server gets a request": (
        *("prefill_policy", "decode_policy", "cache_threshold", "balance_abs_threshold", "balance_rel_threshold"),
        "max_tree_size",
    ),
    "who may ask": (
        *("admin_api_key", "admin_api_key_file", "debug_host", "allowed_host"),
        *("allowed_origins", "allow_credentials", "allowed_methods", "allowed_headers"),
    ),
    "deadlines": (
        *("request_timeout", "stall_timeout", "drain_timeout", "watchdog_timeout"),
        *("retries", "health_check_interval"),
    ),
}
OTHERS = "what is written down, and the rest"


def group_of(name: str) -> str:
    return next((title for title, names in GROUPS.items() if name in names), OTHERS)


def in_order(names: list[str]) -> dict[str, list[str]]:
    """The names by group, groups and names in the order of the table; no group is empty."""
    found = {title: [name for name in wanted if name in names] for title, wanted in GROUPS.items()}
    found[OTHERS] = [name for name in names if group_of(name) == OTHERS]
    return {title: members for title, members in found.items() if members}
