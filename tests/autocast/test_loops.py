"""Loops and branches under `autocast`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp_lite as jmp
from tests.support.closeness import assert_close
from tests.support.halves import each_half
from tests.support.jaxprs import equations, operands_of, products
from tests.support.small_programs import W, X


def test_a_while_loop_of_products_is_half_and_keeps_its_carry():
    def fun(x, w):
        def body(state):
            count, x = state
            return count + 1, jnp.tanh(x @ w)

        return lax.while_loop(lambda state: (state[0] < 5) & (state[0] < 9), body, (0, x))

    count, result = jmp.autocast(fun)(X, W)
    assert int(count) == 5
    assert products(jmp.autocast(fun), X, W) == [("bfloat16", "bfloat16")]
    assert_close(result, fun(X, W)[1], "bfloat16", factor=16)
    loop = next(e for e in equations(jax.make_jaxpr(jmp.autocast(fun))(X, W)) if e.primitive.name == "while")
    assert [var.aval.dtype.name for var in loop.outvars] == ["int32", "float32"]


def stops_at_its_own_limit(row, limit):
    return lax.while_loop(
        lambda carry: (carry[0] @ W).sum() < limit,
        lambda carry: (carry[0] @ (1.5 * jnp.eye(8)), carry[1] + 1, jax.random.split(carry[2])[0]),
        (row, jnp.int32(0), jax.random.key(3)),
    )


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("order", ["inside", "outside"])
def test_a_vmapped_while_loop_stops_each_example_at_its_own_limit(order):
    rows = jnp.abs(X) * jnp.sign(W.sum(1))
    limits = jnp.array([50.0, 20.0, 100.0, -1.0])
    once = jax.vmap(stops_at_its_own_limit)
    expected_rows, expected_counts, expected_keys = once(rows, limits)
    fun = jmp.autocast(once) if order == "inside" else jax.vmap(jmp.autocast(stops_at_its_own_limit))
    found_rows, found_counts, found_keys = fun(rows, limits)
    assert len(set(expected_counts.tolist())) == 4
    assert found_counts.tolist() == expected_counts.tolist()
    assert (found_keys == expected_keys).all()
    assert set(products(fun, rows, limits)) == {("float32", "float32")}  # The predicate depends on them.
    np.testing.assert_allclose(found_rows, expected_rows, rtol=1e-5)


def test_loop_carries_keep_their_dtype():
    def fun(x, w):
        def step(carry, _):
            total, half, key, x = carry
            x = jnp.tanh(x @ w)
            return (total + x.sum(), (half * 2).astype(jnp.float16), jax.random.split(key)[0], x), x

        return lax.scan(step, (0.0, jnp.float16(1), jax.random.key(0), x), None, length=3)

    jaxpr = jax.make_jaxpr(jmp.autocast(fun))(X, W)
    plain = jax.make_jaxpr(fun)(X, W)

    def carried(jaxpr):
        return next(
            [var.aval.dtype for var in e.outvars[:4]] for e in equations(jaxpr) if e.primitive.name == "scan"
        )

    assert carried(jaxpr) == carried(plain)
    (total, half, _, x), ys = jmp.autocast(fun)(X, W)
    assert (total.dtype, half.dtype, x.dtype, ys.dtype) == ("float32", "float16", "float32", "float32")
    assert float(half) == 8


def test_slow_sums_in_a_carry_are_float32():
    def fun(x, w):
        return lax.scan(lambda total, _: (total + (x @ w)[0, 0], None), 0.0, length=5000)[0]

    one = jnp.ones((1, 1))
    assert float(jmp.autocast(fun)(one, one)) == 5000.0
    assert float(jmp.autocast(fun, "float16")(one, one)) == 5000.0

    def loop(x, w):
        return lax.fori_loop(0, 5000, lambda _, total: total + (x @ w), jnp.zeros((1, 1)))

    assert float(jmp.autocast(loop)(one, one)[0, 0]) == 5000.0


@each_half
def test_slices_leave_a_scan_in_half_when_a_product_takes_them(half):
    def fun(x, w):
        return lax.scan(lambda c, row: (c, jnp.tanh(row @ w)), None, x[:, None])[1][:, 0] @ w

    scan = next(
        e for e in equations(jax.make_jaxpr(jmp.autocast(fun, half))(X, W)) if e.primitive.name == "scan"
    )
    assert [var.aval.dtype.name for var in scan.outvars] == [half]


def test_an_empty_scan_and_a_branch_of_nothing_work():
    assert jmp.autocast(lambda x: lax.scan(lambda x, _: (x @ W, x), x, length=0)[1])(X).shape == (0, 4, 8)
    assert lax.cond(True, lambda: None, lambda: None) is None

    def fun(x):
        return (lax.cond(x[0, 0] > 0, lambda: jax.debug.print("branch"), lambda: None), x @ W)[1]

    assert_close(jmp.autocast(fun)(X), X @ W, "bfloat16", factor=2)


def test_branches_give_the_widest_dtype_of_their_results():
    def wide(x, w):
        return lax.cond(x[0, 0] < 9, lambda: x @ w, lambda: jnp.cumsum(x, 1)) @ w

    def narrow(x, w):
        return lax.cond(x[0, 0] < 9, lambda: x @ w, lambda: jnp.tanh(x @ w)) @ w

    def find(f):
        return next(
            e.outvars[0].aval.dtype.name
            for e in equations(jax.make_jaxpr(f)(X, W))
            if e.primitive.name == "cond"
        )

    assert (find(jmp.autocast(wide)), find(jmp.autocast(narrow))) == ("float32", "bfloat16")


def lstm(x, w):
    """An LSTM of 8 features over the rows of `x`, with its inputs multiplied outside the loop."""

    def step(carry, gates):
        cell, hidden = carry
        a, b, c, d = jnp.split(gates + hidden @ jnp.tile(w, 4), 4, axis=-1)
        cell = jax.nn.sigmoid(b) * cell + jax.nn.sigmoid(a) * jnp.tanh(c)
        hidden = jax.nn.sigmoid(d) * jnp.tanh(cell)
        return (cell, hidden), hidden

    gates = jnp.stack([x @ jnp.tile(w, 4)] * 5)
    return lax.scan(step, (jnp.zeros((4, 8)), jnp.zeros((4, 8))), gates)[1] @ w


def kept_by_iterations(fun, *args):
    """The shapes and dtypes of the arrays that a loop of five iterations keeps for its backward pass."""
    pullback = jax.eval_shape(lambda *args: jax.vjp(fun, *args)[1], *args)
    leaves = [leaf for leaf in jax.tree.leaves(pullback) if leaf.shape[:1] == (5,)]
    return sorted((leaf.shape, leaf.dtype.name) for leaf in leaves)


@pytest.mark.slow
@each_half
def test_an_lstm_keeps_its_gates_in_half_and_computes_the_rest_again(half):
    fun = lambda x, w: jnp.sum(lstm(x, w) * X)
    # The hidden state before each step, and the one that leaves for the product; the gates; the cell.
    expected = [((5, 4, 8), half), ((5, 4, 8), half), ((5, 4, 32), half), ((5, 4, 8), "float32")]
    assert kept_by_iterations(jmp.autocast(fun, half), X, W) == sorted(expected)
    assert len(kept_by_iterations(fun, X, W)) > 10
    grads = jax.jit(jax.grad(jmp.autocast(fun, half), (0, 1)))(X, W)
    assert_close(grads, jax.grad(fun, (0, 1))(X, W), half, factor=16)
    count = lambda fun: len(products(jax.grad(fun, (0, 1)), X, W))
    assert count(jmp.autocast(fun, half)) == count(fun)


def test_a_loop_that_says_what_it_keeps_keeps_that():
    step = lambda x, _: (jnp.sin(jnp.tanh(x @ W) @ W), None)
    everything = jax.checkpoint(step, policy=jax.checkpoint_policies.everything_saveable)
    nothing = jax.checkpoint(step)

    def loop(step):
        return jmp.autocast(lambda x: lax.scan(step, x, length=5)[0], "float16")

    kept = lambda step: [dtype for _, dtype in kept_by_iterations(loop(step), X)]
    assert set(kept(step)) == {"float16"}
    assert "float32" in kept(everything)
    assert kept(nothing) == ["float32"]  # In bfloat16 a copy is enough: see test_checkpoints.py.


def test_a_loop_keeps_as_little_if_its_body_casts_to_half_by_itself():
    def own_casts(x, _):
        return x + (jax.nn.gelu(x @ W).astype("bfloat16") @ W.astype("bfloat16")).astype("float32"), None

    def no_casts(x, _):
        return x + jax.nn.gelu(x @ W) @ W, None

    for step in (own_casts, no_casts):
        loop = jmp.autocast(functools.partial(lax.scan, step, length=5))
        assert kept_by_iterations(loop, X) == [((5, 4, 8), "bfloat16")]  # The operand of the GELU.


def test_a_loop_of_random_masks_keeps_booleans():
    def step(x, key):
        kept = jax.random.uniform(key, x.shape) < 0.9
        return jnp.tanh(jnp.where(kept, x / 0.9, 0.0) @ W), None

    fun = lambda x: lax.scan(step, x, jax.random.split(jax.random.key(0), 5))[0]
    kept = [dtype for shape, dtype in kept_by_iterations(jmp.autocast(fun), X) if shape == (5, 4, 8)]
    assert sorted(kept) == ["bfloat16", "bool"]


def test_a_value_in_half_is_moved_in_half_inside_a_loop_and_its_gradient_is_summed_in_float32():
    def fun(w, x):
        keys = x @ w
        return jnp.sum(lax.map(lambda queries: jnp.tanh(queries @ keys.T), x.reshape(2, 2, 8)) ** 2)

    gradient = jax.grad(jmp.autocast(fun))
    assert set(operands_of("transpose", jmp.autocast(fun), W, X)) == {"bfloat16"}
    (backward,) = (
        equation
        for equation in equations(jax.make_jaxpr(gradient)(W, X))
        if equation.primitive.name == "scan" and equation.params["reverse"]
    )
    assert [var.aval.dtype.name for var in backward.outvars if var.aval.shape == (4, 8)] == ["float32"]
    assert_close(gradient(W, X), jax.grad(fun)(W, X), "bfloat16", factor=16)
