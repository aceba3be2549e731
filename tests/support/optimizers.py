"""Optimizers that the tests wrap."""

import jax
import numpy as np
import optax

BAD = [np.nan, np.inf, -np.inf]
SCHEDULE = optax.cosine_decay_schedule(1e-2, 20)


def scan_of(tx):
    def step(carry, grads):
        params, opt_state = carry
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    return lambda carry, grads: jax.lax.scan(step, carry, grads)[0]
