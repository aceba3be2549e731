"""Runs an activation function, or a softmax: in float32, of half values, and again in the backward pass."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._jaxpr.bind import bar_cotangent, bind, cast, recomputed, widen
from .._jaxpr.read import Array, Var, context_of, is_float32, is_literal
from .planning.plan import Activation
from .value import Value


def run_activation(action: Activation, read: Callable[[Var], Value], half: Any) -> Value:
    """Runs an activation function or a softmax.

    Args:
        action: the function.
        read: returns the value of a variable.
        half: the half dtype.
    """
    sources = list(map(read, action.sources))
    extras = action.extras or ()

    def compute(halves: Sequence[Array], paths: Sequence[Array | None], others: Sequence[Array]) -> Array:
        wide = (cast(x, jnp.float32) if path is None else widen(x, path) for x, path in zip(halves, paths))
        known = dict(zip((*action.sources, *extras), (*wide, *others), strict=True))
        for equation in action.equations:
            operands = [var.val if is_literal(var) else known[var] for var in equation.invars]
            with context_of(equation):
                known.update(zip(equation.outvars, bind(equation, operands), strict=True))
        return cast(known[action.equations[-1].outvars[0]], half)

    funs, arrays = zip(*(value.remat or (lambda x: x, value.to(half)) for value in sources))

    def run(arrays: Any, paths: Any, others: Any) -> Array:
        # Without the barrier XLA stores each cotangent twice: in half and in float32.
        halves = [bar_cotangent(fun(each)) for fun, each in zip(funs, arrays)]
        return (recomputed(compute) if action.is_softmax else compute)(halves, paths, others)

    # For a softmax, the barriers of JAX would make XLA write the masks and transpose cotangents.
    checkpoint = jax.checkpoint(run, prevent_cse=not action.is_softmax)
    others = [read(var).to(jnp.float32) if is_float32(var) else read(var).native for var in extras]
    result = checkpoint(arrays, [value.path for value in sources], others)
    again = lambda each: compute([funs[0](each)], [None], [])
    may_repeat = len(sources) == 1 and not action.is_softmax
    return Value(result, remat=(again, arrays[0]) if may_repeat else None)
