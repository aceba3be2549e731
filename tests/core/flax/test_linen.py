"""`linen.with_policy`: every kind of layer against float32, in training and evaluation."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_lite as jmp
from jmp_lite.linen import with_policy
from tests.support.closeness import assert_close
from tests.support.jaxprs import products
from tests.support.linen_layers import MODELS, ConvNet, each_model, loss_fn, variables_of
from tests.support.policies import BF16, F16, IMAGES


@pytest.mark.cases(slow=1)
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


@pytest.mark.slow
def test_param_dtype_of_the_policy_is_that_of_the_initial_parameters():
    variables = with_policy(ConvNet(), jmp.get_policy("O2")).init(jax.random.key(0), IMAGES, train=False)
    dtypes = jax.tree.map(lambda leaf: leaf.dtype.name, variables)
    assert set(jax.tree.leaves(dtypes["params"]["Conv_0"])) == {"float16"}
    assert set(jax.tree.leaves(dtypes["params"]["BatchNorm_0"])) == {"float32"}
    assert set(jax.tree.leaves(dtypes["batch_stats"])) == {"float32"}


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("module", ["linen", "nnx"])
def test_without_flax_the_import_names_the_package(module):
    script = f"import sys; sys.modules['flax'] = None; import jmp_lite; import jmp_lite.{module}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert f"jmp_lite.{module} needs Flax: pip install flax." in done.stderr
    assert "ModuleNotFoundError" in done.stderr
