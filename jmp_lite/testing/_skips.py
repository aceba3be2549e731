"""An assertion about a train step: a batch with inf or NaN leaves its state unchanged."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

try:
    import chex
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("jmp_lite.testing needs chex: pip install chex.") from error

from .._paths import as_patterns, matches, named_leaves, shown_difference
from .._scaling.loss_scale import LossScale, is_loss_scale
from .._scaling.state import SkipNonfiniteState
from .._text import power
from .._tree import is_floating, is_key, nodes_of
from ._matmuls import failure

_failure = functools.partial(failure, "assert_skips_nonfinite")


def assert_skips_nonfinite(
    train_step: Callable[..., Any], state: Any, *batch: Any, ignore: str | Iterable[str] = ()
) -> None:
    """Asserts that a train step skips a batch with inf or NaN, and continues after it.

    It runs the step on the batch until a step is taken, then with all floating values inf, then NaN, then on
    the batch again. After inf and NaN every leaf of the state is unchanged, bit for bit, except for the
    counters of `with_loss_scale` and for loss scales, which are what `adjust(False)` returns. A clean step
    changes a floating leaf outside of the optimizer: the parameters. The step may donate its arguments.

    Args:
        train_step: called as `train_step(state, *batch)`. It returns the new state, of the same structure, or
            a tuple that begins with it.
        state: any pytree that holds the state of `with_loss_scale` or a loss scale: a tuple of parameters and
            optimizer state, a `TrainState`, the state of a split NNX module.
        batch: the other arguments, with some floating values.
        ignore: patterns over the paths of the state, for leaves that may change on a skipped step, such as a
            step count or a random key.

    Raises:
        AssertionError: one of these does not hold. The message names the leaves that moved.
        TypeError: the result does not begin with a state, or the batch has no floating values.

    Examples:
        >>> tx = jmp.with_loss_scale(optax.sgd(0.1))
        >>> @jax.jit
        ... def train_step(state, x):
        ...     params, opt_state = state
        ...     loss_fn = lambda params, x: jnp.mean((x @ params) ** 2)
        ...     loss, grads = jmp.value_and_grad(loss_fn, jmp.get_loss_scale(opt_state))(params, x)
        ...     updates, opt_state = tx.update(grads, opt_state, params)
        ...     return (optax.apply_updates(params, updates), opt_state), loss
        >>> params = jnp.ones((4, 2))
        >>> assert_skips_nonfinite(train_step, (params, tx.init(params)), jnp.ones((8, 4)))
    """
    patterns = as_patterns(ignore, "assert_skips_nonfinite: ignore takes patterns over the state's paths")
    if not _scales(state):
        raise _failure("the state holds no loss scale")
    if not any(map(is_floating, jax.tree.leaves(batch))):
        raise TypeError("assert_skips_nonfinite puts inf into floating values, and this batch has none.")
    # The step count of Flax's `TrainState` starts as the number 0:
    # https://github.com/google/flax/blob/v0.12.8/flax/training/train_state.py#L134.
    state = jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf), state)
    state = _step_until_taken(train_step, state, batch, patterns)
    for value in (np.inf, np.nan):
        bad = jax.tree.map(functools.partial(_filled, value=value), batch)
        before, state = state, _step(train_step, state, bad)
        _check_skipped(before, state, value, patterns)
    _step_until_taken(train_step, state, batch, patterns)  # Nothing of the bad batches is left.


def _filled(leaf: Any, value: float) -> Any:
    """Returns `leaf` filled with `value`, as an array of the same library."""
    # JAX does not compile the step again for it.
    library = jnp if isinstance(leaf, jax.Array) else np
    return library.full_like(leaf, value) if is_floating(leaf) else leaf


def _step(train_step: Callable[..., Any], state: Any, batch: Sequence[Any]) -> Any:
    """Returns the new state."""

    # The step gets copies, since it may donate its arguments, and the old state is compared with the new one.
    def copy(leaf):
        return leaf.copy() if isinstance(leaf, jax.Array) else leaf

    result = train_step(*jax.tree.map(copy, (state, *batch)))

    def has_structure(tree):
        return jax.tree.structure(tree) == jax.tree.structure(state)

    if not has_structure(result) and isinstance(result, tuple) and result:
        result = result[0]
    if not has_structure(result):
        raise TypeError(
            "assert_skips_nonfinite: train_step(state, *batch) returns the new state, or a tuple that begins "
            f"with it. Of the result and the state: {shown_difference(result, state)}. A step that changes "
            "NNX modules in place needs nnx.split and nnx.merge around it."
        )
    chex.assert_trees_all_equal_shapes_and_dtypes(state, result)
    return result


def _step_until_taken(
    train_step: Callable[..., Any], state: Any, batch: Sequence[Any], patterns: Sequence[str]
) -> Any:
    """Returns the state after the first step that changes the parameters."""
    # A large loss scale, at most 2**64, skips the first steps, and an optimizer that accumulates waits.
    for _ in range(64):
        before, state = state, _step(train_step, state, batch)
        if any(map(is_floating, _moved(before, state, patterns, in_optimizer=False).values())):
            return state
    raise _failure("64 steps on the clean batch move no floating leaf outside of the optimizer")


def _check_skipped(before: Any, after: Any, value: float, patterns: Sequence[str]) -> None:
    """Raises an AssertionError if a leaf has changed, or if a loss scale is not what `adjust` returns."""
    on_batch = f"on a batch of {value}"
    if moved := [*_moved(before, after, patterns)]:
        leaves = "1 leaf" if len(moved) == 1 else f"{len(moved)} leaves"
        flags = [node.leaf_finite for node in nodes_of(after, SkipNonfiniteState)]
        # If the optimizer saw inf or NaN, it has skipped its own step, and these leaves are of other state.
        hint = "The step was not skipped: the gradients that the optimizer saw were finite."
        if not flags or not all(map(np.all, flags)):
            select = "jmp.select_tree(jmp.grads_finite(opt_state), new, old)"
            hint = f"Write {select} for them, or name them in ignore=."
        raise _failure(f"{leaves} of the state moved {on_batch}", [*moved, hint])
    for old, new in zip(_scales(before), _scales(after), strict=True):
        # Also with hysteresis, or at the minimum, where the scale stays.
        if not np.array_equal(old.adjust(False).loss_scale, new.loss_scale):
            said = f"it is {power(float(new.loss_scale))}, and was {power(float(old.loss_scale))}"
            raise _failure(f"the loss scale did not fall {on_batch}", [said])


def _moved(before: Any, after: Any, patterns: Sequence[str], *, in_optimizer: bool = True) -> dict[str, Any]:
    """Returns the leaves that differ in a bit, by path, without scales, counters and those of `patterns`."""

    def strip(node: Any) -> Any:
        # Its counters and flags change on a skipped step, and what it wraps does not.
        if isinstance(node, SkipNonfiniteState) and in_optimizer:
            return {"inner_state": jax.tree.map(strip, node.inner_state, is_leaf=_is_ours)}
        return None if _is_ours(node) else node

    old, new = (named_leaves(jax.tree.map(strip, state, is_leaf=_is_ours)) for state in (before, after))
    differ = {name: leaf for (name, leaf), (_, other) in zip(old, new) if _bits(leaf) != _bits(other)}
    return {name: differ[name] for name in differ if not any(matches(p, name) for p in patterns)}


def _is_ours(node: Any) -> bool:
    return isinstance(node, SkipNonfiniteState) or is_loss_scale(node)


def _scales(state: Any) -> list[LossScale]:
    return list(filter(is_loss_scale, jax.tree.leaves(state, is_leaf=is_loss_scale)))


def _bits(leaf: Any) -> bytes:
    # As bytes: NaN is not equal to itself, and -0.0 is equal to 0.0.
    return np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf).tobytes()
