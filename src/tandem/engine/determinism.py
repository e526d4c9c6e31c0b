"""What has to be in the environment before torch is imported, so that sums do not depend on the number of threads.

`--deterministic` promises that a row's logits depend on its own tokens only. `rows.py` gives every product one shape;
how a library sums inside of a product is the library's affair, and has to be fixed there:

    MKL     cuts fp32 products along the sum when that suits its threads, and rounds by how arrays are aligned.
            MKL_CBWR=AVX2,STRICT rules out both, and makes every Intel processor from AVX2 on sum in the same order.
            MKL takes it for its default branch where a processor has no AVX2 or is of another maker.
    oneDNN  (bf16) has no such switch, and other BLAS libraries neither.

So what holds on this machine is measured at start: `self_check.py`.

Without torch: the process that starts the worker imports this.
"""

import os

LIBRARIES = {"MKL_CBWR": "AVX2,STRICT"}


def environment() -> dict[str, str]:
    """For a process that is about to compute deterministically. What the user has set is left as it is."""
    return {name: os.environ.get(name, value) for name, value in LIBRARIES.items()}
