"""How often `autocast` casts, and when it changes nothing."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.interpreters import partial_eval

import jmp_lite as jmp
from tests.laws.cases import ORDERS
from tests.laws.test_found import in_order
from tests.support.halves import each_half
from tests.support.jaxprs import casts, text
from tests.support.small_programs import PARAMS, W, X, mlp, normal


def count_casts(shape, fun, *args):
    return sum(found == shape for found, _, _ in casts(fun, *args))


def compiled_casts(result, fun, *args):
    """How many casts with a result of this type there are in the program that XLA makes."""
    return jax.jit(fun).lower(*args).compile().as_text().count(f"= {result}{{1,0}} convert(")


def test_a_weight_used_twice_is_cast_once():
    w = normal(8, 8, scale=0.3)
    x = normal(5, 8)
    layer = jax.jit(lambda x, w: jnp.tanh(x @ w))
    programs = {
        "straight": lambda x, w: jnp.tanh(x @ w) @ w,
        "scan": lambda x, w: lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=3)[0] @ w,
        "full precision between": lambda x, w: jmp.full_precision(layer)(x @ w, w) @ w,
    }
    for name, program in programs.items():
        assert count_casts((8, 8), jmp.autocast(program), x, w) == 1, name
    # XLA merges the casts in moved copies and in jitted functions.
    merged = {
        "transposed": lambda x, w: jnp.tanh(x @ w) @ w.T,
        "jitted calls": lambda x, w: layer(layer(layer(x, w), w), w),
        "jitted and not": lambda x, w: layer(x @ w, w) @ w.T,
    }
    for name, program in merged.items():
        assert compiled_casts("bf16[8,8]", jmp.autocast(program), x, w) == 1, name


@each_half
def test_the_cast_up_of_the_program_and_the_cast_down_of_autocast_cancel(half):
    name = {"bfloat16": "bf16", "float16": "f16"}[half]
    fun = jmp.autocast(lambda x, w: x.astype(jnp.float32) @ w, half)
    assert compiled_casts(f"{name}[4,8]", fun, X.astype(half), W[:, :3]) == 0


def test_no_cast_stands_between_two_products():
    chained = lambda x, w: jnp.tanh(x @ w + PARAMS["b"]) @ w
    assert [found for found in casts(jmp.autocast(chained), X, W) if found[:2] == ((4, 8), "bfloat16")] == [
        ((4, 8), "bfloat16", "float32")  # The output, and nothing between the products.
    ]


def test_an_inner_autocast_whose_rules_leave_everything_in_float32_is_respected():
    def fun(x, w):
        with jax.named_scope("head"):
            return x @ w

    for inner in (jmp.autocast(fun, rules={"head": "float32"}), jmp.autocast(fun, deny=["dot_general"])):
        assert text(jmp.autocast(inner, jnp.float16), X, W) == text(fun, X, W)
        assert text(jmp.autocast(inner), X, W) == text(fun, X, W)


def nothing_to_do(x, y):
    total = lax.scan(lambda total, row: (total + jnp.tanh(row).sum(), row * 2), 0.0, x)[0]
    scaled = jax.jit(lambda x: jax.nn.softmax(x) * y)(x)
    picked = lax.cond(total > 0, jnp.sin, jax.checkpoint(jnp.cos), scaled)
    return jax.nn.relu(picked), jnp.linalg.norm(x), x[:, ::2], jax.random.normal(jax.random.key(0), (3,))


def test_without_float32_products_the_jaxpr_does_not_change():
    y = jnp.float32(2)
    assert text(jmp.autocast(nothing_to_do), X, y) == text(nothing_to_do, X, y)
    loss = lambda x, y: sum(leaf.sum() for leaf in nothing_to_do(x, y))
    assert text(jmp.autocast(jax.grad(loss)), X, y) == text(jax.grad(loss), X, y)
    assert text(jax.grad(jmp.autocast(loss)), X, y) == text(jax.grad(loss), X, y)
    assert text(jax.vmap(jmp.autocast(loss), (0, None)), X[None], y) == text(
        jax.vmap(loss, (0, None)), X[None], y
    )
    off = jmp.autocast(mlp, deny=["dot_general"])
    assert text(off, PARAMS, X) == text(mlp, PARAMS, X)
    optimizer = optax.adam(1e-3)
    update = lambda grads, state: optimizer.update(grads, state)
    state = optimizer.init(PARAMS)
    assert text(jmp.autocast(update), PARAMS, state) == text(update, PARAMS, state)


def live(fun, name, *args):
    """The results of some operations, without those that JAX drops because nothing reads them."""
    inside = jax.make_jaxpr(fun)(*args).jaxpr
    needed, _ = partial_eval.dce_jaxpr(inside, [True] * len(inside.outvars))
    return {str(each.outvars[0].aval) for each in needed.eqns if each.primitive.name == name}


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("order", ORDERS)
def test_rows_that_matmuls_alone_take_are_looked_up_in_half(order):
    """As those of a mixture of experts. Their gradients are summed in float32, and a table is not cast."""

    def loss(w, x, rows):
        x = x / (1.0 + jnp.sum(x * x, -1, keepdims=True))
        return jnp.mean((x[rows] @ w) ** 2) + jnp.mean(x)  # The mean keeps `x` in float32.

    w, x, rows = normal(8, 8), normal(4, 8), jnp.arange(8) % 4
    grad = in_order(order, loss, "bfloat16", lambda fun: jax.grad(fun, (0, 1)))
    assert "bfloat16[8,8]" in live(grad, "gather", w, x, rows)
    assert live(grad, "scatter-add", w, x, rows) == {"float32[4,8]"}
    assert live(grad, "gather", w, x, rows[:2]) == {"float32[2,8]"}
    exact = jax.grad(loss, (0, 1))(w, x, rows)
    for one, other in zip(grad(w, x, rows), exact):
        assert jnp.linalg.norm(one - other) < 0.02 * jnp.linalg.norm(other)
