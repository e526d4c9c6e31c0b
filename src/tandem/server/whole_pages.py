"""Whether a page of the KV pool is given back as a whole, or first what layers with a window have in it (decision 035).

That is known before anything starts: from flags, the environment and the model's `config.json`.
"""

from tandem.config import ServerConfig
from tandem.engine.model_config import ModelConfig
from tandem.environment import STAGED_KV, environment_switch
from tandem.transfer.port import Backend


def window_tokens(model: ModelConfig) -> int | None:
    """The largest window of any layer; None: there is none, or each is no less than a prompt may be."""
    windows = [model.window_of(layer) for layer in model.attention_layers]
    most = max((window for window in windows if window is not None), default=None)
    return None if most is None or most >= model.max_context else most


def why_whole(config: ServerConfig, window: int | None) -> str | None:
    """Why pages stay whole, whatever flags say. None: they need not."""
    if window is None:
        return "no layer of this model has a window shorter than its context"
    if config.device != "cpu":
        return f"pages stay whole with --device {config.device}"
    if environment_switch(STAGED_KV):
        return f"pages stay whole with TANDEM_{STAGED_KV.name}"
    if config.role == "prefill" and config.disaggregation_transfer_backend == Backend.NIXL.value:
        return "pages stay whole with --disaggregation-transfer-backend nixl, which may have pinned them"
    return None


def without_effect_on_windows(config: ServerConfig, window: int | None) -> list[str]:
    """The flags of layers with a window that were given and would do nothing, each with the reason."""
    given = {
        "--swa-full-tokens-ratio": config.swa_full_tokens_ratio > 0,
        "--disable-hybrid-swa-memory": config.disable_hybrid_swa_memory,
    }
    reason = why_whole(config, window)
    return [] if reason is None else [f"{name} does nothing: {reason}" for name, is_given in given.items() if is_given]
