"""Products whose derivatives have dtypes of their own.

The gradients of an outer product are real products: they take half operands, also where the outer product
runs in float32.

With `reduce_dtype` the weight gradients of a product leave their own products in float32. On many devices,
each device sums the gradient of a weight over its own part of the batch, inside a product. Then all devices
sum their results. A product of half operands gives half, so the second sum is one of half numbers. Here the
product that makes the weight gradient still takes half operands, which Tensor Cores run, and gives float32.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from .binding import bind, cast
from .jaxprs import Array, Equation, equations, is_literal, open_jaxpr


def product_with_half_gradients(
    equation: Equation, params: dict[str, Any], wide: Sequence[Array], halves: Sequence[Array]
) -> Array:
    """Runs a product in float32, and the products of its derivatives in half.

    Args:
        equation: the product, linear in each of its two operands.
        params: the parameters of a product in half that change.
        wide: its operands in float32.
        halves: the same values in half. Only the derivatives read them.
    """

    @jax.custom_jvp
    def run(wide: Sequence[Array], halves: Sequence[Array]) -> Array:
        del halves
        return bind(equation, wide)[0]

    def rule(primals: Any, tangents: Any) -> tuple[Array, Array]:
        wide, (left, right) = primals
        changes = [
            bind(
                equation,
                [cast(change, left.dtype), right] if index == 0 else [left, cast(change, left.dtype)],
                **params,
            )[0]
            for index, change in enumerate(tangents[0])
            if not isinstance(change, SymbolicZero)
        ]
        return run(*primals), cast(sum(changes), wide[0].dtype)

    run.defjvp(rule, symbolic_zeros=True)
    return run(tuple(wide), tuple(halves))


def product_with_wide_gradients(
    equation: Equation, params: dict[str, Any], halves: Sequence[Array], wide: Sequence[Array | None]
) -> Array:
    """Runs a product that is linear in each of its two operands.

    Args:
        equation: the product.
        params: the parameters of it that change.
        halves: its operands in half.
        wide: for each operand, the same value in float32 if its gradient is wanted in float32; else None.
    """
    product = _Product(equation, params, [each is not None for each in wide])
    run = jax.custom_vjp(product.run)
    run.defvjp(product.forward, product.backward)
    return run(tuple(halves), tuple(wide))


class _Product:
    """A product and its gradients: in float32 for the operands that are given in float32 as well."""

    def __init__(self, equation: Equation, params: dict[str, Any], is_wide: Sequence[bool]) -> None:
        self._equation, self._params, self._is_wide = equation, params, is_wide

    def run(self, halves: Sequence[Array], wide: Sequence[Array | None] = ()) -> Array:
        del wide
        return bind(self._equation, halves, **self._params)[0]

    def forward(self, halves: Sequence[Array], wide: Sequence[Array | None]) -> tuple[Array, Any]:
        return self.run(halves, wide), tuple(halves)

    def backward(self, halves: tuple[Array, Array], cotangent: Array) -> tuple[Any, Any]:
        """Returns the gradient of each operand in the dtype that was asked for; None for the other dtype.

        JAX drops the gradient that nobody asks for from a compiled program.
        """
        gradients = [self._gradient(index, halves[1 - index], cotangent) for index in range(2)]
        of_halves = tuple(None if wide else each for each, wide in zip(gradients, self._is_wide))
        of_wide = tuple(each if wide else None for each, wide in zip(gradients, self._is_wide))
        return of_halves, of_wide

    def _gradient(self, index: int, other: Array, cotangent: Array) -> Array:
        """Returns the gradient of the operand at `index`, by the transpose that JAX has for the product."""
        operand = self._equation.invars[index].aval.update(dtype=other.dtype, weak_type=False)

        def transposed(other: Array, cotangent: Array) -> Array:
            of_operand = lambda x: self.run((x, other) if index == 0 else (other, x))
            return jax.linear_transpose(of_operand, operand)(cotangent)[0]

        inside = open_jaxpr(jax.make_jaxpr(transposed)(other, cotangent))
        known = dict(zip(inside.invars, (other, cotangent)))
        for each in equations(inside):
            operands = [var.val if is_literal(var) else known[var] for var in each.invars]
            widens = self._is_wide[index] and each.primitive is self._equation.primitive
            gives = {"preferred_element_type": np.dtype(jnp.float32)} if widens else {}
            known.update(zip(each.outvars, bind(each, operands, **gives)))
        return known[inside.outvars[0]]
