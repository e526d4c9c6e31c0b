"""The lowest versions that pyproject.toml allows, as requirements: of everything but torch, which is large."""

import re
import tomllib
from pathlib import Path

NEED = re.compile(r"([A-Za-z0-9_.-]+)>=([0-9.]+)")
PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def lowest(project: Path) -> list[str]:
    """Raises ValueError for a dependency without a lower bound: it has no lowest version."""
    found: list[str] = []
    for need in tomllib.loads(project.read_text())["project"]["dependencies"]:
        if (parts := NEED.fullmatch(need)) is None:
            raise ValueError(f"{need} is not NAME>=VERSION")
        if parts[1] != "torch":
            found.append(f"{parts[1]}=={parts[2]}")
    return found


if __name__ == "__main__":
    print("\n".join(lowest(PROJECT)))
