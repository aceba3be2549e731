"""`reduce_dtype`: weight gradients that leave their half precision products in float32."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_lite as jmp
from tests.support.closeness import assert_close
from tests.support.jaxprs import equations, product_kinds, products, text
from tests.support.small_programs import STACK, B, V, W, X, in_mesh, layer, with_jvp, with_vjp

wide = functools.partial(jmp.autocast, dtype="float16", reduce_dtype="float32")
HALF, WIDE = ("float16", "float16", "float16"), ("float16", "float16", "float32")


def both_orders(loss, **options):
    autocast = functools.partial(jmp.autocast, dtype="float16", **options)
    argnums = (0, 1, 2, 3)
    return jax.grad(autocast(loss), argnums), autocast(jax.grad(loss, argnums))


dense = lambda x, w: jnp.tanh(x @ w)
of_ones_own = with_vjp(dense)


# Each of (x, w, b), with the number of its products that make the gradient of `w`.
KINDS = {
    "plain": (layer, 1),
    "transposed": (lambda x, w, b: layer(x, w.T, b), 1),
    "reshaped": (lambda x, w, b: layer(x, w.reshape(4, 16).reshape(8, 8), b), 1),
    "sliced": (lambda x, w, b: jnp.concatenate([x @ w[:, :4], x @ w[:, 4:]], 1) + b, 2),
    "split": (lambda x, w, b: jnp.concatenate([x @ v for v in jnp.split(w, 2, 1)], 1) + b, 2),
    "used twice": (lambda x, w, b: layer(layer(x, w, b), w, b), 2),
    "batched": (lambda x, w, b: jnp.einsum("bhi,hij->bhj", x.reshape(4, 2, 4), w.reshape(2, 4, 8)) + b, 1),
    "jit": (jax.jit(layer), 1),
    "jit in jit": (lambda x, w, b: jax.jit(lambda x: jax.jit(layer)(jax.jit(layer)(x, w, b), w, b))(x), 2),
    "scan": (lambda x, w, b: lax.scan(lambda x, _: (layer(x, w, b), None), x, length=3)[0], 1),
    "scan over layers": (
        lambda x, w, b: lax.scan(lambda x, w: (layer(x, w, b), None), x, w.reshape(1, 8, 8))[0],
        1,
    ),
    "cond": (lambda x, w, b: lax.cond(x[0, 0] < 9, lambda: layer(x, w, b), lambda: x), 1),
    "remat": (jax.checkpoint(layer), 1),
    "remat in scan": (
        lambda x, w, b: lax.scan(lambda x, _: (jax.checkpoint(layer)(x, w, b), None), x, length=3)[0],
        1,
    ),
    "vmap": (lambda x, w, b: jax.vmap(layer, (0, None, None))(x, w, b), 1),
    "custom_vjp": (lambda x, w, b: of_ones_own(x, w) + b, 1),
    "custom_vjp in jit": (lambda x, w, b: jax.jit(of_ones_own)(x, w) + b, 1),
    "custom_jvp": (lambda x, w, b: with_jvp(dense)(x, w) + b, 1),
    "shard_map": (in_mesh(layer, 2), 1),
}


def loss_of(kind):
    """A loss of activations in half around a layer of this kind; the first and the last weight are `v`."""
    fun, _ = KINDS[kind]
    return lambda x, v, w, b: jnp.sum(jnp.sin(fun(x @ v, w, b) @ v))


@pytest.mark.cases(fast=5, slow=2)
@pytest.mark.parametrize("kind", KINDS)
def test_only_the_products_that_make_weight_gradients_give_float32_in_both_orders(kind):
    loss, of_w = loss_of(kind), KINDS[kind][1]
    inside, outside = (product_kinds(grad, X, V, W, B) for grad in both_orders(loss, reduce_dtype="float32"))
    plain = sum(product_kinds(both_orders(loss)[1], X, V, W, B).values())
    # `x` is an argument as well: its gradient, that of `v` twice, and those of `w`.
    assert inside == outside == {HALF: plain - 3 - of_w, WIDE: 3 + of_w}
    half_inside, half_outside = (product_kinds(grad, X, V, W, B) for grad in both_orders(loss))
    assert half_inside == half_outside == {HALF: plain}


def test_a_rule_for_the_arguments_leaves_the_weight_gradients_of_a_half_scope_in_float32():
    body = jax.named_scope("body")(layer)
    rules = {"body": "float16", "**": "float32"}
    loss = lambda x, w, b, v: (body(x, w, b) @ v).sum()
    for gradients in both_orders(loss, rules=rules, reduce_dtype="float32"):
        kinds = product_kinds(gradients, X, W, B, V)
        assert (kinds[HALF], kinds[WIDE]) == (1, 2)  # `x` is an argument as well.


def test_the_rule_of_a_custom_jvp_gives_weight_gradients_in_float32():
    fun = lambda x, w: jnp.sum(with_jvp(dense)(x, w))
    assert product_kinds(jax.grad(wide(fun), (0, 1)), X, W) == {WIDE: 2, HALF: 1}


def test_the_weight_gradient_of_a_convolution_is_half():
    axes = "NHWC", "HWIO", "NHWC"
    fun = lambda k, x: lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=axes)
    loss = lambda k, x: jnp.sum(jnp.tanh(fun(k, x)))
    args = jnp.ones((3, 3, 2, 2)), jnp.ones((1, 4, 4, 2))
    for grad in (jax.grad(wide(loss)), wide(jax.grad(loss))):
        assert products(grad, *args) == [HALF[:2]] * 2


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize("kind", ["plain", "sliced", "batched", "scan", "remat", "vmap", "custom_vjp"])
def test_the_gradients_are_those_of_float32(kind):
    loss = loss_of(kind)
    expected = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(X, V, W, B)
    for grad in both_orders(loss, reduce_dtype="float32"):
        assert_close(jax.jit(grad)(X, V, W, B), expected, "float16", factor=32)


@pytest.mark.slow
def test_a_gradient_that_half_cannot_hold_comes_out():
    """2,048 times 2 times 32 is 131,072, which is inf in float16."""
    loss = lambda w, x: 32 * (x @ w).sum()
    args = jnp.ones((8, 3)), jnp.full((2048, 8), 2.0)
    for reduce_dtype, expected in ((None, np.inf), (jnp.float32, 131072.0)):
        autocast = functools.partial(jmp.autocast, dtype="float16", reduce_dtype=reduce_dtype)
        for grad in (jax.grad(autocast(loss)), autocast(jax.grad(loss))):
            np.testing.assert_array_equal(grad(*args), expected)


def test_the_gradients_of_activations_and_of_constants_stay_in_half():
    """`W` is no argument, and the product of the second layer takes an activation."""
    loss = lambda v: jnp.sum(jnp.sin(jnp.tanh(X @ v) @ W))
    for grad in (jax.grad(wide(loss)), wide(jax.grad(loss))):
        assert product_kinds(grad, V)[WIDE] == 1
    gated = lambda v: jnp.sum(X @ (v * 2.0))  # A weight that is computed is no argument any more.
    for grad in (jax.grad(wide(gated)), wide(jax.grad(gated))):
        assert WIDE not in product_kinds(grad, V)


def test_the_weight_is_cast_once_and_the_forward_pass_is_the_same():
    fun = lambda w, x: jnp.tanh(x @ w) @ w
    downs = [
        equation.invars[0].aval.shape
        for equation in equations(jax.make_jaxpr(wide(fun))(W, X))
        if equation.primitive.name == "convert_element_type" and equation.params["new_dtype"] == jnp.float16
    ]
    assert downs.count((8, 8)) == 1
    np.testing.assert_array_equal(wide(fun)(W, X), jmp.autocast(fun, "float16")(W, X))


def test_a_training_step_inside_autocast_reduces_in_float32():
    def step(w, x):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        return w - 0.1 * grad / (1 + jnp.linalg.norm(grad)), loss

    assert product_kinds(wide(step), W, X) == {HALF: 1, WIDE: 1}


def all_reduces(grad, params, x):
    """The dtypes of the arrays of two axes that the compiled program sums over the devices."""
    program = jax.jit(grad).lower(params, x).compile().as_text()
    sums = " ".join(re.findall(r"= (.*?) all-reduce\(", program))
    return re.findall(r"(\w+)\[\d+,\d+\]", sums)


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("order", ["inside", "outside"])
def test_eight_devices_sum_the_gradients_of_weights_in_float32(order):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    params = jax.device_put([W, V, STACK[0]], NamedSharding(mesh, P()))
    x = jax.device_put(jnp.concatenate([X] * 4), NamedSharding(mesh, P("data")))

    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.sum(x * x)

    for reduce_dtype, expected in ((None, "f16"), ("float32", "f32")):
        autocast = functools.partial(jmp.autocast, dtype="float16", reduce_dtype=reduce_dtype)
        grad = jax.grad(autocast(loss)) if order == "inside" else autocast(jax.grad(loss))
        assert all_reduces(grad, params, x) == [expected] * 3


def test_convolutions_keep_the_dtype_of_their_products():
    convolve = lambda k, x: jnp.sum(jnp.sin(lax.conv(x, k, (1, 1), "SAME")))
    k, x = jnp.ones((2, 3, 3, 3)), jnp.ones((1, 3, 8, 8))
    assert text(jax.grad(wide(convolve)), k, x) == text(jax.grad(jmp.autocast(convolve, "float16")), k, x)


def test_another_dtype_is_an_error():
    for given in ("float16", "bfloat16", jnp.float64):
        with pytest.raises(ValueError, match=r"reduce_dtype should be float32.*Got (b?float16|float64)"):
            jmp.autocast(layer, reduce_dtype=given)


def test_a_cpu_runs_the_weight_gradient_of_a_batch_of_sequences():
    # XLA's CPU backend cannot run a transposed product of bfloat16 with a float32 result and two summed axes.
    x, w = jnp.ones((4, 6, 16)), jnp.ones((16, 3))
    loss = lambda w: jnp.sum(x @ w)
    options = {"dtype": "bfloat16", "reduce_dtype": "float32"}
    for grad in (jax.grad(jmp.autocast(loss, **options)), jmp.autocast(jax.grad(loss), **options)):
        np.testing.assert_array_equal(jax.jit(grad)(w), 24 * jnp.ones((16, 3)))


@pytest.mark.parametrize("order", [0, 1])
def test_the_gradient_of_a_broadcast_weight_is_a_float32_sum_of_half_products(order):
    # Float32 products would be written for each example of the batch, in twice the bytes.
    x = jnp.ones((4, 6, 8))
    loss = lambda w: jnp.sum(jnp.sin(lax.batch_matmul(x, lax.broadcast_in_dim(w, (4, 8, 8), (1, 2)))))
    grad = (jax.grad(wide(loss)), wide(jax.grad(loss)))[order]
    assert product_kinds(grad, W) == {HALF: 2}
    (total,) = (each for each in equations(jax.make_jaxpr(grad)(W)) if each.outvars[0].aval.shape == W.shape)
    assert (total.primitive.name, total.outvars[0].aval.dtype) == ("reduce_sum", np.float32)
