"""`with_layer_loss_scale`: a loss scale for one layer, for networks that no global scale serves."""

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


def with_layer_loss_scale(fun: Callable[P, R]) -> Callable[P, R]:
    """Returns a layer whose backward pass has a loss scale of its own.

    The forward pass is that of `fun`. The backward pass multiplies the gradient that arrives at the layer by
    a power of two, so that its largest element is between 1 and 2. It then runs the backward pass of `fun`,
    and divides the gradients of the arguments by the same power of two in float32.

    The scale is computed from the gradient: there is no state, and the scale causes no overflow.
    Multiplication and division are exact, except for results below `2**-126`. A gradient with inf or NaN is
    passed on unscaled. The cost is a maximum over the gradient that arrives.

    Put the half precision inside, and float32 between the layers. A global loss scale may be used as well:

        layer = jmp.with_layer_loss_scale(jmp.autocast(layer, jnp.float16))

    Args:
        fun: a function of pytrees of arrays, such as the parameters of a layer and its input. The arrays that
            are differentiated should be float32 or wider. Arrays that `fun` closes over are differentiated
            too.

    Returns:
        A function with the arguments and results of `fun`, with half results cast to float32. It has no
        forward-mode derivative (`jax.jvp`). Its second derivatives are those of `fun`.

    Raises:
        TypeError: `fun` is not a function; or the layer is differentiated with respect to a half array, which
            cannot hold a gradient without its scale.

    Source: Zhao, Vogel and Ahmed 2019, Adaptive Loss Scaling for Mixed Precision Training, where the scale of
    a layer comes from statistics.

    Examples:
        >>> w, x = jnp.full((4, 4), 0.5), jnp.ones((2, 4))
        >>> half = lambda w, x: (x.astype(jnp.float16) @ w.astype(jnp.float16)).astype(jnp.float32)
        >>> loss = lambda layer: lambda w: jnp.sum(layer(w, x)) * 2.0**-40
        >>> scaled = jmp.with_layer_loss_scale(half)
        >>> print(jax.grad(loss(half))(w)[0, 0], jax.grad(loss(scaled))(w)[0, 0] * 2.0**40)
        0.0 2.0
    """
    if not callable(fun):
        raise TypeError(f"with_layer_loss_scale takes a function of arrays. Got {fun!r}.")

    @functools.wraps(fun)
    def layer(*args: Any, **kwargs: Any) -> Any:
        return _call(fun, args, kwargs)

    return layer


def _call(fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls a layer as a function of all its arrays: its arguments, and the arrays that it closes over."""
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
    # A `jax.custom_vjp` gives gradients only to its arguments, and JAX refuses to differentiate what it
    # closes over (https://github.com/jax-ml/jax/pull/4008). So arrays that are closed over become arguments.
    converted, outside = jax.closure_convert(run, *arrays)
    names = [paths[index] for index in indices] + ["that it takes from outside"] * len(outside)
    return _scaled(converted, names)(*arrays, *outside)


def _scaled(run: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
    """Returns a function of arrays, named `names`, with a scaled backward pass."""

    def kept(*arrays: Any) -> Any:
        # An autocast around the layer must cast inside it: a cast outside would get an unscaled gradient.
        return checkpoint_name(run(*checkpoint_name(arrays, KEEP_FLOAT32_NAME)), KEEP_FLOAT32_NAME)

    def forward(*primals: Any) -> Any:
        # With `symbolic_zeros`, JAX says which arguments are differentiated. The others may be in half.
        for name, primal in zip(names, primals, strict=True):
            if primal.perturbed and is_half(primal.value):
                raise TypeError(
                    f"with_layer_loss_scale: the argument {name} is differentiated and is "
                    f"{primal.value.dtype}, which cannot hold a gradient without its scale. Give float32, "
                    "and cast inside: jmp.with_layer_loss_scale(jmp.autocast(layer, jnp.float16))."
                )
        # The function that pulls back is a pytree, so that it may be the residual of the custom derivative.
        return jax.vjp(kept, *(primal.value for primal in primals))

    def backward(pull_back: Any, cotangents: Any) -> Any:
        cotangents = jax.tree.map(_as_array, cotangents, is_leaf=lambda x: isinstance(x, SymbolicZero))
        power = _power_of_two(cotangents)
        # The reciprocal of a power of two is exact, and `pull_back` is linear: scale and division cancel.
        return _times(pull_back(_times(cotangents, 1 / power)), power)

    scaled: Any = jax.custom_vjp(kept)
    scaled.defvjp(forward, backward, symbolic_zeros=True)
    return scaled


def _power_of_two(cotangents: Any) -> jax.Array:
    """Returns the largest power of two up to the largest element, or 1 if that is 0, inf or NaN."""
    floating = [x for x in jax.tree.leaves(cotangents) if has_dtype(x, jnp.inexact)]
    sizes = (jnp.max(jnp.abs(x), initial=0).astype(jnp.float32) for x in floating)
    largest = functools.reduce(jnp.maximum, sizes, jnp.float32(0))
    exponent = lax.bitcast_convert_type(largest, jnp.int32) & 0x7F800000  # Without sign and mantissa.
    # From 2**-126 to 2**126. The reciprocal of 2**127 is subnormal, and XLA flushes it to zero on a CPU:
    # https://github.com/jax-ml/jax/issues/16200.
    exponent = jnp.clip(exponent, 1 << 23, 253 << 23)
    power = lax.bitcast_convert_type(exponent, jnp.float32)
    return jnp.where((largest > 0) & jnp.isfinite(largest), power, 1)


def _times(tree: Any, factor: jax.Array) -> Any:
    return jax.tree.map(lambda x: x * factor.astype(x.dtype) if has_dtype(x, jnp.inexact) else x, tree)


def _as_array(cotangent: Any) -> Any:
    """Returns a cotangent as an array; that of an unused result is a `SymbolicZero`."""
    if not isinstance(cotangent, SymbolicZero):
        return cotangent
    zero: Any = cotangent  # Its attributes have no types that pyright knows.
    return jnp.zeros(zero.shape, zero.dtype)
