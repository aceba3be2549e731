"""`find_nonfinite` names the operation at which a loss or its gradients begin to be not finite."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import jmp_lite as jmp
from jmp_lite import linen
from jmp_lite import nnx as jmp_nnx
from jmp_lite.diagnostics import find_nonfinite, profile_ranges
from jmp_lite.diagnostics._extremes import Extremes

F16 = jmp.get_policy("params=float32,compute=float16,output=float32")
x = jnp.linspace(-1, 1, 12).reshape(3, 4)
w = jnp.linspace(-0.5, 0.5, 16).reshape(4, 4)


def cause_of(fun, *args, scale=None, **settings):
    """The cause, having checked that the loss or a gradient is not finite, as `value_and_grad` finds them."""
    report = find_nonfinite(fun, scale, **settings)(*args)
    used = jmp.NoOpLossScale() if scale is None else jmp.StaticLossScale(scale)
    value, grads = jmp.value_and_grad(fun, used, **settings)(*args)
    loss = value[0] if settings.get("has_aux") else value
    assert report.is_finite == bool(jmp.all_finite((loss, grads)))
    np.testing.assert_allclose(report.loss, loss, rtol=1e-3)
    return report.cause


# The broken runs of the issue.


def attention(mask_value):
    def loss(w, x):
        with jax.named_scope("attention"):
            scores = (x @ w).astype(jnp.float16) @ x.T.astype(jnp.float16)
            allowed = jnp.zeros((3, 3), bool).at[1:, 0].set(True)  # The first row sees nothing.
            mask = jnp.where(allowed, 0.0, mask_value).astype(jnp.float16)
            return jnp.mean(jax.nn.softmax(scores + mask).astype(jnp.float32))

    return loss


@pytest.mark.slow
def test_a_mask_of_1e9_in_float16():
    cause = cause_of(attention(-1e9), w, x)
    assert (cause.what, cause.operation, cause.direction) == ("inf", "convert_element_type", "forward")
    assert cause.operand_ranges == ((-1e9, 0.0),)
    assert cause.range == (-np.inf, 0.0)
    assert (cause.module, cause.result) == ("attention", "float16[3,3]")
    assert "test_nonfinite.py" in cause.line
    assert "mask of -1e+09" in cause.advice
    assert "jnp.finfo(x.dtype).min" in cause.advice


@pytest.mark.slow
def test_the_advice_for_a_mask_helps():
    assert find_nonfinite(attention(jnp.finfo(jnp.float16).min))(w, x).is_finite


def test_a_mask_that_only_a_softmax_reads_is_harmless():
    def loss(w, x):
        scores = jnp.where(jnp.tri(3, dtype=bool), x @ w @ x.T, -jnp.inf)
        return jnp.mean(jax.nn.softmax(scores) @ x)

    report = find_nonfinite(loss)(w, x)
    assert report.is_finite
    assert report.cause is None
    assert [(each.what, each.operation, each.operands[1]) for each in report.harmless] == [
        ("inf", "select_n", "-inf")
    ]
    assert "Harmless" in str(report)


def test_a_harmless_mask_is_not_taken_for_the_cause():
    def loss(w, x):
        scores = jnp.where(jnp.tri(3, dtype=bool), x @ w @ x.T, -jnp.inf)
        return jnp.sum(jnp.exp(1000 * (jax.nn.softmax(scores) @ x)))

    report = find_nonfinite(loss)(w, x)
    assert report.cause.operation == "exp"
    assert [each.operation for each in report.harmless] == ["select_n"]


class Blocks(nn.Module):
    """Blocks one of which gives gradients that are too large."""

    @nn.compact
    def __call__(self, x):
        for number in range(3):
            x = jnp.tanh(nn.Dense(4, name=f"block_{number}")(x))
            if number == 1:
                x = x * 1e-3
                x = nn.Dense(4, name="steep", kernel_init=nn.initializers.constant(60.0))(x)
        return x


@pytest.mark.slow
def test_an_overflow_in_the_backward_pass_of_one_block_and_the_scale_that_fits():
    model = linen.with_policy(Blocks(), F16)
    params = model.init(jax.random.key(0), x)
    loss = lambda params, x: jnp.sum(model.apply(params, x) ** 2)
    scale = 2.0**17
    report = find_nonfinite(loss, scale)(params, x)
    cause = report.cause
    assert cause is not None
    assert (cause.what, cause.direction) == ("inf", "backward")
    assert cause.module == "Blocks/steep"
    assert cause.operation == "dot_general"
    assert cause.result.startswith("float16")
    assert all(extent is None or np.isfinite(extent).all() for extent in cause.operand_ranges)
    scaled = lambda scale: jax.grad(lambda params: scale * loss(params, x))(params)
    finite = jax.jit(lambda scale: jmp.all_finite(scaled(scale)))
    fitting = max(2.0**k for k in range(-24, 17) if finite(2.0**k))
    assert report.fitting_scale == fitting
    assert f"At a scale of 2**{int(np.log2(fitting))} it would fit" in cause.advice
    assert find_nonfinite(loss, fitting)(params, x).is_finite


@pytest.mark.slow
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_bad_batch_of_five(bad):
    batches = np.tile(np.asarray(x), (5, 1, 1))
    batches[3, 1, 2] = bad

    def loss(w, batches):
        step = lambda total, batch: (total + jnp.mean((batch @ w) ** 2), None)
        return lax.scan(step, 0.0, batches)[0] / 5

    cause = cause_of(jmp.autocast(loss, jnp.float16), w, batches)
    assert (cause.operation, cause.argument, cause.index) == ("argument", "batches", (3, 1, 2))
    assert cause.what == ("NaN" if np.isnan(bad) else "inf")
    assert "Clean the data" in cause.advice
    assert "[3, 1, 2]" in str(cause)


def test_a_bad_parameter_is_named():
    params = {"head": {"kernel": w.at[1, 2].set(jnp.nan)}}
    cause = cause_of(lambda params, x: jnp.mean(x @ params["head"]["kernel"]), params, x)
    assert (cause.argument, cause.index) == ("params/head/kernel", (1, 2))
    assert "parameter params/head/kernel has NaN" in cause.advice


# Other operations.

CASES = {
    "exp": (lambda w, x: jnp.sum(jnp.exp(x * 100)) * w.sum(), "exp", "Subtract the maximum"),
    "division": (lambda w, x: jnp.sum(w / jnp.maximum(x, 0).T[:, :1]), "div", "division by zero"),
    "log": (lambda w, x: jnp.sum(jnp.log(jax.nn.relu(x @ w))), "log", "log of 0"),
    "reciprocal": (lambda w, x: jnp.sum(w) * jnp.sum(1 / (x - x[0, 0])), "div", "division by zero"),
    "norm": (lambda w, x: jnp.linalg.norm(w * 0) + x.sum(), "div", "square root"),
    "negative root": (lambda w, x: jnp.sum(jnp.sqrt(w)), "sqrt", "sqrt of -0.5"),
    "rsqrt": (lambda w, x: jnp.sum(lax.rsqrt(w * 0)), "rsqrt", "epsilon of a normalization"),
    "index": (lambda w, x: jnp.sum(jnp.take(w, jnp.array([0, 99]))), "gather", "out of bounds"),
    "guard": (
        lambda w, x: jnp.sum(jnp.where(w * 0 > 0, jnp.exp(x.sum()) / (w * 0), 1.0)),
        None,
        "divi",
    ),
    "square": (lambda w, x: jnp.sum((w * 1e20) ** 2), "integer_pow", "3.4e+38"),
    "cholesky": (lambda w, x: jnp.sum(jnp.linalg.cholesky(-w @ w.T)), "cholesky", "positive definite"),
}


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("name", CASES)
def test_operations_and_their_advice(name):
    fun, operation, advice = CASES[name]
    report = find_nonfinite(fun)(w, x)
    assert not report.is_finite
    assert operation is None or report.cause.operation == operation
    assert advice in report.cause.advice
    assert "test_nonfinite.py" in report.cause.line


def half(fun):
    return lambda w, x: fun(w.astype(jnp.float16), x.astype(jnp.float16)).astype(jnp.float32)


@pytest.mark.slow
def test_a_loss_beyond_65504():
    cause = cause_of(half(lambda w, x: jnp.sum(jnp.float16(30000.0) * jnp.ones(4, jnp.float16) + w[0])), w, x)
    assert cause.result == "float16[]"
    assert "Compute the loss in float32" in cause.advice


@pytest.mark.slow
def test_an_activation_beyond_65504_asks_for_a_rule_of_its_module():
    def fun(w, x):
        with jax.named_scope("wide"):
            return jnp.mean(jnp.sin((jnp.abs(x) * 3e4) @ (jnp.abs(w) * 10)))

    cause = cause_of(half(fun), w, x)
    assert cause.module == "wide"
    assert '{"wide": "float32"}' in cause.advice
    assert "65504" in cause.advice


@pytest.mark.slow
def test_the_rule_of_the_advice_helps():
    def fun(w, x):
        with jax.named_scope("wide"):
            y = (jnp.abs(x) * 3e4) @ (jnp.abs(w) * 10)
        return jnp.mean(jnp.sin(y))

    assert '{"wide": "float32"}' in cause_of(jmp.autocast(fun, jnp.float16), w, x).advice
    assert find_nonfinite(jmp.autocast(fun, jnp.float16, rules={"wide": "float32"}))(w, x).is_finite


def test_values_of_8_bits():
    fun = lambda w, x: jnp.sum((x @ w).astype(jnp.float8_e5m2).astype(jnp.float32) + w[0])
    report = find_nonfinite(fun)(w, x * 1e7)
    assert (report.cause.operation, report.cause.result) == ("convert_element_type", "float8_e5m2[3,4]")


@pytest.mark.slow
def test_complex_values():
    fun = lambda w, x: jnp.sum(jnp.abs(jnp.fft.fft(x @ w) * (1 + 2j)) ** 2 * 1e38)
    report = find_nonfinite(fun)(w, x)
    assert not report.is_finite
    assert report.cause.operation == "mul"
    assert profile_ranges(fun)(w, x).modules


# Inside calls.


@pytest.mark.slow
@pytest.mark.parametrize("reverse", [False, True])
def test_the_iteration_of_a_scan(reverse):
    def loss(w, x):
        def body(carry, step):
            return carry + 0 * step, jnp.sum(jnp.exp(w) / (step - 5.0))

        return jnp.sum(lax.scan(body, 0.0, jnp.arange(9.0), reverse=reverse)[1])

    cause = cause_of(loss, w, x)
    assert (cause.operation, cause.iterations) == ("div", (("scan", 5),))
    assert cause.operand_ranges[1] == (0.0, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(("reverse", "iteration"), [(False, 3), (True, 5)])
def test_the_first_iteration_of_a_growing_carry(reverse, iteration):
    step = lambda c, _: (c * 1e10 + w.sum() * 0, None)
    grow = lambda w, x: w[0, 0] * 0 + lax.scan(step, x[0, 3] + 2, None, length=9, reverse=reverse)[0]
    cause = cause_of(grow, w, x - x[0, 3] - 1)
    assert (cause.operation, cause.iterations) == ("mul", (("scan", iteration),))
    assert [each.operation for each in find_nonfinite(grow)(w, x - x[0, 3] - 1).others] == []
    assert cause.operand_ranges[0] == (pytest.approx(1e30), pytest.approx(1e30))


def test_a_scan_in_a_scan():
    def loss(w, x):
        def inner(c, j):
            i, total = c
            return (i, total + 1.0 / ((i - 2) ** 2 + (j - 1) ** 2)), None

        def outer(total, i):
            return lax.scan(inner, (i, total), jnp.arange(3.0))[0][1], None

        return lax.scan(outer, jnp.sum(w), jnp.arange(4.0))[0]

    cause = cause_of(loss, w, x)
    assert cause.iterations == (("scan", 2), ("scan", 1))


def test_the_iteration_of_a_while_loop():
    def loss(w, x):
        start = lax.stop_gradient((0, x.sum() + 1.0))
        _, y = lax.while_loop(lambda c: c[0] < 20, lambda c: (c[0] + 1, c[1] * 1e4), start)
        return jnp.sum(w) * y

    cause = cause_of(loss, w, x)
    assert (cause.operation, cause.iterations) == ("mul", (("while", 9),))
    entries = [each for each in find_nonfinite(loss)(w, x).others if each.operation == "while"]
    assert entries == []
    assert cause.operand_ranges[0] == (pytest.approx(1e36, rel=1e-3),) * 2


def test_a_batch_of_while_loops_stops_each_on_its_own():
    def one(limit):
        return lax.while_loop(lambda c: c < limit, lambda c: c * 1e4, 1.0)

    limits = lax.stop_gradient(jnp.array([10.0, 1e30]))
    loss = lambda w, x: jnp.sum(w) * jnp.sum(jax.vmap(one)(limits + 0 * x[0, 0])) * 1e-30
    assert find_nonfinite(loss)(w, x).is_finite


def test_the_branch_of_a_cond():
    def loss(w, x):
        branches = [jnp.sum, lambda y: jnp.sum(jnp.log(y * 0)), jnp.mean]
        return lax.switch(jnp.int32(x.shape[0] - 2 + 0 * x[0, 0]), branches, w)

    assert cause_of(loss, w, x).operation == "log"


def test_inside_remat_and_a_custom_derivative():
    @jax.custom_vjp
    def bad(y):
        return y

    bad.defvjp(lambda y: (y, y), lambda y, g: (g / (y - y),))

    def loss(w, x):
        with jax.named_scope("block"):
            return jnp.sum(jax.checkpoint(lambda y: jnp.sin(bad(y @ w)))(x))

    cause = cause_of(loss, w, x)
    assert (cause.operation, cause.direction) == ("div", "backward")
    assert "block" in cause.module
    assert "divides by zero" in cause.advice


def test_what_remat_computes_again_is_named_as_such():
    def block(y):
        with jax.named_scope("inside"):
            return jnp.sin(jnp.exp(100 * y @ w))

    def loss(w, x):
        with jax.named_scope("block"):
            return jnp.sum(jax.checkpoint(block)(x * 10 + w.sum()))

    report = find_nonfinite(loss)(w, x)
    assert (report.cause.operation, report.cause.direction) == ("exp", "forward")
    again = [each for each in report.others if each.direction == "recomputed"]
    assert again[0].operation == "exp"
    assert again[0].module == report.cause.module == "block/inside"
    assert again[0].advice == report.cause.advice


def test_what_a_backward_rule_computes_again_is_no_gradient():
    @jax.custom_vjp
    def layer(y):
        return y

    layer.defvjp(lambda y: (y, y), lambda y, g: (g * (y.astype(jnp.float16) * 6e4 * 6).astype(jnp.float32),))
    report = find_nonfinite(lambda w, x: jnp.sum(layer(w)), 2.0**4)(w, x)
    assert report.cause.direction == "backward"
    assert report.fitting_scale is None
    assert "at this scale" not in report.cause.advice
    assert "Keep the" in report.cause.advice


@pytest.mark.slow
def test_inside_shard_map():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    values = jnp.arange(16.0)

    def loss(w, values):
        one = lambda v: jnp.sum(jnp.log(v), keepdims=True)
        return jnp.sum(w) * jnp.sum(jax.shard_map(one, mesh=mesh, in_specs=P("d"), out_specs=P("d"))(values))

    cause = cause_of(loss, w, values - 6)
    assert cause.operation == "log"
    assert cause.iterations == (("shard_map", 0),)
    cause = cause_of(loss, w, jnp.abs(values - 6))
    assert (cause.what, cause.iterations) == ("inf", (("shard_map", 3),))


# What users give.


class Tower(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)) * 6e4)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["policy", "autocast"])
def test_an_nnx_model_is_named_by_its_parameters_and_stays_as_it_is(how):
    model = Tower(nnx.Rngs(0))
    loss = lambda model, x: jnp.mean(model(x * 10) ** 2)
    if how == "policy":
        model = jmp_nnx.with_policy(model, F16)
    else:
        loss = jmp.autocast(loss, jnp.float16)
    before = nnx.state(model)
    cause = cause_of(loss, model, x, transform=nnx.value_and_grad)
    assert "model/" in cause.argument
    assert cause.result.startswith("float16")
    assert jax.tree.all(jax.tree.map(lambda a, b: a is b, before, nnx.state(model)))


@pytest.mark.slow
def test_an_equinox_model():
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(4, 4, 8, 2, key=jax.random.key(0))
    loss = lambda model, x: jnp.sum(jnp.log(jax.vmap(model)(x) * 0))
    cause = cause_of(loss, model, x, transform=eqx.filter_value_and_grad)
    assert cause.operation == "log"
    wide = eqx.tree_at(lambda model: model.layers[1].weight, model, model.layers[1].weight * 1e6)
    loss = jmp.autocast(lambda model, x: jnp.sum(jnp.sin(jax.vmap(model)(x))), jnp.float16)
    cause = cause_of(loss, wide, x, transform=eqx.filter_value_and_grad)
    assert cause.argument.endswith("layers/1/weight")
    assert "layers/1" in cause.advice


def test_has_aux_argnums_and_keywords():
    loss = lambda x, *, w, power=2: (jnp.sum(1 / w**power) + jnp.sum(x), {"n": 3})
    report = find_nonfinite(loss, has_aux=True)(x, w=w * 0)
    assert report.cause.operation in ("integer_pow", "div")
    assert report.gradients == ()
    assert report.parameters == 1
    both = find_nonfinite(lambda a, b: jnp.sum(a / b), argnums=(0, 1))(w, w * 0)
    assert (both.parameters, both.gradients) == (2, ("0", "1"))


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(
    "scale",
    [1024.0, jnp.float32(1024), jmp.StaticLossScale(1024.0), jmp.DynamicLossScale(1024.0)],
    ids=lambda scale: type(scale).__name__,
)
def test_the_loss_scale_may_be_a_number_or_a_loss_scale(scale):
    fun = half(lambda w, x: jnp.sum((w * 100).astype(jnp.float32)) * 10)
    assert find_nonfinite(fun, scale)(w, x).loss_scale == 1024
    assert not find_nonfinite(fun, scale)(w, x).is_finite
    assert find_nonfinite(fun)(w, x).is_finite


def test_the_scale_of_an_optimizer():
    opt_state = jmp.with_loss_scale(optax.sgd(1.0)).init(w)
    report = find_nonfinite(lambda w, x: jnp.sum(x @ w), jmp.get_loss_scale(opt_state))(w, x)
    assert report.loss_scale == 2**15
    assert "2**15" in str(report)


def test_a_loss_that_is_a_constant():
    report = find_nonfinite(lambda w, x: jnp.float32(3.0))(w, x)
    assert (report.loss, report.is_finite, report.gradients) == (3.0, True, ())


def test_a_loss_in_half_carries_the_scale_in_half():
    loss = lambda w, x: jnp.mean((x @ w).astype(jnp.float16))
    cause = cause_of(loss, w, x, scale=2.0**16)
    assert (cause.direction, cause.operation) == ("backward", "convert_element_type")
    assert "2**15 it would fit" in cause.advice


def test_the_report():
    report = find_nonfinite(lambda w, x: jnp.sum(jnp.log(w * 0)))(w, x)
    assert report.summary().startswith("The loss is -inf; 1 of 1 gradients are not finite")
    text = str(report)
    assert "It begins here:\ninf from log" in text
    assert "    takes float32[4,4], -0 to 0\n    gives float32[4,4], -inf to -inf" in text
    assert repr(report).startswith("NonfiniteReport(inf from log")
    assert report._repr_html_() == f"<pre>{text.replace('<', '&lt;').replace('>', '&gt;')}</pre>"
    with pytest.raises(AttributeError):
        report.loss = 0.0
    fine = find_nonfinite(lambda w, x: jnp.sum(w * 0))(w, x)
    assert str(fine) == "The loss, 0, and all 1 gradients are finite; the loss scale is 2**0."


def test_errors_say_what_was_given():
    loss = lambda w, x: jnp.sum(w)
    with pytest.raises(TypeError, match=r"takes a loss function first. Got 3"):
        find_nonfinite(3)
    with pytest.raises(TypeError, match=r"loss_scale should be None, a number, or a loss scale.*Got str"):
        find_nonfinite(loss, "half")
    with pytest.raises(ValueError, match=r"above 0 and finite. Got 0"):
        find_nonfinite(loss, 0.0)
    with pytest.raises(TypeError, match="Call it outside jit"):
        jax.jit(lambda w: find_nonfinite(loss)(w, x).loss)(w)
    with pytest.raises(TypeError, match="floating scalar"):
        find_nonfinite(lambda w: w)(w)


def test_a_while_loop_keeps_the_iterations_with_an_inf_of_either_sign_or_a_nan():
    inf, nan = np.inf, np.nan
    records = jnp.array([[-inf, 0.0], [0.0, inf], [nan, nan], [0.0, nan], [0.0, 1.0], [inf, -inf]])
    assert Extremes().alarm(records).tolist() == [True, True, True, True, False, False]
