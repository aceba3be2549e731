"""A jitted function that a program uses many times stays one function."""

import jax
import jax.numpy as jnp
from jax import lax

import jmp_lite as jmp
from tests.support.closeness import assert_close
from tests.support.jaxprs import equations, products
from tests.support.small_programs import STACK, B, W, X, layer


def test_a_jitted_block_used_many_times_is_made_once():
    block = jax.jit(lambda x, w: jnp.tanh(x @ w))

    def fun(x, w):
        x = block(x, w)
        for _ in range(6):
            x = block(x, w)
        return x

    jaxpr = jax.make_jaxpr(jmp.autocast(fun))(X, W)
    calls = [e for e in equations(jaxpr) if e.primitive.name == "jit" and e.params["name"] == "<lambda>"]
    assert len(calls) == 7
    assert len({id(e.params["jaxpr"]) for e in calls}) <= 3  # By the dtypes that go in and out.
    plain = jax.jit(fun).lower(X, W).as_text().count("func.func")
    assert jax.jit(jmp.autocast(fun)).lower(X, W).as_text().count("func.func") <= plain + 2


def test_static_and_named_arguments_of_inner_jits_survive():
    inner = jax.jit(lambda x, *, times, mode: x @ W * times if mode == "on" else x, static_argnames="mode")
    fun = lambda x: inner(x, times=2.0, mode="on")
    assert_close(jmp.autocast(fun)(X), X @ W * 2, "bfloat16", factor=2)
    assert products(jmp.autocast(fun), X) == [("bfloat16", "bfloat16")]


def test_autocast_within_vmap_grad_and_scan_is_half():
    cell = jmp.autocast(layer)
    fun = lambda x, w, b: lax.scan(lambda x, w: (cell(x, w, b), None), x, STACK + w)[0]
    assert products(fun, X, W, B) == [("bfloat16", "bfloat16")]
    loss = lambda w: jnp.sum(jax.vmap(lambda row: fun(row[None], w, B))(X))
    assert set(products(jax.grad(loss), W)) == {("bfloat16", "bfloat16")}
    plain = lambda w: jnp.sum(lax.scan(lambda x, v: (layer(x, v, B), None), X, STACK + w)[0])
    assert_close(jax.grad(loss)(W), jax.grad(plain)(W), "bfloat16", factor=32)
