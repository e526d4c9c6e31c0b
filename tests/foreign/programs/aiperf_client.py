"""aiperf: a profile of streamed chats; every request is counted and none fails."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from _shared import BASE, MODEL, MODEL_DIR, shown

NUM = 12
with tempfile.TemporaryDirectory() as name:
    shutil.copytree(MODEL_DIR, Path(name) / "tokenizer")  # it takes a relative path only
    command = [str(Path(sys.executable).with_name("aiperf")), "profile", "-m", MODEL, "--url", BASE]
    command += ["--endpoint-type", "chat", "--streaming", "--tokenizer", "./tokenizer", "--isl", "64", "--osl", "16"]
    command += ["--concurrency", "2", "--request-count", str(NUM), "--ui-type", "none", "--no-gpu-telemetry"]
    command += ["--artifact-dir", "out"]
    environment = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}
    done = subprocess.run(command, cwd=name, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    report = json.loads((Path(name) / "out" / "profile_export_aiperf.json").read_text())
count = report["request_count"]
assert (count["avg"] if isinstance(count, dict) else count) == NUM, count
assert not report.get("error_summary"), report["error_summary"]
shown(f"{NUM} streamed chats are profiled, none fails")
