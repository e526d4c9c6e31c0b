"""What weights of few bits, and KV, cost in accuracy and win in time, each against the plain model in the same run.

    python bench/quantised.py accuracy [MODEL_DIR] [--count 500]    held-out problems, of the bundled model unless told
    python bench/quantised.py speed [MODEL_DIR] [--decode 1 8 32]    decode steps, of a random Llama of 380M unless told

fp8 is a checkpoint of e4m3 with a scale for each block of 128 by 128, made of the plain one.

`speed` takes the kinds in turn and prints medians of CPU time, ratios within one round, and which share of the memory
limit a step reaches: how long reading the bytes of the weights takes at the rate at which a sum reads them.
"""

import argparse
import json
import statistics
import tempfile
from array import array
from pathlib import Path

import native
import tokenizers
import torch
from conditions import conditions
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from tandem.cli.eval import MathProblem, final_number, read_problems
from tandem.cli.model_source import find_model
from tandem.core.batch import BatchKind, BatchPlan, Join, Row
from tandem.core.values import BatchId, PageId, RequestId, ceil_div
from tandem.engine.engine import Engine
from tandem.engine.layers.quantized import LinearWeight, QuantizedWeight
from tandem.engine.weights import LoadedModel, load
from tandem.sampling import Payload, SamplingParams

KINDS = (None, "int8", "int4")
BLOCK, LARGEST = 128, 448.0  # of fp8: outputs and inputs with one scale, and the largest number
PAGE_SIZE = 16
BATCH = 50  # problems that are answered together
MOST_TOKENS = 160  # of an answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("accuracy", "speed"))
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--decode", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result = accuracy(options) if options.what == "accuracy" else speed(options)
    said = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    print(json.dumps({options.what: result, "options": said} | conditions()))


# --- accuracy ---------------------------------------------------------------------------------------------------------


def accuracy(options: argparse.Namespace) -> dict[str, float]:
    folder = options.model or find_model("tandem/mini")
    problems = read_problems(None)[: options.count]
    found = {}
    with tempfile.TemporaryDirectory() as numbers:
        models = {kind or "plain": load(folder, dtype="float32", quantization=kind) for kind in KINDS}
        models["fp8"] = load(in_fp8(folder, Path(numbers)), dtype="float32")
        models["int8 KV"] = load(folder, dtype="float32", kv_is_int8=True)
        for name, model in models.items():
            found[name] = share_of_right_answers(model, folder, problems)
            print(f"{name:8s} {found[name]:.4f} of {len(problems)}", flush=True)
    return found


def share_of_right_answers(model: LoadedModel, folder: Path, problems: list[MathProblem]) -> float:
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    right = 0
    for first in range(0, len(problems), BATCH):
        some = problems[first : first + BATCH]
        prompts = [tokenizer.encode(f"Question: {each.question}\nAnswer:").ids for each in some]
        texts = [tokenizer.decode(ids) for ids in answers(model, prompts)]
        right += sum(final_number(text) == each.answer for text, each in zip(texts, some, strict=True))
    return right / len(problems)


def answers(model: LoadedModel, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy, all together, each up to its end."""
    width = ceil_div(max(map(len, prompts)) + MOST_TOKENS + 1, PAGE_SIZE)
    engine = Engine(model, page_size=PAGE_SIZE, num_pages=width * len(prompts))
    joins, found = [], []
    for index, prompt in enumerate(prompts):
        table = tuple(PageId(index * width + page) for page in range(width))
        params = SamplingParams(temperature=0.0)
        engine.add(Payload(index, array("i", prompt).tobytes(), params, bytes(16)))
        row = Row(RequestId(index), 0, len(prompt), 0, table, samples=True)
        outcome = engine.run(BatchPlan(BatchId(0), 0, BatchKind.PREFILL, rows=(row,)))
        joins.append(Join(RequestId(index), 0, table))
        found.append(array("i", outcome.tokens).tolist())
    for step in range(MOST_TOKENS - 1):
        joining = tuple(joins) if step == 0 else ()
        outcome = engine.run(BatchPlan(BatchId(step), step, BatchKind.DECODE, decodes=True, join=joining))
        for ids, token in zip(found, array("i", outcome.tokens), strict=True):
            ids.append(token)
        if all(set(ids) & set(model.eos_ids) for ids in found):
            break
    engine.close()
    return [ids[: next((at for at, id in enumerate(ids) if id in model.eos_ids), None)] for ids in found]


def in_fp8(source: Path, folder: Path) -> Path:
    """The same model, its linear layers as `fp8` has them."""
    tensors = load_file(source / "model.safetensors")
    for name in [each for each in tensors if each.endswith("_proj.weight")]:
        plain = tensors[name].float()
        blocks = [-(-size // BLOCK) for size in plain.shape]
        filled = functional.pad(plain, (0, blocks[1] * BLOCK - plain.shape[1], 0, blocks[0] * BLOCK - plain.shape[0]))
        scales = filled.view(blocks[0], BLOCK, blocks[1], BLOCK).abs().amax(dim=(1, 3)) / LARGEST
        of_rows, of_columns = (torch.arange(size) // BLOCK for size in plain.shape)
        tensors[name] = (plain / scales[of_rows][:, of_columns]).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# --- speed ------------------------------------------------------------------------------------------------------------


def speed(options: argparse.Namespace) -> list[dict[str, object]]:
    with tempfile.TemporaryDirectory() as folder:
        (plain := Path(folder) / "plain").mkdir()
        (numbers := Path(folder) / "fp8").mkdir()
        path = options.model or native.random_llama(plain)
        models = {kind or "bfloat16": load(path, dtype="bfloat16", quantization=kind) for kind in KINDS}
        models["fp8"] = load(in_fp8(path, numbers), dtype="bfloat16")
        for kind in KINDS[1:]:
            models[f"{kind} in rows"] = load(path, dtype="bfloat16", quantization=kind, packing_share=0.0)
        return [case(models, rows, options) for rows in options.decode]


def case(models: dict[str, LoadedModel], rows: int, options: argparse.Namespace) -> dict[str, object]:
    """Every kind in turn, `rounds` times: ms of CPU of a step, and of reading what it reads."""
    found: dict[str, list[float]] = {name: [] for name in models}
    reads: list[float] = []  # ms for a GiB
    values = torch.ones(1 << 27, dtype=torch.int64)
    for _ in range(options.rounds):
        for name, model in models.items():
            found[name].append(native.decode(model, rows, options.context)[1])
        reads.append(native.timed(values.sum)[1])
    result: dict[str, object] = {"rows": rows, "read_gib_ms": statistics.median(reads)}
    plain = found["bfloat16"]
    for name, model in models.items():
        ratio = statistics.median(one / own for one, own in zip(plain, found[name], strict=True))
        limit = step_bytes(model) / (1 << 30) * statistics.median(reads)
        share = limit / statistics.median(found[name])
        own_ms = statistics.median(found[name])
        print(f"decode {rows:3d}  {name:12s} {own_ms:8.1f} ms  {ratio:5.2f}x  {share:4.0%} of read")
        result[name] = {"cpu_ms": own_ms, "ratio": ratio, "share_of_read": share}
    return result


def step_bytes(model: LoadedModel) -> int:
    """Of the weights that a decode step reads: all linear layers and the head."""
    module = model.module
    total = bytes_of(module.head.weight)  # type: ignore[attr-defined]  # a decoder has one
    for block in module.blocks:  # type: ignore[attr-defined]  # a decoder has them
        linears = (block.qkv.q_proj, block.qkv.k_proj, block.qkv.v_proj, block.o_proj, block.mlp.down_proj)
        for linear in (*linears, block.mlp.gate_up.gate_proj, block.mlp.gate_up.up_proj):
            total += bytes_of(linear.weight)
    return total


def bytes_of(weight: LinearWeight) -> int:
    if isinstance(weight, QuantizedWeight):
        return weight.num_bytes
    return weight.nbytes if isinstance(weight, Tensor) else weight.values.nbytes


if __name__ == "__main__":
    main()
