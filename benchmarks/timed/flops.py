"""The number of floating point operations of a training step, counted from the shapes of its products."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax


def training_flops(loss: Callable[..., Any], *args: Any) -> int:
    """Returns the FLOPs of a forward and a backward pass, the numerator of model FLOPs utilisation.

    A product of the forward pass counts twice more for the backward pass: once for the gradient of each
    operand. Rematerialization and elementwise arithmetic do not count, as is usual (PaLM, Chowdhery et al.,
    2022, appendix B).

    Args:
        loss: a function of pytrees of arrays.
        args: arrays, or their shapes.
    """
    return 3 * sum(_products(jax.make_jaxpr(loss)(*args).jaxpr))


def _products(jaxpr: Any) -> Iterator[int]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield _dot_flops(equation)
        elif equation.primitive.name == "conv_general_dilated":
            yield _conv_flops(equation)
        times = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                yield times * sum(_products(getattr(inner, "jaxpr", inner)))


def _is_jaxpr(x: Any) -> bool:
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


def _dot_flops(equation: Any) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left, result = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    return 2 * math.prod(result) * math.prod(left[axis] for axis in contracted)


def _conv_flops(equation: Any) -> int:
    image, kernel = (x.aval.shape for x in equation.invars)
    result = equation.outvars[0].aval.shape
    kernel_spec = equation.params["dimension_numbers"].rhs_spec
    # A transposed convolution multiplies each input, and not the zeros between the inputs.
    dilated = any(step > 1 for step in equation.params["lhs_dilation"])
    points = math.prod(image) if dilated else math.prod(result)
    channels = kernel[kernel_spec[0]] if dilated else kernel[kernel_spec[1]]
    return 2 * points * channels * math.prod(kernel[axis] for axis in kernel_spec[2:])
