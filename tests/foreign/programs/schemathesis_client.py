"""schemathesis: bodies that the schema of /openapi.json allows are taken, others refused, answers are as it says, none
is a 500."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from _shared import BASE, shown

HERE = Path(__file__).resolve().parent
GENERATION = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/generate")
OTHERS = ("/v1/models", "/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/responses/input_tokens")
CHECKS = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance")
CHECKS += ("negative_data_rejection",)
OURS = ("fitting_bodies_are_taken",)  # in `schemathesis_checks.py`
command = [str(Path(sys.executable).with_name("st")), "run", f"{BASE}/openapi.json"]
command += ["--checks", ",".join((*CHECKS, *OURS))]
command += [word for path in (*GENERATION, *OTHERS) for word in ("--include-path", path)]
command += ["--max-examples", "20", "--phases", "examples,fuzzing", "--suppress-health-check", "all", "--no-color"]
command += ["--generation-deterministic", "--request-timeout", "60"]
with tempfile.TemporaryDirectory() as folder:  # for what it remembers
    hooks = {**os.environ, "SCHEMATHESIS_HOOKS": str(HERE / "schemathesis_checks.py")}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False, env=hooks)
assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
shown(
    f"{len(GENERATION) + len(OTHERS)} endpoints, {len(GENERATION)} of generation: bodies that fit are taken",
    "others refused, no 500, statuses, types and forms of answers are as /openapi.json says",
)
