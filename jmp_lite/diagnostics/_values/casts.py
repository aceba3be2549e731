"""The casts to half around an operation that JAX left out, since their operands were in half already.

In `h = (x.astype(F16) @ a).astype(F16)` and `h.astype(F16) @ b` the jaxpr has one cast: that of `x`. If it is
left out, the others are casts as well. So where they are is read from the source.
"""

import ast
import functools
from collections.abc import Collection, Sequence
from typing import NamedTuple, TypeGuard

from .source import FUNCTIONS, Source, assigned, expressions_at

_CONVERSIONS = ("astype", "asarray", "array", "convert_element_type")
_OPERATORS = {
    "dot_general": ast.MatMult,
    "add": ast.Add,
    "sub": ast.Sub,
    "mul": ast.Mult,
    "div": ast.Div,
    "pow": ast.Pow,
}


class Casts(NamedTuple):
    """The casts to half in an expression: where each is, as `file.py:12:4 (function)`."""

    operands: dict[int, str]  # By the position of the operand that is cast.
    result: str  # The cast of the result; empty without one.

    def without(self, lines: Collection[str]) -> "Casts":
        """Returns the casts but for those on some lines."""
        operands = {position: line for position, line in self.operands.items() if line not in lines}
        return Casts(operands, "" if self.result in lines else self.result)


def casts_around(line: str, primitive: str) -> Sequence[Casts]:
    """Returns the casts of each expression that begins at a line and may have made an operation."""
    source, nodes = expressions_at(line)
    function = line.partition(" ")[2]
    return _casts_around(source, tuple(nodes), function, primitive) if source is not None else ()


@functools.lru_cache(maxsize=4096)
def _casts_around(source: Source, nodes: Sequence[ast.AST], function: str, primitive: str) -> Sequence[Casts]:

    def place(cast: ast.Call | None) -> str:
        return f"{source.place(cast)} {function}".strip() if cast is not None else ""

    found = []
    for node in nodes:
        may_make = is_operator(node, primitive) or isinstance(node, ast.Call)
        if may_make and _conversion(source, node) is None:
            casts = {at: place(cast_of(source, operand)) for at, operand in enumerate(_operands(node))}
            operands = {at: cast for at, cast in casts.items() if cast}
            outer = _conversion(source, source.outer.get(node))
            is_result = outer is not None and _converted(outer) is node
            found.append(Casts(operands, place(outer) if is_result else ""))
    return [casts for casts in found if casts.operands or casts.result]


def is_operator(node: ast.AST, primitive: str) -> TypeGuard[ast.BinOp]:
    """Whether an expression is the operator of an operation, as `a @ b` is that of a `dot_general`."""
    return isinstance(node, ast.BinOp) and isinstance(node.op, _OPERATORS.get(primitive, ()))


def _operands(node: ast.AST) -> list[ast.expr]:
    match node:
        case ast.BinOp(left=left, right=right):
            return [left, right]
        case ast.Call(func=ast.Attribute(value=ast.Call() as array), args=args):  # A method of an array.
            return [array, *args]
        case ast.Call(args=args):
            return list(args)
    return []


def cast_of(source: Source, node: ast.expr) -> ast.Call | None:
    """Returns the cast to half that an expression is, or that its name stands for."""
    if isinstance(node, ast.Name):
        functions = (each for each in source.around[node] if isinstance(each, FUNCTIONS))
        values = next(filter(None, (assigned(each, ast.Name, node.id) for each in functions)), ())
        # A name that is assigned twice may stand for either.
        if len(values) != 1 or isinstance(values[0], ast.Name) or values[0].lineno >= node.lineno:
            return None
        return cast_of(source, values[0])
    return _conversion(source, node)


def _conversion(source: Source, node: ast.AST | None) -> ast.Call | None:
    """Returns an expression if it converts an array to half."""
    if not isinstance(node, ast.Call) or not source.makes_half(node):
        return None
    is_conversion = ast.unparse(node.func).rpartition(".")[2] in _CONVERSIONS and _converted(node) is not None
    return node if is_conversion else None


def _converted(call: ast.Call) -> ast.expr | None:
    """Returns what a conversion takes."""
    if isinstance(call.func, ast.Attribute) and call.func.attr == "astype":
        return call.func.value
    return call.args[0] if call.args else None
