"""Half parameters without masters that still learn from updates below half a unit in the last place."""

from typing import Any, NamedTuple

import jax
import optax

from .._tree import at_least_float32, is_half
from .bits import first_key, next_key, random_bits
from .rounding import round_to, update_to
from .transforms import as_transform, check_params, check_state


class StochasticRoundingState(NamedTuple):
    """The state of `with_stochastic_rounding`.

    Attributes:
        inner_state: the state of the wrapped transform.
        key: the `RoundingKey` of the next step, two scalars, uint32.

    Guide: docs/memory.md.
    """

    inner_state: Any
    key: Any


def with_stochastic_rounding(
    inner: optax.GradientTransformation | optax.MultiSteps, *, key: int | jax.Array = 0
) -> optax.GradientTransformationExtraArgs:
    """Rounds the new parameters of half precision stochastically, so that they learn without masters.

    A bfloat16 parameter of 1 and an update of 2**-12: rounding to nearest never changes the parameter.
    Stochastic rounding changes it by 2**-8 on the 16th step on average. A parameter needs 2 bytes where
    `with_master_weights` needs 6. It is noisier: docs/memory.md has the accuracy of both. (Zamirai et al.,
    Revisiting BFloat16 Training, 2020.)

    `inner` runs as in a float32 program: its state is made for float32 parameters, and its `update` gets
    float32 gradients and parameters. The state can rest in bfloat16 as well:

        inner = jmp.cast_state(optax.adamw(3e-4), "bfloat16", stochastic_rounding=True)
        tx = jmp.with_loss_scale(jmp.with_stochastic_rounding(inner))

    Args:
        inner: an optax transform, or an `optax.MultiSteps`.
        key: an integer or a PRNG key. The same key gives the same run. The state holds the key of the next
            step. A step that `with_loss_scale` skips leaves the key as it was.

    Returns:
        A transform, whose `update` needs the parameters. Its updates of half parameters are float32:
        `optax.apply_updates(params, updates)` gives the sum of parameter and inner update, rounded by
        `stochastic_round`. Parameters of float32 and float64 are not rounded.

    Raises:
        TypeError: `inner` is no optax transform, or `key` is no key; from `update`, the state is not that of
            this transform.
        ValueError: from `update`, there are no parameters.

    >>> import jax.numpy as jnp
    >>> params = jnp.ones(4000, jnp.bfloat16)
    >>> tx = with_stochastic_rounding(optax.sgd(1.0))
    >>> updates, state = tx.update(jnp.full(4000, 2**-12), tx.init(params), params)
    >>> params = optax.apply_updates(params, updates)
    >>> params.dtype.name, round(float(jnp.mean(params < 1)), 2)  # 1 / 16 of them.
    ('bfloat16', 0.06)

    Guide: docs/memory.md.
    """
    made_by = "with_stochastic_rounding"
    transform = as_transform(made_by, inner)

    def init(params: Any) -> Any:
        return StochasticRoundingState(transform.init(at_least_float32(params)), first_key(made_by, key))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        check_state(made_by, state, StochasticRoundingState, params)
        check_params(made_by, params)
        full = at_least_float32(params)
        changes, inner_state = transform.update(
            at_least_float32(updates), state.inner_state, full, **extra_args
        )
        new = optax.apply_updates(full, changes)
        leaves, structure = jax.tree.flatten(params)
        new_updates = [
            update_to(p, round_to(sum_, p.dtype, random_bits(state.key, leaf, p.shape)))
            if is_half(p)
            else change
            for leaf, (p, sum_, change) in enumerate(
                zip(leaves, structure.flatten_up_to(new), structure.flatten_up_to(changes))
            )
        ]
        return structure.unflatten(new_updates), StochasticRoundingState(inner_state, next_key(state.key))

    return optax.GradientTransformationExtraArgs(init, update)
