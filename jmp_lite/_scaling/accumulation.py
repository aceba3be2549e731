"""What `migrate_state` does with gradients that `optax.MultiSteps` has accumulated."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._tree import is_traced, nodes_of, select_tree
from .finite import all_finite


def restart_accumulation(new: Any, carried: Any) -> Any:
    """Returns the state `carried`, whose `optax.MultiSteps` begin anew if their gradients are not finite."""
    # With a wrapper inside of `optax.MultiSteps`, gradients that are not finite are accumulated and the step
    # is skipped. A wrapper around it would not see them any more.

    def restart(new: Any, carried: Any) -> Any:
        if not _is_accumulation(new):
            return carried
        kept, fresh = ((state.mini_step, state.acc_grads) for state in (carried, new))
        mini_step, acc_grads = select_tree(all_finite(carried.acc_grads), kept, fresh)
        return carried._replace(mini_step=mini_step, acc_grads=acc_grads)

    return jax.tree.map(restart, new, carried, is_leaf=_is_accumulation)


def check_accumulation(transform: optax.GradientTransformation, params: Any, state: Any) -> None:
    """Raises a ValueError if an `optax.MultiSteps` may not go on from what it has accumulated."""
    before = nodes_of(state, optax.MultiStepsState)
    minis = [node.mini_step for node in before]
    # Counters that are traced or batched cannot be read, and without a micro-batch nothing can be lost.
    if any(is_traced(mini) or np.ndim(mini) for mini in minis) or not any(map(int, minis)):
        return

    try:
        after = _step_of(transform)
        counted = after(params, state)
        # The first micro-batch replaces ones in a mean, and is added to them in a sum.
        probed = after(params, jax.tree.map(_ones, state, is_leaf=_is_accumulation))
    except Exception:  # It needs extra arguments. Then it cannot be told.
        return
    for old, (mini, step, _), (_, _, total) in zip(before, counted, probed, strict=True):
        # An `optax.MultiSteps` counts one micro-batch more, or ends the accumulation and counts a step. If it
        # does neither, it takes fewer micro-batches than there are already.
        why = "has use_grad_mean=False, and the old one may have taken the mean, which no state shows"
        if fewer := int(mini) != int(old.mini_step) + 1 and int(step) == int(old.gradient_step):
            why = "takes fewer for a step, so that the next step would be too large or lose some of them"
        if int(old.mini_step) and (fewer or total):
            raise ValueError(
                f"migrate_state: {int(old.mini_step)} micro-batches have been accumulated, and the "
                f"optax.MultiSteps of tx {why}. Finish the accumulation with the old settings, or drop it: "
                "set mini_step to 0 and acc_grads to zeros in the old state."
            )


def _step_of(transform: optax.GradientTransformation) -> Callable[[Any, Any], list[tuple[Any, Any, Any]]]:
    """Returns a jitted step with gradients of zero, which gives the counters and sums of accumulations."""

    # No state holds `every_k_schedule` or `use_grad_mean`: `update` shows them. XLA removes all else.
    @jax.jit
    def after(params: Any, state: Any) -> list[tuple[Any, Any, Any]]:
        _, new = transform.update(jax.tree.map(jnp.zeros_like, params), state, params)
        nodes = nodes_of(new, optax.MultiStepsState)
        return [(node.mini_step, node.gradient_step, optax.tree.sum(node.acc_grads)) for node in nodes]

    return after


def _ones(node: Any) -> Any:
    """Returns an accumulation of ones before its first micro-batch, and any other node as it is."""
    if not _is_accumulation(node):
        return node
    return node._replace(mini_step=0 * node.mini_step, acc_grads=jax.tree.map(jnp.ones_like, node.acc_grads))


def _is_accumulation(node: Any) -> bool:
    return isinstance(node, optax.MultiStepsState)
