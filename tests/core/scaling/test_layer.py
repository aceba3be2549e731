"""`with_layer_loss_scale`: a loss scale of its own for one layer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_lite as jmp
from tests.support.arrays import normal

F16 = jnp.float16
LAYERS, WIDTH = 40, 16
W, X = normal(0, LAYERS, WIDTH, WIDTH, scale=WIDTH**-0.5), normal(1, 8, WIDTH)


def layer(w, x):
    return jnp.tanh(x @ w) + 0.5 * x


def network(layer, factor=0.25):
    """A loss whose cotangents shrink by `factor` from layer to layer, on their way to the first."""

    def loss(w, x):
        def body(x, w):
            y = layer(w, x)
            return jax.lax.stop_gradient(y * (1 - factor)) + y * factor, None

        return jnp.mean(jnp.sin(jax.lax.scan(body, x, w)[0]))

    return loss


def cosines(gradients, wanted):
    """The cosine of the gradients of each layer; 0 for zeros, NaN for what is not finite."""
    with np.errstate(invalid="ignore"):
        pairs = [
            (np.asarray(a, np.float64).ravel(), np.asarray(b, np.float64).ravel())
            for a, b in zip(gradients, wanted)
        ]
        return np.array([a @ b / np.linalg.norm(a) / np.linalg.norm(b) if a.any() else 0.0 for a, b in pairs])


@pytest.fixture(scope="module")
def expected():
    full = jax.jit(jax.grad(network(layer)))(W, X)
    sizes = np.log2(np.abs(full).max((1, 2)))
    assert sizes[-1] - sizes[0] > 60  # Further apart than the 40 powers of two of float16.
    return full


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("remat", [False, True])
def test_all_layers_learn_where_no_global_scale_serves_them(expected, remat):
    half = jmp.autocast(layer, F16)
    scaled = jmp.with_layer_loss_scale(half)
    scaled = jax.checkpoint(scaled) if remat else scaled
    assert cosines(jax.jit(jax.grad(network(scaled)))(W, X), expected).min() > 0.999
    gradient = jax.jit(lambda w, x, scale: jmp.grad(network(half), jmp.StaticLossScale(scale))(w, x))
    for exponent in range(0, 100, 20):
        similarity = cosines(gradient(W, X, 2.0**exponent), expected)
        assert not (similarity > 0.9).all()


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_both_orders_with_autocast_give_the_same_gradients(expected, dtype):
    autocast = functools.partial(jmp.autocast, dtype=dtype)
    for fun in (
        jax.grad(autocast(network(jmp.with_layer_loss_scale(layer)))),
        autocast(jax.grad(network(jmp.with_layer_loss_scale(layer)))),
    ):
        found = cosines(jax.jit(fun)(W, X), expected)
        # Over 40 layers, casts by hand to bfloat16 have 0.955 at the layer that is furthest off.
        assert found.min() > (0.999 if dtype == "float16" else 0.95)
        assert np.median(found) > (0.9999 if dtype == "float16" else 0.99)


@pytest.mark.slow
def test_beside_a_global_scale_the_gradients_are_the_same(expected):
    scaled = network(jmp.with_layer_loss_scale(jmp.autocast(layer, F16)))
    gradients = [jax.jit(jmp.grad(scaled, jmp.StaticLossScale(2.0**k)))(W, X) for k in (0, 20)]
    np.testing.assert_array_equal(*gradients)


@pytest.mark.slow
def test_in_float32_no_bit_changes():
    plain = lambda w, x: jnp.sum(jnp.sin(layer(w, x)))
    scaled = lambda w, x: jnp.sum(jnp.sin(jmp.with_layer_loss_scale(layer)(w, x)))
    for transform in (lambda f: f, jax.grad, lambda f: jax.grad(f, 1)):
        np.testing.assert_array_equal(transform(scaled)(W[0], X), transform(plain)(W[0], X))


@pytest.mark.parametrize("cotangent", [0.0, 2.0**-149, 2.0**-126, 1.5 * 2.0**-100, 3e38, -7.0])
def test_the_half_inside_sees_a_cotangent_between_1_and_2(cotangent):
    seen = []

    @jax.custom_vjp
    def watch(x):
        return x

    def backward(_, g):
        jax.debug.callback(lambda g: seen.append(float(g)), g)
        return (g,)

    watch.defvjp(lambda x: (x, None), backward)
    scaled = jmp.with_layer_loss_scale(lambda x: watch(x.astype(jnp.bfloat16)))
    (gradient,) = jax.vjp(scaled, jnp.float32(1))[1](jnp.float32(cotangent))
    jax.effects_barrier()
    if abs(cotangent) >= 2.0**-126:
        assert 1 <= abs(seen[0]) <= (2 if abs(cotangent) < 2.0**127 else 4)
        assert gradient == pytest.approx(cotangent, rel=2.0**-8)
    else:  # No normal number of float32: it may be zero.
        assert gradient in (0, cotangent)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_inf_and_nan_reach_the_check(bad):
    scaled = jmp.with_layer_loss_scale(jmp.autocast(layer, F16))
    pullback = jax.jit(lambda cotangent: jax.vjp(scaled, W[0], X)[1](cotangent))
    grads = pullback(jnp.ones((8, WIDTH)).at[3, 2].set(bad))
    assert not bool(jmp.all_finite(grads))


@pytest.mark.slow
def test_under_vmap_each_example_has_a_scale_of_its_own():
    scaled = jmp.with_layer_loss_scale(jmp.autocast(layer, F16))
    loss = lambda w, x, size: size * jnp.sum(scaled(w, x))
    sizes = jnp.array([2.0**-60, 1.0, 2.0**60])
    gradients = jax.vmap(jax.grad(loss), (None, None, 0))(W[0], X, sizes)
    for gradient, size in zip(gradients, sizes):
        np.testing.assert_array_equal(gradient / size, gradients[1])


def test_trees_keyword_arguments_integers_and_arrays_from_outside():
    outside = jnp.float32(3)

    def loss(outside, params, scale):
        fun = lambda params, index, *, bias: outside * params["w"][index] + bias
        scaled = jmp.with_layer_loss_scale(fun) if scale else fun
        return jnp.sum(scaled(params, jnp.array([0, 1]), bias=params["b"]) ** 2)

    params = {"w": jnp.arange(4.0), "b": jnp.float32(2)}
    gradient = jax.grad(loss, (0, 1))
    for one, other in zip(
        *map(jax.tree.leaves, (gradient(outside, params, True), gradient(outside, params, False)))
    ):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_second_derivatives_are_those_of_the_layer():
    fun = lambda x: jnp.sin(x) * x
    second = jax.grad(lambda x: jax.grad(jmp.with_layer_loss_scale(fun))(x) * 3)
    np.testing.assert_allclose(second(0.7), jax.grad(lambda x: jax.grad(fun)(x) * 3)(0.7), rtol=1e-6)


def test_results_are_float32_and_bad_input_is_named():
    assert jmp.with_layer_loss_scale(lambda x: x.astype(F16))(X).dtype == jnp.float32
    with pytest.raises(TypeError, match=r"takes a function of arrays\. Got 3"):
        jmp.with_layer_loss_scale(3)
    scaled = jmp.with_layer_loss_scale(lambda w, x: x @ w)
    with pytest.raises(TypeError, match=r"0/0 is differentiated and is float16.*Give float32"):
        jax.grad(lambda w: jnp.sum(scaled(w, X)))(W[0].astype(F16))
    scaled(W[0].astype(F16), X)  # Forward alone is all right.
    jax.grad(lambda w: jnp.sum(scaled(w, X.astype(F16))))(W[0])  # As is an input without a gradient.
