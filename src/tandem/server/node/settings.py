"""What the flags and the environment of a server mean for its node: from `ServerConfig` to `NodeSettings`."""

from tandem import storage_config
from tandem.config import ServerConfig, keeps_prefixes, local_prefill_tokens, optimistic_wishes
from tandem.core.disagg.dp_rank import DpTopology
from tandem.core.dp_dispatch import method_for
from tandem.core.settings import (
    AllocationPolicy,
    DelayerSettings,
    DpConflictPolicy,
    LoadBalanceMethod,
    LoadFailurePolicy,
    LocalPrefill,
    NodeSettings,
    OptimisticPolicy,
    PrefetchPolicy,
    PrefillInfo,
    PrefillStall,
    PrioritySettings,
    SchedulePolicy,
    StorageSettings,
    TierSettings,
    WritePolicy,
)
from tandem.core.values import MILLISECOND, SECOND, Nanos, ceil_div
from tandem.environment import (
    BOOTSTRAP_TIMEOUT,
    FORCE_QUERY,
    FORCED_RETRIES,
    HEARTBEAT_INTERVAL,
    HEARTBEAT_MAX_FAILURE,
    WAITING_TIMEOUT,
    Variable,
    environment_number,
    environment_switch,
)
from tandem.server.node.links import Heartbeat
from tandem.server.node.workers import Engines
from tandem.server.processes import Launch

DEFAULT_RETRIES = 3
DEFAULT_ATTEMPTS = 1


def node_settings(launch: Launch, engines: Engines) -> NodeSettings:
    config, topology = launch.config, launch.topology
    return NodeSettings(
        role=config.role,
        incarnation=launch.incarnation,
        num_pages=engines.num_pages,
        page_size=config.page_tokens,
        block_tokens=engines.block_tokens,
        windows=engines.windows,
        layout=engines.layout,
        cut=config.cut,
        dp_rank=topology.effective_rank,
        prefill_info=PrefillInfo(
            topology.size, load_balance_method(config), DpConflictPolicy(config.disaggregation_dp_rank_conflict)
        ),
        server_began_at=Nanos(launch.began_ns),
        force_query=environment_switch(FORCE_QUERY),
        max_running=config.max_running_requests,
        max_queued=config.max_queued_requests,
        schedule_policy=SchedulePolicy(config.schedule_policy),
        priorities=priority_settings(config),
        chunk_tokens=config.chunked_prefill_size,
        prompt_batch_max=config.prefill_max_requests,
        window_depth=config.window_depth,
        num_micro_batches=1 if config.disable_overlap_schedule else config.pp_size,
        min_micro_batch=config.pp_min_micro_batch_size,
        mixed_chunk=config.enable_mixed_chunk,
        prefill_stall=prefill_stall(config),
        delayer=delayer_settings(config, topology) if config.enable_prefill_delayer else None,
        whole_prompts=engines.whole_prompts,
        prefix_cache=keeps_prefixes(config) and not engines.whole_prompts,
        announces_cache=config.kv_events_config is not None,
        host_tier=tier_settings(config, engines.host_pages) if engines.host_pages else None,
        reserved_decode_tokens=config.num_reserved_decode_tokens,
        conservativeness=config.schedule_conservativeness,
        result_slots=config.disaggregation_metadata_slots or 2 * config.max_running_requests,
        optimistic=optimistic_policy(config),
        optimistic_retries=config.optimistic_prefill_retries or DEFAULT_RETRIES,
        force_retry_prob=environment_number(FORCED_RETRIES),
        park_max_tokens=config.disaggregation_park_max_tokens,
        park_attempts=config.optimistic_prefill_attempts or DEFAULT_ATTEMPTS,
        local_prefill=local_prefill(config),
        local_prefill_tokens=local_prefill_tokens(config.disaggregation_local_prefill) or 0,
        allocation=AllocationPolicy(config.disaggregation_decode_allocation_policy),
        bootstrap_timeout_ns=timeout(BOOTSTRAP_TIMEOUT),
        waiting_timeout_ns=timeout(WAITING_TIMEOUT),
        load_failure=LoadFailurePolicy.FAIL
        if config.strict_remote
        else LoadFailurePolicy(config.kv_load_failure_policy or LoadFailurePolicy.RECOMPUTE),
        stall_timeout_ns=Nanos(int(config.stall_timeout * SECOND)),
    )


def priority_settings(config: ServerConfig) -> PrioritySettings | None:
    if not config.enable_priority_scheduling:
        return None
    return PrioritySettings(config.schedule_low_priority_values_first, config.priority_scheduling_preemption_threshold)


def prefill_stall(config: ServerConfig) -> PrefillStall | None:
    """None where nobody decodes, too."""
    if not config.max_prefill_stall_ms or config.role == "prefill":
        return None
    return PrefillStall(Nanos(config.max_prefill_stall_ms * MILLISECOND))


def tier_settings(config: ServerConfig, host_pages: int) -> TierSettings:
    policy = WritePolicy(config.hicache_write_policy)
    if config.hicache_storage_backend is None:
        return TierSettings(host_pages, policy)
    extra = storage_config.read(config.hicache_storage_backend_extra_config)
    storage = StorageSettings(
        PrefetchPolicy(config.hicache_storage_prefetch_policy),
        min_pages=ceil_div(extra.prefetch_threshold, config.page_tokens),
        timeout_base_ns=Nanos(int(extra.prefetch_timeout_base * SECOND)),
        timeout_per_ki_token_ns=Nanos(int(extra.prefetch_timeout_per_ki_token * SECOND)),
    )
    return TierSettings(host_pages, policy, storage=storage)


def load_balance_method(config: ServerConfig) -> LoadBalanceMethod:
    return method_for(LoadBalanceMethod(config.load_balance_method), config.role)


def delayer_settings(config: ServerConfig, topology: DpTopology) -> DelayerSettings:
    """Ranks that step together decide alike; a replica that steps alone agrees with itself."""
    ratio = config.prefill_delayer_queue_min_ratio
    return DelayerSettings(
        max_delay_passes=config.prefill_delayer_max_delay_passes,
        low_watermark=config.prefill_delayer_token_usage_low_watermark,
        queue_min_ratio=None if ratio == "auto" else ratio,
        tunes_itself=ratio == "auto",
        prompt_batch_max=config.prefill_max_requests,
        max_delay_ns=Nanos(int(config.prefill_delayer_max_delay_ms * MILLISECOND)),
        num_ranks=topology.attn_dp_size,
    )


def optimistic_policy(config: ServerConfig) -> OptimisticPolicy:
    """The one that the flags select."""
    wishes = optimistic_wishes(config)
    return OptimisticPolicy(wishes.pop()) if wishes else OptimisticPolicy.PARK


def local_prefill(config: ServerConfig) -> LocalPrefill:
    named = config.disaggregation_local_prefill
    return LocalPrefill(named) if named in ("off", "auto") else LocalPrefill.UP_TO


def timeout(variable: Variable) -> Nanos | None:
    """None: the request's deadline is all that bounds this wait."""
    return Nanos(int(environment_number(variable) * SECOND)) or None


def heartbeat() -> Heartbeat:
    interval_ns = Nanos(int(environment_number(HEARTBEAT_INTERVAL) * SECOND))
    return Heartbeat(interval_ns, int(environment_number(HEARTBEAT_MAX_FAILURE)))
