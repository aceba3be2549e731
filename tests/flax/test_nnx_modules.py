"""`nnx.with_policy`: rules, methods, state, transforms, and training with an `nnx.Optimizer`."""

import copy
import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jmp_lite as jmp
from jmp_lite.linen import with_policy as linen_with_policy
from jmp_lite.nnx import with_policy
from tests.support.jaxprs import equations, products
from tests.support.nnx_layers import ConvNet, OwnParams, loss_fn, products_of_grad
from tests.support.policies import BF16, F16, IMAGES, SEQUENCE


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
    assert operands == ["float16", "float32"]


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


def test_random_number_streams_advance_when_given_as_an_argument():
    class Noisy(nnx.Module):
        def __call__(self, x, rngs):
            return x + rngs.noise.normal(x.shape)

    model, rngs = with_policy(Noisy(), F16), nnx.Rngs(noise=0)
    assert not np.array_equal(model(SEQUENCE, rngs), model(SEQUENCE, rngs))


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


@pytest.mark.slow
def test_transforms_run_under_the_policy():
    ensemble = nnx.vmap(OwnParams, in_axes=0)(nnx.Rngs(0).split(3))
    half = with_policy(ensemble, F16)
    apply = nnx.vmap(lambda m, x: m(x), in_axes=(0, None))
    assert set(products(lambda x: apply(nnx.clone(half), x), SEQUENCE)) == {("float16", "float16")}
    np.testing.assert_allclose(apply(half, SEQUENCE), apply(ensemble, SEQUENCE), atol=0.02)
    model = with_policy(OwnParams(nnx.Rngs(0)), F16)
    remat = nnx.remat(lambda m, x: m(x))
    run = lambda x: nnx.grad(lambda m, x: remat(m, x).sum())(nnx.clone(model), x)
    assert set(products(run, SEQUENCE)) == {("float16", "float16")}


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
            loss_fn, jmp.get_loss_scale(optimizer), has_aux=True, transform=nnx.value_and_grad
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
    assert jmp.metrics(optimizer)["skipped_steps"] == 1
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


def test_methods_under_nnx_jit_run_under_the_policy():
    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones((6, 6)))

        @nnx.jit
        def encode(self, x):
            return x @ self.w

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
