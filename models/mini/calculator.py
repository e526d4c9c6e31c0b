"""The tool that the model calls of its own accord: how it is offered, and what it answers. Standard library only."""

import ast
import operator

TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
SIGNS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def value_of(expression: str) -> float:
    """Of whole numbers, +, -, *, / and brackets. Raises ValueError, SyntaxError or ZeroDivisionError."""
    return _value(ast.parse(expression, mode="eval").body)


def answer(expression: str) -> str:
    """What the tool's message says: a whole number without a point. Raises as `value_of`."""
    return f"{value_of(expression):g}"


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in SIGNS:
        return SIGNS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("not an arithmetic expression")
