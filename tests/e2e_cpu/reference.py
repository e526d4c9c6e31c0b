"""What transformers says, and how answers of servers are held against it.

"Same" means equal, or parting at a near-tie of the reference's own scores (less than 1e-3 in fp32), which is counted,
printed, and allowed in 1 of 1,000 sequences.
"""

import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from cluster import Server
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import tandem

MINI = Path(tandem.__file__).parent / "bundled" / "mini"
TEXT = Path(__file__).parents[1] / "data" / "gsm8k" / "questions.jsonl"
PAGE, CHUNK, OUTPUT = 16, 128, 64
SPECIAL_LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5, 5 * CHUNK, 6 * CHUNK + 9)
NEAR_TIE = 1e-3
NEAR_TIES_ALLOWED = 1 / 1000


def use_one_thread() -> None:
    """Servers share the cores, where threads of ours that spin for each other take twenty times as long as one."""
    torch.set_num_threads(1)


@cache
def model():
    use_one_thread()
    return AutoModelForCausalLM.from_pretrained(MINI, dtype=torch.float32).eval()


def real_prompts(count: int) -> list[list[int]]:
    """Token ids; the first prompts are cut from a longer text to the special lengths."""
    tokenizer = AutoTokenizer.from_pretrained(MINI)
    rows = [json.loads(line) for line in TEXT.read_text().splitlines()]
    texts = [tokenizer.encode(row["question"] + "\n" + row["answer"]) for row in rows]
    long_text = [token for text in texts for token in text]
    special = [long_text[7 * i : 7 * i + length] for i, length in enumerate(SPECIAL_LENGTHS)]
    return special + texts[: count - len(special)]


@dataclass(frozen=True)
class Parting:
    """Where an answer is not the reference's: the first token that it would not have said."""

    at: int
    got: int
    want: int
    gap: float  # by which the reference prefers its own


@cache
def parting(prompt: tuple[int, ...], answer: tuple[int, ...]) -> Parting | None:
    """Of the bundled model."""
    return parting_of(model(), prompt, answer)


@torch.inference_mode()
def parting_of(model: PreTrainedModel, prompt: tuple[int, ...], answer: tuple[int, ...]) -> Parting | None:
    """None: the answer is what the reference says greedily.

    One pass over prompt and answer instead of one per token: if each token is the best one after those before it, then
    by induction the reference alone would have said all of them.
    """
    scores = model(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
    for at, (got, row) in enumerate(zip(answer, scores, strict=True)):
        want = int(row.argmax())
        if want != got:
            return Parting(at, got, want, float(row[want] - row[got]))
    return None


def ask_each(server: Server, prompts: list[list[int]], **sampling: object) -> Iterator[dict]:
    """All prompts, twelve at a time, so that they meet in ever other batches; who looks at one answer holds up none."""
    parameters = {"ignore_eos": True} | sampling
    with ThreadPoolExecutor(12) as pool:
        yield from pool.map(
            lambda prompt: server.generate(prompt, max_new_tokens=OUTPUT, sampling_params=dict(parameters)), prompts
        )


def ask_all(server: Server, prompts: list[list[int]], **sampling: object) -> list[dict]:
    return list(ask_each(server, prompts, **sampling))


def assert_same_tokens(prompts: list[list[int]], answers: Iterable[dict], *, path: str) -> None:
    near_ties = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer["meta_info"]["path"] == path
        assert len(answer["output_ids"]) == OUTPUT
        found = parting(tuple(prompt), tuple(answer["output_ids"]))
        if found is None:
            continue
        assert found.gap < NEAR_TIE, f"prompt of {len(prompt)} tokens: {found}"
        near_ties += 1
    print(f"{path}: {len(prompts)} sequences, {near_ties} near-ties")
    assert near_ties <= len(prompts) * NEAR_TIES_ALLOWED
