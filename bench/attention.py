"""How fast the attention of rows that decode reads keys and values: as a share of how fast a sum reads as many bytes.

    python bench/attention.py [--threads 2] [--rounds 5] [--head-dim 64] [--libraries NAME ...] [--output FILE]

16 query heads, 8 KV heads, 20 layers, pages of 16 tokens in random order, bf16: layer after layer, as a step does, but
with nothing between them. The memory of a case is read in turn by each library and by a sum; printed are medians over
rounds. The last line is one JSON document.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from conditions import conditions

from tandem.core.values import ceil_div
from tandem.engine.native import library

HEADS, KV_HEADS, LAYERS, PAGE_SIZE = 16, 8, 20, 16
CASES = ((32, 128), (8, 1024), (32, 1024), (1, 4096))  # rows, tokens that each of them sees
SUM = "sum"
YIELDING = {"OMP_WAIT_POLICY": "PASSIVE"}  # or the sum's threads would have a core for a while after it


def main() -> None:
    options = parse()
    if not YIELDING.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **YIELDING})
    torch.set_num_threads(options.threads)
    cases = [measure(rows, context, options) for rows, context in CASES]
    document = {"bench": "attention", "head_dim": options.head_dim, "threads": options.threads, "cases": cases}
    line = json.dumps(document | conditions())
    if options.output:
        options.output.write_text(line + "\n")
    print(line)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--libraries", nargs="*", choices=library.available(), default=library.available())
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def measure(rows: int, context: int, options: argparse.Namespace) -> dict[str, object]:
    """Shares of the sum's rate by library."""
    pages_each = ceil_div(context, PAGE_SIZE)
    shape = (rows * pages_each, KV_HEADS, LAYERS, 2, PAGE_SIZE, options.head_dim)
    kv = torch.ones(shape, dtype=torch.bfloat16)
    ways: dict[str, Callable[[], object]] = {SUM: kv.view(torch.int64).sum}
    for name in options.libraries:
        ways[name] = reader(name, kv, rows, context)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, read in ways.items():
            seconds[name].append(timed(read))
    rates = {name: kv.nbytes / statistics.median(found) / 1e9 for name, found in seconds.items()}
    shares = {name: round(rates[name] / rates[SUM], 2) for name in options.libraries}
    print(f"{rows:3d} rows of {context:5d} tokens   sum {rates[SUM]:5.1f} GB/s   {shares}", flush=True)
    return {"rows": rows, "context": context, "sum_gb_per_s": round(rates[SUM], 1), "shares": shares}


def reader(name: str, kv: torch.Tensor, rows: int, context: int) -> Callable[[], None]:
    """A step's attention in all layers."""
    kernels = library.opened(name)
    num_pages, head_dim = kv.shape[0], kv.shape[-1]
    pages = np.random.default_rng(0).permutation(num_pages)
    begins = np.arange(rows) * (num_pages // rows)
    last = context - 1
    positions = np.full(rows, last)
    slots = pages[begins + last // PAGE_SIZE] * PAGE_SIZE + last % PAGE_SIZE
    arrays = [each.astype(np.int64) for each in (positions, slots, begins, pages)]
    view = library.BatchView(rows, *(each.ctypes.data for each in arrays), 0)
    q, k, v = (torch.ones(rows, heads, head_dim, dtype=kv.dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
    out = torch.empty_like(q)

    view.arrays = arrays  # it only points to them

    def read() -> None:
        for layer in range(LAYERS):
            kernels.attention(kv, view, q, k, v, out, layer=layer)

    return read


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
