"""Losses whose value or gradients are not finite, one for each cause that docs/causes.md names."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .run import Run, broken

LOSSES: list[Run] = []
loss = functools.partial(broken, LOSSES)

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
W = np.linspace(-0.5, 0.5, 16, dtype=np.float32).reshape(4, 4)
ONES = np.ones(4, np.float32)
ZEROS = np.zeros(4, np.float32)
HALF = jnp.float16


# Masks and softmax.


@loss((W, X), "convert_element_type", "use float32 instead of float16 on line")
def a_mask_of_1e9_in_float16(w, x):
    scores = ((x @ w) @ x.T).astype(HALF)
    mask = jnp.where(jnp.tri(3, k=-1, dtype=bool), 0.0, -1e9)
    scores = scores + mask.astype(HALF)  # here
    return jnp.mean(jax.nn.softmax(scores).astype(jnp.float32) @ x)


@loss((W, X), "add", "use float32 instead of float16 on line")
def two_masks_of_the_least_number(w, x):
    scores = ((x @ w) @ x.T).astype(HALF)
    causal = jnp.where(jnp.tri(3, k=-1, dtype=bool), 0, jnp.finfo(HALF).min).astype(HALF)
    padding = jnp.where(jnp.arange(3) < 0, 0, jnp.finfo(HALF).min).astype(HALF)
    mask = causal + padding  # here
    return jnp.mean(jax.nn.softmax(scores + mask).astype(jnp.float32) @ x)


@loss((W, X), "select_n", "")
def a_softmax_of_a_row_that_is_masked_as_a_whole(w, x):
    scores = jnp.where(jnp.tri(3, k=-1, dtype=bool), (x @ w) @ x.T, -jnp.inf)  # here
    return jnp.mean(jax.nn.softmax(scores) @ x)


# Operations at the edge of where they are defined.


@loss(100 * ONES, "exp", "")
def an_exp_of_a_large_number(w):
    return jnp.sum(jnp.exp(w))  # here


@loss(100 * ONES, "exp", "")
def a_logsumexp_by_hand(w):
    return jnp.log(jnp.sum(jnp.exp(w)))  # here


@loss(ZEROS, "log", "smallest operand of the logarithm is 0")
def a_log_of_zero(w):
    return jnp.sum(jnp.log(w))  # here


@loss((ONES, ZEROS), "div", "")
def a_division_by_zero(w, x):
    return jnp.sum(w / x)  # here


@loss((ONES, ZEROS), "div", "0 / 0")
def counts_of_an_empty_batch(w, mask):
    return jnp.sum(w * mask) / jnp.sum(mask)  # here


@loss((ONES, 1e-39), "div", "")
def a_division_by_a_tiny_number(w, temperature):
    return jnp.sum(jnp.tanh(1e-9 * w / temperature))  # here


@loss(ZEROS, "div", "derivative of sqrt, which is infinite at 0")
def the_gradient_of_a_root_at_zero(w):
    return jnp.sum(jnp.sqrt(w))  # here


@loss(ZEROS, "div", "derivative of sqrt, which is infinite at 0")
def the_gradient_of_a_norm_at_zero(w):
    return jnp.linalg.norm(w)  # here


@loss(ZEROS, "pow", "derivative of pow, which is infinite at 0")
def the_gradient_of_a_power_at_zero(w):
    return jnp.sum(w**0.5)  # here


@loss(ZEROS, "rsqrt", "")
def an_rsqrt_of_zero(w):
    return jnp.sum(lax.rsqrt(w))  # here


@loss(-ONES, "sqrt", "")
def a_root_of_a_negative_number(w):
    return jnp.sum(jnp.sqrt(w))  # here


@loss((ZEROS, ZEROS), "div integer_pow mul", "")
def the_gradient_of_arctan2_at_the_origin(y, x):
    return jnp.sum(jnp.arctan2(y, x))  # here


@loss(np.float32([1000.1] * 7), "sqrt", "")
def a_variance_as_a_difference(w):
    mean, square = jnp.mean(w), jnp.mean(w**2)
    return jnp.sum((w - mean) / jnp.sqrt(square - mean**2))  # here


@loss((ZEROS, ONES), "div integer_pow", "")
def a_where_that_does_not_guard_the_gradient(w, x):
    return jnp.sum(jnp.where(w > 0, x / w, 0.0))  # here


@loss(W, "gather", "")
def an_index_out_of_bounds(w):
    return jnp.sum(jnp.take(w, jnp.array([0, 99]), axis=0))  # here


# Linear algebra.


@loss((np.ones((3, 3), np.float32), np.ones(3, np.float32)), "div triangular_solve", "")
def a_solve_with_a_singular_matrix(w, x):
    return jnp.sum(jnp.linalg.solve(w, x))  # here


@loss(np.ones((3, 3), np.float32), "cholesky", "")
def a_cholesky_of_a_singular_matrix(w):
    return jnp.sum(jnp.linalg.cholesky(w - 2.0))  # here


@loss(np.eye(3, dtype=np.float32), "div integer_pow reciprocal", "")
def the_gradient_of_eigenvectors_of_equal_eigenvalues(w):
    return jnp.sum(jnp.linalg.eigh(w)[1][:, 0])  # here


# The range of float16.


@loss(300 * ONES, "mul integer_pow square", "use float32 instead of float16 on line")
def the_square_of_300_in_float16(w):
    with jax.named_scope("wide"):
        h = w.astype(HALF)
        h = h * h  # here
    return jnp.mean(h.astype(jnp.float32))


@loss(30000 * ONES, "reduce_sum", "use float32 instead of float16 on line")
def a_loss_beyond_65504(w):
    return jnp.sum(w.astype(HALF), dtype=HALF).astype(jnp.float32)  # here


@loss((W, X), "convert_element_type", "jmp.DynamicLossScale(2.0**14)", scale=2.0**16)
def a_gradient_beyond_65504(w, x):
    h = x.astype(HALF) @ w.astype(HALF)
    return 3 * jnp.sum(h.astype(jnp.float32))  # here


@loss((ZEROS, 1e-8), "div", "is 0 in float16")
def an_epsilon_that_is_zero_in_float16(w, epsilon):
    h = w.astype(HALF)
    h = h / (jnp.abs(h) + epsilon)  # here
    return jnp.sum(h.astype(jnp.float32))


@loss(ZEROS, "rsqrt div", "is 0 in float16")
def an_epsilon_of_a_layer_norm(w):
    h = w.astype(HALF)
    h = (h - h.mean()) * lax.rsqrt(h.var() + 1e-8)  # here
    return jnp.sum(h.astype(jnp.float32))


# Arithmetic with inf, and bad inputs.


@loss((ZEROS, np.float32(3e38) * ONES), "mul", "")
def zero_times_inf(w, x):
    return jnp.sum(w * (x * 10))  # here


BAD = np.tile(X, (5, 1, 1))
BAD[3, 1, 2] = np.nan


@loss((W, BAD), "argument", "The data in batches is not finite", index=(3, 1, 2))
def a_nan_in_the_data(w, batches):
    return jnp.mean((batches @ w) ** 2)


BAD_W = W.copy()
BAD_W[1, 2] = np.nan


@loss((BAD_W, X), "argument", "an earlier update wrote it", index=(1, 2))
def a_nan_in_a_parameter(w, x):
    return jnp.mean((x @ w) ** 2)


# Inside of operations that run programs.

STEPS = np.array([3, 2, 1, 0, 5], np.float32)


@loss((ONES, STEPS), "log", "smallest operand of the logarithm is 0")
def in_a_scan(w, xs):
    def body(carry, x):
        return carry + jnp.sum(jnp.log(x * w)), None  # here

    return lax.scan(body, 0.0, xs)[0]


@loss((ONES, STEPS), "log", "smallest operand of the logarithm is 0")
def in_a_while(w, xs):
    def body(carry):
        n, total = carry
        return n + 1, total + jnp.sum(jnp.log(xs[n] * lax.stop_gradient(w)))  # here

    total = lax.while_loop(lambda c: c[0] < 5, body, (0, 0.0))[1]
    return lax.stop_gradient(total) + w.sum()


@loss((ZEROS, 1.0), "log", "smallest operand of the logarithm is 0")
def in_a_branch(w, x):
    first = lambda w: jnp.sum(w)
    second = lambda w: jnp.sum(jnp.log(w))  # here
    return lax.cond(x > 2, first, second, w)


@loss(ZEROS, "div", "derivative of sqrt")
def in_the_backward_rule_of_a_custom_vjp(w):
    @jax.custom_vjp
    def root(x):
        return jnp.sqrt(x)

    def backward(y, g):
        return (g / (2 * y),)

    root.defvjp(lambda x: (jnp.sqrt(x), jnp.sqrt(x)), backward)
    return jnp.sum(root(w))  # here


@loss((ONES, X), "log", "logarithm is -2.909")
def under_vmap(w, x):
    return jnp.sum(jax.vmap(lambda row: jnp.log(row @ w))(x))  # here


@loss(
    (ONES, np.array([2, 1, 0, 3], np.float32)),
    "log",
    "smallest operand of the logarithm is 0",
)
def in_a_shard(w, x):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    logs = lambda x, w: jnp.log(x * w.sum())  # here
    return jnp.sum(jax.shard_map(logs, mesh=mesh, in_specs=(spec("d"), spec()), out_specs=spec("d"))(x, w))
