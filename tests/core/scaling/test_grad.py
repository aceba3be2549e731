"""value_and_grad gives back the true loss and true float32 gradients."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jmp_lite as jmp

SCALES = {
    "none": jmp.NoOpLossScale(),
    "static": jmp.StaticLossScale(2.0**15),
    "dynamic": jmp.DynamicLossScale(2.0**15),
    "odd": jmp.StaticLossScale(3000.0),
}
W, X = np.array([0.5, -1.0, 2.0], np.float32), np.array([1.0, 2.0, -0.25], np.float32)


def square_loss(w, x):
    return jnp.sum((w * x).astype(jnp.float32) ** 2)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_loss_and_gradients_are_true_and_gradients_float32(dtype, scale):
    # Every number here is exact in bfloat16, and the scaled gradients stay below 65504 but for `odd`.
    w, x = jnp.asarray(W, dtype), jnp.asarray(X / 16, dtype)
    transformed = jmp.value_and_grad(square_loss, SCALES[scale])
    loss, grads = (transformed if dtype == "float32" else jax.jit(transformed))(w, x)
    expected = square_loss(w, x)
    assert (loss.dtype, float(loss)) == (np.float32, float(expected))
    assert grads.dtype == np.float32
    rtol = 0 if scale != "odd" else 2 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(grads, 2 * W * (X / 16) ** 2, rtol=rtol)


def test_grad_is_value_and_grad_without_the_value():
    np.testing.assert_array_equal(jmp.grad(square_loss, SCALES["dynamic"])(W, X), 2 * W * X**2)
    grads, aux = jmp.grad(lambda w, x: (square_loss(w, x), x), SCALES["static"], has_aux=True)(W, X)
    np.testing.assert_array_equal(grads, 2 * W * X**2)
    np.testing.assert_array_equal(aux, X)


def test_the_scale_multiplies_on_the_way_back():
    seen = []

    @jax.custom_vjp
    def probe(x):
        return x

    probe.defvjp(lambda x: (x, None), lambda _, g: (seen.append(float(g)) or g,))
    grads = jmp.grad(lambda w: probe(w), jmp.StaticLossScale(1024.0))(jnp.float32(3))
    assert seen == [1024.0]
    assert float(grads) == 1.0


def test_gradients_that_underflow_in_float16_are_rescued():
    # The gradient that reaches the float16 product is 2**-30, below all that float16 holds (2**-24).
    def loss_fn(w):
        return (w.astype(jnp.float16) * jnp.float16(3)).astype(jnp.float32) * 2.0**-30

    w = jnp.float32(1.0)
    assert float(jax.grad(loss_fn)(w)) == 0.0
    assert float(jmp.grad(loss_fn, jmp.NoOpLossScale())(w)) == 0.0
    for scale in ("static", "dynamic"):
        assert float(jmp.grad(loss_fn, SCALES[scale])(w)) == 3 * 2.0**-30


def test_an_overflow_reaches_the_gradients_and_not_the_loss():
    # A float16 gradient of 2**16 is inf; the loss is computed before the scale comes in.
    fun = lambda w: (w * 8).astype(jnp.float32)
    loss, grads = jmp.value_and_grad(fun, jmp.StaticLossScale(2.0**14))(jnp.float16(1))
    assert (float(loss), np.isinf(float(grads))) == (8.0, True)


def test_one_argument_or_several_are_differentiated():
    fun = lambda a, b, c: jnp.sum(a * b * c)
    scale = jmp.StaticLossScale(256.0)
    a, b, c = jnp.float16(2), jnp.float32(3), jnp.bfloat16(5)
    loss, grads = jmp.value_and_grad(fun, scale, argnums=(0, 2))(a, b, c)
    assert float(loss) == 30.0
    assert isinstance(grads, tuple)
    assert [(float(g), g.dtype.name) for g in grads] == [(15.0, "float32"), (6.0, "float32")]
    assert float(jmp.grad(fun, scale, argnums=1)(a, b, c)) == 10.0
    assert [float(g) for g in jmp.grad(fun, scale, argnums=(1,))(a, b, c)] == [10.0]
    assert [float(g) for g in jmp.grad(fun, scale, (0,))(a, b, c)] == [15.0]


def test_aux_does_not_change():
    def fun(w, x):
        return square_loss(w, x), {"half": x.astype(jnp.float16), "n": jnp.int32(3), "none": None}

    (loss, aux), grads = jmp.value_and_grad(fun, SCALES["static"], has_aux=True)(W, X)
    assert float(loss) == float(square_loss(W, X))
    assert (aux["half"].dtype, aux["half"].tolist()) == (np.float16, X.tolist())
    assert (int(aux["n"]), aux["none"]) == (3, None)
    np.testing.assert_array_equal(grads, 2 * W * X**2)
    fun = lambda w: [w * w, "aux"]
    assert jmp.value_and_grad(fun, SCALES["static"], has_aux=True)(jnp.float32(1))[0][1] == "aux"


def test_keyword_arguments_pass_through_and_are_not_differentiated():
    def fun(w, x, *, power, shift=0.0):
        return jnp.sum(w * x) ** power + shift

    for given in (SCALES["static"], SCALES["none"]):
        loss, grads = jmp.value_and_grad(fun, given)(W, X, power=2, shift=jnp.float32(7))
        assert float(loss) == float(np.dot(W, X)) ** 2 + 7
        np.testing.assert_array_equal(grads, 2 * np.dot(W, X) * X)
    loss, grads = jmp.value_and_grad(fun, SCALES["static"])(W, x=X, power=1)
    np.testing.assert_array_equal(grads, X)


def test_the_name_and_docstring_of_the_function_are_kept():
    assert jmp.value_and_grad(square_loss, SCALES["static"]).__name__ == "square_loss"
    assert jmp.grad(square_loss, SCALES["static"]).__name__ == "square_loss"


@pytest.mark.parametrize("scale", ["none", "static", "odd"])
def test_float64_stays_float64(scale):
    with jax.enable_x64(True):
        w = jnp.asarray([1 + 2.0**-40, 2.0], jnp.float64)
        loss, grads = jmp.value_and_grad(lambda w: jnp.sum(w * w), SCALES[scale])(w)
        assert (loss.dtype, grads.dtype) == (np.float64, np.float64)
        assert float(loss) == float(jnp.sum(w * w))
        rtol = 0 if scale != "odd" else 4 * np.finfo(np.float64).eps
        np.testing.assert_allclose(grads, 2 * w, rtol=rtol)
        mixed = jmp.grad(lambda p: p["a"] * p["b"].astype(jnp.float64), SCALES[scale])
        grads = mixed({"a": jnp.float64(2), "b": jnp.float16(3)})
        assert {k: g.dtype.name for k, g in grads.items()} == {"a": "float64", "b": "float32"}


@pytest.mark.parametrize("scale", ["none", "static"])
def test_complex_parameters_have_complex_gradients(scale):
    fun = lambda z: jnp.sum(jnp.abs(z) ** 2)
    z = jnp.asarray([1 + 2j, -0.5j], jnp.complex64)
    loss, grads = jmp.value_and_grad(fun, SCALES[scale])(z)
    expected_loss, expected = jax.value_and_grad(fun)(z)
    assert (grads.dtype, loss.dtype) == (np.complex64, np.float32)
    assert float(loss) == float(expected_loss)
    np.testing.assert_allclose(grads, expected, rtol=4 * np.finfo(np.float32).eps)


@pytest.mark.parametrize("scale", ["none", "static"])
def test_integer_parameters_pass_through_with_allow_int(scale):
    transform = functools.partial(jax.value_and_grad, allow_int=True)
    fun = lambda p: p["w"].astype(jnp.float32) * p["n"].sum()
    params = {"w": jnp.float16(3), "n": jnp.arange(2)}
    grads = jmp.grad(fun, SCALES[scale], value_and_grad_fn=transform)(params)
    assert (grads["w"].dtype, float(grads["w"])) == (np.float32, 1.0)
    assert (grads["n"].dtype, grads["n"].shape) == (jax.dtypes.float0, (2,))


@pytest.mark.slow
def test_nnx_models_are_differentiated():
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0), param_dtype=jnp.float16)
    x = jnp.asarray(X)[None]

    def loss_fn(model, x):
        return jnp.mean(model(x).astype(jnp.float32) ** 2)

    loss, grads = jmp.value_and_grad(loss_fn, SCALES["static"], value_and_grad_fn=nnx.value_and_grad)(
        model, x
    )
    expected_loss, expected = nnx.value_and_grad(loss_fn)(model, x)
    assert float(loss) == float(expected_loss)
    assert type(grads) is type(expected)
    flat = jax.tree.leaves_with_path(grads)
    assert len(flat) == 2
    for (_, grad), wanted in zip(flat, jax.tree.leaves(expected)):
        assert grad.dtype == np.float32
        np.testing.assert_allclose(grad, wanted, rtol=2 * float(jnp.finfo(jnp.float16).eps))
    bias, by_nnx = nnx.DiffState(0, nnx.PathContains("bias")), nnx.value_and_grad
    inside = jmp.value_and_grad(
        loss_fn, SCALES["static"], value_and_grad_fn=functools.partial(by_nnx, argnums=bias)
    )
    outside = jmp.value_and_grad(loss_fn, SCALES["static"], bias, value_and_grad_fn=by_nnx)
    for only_bias in (inside, outside):
        assert len(jax.tree.leaves(only_bias(model, x)[1])) == 1


def test_a_loss_scale_of_ones_own_is_used():
    class Ten:
        loss_scale = np.float32(10)

        def scale(self, tree):
            return jax.tree.map(lambda x: x * 10, tree)

        def unscale(self, tree):
            return jax.tree.map(lambda x: x / 10, tree)

        adjust = lambda self, grads_finite: self

    grads = jmp.grad(lambda w: w * w, Ten())(jnp.float16(3))
    assert (grads.dtype, round(float(grads), 2)) == (np.float32, 6.0)


@pytest.mark.parametrize(
    ("fun", "has_aux", "message"),
    [
        (lambda w: w.astype(jnp.int32)[0], False, r"Got shape \(\) and dtype int32. Reduce it"),
        (lambda w: w, False, r"Got shape \(3,\) and dtype float32. Reduce it"),
        (lambda w: w[:1], False, r"Got shape \(1,\) and dtype float32"),
        (lambda w: w[0] * 1j, False, r"Got shape \(\) and dtype complex64"),
        (lambda w: (w[0], w), False, "Got a tuple of 2. .* give has_aux=True"),
        (lambda w: [w[0], w], False, "Got a list of 2. .* give has_aux=True"),
        (lambda w: None, False, r"The loss should be a floating scalar\. Got"),
        (lambda w: "loss", False, r"The loss should be a floating scalar\. Got"),
        (lambda w: {"loss": w[0]}, False, r"The loss should be a floating scalar\. Got dict"),
        (lambda w: w[0], True, r"With has_aux=True the function should return a pair \(loss, aux\)\. Got"),
        (lambda w: (w[0], w, w), True, "With has_aux=True the function should return a pair"),
        (lambda w: ((w[0], w), w), True, "Got a tuple of 2"),
    ],
    ids=[
        "integer",
        "array",
        "slice",
        "complex",
        "tuple",
        "list",
        "None",
        "string",
        "dict",
        "no-pair",
        "triple",
        "pair-of-pair",
    ],
)
def test_a_loss_that_is_no_floating_scalar_is_a_type_error(fun, has_aux, message):
    for transformed, jit in ((jmp.value_and_grad, jax.jit), (jmp.grad, lambda f: f)):
        with pytest.raises(TypeError, match=message):
            jit(transformed(fun, jmp.StaticLossScale(2.0), has_aux=has_aux))(jnp.asarray(W))


@pytest.mark.parametrize("transformed", [jmp.value_and_grad, jmp.grad])
def test_the_scale_is_required_and_the_arguments_of_jax_follow_in_their_order(transformed):
    parameters = inspect.signature(transformed).parameters
    assert list(parameters)[:4] == ["fun", "loss_scale", "argnums", "has_aux"]
    said = rf"{transformed.__name__}\(fun, loss_scale\).*jmp\.get_loss_scale\(opt_state\).* Got none\."
    with pytest.raises(TypeError, match=said):
        transformed(square_loss)


def test_python_and_numpy_floats_are_losses():
    for loss in (1.5, np.float32(1.5), np.float64(1.5)):
        value, grads = jmp.value_and_grad(lambda w, loss=loss: loss, jmp.StaticLossScale(2.0))(jnp.float32(1))
        assert float(value) == 1.5
        assert float(grads) == 0.0


def test_another_object_than_a_loss_scale_is_a_type_error_before_anything_runs():
    opt_state = jmp.with_loss_scale(optax.sgd(1.0)).init(W)
    wrong = {"none": None, "bool": True, "a class": jmp.DynamicLossScale, "str": "dynamic"}
    for said, given in (wrong | {"SkipNonfiniteState": opt_state}).items():
        for transformed in (jmp.value_and_grad, jmp.grad):
            match = rf"expected a loss scale such as jmp\.get_loss_scale.*\. Got {said}\."
            with pytest.raises(TypeError, match=match):
                transformed(square_loss, given)
