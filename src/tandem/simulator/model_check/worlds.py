"""The small worlds that are searched, and why each is there.

All but the two with a depth below are searched to their very end: every interleaving, every fault at every point.
"""

from msgspec import structs

from tandem.core.settings import AllocationPolicy, OptimisticPolicy, PrefetchPolicy
from tandem.core.values import SECOND, Nanos
from tandem.simulator.model_check.world import Fault, Small

TO_THE_END = 200

TIERS = Small(
    "tiers",
    TO_THE_END,
    prompts=(5, 5, 5),
    stories=(1, 2, 1),
    in_turn=True,
    max_new_tokens=1,
    prefix_cache=True,
    prefill_pages=2,
    decode_pages=2,
    host_pages=2,
    faults=((Fault.ABORT, 1),),
)

STORAGE = structs.replace(
    TIERS,
    name="storage",
    prompts=(5, 5),
    stories=(1, 1),
    prefetch=PrefetchPolicy.WAIT_COMPLETE,
    faults=((Fault.RESTART, 1),),
)

SAMPLES = Small("samples", TO_THE_END, prompts=(5, 5), same_prompt=True, max_new_tokens=1, prefix_cache=True)

LATE = Small(
    "late pages",
    TO_THE_END,
    prompts=(5, 3),
    max_new_tokens=1,
    decode_pages=2,
    allocation=AllocationPolicy.PREFILL_COMPLETE,
)

URGENT = Small(
    "urgent",
    TO_THE_END,
    prompts=(3, 3),
    priorities=(0, 1),
    max_new_tokens=3,
    max_running=1,
    result_slots=1,
    window_depth=2,
    optimistic=OptimisticPolicy.PARK,
)

SMALL_WORLDS = (
    # Two requests, and any half of them leaves, or never comes, at any moment.
    Small("aborts", TO_THE_END, prompts=(3, 3), faults=((Fault.ABORT, 1),)),
    # Neither waits for READY, and there are pages for one; who has run too early gives them back.
    Small(
        "retry",
        12,
        prompts=(5, 3),
        max_new_tokens=1,
        optimistic=OptimisticPolicy.RETRY,
        window_depth=2,
        prefix_cache=True,
        prefill_pages=2,
        faults=((Fault.ABORT, 1),),
    ),
    # Three chunks of one prompt, one of them in flight when the pages are given back.
    Small(
        "chunks",
        TO_THE_END,
        prompts=(9,),
        optimistic=OptimisticPolicy.RETRY,
        window_depth=2,
        prefix_cache=True,
        faults=((Fault.ABORT, 1), (Fault.LOSS, 1), (Fault.FAILURE, 1)),
    ),
    # One result slot for two: who is parked has to yield it.
    Small(
        "park",
        14,
        prompts=(5, 3),
        optimistic=OptimisticPolicy.PARK,
        window_depth=2,
        prefix_cache=True,
        prefill_pages=3,
        result_slots=1,
        faults=((Fault.ABORT, 1),),
    ),
    # Two pages of one request, while messages get lost or come twice and timers fire too early.
    Small(
        "messages",
        TO_THE_END,
        prompts=(5,),
        faults=((Fault.LOSS, 2), (Fault.COPY, 1), (Fault.HASTE, 1), (Fault.ABORT, 1)),
    ),
    # Leases and deadlines end while everything else is slow.
    Small(
        "timers",
        TO_THE_END,
        prompts=(5,),
        window_depth=2,
        lease_ns=Nanos(SECOND * 3 // 2),
        timeout_ns=Nanos(SECOND * 5 // 2),
        faults=((Fault.HASTE, 4),),
    ),
    # Batches, pulls and look-ups fail, replicas die.
    Small(
        "failures",
        TO_THE_END,
        prompts=(5,),
        learn_peer_tries=1,
        faults=((Fault.FAILURE, 2), (Fault.RESTART, 1), (Fault.ABORT, 1)),
    ),
    # The halves have rendered their prompts at two times; when prefill hears so, one is computed and one is queued.
    Small(
        "times",
        TO_THE_END,
        prompts=(4, 3),
        times=(1, 2),
        max_new_tokens=1,
        optimistic=OptimisticPolicy.PARK,
        max_running=1,
    ),
    # ... while messages get lost or come twice, batches fail and replicas die.
    Small(
        "times and failures",
        TO_THE_END,
        prompts=(5,),
        times=(1, 2),
        max_new_tokens=1,
        optimistic=OptimisticPolicy.RETRY,
        window_depth=2,
        prefix_cache=True,
        faults=((Fault.LOSS, 1), (Fault.COPY, 1), (Fault.FAILURE, 1), (Fault.RESTART, 1), (Fault.ABORT, 1)),
    ),
    # Both run on decode, and there are pages for one: retraction.
    Small("pressure", TO_THE_END, prompts=(4, 4), decode_pages=3, max_new_tokens=3, prefix_cache=True),
    # Both run on decode, and the next batch is launched before the last one has returned.
    Small("overlap", TO_THE_END, prompts=(4, 4), window_depth=2, max_new_tokens=3),
    # Both run on decode, each in a micro-batch of its own, and there are pages for one.
    Small(
        "stages",
        TO_THE_END,
        prompts=(4, 4),
        window_depth=2,
        num_micro_batches=2,
        decode_pages=3,
        max_new_tokens=3,
    ),
    # Tokens are found in twos: one prompt ends within a block, both answers do, and there are pages for one on decode.
    Small(
        "blocks",
        TO_THE_END,
        prompts=(5, 4),
        window_depth=2,
        block_tokens=2,
        decode_pages=3,
        max_new_tokens=4,
        prefix_cache=True,
    ),
    # The same beginning twice: decode holds the whole second prompt, prefill a part of it, and pages are evicted.
    Small("cached", TO_THE_END, prompts=(5, 4), same_prompt=True, prefix_cache=True, prefill_pages=3, decode_pages=3),
    # The first prompt comes again when the second has pushed it out to host memory: it is loaded, on both sides, or
    # whoever waits for it leaves ...
    TIERS,
    # ... or a copy, a batch or a pull fails.
    structs.replace(TIERS, name="tiers and failures", faults=((Fault.FAILURE, 1),)),
    # The same prompt comes again when a side has died in between: its page is in storage.
    STORAGE,
    # Two samples of one prompt: one is pulled, the other takes over what has come.
    SAMPLES,
    # Decode has pages for one of two prompts, and reserves them when they are computed ...
    LATE,
    # ... or not, because messages, batches and pulls get lost, replicas die, or a half leaves.
    structs.replace(
        LATE,
        name="late pages and failures",
        prompts=(5,),
        faults=((Fault.LOSS, 1), (Fault.COPY, 1), (Fault.FAILURE, 1), (Fault.RESTART, 1), (Fault.ABORT, 1)),
    ),
    # One slot on each side, and the second request is more urgent: it overtakes and pushes back.
    URGENT,
    # One slot on each side: the second request waits in a queue when its peer dies.
    Small("queued", TO_THE_END, prompts=(3, 3), decode_pages=2, max_running=1, faults=((Fault.RESTART, 1),)),
)

# Searched where there is time, in `make hunt`.
LARGE_WORLDS = (
    structs.replace(LATE, name="late pages and aborts", faults=((Fault.ABORT, 1),)),
    structs.replace(LATE, name="late pages and restarts", faults=((Fault.RESTART, 1),)),
    structs.replace(LATE, name="late samples", prompts=(5, 5), same_prompt=True, prefix_cache=True),
    structs.replace(URGENT, name="urgent and aborts", max_new_tokens=2, faults=((Fault.ABORT, 1),)),
    structs.replace(SAMPLES, name="samples and aborts", faults=((Fault.ABORT, 1),)),
    structs.replace(SAMPLES, name="samples and failures", faults=((Fault.FAILURE, 1),)),
    structs.replace(TIERS, name="tiers and both", faults=((Fault.ABORT, 1), (Fault.FAILURE, 1))),
    structs.replace(STORAGE, name="storage and all", faults=((Fault.RESTART, 1), (Fault.FAILURE, 1), (Fault.ABORT, 1))),
)
