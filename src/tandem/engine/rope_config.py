"""What a checkpoint says about rotary positions, in both spellings, checked and reduced to one.

    rope_parameters              transformers 5: kind, theta and what the kind needs, in one object
    rope_theta + rope_scaling    before that

Where both are there they have to say the same. Everything that would turn by other angles than `layers/rotary.py`
computes is refused: another kind, a field that the kind does not have, one object per layer type, a part of the head.
"""

from dataclasses import dataclass
from typing import Any  # parameters of the kinds: numbers and one switch

from tandem.engine.documents import Fields, ModelError, shown

MOST_THETA = 1e18
MOST_FACTOR = 1e6
LEAST_BETA = 1e-6  # of less the logarithms that yarn takes are beyond every number
MOST_POSITIONS = (1 << 31) - 1

# kind -> the fields that it has besides its name and theta
KINDS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"}
        | {"mscale", "mscale_all_dim", "truncate"}
    ),
}
EVERYWHERE = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
SAYS_NOTHING = frozenset({"finetuned"})  # how the weights came to be


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions turn into angles; `parameters` holds what the kind needs beyond theta."""

    kind: str
    theta: float
    parameters: dict[str, Any]


def read_rope(config: Fields, *, default_theta: float) -> RopeConfig:
    """default_theta: where the files name none. Raises ModelError."""
    _refuse_partial(config)
    spellings = [found for name in ("rope_parameters", "rope_scaling") if (found := config.section(name)) is not None]
    said = [_read(spelling, config, default_theta) for spelling in spellings if spelling.values]
    if len(said) == 2 and said[0] != said[1]:
        raise ModelError("config.json: rope_parameters and rope_scaling contradict each other; remove the wrong one")
    return said[0] if said else RopeConfig("default", _theta(config, default=default_theta), {})


def _read(given: Fields, config: Fields, default_theta: float) -> RopeConfig:
    kind = _kind(given)
    _refuse_others(given, kind)
    _refuse_partial(given)
    outer = _theta(config, default=default_theta)
    theta = _theta(given, default=outer)
    if config.has("rope_theta") and theta != outer:
        raise ModelError(f"{given.where} and rope_theta contradict each other; remove the wrong one")
    return RopeConfig(kind, theta, _parameters(given, kind, config))


def _kind(given: Fields) -> str:
    kind = given.text("rope_type", default=given.text("type", default="default"))
    if given.has("type") and given.values["type"] != kind:
        raise ModelError(f"{given.where}: type and rope_type contradict each other; remove the wrong one")
    if kind not in KINDS:
        raise ModelError(f"the rotary scaling {shown(kind)} is not supported; known are {', '.join(KINDS)}")
    return kind


def _refuse_others(given: Fields, kind: str) -> None:
    for name, value in given.values.items():
        if isinstance(value, dict):
            raise ModelError(
                f"{given.where} differ by layer ({shown(name)}), which is not supported; choose another one"
            )
        known = KINDS[kind] | EVERYWHERE | SAYS_NOTHING
        harmless = value is None or (name == "factor" and value == 1)
        if name not in known and not harmless:
            raise ModelError(
                f"{given.where}: {shown(name)} means nothing to the kind {kind}, so the file may mean something else; "
                "choose another checkpoint"
            )


def _refuse_partial(given: Fields) -> None:
    if given.has("partial_rotary_factor") and given.number("partial_rotary_factor", least=0, most=1) != 1:
        raise ModelError(
            "config.json: partial_rotary_factor is not 1, which is not supported; choose another checkpoint"
        )


def _theta(given: Fields, *, default: float) -> float:
    theta = given.number("rope_theta", least=1, most=MOST_THETA, default=default)
    if theta == 1:
        raise given.wrong("rope_theta", "more than 1 is needed")
    return theta


def _parameters(given: Fields, kind: str, config: Fields) -> dict[str, Any]:
    if kind == "default":
        return {}
    found: dict[str, Any] = {"factor": given.number("factor", least=1, most=MOST_FACTOR)}
    if kind in ("llama3", "yarn"):
        found["original_max_position_embeddings"] = _trained(given, config)
    if kind == "llama3":
        low, high = (given.number(name, least=1e-6, most=1e6) for name in ("low_freq_factor", "high_freq_factor"))
        if high <= low:
            raise given.wrong("high_freq_factor", "more than low_freq_factor is needed")
        found |= {"low_freq_factor": low, "high_freq_factor": high}
    if kind == "yarn":
        found |= _yarn(given)
    return found


def _trained(given: Fields, config: Fields) -> int:
    """Some checkpoints name it beside the object."""
    name = "original_max_position_embeddings"
    longest = config.integer("max_position_embeddings", most=MOST_POSITIONS)
    outside = config.integer(name, most=MOST_POSITIONS, default=longest)
    inside = given.integer(name, most=MOST_POSITIONS, default=outside)
    if config.has(name) and inside != outside:
        raise ModelError(f"{given.where} and config.json name two {name}; remove the wrong one")
    return inside


def _yarn(given: Fields) -> dict[str, Any]:
    """Absent ones stay absent: their defaults belong to the formulas."""
    found: dict[str, Any] = {}
    if given.has("attention_factor"):
        found["attention_factor"] = given.number("attention_factor", least=1e-6, most=1e6)
    for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        value = given.number(name, least=0, most=1e6, default=0)
        if 0 < value < LEAST_BETA:
            raise given.wrong(name, f"0 or a number from {LEAST_BETA:g} on is needed")
        if value:
            found[name] = value
    if found.get("beta_fast", 32) < found.get("beta_slow", 1):
        raise given.wrong("beta_fast", "at least beta_slow is needed")
    if not given.flag("truncate", default=True):
        found["truncate"] = False
    return found
