"""Conversions to half in the source of a program, operators, and scalars in half."""

import ast
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeGuard

from .source import Source, expressions_at, operands_of

_CONVERSIONS = ("astype", "asarray", "array", "convert_element_type")
OPERATORS = {
    "dot_general": ast.MatMult,
    "add": ast.Add,
    "sub": ast.Sub,
    "mul": ast.Mult,
    "div": ast.Div,
    "pow": ast.Pow,
}


class Cast(NamedTuple):
    """A conversion to half."""

    call: ast.Call  # What takes the dtype, which may be in a function that makes this conversion alone.
    operand: ast.expr  # The array that it converts.
    at: ast.Call  # The call of that function, or `call` itself.


def is_operator(node: ast.AST, primitive: str) -> TypeGuard[ast.BinOp]:
    """Whether an expression is the operator of an operation, as `a @ b` is that of a `dot_general`."""
    return isinstance(node, ast.BinOp) and isinstance(node.op, OPERATORS.get(primitive, ()))


def cast_of(source: Source, node: ast.expr) -> Cast | None:
    """Returns the cast to half that an expression is, or that its name stands for."""
    if not isinstance(node, ast.Name):
        return conversion(source, node)
    functions, values = source.functions_around(node), source.values_of(node)
    before = [value for value in values if end_of(value) < (node.lineno, node.col_offset)]
    # The last value before this line, if no loop or branch lies between them.
    is_sure = len(values) == 1 or (functions and before and source.is_straight(functions[0], before[-1]))
    if not before or not is_sure or isinstance(before[-1], ast.Name):
        return None
    return cast_of(source, before[-1])


def conversion(source: Source, node: ast.AST | None) -> Cast | None:
    """Returns an expression if it converts an array to half."""
    if not isinstance(node, ast.Call):
        return None
    if not source.makes_half(node):
        return _by_a_function(source, node)
    operand = _converted(node)
    is_conversion = ast.unparse(node.func).rpartition(".")[2] in _CONVERSIONS
    return Cast(node, operand, node) if is_conversion and operand is not None else None


def _by_a_function(source: Source, call: ast.Call) -> Cast | None:
    """Returns the conversion by a function of the program that does nothing else, such as `to_half(x)`."""
    functions = source.functions.get(ast.unparse(call.func).removeprefix("self."), [])
    value = source.returned_alone(functions[0]) if len(functions) == 1 else None
    if not isinstance(value, ast.Call) or not source.makes_half(value):
        return None
    parameters = (arg.arg for arg in functions[0].args.args if arg.arg != "self")
    arguments, converted = dict(zip(parameters, call.args)), _converted(value)
    operand = arguments.get(converted.id) if isinstance(converted, ast.Name) else None
    return Cast(value, operand, call) if operand is not None else None


def _converted(call: ast.Call) -> ast.expr | None:
    """Returns what a conversion takes."""
    if isinstance(call.func, ast.Attribute) and call.func.attr == "astype":
        return call.func.value
    return call.args[0] if call.args else None


def end_of(node: Any) -> tuple[int, int]:
    return node.end_lineno, node.end_col_offset


def constants_at(line: str, primitive: str) -> list[str]:
    """Returns where the operands of an operation are scalars in half, such as `jnp.zeros((), dtype=H)`.

    A jaxpr has them as literals, without a line.
    """
    source, nodes = expressions_at(line)
    operators = [node for node in nodes if is_operator(node, primitive)]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    # Of the calls in `lax.scan(...)[0].astype(F32)`, the inner one has the operands.
    made = operators if operators else calls[-1:]
    if source is None or len(made) != 1:
        return []
    leaves = itertools.chain.from_iterable(leaves_of(source, each) for each in operands_of(made[0]))
    found = (_constant(source, leaf) for leaf in leaves)
    return [source.line(call) for call in found if call is not None]


def leaves_of(source: Source, node: ast.expr) -> Iterator[ast.expr]:
    """Yields the leaves of a tree that an expression or its name stands for, or that a lambda returns."""
    node = node.body if isinstance(node, ast.Lambda) else node
    values = list(source.values_of(node)) if isinstance(node, ast.Name) else []
    trees = [value for value in values if isinstance(value, (ast.Tuple, ast.List, ast.Dict))]
    yield from _flat(trees[0] if len(values) == len(trees) == 1 else node)


def _flat(node: ast.expr) -> Iterator[ast.expr]:
    children = node.values if isinstance(node, ast.Dict) else getattr(node, "elts", [node])
    for child in children:
        yield from [child] if child is node else _flat(child)


def _constant(source: Source, node: ast.expr) -> ast.Call | None:
    """Returns the call that makes a scalar in half, which an expression is, or the only one of its name."""
    if isinstance(node, ast.Name):
        values = (value for value in source.values_of(node) if not isinstance(value, ast.Name))
        found = [_constant(source, value) for value in values]
        own = [call for call in found if call is not None]
        return own[0] if len(own) == 1 else None
    if isinstance(node, ast.Call) and source.is_half_dtype(node.func):  # As `jnp.float16(0)`.
        return node
    if not isinstance(node, ast.Call) or not source.makes_half(node):
        return None
    value = _converted(node)
    is_scalar = _is_empty(value) or isinstance(value, ast.Constant)
    is_scalar |= isinstance(value, ast.Call) and any(map(_is_empty, value.args[:1]))
    return node if is_scalar else None


def _is_empty(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Tuple) and not node.elts
