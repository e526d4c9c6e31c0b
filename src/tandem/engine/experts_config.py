"""What a checkpoint says about its experts: how many, how many of them a token goes to, and in which layers."""

from dataclasses import dataclass

from tandem.engine.documents import MOST_FEATURES, Fields, ModelError

MOST_EXPERTS = 1 << 12
COUNTS = ("num_experts", "num_local_experts")  # two spellings of one number


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    num_experts: int
    per_token: int  # experts that a token goes to
    intermediate_size: int  # of one expert
    shares_sum_to_one: (
        bool  # those of the chosen experts are scaled to that; else they are what the softmax over all says
    )
    dense_layers: tuple[int, ...]  # layers without experts


def read_experts(config: Fields, *, size_field: str, num_layers: int, normed: bool) -> ExpertsConfig:
    """size_field: which field holds the intermediate size of an expert. normed: as `shares_sum_to_one`.

    Dense layers are read of where they have a size of their own. Raises ModelError.
    """
    counts = {name: config.integer(name, most=MOST_EXPERTS) for name in COUNTS if config.has(name)}
    if len(set(counts.values())) > 1:
        raise ModelError("config.json: num_experts and num_local_experts contradict each other; remove the wrong one")
    num_experts = next(iter(counts.values()), None)
    if num_experts is None:
        raise config.wrong("num_experts", f"a whole number from 1 to {MOST_EXPERTS} is needed")
    return ExpertsConfig(
        num_experts=num_experts,
        per_token=config.integer("num_experts_per_tok", most=num_experts),
        intermediate_size=config.integer(size_field, most=MOST_FEATURES),
        shares_sum_to_one=normed,
        dense_layers=_dense_layers(config, num_layers) if size_field != "intermediate_size" else (),
    )


def _dense_layers(config: Fields, num_layers: int) -> tuple[int, ...]:
    step = config.integer("decoder_sparse_step", most=num_layers, default=1)
    named = config.values.get("mlp_only_layers") or []
    if not isinstance(named, list) or not all(type(layer) is int and 0 <= layer < num_layers for layer in named):
        raise config.wrong("mlp_only_layers", f"numbers of layers below {num_layers} are needed")
    return tuple(layer for layer in range(num_layers) if layer in named or (layer + 1) % step != 0)
