"""State machines as tables: one lookup for a transition, checked for sense when they are made.

A terminal state absorbs every trigger: late news about a finished thing changes nothing. In any other state a trigger
without an entry raises `IllegalTransition`: our bug, whatever a peer has said.
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
        if state in self.terminal:
            return state
        after = self.rules.get((state, trigger))
        if after is None:
            raise IllegalTransition(self.name, state, trigger)
        return after

    def _closure(self, seen: set[State]) -> set[State]:
        grown = True
        while grown:
            after = {right for (left, _), right in self.rules.items() if left in seen}
            grown = not after <= seen
            seen = seen | after
        return seen
