"""`linen.with_policy`: every kind of layer against float32, in training and evaluation."""

import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_lite as jmp
from jmp_lite.linen import with_policy
from tests.support.closeness import assert_close
from tests.support.jaxprs import equations, products
from tests.support.linen_layers import MODELS, ConvNet, Recurrent, each_model, loss_fn, variables_of
from tests.support.policies import BF16, F16, IMAGES, each_policy


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize(
    ("name", "policy", "train"),
    [
        *((name, F16, True) for name in MODELS),
        *((name, F16, False) for name in ("convolutions", "attention")),
        *((name, BF16, True) for name in ("convolutions", "attention", "nn.RNN(LSTMCell)")),
    ],
)
def test_agrees_with_float32_in_outputs_gradients_and_statistics(name, policy, train):
    model, x = MODELS[name]
    params, others = variables_of(model, x)
    run = jax.jit(jax.value_and_grad(loss_fn, has_aux=True), static_argnums=(2, 4))
    (_, (y, stats)), grads = run(params, others, model, x, train)
    (_, (half_y, half_stats)), half_grads = run(params, others, with_policy(model, policy), x, train)
    assert half_y.dtype == jnp.float32
    assert not np.array_equal(half_y, y)  # It did run in half precision.
    assert_close(half_y, y, policy.compute_dtype, 8)
    assert_close(half_grads, grads, policy.compute_dtype, 16)
    assert_close(half_stats, stats, policy.compute_dtype, 8)
    assert {leaf.dtype for leaf in jax.tree.leaves((half_grads, half_stats))} == {jnp.dtype("float32")}


@pytest.mark.cases(slow=2)
@each_model
def test_every_product_of_forward_and_backward_takes_half_operands(model, x):
    params, others = variables_of(model, x)
    wrapped = with_policy(model, F16)
    dtypes = products(jax.grad(lambda p: loss_fn(p, others, wrapped, x, True)[0]), params)
    assert len(dtypes) >= 3
    assert set(dtypes) == {("float16", "float16")}


@pytest.mark.cases(slow=1)
@each_model
def test_parameters_keep_their_paths_values_and_dtype(model, x):
    plain = model.init(jax.random.key(0), x, train=False)
    wrapped = with_policy(model, F16).init(jax.random.key(0), x, train=False)
    jax.tree.map(np.testing.assert_array_equal, wrapped, plain)
    assert jax.tree.map(lambda x: x.dtype, wrapped) == jax.tree.map(lambda x: x.dtype, plain)


def test_param_dtype_of_the_policy_is_that_of_the_initial_parameters():
    variables = with_policy(ConvNet(), jmp.get_policy("O2")).init(jax.random.key(0), IMAGES, train=False)
    dtypes = jax.tree.map(lambda leaf: leaf.dtype.name, variables)
    assert set(jax.tree.leaves(dtypes["params"]["Conv_0"])) == {"float16"}
    assert set(jax.tree.leaves(dtypes["params"]["BatchNorm_0"])) == {"float32"}
    assert set(jax.tree.leaves(dtypes["batch_stats"])) == {"float32"}


@pytest.mark.cases(fast=1, slow=0)
@each_policy
def test_batch_statistics_are_not_rounded_and_may_exceed_float16(policy):
    model = with_policy(nn.BatchNorm(momentum=0.0), policy)
    x = 3.0 + 600.0 * jax.random.normal(jax.random.key(0), (64, 2))  # A variance of 360,000.
    variables = model.init(jax.random.key(0), x, use_running_average=False)
    _, new = model.apply(variables, x, use_running_average=False, mutable=["batch_stats"])
    variance = new["batch_stats"]["var"]
    assert (variance > 65504).all()
    assert not np.array_equal(variance, variance.astype(policy.compute_dtype).astype(jnp.float32))
    y = model.apply({**variables, **new}, x, use_running_average=True)
    expected = (x - new["batch_stats"]["mean"]) / jnp.sqrt(variance)
    np.testing.assert_allclose(y, expected, atol=16 * float(jnp.finfo(policy.compute_dtype).eps))


@pytest.mark.slow
def test_the_gradient_of_a_weight_in_a_scan_is_summed_in_float32():
    class Sum(nn.Module):
        @nn.compact
        def __call__(self, x):
            class Step(nn.Module):
                @nn.compact
                def __call__(self, carry, x):
                    w = self.param("w", nn.initializers.ones, ())
                    return carry, w * x

            scan = nn.scan(Step, variable_broadcast="params", split_rngs={"params": False})
            return scan(name="step")(jnp.float32(0), x)[1]

    x = jnp.ones(10_009)
    model = with_policy(Sum(), BF16)
    params = model.init(jax.random.key(0), x)
    grads = jax.grad(lambda p: model.apply(p, x).sum())(params)
    assert grads["params"]["step"]["w"] == 10_009


@pytest.mark.slow
def test_a_recurrent_carry_stays_float32():
    cell = nn.LSTMCell(4)
    carry = cell.initialize_carry(jax.random.key(0), (2, 3))
    model = with_policy(Recurrent(cell), F16)
    x = jnp.ones((2, 5, 3))
    params = model.init(jax.random.key(0), x, train=False)
    scans = [
        eqn
        for eqn in equations(jax.make_jaxpr(lambda p: model.apply(p, x, train=False))(params))
        if eqn.primitive.name == "scan"
    ]
    dtypes = [{v.aval.dtype.name for v in eqn.outvars if v.aval.shape == carry[0].shape} for eqn in scans]
    assert {"float32"} in dtypes


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("module", ["linen", "nnx"])
def test_without_flax_the_import_names_the_package(module):
    script = f"import sys; sys.modules['flax'] = None; import jmp_lite; import jmp_lite.{module}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert f"jmp_lite.{module} needs Flax: pip install flax." in done.stderr
    assert "ModuleNotFoundError" in done.stderr
