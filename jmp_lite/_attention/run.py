"""Runs an attention by `jax.nn.dot_product_attention`, on half operands."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._jaxpr import FUSED_SCOPE, Array, Equation, Labels, Var, bind, context_of, is_literal
from .find import FEATURES, Attention

# The numbers that JAX adds to masked scores for cuDNN
# (https://github.com/jax-ml/jax/blob/jax-v0.10.2/jax/_src/cudnn/fused_attention_stablehlo.py#L83).
_LEAST = {"bfloat16": -(2.0**41), "float16": -(2.0**15)}
_EQUALIZING = -(2.0**16)

Implementation: TypeAlias = Literal["cudnn", "xla"]
"""Whose attention runs."""


def run_attention(
    attention: Attention, operands: Sequence[Array], half: np.dtype, kind: Implementation
) -> Array:
    """Returns the result of an attention, of arrays for its `inputs`.

    Args:
        attention: the attention.
        operands: an array for each of `attention.inputs`.
        half: the dtype of queries, keys and values.
        kind: whose attention runs. Platforms without CUDA run the program as it is instead of cuDNN's.
    """
    # The platform is known when the program is compiled, which may be on another machine (`jax.export`).
    fused = functools.partial(_fused, attention, half, kind)

    def plain(*arrays):
        return _evaluate(attention.equations, dict(zip(attention.inputs, arrays)))

    with context_of(attention.equations[-1]), jax.named_scope(FUSED_SCOPE):
        return lax.platform_dependent(*operands, cuda=fused, default=plain if kind == "cudnn" else fused)


def why_not_fused(attention: Attention, half: np.dtype, kind: Implementation) -> str:
    """Returns why JAX cannot run an attention in this way, in its own words; empty if it can."""
    if attention.why_not:
        return attention.why_not
    if kind == "xla" and half == jnp.float16 and jax.default_backend() == "cpu":
        return "XLA has no attention in float16 on a CPU"

    def gradients(*operands: Array) -> Any:
        out, transpose = jax.vjp(functools.partial(_fused, attention, half, kind), *operands)
        return transpose(jnp.zeros_like(out))

    # While it traces, JAX looks for cuDNN and checks the shapes, those of the backward pass too.
    shapes = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in attention.inputs]
    try:
        jax.eval_shape(gradients, *shapes)
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return f"JAX says: {str(error).splitlines()[0]}" if str(error) else repr(error)
    return ""


@jax.custom_jvp
def _without_derivative(operands: tuple[Array, ...]) -> tuple[Array, ...]:
    return operands


@_without_derivative.defjvp
def _refuse(*_: Any) -> Any:
    raise TypeError(
        "fuse_attention: cuDNN's attention has no second derivative. For jax.hessian or a gradient of "
        "gradients leave fuse_attention out."
    )


@jax.custom_vjp
def _differentiable_once(operands: tuple[Array, ...]) -> tuple[Array, ...]:
    """Returns the operands. With it no attention has a `jax.jvp` or a second derivative, also XLA's."""
    return operands


# A second derivative is one of the forward pass.
_differentiable_once.defvjp(
    lambda operands: (_without_derivative(operands), None),
    lambda _, cotangents: (cotangents,),
)


def _evaluate(eqns: Sequence[Equation], known: Mapping[Var, Array]) -> Array:
    """Returns the result of the last of some equations."""
    known = dict(known)
    for each in eqns:
        operands = [var.val if is_literal(var) else known[var] for var in each.invars]
        with context_of(each):
            known.update(zip(each.outvars, bind(each, operands), strict=True))
    return known[eqns[-1].outvars[0]]


def _fused(attention: Attention, half: np.dtype, kind: Implementation, *operands: Array) -> Array:
    # The operands in the order that JAX wants: batch, positions, heads, features.
    known, sizes = dict(zip(attention.inputs, operands)), attention.axes.sizes
    batch, heads, groups, rows, keys = attention.axes.groups
    of_queries, of_keys = (batch, rows, (*heads, *groups), (FEATURES,)), (batch, keys, heads, (FEATURES,))
    q, k, v = (
        _arrange(known[var].astype(half), labels, order, sizes)
        for (var, labels), order in zip(attention.axes.operands, (of_queries, of_keys, of_keys))
    )
    halves = (q, k, v)
    if attention.mask.kind == "bias":
        # Of the axes along which it is not given, the bias has size 1: cuDNN broadcasts it.
        own = {label: size if label in attention.mask.given_along else 1 for label, size in sizes.items()}

        def place(x):
            return _arrange(x, attention.mask.axes, (batch, (*heads, *groups), rows, keys), own)

        bias, is_kept = map(place, _bias(attention, known))
        is_empty = ~is_kept.any(-1, keepdims=True)
        # cuDNN adds masks to scores. Where numbers replace all scores of a query in the program, a query of
        # zeros has its weights.
        q = jnp.where(is_empty.swapaxes(1, 2), jnp.zeros((), half), q)
        halves = (q, k, v, _shifted(bias, is_empty, half))
    options = {"scale": attention.scale, "is_causal": attention.mask.kind == "causal", "implementation": kind}
    out = jax.nn.dot_product_attention(*_differentiable_once(halves), **options)
    # Back to the order of the program's own result.
    flat = (*batch, *rows, *heads, *groups, FEATURES)
    out = out.reshape([sizes[label] for label in flat])
    out = out.transpose([flat.index(label) for label in attention.axes.output if label is not None])
    shape = [1 if label is None else sizes[label] for label in attention.axes.output]
    return out.reshape(shape).astype(jnp.float32)


def _bias(attention: Attention, known: Mapping[Var, Array]) -> tuple[Array, Array]:
    """Returns what the program computes from scores of zero, and which scores it does not replace."""
    scores = attention.equations[0].outvars[0]

    def last(x):
        return _evaluate(attention.to_softmax, {**known, scores: x})

    # Made of queries and keys: inside of a `shard_map` they have to vary over the devices as these do.
    zero = sum(jnp.zeros_like(known[var], shape=()) for var, _ in attention.axes.operands[:2])
    zeros = jnp.broadcast_to(zero, scores.aval.shape)
    # The axes along which neither varies get size 1: XLA computes only what the slice takes.
    index = tuple(slice(None) if n in attention.mask.given_along else slice(1) for n in attention.mask.axes)
    # What replaces scores does not depend on them: its derivative is zero there.
    bias, slope = jax.jvp(last, [zeros], [jnp.ones_like(zeros)])
    return bias[index], slope[index] != 0


def _shifted(bias: Array, is_empty: Array, half: np.dtype) -> Array:
    """Returns a bias in half, less the largest one of each row, which a softmax does not see."""
    # A key with a weight lies below it by no more than scores differ, so half loses no more of the bias than
    # autocast loses of the scores.
    least = _LEAST[half.name]
    # With a gradient, the largest one would get the errors of its whole row, whose gradients sum to zero.
    largest = lax.stop_gradient(jnp.maximum(bias.max(-1, keepdims=True), jnp.finfo(jnp.float32).min))
    # Added to all scores of a query, so low a number makes them equal in float32, as in the program.
    rest = jnp.where((largest > _EQUALIZING) | is_empty, 0, jnp.maximum(largest, least / 2))
    return jnp.maximum(bias - largest + rest, least).astype(half)


def _arrange(x: Array, labels: Labels, groups: Sequence[Labels], sizes: Mapping[Any, int]) -> Array:
    """Returns an array with one axis for each group of axes."""
    held = [label for label in labels if label is not None]
    x = x.reshape([size for size, label in zip(x.shape, labels) if label is not None])
    x = x.transpose([held.index(label) for group in groups for label in group])
    return x.reshape([math.prod(sizes[label] for label in group) for group in groups])
