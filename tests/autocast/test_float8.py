"""`autocast(fun, "float8")`: which products run in fp8, in which formats, in both orders, and inside what."""

import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp_lite as jmp
from jmp_lite._float8.action import warn_without_float8
from jmp_lite._float8.quantize import quantize, quantize_result
from tests.support.arrays import normal
from tests.support.jaxprs import equations, product_kinds
from tests.support.small_programs import with_jvp, with_vjp

pytestmark = pytest.mark.filterwarnings("ignore:autocast.*'float8'")

E4, E5, HALF, FULL = "float8_e4m3fn", "float8_e5m2", "bfloat16", "float32"
FORWARD, BACKWARD, SWAPPED = (E4, E4, HALF), (E5, E4, HALF), (E4, E5, HALF)
EVERYWHERE = {"**": "float8"}  # Small products too.


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def float8(fun, **options):
    return jmp.autocast(fun, "float8", rules=EVERYWHERE, **options)


def relative_error(gradients, exact):
    pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(exact), strict=True)
    return max(np.linalg.norm(np.subtract(a, b)) / np.linalg.norm(b) for a, b in pairs)


def products_of(fun, *args):
    return [o for o in jmp.explain(fun)(*args).operations if o.name == "dot_general"]


# Which products.


@pytest.mark.parametrize(
    ("left", "right", "reason"),
    [
        ((2048, 2048), (2048, 2048), "in fp8"),
        ((4, 512, 2048), (2048, 8192), "in fp8"),
        ((1792, 1792), (1792, 1792), "1792 x 1792 x 1792 is too small to gain"),
        ((8192, 256), (256, 8192), "8192 x 256 x 8192 is too small to gain"),
        ((8192, 2048), (2048, 50257), "a size of 8192 x 2048 x 50257 is no multiple of 16"),
        ((8200, 2048), (2048, 8192), "a size of 8200 x 2048 x 8192 is no multiple of 16"),
    ],
)
def test_only_large_products_of_even_sizes_run_in_fp8(left, right, reason):
    (product,) = products_of(jmp.autocast(lambda x, w: x @ w, "float8"), shape(*left), shape(*right))
    assert product.reason.endswith(reason)
    assert product.in_fp8 == (reason == "in fp8")
    assert {text.partition("[")[0] for text in product.inputs} == {E4 if product.in_fp8 else HALF}


def test_attention_and_convolutions_stay_in_bfloat16():
    attention = lambda q, k: jnp.einsum("bqd,bkd->bqk", q, k)
    (product,) = products_of(float8(attention), shape(4, 2048, 2048), shape(4, 2048, 2048))
    assert product.reason.endswith("bfloat16, not fp8: it has batch axes")
    convolve = lambda x, w: lax.conv(x, w, (1, 1), "SAME")
    report = jmp.explain(float8(convolve))(shape(8, 512, 64, 64), shape(512, 512, 3, 3))
    (convolution,) = (o for o in report.operations if o.name == "conv_general_dilated")
    assert convolution.reason.endswith("bfloat16, not fp8: conv_general_dilated has no fp8 version")
    assert "1: conv_general_dilated has no fp8 version" in str(report)


def two_layers(params, x):
    with jax.named_scope("body"):
        hidden = jnp.tanh(x @ params["body"])
    with jax.named_scope("head"):
        return jnp.mean(jnp.square(hidden @ params["head"]))


PARAMS = {"body": normal(0, 64, 32) / 8, "head": normal(1, 32, 48) / 6}
X = normal(2, 4, 16, 64)


@pytest.mark.parametrize(
    ("rules", "in_fp8"),
    [
        ({}, []),  # The products are small.
        (EVERYWHERE, ["body", "head"]),
        ({"head": "bfloat16", "**": "float8"}, ["body"]),
        ({"params/head": "bfloat16", "**": "float8"}, ["body"]),
        ({"head": "float8"}, ["head"]),
        ({"params/body": "float8"}, ["body"]),
        ({"body": "float8", "**": "bfloat16"}, ["body"]),
        ({"head": "float32", "**": "float8"}, ["body"]),
    ],
)
def test_rules_select_scopes_and_arguments_and_the_first_wins(rules, in_fp8):
    fun = jmp.autocast(two_layers, "float8", rules=rules)
    products = products_of(fun, PARAMS, X)
    assert [product.scope for product in products if product.in_fp8] == in_fp8
    kinds = product_kinds(jax.grad(fun, (0, 1)), PARAMS, X)
    assert kinds[FORWARD] == kinds[BACKWARD] == kinds[SWAPPED] == len(in_fp8)
    assert product_kinds(fun, PARAMS, X)[FORWARD] == len(in_fp8)


def test_the_report_names_the_rule_and_counts_the_products():
    report = jmp.explain(jmp.autocast(two_layers, "float8", rules={"head": "bfloat16", "**": "float8"}))(
        PARAMS, X
    )
    assert report.summary().startswith("1 of 6 operations in fp8, 2 in bfloat16, ")
    assert "Matmuls that are in bfloat16 and not in fp8:\n    1: the rule for 'head'" in str(report)
    assert report.tensor_core_share > 0.9
    assert report.in_float32() == ()


# Inside what.


def mlp(w, x):
    return jnp.tanh(jnp.tanh(x @ w) @ w)


dense = lambda w, x: jnp.tanh(x @ w)


def iterate(step):
    return lambda w, x: lax.scan(lambda c, _: (step(w, c), None), x, None, length=3)[0]


PROGRAMS = {
    "scan of a remat": iterate(jax.checkpoint(lambda w, x: jnp.tanh(x @ w))),
    "custom_jvp": with_jvp(dense),
    "custom_vjp": with_vjp(dense),
    "a transposed weight": lambda w, x: jnp.tanh(x @ w.T),
    "plain": mlp,
    "jit": jax.jit(mlp),
    "remat": jax.checkpoint(mlp),
    "scan": iterate(lambda w, x: jnp.tanh(x @ w)),
    "scan over weights": lambda w, x: lax.scan(
        lambda c, w: (jnp.tanh(c @ w), None), x, jnp.stack([w, 2 * w])
    )[0],
    "vmap": lambda w, x: jax.vmap(mlp, (None, 0))(w, jnp.stack([x, 3 * x])),
    "cond": lambda w, x: lax.cond(x[0, 0] > 0, mlp, lambda w, x: x @ w, w, x),
    "while": lambda w, x: lax.fori_loop(0, 3, lambda _, c: jnp.tanh(c @ w), x),
}
W, XS = normal(3, 32, 32) / 5, normal(4, 16, 32)


@pytest.mark.cases(slow=3)
@pytest.mark.parametrize("name", PROGRAMS)
def test_both_orders_have_the_same_products_and_gradients(name):
    loss = lambda w, x: jnp.sum(jnp.square(PROGRAMS[name](w, x)))
    exact = jax.jit(jax.grad(loss, (0, 1)))(W, XS)
    orders = jax.grad(float8(loss), (0, 1)), float8(jax.grad(loss, (0, 1)))
    counts = []
    for grads in orders:
        assert 0.02 < relative_error(jax.jit(grads)(W, XS), exact) < 0.25
        kinds = product_kinds(grads, W, XS)
        assert set(kinds) <= {FORWARD, BACKWARD, SWAPPED}
        counts.append((kinds[FORWARD], kinds[BACKWARD] + kinds[SWAPPED]))
    if name != "cond":  # JAX differentiates the branches apart in one order.
        assert counts[0] == counts[1]
    assert all(counts[0])


def test_no_product_has_two_operands_in_e5m2():
    def twice(w, x):
        return jnp.sum(jnp.square(jax.grad(lambda w: jnp.sum(mlp(w, x)))(w)))

    for grads in (jax.grad(float8(twice)), float8(jax.grad(twice))):
        kinds = product_kinds(grads, W, XS)
        assert not any(left == right == E5 for left, right, _ in kinds)
        assert sum(count for kind, count in kinds.items() if E4 in kind) > 5


def casts_to_float8(jaxpr):
    """The shapes of the arrays that are cast to e4m3."""
    casts = (e for e in equations(jaxpr) if e.primitive.name == "convert_element_type")
    return [e.invars[0].aval.shape for e in casts if e.params["new_dtype"] == jnp.float8_e4m3fn]


def test_a_weight_is_cast_to_fp8_once_and_in_front_of_the_loop():
    loss = lambda w, x: jnp.sum(jnp.square(PROGRAMS["scan"](w, x)))
    jaxpr = jax.make_jaxpr(float8(loss))(W, XS)
    assert sorted(casts_to_float8(jaxpr)) == [XS.shape, W.shape]
    (scan,) = (e for e in equations(jaxpr) if e.primitive.name == "scan")
    assert casts_to_float8(scan.params["jaxpr"]) == [XS.shape]


def test_a_value_is_cast_to_fp8_once_for_all_its_products():
    heads = lambda w, x: jnp.sum((x @ w) * (x @ (2 * w)) * (x @ (3 * w)))
    for fun in (float8(heads), float8(jax.grad(heads, (0, 1)))):
        jaxpr = jax.make_jaxpr(fun)(W, XS)
        assert casts_to_float8(jaxpr).count(XS.shape) == 1


def test_the_cast_of_an_activation_function_computes_it_again():
    """Once for its largest magnitude and once for the cast, so nothing needs to write the result."""
    names = lambda fun: [e.primitive.name for e in equations(jax.make_jaxpr(float8(fun))(W, XS))]
    of_one = lambda w, x: jax.nn.gelu(x @ w) @ w
    of_gate = lambda w, x: (jnp.tanh(x @ w) * (x @ w)) @ w
    of_two = lambda w, x: (jax.nn.gelu(x @ w) * (x @ (2 * w))) @ w  # It would read two arrays for one.
    assert [names(fun).count("tanh") for fun in (of_one, of_gate, of_two)] == [3, 1, 1]
    relu, dtype = lambda x: lax.max(x, jnp.zeros_like(x)), jnp.dtype(E4)
    both = jax.jit(lambda x: (quantize_result(relu, x, relu(x), dtype), quantize(relu(x), dtype)))
    again, once = both(XS.astype(jnp.bfloat16))
    assert again.step == once.step
    assert np.array_equal(again.bits, once.bits)


@pytest.mark.slow
def test_the_cast_of_an_activation_function_has_the_bias_in_front_of_it():
    bias = jnp.linspace(-2, 2, 32)
    for act in (jax.nn.gelu, lambda y: y):
        fun = lambda w, x, act=act: act(x @ w + bias) @ w
        assert relative_error(float8(fun)(W, XS), fun(W, XS)) < 0.06


def test_what_is_kept_for_the_backward_pass_has_one_byte_a_number():
    """A product keeps its operands in fp8; in bfloat16 it keeps them in half."""
    loss = lambda w, x: jnp.sum(PROGRAMS["scan"](w, x))

    def kept(fun):
        """The dtypes of the arrays that the loop writes in each iteration."""
        forward, _ = (
            e for e in equations(jax.make_jaxpr(jax.grad(fun))(W, XS)) if e.primitive.name == "scan"
        )
        return sorted(var.aval.dtype.name for var in forward.outvars if var.aval.shape == (3, *XS.shape))

    # The operand of the product, and the operand of tanh.
    assert kept(float8(loss)) == [HALF, "uint8"]
    assert kept(jmp.autocast(loss, "bfloat16")) == [HALF, HALF]


@pytest.mark.slow
def test_in_a_shard_map_each_device_has_its_own_scale():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = jax.P("data"), jax.P()
    local = lambda w, x: lax.psum(jnp.sum(jnp.square(mlp(w, x))), "data")
    loss = jax.shard_map(local, mesh=mesh, in_specs=(whole, rows), out_specs=whole)
    x = normal(5, 64, 32) * jnp.repeat(jnp.array([1.0, 1e-3, 1.0, 1.0]), 16)[:, None]
    exact = jax.grad(loss, (0, 1))(W, x)
    for grads in (jax.grad(float8(loss), (0, 1)), float8(jax.grad(loss, (0, 1)))):
        found = jax.jit(grads)(W, x)
        assert relative_error(found, exact) < 0.2
        small = slice(16, 32)  # With one scale for all devices these rows would be zero.
        assert relative_error(found[1][small], exact[1][small]) < 0.2


# With the other options.


def test_reduce_dtype_gives_weight_gradients_in_float32():
    loss = lambda w, x: jnp.sum(jnp.square(mlp(w, x)))
    in_order, around = (
        product_kinds(grads, W, XS)
        for grads in (
            jax.grad(float8(loss, reduce_dtype="float32")),
            float8(jax.grad(loss), reduce_dtype="float32"),
        )
    )
    assert in_order[E4, E5, FULL] == 2 == around[E5, E4, FULL] + around[E4, E5, FULL]
    assert in_order[FORWARD] == around[FORWARD] == 2
    once = lambda w, x: jnp.sum(jnp.square(x @ w))
    rounded = lambda x: np.array_equal(x, x.astype(jnp.bfloat16).astype(jnp.float32))
    assert rounded(jax.jit(jax.grad(float8(once)))(W, XS))
    assert not rounded(jax.jit(jax.grad(float8(once, reduce_dtype="float32")))(W, XS))


def test_float32_results_are_not_rounded():
    head = float8(lambda x, w: x @ w, float32_results="w")
    assert product_kinds(head, XS, W) == {(E4, E4, FULL): 1}
    result = head(XS, W)
    assert not np.array_equal(result, result.astype(jnp.bfloat16).astype(jnp.float32))
    kinds = product_kinds(jax.grad(lambda x, w: head(x, w).sum(), (0, 1)), XS, W)
    assert kinds[E5, E4, HALF] == kinds[E4, E5, HALF] == 1


# Words, and a run.


@pytest.mark.parametrize(
    ("platform", "capability", "warns"),
    [
        ("cpu", "", True),
        ("gpu", "8.0", True),
        ("gpu", "8.9", False),
        ("gpu", "9.0", False),
        ("gpu", "gfx942", False),
    ],
)
def test_a_warning_names_a_device_without_fp8(platform, capability, warns, monkeypatch):
    device = types.SimpleNamespace(platform=platform, compute_capability=capability, device_kind=platform)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_without_float8()
    assert bool(caught) == warns


def test_one_warning_says_that_this_machine_has_no_fp8():
    fun = jax.jit(float8(mlp))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fun(W, XS)
        fun(W, XS)
        jmp.autocast(mlp, "float8")(W, XS)  # No product is large enough.
    (warning,) = caught
    assert "runs on cpu, which has no fp8 arithmetic" in str(warning.message)


def test_the_warning_names_the_line_of_the_program():
    fun = float8(lambda w, x: jnp.sum(x @ w))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jmp.value_and_grad(fun, jmp.NoOpLossScale())(W, XS)
        jax.jit(jax.value_and_grad(fun))(W, XS)
    assert [warning.filename for warning in caught] == [__file__] * 2


def test_a_batch_has_one_scale_inside_autocast_and_one_an_example_outside():
    product = lambda x: x @ jnp.eye(16)
    x = jnp.stack([jnp.ones((16, 16)), jnp.full((16, 16), 2.0**-30)])
    options = {"dtype": "float8", "rules": {"**": "float8"}}
    inside, outside = jmp.autocast(jax.vmap(product), **options), jax.vmap(jmp.autocast(product, **options))
    one, each = jax.jit(inside)(x), jax.jit(outside)(x)
    assert float(jnp.abs(one[1]).max()) == 0.0
    np.testing.assert_array_equal(each, x)
