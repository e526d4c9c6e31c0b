"""guidellm: a run of concurrent streams; every request is answered."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from _shared import BASE, MODEL, MODEL_DIR, shown

NUM = 6
with tempfile.TemporaryDirectory() as name:
    out = Path(name) / "out.json"
    command = [str(Path(sys.executable).with_name("guidellm")), "run"]
    command += ["--backend", f"kind=openai_http,target={BASE},model={MODEL}", "--profile", "kind=concurrent,streams=2"]
    command += ["--constraint", f"kind=max_requests,count={NUM}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={MODEL_DIR}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"]
    command += ["--output", f"kind=json,path={out}", "--disable-console-interactive"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (benchmark,) = json.loads(out.read_text())["benchmarks"]
totals = benchmark["metrics"]["request_totals"]
assert (totals["successful"], totals["errored"]) == (NUM, 0), totals
shown(f"{NUM} requests in 2 streams are measured, none fails")
