"""A train step for every model: this is all that a user writes to use jmp_lite."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

import jmp_lite as jmp
from jmp_lite.linen import with_policy

from .workload import Workload


def make_train_step(
    workload: Workload,
    policy: jmp.Policy,
    tx: optax.GradientTransformation,
    reduce_dtype: Literal["float32"] | None = None,
) -> Callable[..., Any]:
    """Returns a jitted step of a model under a policy.

    Args:
        workload: the model and its training.
        policy: the policy of the model.
        tx: an optimizer with a loss scale, from `jmp.with_loss_scale`.
        reduce_dtype: the dtype in which devices sum weight gradients, as in `with_policy`.

    Returns:
        A function of parameters, statistics (`batch_stats`, or nothing), optimizer state and a batch. The
        first three are donated. It returns new ones, and a pair of float32 scalars: the loss and its scale.
    """
    model = with_policy(workload.model, policy, reduce_dtype=reduce_dtype)

    def loss_fn(params: Any, statistics: Any, inputs: Any, targets: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params, **statistics}
        outputs, new_statistics = model.apply(variables, *inputs, mutable=list(statistics))
        return workload.loss(outputs, targets), new_statistics

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def train_step(params: Any, statistics: Any, opt_state: Any, batch: Any) -> Any:
        loss_scale: Any = jmp.get_loss_scale(opt_state)
        run = jmp.value_and_grad(loss_fn, loss_scale, has_aux=True)
        (loss, new_statistics), grads = run(params, statistics, *batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        # A skipped step does not change the parameters. It should not change the statistics either.
        new_statistics = jmp.select_tree(jmp.grads_finite(opt_state), new_statistics, statistics)
        params = optax.apply_updates(params, updates)
        return params, new_statistics, opt_state, (loss, jnp.float32(loss_scale.loss_scale))

    return train_step
