"""The scripts that made the bundled model, as modules: they import each other by their bare names."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

SCRIPTS = Path(__file__).resolve().parents[1] / "models" / "mini"


def script(name: str) -> ModuleType:
    """One of those that need no torch, or all others with it."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(SCRIPTS))
