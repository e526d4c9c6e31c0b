"""The rules of the grammar of an answer. They get their names as they are asked for, each once."""

import json
from collections.abc import Mapping
from typing import Any  # schemas are JSON

from tandem import grammar

TEXT = r"TEXT: /(.|\n)*/"


class Rules:
    """marks: tokens by their names, which no other token spells. parts: grammars of their own, by their names."""

    def __init__(self, marks: Mapping[str, int], parts: dict[str, str]) -> None:
        self._marks = marks
        self._names: dict[str, str] = {}  # of rules by what they say, and of parts by their schemas
        self.parts = parts
        self.lines = [TEXT]

    def literal(self, text: str) -> str:
        return grammar.literal(text, self._marks)

    def rule(self, expression: str, *, is_lazy: bool = False) -> str:
        """Its name."""
        if expression not in self._names:
            self._names[expression] = f"rule_{len(self._names)}"
            self.lines.append(f"{self._names[expression]}{'[lazy]' if is_lazy else ''}: {expression}")
        return self._names[expression]

    def up_to(self, end: str) -> str:
        """Text that ends where this appears first. No text can spell a mark, and none can be in a lazy rule."""
        first, *rest = grammar.literals(end, self._marks)
        return " ".join([self.rule(f"TEXT {first}", is_lazy=not grammar.is_mark(first)), *rest])

    def json(self, schema: dict[str, Any], *, is_lenient: bool) -> str:
        """Raises `GrammarError`."""
        key = json.dumps([schema, is_lenient])
        if key not in self._names:
            name = f"arguments_{len(self._names)}"
            self.parts[name] = grammar.from_json_schema(schema, is_lenient=is_lenient)
            self._names[key] = f"@{name}"
        return self._names[key]
