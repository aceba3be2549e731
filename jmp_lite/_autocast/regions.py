"""Runs a region, such as an activation function or a softmax, in float32 of half values."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive

from .._jaxpr.bind import INLINE, bar_cotangent, cast, recomputed, round_cotangent, widen
from .._jaxpr.read import Array, Equation, Var, bind_params, is_float32, is_literal
from .._jaxpr.scopes import context_of
from .planning.plan import Recompute
from .planning.softmaxes import Barrier
from .value import Value


class _Arrays(NamedTuple):
    """What a region is computed from."""

    halves: list[Array]  # Each source in half; of a gate, one may be in float32.
    paths: list[Array | None]  # The paths of the sources (`planning.passes.pairs`).
    extras: list[Array]


@dataclasses.dataclass(frozen=True)
class _Number:
    """A number that is written into the program."""

    value: Any = dataclasses.field(compare=False)
    text: str  # By which it is compared: 0.0 and -0.0 are two numbers.


class _Step(NamedTuple):
    """An operation of a region, whose operands have numbers (`_Program`)."""

    primitive: Primitive
    params: tuple[tuple[str, Any], ...]
    operands: tuple[int | _Number, ...]


class _Program(NamedTuple):
    """What equal regions have in common. It holds no variables and no arrays of the user's program.

    Its values are numbered: the sources, the extras, then the result of each step.
    """

    barrier: Barrier
    sources: int  # How many there are.
    extras: int
    steps: tuple[_Step, ...]
    logits: int | None  # The logits of a softmax whose derivative needs the weights alone.
    inputs: tuple[int, ...]  # The inputs that an activation function computes itself.

    @property
    def result(self) -> int:
        return self.sources + self.extras + len(self.steps) - 1


def run_region(action: Recompute, read: Callable[[Var], Value], half: Any, is_primal: bool) -> Value:
    """Runs a region.

    Args:
        action: the region.
        read: returns the value of a variable.
        half: the half dtype.
        is_primal: whether no derivative is taken, so that no barriers are needed.
    """
    program, arrays = _program(action), _arrays(action, read, half)
    with context_of(action.equations[-1]):
        result = _function(program, half, is_primal)(*arrays)
    if program.barrier is not Barrier.CHECKPOINT or program.sources > 1:
        return Value(result)
    # A cast to fp8 computes an activation function of one value again (`cast_to_float8`).
    again = functools.partial(_compute, program, half)
    return Value(result, computed=(lambda arrays: again(*arrays), arrays))


def _arrays(action: Recompute, read: Callable[[Var], Value], half: Any) -> _Arrays:
    # A source of a gate may be in float32: `_source` rounds its gradient.
    sources = list(map(read, action.region.sources))
    halves = [x.native if x.native.dtype == jnp.float32 else x.to(half) for x in sources]
    extras = [
        read(var).to(jnp.float32) if is_float32(var) else read(var).native for var in action.region.extras
    ]
    return _Arrays(halves, [value.path for value in sources], extras)


def _program(action: Recompute) -> _Program:
    region = action.region
    # Layers that differ only in the names of their variables are equal.
    numbers = {var: number for number, var in enumerate((*region.sources, *region.extras))}

    def step(equation: Equation) -> _Step:
        operands = tuple(
            _Number(var.val, repr(var)) if is_literal(var) else numbers[var] for var in equation.invars
        )
        numbers[equation.outvars[0]] = len(numbers)
        return _Step(equation.primitive, tuple(equation.params.items()), operands)

    steps = tuple(map(step, action.equations))
    logits = None if region.logits is None else numbers[region.logits]
    # XLA would store the cotangent of such an input twice: for its addends, and for the sum that is the
    # gradient of a bias.
    rounded = region.inputs if region.barrier is Barrier.CHECKPOINT else ()
    inputs = tuple(numbers[var] for var in rounded if var not in region.sources)
    return _Program(region.barrier, len(region.sources), len(region.extras), steps, logits, inputs)


# JAX remembers the trace and the derivative of a jitted function by the function itself, and keeps both. So
# equal layers share one function, and so do all traces of a program.
@functools.lru_cache(maxsize=1024)
def _function(program: _Program, half: Any, is_primal: bool) -> Callable[..., Array]:
    """Returns a region as a function of its arrays that JAX computes again in the backward pass."""
    # Where no derivative is taken, nothing is computed again.
    compute = functools.partial(_compute, program, half)
    if program.barrier is Barrier.CHECKPOINT:
        fun = compute if is_primal else jax.checkpoint(compute)
    elif program.logits is not None and not is_primal:
        fun = _from_weights(compute, functools.partial(_evaluate, program, program.logits, half))
    else:
        is_barred = program.barrier is Barrier.SOURCES and not is_primal
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


def _compute(program: _Program, half: Any, *arrays: Any) -> Array:
    return cast(_evaluate(program, program.result, half, *arrays), half)


def _evaluate(
    program: _Program,
    result: int,
    half: Any,
    halves: Sequence[Array],
    paths: Sequence[Array | None],
    extras: Sequence[Array],
) -> Array:
    """Returns a value of a region in float32."""
    known = [_source(program.barrier, x, path, half) for x, path in zip(halves, paths, strict=True)]
    known += extras
    for step in program.steps[: max(0, result + 1 - len(known))]:
        operands = [x.value if isinstance(x, _Number) else known[x] for x in step.operands]
        found = step.primitive.bind(*operands, **bind_params(step.primitive, dict(step.params)))
        (value,) = found if step.primitive.multiple_results else (found,)
        known.append(round_cotangent(value, half) if len(known) in program.inputs else value)
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
