"""`scale_layer`: a loss scale of its own for one layer, for networks that no global scale serves."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from .._paths import leaf_names
from .._tree import KEEP_FLOAT32_NAME, at_least_float32, has_dtype, is_half

P = ParamSpec("P")
R = TypeVar("R")


def scale_layer(fun: Callable[P, R]) -> Callable[P, R]:
    """Returns a layer whose backward pass has a loss scale of its own.

    The forward pass is that of `fun`. The backward pass multiplies the gradient that arrives at the layer by
    a power of two, so that its largest element is between 1 and 2, then runs the backward pass of `fun`, then
    divides the gradients of the arguments by that power of two in float32. So the half precision inside `fun`
    sees gradients in the middle of its range, however small or large they are outside. The scale comes from
    the gradient itself: there is no state, and no overflow by the scale. Both products are exact, but for
    results below `2**-126`. A gradient that holds inf or NaN is passed on as it is.

    Put the half precision inside, and float32 between the layers:

        layer = jmp.scale_layer(jmp.autocast(layer, jnp.float16))

    A global loss scale may be used too. The cost is a maximum over the gradient that arrives.

    Args:
        fun: a function of pytrees of arrays, such as the parameters of a layer and its input. The arrays that
            are differentiated should be float32 or wider. Arrays that `fun` takes from outside are
            differentiated too.

    Returns:
        A function with the arguments and results of `fun`. Half precision results come as float32. It has no
        forward-mode derivative (`jax.jvp`), and second derivatives are those of `fun`.

    Raises:
        TypeError: `fun` is no function; or, when the layer is differentiated, with respect to an array in
            half precision, which cannot hold a gradient without its scale.

    Source: Zhao, Vogel and Ahmed 2019, Adaptive Loss Scaling for Mixed Precision Training, give each layer a
    scale. They estimate it from statistics of weights and gradients; here the largest element gives it.

    Examples:
        >>> w, x = jnp.full((4, 4), 0.5), jnp.ones((2, 4))
        >>> half = lambda w, x: (x.astype(jnp.float16) @ w.astype(jnp.float16)).astype(jnp.float32)
        >>> loss = lambda layer: lambda w: jnp.sum(layer(w, x)) * 2.0**-40
        >>> print(jax.grad(loss(half))(w)[0, 0], jax.grad(loss(jmp.scale_layer(half)))(w)[0, 0] * 2.0**40)
        0.0 2.0
    """
    if not callable(fun):
        raise TypeError(f"scale_layer takes a function of arrays. Got {fun!r}.")

    @functools.wraps(fun)
    def layer(*args: Any, **kwargs: Any) -> Any:
        return _call(fun, args, kwargs)

    return layer


def _call(fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls a layer as a function of all its arrays: its arguments, and the arrays it takes from outside.

    A `jax.custom_vjp` gives gradients to its arguments alone. `jax.closure_convert` makes arguments of the
    arrays that `fun` takes from outside.
    """
    leaves, structure = jax.tree.flatten((args, kwargs))
    indices = [index for index, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
    paths = leaf_names((args, kwargs))

    def run(*arrays: Any) -> Any:
        new_leaves = list(leaves)
        for index, array in zip(indices, arrays, strict=True):
            new_leaves[index] = array
        args, kwargs = jax.tree.unflatten(structure, new_leaves)
        return at_least_float32(fun(*args, **kwargs))

    arrays = [leaves[index] for index in indices]
    converted, outside = jax.closure_convert(run, *arrays)
    names = [paths[index] for index in indices] + ["that it takes from outside"] * len(outside)
    return _scaled(converted, names)(*arrays, *outside)


def _scaled(run: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
    """Returns a function of arrays, whose names are given, with a scaled backward pass."""

    def kept(*arrays: Any) -> Any:
        # An autocast around the layer casts inside it: a cast outside gets a gradient without its scale.
        return checkpoint_name(run(*checkpoint_name(arrays, KEEP_FLOAT32_NAME)), KEEP_FLOAT32_NAME)

    def forward(*primals: Any) -> Any:
        for name, primal in zip(names, primals, strict=True):
            if primal.perturbed and is_half(primal.value):
                raise TypeError(
                    f"scale_layer: the argument {name} is differentiated and is {primal.value.dtype}, "
                    "which cannot hold a gradient without its scale. Give float32, and cast inside: "
                    "jmp.scale_layer(jmp.autocast(layer, jnp.float16))."
                )
        return jax.vjp(kept, *(primal.value for primal in primals))

    def backward(pull_back: Any, cotangents: Any) -> Any:
        cotangents = jax.tree.map(_as_array, cotangents, is_leaf=lambda x: isinstance(x, SymbolicZero))
        power = _power_of_two(cotangents)
        return _times(pull_back(_times(cotangents, 1 / power)), power)

    scaled: Any = jax.custom_vjp(kept)
    scaled.defvjp(forward, backward, symbolic_zeros=True)
    return scaled


def _power_of_two(cotangents: Any) -> jax.Array:
    """Returns the largest power of two that is not above the largest element; 1 for 0, inf and NaN."""
    sizes = [
        jnp.max(jnp.abs(x), initial=0).astype(jnp.float32)
        for x in jax.tree.leaves(cotangents)
        if has_dtype(x, jnp.inexact)
    ]
    largest = functools.reduce(jnp.maximum, sizes, jnp.float32(0))
    exponent = lax.bitcast_convert_type(largest, jnp.int32) & 0x7F800000
    # Between 2**-126 and 2**126, so that the reciprocal is no subnormal number, which XLA may flush to zero.
    exponent = jnp.clip(exponent, 1 << 23, 253 << 23)
    power = lax.bitcast_convert_type(exponent, jnp.float32)
    # Without the barrier XLA copies the maximum into each kernel that reads it, and computes it there again.
    return lax.optimization_barrier(jnp.where((largest > 0) & jnp.isfinite(largest), power, 1))


def _times(tree: Any, factor: jax.Array) -> Any:
    return jax.tree.map(lambda x: x * factor.astype(x.dtype) if has_dtype(x, jnp.inexact) else x, tree)


def _as_array(cotangent: Any) -> Any:
    """Returns a cotangent as an array: `symbolic_zeros=True` gives a `SymbolicZero` for an unused result."""
    if not isinstance(cotangent, SymbolicZero):
        return cotangent
    zero: Any = cotangent  # Its attributes have no types that pyright knows.
    return jnp.zeros(zero.shape, zero.dtype)
