"""Products of operands in fp8, with their gradients.

As in `quantize`, the operations are written such that XLA makes few kernels of them on a GPU.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._jaxpr import INLINE, Array, Equation, Product, bind, cast, replay_transpose
from .quantize import BACKWARD, FORWARD, Quantized, quantize


def multiply(
    params: Mapping[str, Any],
    left: Quantized,
    right: Quantized,
    dtype: Any,
    precision: Any = None,
) -> Array:
    """Runs a `dot_general` without batch axes on operands in fp8.

    Args:
        params: the parameters of the `dot_general`.
        left: its first operand.
        right: its second operand.
        dtype: the dtype of the result.
        precision: `lax.Precision.HIGHEST` for sums in float32; by default cuBLAS may sum with fewer bits
            (https://github.com/openxla/xla/pull/6599).
    """
    # Each product contracts the last axes of both operands, as cuBLAS wants them:
    # https://github.com/NVIDIA/CUDALibrarySamples/issues/242. XLA writes a transposed operand in the kernel
    # that casts it.
    (left_sums, right_sums), _ = params["dimension_numbers"]
    count = len(left_sums)
    a, b = _sums_last(left.array, left_sums), _sums_last(right.array, right_sums)
    sums = tuple(range(a.ndim - count, a.ndim)), tuple(range(b.ndim - count, b.ndim))
    free = a.ndim - count, b.ndim - count
    # JAX makes the gradient of a right operand as the product of the cotangent and the left operand, and
    # transposes it (https://github.com/jax-ml/jax/blob/jax-v0.10.2/jax/_src/lax/lax.py#L5852). With the
    # operands in the other order, the two transposes cancel.
    swap = left.dtype == BACKWARD and not _are_last(left.array, left_sums)
    changed = {"preferred_element_type": np.dtype(dtype), "precision": precision}
    if swap:
        a, b, sums = b, a, sums[::-1]
        if (sharding := params.get("out_sharding")) is not None:  # On a mesh of explicit axes.
            axes = (*sharding.spec, *(None for _ in range(sum(free) - len(sharding.spec))))
            changed["out_sharding"] = sharding.update(spec=(*axes[free[0] :], *axes[: free[0]]))
    changed["dimension_numbers"] = sums, ((), ())
    result = lax.dot_general_p.bind(a, b, **{**params, **changed})
    # The steps multiply the result: with Triton's GEMMs, XLA would run a product of scaled operands in
    # bfloat16. XLA folds one factor into the call of cuBLAS, not two. The product of the steps is zero if the
    # largest numbers of both operands multiply to less than 2**-103 (1e-31).
    result = result * lax.convert_element_type(left.step * right.step, dtype)
    if swap:
        result = lax.transpose(result, (*range(free[1], sum(free)), *range(free[1])))
    return result


def _are_last(x: Array, axes: Sequence[int]) -> bool:
    return tuple(axes) == tuple(range(x.ndim - len(axes), x.ndim))


def _sums_last(x: Array, axes: Sequence[int]) -> Array:
    order = (*(axis for axis in range(x.ndim) if axis not in axes), *axes)
    return x if _are_last(x, axes) else lax.transpose(x, order)


def float8_product(
    equation: Equation,
    operands: Sequence[Array],
    quantized: Sequence[Quantized],
    dtype: np.dtype,
    gradients: Sequence[np.dtype],
) -> Array:
    """Runs a `dot_general` in fp8, and the products of its gradients.

    Args:
        equation: the product.
        operands: its operands. Their gradients get their dtypes.
        quantized: the same operands in e4m3.
        dtype: the dtype of the result.
        gradients: for each operand, the dtype that the product of its gradient gives.
    """
    run = _remembered(tuple(equation.params.items()), dtype, tuple(gradients))
    return run(tuple(operands), tuple(quantized))


@functools.lru_cache(maxsize=4096)
def _remembered(params: tuple[tuple[str, Any], ...], dtype: np.dtype, gradients: tuple[np.dtype, ...]) -> Any:
    # JAX remembers the trace and the derivative of a jitted function, so equal layers share them.
    return jax.jit(functools.partial(_product, dict(params), dtype, gradients), inline=INLINE)


def _product(
    params: Mapping[str, Any],
    dtype: np.dtype,
    gradients: Sequence[np.dtype],
    operands: Sequence[Array],
    quantized: Sequence[Quantized],
) -> Array:
    # Only its transpose is traced, for the axes of the gradients. It never runs.
    in_half = {**params, "preferred_element_type": np.dtype(jnp.bfloat16), "precision": None}
    half_product = functools.partial(lax.dot_general_p.bind, **in_half)

    @jax.custom_vjp
    def run(operands: Any, quantized: Any) -> Array:
        del operands
        left, right = quantized
        return multiply(params, left, right, dtype)

    def forward(operands: Any, quantized: Any) -> tuple[Array, Any]:
        del operands
        # Not `run`: a policy of `jax.checkpoint` should see the product. JAX keeps the fp8 arrays and the
        # steps for the backward pass, but not the operands.
        left, right = quantized
        return _first_order(multiply(params, left, right, dtype), steps_of(quantized))[0], quantized

    def backward(quantized: Any, cotangent: Array) -> tuple[Any, Any]:
        half, steps = _first_order(cast(cotangent, jnp.bfloat16), steps_of(quantized))
        quantized = [dataclasses.replace(each, step=step) for each, step in zip(quantized, steps)]
        # cuBLAS cannot multiply e5m2 by e5m2 (https://github.com/pytorch/pytorch/issues/132005): if the other
        # operand is in e5m2, the cotangent is in e4m3.
        formats = [FORWARD if other.dtype == BACKWARD else BACKWARD for other in quantized[::-1]]
        cotangents = {dtype: quantize(half, dtype) for dtype in formats}
        arrays = (
            _gradient(half_product, index, quantized, cotangents[formats[index]], gradients[index])
            for index in range(2)
        )
        return tuple(cast(x, dtype) for x, dtype in zip(arrays, dtypes)), None

    def steps_of(quantized):
        return [each.step for each in quantized]

    dtypes = [operand.dtype for operand in operands]
    run.defvjp(forward, backward)
    return run(tuple(operands), tuple(quantized))


@jax.custom_jvp
def _first_order(x: Array, steps: list[Array]) -> tuple[Array, list[Array]]:
    """Returns its arguments. Differentiating them, which would be a second derivative, raises an error."""
    # The steps carry a tangent where an operand does (`quantize`). Without the error, a gradient penalty
    # would have the gradient zero: casts to fp8 are constants here.
    return x, steps


@_first_order.defjvp
def _first_order_jvp(*_: Any) -> Any:
    raise ValueError(
        "autocast to float8 gives only first derivatives, and a gradient was differentiated again. Take "
        "all derivatives of the plain function and put autocast around them: autocast(jax.grad(loss), "
        "'float8'), also where `loss` takes a gradient itself, as a gradient penalty does. Or keep the "
        "function that is differentiated twice in bfloat16: autocast(fun)."
    )


def _gradient(
    product: Product, index: int, quantized: Sequence[Quantized], cotangent: Quantized, dtype: Any
) -> Array:
    """Returns the gradient of the operand at `index`, by the transpose that JAX has for the product."""
    # Traced as the transpose of a product in bfloat16, whose casts `run` leaves out.
    operand = jax.typeof(quantized[index].bits).update(dtype=np.dtype(jnp.bfloat16))

    def transposed(*arrays: Array) -> Array:
        other, of_result = (lax.convert_element_type(x, jnp.bfloat16) for x in arrays)

        def of_operand(x):
            return product(x, other) if index == 0 else product(other, x)

        return jax.linear_transpose(of_operand, operand)(of_result)[0]

    def run(equation: Equation, operands: Sequence[Any]) -> Any:
        if equation.primitive.name == "dot_general":
            left, right = operands
            return multiply(equation.params, left, right, dtype, lax.Precision.HIGHEST)
        if not isinstance(operands[0], Quantized):
            return bind(equation, operands)[0]
        if equation.primitive.name == "convert_element_type":
            return operands[0]
        (x,) = operands  # In a shard_map an operand may vary over fewer devices than the result does.
        return dataclasses.replace(x, bits=bind(equation, [x.bits])[0])

    other = quantized[1 - index]
    return replay_transpose(transposed, (other.array, cotangent.array), (other, cotangent), run)
