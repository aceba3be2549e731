"""How many floating point operations an operation of a program costs."""

import math
from typing import Any

from ..._jaxpr.primitives import Category, traits_of
from ..._jaxpr.read import Equation, Var


def flops_of(equation: Equation) -> int:
    """Returns the floating point operations: two for each multiply and add of a matmul, or one an element."""
    name, params = equation.primitive.name, equation.params
    if name == "conv_general_dilated":
        kernel, out = _shape(equation.invars[1]), _shape(equation.outvars[0])
        # Each element of the result sums over the kernel of one output feature.
        features = kernel[params["dimension_numbers"].rhs_spec[0]]
        return 2 * math.prod(out) * math.prod(kernel) // features
    if name == "dot_general":
        return 2 * math.prod(_shape(equation.outvars[0])) * _summed(equation, params["dimension_numbers"])
    if name == "ragged_dot_general":
        numbers = params["ragged_dot_dimension_numbers"].dot_dimension_numbers
        return 2 * math.prod(_shape(equation.outvars[0])) * _summed(equation, numbers)
    if traits_of(name).category is Category.MOVE or name == "convert_element_type":
        return 0
    # A reduction has more elements in its operand than in its result.
    return max((math.prod(_shape(var)) for var in (*equation.invars, *equation.outvars)), default=0)


def _summed(equation: Equation, numbers: Any) -> int:
    """Returns how many products a matmul adds up for each element of its result."""
    left = _shape(equation.invars[0])
    return math.prod(left[axis] for axis in numbers[0][0])


def _shape(var: Var) -> tuple[int, ...]:
    return tuple(map(known, getattr(var.aval, "shape", ())))


def known(size: Any) -> int:
    """Returns a size, 1 for a symbolic one: `jax.export` knows it only when the program runs."""
    return size if isinstance(size, int) else 1
