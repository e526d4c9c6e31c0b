"""`tandem eval`: greedy accuracy of a server on questions whose answer is a number.

A data set has one JSON object per line, `question` and `answer`; the answer is a number, or a worked answer that ends
with `#### NUMBER` (GSM8K). The number after the last `####` of what the server says is compared with it.
"""

import argparse
import asyncio
import json
import re
import time
from decimal import Decimal, InvalidOperation
from importlib import resources
from pathlib import Path
from typing import Any  # JSON documents of servers

import httpx
from msgspec import Struct

from tandem.cli.client import (
    ProgressLine,
    ServerTrouble,
    StreamChunk,
    add_server_arguments,
    client_options,
    raise_for_status,
    read_answer,
    served_model,
    trouble,
)
from tandem.cli.failure import CommandFailed
from tandem.cli.flags import count, finite
from tandem.cli.plain_text import plain
from tandem.server.http_pool import PooledTransport

FINAL = re.compile(r"####\s*\$?\s*(-?[\d,]*\.?\d+)")
SHOWN = 5  # wrong answers and failures that are printed


class MathProblem(Struct, frozen=True):
    question: str
    answer: Decimal


class Result(Struct, frozen=True):
    problem: MathProblem
    text: str = ""
    failure: str = ""  # why there is no answer

    @property
    def given(self) -> Decimal | None:
        return final_number(self.text)

    @property
    def is_correct(self) -> bool:
        return not self.failure and self.given == self.problem.answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Ask a server questions with known answers, and count the right ones."
    add_server_arguments(parser)
    parser.add_argument("--dataset", metavar="FILE", help="JSON lines (default: the held-out questions of tandem/mini)")
    parser.add_argument("--num", type=count, metavar="N", help="only the first N questions")
    parser.add_argument("--concurrency", type=count, default=8, metavar="N", help="requests at a time (default: 8)")
    parser.add_argument("--max-tokens", type=count, default=512, metavar="N", help="longest answer (default: 512)")
    parser.add_argument(
        "--min-accuracy", type=finite, metavar="F", help="exit with 1 below this share of right answers"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    problems = read_problems(args.dataset)[: args.num]
    model = served_model(args)
    began = time.monotonic()
    results = asyncio.run(ask_all(args, model, problems))
    report = make_report(results, model, time.monotonic() - began)
    print(json.dumps(report) if args.json else plain(report_text(report)))
    if all(result.failure for result in results):
        raise CommandFailed(f"no request succeeded: {results[0].failure}")
    if args.min_accuracy is not None and report["accuracy"] < args.min_accuracy:
        raise CommandFailed(f"accuracy {report['accuracy']:.4f} is below {args.min_accuracy:g}")
    return 0


def read_problems(path: str | None) -> list[MathProblem]:
    """At least one. Raises CommandFailed with the line that is wrong."""
    file = Path(path) if path is not None else resources.files("tandem").joinpath("bundled/mini/heldout.jsonl")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandFailed(f"cannot read the data set: {error}", is_wrong_usage=True) from None
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise CommandFailed(f"{file} holds no question", is_wrong_usage=True)
    return [_read_problem(line, f"{file}:{number}") for number, line in lines]


def _read_problem(line: str, place: str) -> MathProblem:
    try:
        row = json.loads(line)
        question, answer = str(row["question"]), str(row["answer"])
    except (ValueError, KeyError, TypeError) as error:
        reason = f"{place}: no question and answer ({type(error).__name__}: {error})"
        raise CommandFailed(reason, is_wrong_usage=True) from None
    number = final_number(answer) if "####" in answer else to_number(answer)
    if number is None:
        raise CommandFailed(f"{place}: the answer {answer[:40]!r} is not a number", is_wrong_usage=True)
    return MathProblem(question, number)


def final_number(text: str) -> Decimal | None:
    """The number after the last `####`; None when there is none."""
    found = FINAL.findall(text[text.rfind("####") :]) if "####" in text else []
    return to_number(found[0]) if found else None


def to_number(text: str) -> Decimal | None:
    try:
        number = Decimal(text.replace(",", "").replace("$", "").strip())
    except InvalidOperation:
        return None
    return number if number.is_finite() else None  # `nan` is equal to nothing, and `snan` not even unequal


async def ask_all(args: argparse.Namespace, model: str, problems: list[MathProblem]) -> list[Result]:
    """Results in the order of the problems."""
    progress = ProgressLine(len(problems))
    slots = asyncio.Semaphore(args.concurrency)
    done: list[Result] = []

    async def ask(client: httpx.AsyncClient, problem: MathProblem) -> Result:
        async with slots:
            result = await ask_one(client, args, model, problem)
        done.append(result)
        progress.show(
            len(done), f"asked, {sum(r.is_correct for r in done)} right, {sum(bool(r.failure) for r in done)} failed"
        )
        return result

    async with httpx.AsyncClient(**client_options(args), transport=PooledTransport()) as client:
        return await asyncio.gather(*(ask(client, problem) for problem in problems))


async def ask_one(client: httpx.AsyncClient, args: argparse.Namespace, model: str, problem: MathProblem) -> Result:
    messages = [{"role": "user", "content": problem.question}]
    body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": args.max_tokens}
    try:
        response = await client.post("/v1/chat/completions", json=body)
        raise_for_status(response.status_code, response.content)
        choices = read_answer(response.content, StreamChunk).choices
    except httpx.HTTPError as error:
        return Result(problem, failure=str(trouble(error, args.url)))
    except ServerTrouble as error:
        return Result(problem, failure=str(error))
    if not choices or choices[0].message is None:
        return Result(problem, failure="not an answer of the chat API: it has no message")
    return Result(problem, text=choices[0].message.content or "")


def make_report(results: list[Result], model: str, seconds: float) -> dict[str, Any]:
    """`failed` requests count as not right; `unanswered` ones have answered, but without `#### NUMBER`."""
    correct = sum(result.is_correct for result in results)
    wrong = [result for result in results if not result.is_correct and not result.failure]
    return {
        "model": model,
        "num": len(results),
        "correct": correct,
        "accuracy": correct / len(results),
        "unanswered": sum(result.given is None for result in wrong),
        "failed": sum(bool(result.failure) for result in results),
        "seconds": round(seconds, 3),
        "wrong": [
            {"question": r.problem.question, "expected": str(r.problem.answer), "given": str(r.given), "text": r.text}
            for r in wrong
        ],
        "failures": [{"question": r.problem.question, "failure": r.failure} for r in results if r.failure],
    }


def report_text(report: dict[str, Any]) -> str:
    lines = [
        f"accuracy {report['accuracy']:.4f}: {report['correct']} of {report['num']} right, "
        f"{report['unanswered']} without a final answer, {report['failed']} failed, {report['seconds']:.1f} s"
    ]
    lines += [
        f"  wrong: expected {row['expected']}, given {row['given']}: {row['question']}"
        for row in report["wrong"][:SHOWN]
    ]
    lines += [f"  failed: {row['failure']}: {row['question']}" for row in report["failures"][:SHOWN]]
    return "\n".join(lines)
