"""What a checkpoint says about its state-space layers (Mamba 2): which layers they are, and their sizes.

The heads of the state go with the KV heads of attention, an equal number with each, so that a page is cut into shards
in one way only (`kv_memory.py`).
"""

from dataclasses import dataclass

from tandem.engine.documents import MOST_HEADS, Fields, ModelError

MOST_SIZE = 1 << 12
KINDS = {"mamba": True, "linear_attention": True, "attention": False, "full_attention": False}  # two spellings of each

NO_LIMIT = (None, [0.0, None], [0.0, {"__float__": "Infinity"}])  # JSON has no infinity


@dataclass(frozen=True, slots=True)
class StateSpaceConfig:
    layers: tuple[int, ...]
    num_heads: int
    head_dim: int
    state_size: int  # numbers that a head keeps for each of its dimensions
    num_groups: int  # heads of one group read and write by the same vectors
    conv_width: int  # tokens that the convolution before the scan sees
    conv_bias: bool
    bias: bool  # of the projections in and out

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def group_features(self) -> int:
        """Of the vectors by which the state is written and read, all groups together."""
        return 2 * self.num_groups * self.state_size


def read_state_space(config: Fields, *, num_layers: int, num_kv_heads: int, hidden: int) -> StateSpaceConfig | None:
    """None where all layers attend. Raises ModelError."""
    kinds = config.values.get("layer_types", config.values.get("layers_block_type"))
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(str(kind) not in KINDS for kind in kinds):
        raise config.wrong("layer_types", f"{num_layers} times {', '.join(KINDS)} is needed")
    layers = tuple(layer for layer, kind in enumerate(kinds) if KINDS[kind])
    if not layers:
        return None
    num_heads = config.integer("mamba_n_heads", most=MOST_HEADS)
    inner = config.integer("mamba_expand", most=64, default=2) * hidden
    named = config.values.get("mamba_d_head")
    head_dim = inner // num_heads if named in (None, "auto") else config.integer("mamba_d_head", most=MOST_SIZE)
    if num_heads * head_dim != inner:
        raise ModelError(
            f"config.json: {num_heads} heads of {head_dim} are not the {inner} features of a state-space layer; "
            "the file is broken"
        )
    num_groups = config.integer("mamba_n_groups", most=num_heads, default=1)
    for other, what in ((num_groups, "groups"), (num_kv_heads, "KV heads")):
        if num_heads % other != 0:
            raise ModelError(
                f"config.json: {num_heads} heads of state-space layers cannot be spread evenly over {other} {what}; "
                "choose another checkpoint"
            )
    if config.values.get("time_step_limit") not in NO_LIMIT:
        raise config.wrong("time_step_limit", "none is needed")
    return StateSpaceConfig(
        layers=layers,
        num_heads=num_heads,
        head_dim=head_dim,
        state_size=config.integer("mamba_d_state", most=MOST_SIZE),
        num_groups=num_groups,
        conv_width=config.integer("mamba_d_conv", least=2, most=64, default=4),
        conv_bias=config.flag("mamba_conv_bias", default=True),
        bias=config.flag("mamba_proj_bias", default=False),
    )
