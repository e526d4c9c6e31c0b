"""Tiny random checkpoints as servers need them: with a tokenizer, and a vocabulary and a context that go with it.

What such a server says is compared with transformers.
"""

import json
import shutil
from pathlib import Path

from cluster import Server
from reference import MINI, NEAR_TIE, PAGE, parting_of, real_prompts, use_one_thread
from transformers import PreTrainedModel

OUTPUT = 24
LENGTH = 5 * PAGE + 3  # of a prompt
POOL = ("--page-size", str(PAGE), "--chunked-prefill-size", "128")
SIZES = {"vocab_size": 512, "max_position_embeddings": 2048}  # of the bundled model's tokenizer


def served(where: Path, model: PreTrainedModel) -> PreTrainedModel:
    use_one_thread()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MINI / name, where / name)
    return model.eval()


def ask(server: Server, prompts: list[list[int]]) -> list[dict]:
    """One by one, `OUTPUT` tokens each."""
    return [server.generate(one, max_new_tokens=OUTPUT, sampling_params={"ignore_eos": True}) for one in prompts]


def assert_same(model: PreTrainedModel, prompts: list[list[int]], answers: list[dict]) -> None:
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer["output_ids"]) == OUTPUT
        found = parting_of(model, tuple(prompt), tuple(answer["output_ids"]))
        assert found is None or found.gap < NEAR_TIE, f"prompt of {len(prompt)} tokens: {found}"


def prompts_of(count: int, *, salt: int) -> list[list[int]]:
    """Of `LENGTH` tokens; none has the beginning of another one."""
    text = [token for prompt in real_prompts(60)[10:] for token in prompt]
    return [[3 + salt, 20 + i, *text[i * LENGTH : (i + 1) * LENGTH - 2]] for i in range(count)]


def storage_flags(where: Path) -> list[str]:
    """What has been written there before is waited for, from one page on."""
    return [
        *("--enable-hierarchical-cache", "--hicache-storage-backend", "file", "--hicache-storage-dir", str(where)),
        *("--hicache-storage-backend-extra-config", json.dumps({"prefetch_threshold": PAGE})),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
    ]
