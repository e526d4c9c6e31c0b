"""What a model directory gets right, with batched greedy decoding: problems, newcomers' questions, calls, JSON."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import build_tokenizer
import calculator
import everyday
import problems
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

MAX_NEW_TOKENS = 160
HISTORY_SEED = 31
EVERYDAY_SEED = 2024
Messages = list[dict[str, object]]


def history_messages(count: int) -> Messages:
    """``count`` earlier problems of a chat with their right answers, about 140 tokens each."""
    messages: Messages = []
    for problem in itertools.islice(problems.train_problems(HISTORY_SEED), count):
        messages.append({"role": "user", "content": problem.question})
        messages.append({"role": "assistant", "content": problem.worked})
    return messages


def prompt_of(tokenizer: PreTrainedTokenizerFast, question: str, plain: bool, history: int = 0) -> str:
    """The prompt text of a question: a chat with ``history`` earlier turns, or the raw-completions form."""
    if plain:
        return f"Question: {question}\nAnswer:"
    return _rendered(tokenizer, [*history_messages(history), {"role": "user", "content": question}])


def _rendered(
    tokenizer: PreTrainedTokenizerFast, messages: Messages, tools: Sequence[dict[str, object]] | None = None
) -> str:
    return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)


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
    return _share(held_out, completions, problems.extract_answer, show_wrong)


def json_share(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, asked: list[problems.Problem], show_wrong: int = 0
) -> float:
    """Share of problems that are answered by an object with the right ``answer`` where JSON is asked for."""
    prompts = [prompt_of(tokenizer, f"{problem.question} Answer as JSON.", False) for problem in asked]
    return _share(asked, answer_all(model, tokenizer, prompts), _json_answer, show_wrong)


def tool_shares(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, asked: list[problems.Problem], show_wrong: int = 0
) -> tuple[float, float]:
    """Shares of problems whose call has the right value, and whose answer after the call's result is right."""
    chats: list[Messages] = [[{"role": "user", "content": problem.question}] for problem in asked]
    said = answer_all(model, tokenizer, [_rendered(tokenizer, chat, [calculator.TOOL]) for chat in chats])
    called = _share(asked, said, called_value, show_wrong)
    for chat, text in zip(chats, said, strict=True):
        chat.append({"role": "assistant", "content": text})
        chat.append({"role": "tool", "content": called_value(text) or "error"})
    answers = answer_all(model, tokenizer, [_rendered(tokenizer, chat, [calculator.TOOL]) for chat in chats])
    return called, _share(asked, answers, problems.extract_answer, show_wrong)


def _share(
    asked: list[problems.Problem], completions: list[str], read: Callable[[str], str | None], show_wrong: int
) -> float:
    right = 0
    for problem, completion in zip(asked, completions, strict=True):
        if read(completion) == problem.answer:
            right += 1
        elif show_wrong > 0:
            show_wrong -= 1
            print(f"[{problem.template}] {problem.question}\n  got:  {completion!r}\n  want: {problem.answer!r}")
    return right / len(asked)


def _json_answer(text: str) -> str | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return str(found.get("answer")) if isinstance(found, dict) else None


def called_value(text: str) -> str | None:
    """What the calculator says to the call in ``text``; None without exactly one call that it can follow."""
    if text.count("<tool_call>") != 1 or not text.endswith("</tool_call>"):
        return None
    try:
        call = json.loads(text.partition("<tool_call>")[2].removesuffix("</tool_call>"))
        if call["name"] != "calculator" or set(call["arguments"]) != {"expression"}:
            return None
        return calculator.answer(call["arguments"]["expression"])
    except (ValueError, SyntaxError, KeyError, TypeError, ZeroDivisionError):
        return None


def read_problems(path: Path, count: int | None = None) -> list[problems.Problem]:
    """The problems of a file of JSON lines with a question and an answer."""
    records = [json.loads(line) for line in path.read_text().splitlines()[:count]]
    return [
        problems.Problem(path.stem, record["question"], f"#### {record['answer']}", record["answer"], "")
        for record in records
    ]


def print_all(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, directory: Path, wrong: int) -> None:
    """The table of the README: each set with its share."""
    held_out = read_problems(directory / "heldout.jsonl")
    newcomer = read_problems(everyday.NEWCOMER)
    mixed = everyday.held_out_problems(EVERYDAY_SEED, 100) + held_out[:100]
    rows = [
        ("held out", len(held_out), lambda: evaluate(model, tokenizer, held_out, show_wrong=wrong)),
        ("newcomer", len(newcomer), lambda: evaluate(model, tokenizer, newcomer, show_wrong=wrong)),
        ("everyday, held out", 100, lambda: evaluate(model, tokenizer, mixed[:100], show_wrong=wrong)),
        ("raw completions form", 200, lambda: evaluate(model, tokenizer, held_out[:200], True, wrong)),
        ("JSON on request", len(mixed), lambda: json_share(model, tokenizer, mixed, wrong)),
    ]
    for name, count, share in rows:
        print(f"{name}: {share():.3f} of {count}", flush=True)
    for name, asked in (("mixed, held out", mixed), ("newcomer", newcomer)):
        called, answered = tool_shares(model, tokenizer, asked, wrong)
        print(f"calculator, {name}: called {called:.3f}, answered {answered:.3f} of {len(asked)}", flush=True)


def main() -> None:
    """Evaluate a model directory on all sets, or on one file of problems."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", type=Path, default=build_tokenizer.DEFAULT_DIRECTORY)
    parser.add_argument("--file", type=Path, help="JSON lines of question and answer; default: every set")
    parser.add_argument("--count", type=int, help="how many of the file")
    parser.add_argument("--plain", action="store_true", help="use the Question/Answer form instead of a chat")
    parser.add_argument("--history", type=int, default=0, help="earlier turns in the chat, about 140 tokens each")
    parser.add_argument("--show-wrong", type=int, default=0)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model).eval()
    if args.file is None:
        print_all(model, tokenizer, args.model, args.show_wrong)
        return
    asked = read_problems(args.file, args.count)
    share = evaluate(model, tokenizer, asked, args.plain, args.show_wrong, args.history)
    print(f"{share:.4f} of {len(asked)}")


if __name__ == "__main__":
    main()
