"""Finds the variables of a jaxpr on which some of its outputs depend, backwards, through loops and calls.

The planner asks this for two options, and only for them:

- `reduce_dtype` needs the products that make weight gradients: `Intermediate`.
- The predicate of a `while` loop needs what it is computed from: `Predicates`.
"""

import abc
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from ..._jaxpr.inner import Inner, Role
from ..._jaxpr.primitives import Category
from ..._jaxpr.read import Jaxpr, Var, is_literal, open_jaxpr
from .op import Op


class Dependence(abc.ABC):
    """The search, once for each jaxpr and each set of outputs. A subclass says which operations it crosses.

    `ops_of` returns the operations of a jaxpr, and keeps the jaxpr alive.
    """

    def __init__(self, ops_of: Callable[[Jaxpr], Sequence[Op]]) -> None:
        self._ops_of = ops_of
        self._found: dict[Any, frozenset[Var]] = {}

    def variables(self, jaxpr: Jaxpr, outputs: Sequence[bool], backward: bool = False) -> frozenset[Var]:
        """Returns the variables of a jaxpr, closed or open, on which the flagged outputs depend.

        `backward` says whether the whole jaxpr is a part of a backward pass.
        """
        if not self._enters(outputs):
            return frozenset()
        inside = open_jaxpr(jaxpr)
        key = id(inside), tuple(outputs), backward
        if key not in self._found:
            found = {var for var, is_found in zip(inside.outvars, outputs) if is_found and self._counts(var)}
            for op in reversed(self._ops_of(inside)):
                results = [var in found for var in op.equation.outvars]
                operands = self._operands(op, results, backward or op.is_transposed)
                found.update(filter(self._counts, operands))
            self._found[key] = frozenset(found)
        return self._found[key]

    def outputs(self, op: Op, results: Sequence[bool], backward: bool) -> list[tuple[bool, ...]]:
        """Returns a flag for each output of each jaxpr of a call, from flags for the results of the call.

        The carry of a loop is flagged too if the next iteration computes something flagged from it.
        """
        known = {index for index, is_found in enumerate(results) if is_found}
        while True:
            outputs = [self._outputs(op, inner, known) for inner in op.inner]
            carried = {
                number - inner.constants
                for inner, flags in zip(op.inner, outputs)
                for number in self._inputs(inner, flags, backward)
                if inner.roles[number] is Role.CARRY
            }
            if carried <= known:
                return outputs
            known |= carried

    def _operands(self, op: Op, results: Sequence[bool], backward: bool) -> Sequence[Var]:
        """Returns the operands of an operation on which a flagged variable depends."""
        if op.category is not Category.CALL:
            return op.variables if self._crosses(op, any(results), backward) else ()
        if not self._enters(results):
            return ()
        invars = op.equation.invars
        return [
            invars[inner.operands[number]]
            for inner, flags in zip(op.inner, self.outputs(op, results, backward))
            for number in self._inputs(inner, flags, backward)
        ]

    def _inputs(self, inner: Inner, outputs: Sequence[bool], backward: bool) -> list[int]:
        found = self.variables(inner.jaxpr, outputs, backward)
        return [number for number, var in enumerate(open_jaxpr(inner.jaxpr).invars) if var in found]

    def _outputs(self, op: Op, inner: Inner, results: set[int]) -> tuple[bool, ...]:
        del op
        return tuple(index in results for index in inner.results)

    def _counts(self, var: Var) -> bool:
        return not is_literal(var)

    def _enters(self, flags: Sequence[bool]) -> bool:
        """Whether the search enters a jaxpr or call with these flags for its results."""
        del flags
        return True

    @abc.abstractmethod
    def _crosses(self, op: Op, is_found: bool, backward: bool) -> bool:
        """Whether an operation leads on to its operands. `is_found` says that one of its results is found."""


class Intermediate(Dependence):
    """The variables from which a backward pass computes something.

    A variable is intermediate if an operation other than a move or a sum reads it. The cotangent of an
    activation is intermediate. The gradient of an argument is not: only moves and sums lead from its product
    to the end of the backward pass. So the products that make weight gradients are those whose results are
    not intermediate. The search needs no forward pass, and works in loops and recomputed layers.
    """

    def _crosses(self, op: Op, is_found: bool, backward: bool) -> bool:
        # Operations outside the backward pass, such as an optimizer's, read finished gradients.
        return backward and (is_found or not _passes(op))


class Predicates(Dependence):
    """The values on which the predicate of a `while` loop depends.

    A loop to a tolerance stops when a residual is small. Half products round each iterate, so the residual
    stays at their rounding error and the loop does not end. What the predicate depends on therefore stays in
    float32.

    Only floating numbers and booleans count. A counter of iterations is an integer, and so is the token that
    ends the decoding of a language model: `argmax` gives the same token of logits in half.
    """

    def _outputs(self, op: Op, inner: Inner, results: set[int]) -> tuple[bool, ...]:
        is_condition = op.name == "while" and inner is op.inner[0]
        return (True,) if is_condition else super()._outputs(op, inner, results)

    def _counts(self, var: Var) -> bool:
        dtype = None if is_literal(var) else getattr(var.aval, "dtype", None)
        return dtype is not None and (dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.inexact))

    def _enters(self, flags: Sequence[bool]) -> bool:
        return any(flags)

    def _crosses(self, op: Op, is_found: bool, backward: bool) -> bool:
        del op, backward
        return is_found


def _passes(op: Op) -> bool:
    """Whether an operation only moves or adds: its operand may be the gradient of an argument."""
    if op.name in ("broadcast_in_dim", "reduce_sum"):  # The gradient of a broadcast weight is a float32 sum.
        sizes = {math.prod(var.aval.shape) for var in (op.equation.invars[0], op.equation.outvars[0])}
        return len(sizes) == 1
    return op.traits.keeps_gradient
