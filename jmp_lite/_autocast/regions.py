"""Runs a region, such as an activation function or a softmax: in float32, of half values, and again in the
backward pass.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._jaxpr.bind import INLINE, bar_cotangent, bind, cast, recomputed, widen
from .._jaxpr.read import Array, Equation, Var, context_of, is_float32, is_literal
from .planning.plan import Recompute, Take
from .planning.softmaxes import Barrier
from .value import Value


class _Arrays(NamedTuple):
    """What a region is computed from."""

    halves: list[Any]  # Each source in half. Of a sum that the region computes itself: its operands.
    paths: list[Array | None]  # The paths of the sources (`planning.passes.pairs`).
    extras: list[Array]


def run_region(
    action: Recompute,
    read: Callable[[Var], Value],
    half: Any,
    traced: dict[Any, Callable[..., Array]],
    is_primal: bool,
) -> Value:
    """Runs a region.

    Args:
        action: the region.
        read: returns the value of a variable.
        half: the half dtype.
        traced: the functions of the regions that the interpreter has run. It gets those of new ones. JAX
            remembers the trace and the derivative of a jitted function, so equal layers share them.
        is_primal: whether no derivative is taken, so that no barriers are needed.
    """
    key = is_primal, _structure(action)
    if key not in traced:
        traced[key] = _function(action, half, is_primal)
    run, arrays = traced[key], _arrays(action, read, half)
    with context_of(action.equations[-1]):
        result = run(*arrays)
    if action.region.barrier is not Barrier.CHECKPOINT or len(action.region.sources) > 1:
        return Value(result)
    again = functools.partial(_compute, action, half)
    return Value(result, computed=(lambda arrays: again(*arrays), arrays))


def _arrays(action: Recompute, read: Callable[[Var], Value], half: Any) -> _Arrays:
    halves: list[Any] = []
    paths: list[Array | None] = []
    for var in action.region.sources:
        if var in action.sums:
            equation, run = action.sums[var]
            halves.append([_addend(read(x), take, half) for x, take in zip(equation.invars, run.operands)])
            paths.append(None)
        else:
            halves.append(read(var).to(half))
            paths.append(read(var).path)
    extras = [
        read(var).to(jnp.float32) if is_float32(var) else read(var).native for var in action.region.extras
    ]
    return _Arrays(halves, paths, extras)


def _addend(value: Value, take: Take, half: Any) -> tuple[Array, Array | None]:
    """Returns an operand of a sum in half, and a bias also in float32, for its gradient.

    The bias is cast in front of the region. With a cast in each pass, XLA would run one kernel more.
    """
    return value.to(half), value.to(jnp.float32) if take is Take.BROADCAST else None


def _function(action: Recompute, half: Any, is_primal: bool) -> Callable[..., Array]:
    """Returns a region as a function of its arrays that JAX computes again in the backward pass."""
    compute = functools.partial(_compute, action, half)
    if action.region.barrier is Barrier.CHECKPOINT:
        fun = compute if is_primal else jax.checkpoint(compute)
    else:
        is_barred = action.region.barrier is Barrier.SOURCES and not is_primal
        fun = jax.checkpoint(recomputed(compute) if is_barred else compute, prevent_cse=False)
    return jax.jit(fun, inline=INLINE)


def _compute(
    action: Recompute,
    half: Any,
    halves: Sequence[Any],
    paths: Sequence[Array | None],
    extras: Sequence[Array],
) -> Array:
    region = action.region
    known = dict(zip(region.extras, extras, strict=True))
    for var, x, path in zip(region.sources, halves, paths, strict=True):
        if var in action.sums:
            x = _sum(action.sums[var][0], x, half)
        if region.barrier is Barrier.CHECKPOINT:
            # Without it XLA stores each cotangent twice: in half and in float32.
            x = bar_cotangent(x)
        known[var] = cast(x, jnp.float32) if path is None else widen(x, path)
    read = lambda var: var.val if is_literal(var) else known[var]
    for equation in action.equations:
        known.update(zip(equation.outvars, bind(equation, list(map(read, equation.invars))), strict=True))
    return cast(known[action.equations[-1].outvars[0]], half)


def _sum(equation: Equation, addends: Sequence[tuple[Array, Array | None]], half: Any) -> Array:
    """Runs the sum of a matmul's result and a bias in half."""
    operands = [
        x if wide is None else broadcast_to_half(widen(x, wide, is_shared=False), equation, half)
        for x, wide in addends
    ]
    return bind(equation, operands)[0]


def broadcast_to_half(x: Array, equation: Equation, half: Any) -> Array:
    """Returns a float32 operand in the shape of the result, in half. Its gradient is summed in float32."""
    return cast(jnp.broadcast_to(x, equation.outvars[0].aval.shape), half)


def _structure(action: Recompute) -> tuple[Any, ...]:
    """Returns what equal regions have in common: their equations, with numbers for variables."""
    numbers: dict[Var, int] = {}

    def number(variables: Iterable[Var]) -> tuple[Any, ...]:
        return tuple(
            repr(var) if is_literal(var) else numbers.setdefault(var, len(numbers)) for var in variables
        )

    operands = number((*action.region.sources, *action.region.extras))
    sums = [equation for equation, _ in action.sums.values()]
    return (
        action.region.barrier,
        operands,
        tuple(equation.outvars[0].aval.shape for equation in sums),  # A bias is broadcast to them.
        *(
            (each.primitive, tuple(each.params.items()), number(each.invars), number(each.outvars))
            for each in (*sums, *action.equations)
        ),
    )
