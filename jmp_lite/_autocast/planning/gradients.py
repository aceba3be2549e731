"""Finds the products that make weight gradients in the jaxpr of a backward pass, for `reduce_dtype`.

A variable is intermediate if the backward pass computes something of it: if an operation other than a move or
a sum reads it. The cotangent of an activation is intermediate. The gradient of an argument is not: only moves
and sums lead from its product to the end of the backward pass. So the products that make weight gradients are
those whose results are not intermediate. The search does not need the forward pass. It also works in loops
and recomputed layers.
"""

import math
from collections.abc import Callable, Sequence

from ..._jaxpr.inner import Inner
from ..._jaxpr.primitives import Category
from ..._jaxpr.read import Jaxpr, Var, is_literal, open_jaxpr
from .op import Op


class WeightGradients:
    """Finds the intermediate variables of jaxprs.

    It keeps each answer, since loops and nested calls ask again.
    """

    def __init__(self, ops_of: Callable[[Jaxpr], Sequence[Op]]) -> None:
        """`ops_of` returns the operations of a jaxpr, and keeps the jaxpr alive."""
        self._ops_of = ops_of
        self._known: dict[tuple[int, tuple[bool, ...], bool], frozenset[Var]] = {}

    def intermediate(self, jaxpr: Jaxpr, outputs: Sequence[bool], backward: bool) -> frozenset[Var]:
        """Returns the variables of a jaxpr that are intermediate.

        Args:
            jaxpr: the jaxpr, closed or open.
            outputs: one flag for each output: whether the output is intermediate.
            backward: whether the whole jaxpr is a part of a backward pass.
        """
        inside = open_jaxpr(jaxpr)
        key = (id(inside), tuple(outputs), backward)
        if key not in self._known:
            known = {var for var, is_read in zip(inside.outvars, outputs) if is_read and not is_literal(var)}
            for op in reversed(self._ops_of(inside)):
                results = [var in known for var in op.equation.outvars]
                operands = self._operands(op, results, backward or op.is_transposed)
                known.update(
                    var
                    for var, is_read in zip(op.equation.invars, operands)
                    if is_read and not is_literal(var)
                )
            self._known[key] = frozenset(known)
        return self._known[key]

    def outputs(self, inner: Inner, results: Sequence[bool], backward: bool) -> tuple[bool, ...]:
        """Returns one flag for each output of a jaxpr in a call: whether the output is intermediate.

        The carry of a loop is also intermediate if it is an intermediate input of the next iteration.

        Args:
            inner: the jaxpr in the call.
            results: one flag for each result of the call: whether the result is intermediate.
            backward: whether the call is a part of a backward pass.
        """
        inputs = open_jaxpr(inner.jaxpr).invars[inner.constants :]
        outputs = tuple(index is not None and results[index] for index in inner.results)
        while True:
            known = self.intermediate(inner.jaxpr, outputs, backward)
            wider = tuple(
                is_read or (carry and inputs[index] in known)
                for index, (is_read, carry) in enumerate(zip(outputs, inner.carries))
            )
            if wider == outputs:
                return outputs
            outputs = wider

    def _operands(self, op: Op, results: Sequence[bool], backward: bool) -> list[bool]:
        """Returns one flag for each operand: whether this operation makes the operand intermediate."""
        if op.category is not Category.CALL:
            # Operations outside the backward pass, such as an optimizer's, read finished gradients.
            return [backward and (any(results) or not _passes(op))] * len(op.equation.invars)
        operands = [False] * len(op.equation.invars)
        for inner in op.inner:
            known = self.intermediate(inner.jaxpr, self.outputs(inner, results, backward), backward)
            for index, var in zip(inner.operands, open_jaxpr(inner.jaxpr).invars):
                operands[index] |= var in known
        return operands


def _passes(op: Op) -> bool:
    """Whether an operation only moves or adds: its operand may be the gradient of an argument."""
    if op.name in ("broadcast_in_dim", "reduce_sum"):  # The gradient of a broadcast weight is a float32 sum.
        sizes = {math.prod(var.aval.shape) for var in (op.equation.invars[0], op.equation.outvars[0])}
        return len(sizes) == 1
    return op.traits.passes
