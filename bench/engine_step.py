"""What one step of the engine costs: ms per decode step by rows, prefill tokens per second by prompt length.

    python bench/engine_step.py MODEL_DIR [--dtype float32] [--threads 1] [--context 256] [--deterministic]

Each number is the median of several rounds after a warm-up, with the spread as (p90 - p10) / median. Prints a table
and one JSON line with the conditions.
"""

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from array import array
from pathlib import Path

import torch

from tandem.core.batch import BatchKind, BatchPlan, Join, Row
from tandem.core.values import BatchId, PageId, RequestId, ceil_div
from tandem.engine import determinism
from tandem.engine.engine import Engine
from tandem.engine.weights import LoadedModel, load
from tandem.sampling import Payload, SamplingParams

PAGE_SIZE = 16
CHUNK_TOKENS = 512
DECODE_ROWS = (1, 8, 32, 64)
PROMPT_TOKENS = (128, 512, 4096)
DECODE_STEPS = 40
PREFILL_ROUNDS = 5
WORKLOAD_SEED = 7


def main() -> None:
    options = parse()
    if options.deterministic and not determinism.environment().items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **determinism.environment()})
    torch.set_num_threads(options.threads)
    model = load(options.model, dtype=options.dtype, device="cpu")
    decode = [decode_step(model, rows, options) for rows in DECODE_ROWS]
    prefill = [prefill_rate(model, n, options) for n in PROMPT_TOKENS if n <= model.max_context]
    for row in decode:
        print(f"decode  {row['rows']:5d} rows    {row['ms_per_step']:9.3f} ms/step   spread {row['spread']:.0%}")
    for row in prefill:
        print(
            f"prefill {row['tokens']:5d} tokens  {row['tokens_per_second']:9.0f} tok/s     spread {row['spread']:.0%}"
        )
    print(json.dumps({"decode": decode, "prefill": prefill, "conditions": conditions(model, options)}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=256, help="tokens in the cache when decoding starts")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--deterministic", action="store_true")
    return parser.parse_args()


def decode_step(model: LoadedModel, rows: int, options: argparse.Namespace) -> dict[str, float]:
    """All rows hold `--context` tokens of random content at the start."""
    pages = ceil_div(options.context + DECODE_STEPS + 2, PAGE_SIZE)
    engine = Engine(model, page_size=PAGE_SIZE, num_pages=rows * pages, deterministic=options.deterministic)
    joins = []
    for row in range(rows):
        table = tuple(PageId(row * pages + index) for index in range(pages))
        add_prompt(engine, row, options.context, options.temperature)
        prefill(engine, row, options.context, table)
        joins.append(Join(RequestId(row), 0, table))
    milliseconds = []
    for step in range(DECODE_STEPS):
        plan = BatchPlan(BatchId(step), step, BatchKind.DECODE, decodes=True, join=tuple(joins) if step == 0 else ())
        began = time.perf_counter()
        engine.run(plan)
        milliseconds.append(1e3 * (time.perf_counter() - began))
    engine.close()
    median, spread = summarize(milliseconds[DECODE_STEPS // 4 :])
    return {"rows": rows, "ms_per_step": round(median, 3), "spread": round(spread, 3)}


def prefill_rate(model: LoadedModel, tokens: int, options: argparse.Namespace) -> dict[str, float]:
    """One prompt in chunks, no cache hits."""
    pages = ceil_div(tokens + 1, PAGE_SIZE)
    engine = Engine(model, page_size=PAGE_SIZE, num_pages=pages, deterministic=options.deterministic)
    table = tuple(PageId(index) for index in range(pages))
    rates = []
    for request in range(PREFILL_ROUNDS + 1):
        add_prompt(engine, request, tokens, options.temperature)
        began = time.perf_counter()
        prefill(engine, request, tokens, table)
        rates.append(tokens / (time.perf_counter() - began))
        engine.forget([request])
    engine.close()
    median, spread = summarize(rates[1:])
    return {"tokens": tokens, "tokens_per_second": round(median, 1), "spread": round(spread, 3)}


def add_prompt(engine: Engine, request: int, tokens: int, temperature: float) -> None:
    draw = random.Random(WORKLOAD_SEED + request)
    prompt = array("i", (draw.randrange(engine.model.config.vocab_size) for _ in range(tokens)))
    params = SamplingParams(temperature=temperature, seed=request, ignore_eos=True)
    engine.add(Payload(request=request, tokens=prompt.tobytes(), sampling=params, last_hash=bytes(16)))


def prefill(engine: Engine, request: int, tokens: int, table: tuple[PageId, ...]) -> None:
    for start in range(0, tokens, CHUNK_TOKENS):
        stop = min(tokens, start + CHUNK_TOKENS)
        row = Row(RequestId(request), start, stop, 0, table, samples=stop == tokens)
        engine.run(BatchPlan(BatchId(0), 0, BatchKind.PREFILL, rows=(row,)))


def summarize(values: list[float]) -> tuple[float, float]:
    ordered = sorted(values)
    median = statistics.median(ordered)
    low, high = ordered[len(ordered) // 10], ordered[(9 * len(ordered)) // 10]
    return median, (high - low) / median


def conditions(model: LoadedModel, options: argparse.Namespace) -> dict[str, object]:
    return {
        "model": str(options.model),
        "dtype": model.layout_fields["dtype"],
        "threads": options.threads,
        "context_tokens": options.context,
        "page_size": PAGE_SIZE,
        "chunk_tokens": CHUNK_TOKENS,
        "temperature": options.temperature,
        "deterministic": options.deterministic,
        "workload_seed": WORKLOAD_SEED,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "load_average": round(os.getloadavg()[0], 2),
    }


if __name__ == "__main__":
    main()
