"""Finds the values on which the predicate of a `while` loop depends.

A loop to a tolerance stops when a residual is small. Half products round each iterate, so the residual stays
at their rounding error and the loop does not end. What the predicate depends on therefore stays in float32.

Only floating numbers and booleans count. A counter of iterations is an integer, and so is the token that ends
the decoding of a language model: `argmax` gives the same token of logits in half.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ..._jaxpr.inner import Role, inner_jaxprs
from ..._jaxpr.primitives import Category, traits_of
from ..._jaxpr.read import Equation, Jaxpr, Var, equations, is_literal, open_jaxpr

DECIDES = "the predicate of a loop depends on it"
"""The reason for float32."""


class Predicates:
    """Finds these values, once for each jaxpr and each set of outputs on which a predicate depends."""

    def __init__(self) -> None:
        self._found: dict[Any, frozenset[Var]] = {}
        self._alive: list[Jaxpr] = []  # The keys hold ids of jaxprs.

    def values(self, jaxpr: Jaxpr, outputs: Sequence[bool]) -> frozenset[Var]:
        """Returns the variables of a jaxpr on which the predicate of a loop around it depends.

        Args:
            jaxpr: the jaxpr, closed or open.
            outputs: for each output, whether the predicate depends on it. Empty if no loop is around it.
        """
        if not any(outputs):
            return frozenset()
        inside = open_jaxpr(jaxpr)
        key = id(inside), tuple(outputs)
        if key not in self._found:
            self._alive.append(inside)
            found = {var for var, depends in zip(inside.outvars, outputs) if depends and _counts(var)}
            for equation in reversed(equations(inside)):
                results = {index for index, var in enumerate(equation.outvars) if var in found}
                if results:
                    operands = self._operands(equation, results)
                    found.update(var for var in operands if _counts(var))
            self._found[key] = frozenset(found)
        return self._found[key]

    def outputs(self, equation: Equation, results: Sequence[bool]) -> tuple[tuple[bool, ...], ...]:
        """Returns for each output of each jaxpr of a call whether the predicate of a loop depends on it.

        Args:
            equation: the call, which may be the loop itself.
            results: for each result of the call, whether the predicate of a loop around it depends on it.
        """
        known = {index for index, depends in enumerate(results) if depends}
        return self._inside(equation, known)[0]

    def _operands(self, equation: Equation, results: set[int]) -> list[Var]:
        if traits_of(equation.primitive.name).category is not Category.CALL:
            return equation.invars
        return [equation.invars[index] for index in self._inside(equation, results)[1]]

    def _inside(self, equation: Equation, results: set[int]) -> tuple[tuple[tuple[bool, ...], ...], set[int]]:
        """Returns the outputs of the inner jaxprs, and the operands, on which a predicate depends."""
        parts = inner_jaxprs(equation)
        is_while = equation.primitive.name == "while"
        is_loop = is_while or equation.primitive.name == "scan"
        known = set(results)
        while True:
            # The first jaxpr of a `while` is its condition.
            outputs = tuple(
                (True,) if is_while and part is parts[0] else tuple(index in known for index in part.results)
                for part in parts
            )
            operands: set[int] = set()
            carried: set[int] = set()
            for part, flags in zip(parts, outputs):
                values = self.values(part.jaxpr, flags)
                for number, var in enumerate(open_jaxpr(part.jaxpr).invars):
                    if var in values:
                        operands.add(part.operands[number])
                        if is_loop and part.roles[number] is Role.CARRY:
                            carried.add(number - part.constants)
            if carried <= known:
                return outputs, operands
            known |= carried  # An iteration reads what the one before it has computed.


def _counts(var: Var) -> bool:
    if is_literal(var):
        return False
    dtype = getattr(var.aval, "dtype", None)
    return dtype is not None and (dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.inexact))
