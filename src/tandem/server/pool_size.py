"""How many pages the KV pool of a server has, and how many of them what layers with a window need."""

from collections.abc import Callable
from dataclasses import dataclass

from tandem.config import ServerConfig
from tandem.core.kv.windows import most_seen
from tandem.core.settings import WindowSettings
from tandem.core.values import ceil_div
from tandem.engine import machine_memory
from tandem.engine.kv_memory import pages_for_memory
from tandem.engine.weights import LoadedModel
from tandem.server.processes import ServerFailure
from tandem.server.whole_pages import why_whole, window_tokens

USEFUL_POOLS = 4  # a pool is never larger than so many times what a full running set can use
USUAL_RATIO = 0.8


@dataclass(frozen=True, slots=True)
class PoolSize:
    num_pages: int
    windows: WindowSettings | None = None  # None: pages are kept and given back whole


def pool_size(config: ServerConfig, model: LoadedModel, least: Callable[[int], int]) -> PoolSize:
    """least: of what all workers call it with, so all of them come to the same size. Raises ServerFailure.

    Unless a flag asks for it, pages may lose their window parts where no request is refused for that.
    """
    tokens = window_tokens(model.config)
    may_give_parts = why_whole(config, tokens) is None and not config.disable_hybrid_swa_memory
    if tokens is not None and may_give_parts:
        ratio = config.swa_full_tokens_ratio or USUAL_RATIO
        num_pages = least(pool_pages(config, model, ratio))
        max_parts, needed = int(num_pages * ratio), least_parts(config, model, tokens, num_pages)
        if max_parts >= needed:
            return PoolSize(num_pages, WindowSettings(tokens, max_parts))
        if config.swa_full_tokens_ratio:
            raise ServerFailure(
                f"--swa-full-tokens-ratio {ratio} gives layers with a window {max_parts * config.page_tokens} tokens, "
                f"and one request may need {needed * config.page_tokens}; raise it, or lower --context-length"
            )
    return PoolSize(least(pool_pages(config, model)))


def least_parts(config: ServerConfig, model: LoadedModel, tokens: int, num_pages: int) -> int:
    """That one request may need: all of a prompt where it is sent or comes from a peer."""
    ahead = max(config.chunked_prefill_size * config.window_depth, config.window_depth + 1)  # of a prompt, or decoding
    while_computed = most_seen(tokens, ahead, page_size=config.page_tokens)
    context = ceil_div(config.context_length or model.max_context, config.page_tokens)
    return while_computed if config.role == "unified" else max(while_computed, min(context, num_pages))


def pool_pages(config: ServerConfig, model: LoadedModel, windowed_share: float = 1.0) -> int:
    """Raises ServerFailure when there is no room for one request, or less memory than asked for.

    Memory is mapped, and taken when pages are written: a pool that is too large would end the server hours later.
    The workers of a server on one host share the machine's memory evenly; on devices each has one of its own.
    """

    def fit(budget_bytes: int) -> int:
        return pages_for_memory(
            model.kv_shape,
            page_size=config.page_tokens,
            dtype=model.dtype,
            budget_bytes=budget_bytes,
            windowed_share=windowed_share,
        )

    sharing = config.num_workers_here if config.device == "cpu" else 1
    weight_bytes = model.weight_bytes * (copies_here(config) if model.is_packed else 1)
    left_bytes = machine_memory.bytes_left(model.device, weight_bytes=weight_bytes) // sharing
    fitting = fit(left_bytes)
    if config.max_total_tokens is not None:
        num_pages = ceil_div(config.max_total_tokens, config.page_tokens)
        if num_pages > fitting:
            raise ServerFailure(
                f"--max-total-tokens {config.max_total_tokens} needs more memory than the {left_bytes / (1 << 30):.1f} "
                f"GiB that are there beside the weights; at most {fitting * config.page_tokens} tokens fit"
            )
    else:
        budget_bytes = int(machine_memory.total_bytes(model.device) * config.mem_fraction_static)
        budgeted = fit(budget_bytes // sharing)
        context = config.context_length or model.max_context
        useful = USEFUL_POOLS * config.max_running_requests * ceil_div(context, config.page_tokens)
        num_pages = min(useful, budgeted, fitting)
    if num_pages < 2:
        raise ServerFailure(
            f"the KV pool has {num_pages} pages of {config.page_tokens} tokens; "
            "raise --max-total-tokens or --mem-fraction-static, or lower --page-size"
        )
    return num_pages


def copies_here(config: ServerConfig) -> int:
    """How often this host has all weights where each worker has its own copy of its part, at most."""
    return max(1, config.num_workers_here // (config.cut.tp_size * config.cut.pp_size))
