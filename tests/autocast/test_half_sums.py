"""`half_sums`: residual sums whose results are half, so that a residual stream moves fewer bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_lite as jmp
from jmp_lite._jaxpr.read import all_equations
from tests.support.arrays import normal
from tests.support.jaxprs import product_kinds


def stream(params, x):
    for number, (inner, outer) in enumerate(params):
        with jax.named_scope(f"block_{number}"):
            mean = x.mean(-1, keepdims=True)
            normed = (x - mean) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
            x = x + jax.nn.relu(normed @ inner) @ outer
    return jnp.mean(jnp.square(x)) + jnp.mean(x @ HEAD)


PARAMS = [(normal(n, 16, 32, scale=1 / 4), normal(3 + n, 32, 16, scale=1 / 6)) for n in range(3)]
X, HEAD = normal(6, 8, 16), normal(7, 16, 4)


def sums(fun):
    """The dtype of each residual sum."""
    operations = jmp.explain(fun)(PARAMS, X).operations
    added = [o for o in operations if o.name == "add" and o.outputs[0].endswith("[8,16]")]
    return [o.outputs[0].partition("[")[0] for o in added]


@pytest.mark.cases(fast=2, slow=4)
@pytest.mark.parametrize(
    ("half_sums", "dtypes"),
    [
        ((), ["float32", "float32", "float32"]),
        ("**", ["bfloat16", "bfloat16", "bfloat16"]),
        ("block_1", ["float32", "bfloat16", "float32"]),
        (["block_0", "block_2"], ["bfloat16", "float32", "bfloat16"]),
    ],
)
def test_only_the_selected_sums_are_in_half(half_sums, dtypes):
    fun = jmp.autocast(stream, "bfloat16", half_sums=half_sums)
    assert sums(fun) == dtypes
    assert product_kinds(jax.grad(fun), PARAMS, X) == product_kinds(jax.grad(jmp.autocast(stream)), PARAMS, X)


def test_a_pattern_that_selects_nothing_is_an_error():
    with pytest.raises(ValueError, match="half_sums='blok' selects no residual sum"):
        jmp.autocast(stream, half_sums="blok")(PARAMS, X)
    with pytest.raises(TypeError, match="half_sums= takes patterns over scopes"):
        jmp.autocast(stream, half_sums=3)


# Through loops: the carry of a scanned stack.

STACK = (normal(10, 6, 16, 32, scale=1 / 4), normal(11, 6, 32, 16, scale=1 / 6))


def scanned(wrap=lambda body: body):
    def loss(stack, x):
        def block(x, weights):
            inner, outer = weights
            with jax.named_scope("block"):
                normed = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
                return x + jax.nn.relu(normed @ inner) @ outer, None

        return jnp.mean(jnp.square(jax.lax.scan(wrap(block), x, stack)[0]))

    return loss


def kept(fun):
    """The dtypes of what the backward pass keeps of the stream."""
    leaves = jax.tree.leaves(jax.eval_shape(lambda stack, x: jax.vjp(fun, stack, x)[1], STACK, X))
    return {leaf.dtype.name for leaf in leaves if leaf.shape == (6, 8, 16)}


@pytest.mark.parametrize("wrap", [jax.checkpoint, lambda body: body], ids=["remat", "plain"])
def test_the_carry_of_a_scanned_stack_is_kept_in_half(wrap):
    loss = scanned(wrap)
    assert "float32" in kept(jmp.autocast(loss, "float16"))
    assert kept(jmp.autocast(loss, "bfloat16", half_sums="**")) == {"bfloat16"}
    inside = jmp.autocast(jax.value_and_grad(loss), "bfloat16", half_sums="**")
    shapes = {
        var.aval.dtype.name
        for equation in all_equations(jax.make_jaxpr(inside)(STACK, X))
        if equation.primitive.name == "scan"
        for var in (*equation.invars, *equation.outvars)
        if var.aval.shape in ((8, 16), (6, 8, 16)) and jnp.issubdtype(var.aval.dtype, jnp.floating)
    }
    # The cotangent of the stream, a carry of the backward pass, stays in float32.
    assert shapes == {"bfloat16", "float32"}


@pytest.mark.slow
def test_two_streams_that_change_places_are_both_in_half():
    def loss(w, x):
        body = lambda carry, w: ((carry[1] + jnp.tanh(carry[1] @ w), carry[0]), None)
        first, second = jax.lax.scan(body, (x, 2 * x), w)[0]
        return jnp.mean(first * second)

    w = jnp.ones((4, 16, 16)) / 16
    exact, found = (
        jax.value_and_grad(f)(w, X) for f in (loss, jmp.autocast(loss, "bfloat16", half_sums="**"))
    )
    np.testing.assert_allclose(found[0], exact[0], rtol=0.05)
    assert np.linalg.norm(found[1] - exact[1]) < 0.05 * np.linalg.norm(exact[1])


def test_a_sum_in_one_branch_and_a_matmul_in_the_other_are_in_half():
    def program(w, x):
        x = jax.lax.cond(x[0, 0] > 0, lambda x: x + x @ w, lambda x: x @ w, x)
        return x @ w

    half = jmp.autocast(program, "bfloat16", half_sums="**")
    (cond,) = (e for e in jax.make_jaxpr(half)(jnp.ones((16, 16)), X).eqns if e.primitive.name == "cond")
    assert [var.aval.dtype.name for var in cond.outvars] == ["bfloat16"]


def test_the_carry_of_a_while_loop_stays_in_float32():
    def loss(w, x):
        body = lambda carry: (carry[0] + 1, carry[1] + jnp.tanh(carry[1] @ w))
        return jnp.mean(jax.lax.while_loop(lambda carry: carry[0] < 3, body, (0, x))[1])

    fun = jmp.autocast(loss, "bfloat16", half_sums="**")
    (loop,) = (
        e
        for e in all_equations(jax.make_jaxpr(fun)(STACK[0][0] @ STACK[1][0], X))
        if e.primitive.name == "while"
    )
    assert [var.aval.dtype.name for var in loop.outvars if var.aval.shape == (8, 16)] == ["float32"]
    assert np.isfinite(float(fun(STACK[0][0] @ STACK[1][0], X)))


# A recursion in parallel.


def state_space(params, x):
    """A layer with a linear recursion over the rows, as in S5, an LRU or Mamba."""
    into, log_decay, outer = params
    decays = jnp.exp(-jnp.exp(log_decay) * jnp.ones_like(x))
    combine = lambda left, right: (left[0] * right[0], right[0] * left[1] + right[1])
    with jax.named_scope("recursion"):
        states = jax.lax.associative_scan(combine, (decays, (x @ into).astype(jnp.float32)))[1]
    return jnp.mean((x + states @ outer) @ HEAD)


@pytest.mark.parametrize("transform", [lambda fun: fun, jax.checkpoint])
def test_a_recursion_in_parallel_is_no_stream(transform):
    params = normal(20, 16, 16, scale=1 / 4), normal(21, 16), normal(22, 16, 16, scale=1 / 4)

    def kinds(**options):
        return [
            (o.scope, o.outputs[0])
            for o in jmp.explain(jmp.autocast(transform(state_space), "bfloat16", **options))(
                params, X
            ).operations
            if o.name == "add" and not o.backward
        ]

    plain, selected = kinds(), kinds(half_sums="**")
    inside = lambda found: [each for each in found if "recursion" in each[0]]
    assert len(inside(plain)) >= 6
    assert inside(selected) == inside(plain)
    assert [each for each in selected if "recursion" not in each[0]] == [("", "bfloat16[8,16]")]


# A sum of a matmul's result and a bias, in front of a norm.


@pytest.mark.parametrize(("half_sums", "dtype"), [((), "float32"), ("**", "bfloat16")])
def test_a_bias_in_front_of_a_norm_is_added_in_half_and_that_of_the_norm_is_not(half_sums, dtype):
    def fun(w, bias, x):
        y = x @ w + bias
        normed = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-5) + bias
        return jnp.sum(y + jax.nn.silu(normed) @ w)

    arrays = PARAMS[0][0] @ PARAMS[0][1], jnp.ones(16), X
    operations = jmp.explain(jmp.autocast(fun, half_sums=half_sums))(*arrays).operations
    added = [
        o.outputs[0].partition("[")[0] for o in operations if o.name == "add" and "[8,16]" in o.outputs[0]
    ]
    assert added[:2] == [dtype, "float32"]


@pytest.mark.parametrize("order", [0, 1])
def test_a_checkpoint_computes_the_stream_again_in_half(order):
    x, w = normal(8, 4, 16), normal(9, 16, 16, scale=1 / 4)
    norm = lambda x: x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)

    @jax.checkpoint
    def block(x, w):
        x = x + jnp.tanh(norm(x) @ w) @ w
        return x + jnp.tanh(norm(x) @ w) @ w

    loss = lambda w: jnp.mean(jnp.square(norm(block(x, w)) @ w))
    options = {"dtype": "bfloat16", "half_sums": "**"}
    grad = (jax.grad(jmp.autocast(loss, **options)), jmp.autocast(jax.grad(loss), **options))[order]
    adds = [each for each in all_equations(jax.make_jaxpr(grad)(w)) if each.primitive.name == "add"]
    added = [each for each in adds if all(getattr(v.aval, "shape", ()) == x.shape for v in each.invars)]
    # Two in the forward pass. The second is not computed again, since nothing in the block reads it.
    assert [each.outvars[0].aval.dtype.name for each in added] == ["bfloat16"] * 3
