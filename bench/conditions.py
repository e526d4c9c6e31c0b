"""What a number was measured under: goes beside every result."""

import os
import platform
import subprocess
from pathlib import Path


def conditions() -> dict[str, str | int | float]:
    """Machine, commit and load, for the JSON line of a benchmark."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "cpu": cpu,
        "cores": os.cpu_count() or 0,
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
        "load_1min": round(os.getloadavg()[0], 2),
    }
