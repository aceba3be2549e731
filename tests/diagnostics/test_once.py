"""The tools run the Python of a function once, and make all their programs from its jaxpr."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jmp_lite as jmp
from jmp_lite._autocast.planner import Planner
from jmp_lite.diagnostics import compare_precision, doctor, find_nonfinite, profile_ranges
from tests.support.arrays import normal

X = normal(0, 8, 16)
PARAMS = {name: jnp.eye(16) for name in "abc"}


@pytest.fixture
def counts(monkeypatch):
    """How often the loss runs as Python, and how many planners are made."""
    found = {"python": 0, "planners": 0}
    make = Planner.__init__

    def counted(self, rules):
        found["planners"] += 1
        make(self, rules)

    monkeypatch.setattr(Planner, "__init__", counted)
    return found


def loss_of(counts):
    def loss(params, x):
        counts["python"] += 1
        for name in params:
            with jax.named_scope(name):
                x = jnp.tanh(x @ params[name])
        return jnp.mean(x**2)

    return loss


@pytest.mark.cases(fast=1, slow=9)
@pytest.mark.parametrize(
    ("tool", "planners"),
    [
        # Without autocast, with it, without each of the three modules, and with flags.
        pytest.param(lambda loss: doctor(loss, device=None), 6, id="doctor", marks=pytest.mark.slow),
        pytest.param(compare_precision, 6, id="compare_precision"),
        (lambda loss: find_nonfinite(jmp.autocast(loss, "float16")), 1),
        (lambda loss: profile_ranges(jmp.autocast(loss, "float16")), 1),
    ],
)
def test_the_function_is_traced_once(tool, planners, counts):
    tool(loss_of(counts))(PARAMS, X)
    assert counts == {"python": 1, "planners": planners}


@pytest.mark.slow
def test_a_step_is_traced_once(counts):
    tx, loss = optax.sgd(0.1), loss_of(counts)

    def step(params, opt_state, x):
        grads = jax.grad(jmp.autocast(loss, "bfloat16"))(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    diagnosis = doctor(step, value_and_grad_fn=None, device=None)(PARAMS, tx.init(PARAMS), X)
    assert counts["python"] == 1
    assert diagnosis.nonfinite.is_finite


@pytest.mark.slow
def test_an_nnx_module_that_a_call_updates_is_replayed(counts):
    class Model(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(16, 4, rngs=nnx.Rngs(0))
            self.norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))

        def __call__(self, x):
            counts["python"] += 1
            return self.norm(self.linear(x))

    model = Model()
    mean = np.asarray(model.norm.mean[...])
    loss = lambda model, x: jnp.mean(model(x) ** 3)
    report = compare_precision(loss, "bfloat16", value_and_grad_fn=nnx.value_and_grad, tolerance=0)(model, X)
    assert counts["python"] == 1
    assert report.names == ("model/linear",)
    assert 0 < report.half.gradients < 0.1
    np.testing.assert_array_equal(model.norm.mean[...], mean)  # A diagnosis leaves the model as it was.


def test_the_loss_and_its_gradients_are_those_of_the_function():
    loss = lambda params, x: 1e30 * jnp.mean(x @ params["a"]) ** 3
    report = find_nonfinite(loss, loss_scale=2.0)(PARAMS, X)
    assert report.loss == pytest.approx(float(loss(PARAMS, X)))
    assert report.parameters == 3
