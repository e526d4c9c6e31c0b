"""`tandem doctor` and `tandem top` with real servers."""

import json
import re
import subprocess
import sys

import pytest
from cluster import Cluster
from terminal import CTRL_C, Terminal

TANDEM = [sys.executable, "-m", "tandem.cli.main"]


@pytest.mark.slow
def test_the_doctor_has_a_pair_answer() -> None:
    done = subprocess.run([*TANDEM, "doctor"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"ok    pair        router, prefill and decode .* answered through both", done.stdout)
    assert done.stdout.endswith("a pair works here\n")


def test_top_shows_every_server_behind_a_router_once_for_a_script(common: Cluster) -> None:
    assert common.router is not None
    done = subprocess.run(
        [*TANDEM, "top", "--once", "--interval", "0.1", "--url", common.router.url],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    head, *rows = done.stdout.splitlines()
    assert head.split()[:5] == ["server", "role", "rank", "run", "queue"]
    assert sorted(row.split()[1] for row in rows) == ["decode", "prefill"]
    assert "-" not in [word for row in rows for word in row.split()[3:10]], "all of it is told"


def test_top_of_one_server_is_a_document(common: Cluster) -> None:
    assert common.unified is not None
    words = ["top", "--json", "--interval", "0.1", "--url", common.unified.url]
    done = subprocess.run([*TANDEM, *words], capture_output=True, text=True, timeout=60, check=False)
    (row,) = json.loads(done.stdout)
    assert (row["role"], row["rank"], row["trouble"]) == ("unified", "0", "")


def test_top_on_a_terminal_goes_on_until_control_c_and_gives_the_screen_back(common: Cluster) -> None:
    assert common.router is not None
    with Terminal("top", "--interval", "0.1", "--url", common.router.url) as terminal:
        terminal.shows("Ctrl+C leaves")
        terminal.shows("decode")
        terminal.type(CTRL_C)
        assert terminal.ends() == 0
        assert terminal.raw.rstrip().endswith(b"\x1b[?1049l")
