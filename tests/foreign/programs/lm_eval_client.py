"""lm-eval: loglikelihoods and generated answers of tasks on this disk; the pair gives what one engine does."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _shared import BASE, MODEL, MODEL_DIR, UNIFIED, shown

CHOICE = """
task: choice
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_choice: "{{choices}}"
doc_to_target: label
metric_list: [{metric: acc}]
"""
GENERATE = """
task: generate
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["<|im_end|>", "Question:"], max_gen_toks: 128, do_sample: false}
filter_list: [{name: number, filter: [{function: regex, regex_pattern: "#### (-?[0-9]+)"}, {function: take_first}]}]
metric_list: [{metric: exact_match}]
"""
NUM = 24


def write_tasks(folder: Path) -> None:
    lines = (Path(MODEL_DIR) / "heldout.jsonl").read_text().splitlines()[:NUM]
    data = folder / "data.jsonl"
    with data.open("w") as file:
        for line in lines:
            found = json.loads(line)
            choices = [f" #### {found['answer']}", f" #### {int(found['answer']) + 1}", " It is hard to say."]
            file.write(json.dumps({**found, "choices": choices, "label": 0}) + "\n")
    for name, text in (("choice", CHOICE), ("generate", GENERATE)):
        (folder / f"{name}.yaml").write_text(text.replace("DATA", str(data)))


def run(url: str, folder: Path) -> tuple[Any, Any]:
    """The results, and every answer as it was logged."""
    out = folder / url.rpartition(":")[2]
    where = f"model={MODEL},base_url={url}/v1/completions,tokenizer={MODEL_DIR},tokenizer_backend=huggingface"
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--tasks", "choice,generate"]
    command += ["--model_args", f"{where},num_concurrent=2,max_retries=1", "--include_path", str(folder)]
    command += ["--output_path", str(out), "--log_samples", "--batch_size", "1"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (results,) = out.rglob("results_*.json")
    samples = {
        path.name.split("_")[1]: sorted(
            (json.loads(line)["doc_id"], json.loads(line)["resps"]) for line in path.read_text().splitlines()
        )
        for path in out.rglob("samples_*.jsonl")
    }
    return json.loads(results.read_text())["results"], samples


def close(one: Any, other: Any) -> bool:
    """Texts alike; loglikelihoods, which are printed as floats, within 1e-3."""
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(close, one, other))
    try:
        return abs(float(one) - float(other)) < 1e-3
    except (TypeError, ValueError):
        return bool(one == other)


with tempfile.TemporaryDirectory() as name:
    write_tasks(Path(name))
    (results, samples), (_, expected) = run(BASE, Path(name)), run(UNIFIED, Path(name))
assert set(samples) == set(expected) == {"choice", "generate"}
for task, answers in samples.items():
    assert close([list(answer) for answer in answers], [list(answer) for answer in expected[task]]), task
accuracy = results["generate"]["exact_match,number"]
assert accuracy >= 0.8, results
shown(
    f"{3 * NUM} loglikelihoods within 1e-3 of one engine's",
    f"{NUM} generated answers equal to one engine's",
    f"exact match {accuracy:.2f} on held-out problems",
)
