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
from .._tree import is_floating
from ._products import failure


def assert_skips_nonfinite(
    train_step: Callable[..., Any], state: Any, *batch: Any, ignore: str | Iterable[str] = ()
) -> None:
    """Asserts that a train step skips a batch with inf or NaN, and continues after it.

    It runs the step on the batch until a step is taken, then with all floating values inf, then NaN, then on
    the batch again. The step gets copies, so it may donate its state.

    - After inf and after NaN every leaf of the state is unchanged, bit for bit, except for loss scales and
      the counters of `with_loss_scale`. The loss scale is what `adjust(False)` returns.
    - A clean step afterwards changes a floating leaf outside of the optimizer, the parameters.

    Args:
        train_step: called as `train_step(state, *batch)`. It returns the new state, or a tuple that begins
            with it. The structure, shapes and dtypes of the state stay the same.
        state: any pytree that holds the state of `with_loss_scale` or a loss scale: a tuple of parameters and
            optimizer state, a `TrainState`, the state of a split NNX module.
        batch: the other arguments, with some floating values.
        ignore: patterns over the paths of the state, for leaves that may change on a skipped step, such as a
            step count or a random key.

    Raises:
        AssertionError: one of these does not hold. The message names the leaves that moved, such as batch
            statistics, a moving average, or a step count outside of the optimizer.
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
    ignored = as_patterns(ignore, "assert_skips_nonfinite: ignore takes patterns over the state's paths")
    if not _scales(state):
        raise failure("assert_skips_nonfinite", "the state holds no loss scale")
    if not any(map(is_floating, jax.tree.leaves(batch))):
        raise TypeError(
            "assert_skips_nonfinite puts inf into the floating values of the batch, and this batch has none. "
            "Give the step one, such as the weights of the examples in the loss."
        )
    # The step count of Flax's `TrainState` starts as the number 0.
    as_array = lambda leaf: leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
    state = _step_until_taken(train_step, jax.tree.map(as_array, state), batch)
    for value in (np.inf, np.nan):
        bad = jax.tree.map(functools.partial(_filled, value=value), batch)
        after = _step(train_step, state, bad)
        _check_skipped(state, after, value, ignored)
        state = after
    _step_until_taken(train_step, state, batch)


def _filled(leaf: Any, value: float) -> Any:
    """Returns `leaf` filled with `value`, as an array of the same library, so the step is not recompiled."""
    library = jnp if isinstance(leaf, jax.Array) else np
    return library.full_like(leaf, value) if is_floating(leaf) else leaf


def _step(train_step: Callable[..., Any], state: Any, batch: tuple[Any, ...]) -> Any:
    """Returns the new state. The step gets copies, since it may donate its arguments."""
    copy = lambda leaf: leaf.copy() if isinstance(leaf, jax.Array) else leaf
    result = train_step(*jax.tree.map(copy, (state, *batch)))
    structure = jax.tree.structure(state)
    if jax.tree.structure(result) != structure:
        if not isinstance(result, tuple) or not result or jax.tree.structure(result[0]) != structure:
            raise TypeError(
                "assert_skips_nonfinite: train_step(state, *batch) returns the new state, or a tuple that "
                "begins with it, of the structure of the state. Of the result and the state: "
                f"{shown_difference(result, state)}. A step that changes NNX modules in place needs "
                "nnx.split and nnx.merge around it."
            )
        result = result[0]
    chex.assert_trees_all_equal_shapes_and_dtypes(state, result)
    return result


def _step_until_taken(train_step: Callable[..., Any], state: Any, batch: tuple[Any, ...]) -> Any:
    """Returns the state after the first step that changes the parameters."""
    # A large loss scale skips the first steps, and an optimizer that accumulates waits.
    for _ in range(_MOST_STEPS):
        before, state = state, _step(train_step, state, batch)
        moved = _moved(before, state, in_optimizer=False)
        if not _skipped(before, state) and any(map(is_floating, moved.values())):
            return state
    summary = f"{_MOST_STEPS} steps on the clean batch move no floating leaf outside of the optimizer"
    raise failure("assert_skips_nonfinite", summary)


def _skipped(before: Any, after: Any) -> bool:
    """Whether a step was skipped, by the optimizer's flags; without an optimizer, by the loss scale."""
    nodes = jax.tree.leaves(after, is_leaf=_is_ours)
    flags = [bool(jnp.all(node.leaf_finite)) for node in nodes if isinstance(node, SkipNonfiniteState)]
    if flags:
        return not all(flags)
    return any(float(new.loss_scale) < float(old.loss_scale) for old, new in _pairs(before, after))


def _check_skipped(before: Any, after: Any, value: float, ignored: Sequence[str]) -> None:
    """Raises an AssertionError if a leaf has changed, or if a loss scale is not what `adjust` returns."""
    is_ignored = lambda name: any(matches(pattern, name) for pattern in ignored)
    moved = [name for name in _moved(before, after) if not is_ignored(name)]
    if moved:
        leaves = "leaf" if len(moved) == 1 else "leaves"
        summary = f"{len(moved)} {leaves} of the state moved on a batch of {value}"
        if not _skipped(before, after):
            hint = "The step was not skipped: the gradients that the optimizer saw were finite."
        else:
            select = "jmp.select_tree(jmp.grads_finite(opt_state), new, old)"
            hint = f"Write {select} for them, or name them in ignore=."
        raise failure("assert_skips_nonfinite", summary, [*moved, hint])
    wrong = [
        f"it is {power(float(new.loss_scale))}, and was {power(float(old.loss_scale))}"
        for old, new in _pairs(before, after)
        if not np.array_equal(old.adjust(False).loss_scale, new.loss_scale)
    ]
    if wrong:
        raise failure("assert_skips_nonfinite", f"the loss scale did not fall on a batch of {value}", wrong)


_MOST_STEPS = 64  # A scale of 2**64 falls to 1.


def _is_ours(node: Any) -> bool:
    return isinstance(node, SkipNonfiniteState) or is_loss_scale(node)


def _scales(state: Any) -> list[LossScale]:
    return list(filter(is_loss_scale, jax.tree.leaves(state, is_leaf=is_loss_scale)))


def _pairs(before: Any, after: Any) -> list[tuple[LossScale, LossScale]]:
    return list(zip(_scales(before), _scales(after), strict=True))


def _moved(before: Any, after: Any, in_optimizer: bool = True) -> dict[str, Any]:
    """Returns the leaves that differ in a bit, by path, without loss scales and counters."""
    old, new = (named_leaves(_without_scales(state, in_optimizer)) for state in (before, after))
    return {
        name: leaf for (name, leaf), (_, other) in zip(old, new, strict=True) if _bits(leaf) != _bits(other)
    }


def _without_scales(state: Any, in_optimizer: bool) -> Any:
    """Returns a state without loss scales and counters, and without all of the optimizer if so asked."""

    def strip(node: Any) -> Any:
        if isinstance(node, SkipNonfiniteState) and in_optimizer:
            return {"inner_state": _without_scales(node.inner_state, in_optimizer)}
        return None if _is_ours(node) else node

    return jax.tree.map(strip, state, is_leaf=_is_ours)


def _bits(leaf: Any) -> bytes:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()
