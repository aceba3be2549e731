"""Which products `autocast(fun, "float8")` runs in fp8, and how one runs."""

import math
import warnings
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from .._dtypes import FLOAT8
from .._jaxpr import Array, Equation, users_stacklevel
from .product import float8_product
from .quantize import BACKWARD, FORWARD, Quantized, quantize, quantize_result

# cuBLAS multiplies fp8 only if all sizes of a product are multiples of 16 (bytes):
# https://github.com/NVIDIA/CUDALibrarySamples/issues/172.
MULTIPLE = 16

# The least `1 / (1/m + 1/k + 1/n)` of a product of m x k and k x n numbers that runs in fp8. The product
# takes time in proportion to `m * k * n`. Its casts to fp8 take time in proportion to the numbers that are
# read and written, `m * k + k * n + m * n`. So this quotient of the two says what a product gains. A trial
# with programs that were compiled for an H100 put the point of no gain at 500 to 700: docs/fp8.md.
SMALLEST_SIZE = 600


class Action(Protocol):
    """What runs in fp8, as `_autocast.planning.plan` has it."""

    @property
    def formats(self) -> tuple[np.dtype, ...]: ...
    @property
    def sources(self) -> tuple[np.dtype, ...]: ...
    @property
    def result(self) -> np.dtype: ...
    @property
    def gradients(self) -> tuple[np.dtype, ...]: ...


def run_float8(equation: Equation, action: Action, operands: Sequence[Any]) -> Array:
    """Returns the product of values of the interpreter, which keep their casts for other products."""
    arrays = [value.to(source) for value, source in zip(operands, action.sources, strict=True)]
    quantized = list(map(cast_to_float8, operands, arrays, action.formats))
    return float8_product(equation, arrays, quantized, action.result, action.gradients)


def cast_to_float8(value: Any, array: Array, dtype: np.dtype) -> Quantized:
    """Returns `array`, a value in float32 or in half, in an fp8 dtype. The value keeps the first answer."""
    # An activation that two matmuls read is cast once.
    if dtype not in value.casts:
        if value.computed is None:
            value.casts[dtype] = quantize(array, dtype)
        else:
            fun, arrays = value.computed
            value.casts[dtype] = quantize_result(fun, arrays, array, dtype)
    return value.casts[dtype]


def float8_action(
    backward: bool, are_arguments: Sequence[bool], result: np.dtype | None, gradients: Sequence[np.dtype]
) -> tuple[Any, ...]:
    """Returns the fields of an `Action`. Without dtypes of their own, all results are in bfloat16."""
    half = np.dtype(jnp.bfloat16)
    # JAX's transpose of a product has the cotangent as its first operand:
    # https://github.com/jax-ml/jax/blob/jax-v0.10.2/jax/_src/lax/lax.py#L5849.
    formats = BACKWARD if backward else FORWARD, FORWARD
    # Weights are cast from float32. Activations go through bfloat16, which XLA writes once for all readers.
    sources = tuple(np.dtype(np.float32) if is_argument else half for is_argument in are_arguments)
    return formats, sources, result or half, tuple(gradients) or (half, half)


def why_not_float8(equation: Equation, rule: tuple[str, str] | None) -> str:
    """Returns why a product does not run in fp8, whatever its operands are; empty if it may.

    Args:
        equation: an operation of the allow list.
        rule: the rule of the user that selects the product, its pattern and its dtype; None without one. If
            it gives fp8, the product may be small.
    """
    if rule is not None and rule[1] != FLOAT8:
        return f"the rule for '{rule[0]}'"
    if equation.primitive.name != "dot_general":
        return f"{equation.primitive.name} has no fp8 version"
    if equation.params["dimension_numbers"][1][0]:
        return "it has batch axes"
    if not all(isinstance(size, int) for var in equation.invars for size in var.aval.shape):
        return "a size is symbolic"
    return _why_not_by_size(equation, is_asked=rule is not None)


def _why_not_by_size(equation: Equation, is_asked: bool) -> str:
    (sums, _), _ = equation.params["dimension_numbers"]
    left, right = equation.invars[0].aval.shape, equation.invars[1].aval.shape
    k = math.prod(left[axis] for axis in sums)
    m, n = (math.prod(shape) // max(k, 1) for shape in (left, right))  # There are no batch axes.
    text = f"{m} x {k} x {n}"
    if math.gcd(m, k, n) % MULTIPLE or not m * k * n:
        return f"a size of {text} is no multiple of {MULTIPLE}"
    if not is_asked and 1 / (1 / m + 1 / k + 1 / n) < SMALLEST_SIZE:
        return f"{text} is too small to gain"
    return ""


def warn_without_float8() -> None:
    device = jax.local_devices()[0]
    capability = str(getattr(device, "compute_capability", ""))
    # fp8 came with the compute capability 8.9, of Ada. That of another vendor's GPU may be no number.
    is_nvidia = device.platform in ("gpu", "cuda") and capability[:1].isdigit()
    if device.platform == "cpu" or (is_nvidia and float(capability) < 8.9):
        warnings.warn(
            f"autocast(..., 'float8') runs on {device.device_kind}, which has no fp8 arithmetic: its "
            "products have the numbers of fp8, and not its speed. Hopper (H100, H200), Ada (L4) and later "
            "GPUs multiply fp8.",
            stacklevel=users_stacklevel(),
        )
