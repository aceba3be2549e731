"""Small programs after public issues about NaN and bad accuracy in JAX and PyTorch; each names its issue."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .run import Run, broken

PUBLIC: list[Run] = []
public = functools.partial(broken, PUBLIC)

ONES = np.ones(4, np.float32)
ZEROS = np.zeros(4, np.float32)
HALF, BF16 = jnp.float16, jnp.bfloat16

# Not finite.


@public(np.float32([-200, -100, 0]), "exp", "", source="jax-ml/jax#777")
def a_sigmoid_by_hand(w):
    return jnp.sum(1 / (1 + jnp.exp(-w)))  # here


@public(np.float32([1000.1] * 7), "rsqrt", "", source="google/flax#1491")
def a_batch_norm_with_a_fast_variance(w):
    mean = jnp.mean(w)
    variance = jnp.mean(lax.square(w)) - lax.square(mean)
    return jnp.sum((w - mean) * lax.rsqrt(variance + 1e-5))  # here


@public(
    ZEROS,
    "log",
    "is 0 in float16",
    source="rwightman/efficientdet-pytorch#291",
)
def the_logarithm_of_a_box(w):
    sizes = w.astype(HALF) + 1e-8
    return jnp.sum(jnp.log(sizes).astype(jnp.float32))  # here


@public((ONES, ZEROS), "div", "0 / 0", step=True, source="google-deepmind/optax#1743")
def gradients_over_their_norm(w, x):
    grads = jax.grad(lambda w: jnp.sum(w * x))(w)
    grads = grads / jnp.sqrt(jnp.sum(grads**2))  # here
    return w + 0.05 * grads


# Finite, and wrong.


@public(
    1000 * ONES,
    "integer_pow square mul",
    "use float32 instead of float16 on line",
    finite=True,
    source="xlite-dev/LeetCUDA#335",
)
def a_division_by_a_deviation_that_overflows(w):
    h = w.astype(HALF) * jnp.array([1, -1, 1, -1], HALF)
    deviation = jnp.sqrt(lax.stop_gradient(jnp.mean(h * h)))  # here
    return jnp.sum((h / deviation).astype(jnp.float32) ** 2)


@public(
    (300 * ONES, ONES),
    "integer_pow square mul",
    "use float32 instead of float16 on line",
    finite=True,
    step=True,
    source="tracel-ai/burn#5699",
)
def clipping_in_float16_that_zeroes_the_gradients(w, x):
    grads = jax.grad(lambda w: jnp.sum(w * x * 300))(w).astype(HALF)
    norm = jnp.sqrt(jnp.sum(grads * grads))  # here
    return w - 0.1 * (grads * jnp.minimum(HALF(1), 1 / norm)).astype(jnp.float32)


@public(
    (ONES.astype(BF16), (1.01 * ONES).astype(BF16)),
    "",
    "update is lost",
    finite=True,
    step=True,
    source="d8ahazard/sd_dreambooth_extension#1415",
)
def an_average_of_the_weights_in_bfloat16(average, w):
    return average + BF16(1e-4) * (w - average)


@public((ONES, ONES), "", "become zero in float16", finite=True, source="engichang1467/Open-Rig3R#35")
def autocast_without_a_scaler(w, x):
    with jax.named_scope("head"):
        return jnp.mean(jnp.cos(jnp.tile(x, (4, 1)) @ jnp.tile(w[:, None], (1, 4))) - 1) * 1e-8


@public(np.full(64, 1e-5, np.float32), "", "", finite=True, source="jax-ml/jax#17792")
def a_mean_of_small_numbers_in_float16(w):
    total = lax.reduce(w.astype(HALF), HALF(0), lax.add, (0,)) / 64  # here
    return total.astype(jnp.float32)


@public(
    (ONES, np.arange(1024, dtype=np.float32)),
    "",
    "",
    finite=True,
    dtype="bfloat16",
    source="EleutherAI/gpt-neox#1003",
)
def rotary_positions_in_bfloat16(w, positions):
    angles = positions[:, None].astype(BF16) * (10 * w).astype(BF16)  # here
    return jnp.mean(jnp.cos(angles).astype(jnp.float32))


@public(np.float32([1, 1, 1, 1]), "", "", finite=True, source="numpy/numpy#22208")
def a_count_that_ends_at_2048(w):
    total, _ = lax.scan(lambda count, _: (count + w.astype(HALF).mean(), None), HALF(0), None, length=4096)
    return total.astype(jnp.float32) / 4096  # here
