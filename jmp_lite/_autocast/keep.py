"""What keeps a part of a program in float32: `full_precision` for a function, `keep_float32` for a value."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name

from .._jaxpr.scopes import FULL_PRECISION_SCOPE
from .._paths import shown
from .._tree import KEEP_FLOAT32_NAME

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def full_precision(fun: Callable[P, R]) -> Callable[P, R]:
    """Returns `fun` excluded from any `autocast` around it: it runs as it was written.

    Half operands that autocast made are cast up to float32 on the way in. An `autocast` inside it switches on
    again. It does nothing outside of autocast. Also a decorator.

    Args:
        fun: any function that JAX can trace.

    Raises:
        TypeError: `fun` is not a function.

    Examples:
        >>> head = jmp.full_precision(lambda w, h: h @ w)
        >>> x = jnp.ones((2, 2))
        >>> report = jmp.explain(jmp.autocast(lambda x: head(x, x @ x)))(x)
        >>> [operation.inputs[0] for operation in report.operations]
        ['bfloat16[2,2]', 'float32[2,2]']

    Source: torch's `autocast(enabled=False)`.
    """

    if not callable(fun):
        raise TypeError(
            f"full_precision takes a function. Got {shown(fun)}. To keep a value in float32 write "
            "keep_float32(x)."
        )

    @functools.wraps(fun)
    def full_precision_fun(*args: Any, **kwargs: Any) -> Any:
        # A name in the name stack stays there through every transform: the backward pass is excluded too.
        with jax.named_scope(FULL_PRECISION_SCOPE):
            return fun(*args, **kwargs)

    return full_precision_fun


def keep_float32(x: T) -> T:
    """Returns the tree `x`, whose float32 values `autocast` keeps in float32 from here on.

    `x.astype(jnp.float32)` says nothing to autocast, since `x` is float32 already where the program is
    traced. A matmul of the value still takes half inputs.

    Args:
        x: a tree of arrays of any dtype.

    Raises:
        TypeError: `x` holds a string or a function.

    Examples:
        >>> fun = jmp.autocast(lambda x: jnp.tanh(jmp.keep_float32(x @ x)) @ x)
        >>> report = jmp.explain(fun)(jnp.ones((2, 2)))
        >>> [(operation.name, operation.inputs[0]) for operation in report.operations][1:3]
        [('name', 'float32[2,2]'), ('tanh', 'float32[2,2]')]
    """
    for leaf in jax.tree.leaves(x):
        if isinstance(leaf, str) or callable(leaf):
            raise TypeError(
                f"keep_float32 takes a tree of arrays, such as x @ w. Got {shown(leaf)}. To keep a scope in "
                "float32 write autocast(fun, rules={'decoder/head': 'float32'}), to keep a function "
                "full_precision(fun)."
            )
    # An identity that JAX keeps in the jaxpr, as a primitive with a name. One of ours would leave no trace:
    # https://docs.jax.dev/en/latest/_autosummary/jax.ad_checkpoint.checkpoint_name.html.
    return checkpoint_name(x, KEEP_FLOAT32_NAME)
