"""What `migrate_state` does with gradients that `optax.MultiSteps` has accumulated."""

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
    before = _counts(state)
    # Counters that are traced or batched cannot be read, and without a micro-batch nothing can be lost.
    if any(is_traced(mini) or np.ndim(mini) for mini, _ in before) or not any(
        int(mini) for mini, _ in before
    ):
        return

    # No state holds `every_k_schedule` or `use_grad_mean`. What `update` does shows them. XLA removes all
    # else.
    @jax.jit
    def after(params: Any, state: Any) -> Any:
        zeros = jax.tree.map(jnp.zeros_like, params)
        counted = _counts(transform.update(zeros, state, params)[1])
        probe = jax.tree.map(_accumulated_ones, state, is_leaf=_is_accumulation)
        probe = transform.update(zeros, probe, params)[1]
        # The first micro-batch replaces a mean, and is added to a sum.
        sums = [optax.tree.sum(node.acc_grads) for node in nodes_of(probe, optax.MultiStepsState)]
        return counted, sums

    try:
        counted, sums = after(params, state)
    except Exception:  # It needs extra arguments. Then it cannot be told.
        return
    for (mini, step), (next_mini, next_step), total in zip(before, counted, sums, strict=True):
        # It counts one micro-batch more, or ends the accumulation and counts a step. If it does neither, it
        # takes fewer micro-batches than there are already.
        if int(mini) and int(next_mini) != int(mini) + 1 and int(next_step) == int(step):
            raise _cannot_go_on(
                int(mini),
                "takes fewer for a step, so that the next step would be too large or lose some of them",
                "the old every_k_schedule",
            )
        if int(mini) and total:
            raise _cannot_go_on(
                int(mini),
                "adds them up, use_grad_mean=False, where the old one may have taken their mean: no state says",
                "the old settings",
            )


def _cannot_go_on(mini_steps: int, why: str, settings: str) -> ValueError:
    return ValueError(
        f"migrate_state: {mini_steps} micro-batches have been accumulated, and the optax.MultiSteps of tx "
        f"{why}. Finish the accumulation with {settings}, or drop it: set mini_step to 0 and acc_grads to "
        "zeros in the old state."
    )


def _counts(state: Any) -> list[tuple[Any, Any]]:
    return [(node.mini_step, node.gradient_step) for node in nodes_of(state, optax.MultiStepsState)]


def _accumulated_ones(node: Any) -> Any:
    """Returns a state before its first micro-batch, with ones in place of what was accumulated."""
    if not _is_accumulation(node):
        return node
    ones = jax.tree.map(jnp.ones_like, node.acc_grads)
    return node._replace(mini_step=jnp.zeros_like(node.mini_step), acc_grads=ones)


def _is_accumulation(node: Any) -> bool:
    return isinstance(node, optax.MultiStepsState)
