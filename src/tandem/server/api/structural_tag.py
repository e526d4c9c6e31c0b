"""Structural tags: free text in which certain marks open a part with a form of its own, as for calls of functions.

Both spellings are taken: `structures` with `triggers`, and `format`, a tree of nodes. A node becomes a Lark rule.
"""

from collections.abc import Callable, Mapping
from typing import Any  # nodes

from tandem import grammar
from tandem.grammar import GrammarError
from tandem.logtext import shown

Node = dict[str, Any]


def structural_tag(tag: Node, marks: Mapping[str, int]) -> str:
    """The grammar of a structural tag. marks: of the model (`Tokenizer.grammar_marks`). Raises GrammarError with the
    place of what is wrong with it."""
    return TagGrammar(marks).whole(tag)


class TagGrammar:
    """Rules and grammars of their own that one tag needs."""

    def __init__(self, marks: Mapping[str, int]) -> None:
        self._marks = marks
        self._rules: list[str] = []
        self._parts: dict[str, str] = {}

    def whole(self, tag: Node) -> str:
        start = self._legacy(tag) if "structures" in tag else self._node(tag.get("format"), "/format")
        text = r"TEXT: /(.|\n)*/"
        return grammar.from_parts("\n".join([f"start: {start}", *self._rules, text]) + grammar.UNFORCED, self._parts)

    def _legacy(self, tag: Node) -> str:
        tags = [
            {**one, "content": {"type": "json_schema", "json_schema": one.get("schema", {})}}
            for one in objects(tag, "structures", "")
        ]
        return self._triggered({"triggers": tag.get("triggers"), "tags": tags}, "")

    def _node(self, node: Any, at: str) -> str:
        """An expression for a node of the tree."""
        if not isinstance(node, dict):
            raise GrammarError(f"at {at or '/'}: a node must be an object")
        kinds: dict[str, Callable[[Node, str], str]] = {
            "json_schema": self._json_schema,
            "regex": self._regex,
            "grammar": self._grammar,
            "const_string": self._const_string,
            "any_text": lambda _node, _at: "TEXT",
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self._triggered,
        }
        kind = node.get("type")
        if not isinstance(kind, str) or kind not in kinds:
            raise GrammarError(f"at {at}: there is no type {shown(kind)}; there are {', '.join(kinds)}")
        return kinds[kind](node, at)

    def _json_schema(self, node: Node, at: str) -> str:
        schema = node.get("json_schema")
        if not isinstance(schema, dict | bool):
            raise GrammarError(f"at {at}/json_schema: must be an object")
        return self._part(grammar.from_json_schema(schema))

    def _regex(self, node: Node, at: str) -> str:
        return self._part(grammar.from_regex(text_of(node, "pattern", at)))

    def _grammar(self, node: Node, at: str) -> str:
        return self._part(grammar.from_ebnf(text_of(node, "grammar", at)))

    def _const_string(self, node: Node, at: str) -> str:
        return self._literal(text_of(node, "value", at))

    def _sequence(self, node: Node, at: str) -> str:
        elements = objects(node, "elements", at)
        inner = [self._node(one, f"{at}/elements/{index}") for index, one in enumerate(elements)]
        return self._rule(" ".join(inner))

    def _or(self, node: Node, at: str) -> str:
        elements = objects(node, "elements", at)
        inner = [self._node(one, f"{at}/elements/{index}") for index, one in enumerate(elements)]
        return self._rule(" | ".join(inner))

    def _tag(self, node: Node, at: str) -> str:
        return self._rule(self._body(node, text_of(node, "begin", at), at))

    def _body(self, node: Node, begin: str, at: str) -> str:
        """From what is left of the beginning of a tag to its end."""
        end = text_of(node, "end", at) if node.get("end") else ""
        content = self._node(node.get("content"), f"{at}/content")
        if content == "TEXT" and end:
            content, end = self._up_to(end), ""
        return " ".join(part for part in (self._literal(begin), content, self._literal(end)) if part)

    def _triggered(self, node: Node, at: str) -> str:
        """Text, and tags that begin where a trigger appears."""
        triggers = node.get("triggers")
        if not isinstance(triggers, list) or not triggers or not all(isinstance(t, str) and t for t in triggers):
            raise GrammarError(f"at {at}/triggers: must be a list of texts")
        bodies: dict[str, list[str]] = {}
        for index, tag in enumerate(objects(node, "tags" if "tags" in node else "structures", at)):
            here = f"{at}/tags/{index}"
            begin = text_of(tag, "begin", here)
            trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
            if trigger is None:
                raise GrammarError(f"at {here}/begin: begins with no trigger")
            bodies.setdefault(trigger, []).append(self._rule(self._body(tag, begin[len(trigger) :], here)))
        tags = self._rule(" | ".join(self._after(trigger, ways) for trigger, ways in bodies.items()))
        times = "" if node.get("stop_after_first") else "+" if node.get("at_least_one") else "*"
        tail = "" if node.get("stop_after_first") else " TEXT"
        return self._rule(f"{tags}{times}{tail}")

    def _after(self, trigger: str, ways: list[str]) -> str:
        """Text up to the trigger, and one of the tags that it opens."""
        return self._rule(f"{self._up_to(trigger)} ({' | '.join(ways)})")

    def _up_to(self, end: str) -> str:
        """Text that ends where this appears first. No text can spell a mark, and none can be in a lazy rule."""
        first, *rest = grammar.literals(end, self._marks)
        text = f"TEXT {first}"
        return " ".join([text if grammar.is_mark(first) else self._rule(text, lazy=True), *rest])

    def _rule(self, body: str, *, lazy: bool = False) -> str:
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def _part(self, made: str) -> str:
        name = f"part_{len(self._parts)}"
        self._parts[name] = made
        return f"@{name}"

    def _literal(self, text: str) -> str:
        return grammar.literal(text, self._marks) if text else ""


def text_of(node: Node, key: str, at: str) -> str:
    value = node.get(key)
    if not isinstance(value, str) or not value:
        raise GrammarError(f"at {at}/{key}: must be a text that is not empty")
    return value


def objects(node: Node, key: str, at: str) -> list[Node]:
    value = node.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(one, dict) for one in value):
        raise GrammarError(f"at {at}/{key}: must be a list of objects")
    return value
