"""Runs a jaxpr again, with an action for each equation: the loop under autocast, the tap and the products."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from .read import Equation, Jaxpr, Var, equations, is_literal, open_jaxpr

V = TypeVar("V")


def replay(
    jaxpr: Jaxpr,
    values: Sequence[V],
    literal: Callable[[Var], V],
    action: Callable[[int, Equation, Callable[[Var], V]], Sequence[V]],
) -> list[V]:
    """Runs the equations of a jaxpr on values of any kind.

    Args:
        jaxpr: the jaxpr, closed or open.
        values: a value for each constant, then for each input.
        literal: makes a value of a constant that is written into an equation.
        action: runs an equation, which is given with its index and a function that reads its operands.
            Returns a value for each result.

    Returns:
        A value for each output.
    """
    inside = open_jaxpr(jaxpr)
    known: dict[Var, V] = dict(zip((*inside.constvars, *inside.invars), values, strict=True))

    def read(var: Var) -> V:
        return literal(var) if is_literal(var) else known[var]

    # An equation of a jaxpr stands behind those that make its operands.
    for index, equation in enumerate(equations(inside)):
        known.update(zip(equation.outvars, action(index, equation, read), strict=True))
    return [read(var) for var in inside.outvars]
