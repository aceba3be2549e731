"""Gradients of a scaled loss, given back true: `value_and_grad` and `grad`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._tree import at_least_float32
from .loss_scale import LossScale, is_loss_scale


def value_and_grad(
    fun: Callable[..., Any],
    loss_scale: LossScale,
    argnums: int | Sequence[int] | Any = 0,
    has_aux: bool = False,
    transform: Callable[..., Callable[..., Any]] = jax.value_and_grad,
) -> Callable[..., tuple[Any, Any]]:
    """Like `jax.value_and_grad`, with the loss scaled on the way back and the gradients unscaled.

    Args:
        fun: returns a floating scalar loss, shape `()`, or with `has_aux` a pair of it and anything.
            It is best float32: the scale enters the backward pass in the dtype of the loss.
        loss_scale: the scale of this step.
        argnums: which positional arguments to differentiate; what `transform` takes.
        has_aux: whether `fun` returns `(loss, aux)`.
        transform: a function with the interface of `jax.value_and_grad`, such as
            `flax.nnx.value_and_grad`, `equinox.filter_value_and_grad`, or a `functools.partial`
            of one with more settings.

    Returns:
        A function of the arguments of `fun`, keyword arguments included, that gives `(loss, grads)`
        or `((loss, aux), grads)`. The loss is exactly what `fun` returned. The gradients have been
        divided by the scale and are float32 for parameters of any dtype (float64 and
        complex stay).

    Raises:
        TypeError: the loss is no floating scalar, or `loss_scale` is not a loss scale.

    >>> from jmp_lite import DynamicLossScale
    >>> loss_fn = lambda w, x: jnp.sum(w * x).astype(jnp.float32)
    >>> value_and_grad(loss_fn, DynamicLossScale(1024.0))(jnp.float16(2), jnp.float16(3))
    (Array(6., dtype=float32), Array(3., dtype=float32))

    Guide: docs/loss-scaling.md.
    """
    if not is_loss_scale(loss_scale):
        raise TypeError(
            "value_and_grad(fun, loss_scale): expected a loss scale such as jmp.get_loss_scale(opt_state) or "
            "jmp.DynamicLossScale(), or jmp.NoOpLossScale() for no scale. "
            f"Got {'a class' if isinstance(loss_scale, type) else type(loss_scale).__name__}."
        )

    @functools.wraps(fun)
    def scaled(*args: Any, **kwargs: Any) -> tuple[Any, _LossAndAux]:
        loss, aux = _split(fun(*args, **kwargs), has_aux)
        # The true loss is an auxiliary output: where the scaled loss overflows, no division undoes it.
        return loss_scale.scale(loss), _LossAndAux(loss, aux)

    # Equinox's transforms take no `argnums`, so 0, which is everybody's default, is left out.
    settings = {} if isinstance(argnums, int) and argnums == 0 else {"argnums": argnums}
    scaled_value_and_grad = transform(scaled, has_aux=True, **settings)

    @functools.wraps(fun)
    def true_value_and_grad(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        value, grads = scaled_value_and_grad(*args, **kwargs)
        if not (isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], _LossAndAux)):
            raise TypeError(
                "transform should return what jax.value_and_grad returns, ((value, aux), gradients), as "
                "flax.nnx.value_and_grad and equinox.filter_value_and_grad do. For gradients alone: jmp.grad."
            )
        loss, aux = value[1]
        grads = at_least_float32(loss_scale.unscale(grads))
        return ((loss, aux) if has_aux else loss), grads

    return true_value_and_grad


def grad(
    fun: Callable[..., Any],
    loss_scale: LossScale,
    argnums: int | Sequence[int] | Any = 0,
    has_aux: bool = False,
    transform: Callable[..., Callable[..., Any]] = jax.value_and_grad,
) -> Callable[..., Any]:
    """Like `jax.grad`, with the loss scaled on the way back and the gradients unscaled.

    Args:
        fun, loss_scale, argnums, has_aux, transform: as in `value_and_grad`; `transform` is still a
            `value_and_grad`.

    Returns:
        A function of the arguments of `fun` that gives `grads`, or `(grads, aux)` with `has_aux`.

    Raises:
        TypeError: the loss is no floating scalar, or `loss_scale` is not a loss scale.

    >>> from jmp_lite import StaticLossScale
    >>> grad(lambda w: w**2, StaticLossScale(1024.0))(jnp.float32(3))
    Array(6., dtype=float32)

    Guide: docs/loss-scaling.md.
    """
    both = value_and_grad(fun, loss_scale, argnums, has_aux, transform)

    @functools.wraps(fun)
    def true_grad(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return true_grad


class _LossAndAux(NamedTuple):
    """The true loss and the auxiliary output beside the scaled loss."""

    loss: Any
    aux: Any


def _split(output: Any, has_aux: bool) -> tuple[Any, Any]:
    """Returns `(loss, aux)`, having checked that the loss is a floating scalar."""
    if has_aux and not (isinstance(output, (tuple, list)) and len(output) == 2):
        raise TypeError(
            f"With has_aux=True the function should return a pair (loss, aux). Got {type(output).__name__}."
        )
    loss, aux = output if has_aux else (output, None)
    if isinstance(loss, (tuple, list)):
        raise TypeError(
            "The loss should be a floating scalar. Got a "
            f"{type(loss).__name__} of {len(loss)}. If the function returns (loss, aux), give has_aux=True."
        )
    if not (hasattr(loss, "dtype") or isinstance(loss, (int, float, complex))):
        raise TypeError(f"The loss should be a floating scalar. Got {type(loss).__name__}.")
    shape, dtype = jnp.shape(loss), jnp.result_type(loss)
    if shape != () or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"The loss should be a floating scalar. Got shape {shape} and dtype {dtype}. Reduce it, "
            "for example with jnp.mean, and return a real number."
        )
    return loss, aux
