"""Runs an activation function, or a softmax: in float32, of half values, and again in the backward pass."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._jaxpr.bind import INLINE, bar_cotangent, bind, cast, recomputed, widen
from .._jaxpr.read import Array, Var, context_of, is_float32, is_literal
from .planning.plan import Activation
from .value import Value


def run_activation(
    action: Activation,
    read: Callable[[Var], Value],
    half: Any,
    traced: dict[Any, Callable[..., Array]],
) -> Value:
    """Runs an activation function or a softmax.

    Args:
        action: the function.
        read: returns the value of a variable.
        half: the half dtype.
        traced: the functions of the softmaxes that the interpreter has run. It gets those of new ones.
    """
    sources = list(map(read, action.sources))
    if action.extras is not None:
        others = [read(var).to(jnp.float32) if is_float32(var) else read(var).native for var in action.extras]
        halves, paths = [value.to(half) for value in sources], [value.path for value in sources]
        with context_of(action.equations[-1]):
            return Value(_softmax(action, half, traced)(halves, paths, others))

    def compute(halves: Sequence[Array], paths: Sequence[Array | None]) -> Array:
        return _compute(action, half, context_of, halves, paths)

    funs, arrays = zip(*(value.remat or (lambda x: x, value.to(half)) for value in sources))

    def run(arrays: Any, paths: Any) -> Array:
        # Without the barrier XLA stores each cotangent twice: in half and in float32.
        halves = [bar_cotangent(fun(each)) for fun, each in zip(funs, arrays)]
        return compute(halves, paths)

    result = jax.checkpoint(run)(arrays, [value.path for value in sources])
    again = lambda each: compute([funs[0](each)], [None])
    return Value(result, remat=(again, arrays[0]) if len(sources) == 1 else None)


def _compute(
    action: Activation,
    half: Any,
    context: Callable[[Any], Any],
    halves: Sequence[Array],
    paths: Sequence[Array | None],
    others: Sequence[Array] = (),
) -> Array:
    wide = (cast(x, jnp.float32) if path is None else widen(x, path) for x, path in zip(halves, paths))
    known = dict(zip((*action.sources, *(action.extras or ())), (*wide, *others), strict=True))
    for equation in action.equations:
        operands = [var.val if is_literal(var) else known[var] for var in equation.invars]
        with context(equation):
            known.update(zip(equation.outvars, bind(equation, operands), strict=True))
    return cast(known[action.equations[-1].outvars[0]], half)


def _softmax(action: Activation, half: Any, traced: dict[Any, Callable[..., Array]]) -> Callable[..., Array]:
    """Returns the function of a softmax, one for all equal softmaxes of a call.

    JAX remembers the trace and the derivative of a jitted function, so equal layers share them.
    """
    key = _structure(action)
    if key not in traced:
        compute = functools.partial(_compute, action, half, lambda _: contextlib.nullcontext())
        fun = recomputed(compute) if action.barred else compute
        # The barriers of `jax.checkpoint` would make XLA write the masks and transpose cotangents.
        traced[key] = jax.jit(jax.checkpoint(fun, prevent_cse=False), inline=INLINE)
    return traced[key]


def _structure(action: Activation) -> tuple[Any, ...]:
    """Returns what equal softmaxes have in common: their equations, with numbers for variables."""
    numbers: dict[Var, int] = {}

    def number(variables: Iterable[Var]) -> tuple[Any, ...]:
        return tuple(
            repr(var) if is_literal(var) else numbers.setdefault(var, len(numbers)) for var in variables
        )

    operands = number((*action.sources, *(action.extras or ())))
    return operands, *(
        (each.primitive, tuple(each.params.items()), number(each.invars), number(each.outvars))
        for each in action.equations
    )
