"""`nnx.with_policy`: every kind of layer against float32, in training and evaluation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jmp_lite as jmp
from jmp_lite.nnx import with_policy
from tests.support.closeness import assert_close
from tests.support.jaxprs import equations
from tests.support.nnx_layers import MODELS, ConvNet, Recurrent, each_model, loss_fn, products_of_grad
from tests.support.policies import BF16, F16, IMAGES, SEQUENCE, each_policy


@nnx.jit
def run(model, x):
    (_, y), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, x)
    return y, nnx.as_pure(grads)


@pytest.mark.cases(fast=0, slow=3)
@pytest.mark.parametrize(
    ("name", "policy", "train"),
    [
        *((name, F16, True) for name in MODELS),
        *((name, F16, False) for name in ("convolutions", "attention")),
        *((name, BF16, True) for name in ("convolutions", "attention", "nnx.RNN(LSTMCell)")),
    ],
)
def test_agrees_with_float32_in_outputs_gradients_and_statistics(name, policy, train):
    make, x = MODELS[name]
    model = make(nnx.Rngs(0))
    half_model = with_policy(model, policy)
    for m in (model, half_model):
        m.train() if train else m.eval()
    y, grads = run(model, x)
    half_y, half_grads = run(half_model, x)
    assert half_y.dtype == jnp.float32
    assert not np.array_equal(half_y, y)  # It did run in half precision.
    assert_close(half_y, y, policy.compute_dtype, 8)
    assert_close(half_grads, grads, policy.compute_dtype, 16)
    stats, half_stats = (nnx.as_pure(nnx.state(m, nnx.BatchStat)) for m in (model, half_model))
    assert_close(half_stats, stats, policy.compute_dtype, 8)
    assert {leaf.dtype for leaf in jax.tree.leaves((half_grads, half_stats))} == {jnp.dtype("float32")}


@pytest.mark.slow
def test_the_fast_attention_of_jax_runs_in_half_too():
    """Without dropout Flax calls `jax.nn.dot_product_attention`, which knows no float16 on a CPU."""
    model = nnx.MultiHeadAttention(2, 16, decode=False, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(4), (3, 7, 16))
    half_model = with_policy(model, BF16)
    (y, grads), (half_y, half_grads) = run(model, x), run(half_model, x)
    assert_close(half_y, y, jnp.bfloat16, 8)
    assert_close(half_grads, grads, jnp.bfloat16, 16)
    assert ("bfloat16", "bfloat16") in products_of_grad(half_model, x)
    assert ("float32", "float32") not in products_of_grad(half_model, x)


@pytest.mark.cases(fast=1, slow=3)
@each_model
def test_every_product_of_forward_and_backward_takes_half_operands(make, x):
    dtypes = products_of_grad(with_policy(make(nnx.Rngs(0)), F16), x)
    assert len(dtypes) >= 3
    assert set(dtypes) == {("float16", "float16")}


@pytest.mark.cases(fast=3, slow=0)
@each_model
def test_the_state_keeps_its_paths_values_and_dtypes(make, x):
    model = make(nnx.Rngs(0))
    before, after = nnx.state(model), nnx.state(with_policy(model, F16))
    assert jax.tree.structure(before) == jax.tree.structure(after)
    values = lambda state: [nnx.as_pure(v) for v in jax.tree.leaves(state)]
    for a, b in zip(values(before), values(after), strict=True):
        assert a is b or (a == b).all()
        assert a.dtype == b.dtype


def test_the_plain_model_is_not_changed_and_checkpoints_fit():
    model = ConvNet(nnx.Rngs(0))
    wrapped = with_policy(model, F16)
    assert type(model) is ConvNet
    assert isinstance(wrapped, ConvNet)
    assert model.conv.dtype is None
    assert set(products_of_grad(model, IMAGES)) == {("float32", "float32")}
    nnx.update(wrapped, nnx.state(ConvNet(nnx.Rngs(1))))  # A checkpoint of a plain model.
    assert set(products_of_grad(wrapped, IMAGES)) == {("float16", "float16")}
    np.testing.assert_array_equal(wrapped.conv.kernel[...], ConvNet(nnx.Rngs(1)).conv.kernel[...])


def test_param_dtype_of_the_policy_is_that_of_the_parameters():
    model = with_policy(ConvNet(nnx.Rngs(0)), jmp.get_policy("O2"))
    dtype = lambda layer: {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(layer))}
    assert dtype(model.conv) == {"float16"}
    assert dtype(model.bn) == {"float32"}
    assert model.bn.dtype == jnp.float32


@each_policy
def test_batch_statistics_are_not_rounded_and_may_exceed_float16(policy):
    model = with_policy(nnx.BatchNorm(2, momentum=0.0, rngs=nnx.Rngs(0)), policy)
    x = 3.0 + 600.0 * jax.random.normal(jax.random.key(0), (64, 2))  # A variance of 360,000.
    model(x)
    variance = model.var[...]
    assert (variance > 65504).all()
    assert not np.array_equal(variance, variance.astype(policy.compute_dtype).astype(jnp.float32))
    model.eval()
    expected = (x - model.mean[...]) / jnp.sqrt(variance)
    atol = 16 * float(jnp.finfo(policy.compute_dtype).eps)
    np.testing.assert_allclose(model(x), expected, atol=atol)
    by_dtype = nnx.BatchNorm(2, dtype=jnp.float16, use_running_average=True, rngs=nnx.Rngs(0))
    by_dtype.mean[...], by_dtype.var[...] = model.mean[...], variance
    assert (by_dtype(x) == 0).all()  # What the layer's own dtype gives: the variance became inf.


def test_the_gradient_of_a_weight_in_a_scan_is_summed_in_float32():
    class Step(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.float32(1))

        def __call__(self, x):
            return self.w * x

    class Sum(nnx.Module):
        def __init__(self):
            self.step = Step()

        def __call__(self, x):
            return nnx.scan(lambda step, x: step(x), in_axes=(None, 0), out_axes=0)(self.step, x)

    grads = nnx.grad(lambda m: m(jnp.ones(10_009)).sum())(with_policy(Sum(), BF16))
    assert grads["step"]["w"][...] == 10_009


@each_policy
def test_a_recurrent_carry_stays_float32(policy):
    model = with_policy(Recurrent(nnx.LSTMCell, nnx.Rngs(0)), policy)
    graphdef, state = nnx.split(model)
    jaxpr = jax.make_jaxpr(lambda state, x: nnx.merge(graphdef, state)(x))(state, SEQUENCE)
    scans = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "scan"]
    carry = [v.aval.dtype.name for eqn in scans for v in eqn.outvars if v.aval.shape == (4, 8)]
    assert carry == ["float32", "float32"]
