"""Into how many workers the replicas of one seed are cut: all servers alike, as they have to be today.

Drawn apart from everything else: whatever else a seed is like does not depend on it.
"""

from random import Random

CUT_ONE_IN = 6  # seeds
CUTS = ((2, 1), (2, 1), (1, 2), (1, 2), (2, 2), (3, 1))  # tensor-parallel shards, pipeline stages


def draw_cut(seed: int) -> dict[str, int]:
    """Flags of all servers; none where a replica is one worker."""
    random = Random(f"whole cut {seed}")
    if random.randrange(CUT_ONE_IN):
        return {}
    tp_size, pp_size = random.choice(CUTS)
    return {"tp_size": tp_size, "pp_size": pp_size}
