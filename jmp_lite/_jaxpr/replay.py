"""Runs a jaxpr again, with an action for each equation: the loop under autocast, the tap and the products."""

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from jax.extend.core import Literal

from .read import Equation, Jaxpr, Var, equations, is_literal, open_jaxpr

V = TypeVar("V")


def _nothing(index: int) -> Iterable[Var]:
    del index
    return ()


def replay(
    jaxpr: Jaxpr,
    values: Sequence[V],
    literal: Callable[[Var], V],
    action: Callable[[int, Equation, Callable[[Var], V]], Sequence[V]],
    also_read: Callable[[int], Iterable[Var]] = _nothing,
) -> list[V]:
    """Runs the equations of a jaxpr on values of any kind.

    Args:
        jaxpr: the jaxpr, closed or open.
        values: a value for each constant, then for each input.
        literal: makes a value of a constant that is written into an equation.
        action: runs an equation, which is given with its index and a function that reads its operands.
            Returns a value for each result.
        also_read: returns the variables that the action of an equation reads beside its operands.

    Returns:
        A value for each output.
    """
    inside = open_jaxpr(jaxpr)
    known: dict[Var, V] = dict(zip((*inside.constvars, *inside.invars), values, strict=True))

    def read(var: Var) -> V:
        return literal(var) if is_literal(var) else known[var]

    # Outside of `jax.jit` a value stays in memory as long as something refers to it.
    ending = _ending(inside, also_read)
    # An equation of a jaxpr stands behind those that make its operands.
    for index, equation in enumerate(equations(inside)):
        known.update(zip(equation.outvars, action(index, equation, read), strict=True))
        for var in ending[index]:
            del known[var]
    return [read(var) for var in inside.outvars]


def _ending(inside: Jaxpr, also_read: Callable[[int], Iterable[Var]]) -> Mapping[int, Sequence[Var]]:
    """Returns for each equation the variables that nothing behind it reads."""
    last: dict[Var, int] = {}
    for index, equation in enumerate(equations(inside)):
        for variables in (equation.outvars, equation.invars, also_read(index)):
            # `is_literal`, without a call for each variable of a program.
            last.update([(var, index) for var in variables if not isinstance(var, Literal)])
    ending: dict[int, list[Var]] = collections.defaultdict(list)
    outputs = {var for var in inside.outvars if not is_literal(var)}
    for var in last.keys() - outputs:
        ending[last[var]].append(var)
    return ending
