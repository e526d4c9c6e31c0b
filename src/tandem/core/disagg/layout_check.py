"""What two servers disagree about, in words. The digest of a layout decides; its fields only explain."""

from collections.abc import Mapping

MAX_VALUE_CHARS = 16  # digests of weights are long and tell nobody anything


def differences(theirs: Mapping[str, str], ours: Mapping[str, str], *, them: str, us: str) -> str:
    """`page_size is 16 at prefill and 32 at decode; ...`, empty when no field differs."""
    names = [name for name in sorted({*theirs, *ours}) if theirs.get(name) != ours.get(name)]
    return "; ".join(f"{name} is {shown(theirs, name)} at {them} and {shown(ours, name)} at {us}" for name in names)


def shown(fields: Mapping[str, str], name: str) -> str:
    value = fields.get(name, "not told")
    return value if len(value) <= MAX_VALUE_CHARS else value[:MAX_VALUE_CHARS] + "..."
