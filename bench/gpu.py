"""What a device makes of the engine: does it say what transformers says, does a pair say what one server says, and how
much of what the device can do do decoding and prompts reach.

    bench/gpu.sh                    on an NVIDIA device, in less than ten minutes; without one a line says so, and 2 is
                                    the exit code
    bench/gpu.sh --tiny --device cpu    the same steps on a tiny model, to see that they run; its figures say nothing

The model is a random Llama of 1B parameters in bf16 (`bench/peers/checkpoint.py`). In this order:

    limits    bytes per second of a large copy on the device, read and written, and bf16 FLOP per second of a large
              product of matrices: the *roofline* is what a step would take if it only read what it has to at the first
              speed, or only multiplied at the second, whichever is longer
    servers   a unified one, and a prefill and a decode server behind a router: greedy tokens of the same prompts
    parity    of the unified server's tokens with transformers on the device, in bf16: after each of our tokens but the
              first, given all before, which one it would have said. Where that is another one, `gap` is how far ours is
              behind, as a share of how far the best score is above the mean of all; beyond NEAR_TIE it is wrong
    decode    a step of so many rows with `context` tokens each: it reads all weights and all keys and values
    prefill   so many prompts of `context` tokens, in batches of BATCH_TOKENS: it multiplies every token by all weights

`share` is the roofline's time divided by ours. The last line is one JSON document.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import torch
from bench.conditions import conditions
from bench.peers import checkpoint
from bench.peers.checkpoint import Shape
from transformers import AutoModelForCausalLM

from tandem.cli.failure import CommandFailed
from tandem.cli.fleet import Fleet, serve_words, start_pd
from tandem.cli.ports import free_ports
from tandem.core.batch import BatchKind, BatchPlan, Join, Row
from tandem.core.values import BatchId, PageId, RequestId, ceil_div
from tandem.engine.engine import Engine
from tandem.engine.weights import LoadedModel, load
from tandem.sampling import Payload, SamplingParams

NO_DEVICE = 2  # exit code
PAGE_SIZE = 16
BATCH_TOKENS = 8192
ROUNDS = 5
NEAR_TIE = 0.02
START_S = 180.0
SEED = 7


@dataclass(frozen=True, slots=True)
class Size:
    shape: Shape
    rows: tuple[int, ...]
    context: int  # tokens of a prompt
    steps: int  # of decoding
    asked: int  # prompts for the servers
    copied_bytes: int
    side: int  # of the matrices that are multiplied


SIZES = {
    "1b": Size(Shape(32000, 2048, 8192, 16, 32, 8), (1, 8, 64, 256), 512, 40, 8, 1 << 30, 8192),
    "tiny": Size(checkpoint.SHAPES["6m"], (1, 3), 40, 4, 2, 1 << 22, 256),
}


def main() -> int:
    options = parse()
    if options.device != "cpu" and not torch.cuda.is_available():
        print("no CUDA device: nothing was measured")
        return NO_DEVICE
    if options.device == "cpu" and not options.tiny:
        print("without a device only --tiny is measured, and its figures say nothing")
        return NO_DEVICE
    name = "tiny" if options.tiny else "1b"
    size = SIZES[name]
    with tempfile.TemporaryDirectory(prefix="tandem-gpu-") as folder:
        model_dir = checkpoint.make(size.shape, Path(folder) / "model")
        limits = measured_limits(size, options.device)
        tell("limits", limits)
        prompts, answers, pair = ask_servers(model_dir, size, options.device, Path(folder))
        tell("pair", pair)
        parity = against_transformers(model_dir, prompts, answers, options.device)
        tell("parity", parity)
        model = load(model_dir, dtype="bfloat16", device=options.device)
        steps = []
        for rows in size.rows:
            steps.append(of_engine(model, size, rows, limits))
            tell(f"{rows} rows", steps[-1])
    found = {"limits": limits, "parity": parity, "pair": pair, "engine": steps, "model": name}
    print(json.dumps({"bench": "gpu", **found, "conditions": conditions() | on_device(options.device)}))
    return 0 if parity["wrong"] == 0 and pair.get("wrong", 0) == 0 else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and few rows")
    return parser.parse_args()


def tell(what: str, found: object) -> None:
    print(f"{what}: {json.dumps(found)}", flush=True)


def on_device(device: str) -> dict[str, str]:
    """For the conditions."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    name = torch.cuda.get_device_name(device) if device != "cpu" else "CPU"
    return {"device": name, "torch": torch.__version__, "triton": triton}


def seconds_of(work: Callable[[], object], device: str) -> float:
    """Median of several rounds after a warm-up, until the device has done it."""
    taken = []
    for _ in range(ROUNDS + 1):
        began = time.perf_counter()
        work()
        if device != "cpu":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def measured_limits(size: Size, device: str) -> dict[str, float]:
    source = torch.zeros(size.copied_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    factor = torch.ones(size.side, size.side, dtype=torch.bfloat16, device=device)
    copy_s = seconds_of(lambda: target.copy_(source), device)
    product_s = seconds_of(lambda: factor @ factor, device)
    return {"bytes_per_s": 2 * size.copied_bytes / copy_s, "flop_per_s": 2 * size.side**3 / product_s}


# --- servers ---------------------------------------------------------------------------------------------------------


def ask_servers(
    model_dir: Path, size: Size, device: str, folder: Path
) -> tuple[list[list[int]], list[list[int]], dict[str, object]]:
    """Prompts, what a unified server says to them, and whether a pair says the same."""
    draw = random.Random(SEED)
    prompts = [[draw.randrange(1, size.shape.vocab_size) for _ in range(size.context)] for _ in range(size.asked)]
    flags = ["--device", device, "--dtype", "bfloat16"]
    flags += ["--max-total-tokens", str(2 * size.asked * (size.context + size.steps))]
    (port,) = free_ports(1)
    with Fleet(folder, engines=1) as fleet:
        unified = fleet.start("unified", serve_words(str(model_dir), port, *flags), port=port)
        fleet.wait_ready(timeout_s=START_S)
        answers = [asked(unified.url, prompt, size.steps) for prompt in prompts]
        alone, together = answers, all_at_once(unified.url, prompts, size.steps)
    found: dict[str, object] = {"unified_together": count_of_others(alone, together)}
    try:
        with Fleet(folder, engines=2) as fleet:
            router = start_pd(fleet, str(model_dir), prefills=1, decodes=1, router_port=0, server_flags=flags)
            fleet.wait_ready(timeout_s=START_S)
            apart = [asked(router.url, prompt, size.steps) for prompt in prompts]
    except CommandFailed as failure:
        return prompts, answers, found | {"not_there": str(failure)}
    return prompts, answers, found | {"prompts": len(prompts), "wrong": count_of_others(alone, apart)}


def asked(url: str, prompt: list[int], tokens: int) -> list[int]:
    """Greedily."""
    parameters = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    reply = httpx.post(f"{url}/generate", json={"input_ids": prompt, "sampling_params": parameters}, timeout=120)
    reply.raise_for_status()
    return reply.json()["output_ids"]


def all_at_once(url: str, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: asked(url, prompt, tokens), prompts))


def count_of_others(some: list[list[int]], others: list[list[int]]) -> int:
    return sum(one != other for one, other in zip(some, others, strict=True))


@torch.inference_mode()
def against_transformers(
    model_dir: Path, prompts: list[list[int]], answers: list[list[int]], device: str
) -> dict[str, float]:
    theirs: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    theirs.to(device).eval()
    gaps = []
    for prompt, answer in zip(prompts, answers, strict=True):
        text = torch.tensor([prompt + answer[:-1]], device=device)
        scores = theirs(text).logits[0, len(prompt) - 1 :].float().cpu()
        best, ours = scores.max(dim=-1).values, scores.gather(1, torch.tensor(answer)[:, None])[:, 0]
        gaps += ((best - ours) / (best - scores.mean(dim=-1))).tolist()
    others = [gap for gap in gaps if gap > 0]
    wrong = sum(gap > NEAR_TIE for gap in others)
    return {"tokens": len(gaps), "near_ties": len(others) - wrong, "wrong": wrong, "largest_gap": max(gaps)}


# --- the engine ------------------------------------------------------------------------------------------------------


def of_engine(model: LoadedModel, size: Size, rows: int, limits: dict[str, float]) -> dict[str, object]:
    """Prompts of `rows` requests, then their decoding."""
    pages = ceil_div(size.context + size.steps + 2, PAGE_SIZE)
    graph_rows = rows if model.device != "cpu" else 0
    engine = Engine(model, page_size=PAGE_SIZE, num_pages=rows * pages, graph_rows=graph_rows)
    tables = [tuple(PageId(row * pages + index) for index in range(pages)) for row in range(rows)]
    prompts_s = [prefilled(engine, size, tables, first=round_ * rows) for round_ in range(3)][-1]
    steps_s, is_graph = decoded(engine, size, tables, first=2 * rows)
    kernels = engine.kernels
    engine.close()
    shape, tokens = size.shape, rows * size.context
    attended = 2 * shape.layers * shape.heads * shape.head_dim * size.context  # FLOP per token: half of all keys
    prompt_flop = tokens * (2 * layer_values(shape) + attended) + rows * 2 * head_values(shape)
    mean_context = size.context + size.steps // 2
    step_bytes = 2 * shape.matrix_values() + rows * mean_context * shape.kv_bytes()
    step_flop = rows * (2 * shape.matrix_values() + 2 * attended)
    return {
        "rows": rows,
        "context": size.context,
        "kernels": kernels,
        "cuda_graph": is_graph,
        "decode_tokens_per_s": round(rows / steps_s, 1),
        "decode_share": share(limits, seconds=steps_s, read=step_bytes, flop=step_flop),
        "prefill_tokens_per_s": round(tokens / prompts_s, 1),
        "prefill_share": share(limits, seconds=prompts_s, read=2 * layer_values(shape), flop=prompt_flop),
    }


def head_values(shape: Shape) -> int:
    return shape.vocab_size * shape.hidden_size


def layer_values(shape: Shape) -> int:
    return shape.matrix_values() - head_values(shape)


def share(limits: dict[str, float], *, seconds: float, read: int, flop: int) -> float:
    return round(max(read / limits["bytes_per_s"], flop / limits["flop_per_s"]) / seconds, 3)


def prefilled(engine: Engine, size: Size, tables: list[tuple[PageId, ...]], *, first: int) -> float:
    """Seconds for all prompts, of requests from `first` on; those before them are forgotten."""
    engine.forget(range(first))
    for row in range(len(tables)):
        draw = random.Random(SEED + first + row)
        prompt = array("i", (draw.randrange(size.shape.vocab_size) for _ in range(size.context)))
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        engine.add(Payload(request=first + row, tokens=prompt.tobytes(), sampling=params, last_hash=bytes(16)))
    waiting = iter([Row(RequestId(first + i), 0, size.context, 0, table, True) for i, table in enumerate(tables)])
    began = time.perf_counter()
    while rows := tuple(islice(waiting, max(1, BATCH_TOKENS // size.context))):
        engine.run(BatchPlan(BatchId(0), 0, BatchKind.PREFILL, rows=rows))
    return time.perf_counter() - began


def decoded(engine: Engine, size: Size, tables: list[tuple[PageId, ...]], *, first: int) -> tuple[float, bool]:
    """Seconds of a step, and whether it was a CUDA graph."""
    joins = tuple(Join(RequestId(first + row), 0, table) for row, table in enumerate(tables))
    taken, is_graph = [], False
    for step in range(size.steps):
        plan = BatchPlan(BatchId(step), step, BatchKind.DECODE, decodes=True, join=joins if step == 0 else ())
        began = time.perf_counter()
        outcome = engine.run(plan)
        taken.append(time.perf_counter() - began)
        is_graph = outcome.cuda_graph is True
    return statistics.median(taken[len(taken) // 4 :]), is_graph


if __name__ == "__main__":
    sys.exit(main())
