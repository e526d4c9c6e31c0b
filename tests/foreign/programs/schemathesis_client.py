"""schemathesis: requests that the schema of /openapi.json allows, and answers that it describes; no 500 among them."""

import subprocess
import sys
import tempfile
from pathlib import Path

from _shared import BASE, shown

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/generate")
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
command = [str(Path(sys.executable).with_name("st")), "run", f"{BASE}/openapi.json", "--checks", CHECKS]
command += [word for path in PATHS for word in ("--include-path", path)]
command += ["--max-examples", "20", "--phases", "examples,fuzzing", "--suppress-health-check", "all", "--no-color"]
command += ["--generation-deterministic", "--request-timeout", "60"]
with tempfile.TemporaryDirectory() as folder:  # for what it remembers
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
shown(f"{len(PATHS)} endpoints: no 500, statuses, types and forms of answers are as /openapi.json says")
