"""`nnx.with_policy`: every kind of layer against float32, in training and evaluation."""

import copy
import functools
import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jmp_lite as jmp
from jmp_lite._flax import nnx as _nnx
from jmp_lite.linen import with_policy as linen_with_policy
from jmp_lite.nnx import with_policy
from tests.support.closeness import assert_close
from tests.support.jaxprs import equations, products
from tests.support.nnx_layers import (
    MODELS,
    ConvNet,
    OwnParams,
    Recurrent,
    each_model,
    loss_fn,
    products_of_grad,
)
from tests.support.policies import BF16, F16, IMAGES, SEQUENCE, each_policy


@nnx.jit
def run(model, x):
    (_, y), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, x)
    return y, nnx.as_pure(grads)


@pytest.mark.cases(slow=1)
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


@pytest.mark.cases(fast=1, slow=0)
@each_model
def test_every_product_of_forward_and_backward_takes_half_operands(make, x):
    dtypes = products_of_grad(with_policy(make(nnx.Rngs(0)), F16), x)
    assert len(dtypes) >= 3
    assert set(dtypes) == {("float16", "float16")}


@pytest.mark.cases(fast=1, slow=0)
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


@pytest.mark.cases(slow=1)
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


def test_a_recurrent_carry_stays_float32():
    model = with_policy(Recurrent(nnx.LSTMCell, nnx.Rngs(0)), F16)
    graphdef, state = nnx.split(model)
    jaxpr = jax.make_jaxpr(lambda state, x: nnx.merge(graphdef, state)(x))(state, SEQUENCE)
    scans = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "scan"]
    carry = [v.aval.dtype.name for eqn in scans for v in eqn.outvars if v.aval.shape == (4, 8)]
    assert carry == ["float32", "float32"]


# Rules, methods, state, transforms, an optimizer


def test_rules_keep_parts_in_float32():
    model = ConvNet(nnx.Rngs(0))
    half = with_policy(model, F16.with_rules({"head": "float32", "bn": "p=f32,c=f32,o=f16"}))
    dtypes = products_of_grad(half, IMAGES)
    assert sorted(set(dtypes)) == [("float16",) * 2, ("float32",) * 2]
    assert dtypes.count(("float32", "float32")) == 3  # The head: forward, and two backward.


def test_rules_name_single_parameters_of_modules_that_users_write():
    model = with_policy(OwnParams(nnx.Rngs(0)), F16.with_rules({"/kernel": "float32"}))
    jaxpr = jax.make_jaxpr(lambda x: model.encode(x))(SEQUENCE)
    operands = [v.aval.dtype.name for e in equations(jaxpr) if "dot" in e.primitive.name for v in e.invars]
    assert operands == ["float32", "float32"]


def test_a_rule_for_one_parameter_of_a_layer_is_an_error():
    with pytest.raises(ValueError, match="Let the rule name the layer, 'head'"):
        with_policy(ConvNet(nnx.Rngs(0)), F16.with_rules({"head/bias": "float32"}))


def test_a_rule_that_matches_nothing_is_an_error_naming_the_nearest():
    with pytest.raises(ValueError, match=r"matches no parameter. Nearest: 'head'"):
        with_policy(ConvNet(nnx.Rngs(0)), F16.with_rules({"haed": "float32"}))


def test_all_public_methods_run_under_the_policy_and_state_changes_stay():
    model = with_policy(OwnParams(nnx.Rngs(0)), BF16)
    assert model.encode(SEQUENCE).dtype == jnp.float32
    assert products(model.encode, SEQUENCE) == [("bfloat16", "bfloat16")]
    model(SEQUENCE)
    nnx.jit(lambda m, x: m(x))(model, SEQUENCE)
    assert model.calls[...] == 2
    assert model.kernel[...].dtype == jnp.float32


def test_autocast_takes_a_model_among_other_arguments():
    model, half = nnx.Linear(6, 3, rngs=nnx.Rngs(0)), jmp.autocast(lambda model, x: model(x), "float16")
    assert products(lambda x: half(model, x), SEQUENCE) == [("float16", "float16")]
    np.testing.assert_allclose(half(model, SEQUENCE), model(SEQUENCE), atol=0.01)


def test_inside_another_model_the_innermost_policy_wins():
    class Outer(nnx.Module):
        def __init__(self, rngs):
            self.inner = with_policy(nnx.Linear(6, 6, rngs=rngs), jmp.get_policy("float32"))
            self.head = nnx.Linear(6, 3, rngs=rngs)

        def __call__(self, x):
            return self.head(self.inner(x))

    model = with_policy(Outer(nnx.Rngs(0)), F16)
    assert products(lambda x: model(x), SEQUENCE) == [("float32",) * 2, ("float16",) * 2]
    with pytest.raises(ValueError, match="under a policy already"):
        with_policy(model, F16)


def test_an_attribute_policy_of_the_model_stays():
    class Agent(nnx.Module):
        def __init__(self):
            self.policy = nnx.Linear(6, 2, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.policy(x)

    model = with_policy(Agent(), F16)
    assert isinstance(model.policy, nnx.Linear)
    assert model(SEQUENCE).shape == (4, 9, 2)


@pytest.mark.slow
def test_a_run_that_is_repeated_in_float32_between_layers_counts_once():
    class Counts(nnx.Module):
        def __init__(self):
            self.dense, self.norm = nnx.Linear(6, 6, rngs=nnx.Rngs(0)), nnx.BatchNorm(6, rngs=nnx.Rngs(0))
            self.calls = nnx.Variable(jnp.int32(0))

        def __call__(self, x, rngs):
            self.calls[...] += 1
            noise = jax.random.normal(rngs.noise(), x.shape)
            return nnx.fori_loop(0, 2, lambda _, v: (v[0], v[0](v[1])), (self.dense, self.norm(x) + x))[
                1
            ], noise

    plain, rngs, other = Counts(), nnx.Rngs(noise=0), nnx.Rngs(noise=0)
    half = with_policy(plain, F16)
    (y, noise), (expected, wanted) = half(SEQUENCE, rngs), plain(SEQUENCE, other)
    np.testing.assert_allclose(y, expected, atol=0.02)
    np.testing.assert_array_equal(noise, wanted)
    assert half.calls[...] == 1
    np.testing.assert_allclose(half.norm.mean[...], plain.norm.mean[...], atol=1e-6)


def test_the_same_class_under_a_policy_is_one_type_so_that_jit_compiles_once():
    assert type(with_policy(ConvNet(nnx.Rngs(0)), F16)) is type(with_policy(ConvNet(nnx.Rngs(1)), F16))


@pytest.mark.slow
def test_an_optimizer_trains_in_float16_and_skips_the_bad_step():
    model = with_policy(ConvNet(nnx.Rngs(0)), F16)
    tx = jmp.with_loss_scale(optax.adam(1e-2), jmp.DynamicLossScale(2.0**10, period=2))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    traces = []

    @nnx.jit
    def step(model, optimizer, x):
        traces.append(None)
        scaled = jmp.value_and_grad(
            loss_fn, jmp.get_loss_scale(optimizer), has_aux=True, value_and_grad_fn=nnx.value_and_grad
        )
        (loss, _), grads = scaled(model, x)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer, IMAGES)) for _ in range(4)]
    assert losses[-1] < losses[0]
    assert jmp.get_loss_scale(optimizer).loss_scale == 2.0**12
    before = jax.tree.map(np.asarray, nnx.as_pure(nnx.state(model, nnx.Param)))
    step(model, optimizer, IMAGES.at[0].set(jnp.inf))
    jax.tree.map(np.testing.assert_array_equal, nnx.as_pure(nnx.state(model, nnx.Param)), before)
    assert not jmp.grads_finite(optimizer)
    assert jmp.get_metrics(optimizer)["skipped_steps"] == 1
    assert jmp.get_loss_scale(optimizer).loss_scale == 2.0**11
    assert len(traces) == 1
    with pytest.raises(FloatingPointError, match="all but head/bias, up/bias"):
        jmp.raise_if_stuck(optimizer, max_consecutive_skips=1)


def test_modules_that_rewrite_parameters_see_them_unrounded():
    inner = nnx.Linear(6, 4, rngs=nnx.Rngs(0))
    model = with_policy(nnx.WeightNorm(inner, rngs=nnx.Rngs(0)), BF16)
    plain = nnx.clone(nnx.WeightNorm(inner, rngs=nnx.Rngs(0)))
    np.testing.assert_allclose(model(SEQUENCE), plain(SEQUENCE), atol=0.05)
    kernel, expected = model.layer_instance.kernel[...], plain.layer_instance.kernel[...]
    assert kernel.dtype == jnp.float32
    np.testing.assert_array_equal(kernel, expected)


def test_a_dict_of_parameters_keeps_its_entries():
    class Model(nnx.Module):
        def __init__(self):
            self.weights = nnx.Dict(
                {"first": nnx.Param(jnp.ones((6, 6))), "second": nnx.Param(jnp.ones((6, 6)))}
            )

        def __call__(self, x):
            for w in self.weights.values():
                x = x.astype(w.dtype) @ w
            return x

    model = with_policy(Model(), BF16)
    assert set(model.weights) == {"first", "second"}
    assert products(model, SEQUENCE) == [("bfloat16", "bfloat16")] * 2


def test_methods_under_nnx_jit_run_under_the_policy():
    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones((6, 6)))

        @nnx.jit
        def encode(self, x):
            return x.astype(self.w.dtype) @ self.w

    model = with_policy(Model(), BF16)
    assert products(model.encode, SEQUENCE) == [("bfloat16", "bfloat16")]


def test_the_attend_of_an_embedding_gives_the_output_dtype():
    model = with_policy(nnx.Embed(4, 6, rngs=nnx.Rngs(0)), BF16)
    assert model.attend(SEQUENCE).dtype == jnp.float32
    assert products(model.attend, SEQUENCE) == [("bfloat16", "bfloat16")]


def test_a_linen_module_inside_is_an_error_that_says_what_to_do():
    wrap = lambda module: nnx.Sequential(nnx.bridge.ToNNX(module, rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError, match=r"jmp_lite\.linen\.with_policy"):
        with_policy(wrap(nn.Dense(3)), F16)
    model = nnx.bridge.lazy_init(with_policy(wrap(linen_with_policy(nn.Dense(3), F16)), F16), SEQUENCE)
    assert model(SEQUENCE).dtype == jnp.float32


def test_the_state_of_a_model_can_be_pickled_and_the_model_cannot():
    model = with_policy(ConvNet(nnx.Rngs(0)), F16.with_rules({"head": "float32"}))
    with pytest.raises(pickle.PicklingError, match="ConvNet"):
        pickle.dumps(model)
    restored = with_policy(ConvNet(nnx.Rngs(1)), F16.with_rules({"head": "float32"}))
    nnx.update(restored, pickle.loads(pickle.dumps(nnx.state(model))))
    np.testing.assert_array_equal(restored(IMAGES), model(IMAGES))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, nnx.clone])
def test_a_model_can_be_copied(duplicate):
    model = with_policy(OwnParams(nnx.Rngs(0)), F16)
    other = duplicate(model)
    assert type(other) is type(model)
    assert products(other.encode, SEQUENCE) == [("float16", "float16")]
    model(SEQUENCE)
    assert other.calls[...] == (1 if duplicate is copy.copy else 0)


def test_the_classes_that_a_notebook_makes_again_and_again_are_not_all_kept():
    layer = functools.partial(_nnx._subclass, layer=False)
    for _ in range(2 * _nnx._subclass.cache_info().maxsize):
        layer(type("Model", (nnx.Module,), {}))
    info = _nnx._subclass.cache_info()
    assert info.currsize == info.maxsize
    assert layer(nnx.Linear) is layer(nnx.Linear)
