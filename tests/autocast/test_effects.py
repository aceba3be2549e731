"""Side effects, tracers, threads and compilation."""

import concurrent.futures

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import io_callback

import jmp_lite as jmp
from tests.support.closeness import assert_close
from tests.support.jaxprs import products, text
from tests.support.small_programs import PARAMS, W, X, mlp


def test_debug_prints_and_callbacks_run_once_with_float32_values(capsys):
    seen = []

    def fun(x, w):
        y = x @ w
        jax.debug.print("y00 = {} {}", y[0, 0], "text", ordered=False)
        jax.debug.callback(lambda y: seen.append(("debug", y.dtype.name, y.shape)), y)
        z = io_callback(
            lambda y: (seen.append(("io", y.dtype.name)), y + 1)[1], jax.ShapeDtypeStruct(y.shape, y.dtype), y
        )
        z = jax.pure_callback(lambda z: np.asarray(z * 2), jax.ShapeDtypeStruct(y.shape, y.dtype), z)
        return z @ w

    for run in (jmp.autocast(fun), jax.jit(jmp.autocast(fun))):
        seen.clear()
        result = run(X, W)
        jax.effects_barrier()
        assert sorted(seen) == [("debug", "float32", (4, 8)), ("io", "float32")]
        assert capsys.readouterr().out.count("y00 = ") == 1
        assert_close(result, ((X @ W) + 1) * 2 @ W, "bfloat16", factor=8)
    assert products(jmp.autocast(fun), X, W) == [("bfloat16", "bfloat16")] * 2


def test_ordered_effects_inside_loops_keep_their_order():
    seen = []

    def step(x, number):
        io_callback(lambda number: seen.append(int(number)), None, number, ordered=True)
        return jnp.tanh(x @ W), x.sum()

    fun = jmp.autocast(lambda x: lax.scan(step, x, jnp.arange(5)))
    jax.block_until_ready(jax.jit(fun)(X))
    jax.effects_barrier()
    assert seen == [0, 1, 2, 3, 4]
    seen.clear()
    jax.block_until_ready(fun(X))
    jax.effects_barrier()
    assert seen == [0, 1, 2, 3, 4]


def test_debug_prints_in_jitted_and_differentiated_code_run_once(capsys):
    @jax.jit
    def layer(x, w):
        jax.debug.print("layer {}", x.sum())
        return jnp.tanh(x @ w)

    loss = lambda w: layer(X, w).sum()
    for grad in (
        jax.grad(jmp.autocast(loss)),
        jmp.autocast(jax.grad(loss)),
        jax.jit(jax.grad(jmp.autocast(loss))),
    ):
        grad(W)
        jax.effects_barrier()
        assert capsys.readouterr().out.count("layer ") == 1


@pytest.mark.slow
def test_no_tracers_leak():
    layer = jax.jit(lambda p, x: jnp.tanh(mlp(p, x)))

    def loss(params, x):
        x = lax.scan(lambda x, _: (jax.checkpoint(layer)(params, x), None), x, length=2)[0]
        x = lax.cond(x[0, 0] > 0, lambda x: layer(params, x), lambda x: x, x)
        return jnp.sum(jax.nn.relu(x) * jax.nn.silu(x))

    with jax.checking_leaks():
        jax.jit(jmp.autocast(loss))(PARAMS, X)
        jax.jit(jax.grad(jmp.autocast(loss)))(PARAMS, X)
        jax.jit(jmp.autocast(jax.grad(loss)))(PARAMS, X)
        jmp.autocast(loss)(PARAMS, X)


@pytest.mark.slow
def test_threads_with_different_dtypes_get_their_own_results():
    layer = jax.jit(lambda x, w: jnp.tanh(x @ w))
    fun = lambda x, w: layer(layer(x, w), w)
    variants = {
        "float16": jmp.autocast(fun, jnp.float16),
        "bfloat16": jmp.autocast(fun, jnp.bfloat16),
        "float32": fun,
        "full": jmp.autocast(jmp.full_precision(fun)),
    }
    expected = {name: text(variant, X, W) for name, variant in variants.items()}
    assert len(set(expected.values())) == 3
    values = {name: np.asarray(variant(X, W)) for name, variant in variants.items()}
    names = list(variants) * 8

    def work(name):
        return text(variants[name], X, W), np.asarray(variants[name](X, W))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for name, (found, value) in zip(names, pool.map(work, names)):
            assert found == expected[name]
            np.testing.assert_array_equal(value, values[name])


def test_one_compile_for_each_signature():
    traced = []

    def fun(params, x):
        traced.append(x.shape)
        return mlp(params, x)

    run = jax.jit(jmp.autocast(fun))
    for _ in range(3):
        run(PARAMS, X)
    assert traced == [(4, 8)]
    assert run._cache_size() == 1
    run(PARAMS, X[:2])
    run(PARAMS, X)
    assert traced == [(4, 8), (2, 8)]
    assert run._cache_size() == 2


def test_the_output_of_a_step_can_be_fed_back_without_compiling_again():
    optimizer = optax.adam(1e-2)

    @jax.jit
    @jmp.autocast
    def step(params, state, x):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean(mlp(p, x) ** 2))(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params, state = PARAMS, optimizer.init(PARAMS)
    for _ in range(3):
        params, state, _ = step(params, state, X)
    assert step._cache_size() == 1
