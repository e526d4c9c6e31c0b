"""The bundled model answers held-out problems through prefill and decode: a wrong kernel or cache shows up here."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any  # JSON

import pytest
from cluster import Cluster

from tandem.cli.chat_terminal import EXAMPLES

NEWCOMER = Path(__file__).parents[2] / "models/mini/newcomer.jsonl"


def test_tandem_eval_finds_at_least_95_percent_of_held_out_answers_through_a_pair(common: Cluster) -> None:
    assert eval_through(common, "--num", "50", "--min-accuracy", "0.95")["accuracy"] >= 0.95


def test_it_answers_at_least_70_of_100_questions_that_its_generator_did_not_make(common: Cluster) -> None:
    told = eval_through(common, "--dataset", str(NEWCOMER))
    assert (told["correct"] >= 70, told["num"]) == (True, 100), told


def eval_through(pair: Cluster, *words: str) -> dict[str, Any]:
    """What `tandem eval` tells of it."""
    assert pair.router is not None
    command = [sys.executable, "-m", "tandem.cli.main", "eval", "--url", pair.router.url, *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(("question", "answer"), zip(EXAMPLES, ("#### 7", "#### 672", '"answer": 165}'), strict=True))
def test_it_solves_what_tandem_chat_suggests(common: Cluster, question: str, answer: str) -> None:
    assert common.router is not None
    command = [sys.executable, "-m", "tandem.cli.main", "chat", "--url", common.router.url, "--temperature", "0"]
    done = subprocess.run(command, input=question, capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith(f"{answer}\n"), done.stderr
