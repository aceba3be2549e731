"""The operations that run in half, and the operations that run in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jmp_lite as jmp
from tests.support.closeness import assert_close
from tests.support.halves import each_half
from tests.support.jaxprs import equations, operands_of, products, text
from tests.support.small_programs import PARAMS, W, X


@each_half
def test_the_result_of_a_product_is_that_of_half_operands(half):
    result = jmp.autocast(lambda x, w: x @ w, half)(X, W)
    by_hand = (X.astype(half) @ W.astype(half)).astype(jnp.float32)
    assert_close(result, by_hand, half, factor=1)
    assert not np.array_equal(result, X @ W)


@each_half
def test_biases_activations_and_scalars_keep_half_between_products(half):
    def fun(x, w, b, scale):
        y = jax.nn.relu(x @ w + b) * scale
        return (jnp.tanh(y * 0.5 + 1.0) / 3.0) @ w

    jaxpr = jax.make_jaxpr(jmp.autocast(fun, half))(X, W, PARAMS["b"], jnp.float32(0.7))
    operands = [
        [var.aval.dtype.name for var in equation.invars]
        for equation in equations(jaxpr)
        if equation.primitive.name in ("tanh", "dot_general", "max")
    ]
    # From `* scale` to `/ 3.0` is one function of a half value, in float32.
    assert operands == [[half, half], [half, half], ["float32"], [half, half]]


def test_an_explicit_astype_of_the_users_is_obeyed():
    fun = lambda x, w: (x.astype(jnp.float16) @ w.astype(jnp.float16)).astype(jnp.float32) @ w
    assert products(jmp.autocast(fun), X, W) == [("float16", "float16"), ("bfloat16", "bfloat16")]
    cast = lambda x: (x @ x.T).astype(jnp.float16)
    assert jmp.autocast(cast)(X).dtype == jnp.float16


@pytest.mark.parametrize(
    "precision", ["highest", "float32", lax.Precision.HIGH, ("highest", "default"), "TF32_TF32_F32"]
)
def test_a_precision_that_the_program_asks_for_is_obeyed(precision):
    if isinstance(precision, str) and precision.startswith("TF32"):
        precision = lax.DotAlgorithmPreset.TF32_TF32_F32
    asked = lambda x, w: jnp.matmul(x, w, precision=precision)
    assert text(jmp.autocast(asked), X, W) == text(asked, X, W)
    both = lambda x, w: asked(x, w) @ w
    assert products(jmp.autocast(both), X, W) == [("float32", "float32"), ("bfloat16", "bfloat16")]


def test_a_precision_of_a_part_holds_in_its_backward_products():
    def loss(w):
        return jnp.sum(jnp.matmul(X, w, precision="highest") ** 2) + jnp.sum(jnp.tanh(X @ w))

    for grad in (jax.grad(jmp.autocast(loss)), jmp.autocast(jax.grad(loss))):
        found = products(grad, W)
        assert sorted(found) == [*[("bfloat16", "bfloat16")] * 2, *[("float32", "float32")] * 2]


def test_a_result_type_that_the_program_asks_for_is_obeyed():
    fun = lambda x: lax.dot(x, x.T, preferred_element_type=jnp.float16)
    assert jmp.autocast(fun)(X).dtype == fun(X).dtype
    assert text(jmp.autocast(fun), X) == text(fun, X)


def test_an_inner_product_stays_float32():
    ones = jnp.full(4099, 1.001, jnp.float32)
    for fun in (
        lambda a: a @ a,
        lambda a: jnp.vdot(a, a),
        lambda a: jnp.einsum("i,i->", a, a),
        optax.tree.norm,
    ):
        assert text(jmp.autocast(fun), ones) == text(fun, ones)
    batched = lambda a: jnp.einsum("bi,bi->b", a, a)
    rows = jnp.full((3, 4099), 1.001, jnp.float32)
    assert text(jmp.autocast(batched), rows) == text(batched, rows)
    assert products(jmp.autocast(lambda x, w: jnp.vdot(x @ w, x)), X, W) == [
        ("bfloat16", "bfloat16"),
        ("float32", "float32"),
    ]


@pytest.mark.parametrize(
    ("number", "apply"),
    [
        (1e-8, lambda y, number: y / (jnp.abs(y) + number)),
        (1e5, lambda y, number: y * number / number),
        (65536.0, lambda y, number: y * number),
        (1e-8, lambda y, number: jnp.maximum(y, number)),
        (3e38, lambda y, number: jnp.minimum(y, number)),
        (1e-7, lambda y, number: y + number),
        (4e-8, lambda y, number: jnp.where(y > 0, y, number)),
        (-1e9, lambda y, number: jnp.where(y > 0, y, number)),
        (70000.0, lambda y, number: jnp.clip(y, -number, number)),
    ],
)
def test_a_literal_that_float16_cannot_hold_keeps_its_operation_in_float32(number, apply):
    fun = lambda x, w: apply(x @ w, number) @ w
    jaxpr = jax.make_jaxpr(jmp.autocast(fun, jnp.float16))(X, W)
    names = ("add", "mul", "div", "max", "min", "select_n")
    arithmetic = [e for e in equations(jaxpr) if e.primitive.name in names]
    assert arithmetic
    for equation in arithmetic:
        assert {var.aval.dtype.name for var in equation.invars} <= {"float32", "bool"}
    result = jmp.autocast(lambda x, w: apply(x @ w, number), jnp.float16)(X, W)
    assert_close(result, apply(X @ W, number), "float16", factor=8)
    assert products(jmp.autocast(fun, jnp.float16), X, W) == [("float16", "float16")] * 2


def test_integer_and_boolean_inputs_of_products_are_handled_as_numbers():
    ids = jnp.array([0, 2, 1, 2])
    fun = lambda w: jax.nn.one_hot(ids, 8) @ w
    assert products(jmp.autocast(fun), W) == [("bfloat16", "bfloat16")]
    assert_close(jmp.autocast(fun)(W), fun(W), "bfloat16", factor=1)
    masked = lambda x, w: ((x > 0).astype(jnp.float32) * x) @ w
    assert products(jmp.autocast(masked), X, W) == [("bfloat16", "bfloat16")]
    large = lambda n: n.astype(jnp.float32) * 2.0
    assert float(jmp.autocast(large, "float16")(jnp.int32(100_001))) == 200_002.0


def test_a_product_by_labels_picks_float32_numbers_unless_a_product_reads_them():
    picked = lambda x, w: jax.nn.one_hot(jnp.array([0, 2, 1, 2]), 4) @ jnp.tanh(x @ w)
    half, full = ("bfloat16", "bfloat16"), ("float32", "float32")
    for fun, dtype, last in (
        (lambda x, w: jnp.sum(jnp.exp(picked(x, w))), "float32", [full]),
        (lambda x, w: picked(x, w) @ w, "bfloat16", [half, half]),
    ):
        assert operands_of("tanh", jmp.autocast(fun), X, W) == [dtype]
        assert products(jmp.autocast(fun), X, W) == [half, *last]
