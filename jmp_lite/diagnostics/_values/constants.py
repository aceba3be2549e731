"""Scalars in half in the source of a program, and what its loops start from."""

import ast
import itertools
from collections.abc import Iterator
from typing import TypeGuard

from .source import Source, expressions_at, operands_of

OPERATORS = {
    "dot_general": ast.MatMult,
    "add": ast.Add,
    "sub": ast.Sub,
    "mul": ast.Mult,
    "div": ast.Div,
    "pow": ast.Pow,
}


def is_operator(node: ast.AST, primitive: str) -> TypeGuard[ast.BinOp]:
    """Whether an expression is the operator of an operation, as `a @ b` is that of a `dot_general`."""
    return isinstance(node, ast.BinOp) and isinstance(node.op, OPERATORS.get(primitive, ()))


def _converted(call: ast.Call) -> ast.expr | None:
    """Returns what a conversion takes."""
    if isinstance(call.func, ast.Attribute) and call.func.attr == "astype":
        return call.func.value
    return call.args[0] if call.args else None


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


_CARRIED = {"fori_loop": 3, "while_loop": 2, "scan": 1}
"""The position of the start of each loop of JAX."""


def start_of(call: ast.Call) -> list[ast.expr]:
    """Returns that with which a loop starts, if a call runs one; a list of one expression or none."""
    position = _CARRIED.get(ast.unparse(call.func).rpartition(".")[2])
    return call.args[position:][:1] if position is not None else []
