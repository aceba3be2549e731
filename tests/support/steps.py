"""Parameters, gradients with and without a NaN, and a jitted step: for the tests of the optimizer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

KERNEL = np.linspace(-1.0, 1.0, 12, dtype=np.float32).reshape(3, 4)
KERNEL[1] = -0.0


def make_params(dtype=jnp.float32):
    params = {"dense": {"kernel": KERNEL, "bias": np.full(4, -0.0)}, "gain": np.ones(())}
    return jax.tree.map(lambda leaf: jnp.asarray(leaf.astype(dtype)), params)


def make_grads(step, dtype=jnp.float32):
    return jax.tree.map(
        lambda p: jnp.asarray((np.cos(step + 3 * np.asarray(p)) / 4).astype(dtype)), make_params()
    )


def spoil(grads, value=np.nan, where=("dense", "kernel")):
    layer, name = where
    bad = np.array(grads[layer][name])
    bad.flat[0] = value
    return {**grads, layer: {**grads[layer], name: jnp.asarray(bad)}}


def bits(tree):
    """Every leaf as its bytes: tells -0.0 from 0.0 and one NaN from another."""

    def leaf_bits(leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return (str(leaf.dtype), leaf.shape, np.asarray(leaf).tobytes())

    return jax.tree.map(leaf_bits, tree, is_leaf=lambda leaf: hasattr(leaf, "dtype"))


def make_step(tx):
    @jax.jit
    def step(params, opt_state, grads):
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step


def run(tx, grads_list, params=None, step=None):
    params = make_params() if params is None else params
    step, opt_state = step or make_step(tx), tx.init(params)
    for grads in grads_list:
        params, opt_state = step(params, opt_state, grads)
    return params, opt_state
