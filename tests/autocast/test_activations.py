"""Activation functions, which are computed in float32 and again in the backward pass."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jmp_lite as jmp
from tests.support.closeness import assert_close
from tests.support.halves import each_half
from tests.support.jaxprs import equations, operands_of, products
from tests.support.small_programs import W, X


@pytest.mark.cases(slow=2)
@each_half
@pytest.mark.parametrize(
    "fun",
    [
        lambda y: jnp.log(y * y + 1e-12),
        lambda y: jnp.log(jnp.abs(y) + 1e-7),
        lambda y: lax.rsqrt(y * y + 1e-9),
    ],
    ids=["log of a square", "log", "rsqrt"],
)
def test_the_derivative_of_an_activation_that_float16_does_not_hold_gives_no_nan(fun, half):
    x, mask = jnp.array([[1e-6, 1.0]]), jnp.array([[0.0, 1.0]])  # At 1e-6 the derivative is beyond 65504.
    loss = lambda x, w: jnp.sum((fun(x @ w) @ w) * mask)
    expected = jax.jit(jax.grad(loss, (0, 1)))(x, jnp.eye(2))
    for grad in (jax.grad(jmp.autocast(loss, half), (0, 1)), jmp.autocast(jax.grad(loss, (0, 1)), half)):
        x_grad, w_grad = jax.jit(grad)(x, jnp.eye(2))
        assert jnp.isfinite(x_grad).all()
        assert jnp.isfinite(w_grad).all()
        assert float(x_grad[0, 0]) == 0.0
        assert float(x_grad[0, 1]) == pytest.approx(float(expected[0][0, 1]), rel=0.02)


GROUPS = {
    "gelu": jax.nn.gelu,
    "gelu with erf": lambda y: jax.nn.gelu(y, approximate=False),
    "mish": jax.nn.mish,
    "selu": jax.nn.selu,
    "squareplus": jax.nn.squareplus,
    "glu": lambda y: jax.nn.glu(y),
    "swiglu": lambda y: jax.nn.silu(y) * jnp.sin(y),
    "square": lambda y: jnp.square(jax.nn.relu(y)),
    "of two": lambda y: jnp.exp(-(y**2)) * y[::-1],
    "used twice": lambda y: (lambda z: z * jnp.sin(z))(jnp.exp(-(y**2))),
    "given out": lambda y: jnp.concatenate([jnp.exp(-(y**2)), jnp.exp(-(y**2)) * 2]),
    "where": lambda y: jnp.where(y > 0, jnp.sqrt(jnp.where(y > 0, y, 1.0)), 0.0),
    "masked": lambda y: jnp.where(jnp.arange(y.shape[1]) % 2 == 0, jnp.exp(-(y**2)), y),
}


@pytest.mark.cases(slow=4)
@pytest.mark.parametrize("name", GROUPS)
def test_activation_functions_of_many_operations_have_the_derivatives_of_float32(name):
    half = "float16"
    fun = lambda x, w: GROUPS[name](x @ w) @ w[: 4 if name == "glu" else 8]
    loss = lambda w: jnp.sum(jnp.sin(fun(X, w)))
    grad = jax.grad(jmp.autocast(loss, half))
    assert_close(jax.jit(jmp.autocast(fun, half))(X, W), jax.jit(fun)(X, W), half, factor=6)
    assert_close(jax.jit(grad)(W), jax.jit(jax.grad(loss))(W), half, factor=16)
    assert set(products(grad, W)) == {(half, half)}
    along = jnp.ones((8, 8)) * 0.1

    def push(f):
        return jax.jit(lambda w: jax.jvp(f, (w,), (along,)))

    assert_close(push(jmp.autocast(loss, half))(W), push(loss)(W), half, factor=24)
    if name in ("gelu", "swiglu"):
        assert_close(push(grad)(W), push(jax.grad(loss))(W), half, factor=48)


@pytest.mark.cases(fast=1, slow=2)
@each_half
@pytest.mark.parametrize("name", ["gelu", "gelu with erf"])
def test_a_bias_that_the_program_broadcasts_itself_costs_nothing(name, half):
    """haiku.Linear and others broadcast their bias to the shape of the product."""
    bias = jnp.linspace(-1, 1, 8)

    def layers(add):
        return lambda w: jnp.sum(GROUPS[name](add(X @ w)) @ w)

    def saved(fun):
        """The arrays that are kept for the backward pass, without the bias itself."""
        pullback = jax.eval_shape(lambda w: jax.vjp(jmp.autocast(fun, half), w)[1], W)
        kept = [leaf for leaf in jax.tree.leaves(pullback) if leaf.size > bias.size]
        return sorted((leaf.shape, leaf.dtype.name) for leaf in kept)

    explicit, implicit = layers(lambda y: y + jnp.broadcast_to(bias, y.shape)), layers(lambda y: y + bias)
    assert saved(explicit) == saved(implicit)
    assert {dtype for _, dtype in saved(explicit)} == {half}
    grad = lambda fun: jax.jit(jax.grad(fun))(W)
    assert_close(grad(jmp.autocast(explicit, half)), grad(implicit), half, factor=16)


@pytest.mark.slow
@each_half
def test_the_backward_pass_keeps_a_matmul_without_its_bias_or_with_it_but_not_both(half):
    """XLA adds the bias where an activation function reads the sum, so it need not write the sum."""
    bias = jnp.linspace(-1, 1, 8)
    only_gelu = lambda y: jax.nn.gelu(y) @ W
    another_matmul = lambda y: only_gelu(y) + jnp.sin(y @ W)
    product = (X.astype(half) @ W.astype(half)).astype("float32")

    def keeps(fun):
        pullback = jax.vjp(jmp.autocast(lambda w, bias: jnp.sum(fun(X @ w + bias)), half), W, bias)[1]
        kept = [leaf.astype("float32") for leaf in jax.tree.leaves(pullback) if leaf.shape == X.shape]
        is_kept = lambda expected: any(jnp.max(jnp.abs(leaf - expected)) < 0.05 for leaf in kept)
        return is_kept(product), is_kept(product + bias)

    assert keeps(only_gelu) == (True, False)
    assert keeps(another_matmul) == (False, True)


@each_half
def test_a_bias_in_front_of_an_activation_function_is_not_rounded_and_its_gradient_is_a_float32_sum(half):
    """The activation function adds it in float32."""
    loss = lambda w, bias: jnp.sum(jax.nn.gelu(X @ w + bias) @ w)
    found = list(equations(jax.make_jaxpr(jax.grad(jmp.autocast(loss, half), 1))(W, jnp.ones(8))))

    def of_bias(name, size):
        return [
            (e.invars[0].aval.dtype.name, e.outvars[0].aval.dtype.name)
            for e in found
            if e.primitive.name == name and size(e).aval.size == 8
        ]

    assert ("float32", half) not in of_bias("convert_element_type", lambda e: e.invars[0])
    assert set(of_bias("reduce_sum", lambda e: e.outvars[0])) == {("float32", "float32")}


@pytest.mark.slow
@each_half
def test_layers_of_several_widths_have_activation_functions_of_their_own(half):
    """Equal activation functions share one trace; the shape to which each broadcasts its bias is its own."""
    widths = [8, 16, 32, 16]
    layers = [(0.1 * jnp.ones((m, n)), jnp.linspace(-1, 1, n)) for m, n in itertools.pairwise(widths)]

    def loss(layers, x):
        for w, b in layers:
            x = jax.nn.gelu(x @ w + b)
        return jnp.mean(x @ layers[1][0])

    expected = jax.jit(jax.grad(loss))(layers, X)
    for grad in (jax.grad(jmp.autocast(loss, half)), jmp.autocast(jax.grad(loss), half)):
        for found, plain in zip(jax.tree.leaves(jax.jit(grad)(layers, X)), jax.tree.leaves(expected)):
            assert_close(found, plain, half, factor=16)


READERS = {
    "a product of activation functions": lambda y: (jax.nn.silu(y) * y) @ W,
    "a matmul too": lambda y: jax.nn.gelu(y) @ W + y @ W,
    "float32 too": lambda y: jax.nn.gelu(y) @ W + jnp.exp(y),
    "a sum too": lambda y: y + jax.nn.gelu(y) @ W,
    "a matmul, of a part": lambda y: (lambda t: t @ W + (1 - t**2) @ W.T)(
        jnp.tanh(y)
    ),  # As a derivative does.
    "the activation function": lambda y: jax.nn.gelu(y) @ W,
    "two activation functions": lambda y: jax.nn.gelu(y) @ W + jax.nn.gelu(y, approximate=False) @ W.T,
}


@pytest.mark.cases(slow=8)
@each_half
@pytest.mark.parametrize("readers", READERS)
def test_whoever_reads_a_matmul_with_a_bias_the_gradients_are_right(readers, half):
    bias = jnp.linspace(-1, 1, 8)
    loss = lambda w, bias: jnp.mean(jnp.sin(READERS[readers](X @ w + bias)))
    grads = jax.grad(loss, (0, 1))
    inside = jax.grad(jmp.autocast(loss, half), (0, 1))
    for fun in (inside, jmp.autocast(grads, half)):
        assert_close(jax.jit(fun)(W, bias), grads(W, bias), half, factor=16)
    push = lambda fun: jax.jvp(fun, (W, bias), (W / 8, bias / 8))
    assert_close(push(jax.jit(inside)), push(grads), half, factor=48)


@pytest.mark.slow
@each_half
def test_the_backward_pass_does_not_round_what_the_loss_reads_in_float32(half):
    """A product of the backward pass wants the error in half; the loss squares it in float32."""
    target, bias = jnp.linspace(999.0, 1001.0, 4), jnp.array([1000.0])
    regression = lambda w, x: jnp.mean(((x @ w)[:, 0] + bias - target) ** 2)
    entropy = lambda w, x: -jnp.mean(jnp.log(1 - jax.nn.sigmoid(x @ w + 4) + 1e-7))
    for fun in (regression, entropy):
        expected = jax.jit(jax.value_and_grad(fun))(W, X)
        inside = jax.value_and_grad(jmp.autocast(fun, half))
        for grad in (inside, jmp.autocast(jax.value_and_grad(fun), half)):
            assert_close(jax.jit(grad)(W, X), expected, half, factor=16)


@pytest.mark.slow
@each_half
def test_an_activation_that_products_and_residual_sums_read_rests_in_half(half):
    """As in a ResNet, whose last activation only a mean reads. Each sum is computed in float32."""

    def blocks(w):
        x = jax.nn.relu(X @ w)
        for _ in range(3):
            x = jax.nn.relu(x + (x @ w) / jnp.std(x @ w))
        return jnp.mean(x)

    assert operands_of("max", jmp.autocast(blocks, half), W) == [half] * 3 + ["float32"]
    sums = [o for o in jmp.explain(blocks, half)(W).operations if o.name == "add"]
    assert [o.outputs for o in sums] == [(f"{half}[4,8]",)] * 2 + [("float32[4,8]",)]
    grad = lambda fun: jax.jit(jax.grad(fun))(W)
    assert_close(grad(jmp.autocast(blocks, half)), grad(blocks), half, factor=16)


@each_half
def test_a_sum_upon_a_sum_stays_in_float32(half):
    """Half would lose small steps: Euler's method, or a deep residual stream."""

    def stream(x):
        for _ in range(64):
            x = x + 1e-3 * jnp.tanh(x @ W)
        return x

    assert {o.outputs for o in jmp.explain(stream, half)(X).operations if o.name == "add"} == {
        ("float32[4,8]",)
    }
    moved = jax.jit(jmp.autocast(stream, half))(X) - X
    assert_close(moved, stream(X) - X, half, factor=8)


def test_a_residual_sum_in_a_jitted_block_is_like_one_outside():
    block = lambda x: jax.nn.relu(x + jnp.tanh(x @ W) / 3)

    def loss(block):
        return lambda x: jnp.mean(block(block(block(jax.nn.relu(x @ W)))))

    found = [operands_of("max", jmp.autocast(loss(each)), X) for each in (block, jax.jit(block))]
    assert found[0] == found[1] == ["bfloat16"] * 3 + ["float32"]


@each_half
def test_the_cotangent_of_an_activation_function_is_kept_in_half(half):
    """Without a barrier XLA removes the cast, and stores the cotangent in float32 for the bias gradient."""
    loss = lambda w: jnp.sum(jax.nn.gelu(X @ w) @ w)
    found = equations(jax.make_jaxpr(jax.grad(jmp.autocast(loss, half)))(W))
    (barrier,) = (e for e in found if e.primitive.name == "optimization_barrier")
    assert [var.aval.dtype.name for var in barrier.invars] == [half]


@pytest.mark.slow
@each_half
def test_the_cotangent_of_a_gate_behind_a_norm_is_kept_in_half(half):
    """The norm would read it twice in float32. The gate itself reads the unrounded result of the norm."""

    def loss(w):
        x = X @ w
        normed = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5)
        return jnp.sum(jax.nn.silu(normed) @ w)

    grad = jax.grad(jmp.autocast(loss, half))
    found = equations(jax.make_jaxpr(grad)(W))
    (barrier,) = (e for e in found if e.primitive.name == "optimization_barrier")
    assert [var.aval.dtype.name for var in barrier.invars] == [half]
    assert set(operands_of("logistic", grad, W)) == {"float32"}
    assert_close(jax.jit(grad)(W), jax.grad(loss)(W), half, factor=8)
    assert "a gate behind a norm" in str(jmp.explain(jmp.autocast(loss, half))(W).operations)
