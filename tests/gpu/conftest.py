"""Models and servers for tests are those of tests/e2e_cpu."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e_cpu"))
