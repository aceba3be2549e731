"""`value_and_grad` and `grad`: true gradients from a backward pass with a scaled loss."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp

from .._paths import named_leaves
from .._tree import at_least_float32, is_floating
from .loss_scale import LossScale, LossScaleLike, as_loss_scale

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")


def value_and_grad(
    fun: Callable[P, R],
    loss_scale: LossScaleLike = None,  # type: ignore[assignment]
    argnums: int | Sequence[int] | Any = 0,
    has_aux: bool = False,
    value_and_grad_fn: Callable[..., Callable[..., Any]] = jax.value_and_grad,
) -> Callable[P, tuple[R, Any]]:
    """Like `jax.value_and_grad`, but the backward pass runs with the scaled loss. The gradients are unscaled.

    Args:
        fun: a function that returns a floating loss, shape `()`, or with `has_aux` a pair `(loss, aux)`. The
            loss should be float32, since the scale enters the backward pass in its dtype.
        loss_scale: the scale of this step; a number is a `StaticLossScale`. It has to be given.
        argnums: which positional arguments to differentiate, in the form that `value_and_grad_fn` takes.
        has_aux: whether `fun` returns `(loss, aux)`.
        value_and_grad_fn: a function with the interface of `jax.value_and_grad`, such as
            `flax.nnx.value_and_grad`, `equinox.filter_value_and_grad`, or a `functools.partial` of one with
            more settings.

    Returns:
        A function of the arguments of `fun` that returns `(loss, grads)` or `((loss, aux), grads)`, with the
        loss that `fun` returned. The gradients are divided by the scale, and float32 even for half
        parameters; float64 and complex gradients keep their dtype.

    Raises:
        TypeError: `fun` or `value_and_grad_fn` is not a function, `loss_scale` is not a loss scale, or
            `argnums` are names; or, when the result is called, the loss is not a floating scalar, or the
            model needs a `value_and_grad_fn`.

    Examples:
        >>> loss_fn = lambda w, x: jnp.sum(w * x).astype(jnp.float32)
        >>> jmp.value_and_grad(loss_fn, jmp.DynamicLossScale(1024.0))(jnp.float16(2), jnp.float16(3))
        (Array(6., dtype=float32), Array(3., dtype=float32))
    """
    return _true_value_and_grad("value_and_grad", fun, loss_scale, argnums, has_aux, value_and_grad_fn)


def _true_value_and_grad(
    made_by: str,
    fun: Callable[..., Any],
    loss_scale: LossScaleLike,
    argnums: Any,
    has_aux: bool,
    value_and_grad_fn: Callable[..., Callable[..., Any]],
) -> Callable[..., tuple[Any, Any]]:
    """`value_and_grad` for the public function `made_by`, which error messages name."""
    scale = _checked(made_by, fun, loss_scale, argnums, value_and_grad_fn)

    @functools.wraps(fun)
    def scaled(*args: Any, **kwargs: Any) -> tuple[Any, _LossAndAux]:
        loss, aux = _split(fun(*args, **kwargs), has_aux)
        # The true loss is an auxiliary output, since the scaled loss may overflow.
        return scale.scale(loss), _LossAndAux(loss, aux)

    # Equinox's transforms take no `argnums`, so the default of all transforms, 0, is left out:
    # https://github.com/patrick-kidger/equinox/blob/v0.13.8/equinox/_ad.py#L173.
    settings = {} if isinstance(argnums, int) and argnums == 0 else {"argnums": argnums}
    scaled_value_and_grad = value_and_grad_fn(scaled, has_aux=True, **settings)

    @functools.wraps(fun)
    def true_value_and_grad(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        try:
            value, grads = scaled_value_and_grad(*args, **kwargs)
        except Exception as error:
            # JAX's error for a model with functions in it does not name the transform of its library.
            if value_and_grad_fn is jax.value_and_grad and (cause := _needs_other_fn(error, args, argnums)):
                raise TypeError(f"{made_by}: {cause}") from error
            raise
        if not (isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], _LossAndAux)):
            is_grad = made_by == "grad"
            raise TypeError(
                f"{made_by}: value_and_grad_fn should return what jax.value_and_grad returns, ((value, aux), "
                "gradients), as flax.nnx.value_and_grad and equinox.filter_value_and_grad do. "
                f"{'jmp.grad takes one of these too' if is_grad else 'For gradients alone: jmp.grad'}."
            )
        loss, aux = value[1]
        # `NoOpLossScale` returns half gradients as they are.
        grads = at_least_float32(scale.unscale(grads))
        return ((loss, aux) if has_aux else loss), grads

    return true_value_and_grad


def _checked(made_by: str, fun: Any, loss_scale: Any, argnums: Any, value_and_grad_fn: Any) -> LossScale:
    """Returns the loss scale, after a check of all arguments."""
    if not callable(fun):
        raise TypeError(
            f"{made_by}(fun, loss_scale)(params, ...): fun is a function that returns the loss. "
            f"Got {type(fun).__name__}. Give the function itself, not what it returned."
        )
    scale = as_loss_scale(loss_scale)
    if scale is None:
        raise TypeError(
            f"{made_by}(fun, loss_scale): expected a loss scale such as jmp.get_loss_scale(opt_state) or "
            "jmp.DynamicLossScale(), a number, or jmp.NoOpLossScale() for no scale. "
            f"Got {_described(loss_scale)}."
        )

    if not callable(value_and_grad_fn):
        raise TypeError(
            f"{made_by}: value_and_grad_fn is a function such as jax.value_and_grad or "
            f"flax.nnx.value_and_grad. Got {value_and_grad_fn!r}."
        )
    given = argnums if isinstance(argnums, (list, tuple)) else (argnums,)
    if any(isinstance(number, str) for number in given):
        raise TypeError(
            f"{made_by}: argnums are the positions of arguments, such as 0 or (0, 1). Got {argnums!r}: "
            "arguments are not differentiated by name."
        )
    return scale


@overload
def grad(
    fun: Callable[P, tuple[Any, A]],
    loss_scale: LossScaleLike,
    argnums: int | Sequence[int] | Any = ...,
    *,
    has_aux: Literal[True],
    value_and_grad_fn: Callable[..., Callable[..., Any]] = ...,
) -> Callable[P, tuple[Any, A]]: ...


@overload
def grad(
    fun: Callable[P, Any],
    loss_scale: LossScaleLike,
    argnums: int | Sequence[int] | Any = ...,
    has_aux: bool = ...,
    value_and_grad_fn: Callable[..., Callable[..., Any]] = ...,
) -> Callable[P, Any]: ...


def grad(
    fun: Callable[P, Any],
    loss_scale: LossScaleLike = None,  # type: ignore[assignment]
    argnums: int | Sequence[int] | Any = 0,
    has_aux: bool = False,
    value_and_grad_fn: Callable[..., Callable[..., Any]] = jax.value_and_grad,
) -> Callable[P, Any]:
    """Like `jax.grad`, but the backward pass runs with the scaled loss. The gradients are unscaled.

    Args:
        fun: as in `value_and_grad`.
        loss_scale: as in `value_and_grad`.
        argnums: as in `value_and_grad`.
        has_aux: whether `fun` returns `(loss, aux)`.
        value_and_grad_fn: as in `value_and_grad`: a function like `jax.value_and_grad`, and not like
            `jax.grad`.

    Returns:
        A function of the arguments of `fun` that returns `grads`, or `(grads, aux)` with `has_aux`.

    Raises:
        TypeError: as in `value_and_grad`.

    Examples:
        >>> jmp.grad(lambda w: w**2, jmp.StaticLossScale(1024.0))(jnp.float32(3))
        Array(6., dtype=float32)
    """
    both = _true_value_and_grad("grad", fun, loss_scale, argnums, has_aux, value_and_grad_fn)

    @functools.wraps(fun)
    def true_grad(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return true_grad


class _LossAndAux(NamedTuple):
    """The true loss and the auxiliary output of `fun`, returned beside the scaled loss."""

    loss: Any
    aux: Any


def _described(given: Any) -> str:
    """Returns what was given in place of a loss scale."""
    return "none" if given is None else "a class" if isinstance(given, type) else type(given).__name__


_FUNCTIONS = {"flax": "nnx.value_and_grad", "equinox": "eqx.filter_value_and_grad"}


def _library(node: Any) -> str | None:
    """Returns the library of a module, if it has a `value_and_grad` of its own, or None."""
    # By its names: this package imports neither Flax nor Equinox.
    libraries = (base.__module__.split(".")[0] for base in type(node).__mro__ if base.__name__ == "Module")
    return next((library for library in libraries if library in _FUNCTIONS), None)


def _needs_other_fn(error: Exception, args: tuple[Any, ...], argnums: Any) -> str | None:
    """Returns what to do if JAX cannot differentiate an argument, such as a model with functions in it."""
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    chosen = [args[number] for number in numbers if -len(args) <= number < len(args)]
    others = [(name, leaf) for name, leaf in named_leaves(chosen) if not is_floating(leaf)]
    if not (isinstance(error, TypeError) and others):
        return None
    # The module itself, not its leaves: its class says which library differentiates it.
    modules = jax.tree.leaves(chosen, is_leaf=lambda node: _library(node) is not None)
    libraries = [library for library in map(_library, modules) if library is not None]
    functions = [_FUNCTIONS[library] for library in libraries[:1]] or list(_FUNCTIONS.values())
    name, leaf = others[0]
    kind = leaf.dtype.name if hasattr(leaf, "dtype") else type(leaf).__name__
    return (
        "the differentiated argument has what jax.value_and_grad cannot differentiate. "
        f"Got a leaf of {kind}, {name.partition('/')[2] or name!r}. "
        f"Give value_and_grad_fn={' or '.join(functions)}, or differentiate a tree of floating arrays."
    )


def _split(output: Any, has_aux: bool) -> tuple[Any, Any]:
    """Returns `(loss, aux)`; a TypeError if the loss is not a floating scalar."""
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
