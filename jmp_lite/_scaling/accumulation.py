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
    """Raises a ValueError if an `optax.MultiSteps` takes fewer micro-batches than it has accumulated."""
    count = lambda state: [
        (node.mini_step, node.gradient_step) for node in nodes_of(state, optax.MultiStepsState)
    ]
    before = count(state)
    # Counters that are traced or batched cannot be read, and without a micro-batch nothing can be lost.
    if any(is_traced(mini) or np.ndim(mini) for mini, _ in before) or not any(
        int(mini) for mini, _ in before
    ):
        return

    # No state holds `every_k_schedule`. What `update` makes of the counters shows it. XLA removes all else.
    @jax.jit
    def after(params: Any, state: Any) -> Any:
        return count(transform.update(jax.tree.map(jnp.zeros_like, params), state, params)[1])

    try:
        counted = after(params, state)
    except Exception:  # It needs extra arguments. Then it cannot be told.
        return
    # An `optax.MultiSteps` counts one micro-batch more, or ends the accumulation and counts a step. If it
    # does neither, it takes fewer micro-batches than there are already.
    for (mini, step), (next_mini, next_step) in zip(before, counted, strict=True):
        if int(mini) and int(next_mini) != int(mini) + 1 and int(next_step) == int(step):
            raise ValueError(
                f"migrate_state: {int(mini)} micro-batches have been accumulated, and the optax.MultiSteps "
                "of tx takes fewer for a step, so that the next step would be too large or lose some of "
                "them. Finish the accumulation with the old every_k_schedule, or drop it: set mini_step to 0 "
                "and acc_grads to zeros in the old state."
            )


def _is_accumulation(node: Any) -> bool:
    return isinstance(node, optax.MultiStepsState)
