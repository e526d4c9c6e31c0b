"""The names under which a node's numbers are exported; `export.py` puts the prefix in front."""

from tandem.core.scheduler.numbers import (
    DelayerPasses,
    DelayerTuning,
    HostNumbers,
    NodeNumbers,
    StorageNumbers,
    WindowNumbers,
)
from tandem.core.values import SECOND


def named(numbers: NodeNumbers) -> dict[str, float]:
    """SGLang's names where the meaning is SGLang's, `tandem:*` otherwise."""
    found: dict[str, float] = {
        "num_running_reqs": numbers.running,
        "num_queue_reqs": numbers.queued,
        "num_used_tokens": numbers.used_tokens,
        "max_total_num_tokens": numbers.max_tokens,
        "token_usage": numbers.token_usage,
        "cache_hit_rate": numbers.hit_rate,
        "num_retracted_reqs": numbers.retracting,
        "num_retracted_requests_total": numbers.retractions,
        "num_prefill_bootstrap_queue_reqs": numbers.bootstrapping,
        "tandem:num_prefill_early_reqs": numbers.early,
        "num_prefill_inflight_queue_reqs": numbers.sending,
        "num_decode_prealloc_queue_reqs": numbers.preallocating,
        "num_decode_transfer_queue_reqs": numbers.arriving,
        "num_bootstrap_failed_reqs_total": numbers.failed_bootstraps,
        "num_transfer_failed_reqs_total": numbers.failed_transfers,
        "page_size": numbers.page_size,
        "num_pages": numbers.num_pages,
    }
    found |= {f"num_prefill_retries_total{{reason={reason}}}": count for reason, count in numbers.retries.items()}
    if numbers.window is not None:
        found |= window(numbers.window)
    if numbers.host is not None:
        found |= host(numbers.host)
    if numbers.storage is not None:
        found |= storage(numbers.storage)
    if numbers.tuning is not None:
        found |= tuning(numbers.tuning)
    return found | {outcome_name(passes): passes.count for passes in numbers.delayer}


def window(numbers: WindowNumbers) -> dict[str, float]:
    return {"swa_token_usage": numbers.usage, "tandem:swa_max_total_num_tokens": numbers.max_tokens}


def host(numbers: HostNumbers) -> dict[str, float]:
    return {
        "hicache_host_used_tokens": numbers.used_tokens,
        "hicache_host_total_tokens": numbers.max_tokens,
        "tandem:hicache_stored_tokens_total": numbers.stored_tokens,
        "tandem:hicache_loaded_tokens_total": numbers.loaded_tokens,
        "tandem:hicache_lost_tokens_total": numbers.lost_tokens,
    }


def storage(numbers: StorageNumbers) -> dict[str, float]:
    return {
        "prefetched_tokens_total": numbers.fetched_tokens,
        "backuped_tokens_total": numbers.written_tokens,
        "tandem:hicache_storage_lost_tokens_total": numbers.lost_tokens,
        "tandem:hicache_storage_look_ups_total{outcome=hit}": numbers.hits,
        "tandem:hicache_storage_look_ups_total{outcome=miss}": numbers.misses,
        "tandem:hicache_storage_prefetches": numbers.prefetches,
    }


def tuning(numbers: DelayerTuning) -> dict[str, float]:
    return {
        "tandem:prefill_delayer_batch_cost_seconds": numbers.batch_ns / SECOND,
        "tandem:prefill_delayer_wanted_reqs": numbers.num_wanted,
    }


def outcome_name(passes: DelayerPasses) -> str:
    labels = {
        "input_estimation": passes.estimation,
        "output_allow": str(passes.allows).lower(),
        "output_reason": passes.reason,
        "actual_execution": str(passes.executed).lower(),
    }
    return f"prefill_delayer_outcomes_total{{{','.join(f'{label}={value}' for label, value in labels.items())}}}"
