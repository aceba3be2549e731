"""Runs an attention by `jax.nn.dot_product_attention`, on half operands."""

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._jaxpr import FUSED_SCOPE, Array, Equation, Labels, Var, bind, context_of, is_literal
from .facts import MASKED
from .find import FEATURES, Attention

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
    plain = lambda *arrays: _evaluate(attention.equations, dict(zip(attention.inputs, arrays)))
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


@contextlib.contextmanager
def refusing_second_derivatives() -> Iterator[None]:
    """Explains JAX's error about the derivative of cuDNN's attention."""
    try:
        yield
    except NotImplementedError as error:  # The primitive of its backward pass has no derivative in JAX.
        if "dot_product_attention" not in str(error):
            raise
        raise TypeError(
            "fuse_attention: cuDNN's attention has no second derivative. For jax.hessian or a gradient of "
            f"gradients leave fuse_attention out. JAX says: {error}"
        ) from error


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
    known, sizes = dict(zip(attention.inputs, operands)), attention.sizes
    batch, heads, groups, rows, keys = attention.groups
    of_queries, of_keys = (batch, rows, (*heads, *groups), (FEATURES,)), (batch, keys, heads, (FEATURES,))
    q, k, v = (
        _arrange(known[var].astype(half), labels, order, sizes)
        for (var, labels), order in zip(attention.operands, (of_queries, of_keys, of_keys))
    )
    options: dict[str, Any] = {"is_causal": True} if attention.kind == "causal" else {}
    if attention.kind in ("mask", "bias"):
        # Of the axes along which it is not given, the mask has size 1: cuDNN broadcasts it.
        own = {label: size if label in attention.given_along else 1 for label, size in sizes.items()}
        place = lambda x: _arrange(x, attention.bias, (batch, (*heads, *groups), rows, keys), own)
        bias, is_kept = map(place, _bias(attention, known))
        if attention.kind == "mask":
            options["mask"] = bias > MASKED
        else:  # What is added keeps the differences in a row that is masked as a whole. A mask does not.
            options["bias"] = jnp.maximum(bias, float(jnp.finfo(half).min)).astype(half)
        # cuDNN adds masks to scores
        # (https://github.com/jax-ml/jax/blob/jax-v0.10.2/jax/_src/cudnn/fused_attention_stablehlo.py#L1826).
        # Where numbers replace all scores of a query in the program, a query of zeros has its weights.
        if attention.may_be_empty:
            q = jnp.where(is_kept.any(-1).swapaxes(1, 2)[..., None], q, jnp.zeros((), half))
    out = jax.nn.dot_product_attention(q, k, v, scale=attention.scale, implementation=kind, **options)
    # Back to the order of the program's own result.
    flat = (*batch, *rows, *heads, *groups, FEATURES)
    out = out.reshape([sizes[label] for label in flat])
    out = out.transpose([flat.index(label) for label in attention.output if label is not None])
    shape = [1 if label is None else sizes[label] for label in attention.output]
    return out.reshape(shape).astype(jnp.float32)


def _bias(attention: Attention, known: Mapping[Var, Array]) -> tuple[Array, Array]:
    """Returns what the program computes from scores of zero, and which scores it does not replace."""
    scores = attention.equations[0].outvars[0]
    last = lambda x: _evaluate(attention.to_softmax, {**known, scores: x})
    # Made of queries and keys: inside of a `shard_map` they have to vary over the devices as these do.
    zero = sum(jnp.zeros_like(known[var], shape=()) for var, _ in attention.operands[:2])
    zeros = jnp.broadcast_to(zero, scores.aval.shape)
    # The axes along which neither varies get size 1: XLA computes only what the slice takes.
    index = tuple(slice(None) if n in attention.given_along else slice(1) for n in attention.bias)
    # What replaces scores does not depend on them: its derivative is zero there.
    bias, slope = jax.jvp(last, [zeros], [jnp.ones_like(zeros)])
    return bias[index], slope[index] != 0


def _arrange(x: Array, labels: Labels, groups: Sequence[Labels], sizes: Mapping[Any, int]) -> Array:
    """Returns an array with one axis for each group of axes."""
    held = [label for label in labels if label is not None]
    x = x.reshape([size for size, label in zip(x.shape, labels) if label is not None])
    x = x.transpose([held.index(label) for group in groups for label in group])
    return x.reshape([math.prod(sizes[label] for label in group) for group in groups])
