"""Held-out accuracy of a model directory with batched greedy decoding."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

import build_tokenizer
import problems
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

MAX_NEW_TOKENS = 160


HISTORY_SEED = 31


def history_messages(count: int) -> list[dict[str, str]]:
    """``count`` earlier problems of a chat with their right answers, about 140 tokens each."""
    messages = []
    for problem in itertools.islice(problems.train_problems(HISTORY_SEED), count):
        messages.append({"role": "user", "content": problem.question})
        messages.append({"role": "assistant", "content": problem.worked})
    return messages


def prompt_of(tokenizer: PreTrainedTokenizerFast, question: str, plain: bool, history: int = 0) -> str:
    """The prompt text of a question: a chat with ``history`` earlier turns, or the raw-completions form."""
    if plain:
        return f"Question: {question}\nAnswer:"
    messages = [*history_messages(history), {"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


@torch.inference_mode()
def answer_all(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompts: list[str], batch_size: int = 100
) -> list[str]:
    """Greedy completions of ``prompts``, in order."""
    completions = []
    for start in range(0, len(prompts), batch_size):
        batch = tokenizer(
            prompts[start : start + batch_size],
            padding=True,
            padding_side="left",
            return_tensors="pt",
            return_token_type_ids=False,
        )
        output = model.generate(**batch, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
        completions += tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return completions


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    held_out: list[problems.Problem],
    plain: bool = False,
    show_wrong: int = 0,
    history: int = 0,
) -> float:
    """Share of ``held_out`` whose final integer the model gets exactly; prints the first ``show_wrong`` misses."""
    model.eval()
    prompts = [prompt_of(tokenizer, problem.question, plain, history) for problem in held_out]
    completions = answer_all(model, tokenizer, prompts, batch_size=10 if history else 100)
    model.train()
    right = 0
    for problem, completion in zip(held_out, completions, strict=True):
        if problems.extract_answer(completion) == problem.answer:
            right += 1
        elif show_wrong > 0:
            show_wrong -= 1
            print(f"[{problem.template}] {problem.question}\n  got:  {completion!r}\n  want: {problem.worked!r}")
    return right / len(held_out)


def main() -> None:
    """Evaluate a model directory on fresh held-out problems, or on a file of them."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", type=Path, default=build_tokenizer.DEFAULT_DIRECTORY)
    parser.add_argument("--file", type=Path, help="JSON lines of question and answer; default: draw with --seed")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=2024)
    parser.add_argument("--plain", action="store_true", help="use the Question/Answer form instead of a chat")
    parser.add_argument("--history", type=int, default=0, help="earlier turns in the chat, about 140 tokens each")
    parser.add_argument("--show-wrong", type=int, default=0)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    if args.file:
        records = [json.loads(line) for line in args.file.read_text().splitlines()]
        held_out = [
            problems.Problem("file", record["question"], f"#### {record['answer']}", record["answer"], "")
            for record in records[: args.count]
        ]
    else:
        held_out = problems.held_out_problems(args.seed, args.count)
    share = evaluate(model, tokenizer, held_out, args.plain, args.show_wrong, args.history)
    print(f"{share:.4f} of {len(held_out)}")


if __name__ == "__main__":
    main()
