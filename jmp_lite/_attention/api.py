"""`fuse_attention`, and the attentions of a program as `explain` lists them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax.numpy as jnp
import numpy as np

from .._dtypes import HALF_DTYPES, DTypeLike, parse_dtype
from .._jaxpr import (
    CALLS,
    Array,
    Equation,
    Inner,
    Outputs,
    Var,
    bind,
    check_function,
    constants,
    context_of,
    in_two_calls,
    replay,
    trace,
)
from .facts import Facts, unknown
from .find import find_attentions, may_hold_attention
from .run import Implementation, run_attention, why_not_fused

P = ParamSpec("P")
R = TypeVar("R")


@in_two_calls
def fuse_attention(
    fun: Callable[P, R],
    dtype: DTypeLike = jnp.bfloat16,
    *,
    implementation: Implementation = "cudnn",
) -> Callable[P, R]:
    """Returns `fun` with its attentions run by cuDNN's flash attention, which takes half precision only.

    It finds the attentions in the jaxpr of `fun`, however they are written, and runs each by
    `jax.nn.dot_product_attention` on queries, keys and values in `dtype`, which never stores the scores. All
    else stays as it is, and so does an attention that cuDNN does not take, such as one with dropout:
    `explain` says why. On a CPU the whole program runs as it is. It goes inside of `jax.grad` and of
    `autocast`, which does the rest: `autocast(fuse_attention(loss_fn))`. There are no second derivatives. It
    is experimental: no GPU has timed it yet (docs/attention.md).

    Args:
        fun: any function that JAX can trace, such as a loss.
        dtype: `jnp.bfloat16` or `jnp.float16`, or one of their names. With float32 nothing changes.
        implementation: `"cudnn"`, or `"xla"` for tests of the numbers on a CPU: it saves nothing.

    Returns:
        A function with the signature of `fun`.

    Raises:
        ValueError, TypeError: `fun` is no function, or one that `autocast` returned; `dtype` or
            `implementation` is not one of those above. On a call: a second derivative is asked for.

    Examples:
        >>> def attend(q, k, v):
        ...     return jax.nn.softmax(q @ k.mT) @ v
        >>> fused = jmp.fuse_attention(attend, "bfloat16", implementation="xla")
        >>> x = jnp.ones((2, 16, 8))
        >>> fused(x, x, x).dtype, jmp.explain(fused)(x, x, x).attentions[0].fused
        (dtype('float32'), True)
    """
    check_function("fuse_attention", fun)
    half = parse_dtype(dtype)
    if half not in (*HALF_DTYPES, jnp.float32):
        raise ValueError(f"fuse_attention: dtype should be bfloat16, float16 or float32. Got {half.name}.")
    if implementation not in ("cudnn", "xla"):
        raise ValueError(f"fuse_attention: implementation is 'cudnn' or 'xla'. Got {implementation!r:.80}.")
    if hasattr(fun, "_autocast"):  # The mark of a function that autocast returned (`_autocast/api.py`).
        raise TypeError(
            "fuse_attention goes inside of autocast, which has changed the dtypes of this function already: "
            "jmp.autocast(jmp.fuse_attention(loss_fn, dtype), dtype)."
        )
    if half == jnp.float32:
        return fun

    @functools.wraps(fun)
    def fused_fun(*args: P.args, **kwargs: P.kwargs) -> R:
        call = trace(fun, args, kwargs, False)
        values = [*constants(call.jaxpr), *call.arrays]
        return call.outputs(_run(Facts(call.jaxpr, unknown), values, half, implementation))

    return fused_fun


def _run(facts: Facts, values: Sequence[Array], half: np.dtype, kind: Implementation) -> list[Array]:
    """Runs a jaxpr with its attentions fused, on values for its constants and inputs."""
    attentions = find_attentions(facts).items()
    fused = {index: each for index, each in attentions if not why_not_fused(each, half, kind)}
    # The operations of an attention in front of its second product. Only the attention reads their results
    # (`_check_readers`), and it computes them itself.
    skipped = {index for attention in fused.values() for index in attention.members}

    def action(index: int, equation: Equation, read: Callable[[Var], Array]) -> Sequence[Any]:
        if index in skipped:
            return [None] * len(equation.outvars)
        if index in fused:
            return [run_attention(fused[index], list(map(read, fused[index].inputs)), half, kind)]
        return _run_as_written(facts, equation, list(map(read, equation.invars)), half, kind)

    def also_read(index: int) -> Sequence[Var]:
        return fused[index].inputs if index in fused else ()

    return replay(facts.jaxpr, values, lambda var: var.val, action, also_read)


def _run_as_written(
    facts: Facts, equation: Equation, operands: Sequence[Array], half: np.dtype, kind: Implementation
) -> Sequence[Array]:
    """Runs an operation that is part of no fused attention, with the attentions in its jaxprs fused."""
    with context_of(equation):
        if not may_hold_attention(equation):
            return bind(equation, operands)
        bodies = [_body(inside, inner, operands, half, kind) for inside, inner in facts.inside(equation)]
        results, _ = CALLS[equation.primitive.name](equation, bodies, operands)
        return results


def _body(
    facts: Facts, inner: Inner, operands: Sequence[Array], half: np.dtype, kind: Implementation
) -> Callable[..., Outputs]:
    """Returns the function that runs one of the jaxprs of an operation."""
    # It closes over the constants of a loop, as the bodies of `CALLS` do.
    fixed = [*constants(facts.jaxpr), *(operands[index] for index in inner.operands[: inner.constants])]
    return lambda *arrays: (_run(facts, [*fixed, *arrays], half, kind), {})
