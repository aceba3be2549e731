"""Side effects, tracers, threads and compilation."""

import concurrent.futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import jmp_lite as jmp
from tests.support.closeness import assert_close
from tests.support.jaxprs import products, text
from tests.support.small_programs import W, X


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
