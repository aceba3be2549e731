"""`find_nonfinite` on what users give: models of NNX and Equinox, options, loss scales."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jmp_lite as jmp
from jmp_lite import nnx as jmp_nnx
from jmp_lite.diagnostics import find_nonfinite
from tests.support.causes import cause_of, checked_report, half, w, x
from tests.support.policies import F16


class Tower(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)) * 6e4)


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("how", ["policy", "autocast"])
def test_an_nnx_model_is_named_by_its_parameters_and_stays_as_it_is(how):
    model = Tower(nnx.Rngs(0))
    loss = lambda model, x: jnp.mean(model(x * 10) ** 2)
    if how == "policy":
        model = jmp_nnx.with_policy(model, F16)
    else:
        loss = jmp.autocast(loss, jnp.float16)
    before = nnx.state(model)
    cause = cause_of(loss, model, x, value_and_grad_fn=nnx.value_and_grad)
    assert "model/" in cause.argument
    assert cause.result.startswith("float16")
    assert jax.tree.all(jax.tree.map(lambda a, b: a is b, before, nnx.state(model)))


def test_has_aux_argnums_and_keywords():
    loss = lambda x, *, w, power=2: (jnp.sum(1 / w**power) + jnp.sum(x), {"n": 3})
    report = find_nonfinite(loss, has_aux=True)(x, w=w * 0)
    assert report.cause.operation in ("integer_pow", "div")
    assert report.gradients == ()
    assert report.parameters == 1
    both = find_nonfinite(lambda a, b: jnp.sum(a / b), argnums=(0, 1))(w, w * 0)
    assert (both.parameters, both.gradients) == (2, ("0", "1"))


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize("number", [0, 1])
def test_a_parameter_may_be_one_of_the_arguments_that_have_no_name(number):
    arrays = [x, x]
    arrays[number] = jnp.full_like(x, jnp.inf)
    report = find_nonfinite(lambda *arrays: jnp.sum(arrays[0] * arrays[1]), argnums=number)(*arrays)
    assert f"The parameter {number} was not finite before the step" in report.hint


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize(
    "scale",
    [1024.0, jnp.float32(1024), jmp.StaticLossScale(1024.0), jmp.DynamicLossScale(1024.0)],
    ids=lambda scale: type(scale).__name__,
)
def test_the_loss_scale_may_be_a_number_or_a_loss_scale(scale):
    fun = half(lambda w, x: jnp.sum((w * 100).astype(jnp.float32)) * 10)
    assert find_nonfinite(fun, loss_scale=scale)(w, x).loss_scale == 1024
    assert not find_nonfinite(fun, loss_scale=scale)(w, x).is_finite
    assert find_nonfinite(fun)(w, x).is_finite


def test_a_loss_that_is_a_constant():
    report = find_nonfinite(lambda w, x: jnp.float32(3.0))(w, x)
    assert (report.loss, report.is_finite, report.gradients) == (3.0, True, ())


@pytest.mark.slow
def test_a_loss_in_half_carries_the_scale_in_half():
    loss = lambda w, x: jnp.mean((x @ w).astype(jnp.float16))
    report = checked_report(loss, w, x, scale=2.0**16)
    assert (report.cause.direction, report.cause.operation) == ("backward", "convert_element_type")
    assert [trial.loss_scale for trial in report.remedies] == [2.0**15]


@pytest.mark.slow
def test_a_step_with_adam_on_float16_parameters_names_the_state_to_keep_in_float32():
    """Its epsilon of 1e-8 is 0 in float16. docs/diagnosis.md quotes the remedy."""
    tx = optax.adam(1e-3)

    def train_step(params, opt_state, batch):
        grads = jax.grad(lambda params: jnp.mean((batch @ params["w"]).astype(jnp.float32)))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    halves = {"w": jnp.ones((4, 4), jnp.float16), "unused": jnp.ones(4, jnp.float16)}
    batch = jnp.linspace(-1, 1, 12).reshape(3, 4)
    report = find_nonfinite(train_step, value_and_grad_fn=None)(halves, tx.init(halves), batch)
    assert "0/unused" in report.gradients
    assert report.remedies[0].change == "pass these arguments in float32: opt_state"
