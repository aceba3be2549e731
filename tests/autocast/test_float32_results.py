"""`float32_results`: products of half operands whose results stay float32, such as logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jmp_lite as jmp
from tests.support.arrays import normal
from tests.support.halves import each_half
from tests.support.jaxprs import product_kinds


def network(params, x):
    with jax.named_scope("body"):
        hidden = jax.nn.relu(x @ params["body"])
    with jax.named_scope("head"):
        return hidden @ params["head"]


def loss_fn(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(network(params, x), y).mean()


PARAMS = {"body": normal(0, 16, 32), "head": normal(1, 32, 64, scale=2.0)}
X, Y = normal(2, 8, 16), jnp.arange(8)


def kinds(half):
    return (half, half, half), (half, half, "float32")


@each_half
def test_in_both_orders_only_the_selected_product_gives_float32(half):
    narrow, wide = kinds(half)
    for pattern in ("**/head", "head", "params/head", ["head"]):
        autocast = functools.partial(jmp.autocast, dtype=half, float32_results=pattern)
        assert product_kinds(autocast(loss_fn), PARAMS, X, Y) == {narrow: 1, wide: 1}
        for grads in (jax.grad(autocast(loss_fn)), autocast(jax.grad(loss_fn))):
            counts = product_kinds(grads, PARAMS, X, Y)
            assert counts[wide] == 1
            assert set(counts) == {narrow, wide}


@pytest.mark.slow
def test_the_gradients_are_those_of_the_plain_autocast_to_the_rounding_of_half():
    exact = jax.jit(jax.grad(loss_fn))(PARAMS, X, Y)
    orders = [
        jax.jit(jax.grad(jmp.autocast(loss_fn, "bfloat16", float32_results="head")))(PARAMS, X, Y),
        jax.jit(jmp.autocast(jax.grad(loss_fn), "bfloat16", float32_results="head"))(PARAMS, X, Y),
    ]
    for name in exact:
        np.testing.assert_array_equal(orders[0][name], orders[1][name])
        error = np.linalg.norm(orders[0][name] - exact[name]) / np.linalg.norm(exact[name])
        assert 0 < error < 4 * jnp.finfo(jnp.bfloat16).eps


def test_large_logits_lose_nothing_but_the_rounding_of_the_operands():
    """Of the same operands in half, the log probabilities are exact to float32."""
    half = lambda x: x.astype(jnp.bfloat16).astype(jnp.float32)
    hidden, head = half(normal(3, 64, 32)), half(normal(4, 32, 128, scale=3.0))

    def log_probabilities(hidden, head):
        with jax.named_scope("head"):
            return jax.nn.log_softmax(hidden @ head)

    expected = np.asarray(jax.nn.log_softmax(np.float64(hidden) @ np.float64(head)))

    def error(**options):
        return np.abs(jmp.autocast(log_probabilities, "bfloat16", **options)(hidden, head) - expected).max()

    assert np.abs(expected).max() > 50
    assert error() > 0.1
    assert error(float32_results="head") < 1e-4


def test_a_float32_result_may_be_transposed_on_a_cpu():
    # Without a barrier behind the matmul, XLA cannot run it on bfloat16 operands there.
    transposed = jmp.autocast(lambda x, w: (x @ w).T, "bfloat16", float32_results="**")
    half = [each.astype("bfloat16").astype("float32") for each in (X, PARAMS["body"])]
    found = jax.jit(transposed)(X, PARAMS["body"])
    np.testing.assert_allclose(found, (half[0] @ half[1]).T, rtol=1e-5, atol=1e-5)


def test_explain_says_which_pattern_kept_the_result():
    report = jmp.explain(jmp.autocast(loss_fn, "float16", float32_results="head"))(PARAMS, X, Y)
    reasons = [row.reason for row in report.operations if row.name == "dot_general"]
    assert ["float32_results='head'" in reason for reason in reasons] == [False, True]
    assert all(row.in_half for row in report.operations if row.name == "dot_general")


def test_with_reduce_dtype_the_weight_gradient_is_float32_too():
    fun = jmp.autocast(loss_fn, "float16", reduce_dtype="float32", float32_results="head")
    grads = jax.jit(jax.grad(fun))(PARAMS, X, Y)
    exact = jax.jit(jax.grad(loss_fn))(PARAMS, X, Y)
    for name in exact:
        assert np.linalg.norm(grads[name] - exact[name]) < 2e-3 * np.linalg.norm(exact[name])
    counts = product_kinds(lambda params: jax.vjp(lambda params: fun(params, X, Y), params)[0], PARAMS)
    narrow, wide = kinds("float16")
    assert counts == {narrow: 1, wide: 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"float32_results": "hed"}, "float32_results='hed' selects no matmul with half inputs"),
        ({"float32_results": "head", "rules": {"head": "float32"}}, "selects no matmul with half inputs"),
        ({"float32_results": ["head", "**/heads"]}, r"float32_results='\*\*/heads' selects no matmul"),
    ],
)
def test_a_pattern_that_selects_no_product_is_an_error(options, message):
    with pytest.raises(ValueError, match=message):
        jmp.autocast(loss_fn, "float16", **options)(PARAMS, X, Y)


def test_what_is_no_pattern_is_an_error():
    for value, error in ((3, TypeError), (["head", 3], TypeError), ("", ValueError), (" / ", ValueError)):
        with pytest.raises(error, match="float32_results="):
            jmp.autocast(loss_fn, "float16", float32_results=value)


def test_a_convolution_is_an_error_since_xla_would_widen_its_operands():
    def fun(kernel, x):
        with jax.named_scope("stem"):
            return lax.conv(x, kernel, (1, 1), "SAME")

    with pytest.raises(
        ValueError, match=r"selects conv_general_dilated in the scope 'stem'.*narrower pattern"
    ):
        jmp.autocast(fun, "float16", float32_results="stem")(jnp.ones((2, 2, 3, 3)), jnp.ones((1, 2, 4, 4)))


def test_it_changes_no_other_product_and_an_autocast_to_float32_ignores_it():
    plain, wide = (
        jmp.explain(jmp.autocast(network, "float16", **options))(PARAMS, X).operations
        for options in ({}, {"float32_results": "head"})
    )
    changed = [row.scope for row, other in zip(plain, wide, strict=True) if row.outputs != other.outputs]
    assert changed == ["head"]
    assert set(product_kinds(jmp.autocast(loss_fn, "float32", float32_results="head"), PARAMS, X, Y)) == {
        ("float32",) * 3
    }
