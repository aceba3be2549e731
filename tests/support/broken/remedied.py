"""Runs for which advice that guesses from the name of an operation was wrong: the remedy must be tried."""

import functools

import jax
import jax.numpy as jnp
import jax.scipy.special as special
import numpy as np
import optax
from jax import lax

from .run import broken

REMEDIED = []
loss = functools.partial(broken, REMEDIED)

ONES, ZEROS = np.ones(4, np.float32), np.zeros(4, np.float32)
X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
SQUARE = 300 * np.ones((4, 4), np.float32)
HALF, BF16, E4M3 = jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn
CAST, SCALE = "use float32 instead of", "jmp.DynamicLossScale(2.0**-1, min_loss_scale=2.0**-24)"


# A maximum with 0 does not help the derivative of a root.


@loss(ZEROS, "div", "derivative of sqrt, which is infinite at 0")
def a_root_of_a_maximum_with_zero(d):
    return jnp.sum(jnp.sqrt(jnp.maximum(d, 0)))  # here


@loss(ONES, "add", "With every operation in float32 it is not finite either.")
def two_masks_in_bfloat16(w):
    scores = w.astype(BF16) + jnp.finfo(BF16).min + jnp.finfo(BF16).min  # here
    return jnp.sum(jax.nn.softmax(scores.astype(jnp.float32)))


@loss(30 * np.eye(4, dtype=np.float32), "div", CAST)
def a_temperature_of_0_01_in_float16(z):
    z = z.astype(HALF)
    logits = z @ z.T / HALF(0.01)  # here
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(logits.astype(jnp.float32) * 1e-4)))


# Numbers that half precision rounds.


@loss((ONES, np.int32(1)), "div", CAST)
def a_bias_correction_in_bfloat16(m, t):
    return jnp.sum((m.astype(BF16) / (1 - BF16(0.999) ** t)).astype(jnp.float32))  # here


@loss(ONES, "div", CAST)
def a_dropout_rate_in_bfloat16(w):
    rate = BF16(0.999)
    keep = jnp.array([1.0, 0, 0, 0]).astype(BF16)
    return jnp.sum((w.astype(BF16) * keep / (1 - rate)).astype(jnp.float32))  # here


@loss(np.full(4, 0.999, np.float32), "atanh", CAST)
def an_arctanh_of_0_999_in_bfloat16(w):
    w = w.astype(BF16)
    return jnp.sum(jnp.arctanh(w).astype(jnp.float32))  # here


@loss(ONES, "mul", "The number 70000 on")
def a_number_beyond_65504(w):
    w = w.astype(HALF) * HALF(70000)  # here
    return jnp.sum(jnp.tanh(w.astype(jnp.float32) * 1e-5))


ADAFACTOR = optax.adafactor(1e-3)
HALVES = {"w": jnp.zeros((128, 128), HALF)}


@loss(
    (HALVES, ADAFACTOR.init(HALVES), np.ones(128, np.float32)),
    "div",
    "arguments in float32: params",
    step=True,
    file="optax/_src/factorized.py",
)
def the_epsilon_of_adafactor_in_float16(params, state, x):
    grads = jax.grad(lambda params: jnp.mean((params["w"].astype(jnp.float32) @ x) ** 2))(params)
    updates, state = ADAFACTOR.update(grads, state, params)
    return optax.apply_updates(params, updates), state


# The range of half precision.


@loss(np.full(4, 1e-5, np.float32), "div", SCALE, scale=2.0**15)
def the_derivative_of_a_log_at_1e_5_in_float16(w):
    return -jnp.sum(jnp.log(w.astype(HALF)).astype(jnp.float32))  # here


@loss(-300 * np.ones(400, np.float32), "reduce_sum", CAST)
def a_sum_of_minus_120000(w):
    w = w.astype(HALF)
    return jnp.sum(w, dtype=w.dtype).astype(jnp.float32) * 1e-5  # here


@loss(1e-3 * ONES, "integer_pow div mul", CAST)
def an_inverse_square_in_float16(w):
    w = w.astype(HALF)
    return jnp.sum((w**-2).astype(jnp.float32)) * 1e-7  # here


@loss(500 * ONES, "convert_element_type", "instead of float8_e4m3fn")
def a_cast_of_500_to_e4m3(w):
    return jnp.sum(w.astype(E4M3).astype(jnp.float32))  # here


@loss((1e3 * ONES, 1e5 * ONES), "convert_element_type", "rules={", rules={})
def a_head_with_weights_beyond_65504(w, head):
    with jax.named_scope("head"):
        y = jnp.tile(w, (4, 1)) @ jnp.tile(head[:, None], (1, 4))  # here
    return jnp.mean(jnp.tanh(y * 1e-9))


# Poles, and a matrix.


@loss(ZEROS, "lgamma", "")
def the_gamma_function_at_zero(w):
    return jnp.sum(special.gammaln(w))  # here


@loss(ZEROS, "digamma", "")
def the_digamma_function_at_zero(w):
    return jnp.sum(special.digamma(w))  # here


@loss(ONES, "erf_inv", "")
def the_inverse_error_function_at_one(w):
    return jnp.sum(special.erfinv(w))  # here


@loss(ONES, "select_n neg", "")
def the_quantile_of_one(w):
    return jnp.sum(special.ndtri(w))  # here


@loss(np.ones((3, 3), np.float32), "log", "")
def the_log_determinant_of_a_singular_matrix(w):
    return jnp.linalg.slogdet(w)[1]  # here


# Finite, and wrong: an inf that a later operation makes finite.


@loss(SQUARE, "mul integer_pow square", CAST, finite=True)
def a_gaussian_of_an_overflowed_distance(w):
    h = w.astype(HALF)
    d2 = jnp.sum(h * h, -1)  # here
    return jnp.mean(jnp.exp(-d2.astype(jnp.float32) / 2e5))


@loss(SQUARE, "mul integer_pow square", CAST, finite=True)
def a_tanh_of_an_overflowed_sum(w):
    h = w.astype(HALF)
    s = jnp.sum(h * h, -1)  # here
    return jnp.mean(jnp.tanh(s.astype(jnp.float32) * 1e-6))


WRONG = []
wrong = functools.partial(broken, WRONG, finite=True)


@wrong((ONES, np.arange(64, dtype=np.float32)), "")
def the_base_of_rotary_positions_in_float16(w, positions):
    base = HALF(5e5)
    frequencies = 1.0 / (base ** (jnp.arange(0, 8, 2).astype(HALF) / 8))  # here
    angles = positions[:, None] * frequencies.astype(jnp.float32)
    return jnp.mean(jnp.cos(angles) * w)


@wrong((ONES, np.ones((1000, 4), np.float32)), "", "the update is lost", step=True)
def gradients_that_are_added_in_bfloat16(w, xs):
    def body(total, x):
        gradient = jax.grad(lambda w: jnp.sum(w * x))(w)
        return total + gradient.astype(BF16), None  # here

    total, _ = lax.scan(body, jnp.zeros(4, BF16), xs)  # here
    return w - 1e-3 * total.astype(jnp.float32) / 1000


@wrong((ONES, np.zeros(4, np.float16), ONES), "", "the update is lost in float16", step=True)
def the_second_moment_of_adam_underflows(w, nu, x):
    gradient = jax.grad(lambda w: jnp.mean(1e-3 * w * x))(w)
    nu = (0.999 * nu + 0.001 * gradient.astype(HALF) ** 2).astype(HALF)  # here
    return w - 1e-3 * gradient / (jnp.sqrt(nu.astype(jnp.float32)) + 1e-8), nu


@wrong((np.ones(4, np.float16), 300 * np.ones(4, np.float16)), "mul", "in float32", step=True)
def an_overflow_that_cancels_an_update(w, grads):
    norm = jnp.sqrt(jnp.sum(grads * grads))  # here
    return w - HALF(0.1) * grads / norm
