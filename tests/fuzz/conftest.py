"""Targets use the fake nodes and drivers of the other tests."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), *(str(HERE.parent / name) for name in ("unit", "e2e_cpu"))]
