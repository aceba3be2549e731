"""Decides which products of the allow list run in fp8 under `autocast(fun, "float8")`."""

import dataclasses
import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from ..._jaxpr.float8 import BACKWARD, FORWARD
from ..._jaxpr.read import Equation
from .plan import Bind, Decision, Float8, WideGradient, WideResult
from .states import State

MULTIPLE = 16
"""cuBLAS multiplies fp8 only if all sizes of a product are multiples of 16."""

SMALLEST_SIZE = 600
"""The least `1 / (1/m + 1/k + 1/n)` of a product of m x k and k x n numbers that runs in fp8.

The product takes time in proportion to `m * k * n`. Its casts to fp8 take time in proportion to the
numbers that are read and written, `m * k + k * n + m * n`. So this quotient of the two says what a
product gains. A trial with programs that were compiled for an H100 put the point of no gain at 500 to
700: docs/fp8.md.
"""

NOT_FP8 = "; bfloat16, not fp8: "
"""Stands in the reason of a product that could not run in fp8, in front of the cause."""


def why_not_float8(equation: Equation, forced: bool) -> str:
    """Returns why a product does not run in fp8, whatever its operands are; empty if it may.

    Args:
        equation: an operation of the allow list.
        forced: whether a rule asks for fp8. The product may then be small.
    """
    if equation.primitive.name != "dot_general":
        return f"{equation.primitive.name} has no fp8 version"
    (sums, _), (batch, _) = equation.params["dimension_numbers"]
    if batch:
        return "it has batch axes"
    left, right = (var.aval.shape for var in equation.invars)
    if not all(isinstance(size, int) for size in (*left, *right)):
        return "a size is symbolic"
    k = math.prod(left[axis] for axis in sums)
    sizes = math.prod(left) // max(k, 1), k, math.prod(right) // max(k, 1)
    text = " x ".join(map(str, sizes))
    if any(size % MULTIPLE or not size for size in sizes):
        return f"a size of {text} is no multiple of {MULTIPLE}"
    if not forced and 1 / sum(1 / size for size in sizes) < SMALLEST_SIZE:
        return f"{text} is too small to gain"
    return ""


def in_float8(decision: Decision, operands: Sequence[State], backward: bool) -> Decision:
    """Returns the decision about a product of bfloat16 operands that runs in fp8.

    Args:
        decision: the decision to run the product in bfloat16.
        operands: the states of its operands.
        backward: whether the product is a part of a backward pass. JAX's transpose of a product has the
            cotangent as its first operand.
    """
    action = decision.action
    assert isinstance(action, Bind)
    formats = (BACKWARD if backward else FORWARD, FORWARD)
    # XLA writes a float32 activation once, in bfloat16, for all its readers. A weight is in memory in
    # float32.
    sources = tuple(np.dtype(jnp.float32 if state.leaf else jnp.bfloat16) for state in operands)
    wide = action.wide if isinstance(action, WideGradient) else (False, False)
    gradients = tuple(np.dtype(jnp.float32 if is_wide else jnp.bfloat16) for is_wide in wide)
    params = action.params
    if isinstance(action, WideResult):
        params = {**params, "preferred_element_type": np.dtype(jnp.float32)}
    float8 = Float8(action.operands, params, (), formats, sources, gradients)
    return dataclasses.replace(decision, action=float8, reason=f"{decision.reason}; in fp8")
