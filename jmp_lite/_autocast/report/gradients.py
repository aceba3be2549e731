"""Which matmul of the forward pass each matmul of a backward pass belongs to."""

import collections
from collections.abc import Sequence

from ..._jaxpr.primitives import Category
from ..._jaxpr.read import Var
from ..planning.op import Op


def forward_products(ops: Sequence[Op]) -> dict[int, int]:
    """Returns for matmuls of the backward pass in a jaxpr which matmul they are gradients of, by index.

    A gradient takes an operand of its matmul: that of a weight takes the input, that of the input the weight.
    Where several layers take one input, the gradient of a weight belongs to the matmul whose other gradient
    takes the same cotangent.
    """
    operands = _operands(ops)
    forward = {index for index in operands if not ops[index].is_transposed}
    taking: dict[Var, set[int]] = collections.defaultdict(set)
    for index in forward:
        for var in operands[index]:
            taking[var].add(index)
    backward = sorted(operands.keys() - forward)
    possible = {index: set().union(*(taking[var] for var in operands[index])) for index in backward}
    found = {index: next(iter(own)) for index, own in possible.items() if len(own) == 1}
    of_cotangent: dict[Var, set[int]] = collections.defaultdict(set)
    for index, own in found.items():
        for var in operands[index]:
            of_cotangent[var].add(own)
    for index in backward:
        beside = set().union(*(of_cotangent[var] for var in operands[index])) & possible[index]
        if len(beside) == 1:
            found.setdefault(index, beside.pop())
    return found


def _operands(ops: Sequence[Op]) -> dict[int, list[Var]]:
    """Returns the operands of each matmul, by its index. What is moved or cast is still the same operand."""
    sources: dict[Var, Var] = {}
    found: dict[int, list[Var]] = {}
    for index, op in enumerate(ops):
        operands = [sources.get(var, var) for var in op.variables]
        if len(operands) == 1 and (op.category is Category.MOVE or op.is_cast):
            sources.update(dict.fromkeys(op.equation.outvars, operands[0]))
        elif op.traits.category is Category.ALLOW:
            found[index] = operands
    return found
