"""Into how many workers the replicas of one seed are cut: in some seeds all servers alike, in some each side otherwise.
In some of the others the DP ranks of all servers step together.

Drawn apart from everything else: whatever else a seed is like does not depend on them.
"""

from collections.abc import Mapping
from random import Random
from typing import Any  # values of flags

from tandem.core.kv_parts import KvGrid
from tandem.core.values import Cut
from tandem.simulator.faults.options import FIRST_OFF_RECORD

CUT_ONE_IN = 6  # seeds
CUTS = ((2, 1), (2, 1), (1, 2), (1, 2), (2, 2), (3, 1))  # tensor-parallel shards, pipeline stages
UNEQUAL_ONE_IN = 6  # of the other seeds
SIDES = (Cut(), Cut(), Cut(2, 1), Cut(1, 2), Cut(2, 2), Cut(3, 1), Cut(4, 1))
UNCUT = Cut()
CONTEXT_ONE_IN = 9  # seeds with pairs whose sides are cut in no other way
CONTEXTS = (Cut(cp_size=2), Cut(cp_size=3), Cut(2, 1, 2), Cut(1, 2, 2))
TOGETHER_ONE_IN = 9  # of the seeds that are not cut
HOSTS_ONE_IN = 4  # of the servers with workers for two


def draw_cut(seed: int) -> dict[str, int]:
    """Flags of all servers; none where a replica is one worker."""
    random = Random(f"whole cut {seed}")
    if random.randrange(CUT_ONE_IN):
        return {}
    tp_size, pp_size = random.choice(CUTS)
    return {"tp_size": tp_size, "pp_size": pp_size}


def draw_cuts(seed: int) -> tuple[Cut, Cut, int]:
    """Of prefill and of decode, and the KV heads; the same cut twice where this seed has no unequal sides."""
    random = Random(f"whole unequal cuts {seed}")
    if draw_cut(seed) or random.randrange(UNEQUAL_ONE_IN):
        return UNCUT, UNCUT, 1
    prefill = random.choice(SIDES)
    decode = random.choice([cut for cut in SIDES if cut != prefill])
    return prefill, decode, random.choice((2, 4))  # of two, three or four shards some have the same


def draw_together(seed: int) -> tuple[dict[str, int], dict[str, Any]]:
    """Flags of all servers where DP ranks step together, and those of their prefill delayers; none in most seeds."""
    random = Random(f"whole steps together {seed}")
    prefill, decode, _ = draw_cuts(seed)
    if draw_cut(seed) or prefill != decode or random.randrange(TOGETHER_ONE_IN):
        return {}, {}
    size, ratio = random.choice((2, 2, 3)), random.choice((None, 0.5, 2.0))
    delayer: dict[str, Any] = {"enable_prefill_delayer": True, "prefill_delayer_queue_min_ratio": ratio}
    delayer["prefill_delayer_max_delay_passes"] = random.choice((2, 30))
    if seed >= FIRST_OFF_RECORD and not Random(f"whole queue gate auto {seed}").randrange(3):
        delayer["prefill_delayer_queue_min_ratio"] = "auto"
    return {"dp_size": size, "tp_size": size, "enable_dp_attention": True}, delayer if random.random() < 0.6 else {}


def draw_context(seed: int) -> Cut:
    """Of prefill servers whose workers share out the tokens of prompts; the decodes of that seed are not cut."""
    random = Random(f"whole context {seed}")
    prefill, decode, _ = draw_cuts(seed)
    if draw_cut(seed) or prefill != decode or draw_together(seed)[0] or random.randrange(CONTEXT_ONE_IN):
        return UNCUT
    return random.choice(CONTEXTS)


def flags_of(cut: Cut) -> dict[str, int]:
    return {} if cut == UNCUT else {"tp_size": cut.tp_size, "pp_size": cut.pp_size, "attn_cp_size": cut.cp_size}


def draw_num_hosts(seed: int, name: str, num_workers: int) -> int:
    """On how many machines the workers of this server are. From randomness of its own, too."""
    random = Random(f"whole hosts {seed} {name}")
    is_on_one = seed < FIRST_OFF_RECORD or num_workers % 2 or random.randrange(HOSTS_ONE_IN)
    return 1 if is_on_one else 2


def micro_batches(flags: Mapping[str, Any]) -> dict[str, int]:
    """So that the few requests of a simulated cluster are enough for all of its stages. flags: of who decodes"""
    has_several = flags.get("pp_size", 1) > 1 and not flags.get("disable_overlap_schedule")
    return {"pp_min_micro_batch_size": 1} if has_several else {}


def grid_of(seed: int) -> KvGrid:
    """Of the model of all servers: where they are cut alike every worker has one cell."""
    alike, context = draw_cut(seed), draw_context(seed)
    prefill, decode, num_kv_heads = draw_cuts(seed)
    if context != UNCUT:
        return KvGrid(context.pp_size, context.tp_size)
    if alike or prefill == decode:
        return KvGrid(alike.get("pp_size", 1), alike.get("tp_size", 1))
    return KvGrid(max(prefill.pp_size, decode.pp_size), num_kv_heads)
