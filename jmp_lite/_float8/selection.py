"""Which products of the allow list run in fp8 under `autocast(fun, "float8")`, and on which devices."""

import math
import warnings

import jax

from .._jaxpr.read import Equation

FLOAT8 = "float8"
"""The dtype of an autocast that runs large matmuls in fp8, as users name it. Arrays are e4m3 or e5m2."""

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


def warn_without_float8() -> None:
    """Warns if the first device has no fp8 arithmetic."""
    device = jax.local_devices()[0]
    capability = str(getattr(device, "compute_capability", ""))
    is_nvidia = device.platform in ("gpu", "cuda") and capability[:1].isdigit()
    if device.platform == "cpu" or (is_nvidia and float(capability) < 8.9):
        warnings.warn(
            f"autocast(..., 'float8') runs on {device.device_kind}, which has no fp8 arithmetic: its "
            "products have the numbers of fp8, and not its speed. Hopper (H100, H200), Ada (L4) and later "
            "GPUs multiply fp8.",
            stacklevel=3,
        )
