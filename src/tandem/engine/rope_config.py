"""What a checkpoint says about rotary positions, in both spellings, checked and reduced to one.

    rope_parameters              transformers 5: kind, theta and what the kind needs, in one object
    rope_theta + rope_scaling    before that

Where both are there they have to say the same. Some architectures turn by other angles in layers with a window
(`read_ropes`): then `rope_parameters` is two such objects, full_attention and sliding_attention; before that rope_theta
and rope_scaling were of the layers without a window, rope_local_base_freq of the others.

Everything that would turn by other angles than `layers/rotary.py` computes is refused: another kind, a field that the
kind does not have, one object per layer type elsewhere; a part of the head (partial_rotary_factor) where the
architecture turns all of it.
"""

import math
from dataclasses import dataclass
from typing import Any  # parameters of the kinds: numbers, a list of them, and one switch

from tandem.engine.documents import Fields, ModelError
from tandem.logtext import shown

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
    # long_factor is for contexts that are longer than the trained one, and there it ends (`model_config.py`).
    "longrope": frozenset(
        {"short_factor", "long_factor", "factor", "attention_factor", "original_max_position_embeddings"}
    ),
}
OTHER_NAMES = {"su": "longrope"}  # of kinds, in older files
PART = "partial_rotary_factor"
LOCAL_THETA = "rope_local_base_freq"
ORIGINAL = "original_max_position_embeddings"
MOST_PAIRS = 1 << 12
EVERYWHERE = frozenset({"rope_type", "type", "rope_theta", PART})
SAYS_NOTHING = frozenset({"finetuned"})  # how the weights came to be


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions turn into angles; `parameters` holds what the kind needs beyond theta, and which part of a head is
    turned where it is not all of it.
    """

    kind: str
    theta: float
    parameters: dict[str, Any]

    def rotary_dim(self, head_dim: int) -> int:
        """How many elements of a head are turned, from its beginning on."""
        return int(head_dim * self.parameters.get(PART, 1.0))


def read_rope(config: Fields, *, default_theta: float, may_turn_a_part: bool) -> RopeConfig:
    """default_theta: where the files name none. may_turn_a_part: of each head. Raises ModelError."""
    spellings = [found for name in ("rope_parameters", "rope_scaling") if (found := config.section(name)) is not None]
    said = [_read(spelling, config, default_theta) for spelling in spellings if spelling.values]
    said = said or [RopeConfig("default", _theta(config, default=default_theta), _part(config, config))]
    if PART in said[0].parameters and not may_turn_a_part:
        raise ModelError(f"config.json: {PART} is not 1, which is not supported; choose another checkpoint")
    if len(said) == 2 and said[0] != said[1]:
        raise ModelError("config.json: rope_parameters and rope_scaling contradict each other; remove the wrong one")
    return said[0]


def read_ropes(config: Fields, *, default_theta: float, default_local: float) -> tuple[RopeConfig, RopeConfig]:
    """Of layers without a window, and of those with one. Raises ModelError.

    As transformers reads them: rope_scaling is of the kind that rope_type says, and from what a context was stretched
    only the objects themselves say.
    """
    local = _theta(config, default=default_local, name=LOCAL_THETA)
    config = Fields(config.where, {**config.values, ORIGINAL: None})
    both, older = config.section("rope_parameters"), config.section("rope_scaling")
    if both is None or not both.values:
        kind = {} if older is None else {"rope_scaling": {"rope_type": "default", **older.values}}
        rope = read_rope(
            Fields(config.where, {**config.values, **kind}), default_theta=default_theta, may_turn_a_part=False
        )
        return rope, RopeConfig("default", local, {})
    if set(both.values) - {"full_attention", "sliding_attention"} or config.values.get("rope_scaling"):
        raise config.wrong("rope_parameters", "full_attention and sliding_attention, and no rope_scaling, are needed")

    def of(layer_type: str, theta_name: str, default: float) -> RopeConfig:
        said = {"rope_parameters": both.values.get(layer_type), "rope_theta": config.values.get(theta_name)}
        alone = Fields(config.where, {**config.values, **said})
        return read_rope(alone, default_theta=default, may_turn_a_part=False)

    return of("full_attention", "rope_theta", default_theta), of("sliding_attention", LOCAL_THETA, default_local)


def _read(given: Fields, config: Fields, default_theta: float) -> RopeConfig:
    kind = _kind(given)
    _refuse_others(given, kind)
    outer = _theta(config, default=default_theta)
    theta = _theta(given, default=outer)
    if config.has("rope_theta") and theta != outer:
        raise ModelError(f"{given.where} and the theta beside it contradict each other; remove the wrong one")
    return RopeConfig(kind, theta, {**_parameters(given, kind, config), **_part(given, config)})


def _kind(given: Fields) -> str:
    older = given.text("type", default=given.text("rope_type", default="default"))
    newer = given.text("rope_type", default=older)
    kind = OTHER_NAMES.get(newer, newer)
    if kind != OTHER_NAMES.get(older, older):
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


def _part(given: Fields, config: Fields) -> dict[str, float]:
    """Nothing where all of a head is turned."""
    outside = config.number(PART, least=0, most=1, default=1)
    part = given.number(PART, least=0, most=1, default=outside)
    if config.has(PART) and part != outside:
        raise ModelError(f"{given.where} and config.json name two {PART}; remove the wrong one")
    return {PART: part} if part != 1 else {}


def _theta(given: Fields, *, default: float, name: str = "rope_theta") -> float:
    theta = given.number(name, least=1, most=MOST_THETA, default=default)
    if theta == 1:
        raise given.wrong(name, "more than 1 is needed")
    return theta


def _parameters(given: Fields, kind: str, config: Fields) -> dict[str, Any]:
    if kind == "default":
        return {}
    if kind == "longrope":
        return _longrope(given, config)
    found: dict[str, Any] = {"factor": given.number("factor", least=1, most=MOST_FACTOR)}
    if kind in ("llama3", "yarn"):
        found[ORIGINAL] = _trained(given, config)
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
    longest = config.integer("max_position_embeddings", most=MOST_POSITIONS)
    outside = config.integer(ORIGINAL, most=MOST_POSITIONS, default=longest)
    inside = given.integer(ORIGINAL, most=MOST_POSITIONS, default=outside)
    if config.has(ORIGINAL) and inside != outside:
        raise ModelError(f"{given.where} has {ORIGINAL} {inside}, and beside it {outside} holds; remove the wrong one")
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


def _longrope(given: Fields, config: Fields) -> dict[str, Any]:
    """The factor on cos and sin follows from how far the context was stretched; a file may name it."""
    if not given.has(ORIGINAL) and not config.has(ORIGINAL):
        raise given.wrong(ORIGINAL, "a whole number is needed")
    trained = _trained(given, config)
    if trained == 1:
        raise given.wrong(ORIGINAL, "more than 1 is needed")
    longest = config.integer("max_position_embeddings", most=MOST_POSITIONS)
    factor = given.number("factor", least=1e-6, most=MOST_FACTOR, default=longest / trained)
    growth = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    return {
        "short_factor": _factors(given, "short_factor"),
        "attention_factor": given.number("attention_factor", least=1e-6, most=1e6, default=growth),
        ORIGINAL: trained,
    }


def _factors(given: Fields, name: str) -> list[float]:
    values = given.values.get(name)
    if not isinstance(values, list) or not 0 < len(values) <= MOST_PAIRS:
        raise given.wrong(name, "a list of numbers is needed")
    if not all(type(value) in (int, float) and 1e-6 <= value <= 1e6 for value in values):
        raise given.wrong(name, "numbers from 1e-06 to 1e+06 are needed")
    return [float(value) for value in values]
