"""Helpers of the tests of loss scales."""

import math
import struct

import jax
import jax.numpy as jnp
import numpy as np

TINY = float(np.finfo(np.float32).tiny)
LARGEST = float(np.finfo(np.float32).max)


def f32(number):
    """A Python number rounded to float32."""
    try:
        return struct.unpack("f", struct.pack("f", number))[0]
    except OverflowError:
        return math.inf


def state_of(scale):
    left = 0 if scale.hysteresis_left is None else int(scale.hysteresis_left)
    return float(scale.loss_scale), int(scale.counter), left


def assert_strong(scale):
    """Strongly typed scalars: float32 and int32."""
    scale = jax.tree.map(jnp.asarray, scale)
    assert scale.loss_scale.dtype == np.float32
    assert scale.counter.dtype == np.int32
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(scale))
    assert all(leaf.shape == () for leaf in jax.tree.leaves(scale))


def rebuilt(scale):
    leaves, structure = jax.tree.flatten(scale)
    return jax.tree.unflatten(structure, leaves)


def run_eagerly(scale, events):
    trajectory = []
    for finite in events:
        scale = rebuilt(scale.adjust(jnp.bool_(finite)))
        trajectory.append(state_of(scale))
    return trajectory
