"""Derivatives of derivatives, rules that policies of `jax.checkpoint` see through, and traces that leak."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp_lite as jmp
from tests.support.halves import each_half
from tests.support.jaxprs import products, rounded_sums
from tests.support.small_programs import W, X, normal

W1, W2, ROWS = normal(32, 32, scale=0.2), normal(32, 32, scale=0.2), normal(16, 32)
FLOAT8 = {"dtype": "float8", "rules": {"**": "float8"}}


def critic(weights, x):
    return jnp.tanh(jnp.tanh(x @ weights[0]) @ weights[1]).sum()


def penalty(fun):
    """The gradient penalty of a WGAN: its gradient is a second derivative of the critic."""
    return lambda weights: (jax.grad(fun, 1)(weights, ROWS) ** 2).sum()


@pytest.mark.filterwarnings("ignore:autocast.*float8.*runs on cpu")
def test_a_second_derivative_of_float8_is_an_error_that_names_the_order_that_works():
    weights = (W1, W2)
    twice = jax.grad(penalty(jmp.autocast(critic, **FLOAT8)))
    for step in (twice, jax.jit(twice)):
        with pytest.raises(ValueError, match=r"first derivatives.*autocast\(jax.grad\(loss\), 'float8'\)"):
            step(weights)
    linear = lambda weights, x: (x @ weights[0] @ weights[1]).sum()  # Its cotangents are constant.
    with pytest.raises(ValueError, match="first derivatives"):
        jax.eval_shape(jax.grad(penalty(jmp.autocast(linear, **FLOAT8))), weights)
    with pytest.raises(ValueError, match="first derivatives"):
        jax.eval_shape(jax.jacrev(jax.jacrev(lambda x: jmp.autocast(critic, **FLOAT8)(weights, x))), ROWS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:autocast.*float8.*runs on cpu")
def test_a_second_derivative_in_the_order_that_works_is_that_of_float32():
    reference = jax.jit(jax.grad(penalty(critic)))((W1, W2))
    outside = jax.jit(jmp.autocast(jax.grad(penalty(critic)), **FLOAT8))((W1, W2))
    for found, expected in zip(outside, reference, strict=True):
        assert 0 < np.linalg.norm(found - expected) < 0.2 * np.linalg.norm(expected)


@each_half
def test_second_derivatives_have_half_products_with_a_reduce_dtype(half):
    automatic = jmp.autocast(critic, half, reduce_dtype="float32")
    twice = jax.grad(penalty(automatic))
    assert set(products(twice, (W1, W2))) == {(half, half)}
    outside = jmp.autocast(jax.grad(lambda w: critic(w, ROWS)), half, reduce_dtype="float32")
    squares = lambda w: sum((g**2).sum() for g in outside(w))
    assert set(products(jax.grad(squares), (W1, W2))) == {(half, half)}
    reference = jax.tree.leaves(jax.jit(jax.grad(penalty(critic)))((W1, W2)))
    for found, expected in zip(jax.tree.leaves(jax.jit(twice)((W1, W2))), reference, strict=True):
        eps = float(jnp.finfo(half).eps)
        assert np.linalg.norm(found - expected) < 8 * eps * np.linalg.norm(expected)


@pytest.mark.filterwarnings("ignore:autocast.*float8.*runs on cpu")
@pytest.mark.parametrize(
    "options",
    [{}, FLOAT8, {"float32_results": "weights"}, {"reduce_dtype": "float32"}],
    ids=["half", "float8", "float32_results", "reduce_dtype"],
)
def test_what_a_policy_of_checkpoint_saves_is_not_computed_again(options):
    def loss(weights, x):
        block = lambda weights, x: jnp.tanh(jnp.tanh(x @ weights[0]) @ weights[1])
        saving = jax.checkpoint(block, policy=jax.checkpoint_policies.dots_saveable)
        return saving(weights, x).sum()

    count = lambda fun: len(products(jax.grad(fun, (0, 1)), (W1, W2), ROWS))
    assert count(jmp.autocast(loss, **options)) == count(loss) == 6


@each_half
def test_float32_results_may_be_transposed(half):
    """XLA cannot write the float32 result of bfloat16 operands transposed on a CPU."""

    def fun(w, x):
        with jax.named_scope("head"):
            logits = x @ w
        return jnp.exp(logits.T)

    found = jax.jit(jmp.autocast(fun, half, float32_results="head"))(W, X)
    np.testing.assert_allclose(found, fun(W, X), rtol=16 * float(jnp.finfo(half).eps))


@jax.custom_vjp
def _sine(x):
    return jnp.sin(x)


_sine.defvjp(lambda x: (_sine(x), x), lambda x, g: (g * jnp.cos(x),))

LEAKY = {
    "custom_vjp": lambda w, x: jnp.sum(_sine(x @ w) @ w),
    "relu": lambda w, x: jnp.sum(jax.nn.relu(x @ w) @ w),
    "scan of a custom_vjp": lambda w, x: lax.scan(lambda c, _: (_sine(c @ w), None), x, length=2)[0].sum(),
    "with_layer_loss_scale": lambda w, x: jmp.with_layer_loss_scale(lambda w, x: x @ w)(w, x).sum(),
}


@pytest.fixture
def nothing_to_search():
    """JAX looks for a leak among all objects that the garbage collector knows: those of all tests before."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("name", LEAKY)
def test_no_tracer_leaks(name, nothing_to_search):
    fun = LEAKY[name]
    steps = [jmp.autocast(fun), jax.grad(jmp.autocast(fun)), jmp.autocast(jax.grad(fun))]
    with jax.checking_leaks():
        for step in (*steps, *map(jax.jit, steps)):
            step(W, X)


def test_a_backward_rule_that_reads_a_traced_argument_names_the_order_that_works():
    def fun(w, x):
        @jax.custom_vjp
        def own(hidden):
            return jnp.tanh(hidden)

        own.defvjp(lambda hidden: (own(hidden), hidden), lambda hidden, g: (g / jnp.cosh(hidden) ** 2 * x,))
        return own(x @ w).sum()

    with pytest.raises(ValueError, match=r"not among its residuals.*autocast\(jax.grad\(fun\)\)"):
        jax.grad(jmp.autocast(fun))(W, X)
    assert jmp.autocast(jax.grad(fun))(W, X).shape == W.shape


def column(logits):
    return logits.T, jax.nn.logsumexp(logits, -1)


_jvp = jax.custom_jvp(lambda logits: column(logits))
_jvp.defjvp(lambda p, t: jax.jvp(column, p, t))
_vjp = jax.custom_vjp(lambda logits: column(logits))
_vjp.defvjp(lambda x: jax.vjp(column, x), lambda pullback, g: pullback(g))
CALLS = {
    "jit": jax.jit(column),
    "checkpoint": jax.checkpoint(column),
    "cond": lambda x: lax.cond(x[0, 0] < 9, column, lambda x: (x.T, x[:, 0]), x),
    "scan": lambda x: jax.tree.map(
        lambda y: y[0], lax.scan(lambda _, x: (None, column(x)), None, x[None])[1]
    ),
    "custom_jvp": _jvp,
    "custom_vjp": _vjp,
}


@pytest.mark.cases(fast=1, slow=3)
@pytest.mark.parametrize("name", CALLS)
@each_half
def test_a_half_value_that_leaves_a_call_and_is_read_inside_meets_its_gradients_in_float32(half, name):
    """Every kind of call passes a half value and the path of its gradients, in and out."""
    rows, labels = jnp.arange(4), jnp.arange(4)

    def loss(w):
        moved, total = CALLS[name](X @ w)
        # All cotangents of the logits cancel: each row gets p - p.
        return (total - jax.nn.logsumexp(moved, 0)).sum() + 0.0 * moved[labels, rows].sum()

    gradient = jax.jit(jax.grad(jmp.autocast(loss, half)))
    assert float(jnp.abs(gradient(W)).max()) < 1e-6
    assert not rounded_sums(jax.make_jaxpr(gradient)(W), in_float32=True)
    assert set(products(gradient, W)) == {(half, half)}
