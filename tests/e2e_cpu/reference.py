"""What transformers says, and how answers of servers are held against it.

"Same" means equal, or parting at a near-tie of the reference's own scores (less than 1e-3 in fp32), which is counted,
printed, and allowed in 1 of 1,000 sequences.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from cluster import Server
from transformers import AutoModelForCausalLM, AutoTokenizer

import tandem

MINI = Path(tandem.__file__).parent / "bundled" / "mini"
TEXT = Path(__file__).parents[1] / "data" / "gsm8k" / "questions.jsonl"
PAGE, CHUNK, OUTPUT = 16, 128, 64
SPECIAL_LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5, 5 * CHUNK, 6 * CHUNK + 9)
NEAR_TIE = 1e-3
NEAR_TIES_ALLOWED = 1 / 1000


def load_model():
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(MINI, dtype=torch.float32).eval()


def real_prompts(count: int) -> list[list[int]]:
    """Token ids; the first prompts are cut from a longer text to the special lengths."""
    tokenizer = AutoTokenizer.from_pretrained(MINI)
    rows = [json.loads(line) for line in TEXT.read_text().splitlines()]
    texts = [tokenizer.encode(row["question"] + "\n" + row["answer"]) for row in rows]
    long_text = [token for text in texts for token in text]
    special = [long_text[7 * i : 7 * i + length] for i, length in enumerate(SPECIAL_LENGTHS)]
    return special + texts[: count - len(special)]


def batches_of_equal_length(prompts: list[list[int]]) -> list[list[int]]:
    """Indices of prompts with the same length: no padding, so the reference is exact."""
    by_length: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(index)
    return list(by_length.values())


@torch.inference_mode()
def greedy(model, prompts: list[list[int]]) -> list[list[int]]:
    outputs: list[list[int]] = [[] for _ in prompts]
    for indices in batches_of_equal_length(prompts):
        ids = torch.tensor([prompts[i] for i in indices])
        past = None
        for _ in range(OUTPUT):
            out = model(input_ids=ids, past_key_values=past, use_cache=True)
            past = out.past_key_values
            ids = out.logits[:, -1].argmax(-1, keepdim=True)
            for row, index in enumerate(indices):
                outputs[index].append(int(ids[row, 0]))
    return outputs


def ask_all(server: Server, prompts: list[list[int]], **sampling: object) -> list[dict]:
    """All prompts, twelve at a time, so that they meet in ever other batches."""
    parameters = {"ignore_eos": True} | sampling
    with ThreadPoolExecutor(12) as pool:
        return list(
            pool.map(
                lambda prompt: server.generate(prompt, max_new_tokens=OUTPUT, sampling_params=dict(parameters)), prompts
            )
        )


@torch.inference_mode()
def assert_same_tokens(model, prompts, expected, answers, *, path: str) -> None:
    near_ties = 0
    for prompt, want, answer in zip(prompts, expected, answers, strict=True):
        got = answer["output_ids"]
        assert answer["meta_info"]["path"] == path
        assert len(got) == OUTPUT
        if got == want:
            continue
        at = next(i for i, (left, right) in enumerate(zip(want, got, strict=True)) if left != right)
        scores = model(torch.tensor([prompt + want[:at]])).logits[0, -1]
        gap = abs(float(scores[want[at]] - scores[got[at]]))
        assert gap < NEAR_TIE, (
            f"prompt of {len(prompt)} tokens: token {at} is {got[at]}, not {want[at]} (gap {gap:.4f})"
        )
        near_ties += 1
    print(f"{path}: {len(prompts)} sequences, {near_ties} near-ties")
    assert near_ties <= len(prompts) * NEAR_TIES_ALLOWED
