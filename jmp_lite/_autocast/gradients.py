"""Finds the products that make weight gradients in the jaxpr of a backward pass, for `reduce_dtype`.

Further products and functions of the backward pass read the cotangent of an activation. Nothing does so with
the gradient of an argument: from the product that makes it, only moves and sums lead out of the backward
pass. So these products are found without the forward pass, and in loops and recomputed layers too.
"""

import math
from collections.abc import Sequence

from .jaxprs import (
    Equation,
    Inner,
    Jaxpr,
    Role,
    Var,
    equations,
    inner_jaxprs,
    is_literal,
    is_transposed,
    name_of,
    open_jaxpr,
)
from .primitives import List, traits_of


class BackwardPass:
    """Says which variables stay in the backward pass: more than moves and sums is done with them.

    It remembers each answer, since loops and nested calls ask again.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, tuple[bool, ...], bool], frozenset[Var]] = {}

    def staying(self, jaxpr: Jaxpr, outputs: Sequence[bool], backward: bool) -> frozenset[Var]:
        """Returns the variables of a jaxpr that stay in the backward pass.

        Args:
            jaxpr: the jaxpr, closed or open; the caller keeps it alive.
            outputs: for each output, whether it stays.
            backward: whether the whole jaxpr is a part of a backward pass.
        """
        inside = open_jaxpr(jaxpr)
        key = (id(inside), tuple(outputs), backward)
        if key not in self._known:
            stays = {var for var, each in zip(inside.outvars, outputs) if each and not is_literal(var)}
            for equation in reversed(equations(inside)):
                results = [var in stays for var in equation.outvars]
                within = backward or is_transposed(equation)
                operands = self._operands(equation, results, within)
                stays.update(
                    var for var, each in zip(equation.invars, operands) if each and not is_literal(var)
                )
            self._known[key] = frozenset(stays)
        return self._known[key]

    def outputs(self, inner: Inner, results: Sequence[bool], backward: bool) -> tuple[bool, ...]:
        """Returns for each output of a jaxpr in a call whether it stays in the backward pass.

        The carry of a loop stays if the next iteration does more than move it and add to it.

        Args:
            inner: the jaxpr in the call.
            results: for each result of the call, whether it stays.
            backward: whether the call is a part of a backward pass.
        """
        inputs = open_jaxpr(inner.jaxpr).invars[inner.roles.count(Role.CONSTANT) :]
        outputs = tuple(index is not None and results[index] for index in inner.results)
        while True:
            found = self.staying(inner.jaxpr, outputs, backward)
            wider = tuple(
                stays or (carry and inputs[index] in found)
                for index, (stays, carry) in enumerate(zip(outputs, inner.carries))
            )
            if wider == outputs:
                return outputs
            outputs = wider

    def _operands(self, equation: Equation, results: Sequence[bool], backward: bool) -> list[bool]:
        """Returns for each operand of an equation whether the equation keeps it in the backward pass."""
        if traits_of(name_of(equation)).list is not List.CALL:
            # Equations outside the backward pass, such as an optimizer's, read finished gradients.
            return [backward and (any(results) or not _passes(equation))] * len(equation.invars)
        stays = [False] * len(equation.invars)
        for inner in inner_jaxprs(equation):
            found = self.staying(inner.jaxpr, self.outputs(inner, results, backward), backward)
            for index, var in zip(inner.operands, open_jaxpr(inner.jaxpr).invars):
                stays[index] |= var in found
        return stays


def _passes(equation: Equation) -> bool:
    """Whether the gradient of an argument may leave the backward pass through an equation."""
    name = equation.primitive.name
    if name in ("broadcast_in_dim", "reduce_sum"):  # The gradient of a broadcast weight is summed in float32.
        sizes = {math.prod(var.aval.shape) for var in (equation.invars[0], equation.outvars[0])}
        return len(sizes) == 1
    return traits_of(name).passes
