"""State diagrams in docs/ARCHITECTURE.md, made from the transition tables; `python -m tests.diagrams` refreshes them.

Each stands between `<!-- diagram:NAME -->` and `<!-- end -->`, where NAME is the name of the machine.
"""

import re
from pathlib import Path

from tandem.core.disagg.transfer_state import RECEIVER, SENDER
from tandem.core.machine import Machine
from tandem.core.scheduler.request_state import LIFECYCLE

PAGE = Path(__file__).resolve().parents[1] / "docs" / "ARCHITECTURE.md"
MACHINES = (LIFECYCLE, SENDER, RECEIVER)


def between_markers(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- diagram:{name} -->\n)(?:(?!<!-- diagram:).)*?(<!-- end -->)", re.DOTALL)


def diagram(machine: Machine) -> str:
    """In Mermaid."""
    lines = ["stateDiagram-v2"]
    lines += [f"    [*] --> {state.name}" for state in machine.initial]
    edges: dict[tuple[str, str], list[str]] = {}
    for (state, trigger), after in machine.rules.items():
        edges.setdefault((state.name, after.name), []).append(trigger.name.lower())
    lines += [f"    {left} --> {right}: {', '.join(names)}" for (left, right), names in edges.items()]
    lines += [f"    {state.name} --> [*]" for state in sorted(machine.terminal, key=lambda state: state.name)]
    return "\n".join(lines)


def block(machine: Machine) -> str:
    return f"```mermaid\n{diagram(machine)}\n```\n"


def missing(text: str) -> list[str]:
    """Machines that the page has no place for."""
    return [machine.name for machine in MACHINES if not between_markers(machine.name).search(text)]


def refreshed(text: str) -> str:
    for machine in MACHINES:
        made = block(machine)
        text = between_markers(machine.name).sub(lambda found, made=made: found[1] + made + found[2], text)
    return text


def place(name: str) -> str:
    return f"\n### {name}\n\n<!-- diagram:{name} -->\n<!-- end -->\n"


def main() -> None:
    text = PAGE.read_text() if PAGE.exists() else "# Architecture\n\n## State machines\n"
    text += "".join(map(place, missing(text)))
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(refreshed(text))


if __name__ == "__main__":
    main()
