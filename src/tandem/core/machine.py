"""State machines as tables: one lookup for a transition, checked for sense when they are made.

A terminal state absorbs every trigger: late news about a finished thing changes nothing. A missing entry for a foreign
trigger (from a peer or a user) is `None`, which the caller turns into a failure of that request; for a trigger that our
own code makes it raises `IllegalTransition`: our bug.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

State = TypeVar("State", bound=Enum)
Trigger = TypeVar("Trigger", bound=Enum)


class IllegalTransition(Exception):
    def __init__(self, machine: str, state: object, trigger: object) -> None:
        super().__init__(f"{machine}: no transition from {state} on {trigger}")


@dataclass(frozen=True)
class Machine(Generic[State, Trigger]):
    name: str
    initial: tuple[State, ...]
    terminal: frozenset[State]
    rules: Mapping[tuple[State, Trigger], State]
    foreign: frozenset[Trigger] = frozenset()

    def __post_init__(self) -> None:
        states = {state for state, _ in self.rules} | set(self.rules.values()) | set(self.initial)
        reachable = self._closure(set(self.initial))
        assert states <= reachable, f"{self.name}: unreachable {states - reachable}"
        for state in states:
            assert self.terminal & self._closure({state}), f"{self.name}: {state} never ends"
        for state, _ in self.rules:
            assert state not in self.terminal, f"{self.name}: {state} is terminal and has rules"

    def next(self, state: State, trigger: Trigger) -> State:
        """The state after `trigger`; raises IllegalTransition where the table has no entry."""
        after = self.peek(state, trigger)
        if after is None:
            raise IllegalTransition(self.name, state, trigger)
        return after

    def peek(self, state: State, trigger: Trigger) -> State | None:
        """As `next`, but None where the table has no entry: for foreign triggers."""
        return state if state in self.terminal else self.rules.get((state, trigger))

    def diagram(self) -> str:
        """Mermaid source of the state diagram, for the documentation."""
        lines = ["stateDiagram-v2"]
        lines += [f"    [*] --> {state.name}" for state in self.initial]
        edges: dict[tuple[str, str], list[str]] = {}
        for (state, trigger), after in self.rules.items():
            edges.setdefault((state.name, after.name), []).append(trigger.name.lower())
        lines += [f"    {left} --> {right}: {', '.join(names)}" for (left, right), names in edges.items()]
        lines += [f"    {state.name} --> [*]" for state in sorted(self.terminal, key=lambda state: state.name)]
        return "\n".join(lines)

    def _closure(self, seen: set[State]) -> set[State]:
        grown = True
        while grown:
            after = {right for (left, _), right in self.rules.items() if left in seen}
            grown = not after <= seen
            seen = seen | after
        return seen
