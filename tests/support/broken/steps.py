"""Whole train steps that are broken behind the gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .run import Run, broken

STEPS: list[Run] = []
step = functools.partial(broken, STEPS, step=True)

ONES = np.ones(4, np.float32)
HALF = jnp.float16
PARAMS = {"w": jnp.ones(4, HALF), "frozen": jnp.ones(4, HALF)}
ADAM = optax.adam(1e-3)


def _loss(params, x):
    return jnp.mean((params["w"].astype(jnp.float32) * x) ** 2)


@step(
    (PARAMS, ADAM.init(PARAMS), ONES),
    "div",
    "arguments in float32: params",
    file="optax/_src/transform.py",
)
def the_epsilon_of_adam_in_float16(params, state, x):
    grads = jax.grad(_loss)(params, x)
    updates, state = ADAM.update(grads, state, params)
    return optax.apply_updates(params, updates), state


@step((ONES, jnp.int32(0), ONES), "rsqrt div pow", "")
def a_schedule_at_step_zero(w, count, x):
    rate = 0.1 * jax.lax.rsqrt(count.astype(jnp.float32))  # here
    return w - rate * jax.grad(lambda w: jnp.mean((w * x) ** 2))(w), count + 1


@step((ONES.astype(np.float16), ONES), "", "update is lost", finite=True)
def an_update_that_is_lost(w, x):
    grads = jax.grad(lambda w: jnp.mean((w.astype(jnp.float32) * x) ** 2))(w)
    return (w - 1e-4 * grads).astype(HALF)


@step((ONES, ONES), "", "gradients are all zero", finite=True)
def gradients_that_are_all_zero(w, x):
    grads = jax.grad(lambda w: jnp.mean((w * x).astype(HALF) * HALF(1e-7)).astype(jnp.float32) * 1e-3)(w)
    return w - 0.1 * grads
