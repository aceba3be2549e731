"""Products, and the operations that need special care, between other products."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify

import jmp_lite as jmp
from tests.support.closeness import assert_close
from tests.support.jaxprs import products
from tests.support.small_programs import STACK, B, W, X, normal, value_and_grad


@pytest.mark.slow
def test_convolutions_einsums_and_ragged_products_are_half_forward_and_backward():
    image, kernel = normal(2, 8, 8, 3), normal(3, 3, 3, 4, scale=0.2)

    def convolve(x, k):
        return lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def transposed(x, k):
        return lax.conv_transpose(x, k, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    ragged = lambda x, w: lax.ragged_dot(x, w, jnp.array([1, 2, 1]))
    for fun, args in (
        (convolve, (image, kernel)),
        (transposed, (image, kernel)),
        (ragged, (X, STACK)),
        (lambda x, w: jnp.einsum("bi,lij,bj->bl", x, w, x), (X, STACK)),
    ):
        loss = lambda *args, fun=fun: jnp.sum(jnp.sin(fun(*args)))
        expected = jax.jit(jax.grad(loss, (0, 1)))(*args)
        for grad in (jax.grad(jmp.autocast(loss), (0, 1)), jmp.autocast(jax.grad(loss, (0, 1)))):
            assert set(products(grad, *args)) == {("bfloat16", "bfloat16")}
            assert_close(jax.jit(grad)(*args), expected, "bfloat16", factor=16)


def _sum_in_reference(x, w):
    total = jax.new_ref(jnp.zeros((4, 8)))

    def step(x, _):
        total[...] = total[...] + x @ w
        return jnp.tanh(x @ w), None

    lax.scan(step, x, length=3)
    return total[...]


def _collective(fun):
    """Applies a collective to the rows of a product. vmap turns the collective into an ordinary operation."""
    return lambda x, w: jax.vmap(lambda row: fun(row @ w), axis_name="i")(x)


# Operations with a side of their own: every product before and after them is half.
ODD = {
    "linearize": lambda x, w: jax.linearize(lambda w: jnp.tanh(x @ w), w)[1](w),
    "platform_dependent": lambda x, w: lax.platform_dependent(
        x, w, cpu=jnp.matmul, default=lambda x, w: jnp.sin(x @ w)
    ),
    "reduce": lambda x, w: lax.reduce(x @ w, 0.0, lambda a, b: a + b * 1.0, (0,))[None],
    "reduce_precision": lambda x, w: lax.reduce_precision(x @ w, 8, 10),
    "checkify": lambda x, w: checkify.checkify(lambda x: x @ w)(x)[1],
    "reference in a scan": _sum_in_reference,
    "fft": lambda x, w: jnp.fft.fft(x @ w).real,
    "sort by keys": lambda x, w: lax.sort((x @ w, x), num_keys=1)[1],
    "top_k": lambda x, w: lax.top_k(x @ w, 8)[0],
    "scatter": lambda x, w: (x @ w).at[jnp.array([0, 0])].add(x[:2]),
    "segment_sum": lambda x, w: jax.ops.segment_sum(x @ w, jnp.array([0, 1, 1, 0]), num_segments=2),
    "select of three": lambda x, w: lax.select_n(
        jnp.array([[0, 1, 2, 0, 1, 2, 0, 1]] * 4), x @ w, x, jnp.exp(x)
    ),
    "average pool": lambda x, w: lax.reduce_window(x @ w, 0.0, lax.add, (1, 2), (1, 1), "SAME") / 2,
    "all_gather": lambda x, w: _collective(lambda row: lax.all_gather(row, "i"))(x, w)[0],
    "ppermute": _collective(lambda row: lax.ppermute(row, "i", [(i, (i + 1) % 4) for i in range(4)])),
}


@pytest.mark.cases(fast=2, slow=6)
@pytest.mark.parametrize("name", ODD)
def test_products_around_odd_operations_are_half(name):
    half, order = [("float16", "outside"), ("bfloat16", "inside")][list(ODD).index(name) % 2]
    fun = lambda x, w, b: (ODD[name](x + b, w) * 0.5) @ w
    plain, found = products(fun, X, W, B), products(jmp.autocast(fun, half), X, W, B)
    assert found == [(half, half)] * len(plain)
    grad = value_and_grad(fun, half, order)
    assert set(products(grad, X, W, B)) == {(half, half)}
    value, grads = jax.jit(grad)(X, W, B)
    loss = lambda *args: jnp.sum(jnp.sin(fun(*args)))
    expected, expected_grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(X, W, B)
    assert_close(value, expected, half, factor=32)
    if name != "sort by keys":  # Close keys change their order, and so all gradients change.
        assert_close(grads, expected_grads, half, factor=32)


def test_the_derivative_of_qr_is_half_in_one_order_alone_and_full_precision_mends_it():
    """Limits names this exception."""

    def loss(qr, a):
        q, r = qr(a)
        return jnp.sum(jnp.sin(q)) + jnp.sum(jnp.cos(r))

    a = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)), jnp.float32)
    half, full = {("bfloat16", "bfloat16")}, {("float32", "float32")}
    for qr, outside in ((jnp.linalg.qr, half), (jmp.full_precision(jnp.linalg.qr), full)):
        fun = functools.partial(loss, qr)
        assert set(products(jax.grad(jmp.autocast(fun)), a)) == full
        assert set(products(jmp.autocast(jax.grad(fun)), a)) == outside
