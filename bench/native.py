"""What the native kernels gain: the same steps by torch and by a library, in turn, in one run; the result is ratios.

    python bench/native.py [MODEL_DIR] [--dtype bfloat16] [--threads 1] [--rounds 3] [--prefill 512] [--decode 1 8 32]

Without MODEL_DIR a random Llama of 380M parameters is made in a temporary folder (needs transformers). Threads wait
as those of a worker that owns its cores. Of every case the time on the clock and the CPU time of the engine are
printed, as medians over rounds, with the range of the ratio of CPU times: what else runs on the machine shows in the
first, and less in the second. `read` is how fast the weights could be read: sums over as many bytes, in the same run;
a decode step of one request cannot be faster.

`narrow` is torch that multiplies bf16 as it is; where the processor has no instructions for that, we widen weights
(`engine/layers/torch_linear.py`).
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any  # keyword arguments of transformers

import torch
from conditions import conditions
from engine_step import add_prompt, prefill
from transformers import LlamaConfig, LlamaForCausalLM

from tandem.core.batch import BatchKind, BatchPlan, Join
from tandem.core.values import BatchId, PageId, RequestId, ceil_div
from tandem.engine.engine import Engine
from tandem.engine.layers import torch_linear
from tandem.engine.layers.torch_linear import WIDENED_ROWS
from tandem.engine.model_config import page_tokens
from tandem.engine.native import library
from tandem.engine.weights import LoadedModel, load
from tandem.server.processes import SPINNING

STEPS = 4
TORCH = library.OFF
NARROW = "narrow"
Times = tuple[float, float]  # ms on the clock, ms of CPU


def main() -> None:
    options = parse()
    if not SPINNING.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **SPINNING})
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        names = (TORCH, NARROW, *(options.libraries or library.available()[:1]))
        path = options.model or random_llama(Path(folder))
        models = {name: loaded(path, name, options.dtype) for name in names}
        cases = [("decode", rows) for rows in options.decode] + [("prefill", tokens) for tokens in options.prefill]
        results = [measure(models, kind, size, options) for kind, size in cases]
        read = statistics.median(read_weights(models[TORCH]) for _ in range(options.rounds))
    print(f"read     {read:9.1f} ms")
    print(
        json.dumps(
            {"cases": results, "read_ms": read, "options": vars(options) | {"model": str(options.model)}} | conditions()
        )
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--context", type=int, default=128, help="tokens in the cache when decoding starts")
    parser.add_argument("--decode", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--prefill", type=int, nargs="*", default=[512, 2048])
    parser.add_argument("--libraries", nargs="*", choices=library.available())
    return parser.parse_args()


def random_llama(folder: Path) -> Path:
    sizes: dict[str, Any] = {
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 20,
    }
    heads: dict[str, Any] = {"num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 4096}
    torch.set_default_dtype(torch.bfloat16)
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(folder)
    torch.set_default_dtype(torch.float32)
    return folder


def loaded(path: Path, name: str, dtype: str) -> LoadedModel:
    """As this library has its weights: packed, or in rows."""
    switch_to(name)
    return load(path, dtype=dtype)


def switch_to(name: str) -> None:
    os.environ[library.SWITCH] = TORCH if name == NARROW else name


def measure(models: dict[str, LoadedModel], kind: str, size: int, options: argparse.Namespace) -> dict[str, object]:
    """Every library in turn, `rounds` times."""
    found: dict[str, list[Times]] = {name: [] for name in models}
    for _ in range(options.rounds):
        for name, model in models.items():
            switch_to(name)
            torch_linear.WIDENED_ROWS = sys.maxsize if name == NARROW else WIDENED_ROWS
            found[name].append(decode(model, size, options.context) if kind == "decode" else prompt(model, size))
    result: dict[str, object] = {"kind": kind, "size": size}
    for name in models:
        wall, cpu = (statistics.median(times[part] for times in found[name]) for part in (0, 1))
        ratios = sorted(plain[1] / own[1] for plain, own in zip(found[TORCH], found[name], strict=True))
        print(
            f"{kind:8s} {size:5d}  {name:12s} {wall:9.1f} ms   CPU {cpu:9.1f} ms   "
            f"{statistics.median(ratios):6.2f}x of torch ({ratios[0]:.2f} - {ratios[-1]:.2f})",
            flush=True,
        )
        result[name] = {"ms": wall, "cpu_ms": cpu, "ratios": ratios}
    return result


def timed(function: object, *args: object) -> Times:
    assert callable(function)
    clock, cpu = time.perf_counter(), time.process_time()
    function(*args)
    return 1e3 * (time.perf_counter() - clock), 1e3 * (time.process_time() - cpu)


def decode(model: LoadedModel, rows: int, context: int) -> Times:
    """Median of some steps."""
    page_size = page_tokens(model.config)
    pages = ceil_div(context + STEPS + 2, page_size)
    engine = Engine(model, page_size=page_size, num_pages=rows * pages)
    joins = []
    for row in range(rows):
        table = tuple(PageId(row * pages + index) for index in range(pages))
        add_prompt(engine, row, context, 0.0)
        prefill(engine, row, context, table)
        joins.append(Join(RequestId(row), 0, table))
    plans = [
        BatchPlan(BatchId(step), step, BatchKind.DECODE, decodes=True, join=tuple(joins) if step == 0 else ())
        for step in range(STEPS)
    ]
    times = [timed(engine.run, plan) for plan in plans][1:]
    engine.close()
    return statistics.median(wall for wall, _ in times), statistics.median(cpu for _, cpu in times)


def prompt(model: LoadedModel, tokens: int) -> Times:
    page_size = page_tokens(model.config)
    pages = ceil_div(tokens + 1, page_size)
    engine = Engine(model, page_size=page_size, num_pages=pages)
    add_prompt(engine, 0, tokens, 0.0)
    times = timed(prefill, engine, 0, tokens, tuple(PageId(index) for index in range(pages)))
    engine.close()
    return times


def read_weights(model: LoadedModel) -> float:
    """ms for a sum over as many bytes."""
    values = torch.ones(model.weight_bytes // 8, dtype=torch.int64)
    return timed(values.sum)[0]


if __name__ == "__main__":
    main()
