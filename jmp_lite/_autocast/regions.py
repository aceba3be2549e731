"""Runs a region, such as an activation function or a softmax, in float32 of half values."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._jaxpr.bind import INLINE, bar_cotangent, bind, cast, recomputed, round_cotangent, widen
from .._jaxpr.read import Array, Equation, Var, context_of, is_float32, is_literal
from .planning.plan import Recompute
from .planning.softmaxes import Barrier
from .value import Value


class _Arrays(NamedTuple):
    """What a region is computed from."""

    halves: list[Array]  # Each source in half; of a gate, one may be in float32.
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
        traced: the functions of the regions that the interpreter has run. It gets those of new ones.
        is_primal: whether no derivative is taken, so that no barriers are needed.
    """
    # JAX remembers the trace and the derivative of a jitted function, so equal layers share them.
    key = is_primal, _structure(action)
    if key not in traced:
        traced[key] = _function(action, half, is_primal)
    run, arrays = traced[key], _arrays(action, read, half)
    with context_of(action.equations[-1]):
        result = run(*arrays)
    if action.region.barrier is not Barrier.CHECKPOINT or len(action.region.sources) > 1:
        return Value(result)
    # A cast to fp8 computes an activation function of one value again (`cast_to_float8`).
    again = functools.partial(_compute, action, half)
    return Value(result, computed=(lambda arrays: again(*arrays), arrays))


def _arrays(action: Recompute, read: Callable[[Var], Value], half: Any) -> _Arrays:
    # A source of a gate may be in float32: `_source` rounds its gradient.
    sources = list(map(read, action.region.sources))
    halves = [x.native if x.native.dtype == jnp.float32 else x.to(half) for x in sources]
    extras = [
        read(var).to(jnp.float32) if is_float32(var) else read(var).native for var in action.region.extras
    ]
    return _Arrays(halves, [value.path for value in sources], extras)


def _function(action: Recompute, half: Any, is_primal: bool) -> Callable[..., Array]:
    """Returns a region as a function of its arrays that JAX computes again in the backward pass."""
    # Where no derivative is taken, nothing is computed again.
    compute = functools.partial(_compute, action, half)
    if action.region.barrier is Barrier.CHECKPOINT:
        fun = compute if is_primal else jax.checkpoint(compute)
    elif action.region.logits is not None and not is_primal:
        fun = _from_weights(compute, functools.partial(_evaluate, action, action.region.logits, half))
    else:
        is_barred = action.region.barrier is Barrier.SOURCES and not is_primal
        fun = jax.checkpoint(recomputed(compute) if is_barred else compute, prevent_cse=False)
    # Inlined, so that the jaxpr is that of the operations themselves.
    return jax.jit(fun, inline=INLINE)


def _from_weights(softmax: Callable[..., Array], logits: Callable[..., Array]) -> Callable[..., Array]:
    """Returns a softmax with the derivative that its half weights alone determine. It keeps no scores."""

    def tangent(weights: Array, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Array:
        # Without the first barrier, XLA would compute the weights again from the scores, and without the
        # second one it would store the cotangents of the scores in float32 too.
        wide = cast(lax.optimization_barrier(weights), jnp.float32)
        barred = jax.tree.map(lax.optimization_barrier, tangents[0])
        # The tangents of the sources become those of the logits, through a scale or a mask between them.
        moved = jax.jvp(logits, primals, (barred, *tangents[1:]))[1]
        # The cotangent of the logits is w * (d - sum(w * d)). It is small where one weight is nearly 1, so w
        # must sum to 1 exactly, as the rounded weights do not: near 1 they would lose the digits in which
        # they differ from it. XLA also needs the division by the sum to compute the derivative in one kernel.
        wide = wide / jnp.sum(wide, axis=-1, keepdims=True)
        weighted = wide * moved
        return cast(weighted - wide * jnp.sum(weighted, axis=-1, keepdims=True), weights.dtype)

    @jax.custom_jvp
    def run(*arrays: Any) -> Array:
        # Without this `jax.checkpoint`, a loop would fill the masks of all scores in front of it: JAX moves
        # residuals that no iteration changes out of a scan (https://github.com/jax-ml/jax/pull/1664).
        return jax.checkpoint(softmax, prevent_cse=False)(*arrays)

    @run.defjvp
    def run_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Array, Array]:
        # `tangent` has the barriers that it needs.
        weights = run(*primals)
        return weights, jax.checkpoint(tangent, prevent_cse=False)(weights, primals, tangents)

    del run_jvp
    return run


def _compute(action: Recompute, half: Any, *arrays: Any) -> Array:
    return cast(_evaluate(action, action.equations[-1].outvars[0], half, *arrays), half)


def _evaluate(
    action: Recompute,
    result: Var,
    half: Any,
    halves: Sequence[Array],
    paths: Sequence[Array | None],
    extras: Sequence[Array],
) -> Array:
    """Returns a variable of a region in float32."""
    region = action.region
    known = dict(zip(region.extras, extras, strict=True))
    for var, x, path in zip(region.sources, halves, paths, strict=True):
        known[var] = _source(region.barrier, x, path, half)
    read = lambda var: var.val if is_literal(var) else known[var]
    for equation in action.equations:
        if result in known:  # The logits are made before the last equation.
            break
        known.update(zip(equation.outvars, bind(equation, list(map(read, equation.invars))), strict=True))
        # XLA would store the cotangent of such an input twice: for its addends, and for the sum that is the
        # gradient of a bias.
        if region.barrier is Barrier.CHECKPOINT and equation.outvars[0] in region.inputs:
            known[equation.outvars[0]] = round_cotangent(known[equation.outvars[0]], half)
    return known[result]


def _source(barrier: Barrier, x: Array, path: Array | None, half: Any) -> Array:
    """Returns a source of a region in float32, from its half value."""
    if barrier is Barrier.CHECKPOINT:
        # Without it XLA stores each cotangent twice: in half and in float32.
        x = bar_cotangent(x)
    if path is not None:
        return widen(x, path)
    # A float32 source of a gate behind a norm: XLA would store its gradient in float32.
    return cast(x, jnp.float32) if x.dtype == half else round_cotangent(x, half)


def broadcast_to_half(x: Array, equation: Equation, half: Any) -> Array:
    """Returns a float32 operand in the shape of the result, in half. Its gradient is summed in float32."""
    # In the other order, the transpose of the broadcast would be a sum of half cotangents.
    return cast(jnp.broadcast_to(x, equation.outvars[0].aval.shape), half)


def _structure(action: Recompute) -> tuple[Any, ...]:
    """Returns what equal regions have in common: their equations, with numbers for variables."""
    # A variable's number is that of its first appearance, so layers that differ only in names are equal.
    numbers: dict[Var, int] = {}

    def number(variables: Iterable[Var]) -> tuple[Any, ...]:
        return tuple(
            repr(var) if is_literal(var) else numbers.setdefault(var, len(numbers)) for var in variables
        )

    operands = number((*action.region.sources, *action.region.extras))
    return (
        action.region.barrier,
        operands,
        *(
            (each.primitive, tuple(each.params.items()), number(each.invars), number(each.outvars))
            for each in action.equations
        ),
    )
