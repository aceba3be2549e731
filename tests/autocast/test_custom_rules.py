"""Custom derivatives stay those of the user."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.custom_derivatives import SymbolicZero

import jmp_lite as jmp
from tests.support.closeness import assert_close
from tests.support.jaxprs import products
from tests.support.small_programs import W, X

EACH_ORDER = pytest.mark.parametrize(("half", "order"), [("bfloat16", "inside"), ("float16", "outside")])


def counting_rules():
    """Two functions with rules whose gradients are wrong on purpose, and counts of their calls."""
    calls = collections.Counter()

    @jax.custom_vjp
    def with_vjp(x, w):
        calls["primal"] += 1
        return x @ w

    def forward(x, w):
        calls["forward"] += 1
        return x @ w, (x, w)

    def backward(saved, g):
        calls["backward"] += 1
        x, w = saved
        return 3.0 * (g @ w.T), 5.0 * (x.T @ g)

    with_vjp.defvjp(forward, backward)

    @jax.custom_jvp
    def with_jvp(x, w):
        calls["primal"] += 1
        return x @ w

    @with_jvp.defjvp
    def rule(primals, tangents):
        calls["jvp"] += 1
        (x, w), (dx, dw) = primals, tangents
        return x @ w, 3.0 * (dx @ w) + 5.0 * (x @ dw)

    return with_vjp, with_jvp, calls


@pytest.mark.cases(fast=2, slow=2)
@EACH_ORDER
@pytest.mark.parametrize("kind", ["custom_vjp", "custom_jvp"])
@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "remat"])
def test_a_users_rule_is_called_and_its_gradients_are_the_users(around, kind, order, half):
    with_vjp, with_jvp, calls = counting_rules()
    rule = around(with_vjp if kind == "custom_vjp" else with_jvp)
    loss = lambda x, w: jnp.sum(rule(x, w))
    if order == "inside":
        grad = jax.grad(jmp.autocast(loss, half), (0, 1))
    else:
        grad = jmp.autocast(jax.grad(loss, (0, 1)), half)
    x_grad, w_grad = grad(X, W)
    assert calls["backward" if kind == "custom_vjp" else "jvp"] >= 1
    assert_close(x_grad, 3.0 * (jnp.ones((4, 8)) @ W.T), half, factor=4)
    assert_close(w_grad, 5.0 * (X.T @ jnp.ones((4, 8))), half, factor=4)
    assert set(products(grad, X, W)) == {(half, half)}


def test_a_rule_is_not_called_where_nothing_is_differentiated():
    with_vjp, with_jvp, calls = counting_rules()
    jmp.autocast(lambda x, w: with_vjp(x, w) + with_jvp(x, w))(X, W)
    assert (calls["backward"], calls["jvp"]) == (0, 0)


@EACH_ORDER
def test_the_backward_rule_sees_cotangents_of_the_dtype_that_it_was_written_for(order, half):
    seen = []

    @jax.custom_vjp
    def identity(x):
        return x

    identity.defvjp(lambda x: (x, x), lambda x, g: (seen.append((x.dtype.name, g.dtype.name)) or g,))
    loss = lambda x, w: jnp.sum(jnp.tanh(identity(x @ w) @ w))
    if order == "inside":
        grads = jax.grad(jmp.autocast(loss, half), 1)(X, W)
    else:
        grads = jmp.autocast(jax.grad(loss, 1), half)(X, W)
    assert set(seen) == {("float32", "float32")}
    assert_close(grads, jax.grad(loss, 1)(X, W), half, factor=24)


@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_a_result_that_its_forward_rule_saves_is_one_half_value(around):
    """As in flash attention: a product alone reads the result, so the backward rule gets it in half too."""

    @jax.custom_vjp
    def bell(x):
        return jnp.exp(-x * x)

    def forward(x):
        y = jnp.exp(-x * x)
        return y, (x, y)

    def backward(saved, g):
        x, y = saved
        return (-2 * x * y * g,)

    bell.defvjp(around(forward), around(backward))
    plain = lambda w, x: jnp.sum(bell(x @ w) @ w)
    loss = jmp.autocast(plain, "float16")
    saved = jax.tree.leaves(jax.eval_shape(lambda w, x: jax.vjp(loss, w, x)[1], W, X))
    assert {leaf.dtype.name for leaf in saved if leaf.shape == X.shape} == {"float16"}
    assert_close(jax.grad(loss)(W, X), jax.grad(plain)(W, X), "float16", 8)


def large_product(kind):
    """A product of 3000s, with a rule: half cannot hold its result, 192000."""
    with_vjp, with_jvp, _ = counting_rules()
    return with_vjp if kind == "custom_vjp" else with_jvp


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(
    ("kept_by", "kind"), [("full_precision", "custom_vjp"), ("rules", "custom_vjp"), ("rules", "custom_jvp")]
)
def test_a_scope_that_keeps_float32_holds_inside_a_rule(kind, kept_by):
    def named(x, w):
        with jax.named_scope("kept"):
            return large_product(kind)(x, w)

    kept = jmp.full_precision(large_product(kind)) if kept_by == "full_precision" else named
    settings = {"rules": {"kept": "float32"}} if kept_by == "rules" else {}
    autocast = functools.partial(jmp.autocast, dtype="float16", **settings)
    loss = lambda x, w: kept(x @ w, w).mean()
    x, w = jnp.full((8, 8), 3000 / 64), jnp.full((8, 8), 8.0)
    for fun in (jax.value_and_grad(autocast(loss), (0, 1)), autocast(jax.value_and_grad(loss, (0, 1)))):
        value, grads = fun(x, w)
        assert float(value) == 3000 * 64
        assert all(jnp.isfinite(grad).all() for grad in grads)
        # The product before the rule, and its two gradients, are half.
        assert sorted(products(fun, x, w)) == [("float16",) * 2] * 3 + [("float32",) * 2] * 3


def perturbation_rules():
    """A product with rules that use symbolic zeros, and the perturbations that they have seen."""
    seen = []
    with_vjp = jax.custom_vjp(lambda x, w: (x @ w, x + 1))
    with_jvp = jax.custom_jvp(lambda x, w: (x @ w, x + 1))

    def forward(x, w):
        seen.append((x.perturbed, w.perturbed))
        return (x.value @ w.value, x.value + 1), (x.value, w.value)

    def backward(saved, gs):
        x, w = saved
        return gs[0] @ w.T, x.T @ gs[0]

    with_vjp.defvjp(forward, backward, symbolic_zeros=True)

    def rule(primals, tangents):
        (x, w), (dx, dw) = primals, tangents
        perturbed = tuple(not isinstance(each, SymbolicZero) for each in tangents)
        seen.append(perturbed)
        change = {(True, False): lambda: dx @ w, (False, True): lambda: x @ dw}[perturbed]()
        return with_jvp(x, w), (change, dx)

    with_jvp.defjvp(rule, symbolic_zeros=True)
    return with_vjp, with_jvp, seen


@pytest.mark.cases(fast=1, slow=2)
@EACH_ORDER
@pytest.mark.parametrize("kind", ["custom_vjp", "custom_jvp"])
def test_a_rule_may_take_and_give_integers(kind, order, half):
    labels = jnp.arange(4)

    def plain(x, w, labels):
        return (x @ w)[jnp.arange(4), labels], labels + 1

    if kind == "custom_vjp":
        fun = jax.custom_vjp(plain)
        fun.defvjp(
            lambda x, w, labels: (plain(x, w, labels), (x, w, labels)),
            lambda saved, g: (*jax.vjp(lambda x, w: plain(x, w, saved[2])[0], *saved[:2])[1](g[0]), None),
        )
    else:
        fun = jax.custom_jvp(plain)

        @fun.defjvp
        def rule(primals, tangents):
            x, w, labels = primals
            of_x, of_w = jax.jvp(lambda x, w: plain(x, w, labels)[0], (x, w), tangents[:2])
            return (of_x, labels + 1), (of_w, np.zeros(4, jax.dtypes.float0))

    def loss(w):
        picked, following = fun(X, w, labels)
        return jnp.sum(jnp.sin(picked)) + jnp.sum(picked * following)

    grad = jax.grad(jmp.autocast(loss, half)) if order == "inside" else jmp.autocast(jax.grad(loss), half)
    assert set(products(grad, W)) == {(half, half)}
    exact = jax.grad(
        lambda w: jnp.sum(jnp.sin(plain(X, w, labels)[0])) + plain(X, w, labels)[0] @ (labels + 1.0)
    )
    assert_close(grad(W), exact(W), half, factor=16)


def test_a_batching_rule_of_the_user_gives_a_batch():
    rule = jax.custom_batching.custom_vmap(lambda row, w: row @ w)
    rule.def_vmap(lambda size, batched, rows, w: (3 * (rows @ w), True))  # Wrong on purpose.
    batch = jax.vmap(jmp.autocast(rule), (0, None))
    assert_close(batch(X, W), 3 * (X @ W), "bfloat16", factor=4)
    assert products(batch, X, W) == [("bfloat16", "bfloat16")]


@pytest.mark.parametrize(("argument", "order"), [(0, "inside"), (1, "outside")])
@pytest.mark.parametrize("kind", ["custom_vjp", "custom_jvp"])
def test_a_rule_with_symbolic_zeros_knows_which_operands_are_perturbed(kind, argument, order):
    with_vjp, with_jvp, seen = perturbation_rules()
    rule = with_vjp if kind == "custom_vjp" else with_jvp
    loss = lambda x, w: jnp.sum(jnp.sin(rule(x, w)[0]))
    expected = jax.grad(loss, argument)(X, W)
    plain = set(seen)
    seen.clear()
    grad = (
        jax.grad(jmp.autocast(loss), argument)
        if order == "inside"
        else jmp.autocast(jax.grad(loss, argument))
    )
    assert_close(grad(X, W), expected, "bfloat16", factor=16)
    assert set(seen) == plain == {(argument == 0, argument == 1)}
    assert set(products(grad, X, W)) == {("bfloat16", "bfloat16")}


@pytest.mark.cases(fast=1, slow=2)
@pytest.mark.parametrize("other", [jnp.complex64, jnp.float16, jnp.bfloat16])
def test_a_cotangent_of_another_dtype_keeps_it(other):
    """A rule of float32 operands with a second result in a dtype of the user's own."""

    def both(x, w):
        y = jnp.tanh(x @ w)
        return y, y.astype(other)

    rule = jax.custom_vjp(both)
    rule.defvjp(lambda x, w: jax.vjp(both, x, w), lambda pullback, cotangents: pullback(cotangents))

    def loss(w):
        y, own = rule(X, w)
        return jnp.sum(y @ w) + jnp.sum(jnp.abs(own)).astype(jnp.float32)

    grad = jax.grad(jmp.autocast(loss, "float16"))(W)
    np.testing.assert_allclose(grad, jax.grad(loss)(W), rtol=0.02, atol=0.02)
