"""Train the bundled model from scratch on generated word problems and export it as a Hugging Face directory.

One command, CPU only, seeded:

    python models/mini/train.py

Each pool of examples is drawn from its own seed. A run that resumes from a checkpoint goes on with the next pool, so
it sees no batch twice, but it skips what was left of the pool it stopped in.

Set OMP_WAIT_POLICY=passive when other programs use the same cores; spinning threads slow each other down badly.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import tempfile
import time
from pathlib import Path

import build_tokenizer
import problems
import torch
from evaluate import evaluate
from examples import BatchStream
from torch import Tensor, distributed, multiprocessing
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HELD_OUT_SEED = 2024
HELD_OUT_COUNT = 500


# --- model and optimizer ----------------------------------------------------------------------------------------


def build_model(tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace) -> LlamaForCausalLM:
    """A fresh model with the shipped configuration."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_hidden_layers=args.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=build_tokenizer.CONTEXT_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return LlamaForCausalLM(config)


def build_optimizers(model: LlamaForCausalLM, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms."""
    layers = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
    rest = [parameter for name, parameter in model.named_parameters() if parameter.ndim < 2 or "embed" in name]
    muon = torch.optim.Muon(layers, lr=args.learning_rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(rest, lr=args.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)]


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up, constant, then linear decay to zero over the last 60 % of the steps."""
    warm_up, decay = max(1, min(200, steps // 10)), 0.6 * steps
    return min(1.0, (step + 1) / warm_up, max(0.0, (steps - step) / decay))


class Schedule:
    """Learning-rate factor by step count or, with ``finish_in``, by the clock.

    By the clock, the factor falls linearly from its value at ``first_step`` to zero in ``finish_in`` minutes. This ends
    a run on time on a machine whose speed changes.
    """

    def __init__(self, first_step: int, steps: int, finish_in: float | None) -> None:
        self._steps = steps
        self._first_factor = learning_rate_factor(first_step, steps)
        self._seconds = None if finish_in is None else 60 * finish_in
        self._started = time.monotonic()

    def factor(self, step: int) -> float:
        """Factor for ``step``; zero or less means that training is over."""
        if self._seconds is None:
            return learning_rate_factor(step, self._steps) if step < self._steps else 0.0
        return self._first_factor * (1 - (time.monotonic() - self._started) / self._seconds)


def loss_of(model: torch.nn.Module, ids: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean cross-entropy of the next token; ``ids`` and ``weights`` are [rows, length]."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=ids, use_cache=False).logits
    losses = functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    target_weights = weights[:, 1:].flatten()
    return (losses * target_weights).sum() / target_weights.sum()


# --- export and checkpoints -------------------------------------------------------------------------------------


def export(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write the model, its configuration and its held-out problems next to the tokenizer."""
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(directory)
    lines = [
        json.dumps({"question": problem.question, "answer": problem.answer})
        for problem in problems.held_out_problems(HELD_OUT_SEED, HELD_OUT_COUNT)
    ]
    (directory / "heldout.jsonl").write_text("\n".join(lines) + "\n")


def save_checkpoint(
    path: Path, model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer], step: int, stream: BatchStream
) -> None:
    """Save everything a resumed run needs; written to a side file first so a crash cannot leave half a file."""
    state = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "step": step,
        "pools_drawn": stream.pools_drawn,
    }
    side = path.with_suffix(".part")
    torch.save(state, side)
    os.replace(side, path)


def parse_arguments() -> argparse.Namespace:
    """Command line; the defaults are the shipped run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=build_tokenizer.DEFAULT_DIRECTORY)
    parser.add_argument("--checkpoint", type=Path, default=None, help="file to save to and resume from")
    parser.add_argument("--steps", type=int, default=3600)
    parser.add_argument("--finish-in", type=float, help="minutes in which to finish, whatever --steps says")
    parser.add_argument("--tokens-per-batch", type=int, default=4096)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--long-share", type=float, default=0.3, help="share of tokens in long multi-turn rows")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=192)
    parser.add_argument("--intermediate-size", type=int, default=512)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="threads of each worker")
    parser.add_argument("--workers", type=int, default=1, help="processes that each take a batch per step")
    parser.add_argument("--report-every", type=int, default=100, help="steps between progress lines")
    parser.add_argument("--evaluate-every", type=int, default=1200, help="steps between held-out evaluations")
    parser.add_argument("--checkpoint-every", type=int, default=250, help="steps between checkpoints")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=False, help="use torch.compile")
    return parser.parse_args()


def average_over_workers(model: LlamaForCausalLM, factor: float, workers: int) -> float:
    """Average the gradients, in place, and the learning-rate factor over all workers; returns the latter.

    The factor travels along because each worker reads its own clock, and all must agree on when to stop.
    """
    if workers == 1:
        return factor
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch.cat([*(gradient.flatten() for gradient in gradients), torch.tensor([factor])])
    distributed.all_reduce(flat)
    flat /= workers
    offset = 0
    for gradient in gradients:
        gradient.copy_(flat[offset : offset + gradient.numel()].view_as(gradient))
        offset += gradient.numel()
    return flat[-1].item()


def train(rank: int, args: argparse.Namespace, rendezvous: str) -> None:
    """Train, evaluate now and then, and export; worker ``rank`` of ``args.workers``."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    if args.workers > 1:
        distributed.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=args.workers)
    tokenizer = build_tokenizer.load(args.output)
    model = build_model(tokenizer, args)
    optimizers = build_optimizers(model, args)
    stream = BatchStream(tokenizer, args.seed + 1009 * rank, args.tokens_per_batch, args.long_share)
    first_step = 0
    if args.checkpoint and args.checkpoint.exists():
        state = torch.load(args.checkpoint)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        first_step, stream.pools_drawn = state["step"], state["pools_drawn"]
    held_out = problems.held_out_problems(HELD_OUT_SEED + 1, 200)
    forward = torch.compile(model, dynamic=False) if args.compile else model
    is_first = rank == 0
    if is_first:
        parameter_count = sum(parameter.numel() for parameter in model.parameters())
        print(f"parameters: {parameter_count}, start at step {first_step}", flush=True)

    schedule = Schedule(first_step, args.steps, args.finish_in)
    started, tokens, losses = time.monotonic(), 0, []
    for step, (ids, weights) in zip(itertools.count(first_step), stream):
        loss = loss_of(forward, ids, weights)
        loss.backward()
        factor = average_over_workers(model, schedule.factor(step), args.workers)
        if factor <= 0:
            break
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = args.learning_rate * factor
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        tokens += ids.numel() * args.workers
        if not math.isfinite(losses[-1]):
            raise RuntimeError(f"loss is {losses[-1]} at step {step}")
        done = step + 1
        if not is_first:
            continue
        if done % args.report_every == 0:
            seconds = time.monotonic() - started
            mean = sum(losses) / len(losses)
            losses.clear()
            rate = tokens / seconds
            print(f"step {done} loss {mean:.4f} factor {factor:.3f} {seconds:.0f} s {rate:.0f} tokens/s", flush=True)
        if args.checkpoint and done % args.checkpoint_every == 0:
            save_checkpoint(args.checkpoint, model, optimizers, done, stream)
        if done % args.evaluate_every == 0:
            print(f"step {done} held-out accuracy {evaluate(model, tokenizer, held_out):.3f}", flush=True)
    if is_first:
        export(model, tokenizer, args.output)
        print(f"finished at step {step}, held-out accuracy {evaluate(model, tokenizer, held_out):.3f}", flush=True)


def main() -> None:
    """Build the tokenizer, then train in this process or in several."""
    args = parse_arguments()
    build_tokenizer.build(args.output)
    if args.workers == 1:
        train(0, args, "")
        return
    with tempfile.TemporaryDirectory() as directory:
        multiprocessing.spawn(train, (args, f"{directory}/rendezvous"), nprocs=args.workers)


if __name__ == "__main__":
    main()
