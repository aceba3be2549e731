"""What `skip_nonfinite` and `with_loss_scale` hold, and how to read it from any optimizer state."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._tree import register_state, static_field


@register_state
@dataclasses.dataclass(frozen=True)
class SkipNonfiniteState:
    """The state of `skip_nonfinite` and `with_loss_scale`; read it with the functions below.

    Attributes:
        inner_state: the state of the wrapped transform.
        loss_scale: the loss scale, or None if the caller threads it.
        leaf_finite: which gradients of the last step were finite, shape `(len(leaf_names),)`, bool.
        skipped_steps: how many steps were left out, shape `()`, int32.
        consecutive_skipped_steps: how many of them since the last one taken, shape `()`, int32.
        leaf_names: the paths of the parameters.
        name: what tells this optimizer from another in the same tree.
    """

    inner_state: Any
    loss_scale: Any
    leaf_finite: Any
    skipped_steps: Any
    consecutive_skipped_steps: Any
    leaf_names: tuple[str, ...] = static_field()
    name: str | None = static_field()


def get_loss_scale(opt_state: Any, name: str | None = None) -> Any:
    """Returns the loss scale that `with_loss_scale` holds.

    Args:
        opt_state: an optimizer state, or whatever holds it at any depth: a chain, `optax.masked`,
            `optax.MultiSteps`, `optax.inject_hyperparams`, `optax.multi_transform`, a Flax
            `TrainState`, an `nnx.Optimizer`.
        name: the name given to `with_loss_scale`, needed where the tree holds more than one.

    Returns:
        The `LossScale`, to be used for this step's loss.

    Raises:
        ValueError: there is none, or more than one to choose from.

    >>> import optax, jmp_lite as jmp
    >>> float(get_loss_scale(jmp.with_loss_scale(optax.sgd(1.0)).init(jnp.ones(2))).loss_scale)
    32768.0
    """
    states = [state for state in _find_states(opt_state) if state.loss_scale is not None]
    return unwrap(_choose(states, name, "with_loss_scale").loss_scale)


def grads_finite(opt_state: Any, name: str | None = None) -> jax.Array:
    """Returns whether the last step's gradients were finite, and the step was taken.

    Args:
        opt_state, name: as in `get_loss_scale`.

    Returns:
        A boolean scalar, shape `()`; true before the first step. One for each member of a batched state.

    Raises:
        ValueError: as in `get_loss_scale`.

    >>> import optax, jmp_lite as jmp
    >>> bool(grads_finite(jmp.skip_nonfinite(optax.sgd(1.0)).init(jnp.ones(2))))
    True
    """
    return jnp.asarray(unwrap(_skip_state(opt_state, name).consecutive_skipped_steps)) == 0


def skipped_steps(opt_state: Any, name: str | None = None) -> jax.Array:
    """Returns how many steps were skipped since the optimizer was initialised.

    Args:
        opt_state, name: as in `get_loss_scale`.

    Returns:
        A count, shape `()`, int32.

    Raises:
        ValueError: as in `get_loss_scale`.

    >>> import optax, jmp_lite as jmp
    >>> int(skipped_steps(jmp.skip_nonfinite(optax.sgd(1.0)).init(jnp.ones(2))))
    0
    """
    return unwrap(_skip_state(opt_state, name).skipped_steps)


def consecutive_skipped_steps(opt_state: Any, name: str | None = None) -> jax.Array:
    """Returns how many steps were skipped since the last one that was taken.

    Args:
        opt_state, name: as in `get_loss_scale`.

    Returns:
        A count, shape `()`, int32.

    Raises:
        ValueError: as in `get_loss_scale`.

    >>> import optax, jmp_lite as jmp
    >>> int(consecutive_skipped_steps(jmp.skip_nonfinite(optax.sgd(1.0)).init(jnp.ones(2))))
    0
    """
    return unwrap(_skip_state(opt_state, name).consecutive_skipped_steps)


def raise_if_stuck(opt_state: Any, max_consecutive_skips: int = 50, name: str | None = None) -> None:
    """Raises on the host if too many steps in a row were skipped.

    Call it outside `jit`, every few steps: it waits for the device. A dynamic scale that starts at
    2**15 may rightly skip 15 steps before it has found its place.

    Args:
        opt_state, name: as in `get_loss_scale`.
        max_consecutive_skips: how many skips in a row are too many.

    Raises:
        FloatingPointError: as many steps in a row, or more, were skipped. The message names the
            parameters whose gradients were not finite on the last one.
        TypeError: `opt_state` is traced.
        ValueError: as in `get_loss_scale`, or `max_consecutive_skips` is below 1.

    >>> import optax, jmp_lite as jmp
    >>> raise_if_stuck(jmp.skip_nonfinite(optax.sgd(1.0)).init(jnp.ones(2)))
    """
    if max_consecutive_skips < 1:
        raise ValueError(f"max_consecutive_skips should be 1 or above, got {max_consecutive_skips}.")
    state = _skip_state(opt_state, name)
    try:
        skips = int(unwrap(state.consecutive_skipped_steps))
    except jax.errors.ConcretizationTypeError:
        raise TypeError("raise_if_stuck reads values: call it on the host, outside jit.") from None
    if skips < max_consecutive_skips:
        return
    flags = np.asarray(unwrap(state.leaf_finite))
    bad = [path or "(the only parameter)" for path, ok in zip(state.leaf_names, flags) if not ok]
    scale = (
        ""
        if state.loss_scale is None
        else f" The loss scale is {float(unwrap(state.loss_scale).loss_scale)}."
    )
    names = f"inf or NaN in the gradients of {', '.join(bad)} ({len(bad)} of {len(flags)} parameters)"
    raise FloatingPointError(
        f"The last {skips} steps were skipped: "
        f"{names if bad else 'the squares of the gradients add up to inf'}.{scale}\n"
        "At a small loss scale the cause is the model or the data: an inf or NaN in a batch, a learning "
        "rate too large, log or division of zero, an activation beyond 65504 in float16, or, behind a clip "
        "by global norm, a gradient beyond 1.8e19, whose square is inf. Look at the first of these layers in "
        "float32 (jax_debug_nans), or keep it in float32 with a policy rule."
    )


def _find_states(tree: Any) -> list[SkipNonfiniteState]:
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, SkipNonfiniteState))
    return [leaf for leaf in leaves if isinstance(leaf, SkipNonfiniteState)]


def _skip_state(opt_state: Any, name: str | None) -> SkipNonfiniteState:
    return _choose(_find_states(opt_state), name, "skip_nonfinite or with_loss_scale")


def _choose(states: list[SkipNonfiniteState], name: str | None, wrapper: str) -> SkipNonfiniteState:
    found = [state for state in states if name is None or state.name == name]
    if len(found) == 1:
        return found[0]
    names = [state.name for state in states]
    if not states:
        raise ValueError(
            f"No optimizer wrapped in {wrapper} was found in this state. Wrap yours, for example "
            "tx = jmp.with_loss_scale(optax.adamw(3e-4)), and give the state that tx.init returned."
        )
    if not found:
        raise ValueError(f"No optimizer is named {name!r}. The names here are {names}.")
    raise ValueError(
        f"{len(found)} optimizers wrapped in {wrapper} were found, named {names}. Name them apart, "
        "with_loss_scale(..., name='generator'), and ask for one by its name."
    )


def unwrap(tree: Any) -> Any:
    """Takes the arrays out of the variables in which Flax NNX keeps parameters and optimizer state."""
    is_variable = lambda node: hasattr(node, "get_value")
    return jax.tree.map(lambda v: v.get_value() if is_variable(v) else v, tree, is_leaf=is_variable)
