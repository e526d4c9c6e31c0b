"""What every answer must be: greedy tokens of one unified engine, recorded before the faults begin.

Two runs may part at a near-tie, so prompts whose recorded tokens ever had a close rival are left out:
what remains must come back token by token, and any difference is a wrong answer.
"""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

from cluster import Server
from msgspec import Struct

TEXT = Path(__file__).parents[1] / "data" / "gsm8k" / "questions.jsonl"
OUTPUT_TOKENS = 48
CLOSE = 0.01  # a rival whose log-probability is nearer than this; a near-tie is ten times closer
RECORDERS = 8


class Case(Struct, frozen=True):
    """A prompt, and how its greedy continuation goes, end-of-sequence ignored."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]

    def allows(self, tokens: Sequence[int]) -> bool:
        """Whether this is the beginning of the answer, or all of it."""
        return tuple(tokens) == self.tokens[: len(tokens)]


def prompts(server: Server, random: Random, count: int) -> list[list[int]]:
    """Stretches of real text of 1 to about 600 tokens, some of which begin alike."""
    rows = [json.loads(line) for line in TEXT.read_text().splitlines()]
    text = "\n".join(f"{row['question']}\n{row['answer']}" for row in rows)[:60_000]
    tokens: list[int] = server.call("POST", "/tokenize", {"prompt": text})["tokens"]
    found: list[list[int]] = []
    for _ in range(count):
        length = min(600, int(2 ** random.uniform(0, 9.5)))
        start = random.randrange(len(tokens) - 700)
        found.append(tokens[start : start + length])
        if random.random() < 0.2:  # a shared prefix
            found[-1] = tokens[:100] + found[-1]
    return found


def record(server: Server, random: Random, *, count: int) -> list[Case]:
    """At least half of `count` cases."""
    with ThreadPoolExecutor(RECORDERS) as pool:
        cases = list(pool.map(lambda prompt: record_one(server, prompt), prompts(server, random, count)))
    found = [case for case in cases if case is not None]
    assert len(found) >= count / 2, f"{count - len(found)} of {count} prompts have a near-tie"
    return found


def record_one(server: Server, prompt: list[int]) -> Case | None:
    """None when some token of the answer had a close rival."""
    reply = server.generate(
        prompt,
        max_new_tokens=OUTPUT_TOKENS,
        sampling_params={"ignore_eos": True},
        return_logprob=True,
        top_logprobs_num=2,
    )
    tops = reply["meta_info"]["output_top_logprobs"]
    assert len(tops) == OUTPUT_TOKENS
    if any(best[0] - second[0] < CLOSE for best, second in tops):
        return None
    return Case(tuple(prompt), tuple(reply["output_ids"]))
