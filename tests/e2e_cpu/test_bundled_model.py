"""The bundled model answers held-out problems through prefill and decode: a wrong kernel or cache shows up here."""

import json
import subprocess
import sys

from cluster import Cluster


def test_tandem_eval_finds_at_least_90_percent_of_held_out_answers_through_a_pair(common: Cluster) -> None:
    assert common.router is not None
    command = [sys.executable, "-m", "tandem.cli.main", "eval", "--url", common.router.url]
    done = subprocess.run(
        [*command, "--num", "50", "--min-accuracy", "0.9", "--json"], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["accuracy"] >= 0.9
