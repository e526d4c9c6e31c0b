"""locust: four users for some seconds, chats and health checks, not one failure."""

import subprocess
import sys
import tempfile
from pathlib import Path

from _shared import BASE, MODEL, shown

USERS = f"""
from locust import HttpUser, constant, task

class User(HttpUser):
    wait_time = constant(0)

    @task(3)
    def chat(self):
        body = dict(model={MODEL!r}, messages=[dict(role="user", content="Calculate 9 * 13 + 48.")], max_tokens=16)
        self.client.post("/v1/chat/completions", json=body)

    @task
    def health(self):
        self.client.get("/health")
"""
with tempfile.TemporaryDirectory() as name:
    file = Path(name) / "users.py"
    file.write_text(USERS)
    command = [sys.executable, "-m", "locust", "-f", str(file), "--headless", "-u", "4", "-r", "4", "-t", "10s"]
    command += ["-H", BASE, "--csv", str(Path(name) / "out"), "--only-summary"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    rows = (Path(name) / "out_stats.csv").read_text().splitlines()
assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
total = dict(zip(rows[0].split(","), rows[-1].split(","), strict=True))
assert int(total["Request Count"]) > 0
assert int(total["Failure Count"]) == 0, total
shown("4 users for 10 s: every request is answered")
