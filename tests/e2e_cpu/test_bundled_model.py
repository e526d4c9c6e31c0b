"""The bundled model answers held-out problems through prefill and decode: a wrong kernel or cache shows up here."""

import json
import subprocess
import sys

import pytest
from cluster import Cluster

from tandem.cli.chat_terminal import EXAMPLES


def test_tandem_eval_finds_at_least_95_percent_of_held_out_answers_through_a_pair(common: Cluster) -> None:
    assert common.router is not None
    command = [sys.executable, "-m", "tandem.cli.main", "eval", "--url", common.router.url]
    done = subprocess.run(
        [*command, "--num", "50", "--min-accuracy", "0.95", "--json"], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["accuracy"] >= 0.95


@pytest.mark.parametrize(("question", "answer"), zip(EXAMPLES, ("#### 7", "#### 672", '"answer": 165}'), strict=True))
def test_it_solves_what_tandem_chat_suggests(common: Cluster, question: str, answer: str) -> None:
    assert common.router is not None
    command = [sys.executable, "-m", "tandem.cli.main", "chat", "--url", common.router.url]
    done = subprocess.run(command, input=question, capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith(f"{answer}\n"), done.stderr
