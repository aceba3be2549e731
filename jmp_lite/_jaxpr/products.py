"""Products whose derivatives have dtypes of their own, for autocast and for the layers of Flax."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from .bind import bind, cast
from .read import Array, Equation, Var, constants
from .replay import replay

Product = Callable[[Array, Array], Array]
"""A function that is linear in each of its two operands."""


def product_with_half_gradients(
    product: Product, half_product: Product, wide: Sequence[Array], halves: Sequence[Array]
) -> Array:
    """Runs a product that gives float32, and the products of its derivatives in half.

    Args:
        product: the product.
        half_product: the same product of half operands, which gives half.
        wide: the operands of the product, in float32 or in half.
        halves: the same values in half. Only the derivatives read them.
    """

    @jax.custom_jvp
    def run(wide: Sequence[Array], halves: Sequence[Array]) -> Array:
        del halves
        return product(*wide)

    def rule(primals: Any, tangents: Any) -> tuple[Array, Array]:
        # The tangent of a product is the sum of one product for each operand, whose transposes are the
        # products of the gradients. Of an operand that is not perturbed, JAX would compute one with zeros.
        _, (left, right) = primals
        left_tangent, right_tangent = tangents[0]
        terms = []
        if not isinstance(left_tangent, SymbolicZero):
            terms.append(half_product(cast(left_tangent, left.dtype), right))
        if not isinstance(right_tangent, SymbolicZero):
            terms.append(half_product(left, cast(right_tangent, left.dtype)))
        result = product(*primals[0])  # Not `run`: a policy of `jax.checkpoint` should see the product.
        return result, cast(sum(terms), result.dtype)

    run.defjvp(rule, symbolic_zeros=True)
    return run(tuple(wide), tuple(halves))


def product_with_wide_gradients(
    product: Product, half_product: Product, halves: Sequence[Array], wide: Sequence[Array | None]
) -> Array:
    """Runs a product of half operands, whose gradients have the dtype that each operand had before its cast.

    Args:
        product: the product. It gives half or float32.
        half_product: the same product, which gives half. The gradients are its transposes.
        halves: its operands in half.
        wide: for each operand, the same value in float32 or wider if its gradient is wanted in that dtype;
            None if its gradient is wanted in half.
    """
    # On many devices, each device sums the gradient of a weight over its own part of the batch, inside a
    # product. Then all devices sum their results. JAX's product of half operands gives half, so the second
    # sum would be one of half numbers (https://github.com/jax-ml/jax/issues/27496). Here the product takes
    # half operands, which Tensor Cores run, and gives float32: https://github.com/jax-ml/jax/issues/34330.
    dtypes = [None if x is None else np.dtype(x.dtype) for x in wide]

    def forward(halves: tuple[Array, Array], wide: Any) -> tuple[Array, Any]:
        del wide
        return product(*halves), halves

    def backward(halves: tuple[Array, Array], cotangent: Array) -> tuple[Any, Any]:
        cotangent = cast(cotangent, halves[0].dtype)
        gradients = [_gradient(half_product, index, halves, cotangent, dtypes[index]) for index in range(2)]
        # A gradient is that of the operand, or of its float32 twin: None is zero. JAX drops the gradients
        # that nobody asks for from a compiled program.
        of_halves = tuple(x if dtype is None else None for x, dtype in zip(gradients, dtypes))
        of_wide = tuple(None if dtype is None else x for x, dtype in zip(gradients, dtypes))
        return of_halves, of_wide

    run = jax.custom_vjp(lambda halves, wide: forward(halves, wide)[0])
    run.defvjp(forward, backward)
    return run(tuple(halves), tuple(wide))


def _gradient(
    product: Product, index: int, halves: tuple[Array, Array], cotangent: Array, dtype: np.dtype | None
) -> Array:
    """Returns the gradient of the operand at `index`, by the transpose that JAX has for the product.

    Where `dtype` is given, it has this dtype.
    """
    # `jax.typeof`, since in a `shard_map` the type says over which devices a value varies.
    operand, other = jax.typeof(halves[index]), halves[1 - index]

    def transposed(other: Array, cotangent: Array) -> Array:
        def of_operand(x):
            return product(x, other) if index == 0 else product(other, x)

        return jax.linear_transpose(of_operand, operand)(cotangent)[0]

    # The transpose is a product too, with moves around it and, in a `shard_map`, with a sum over the devices.
    # If the product gives another dtype, the sum adds numbers of this dtype.
    def run(equation: Equation, operands: Sequence[Array]) -> Array:
        if dtype is not None and equation.primitive.name == "dot_general":
            return wide_product(equation, operands, dtype)
        return bind(equation, operands)[0]

    return replay_transpose(transposed, (other, cotangent), (other, cotangent), run)


def replay_transpose(
    transposed: Callable[..., Array],
    arrays: Sequence[Array],
    operands: Sequence[Any],
    run: Callable[[Equation, Sequence[Any]], Any],
) -> Any:
    """Traces the transpose of a product, and runs each operation of the transpose by `run`.

    Args:
        transposed: a function of two arrays: the other operand, and the cotangent.
        arrays: the two arrays. Only their types are read.
        operands: the two values on which the operations run, of any kind.
        run: takes an operation and its operands, and returns its result.
    """

    def action(index: int, equation: Equation, read: Callable[[Var], Any]) -> list[Any]:
        del index
        return [run(equation, [read(var) for var in equation.invars])]

    closed = jax.make_jaxpr(transposed)(*arrays)
    return replay(closed, [*constants(closed), *operands], lambda var: var.val, action)[0]


def wide_product(equation: Equation, halves: Sequence[Array], dtype: Any, **params: Any) -> Array:
    """Runs a `dot_general` of half operands that gives another dtype. Those of its derivatives give half.

    Args:
        equation: the product; JAX made it as the gradient of another one.
        halves: its operands.
        dtype: the dtype of the result.
        params: further parameters that change.
    """

    def product(*halves):
        return _wide_product(equation, halves, dtype, params)

    of_half = {**params, "preferred_element_type": np.dtype(halves[0].dtype)}

    def half_product(*halves):
        return bind(equation, halves, **of_half)[0]

    return product_with_half_gradients(product, half_product, halves, halves)


def _wide_product(equation: Equation, halves: Sequence[Array], dtype: Any, params: dict[str, Any]) -> Array:
    params = {**params, "preferred_element_type": np.dtype(dtype)}
    # On a mesh of explicit axes the sharding of the result belongs to its axes in this order.
    if equation.params.get("out_sharding") is not None:
        return bind(equation, halves, **params)[0]
    # JAX gives the cotangent first, and transposes the gradient of a right operand
    # (https://github.com/jax-ml/jax/blob/jax-v0.10.2/jax/_src/lax/lax.py#L5852). XLA's CPU backend cannot
    # run such a product of bfloat16 operands with a float32 result, if it sums over several axes:
    # "Unsupported element type for DotThunk::Execute: BF16 x BF16 = F32". It can if the operands change
    # places, since then the two transposes cancel.
    (left_sums, right_sums), (left_batch, right_batch) = equation.params["dimension_numbers"]
    params["dimension_numbers"] = (right_sums, left_sums), (right_batch, left_batch)
    (result,) = bind(equation, halves[::-1], **params)
    batch, right_free = len(left_batch), halves[1].ndim - len(right_sums) - len(right_batch)
    order = [*range(batch), *range(batch + right_free, result.ndim), *range(batch, batch + right_free)]
    return lax.transpose(result, order)
