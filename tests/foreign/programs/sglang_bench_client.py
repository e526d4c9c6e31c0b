"""`sglang.bench_serving --pd-separated`: streams of two dialects get as many tokens as they asked for."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from _shared import BASE, MODEL, MODEL_DIR, shown

NUM, PROMPT_TOKENS, TOKENS = 12, 64, 16
for backend in ("sglang", "sglang-oai"):
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "sglang.bench_serving", "--backend", backend, "--pd-separated"]
        command += ["--base-url", BASE, "--model", MODEL, "--tokenizer", MODEL_DIR, "--dataset-name", "random-ids"]
        command += ["--random-input-len", str(PROMPT_TOKENS), "--random-output-len", str(TOKENS)]
        command += ["--random-range-ratio", "1", "--num-prompts", str(NUM), "--max-concurrency", "4"]
        command += ["--disable-tqdm", "--output-file", "out.json"]
        done = subprocess.run(command, cwd=name, capture_output=True, text=True, timeout=250, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        result = json.loads((Path(name) / "out.json").read_text())
    assert result["completed"] == NUM, (backend, result)
    assert result["total_input_tokens"] == NUM * PROMPT_TOKENS, (backend, result)
    assert result["total_output_tokens"] == NUM * TOKENS, (backend, result)
shown(f"{NUM} streams of /generate and {NUM} of /v1/completions, 4 at once, are measured, none fails")
