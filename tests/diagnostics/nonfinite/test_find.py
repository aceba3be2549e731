"""`find_nonfinite` names the operation at which a loss or its gradients begin to be not finite."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jmp_lite as jmp
from jmp_lite import linen
from jmp_lite.diagnostics import doctor, find_nonfinite, profile_ranges
from tests.support.causes import advice_of, w, x
from tests.support.policies import F16

# Broken runs.


@pytest.mark.slow
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


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("masked", [False, True])
def test_an_inf_that_became_finite_before_the_cause_is_named_as_perhaps_the_cause(masked):
    def loss(w, x):
        x = x.astype(jnp.float16)
        # The `exp` of an overflow below zero is 0, as it should be.
        x *= jnp.exp(-x * x) if masked else lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True))
        score = x @ w.astype(jnp.float16)
        score = jnp.where(jnp.abs(score) > 0, score, jnp.float16(-jnp.inf))
        return jnp.mean(jax.nn.softmax(score).astype(jnp.float32) @ x.astype(jnp.float32))

    report = find_nonfinite(loss)(jnp.ones(4), jnp.linspace(300.0, 600.0, 12).reshape(3, 4))
    assert report.cause.operation in ("select_n", "constant")
    assert [(each.what, each.operation, each.end.split(",")[0]) for each in report.earlier] == (
        [] if masked else [("inf", "mul", "rsqrt")]
    )
    assert ("Before it, and perhaps its cause:\ninf from mul" in str(report)) != masked
    diagnosis = doctor(loss, device=None)(jnp.ones(4), jnp.linspace(300.0, 600.0, 12).reshape(3, 4))
    assert ("Before it, and perhaps its cause:\ninf from mul" in str(diagnosis)) != masked


@pytest.mark.slow
def test_an_inf_that_costs_no_more_than_rounding_is_harmless():
    def loss(w, x):
        distances = jnp.where(w > 0.4, 300.0, w).astype(jnp.float16)
        return jnp.mean(jnp.exp(-distances * distances).astype(jnp.float32))  # exp(-inf) is 0 in float32 too.

    report = find_nonfinite(loss)(w, x)
    assert report.is_finite
    assert report.cause is None
    assert [each.operation for each in report.harmless] == ["mul"]


class Blocks(nn.Module):
    """Blocks. One block gives gradients that are too large."""

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
    report = find_nonfinite(loss, loss_scale=scale)(params, x)
    cause = report.cause
    assert cause is not None
    assert (cause.what, cause.direction) == ("inf", "backward")
    assert cause.module == "Blocks/steep"
    assert cause.operation == "dot_general"
    assert cause.result.startswith("float16")
    assert all(extent is None or np.isfinite(extent).all() for extent in cause.operand_ranges)

    def scaled(scale):
        return jax.grad(lambda params: scale * loss(params, x))(params)

    finite = jax.jit(lambda scale: jmp.all_finite(scaled(scale)))
    fitting = max(2.0**k for k in range(-24, 17) if finite(2.0**k))
    assert report.fitting_scale == fitting
    assert [trial.loss_scale for trial in report.remedies] == [fitting]
    assert find_nonfinite(loss, loss_scale=fitting)(params, x).is_finite


@pytest.mark.slow
def test_a_scale_below_1_is_offered_with_a_minimum_below_1():
    def loss(w, x):
        return jnp.sum((x @ w).astype(jnp.float16).astype(jnp.float32)) * 3e5

    (trial,) = find_nonfinite(loss)(w, x).tried
    assert trial.change == "jmp.DynamicLossScale(2.0**-3, min_loss_scale=2.0**-24)"
    assert trial.helps
    scale = jmp.DynamicLossScale(2.0**-3, min_loss_scale=2.0**-24)
    assert float(scale.adjust(jnp.bool_(False)).loss_scale) == 2.0**-4
    assert find_nonfinite(loss, loss_scale=scale)(w, x).is_finite
    ranges = profile_ranges(lambda w, x: jnp.sum(jnp.sin(x @ w)) * 3e5)(w, x)
    assert float(ranges.dynamic_scale.loss_scale) == ranges.largest_safe_scale < 1
    assert ranges.dynamic_scale.min_loss_scale == 2.0**-24
    assert ", min_loss_scale=2.0**-24)." in ranges.summary()


# Other operations. Most are in test_broken_runs.py.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fun", "advice"),
    [
        (jnp.cbrt, "derivative of cbrt, which is infinite at 0"),
        (
            lambda w: w.astype(jnp.float16) / jnp.maximum(jnp.abs(w), 1e-12).astype(jnp.float16),
            "use float32 instead of float16",
        ),
    ],
)
def test_causes_behind_functions(fun, advice):
    loss = lambda w, x: jnp.sum(fun(w * 0)).astype(jnp.float32)
    assert advice in advice_of(loss, w, x)


@pytest.mark.slow
def test_values_of_8_bits():
    fun = lambda w, x: jnp.sum((x @ w).astype(jnp.float8_e5m2).astype(jnp.float32) + w[0])
    report = find_nonfinite(fun)(w, x * 1e7)
    assert (report.cause.operation, report.cause.result) == ("convert_element_type", "float8_e5m2[3,4]")


def test_the_report():
    report = find_nonfinite(lambda w, x: jnp.sum(jnp.log(w * 0)))(w, x)
    assert report.summary().startswith("The loss is -inf; the gradient is not finite; ")
    text = str(report)
    assert "It begins here:\ninf from log" in text
    assert "    takes float32[4,4], 0\n    gives float32[4,4], -inf" in text
    assert "A hint: The smallest operand of the logarithm is" in text
    assert repr(report).startswith("NonfiniteReport(inf from log")
    with pytest.raises(AttributeError):
        report.loss = 0.0
    fine = find_nonfinite(lambda w, x: jnp.sum(w * 0))(w, x)
    assert str(fine) == "The loss, 0, is finite, and the gradient is finite; the loss scale is 2**0."


def test_the_head_says_where_the_parameter_stands():
    head = lambda fun: str(find_nonfinite(fun)(w, x).cause).splitlines()[0]
    assert head(lambda w, x: jnp.sum(jnp.log(w * 0))) == "inf from log after w, forward pass"
    assert head(lambda w, x: jnp.sum(w / 0.0)) == "inf from div near w, forward pass"
    scoped = jax.named_scope("head")(lambda w, x: jnp.sum(jnp.log(w * 0)))
    assert head(scoped) == "inf from log in head, after w, forward pass"


@pytest.mark.slow
def test_a_derivative_that_only_the_backward_pass_reads():
    cause = find_nonfinite(lambda w, x: jnp.sum(jnp.sqrt(w * 0)))(w, x).cause
    assert cause.direction == "derivative"
    assert str(cause).startswith(
        "inf from div after w, a derivative that the forward pass computes and stores"
    )
    both = find_nonfinite(lambda w, x: jnp.sum(jnp.exp(w * 0 + 100)))(w, x).cause  # Its own derivative.
    assert both.direction == "forward"


@pytest.mark.slow
def test_an_overflow_that_the_next_iteration_makes_finite_and_wrong():
    def loss(w, x):
        def body(carry, _):
            return carry * carry, lax.rsqrt(carry)  # 300 * 300 is inf in float16, and its rsqrt 0.

        start = lax.stop_gradient(w[0, 0] * 0 + 300).astype(jnp.float16)
        return jnp.sum(w) + jnp.sum(lax.scan(body, start, length=3)[1][1:].astype(jnp.float32))

    report = find_nonfinite(loss)(w, x)
    assert report.is_finite
    assert report.cause.operation == "mul"
    text = " ".join(str(report).split())
    assert re.search(r"ends in rsqrt, .*test_find.py.*, whose result is finite; float32 here changes", text)


def test_an_inf_that_a_step_tests_for_is_named_though_its_results_are_finite():
    def step(w, x):
        new = w / x
        return jnp.where(jnp.isfinite(new).all(), new, w)

    report = find_nonfinite(step, value_and_grad_fn=None)(w, 0 * w)
    assert report.is_finite
    assert report.cause.operation == "div"


def test_a_step_has_its_own_scale_and_dtypes():
    with pytest.raises(ValueError, match=r"Leave dtype and loss_scale out.*Got None and 2.0"):
        find_nonfinite(lambda w: w, value_and_grad_fn=None, loss_scale=2.0)
    with pytest.raises(ValueError, match=r"Leave dtype and loss_scale out.*Got 'float16' and None"):
        doctor(lambda w: w, "float16", value_and_grad_fn=None)


def test_errors_say_what_was_given():
    loss = lambda w, x: jnp.sum(w)
    with pytest.raises(TypeError, match=r"takes a function first. Got 3"):
        find_nonfinite(3)
    with pytest.raises(TypeError, match=r"loss_scale should be None, a number, or a loss scale.*Got str"):
        find_nonfinite(loss, loss_scale="half")
    with pytest.raises(ValueError, match=r"above 0 and finite in float32.*Got 0"):
        find_nonfinite(loss, loss_scale=0.0)
    with pytest.raises(TypeError, match="Call it outside jit"):
        jax.jit(lambda w: find_nonfinite(loss)(w, x).loss)(w)
    with pytest.raises(TypeError, match="floating scalar"):
        find_nonfinite(lambda w: w)(w)


@pytest.mark.slow
def test_a_cause_in_the_forward_pass_stands_before_one_in_the_backward_pass():
    """log(softmax(x)) is -inf; its derivative is 0 / 0, which does not come from that inf."""

    def loss(w, x):
        return -jnp.mean(jnp.log(jax.nn.softmax(500 * (x @ w)))[:, 0])

    report = find_nonfinite(loss)(w, x)
    assert report.cause.operation == "log"
    assert "jax.nn.log_softmax" in report.hint
    assert (report.first_nan.operation, report.first_nan.direction) == ("div", "backward")
    assert "\n\nBeside it:\nNaN from div" in str(report)


class Overflowing(nn.Module):
    """Layers with a half dtype, of which the second one overflows."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, dtype=jnp.float16)(x)
        x = nn.Dense(8, dtype=jnp.float16)(200 * nn.relu(x))
        return nn.Dense(1, dtype=jnp.float16)(x)


@pytest.mark.slow
def test_the_layers_of_a_loss_that_is_jitted_are_remedies_as_they_are_without_jit():
    model, x = Overflowing(), jnp.full((4, 8), 300.0)
    params = model.init(jax.random.key(0), x)
    loss = lambda params: jnp.mean(model.apply(params, x).astype(jnp.float32)) * 1e-6
    plain, jitted = (find_nonfinite(fun)(params) for fun in (loss, jax.jit(loss)))
    assert plain.tried[0].change.startswith("dtype=jnp.float32 in Overflowing/Dense_0; dtype=")
    assert [trial.change for trial in jitted.tried] == [trial.change for trial in plain.tried]


def nearest(codes):
    z = jax.random.normal(jax.random.key(0), (16, 32)) * 200
    distances = jnp.sum((z.astype(jnp.float16)[:, None] - codes.astype(jnp.float16)) ** 2, -1)
    return jnp.mean((codes[jnp.argmin(distances, -1)] - z) ** 2)


def clipped(w):
    """The norm of `optax` squares the gradients in float16, in lines of the package."""
    x = jax.random.normal(jax.random.key(1), (32, 16)) * 4
    grads = jax.grad(lambda w: jnp.mean((x.astype(jnp.float16) @ w).astype(jnp.float32) ** 2))(
        w[:16, :4].astype(jnp.float16)
    )
    return jnp.sum(jnp.abs(grads / optax.tree.norm(grads)).astype(jnp.float32))


def wrong_twice(codes):
    """A mask of -inf beside an error that comes from elsewhere."""
    mask = jnp.where(jnp.arange(32) < 20, 0.0, -1e9).astype(jnp.float16)
    weights = jax.nn.softmax(codes.astype(jnp.float16) + mask)
    return jnp.sum(weights.astype(jnp.float32)) + nearest(codes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fun", "operation"),
    [(nearest, "integer_pow"), (clipped, "square"), (wrong_twice, "integer_pow")],
)
def test_an_inf_that_makes_finite_results_wrong_is_not_called_harmless(fun, operation):
    """It decides an `argmin`, or is a norm by which a package divides."""
    codes = jax.random.normal(jax.random.key(2), (20, 32)) * 200
    how = {"value_and_grad_fn": None} if fun is clipped else {}
    report = find_nonfinite(fun, **how)(codes)
    assert report.is_finite
    assert report.cause.operation == operation
    assert report.remedies[0].helps
    assert operation not in [each.operation for each in report.harmless]


TABLE = 300 * jnp.arange(1, 5, dtype=jnp.float16)


def test_an_inf_that_makes_a_result_wrong_is_not_harmless_where_no_edit_is_known():
    report = find_nonfinite(lambda x: jnp.sum(x * lax.rsqrt(TABLE * TABLE)))(jnp.ones(4))
    assert report.cause.operation == "mul"
    assert report.cause.end.startswith("rsqrt")
    assert not report.harmless
