"""What people read instead of the id of a class of faults. The code keeps ids: random streams are named after them."""

NAMES = {
    "F1": "message-loss",
    "F2": "delays",
    "F3": "duplicates",
    "F4": "old-connections",
    "F5": "partitions",
    "F6": "crashes",
    "F7": "lost-shards",
    "F8": "pauses",
    "F9": "slow-or-hung",
    "F10": "clock-drift",
    "F11": "few-result-slots",
    "F12": "few-pages",
    "F13": "aborts",
    "F14": "corrupted-transfers",
    "F15": "late-transfers",
    "F16": "cache-tiers",
    "F17": "hostile-requests",
    "F18": "leaving-clients",
    "F19": "unequal-layouts",
    "F20": "refused-by-device",
    "F21": "scaling",
    "F22": "snapshots",
    "F23": "flickering-connections",
    "F24": "operators",
    "F25": "does-not-fit",
}


def name_of(fault: str) -> str:
    """Classes of the whole server have names for ids."""
    return NAMES.get(fault, fault)
