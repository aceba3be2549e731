"""`autocast` leaves dtypes other than float32 alone, and code that is half already."""

import jax
import jax.numpy as jnp
import pytest

import jmp_lite as jmp
from tests.support.closeness import assert_close
from tests.support.halves import each_half
from tests.support.jaxprs import products, text
from tests.support.small_programs import HALVES, W, X, eps


@pytest.mark.cases(slow=3)
@pytest.mark.parametrize("dtype", ["int8", "int32", "uint32", "bool", "complex64", "float8_e4m3fn"])
def test_other_dtypes_are_left_alone(dtype):
    x = jnp.ones((4, 4), dtype)

    def fun(x):
        y = x if dtype == "bool" else x + x
        return x, y if dtype.startswith("float8") else y @ y, y.reshape(-1)[:3], x.real.astype(jnp.float32)

    assert text(jmp.autocast(fun), x) == text(fun, x)
    assert [leaf.dtype for leaf in jmp.autocast(fun)(x)] == [leaf.dtype for leaf in fun(x)]


@pytest.mark.slow
def test_float64_is_left_alone():
    with jax.enable_x64(True):
        x = jnp.ones((4, 4), jnp.float64) / 3
        fun = lambda x: (x @ x, (x * 2.0).sum())
        assert text(jmp.autocast(fun), x) == text(fun, x)
        mixed = lambda x, w: ((x @ x).sum() + (w @ w).sum(), w @ w)
        w = jnp.ones((4, 4), jnp.float32) / 3
        assert products(jmp.autocast(mixed), x, w) == [
            ("float64", "float64"),
            *[("bfloat16", "bfloat16")] * 2,
        ]
        total, product = jmp.autocast(mixed)(x, w)
        assert (total.dtype, product.dtype) == (jnp.float64, jnp.float32)
        assert abs(float(total) - 128 / 9) < 64 / 9 * 4 * eps("bfloat16")


@each_half
@pytest.mark.parametrize("own", HALVES)
def test_code_that_is_half_already_is_left_alone(half, own):
    x, w = X.astype(own), W.astype(own)
    fun = lambda x, w: jax.nn.softmax(jnp.tanh(x @ w) @ w * 2 + 1)
    assert text(jmp.autocast(fun, half), x, w) == text(fun, x, w)
    inside = lambda x, w: (x.astype(own) @ w.astype(own)).astype(jnp.float32)
    assert text(jmp.autocast(inside, half), X, W) == text(inside, X, W)


def test_half_arguments_and_float32_arguments_promote_as_in_jax():
    fun = lambda x, w: x @ w
    assert jmp.autocast(fun)(X.astype(jnp.bfloat16), W).dtype == jnp.float32
    assert products(jmp.autocast(fun), X.astype(jnp.bfloat16), W) == [("bfloat16", "bfloat16")]


def test_a_difference_from_a_half_value_of_the_program_is_one_of_float32_numbers():
    """In bfloat16 the tanh of 2**-5 is 2**-5. The product that takes it rounds it for itself alone."""

    def fun(own, w):
        wide = own.astype(jnp.float32)
        y = jnp.tanh(wide)
        return y @ w, (y - wide) @ w

    own = jnp.full((4, 8), 2.0**-5, jnp.bfloat16)
    assert products(jmp.autocast(fun), own, W) == [("bfloat16", "bfloat16")] * 2
    assert_close(jmp.autocast(fun)(own, W)[1], fun(own, W)[1], "bfloat16", factor=4)
