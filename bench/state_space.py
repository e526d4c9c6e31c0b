"""State-space layers in most of a model: ours with native kernels, ours in torch, and transformers, in turn.

    python bench/state_space.py [MODEL_DIR] [--decode 1 8] [--prefill 512] [--rounds 5] [--threads 2]

Unless told, the model is random and has the shape of Granite 4 hybrid of 350M parameters, in bfloat16. Ratios are of
transformers' time to ours, within one round. Also: what a page takes, and how much of it is state.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import native
import torch
from conditions import conditions
from transformers import AutoModelForCausalLM, GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM, PreTrainedModel

from tandem.engine.kv_memory import page_bytes
from tandem.engine.model_config import page_tokens
from tandem.engine.native import library
from tandem.engine.weights import LoadedModel

ATTENDING = (10, 13, 17, 27)  # of 32 layers
PEER = "transformers"
CONTEXT = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--decode", type=int, nargs="*", default=[1, 8], help="rows")
    parser.add_argument("--prefill", type=int, nargs="*", default=[512], help="tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        path = options.model or random_granite(Path(folder))
        ours = {name: native.loaded(path, name, "auto") for name in (*library.available()[:1], library.OFF)}
        theirs = AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()
        cases = [("decode", rows) for rows in options.decode] + [("prefill", tokens) for tokens in options.prefill]
        found = [measure(ours, theirs, kind, size, options.rounds) for kind, size in cases]
    setting = {
        "rounds": options.rounds,
        "threads": options.threads,
        "context": CONTEXT,
        "libraries": library.available(),
    }
    print(json.dumps({"cases": found, "page": page_of(ours[library.OFF])} | setting | conditions()))


def random_granite(folder: Path) -> Path:
    sizes: dict[str, Any] = {
        "vocab_size": 100352,
        "hidden_size": 768,
        "shared_intermediate_size": 2048,
        "num_hidden_layers": 32,
        "layer_types": ["attention" if layer in ATTENDING else "mamba" for layer in range(32)],
        "num_local_experts": 0,
        "tie_word_embeddings": True,
    }
    heads: dict[str, Any] = {"num_attention_heads": 12, "num_key_value_heads": 4, "position_embedding_type": "nope"}
    states: dict[str, Any] = {"mamba_n_heads": 48, "mamba_d_head": 32, "mamba_d_state": 128, "mamba_expand": 2}
    scales: dict[str, Any] = {"attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "logits_scaling": 3.0}
    torch.set_default_dtype(torch.bfloat16)
    GraniteMoeHybridForCausalLM(GraniteMoeHybridConfig(**sizes, **heads, **states, **scales)).save_pretrained(folder)
    torch.set_default_dtype(torch.float32)
    return folder


def measure(
    ours: dict[str, LoadedModel], theirs: PreTrainedModel, kind: str, size: int, rounds: int
) -> dict[str, object]:
    """All in turn, `rounds` times; ms on the clock."""
    names = (*ours, PEER)
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, model in ours.items():
            native.switch_to(name)
            found = native.decode(model, size, CONTEXT) if kind == "decode" else native.prompt(model, size)
            times[name].append(found[0])
        times[PEER].append(peer_decode(theirs, size) if kind == "decode" else peer_prompt(theirs, size))
    result: dict[str, object] = {"kind": kind, "size": size}
    for name in names:
        ratios = sorted(peer / own for peer, own in zip(times[PEER], times[name], strict=True))
        result[name] = {"ms": statistics.median(times[name]), "ratio": statistics.median(ratios), "ratios": ratios}
        print(
            f"{kind:8s} {size:5d}  {name:12s} {statistics.median(times[name]):9.1f} ms   "
            f"{statistics.median(ratios):6.2f}x as fast as transformers ({ratios[0]:.2f} - {ratios[-1]:.2f})",
            flush=True,
        )
    return result


@torch.inference_mode()
def peer_decode(model: PreTrainedModel, rows: int) -> float:
    said = model(torch.randint(0, 1000, (rows, CONTEXT)), use_cache=True, logits_to_keep=1)
    kept, following = said.cache, said.logits.argmax(-1)
    times = [native.timed(lambda: model(following, cache=kept, use_cache=True))[0] for _ in range(native.STEPS)]
    return statistics.median(times[1:])


@torch.inference_mode()
def peer_prompt(model: PreTrainedModel, tokens: int) -> float:
    prompt = torch.randint(0, 1000, (1, tokens))
    return native.timed(lambda: model(prompt, use_cache=True, logits_to_keep=1))[0]


def page_of(model: LoadedModel) -> dict[str, int]:
    tokens, state = page_tokens(model.config), model.kv_shape.state
    states = 4 * state.numbers * model.kv_shape.num_kv_heads if state is not None else 0
    whole = page_bytes(model.kv_shape, page_size=tokens, dtype=model.dtype)
    return {"tokens": tokens, "bytes": whole, "state_bytes": states}


if __name__ == "__main__":
    main()
