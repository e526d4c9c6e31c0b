"""`vllm bench serve`: a run of concurrent streams; every request is answered, with as many tokens as it asked for."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from _shared import BASE, MODEL, MODEL_DIR, shown

NUM, TOKENS = 12, 16
with tempfile.TemporaryDirectory() as name:
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "openai"]
    command += ["--base-url", BASE, "--endpoint", "/v1/completions", "--model", MODEL, "--tokenizer", MODEL_DIR]
    command += ["--dataset-name", "random", "--random-input-len", "64", "--random-output-len", str(TOKENS)]
    command += ["--num-prompts", str(NUM), "--max-concurrency", "4", "--ignore-eos", "--disable-tqdm"]
    command += ["--save-result", "--result-dir", name, "--result-filename", "out.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    result = json.loads((Path(name) / "out.json").read_text())
assert (result["completed"], result["failed"]) == (NUM, 0), result
assert result["total_output_tokens"] == NUM * TOKENS, result["total_output_tokens"]
shown(f"{NUM} streamed completions, 4 at once, are measured, none fails")
