"""Compute the whole-number expressions of a shell, such as `8 * 2`."""

import ast
import operator
from collections.abc import Callable, Mapping

_LONGEST = 60
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


def computed(expression: str) -> str | None:
    """The value of sums, products and quotients of whole numbers; None for any other expression."""
    try:
        return str(_value(ast.parse(expression.strip(), mode="eval").body)) if len(expression) <= _LONGEST else None
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _value(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("not an arithmetic expression of whole numbers")
