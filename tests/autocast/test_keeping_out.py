"""`full_precision` and `keep_float32`: where autocast keeps out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp_lite as jmp
from tests.support.closeness import assert_close
from tests.support.jaxprs import equations, operands_of, products
from tests.support.small_programs import W, X


def test_full_precision_keeps_products_float32_and_autocast_inside_it_switches_on_again():
    inner = jmp.autocast(lambda x, w: x @ w, jnp.float16)

    @jmp.full_precision
    def middle(x, w):
        return inner(x @ w, w) @ w

    @jmp.autocast
    def outer(x, w):
        return middle(x @ w, w) @ w

    names = [pair[0] for pair in products(outer, X, W)]
    assert names == ["bfloat16", "float32", "float16", "float32", "bfloat16"]
    names = [pair[0] for pair in products(jmp.full_precision(outer), X, W)]
    assert names == ["bfloat16", "float32", "float16", "float32", "bfloat16"]
    again = jmp.autocast(jmp.full_precision(outer), jnp.float16)
    assert [pair[0] for pair in products(again, X, W)] == names
    assert_close(outer(X, W), X @ W @ W @ W @ W @ W, "bfloat16", factor=8)


AROUND = {
    "jit": jax.jit,
    "inline": lambda f: jax.jit(f, inline=True),
    "remat": jax.checkpoint,
    "vmap": lambda f: lambda x, w: jax.vmap(f, (0, None))(x[:, None], w)[:, 0],
    "scan": lambda f: lambda x, w: lax.scan(lambda x, _: (f(x, w), None), x, length=1)[0],
    "cond": lambda f: lambda x, w: lax.cond(x[0, 0] < 100, f, f, x, w),
    "while": lambda f: lambda x, w: lax.fori_loop(0, x.shape[0] // 4, lambda _, x: f(x, w), x),
    "named_scope": jax.named_scope("mine"),
    "checkpointed jit": lambda f: jax.checkpoint(jax.jit(f)),
}


@pytest.mark.parametrize(("around", "within"), [(name, i % 2) for i, name in enumerate(AROUND)])
def test_full_precision_holds_with(around, within):
    plain = lambda x, w: jnp.tanh(x @ w)
    fun = jmp.full_precision(AROUND[around](plain)) if within else AROUND[around](jmp.full_precision(plain))
    program = lambda x, w: fun(x @ w, w)
    found = products(jmp.autocast(program), X, W)
    assert found[0] == ("bfloat16", "bfloat16")
    assert set(found[1:]) == {("float32", "float32")}
    if around != "while":
        loss = lambda x, w: jnp.sum(fun(x, w))
        for grad in (jax.grad(jmp.autocast(loss), 1), jmp.autocast(jax.grad(loss, 1))):
            assert set(products(grad, X, W)) == {("float32", "float32")}


def test_a_jitted_function_used_inside_and_outside_full_precision_is_decided_apart():
    layer = jax.jit(lambda x, w: jnp.tanh(x @ w))
    program = lambda x, w: layer(jmp.full_precision(layer)(layer(x, w), w), w)
    names = [pair[0] for pair in products(jmp.autocast(program), X, W)]
    assert names == ["bfloat16", "float32", "bfloat16"]
    # JAX caches traced functions. The cache must not bring the half products back.
    names = [pair[0] for pair in products(jmp.autocast(lambda x, w: layer(x, w)), X, W)]
    assert names == ["bfloat16"]


@pytest.mark.parametrize("around", [name for name in AROUND if name != "while"])
def test_keep_float32_survives(around):
    def plain(x, w):
        return jnp.tanh(jmp.keep_float32(x @ w) * 2.0)

    jaxpr = jax.make_jaxpr(jmp.autocast(AROUND[around](plain)))(X, W)
    assert ["float32"] in [
        [var.aval.dtype.name for var in equation.invars]
        for equation in equations(jaxpr)
        if equation.primitive.name == "tanh"
    ]
    assert products(jmp.autocast(AROUND[around](plain)), X, W)[0] == ("bfloat16", "bfloat16")
    without = jax.make_jaxpr(jmp.autocast(lambda x, w: jnp.tanh((x @ w) * 2.0) @ w))(X, W)
    tanh = next(equation for equation in equations(without) if equation.primitive.name == "tanh")
    assert tanh.invars[0].aval.dtype == jnp.bfloat16


@pytest.mark.parametrize(("keep", "dtype"), [(False, "bfloat16"), (True, "float32")])
def test_keep_float32_holds_for_a_table_of_constants(keep, dtype):
    """Half queries are multiplied by a table that is computed from literals alone."""

    def rotated(x):
        table = jnp.sin(jnp.arange(4.0)[:, None] * jnp.ones(8))
        q, table = x @ W[:, :8], jmp.keep_float32(table) if keep else table
        return jnp.abs(q * table) @ W

    fun = jmp.autocast(rotated)
    assert operands_of("abs", fun, X) == [dtype]
    assert set(products(jax.grad(lambda x: jnp.sum(fun(x))), X)) == {("bfloat16", "bfloat16")}


@pytest.mark.parametrize("summed", [1, 8])
def test_keep_float32_keeps_the_gradients_of_a_product_with_and_without_a_sum(summed):
    def loss(x, w):
        return jnp.sum(jnp.tanh(jmp.keep_float32(x[:, :summed]) @ w[:summed]) @ w)

    found = products(jax.grad(jmp.autocast(loss), (0, 1)), X, W)
    # The kept product, which counts here if it sums, its two gradients, and the other three products.
    kept = 2 if summed == 1 else 3
    assert sorted(found) == [("bfloat16", "bfloat16")] * 3 + [("float32", "float32")] * kept


def test_keep_float32_outside_autocast_is_the_identity():
    np.testing.assert_array_equal(jmp.keep_float32(X), X)
    assert jmp.keep_float32(X.astype(jnp.float16)).dtype == jnp.float16
    assert float(jax.grad(lambda x: jmp.keep_float32(x) ** 2)(3.0)) == 6.0
